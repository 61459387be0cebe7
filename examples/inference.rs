//! An inference loop on four streams with a thread each: page-locked input and output, a batch on the device, and
//! scratch memory that comes from the cache from the second round on.
//!
//! ```text
//! cargo run --example inference --features sim
//! ```
//!
//! Runs on the GPU if there is one, else on the simulator.

use std::error::Error;
use std::thread;

use cualloc::driver::{Context, Driver};
use cualloc::{Allocator, Config, DeviceBuffer, PinnedBuffer};

const STREAMS: usize = 4;
const ROUNDS: usize = 50;
const BATCH: usize = 64 << 10;

type Outcome = Result<f32, Box<dyn Error + Send + Sync>>;

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let driver = Driver::load_or_simulate()?;
    let context = driver.context(0)?;
    let allocator = Allocator::with_config(&context, Config::from_env()?)?;

    // An `Allocator` is a handle: threads share one, by reference or by a clone.
    let sums = thread::scope(|scope| {
        let workers: Vec<_> = (0..STREAMS)
            .map(|number| {
                let (allocator, context) = (&allocator, &context);
                scope.spawn(move || serve(allocator, context, number))
            })
            .collect();
        let joined = workers.into_iter().map(|worker| worker.join());
        joined
            .map(|result| result.unwrap_or_else(|_| Err("a worker panicked".into())))
            .collect::<Vec<Outcome>>()
    });
    for (number, sum) in sums.into_iter().enumerate() {
        let expected = (number * BATCH) as f32;
        assert_eq!(sum?, expected, "what came back is what was sent");
    }

    println!("{}", allocator.stats());
    allocator.close()?;
    Ok(())
}

/// The work of one thread: its stream orders everything, so the host waits only for the result.
fn serve(allocator: &Allocator, context: &Context, number: usize) -> Outcome {
    let stream = allocator.create_stream()?;
    let mut input = PinnedBuffer::<f32>::zeroed(context, BATCH)?;
    let mut output = PinnedBuffer::<f32>::zeroed(context, BATCH)?;
    for _ in 0..ROUNDS {
        input.fill(number as f32);
        let mut batch = DeviceBuffer::<f32>::zeroed(allocator, BATCH, &stream)?;
        let upload = batch.upload(input, &stream)?;

        // Here kernels would go. Scratch memory may be freed as soon as the last launch has returned.
        let mut scratch = DeviceBuffer::<f32>::zeroed(allocator, BATCH, &stream)?;
        scratch.copy_from(&batch.as_slice(), &stream)?;
        batch.copy_from(&scratch.as_slice(), &stream)?;
        drop(scratch);

        let download = batch.download(output, &stream)?;
        // A copy owns its page-locked memory until it is complete.
        input = upload.wait()?;
        output = download.wait()?;
    }
    Ok(output.iter().sum())
}
