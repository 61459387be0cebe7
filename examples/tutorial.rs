//! The whole program of the tutorial (`docs/tutorial.md`): buffers and copies, a kernel, two streams, a pool, a limit, a
//! failed request, and a recording.
//!
//! ```text
//! cargo run --example tutorial --features sim
//! ```

use std::error::Error;
use std::ffi::CStr;

use cualloc::driver::sys::CUresult;
use cualloc::driver::{Driver, Function, Module, Stream};
use cualloc::pool::TypedPool;
use cualloc::record::{Context, Recorder, Target};
use cualloc::resource::Access;
use cualloc::{Allocator, Config, DeviceBuffer, PinnedBuffer};

const LEN: usize = 1 << 20;

/// `y[i] = a * x[i] + y[i]` for each `i` below `n`.
const KERNELS: &CStr = c"
.version 6.0
.target sm_50
.address_size 64
.visible .entry axpy(.param .u64 x, .param .u64 y, .param .f32 a, .param .u32 n)
{
    .reg .pred %p<2>;
    .reg .b32 %r<5>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<4>;

    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r1, %r1, %r2, %r3;
    ld.param.u32 %r4, [n];
    setp.ge.u32 %p1, %r1, %r4;
    @%p1 ret;
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd2, %rd2;
    mul.wide.u32 %rd3, %r1, 4;
    add.u64 %rd1, %rd1, %rd3;
    add.u64 %rd2, %rd2, %rd3;
    ld.param.f32 %f1, [a];
    ld.global.f32 %f2, [%rd1];
    ld.global.f32 %f3, [%rd2];
    fma.rn.f32 %f3, %f1, %f2, %f3;
    st.global.f32 [%rd2], %f3;
    ret;
}
";

/// Queues `y += a * x` on a stream.
fn axpy(
    kernel: Option<&Function>,
    stream: &Stream,
    a: f32,
    x: &DeviceBuffer<f32>,
    y: &mut DeviceBuffer<f32>,
) -> Result<(), Box<dyn Error>> {
    let Some(kernel) = kernel else {
        // The simulated device runs no kernels of programs, so the host computes.
        let (x, mut sums) = (x.to_vec()?, y.to_vec()?);
        sums.iter_mut().zip(x).for_each(|(y, x)| *y += a * x);
        return Ok(y.copy_from_slice(&sums)?);
    };
    x.prepare_use(stream, Access::Read)?;
    y.prepare_use(stream, Access::ReadWrite)?;
    let n = u32::try_from(x.len().min(y.len()))?;
    let (from, to) = (x.as_device_ptr(), y.as_device_ptr());
    let (grid, block) = ([n.div_ceil(256), 1, 1], [256, 1, 1]);
    // SAFETY: the kernel takes two addresses of n numbers, a number and n; both buffers are ordered with the stream.
    unsafe { kernel.launch(stream, grid, block, 0, &[&from, &to, &a, &n]) }?;
    x.finish_use(stream, Access::Read)?;
    y.finish_use(stream, Access::ReadWrite)?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::temp_dir().join("tutorial.rec");
    let recorder = Recorder::start(Target::File(&path))?;

    let driver = Driver::load_or_simulate()?;
    let context = driver.context(0)?;
    let allocator = Allocator::with_config(&context, Config::new().limit(Some(64 << 20)))?;
    let stream = allocator.create_stream()?;

    Context::new("model").enter();
    let numbers: Vec<f32> = (0..LEN).map(|i| (i % 1000) as f32).collect();
    let x = DeviceBuffer::from_slice(&allocator, &numbers, &stream)?;
    let mut y = DeviceBuffer::<f32>::zeroed(&allocator, LEN, &stream)?;

    let module = Module::from_ptx(&context, KERNELS)?;
    let kernel = match module.function(c"axpy") {
        Ok(kernel) => Some(kernel),
        // The simulated device knows no kernels of programs.
        Err(error) if error.code() == CUresult::CUDA_ERROR_NOT_FOUND => None,
        Err(error) => return Err(error.into()),
    };
    axpy(kernel.as_ref(), &stream, 2.0, &x, &mut y)?;

    let copies = allocator.create_stream()?;
    let mut host = PinnedBuffer::from_slice(&context, &numbers)?;
    for _ in 0..3 {
        let mut next = DeviceBuffer::<f32>::zeroed(&allocator, LEN, &copies)?;
        let upload = next.upload(host, &copies)?;
        axpy(kernel.as_ref(), &stream, 1.0, &next, &mut y)?;
        host = upload.wait()?;
    }

    let pool = TypedPool::new(&allocator);
    Context::new("scratch").enter();
    for turn in 0..100 {
        let mut scratch = DeviceBuffer::<f32>::zeroed(&pool, LEN / 4, &stream)?;
        scratch.fill(turn as f32, &stream)?;
    }

    Context::new("too much").enter();
    match DeviceBuffer::<f32>::zeroed(&allocator, 16 * LEN, &stream) {
        Err(cualloc::Error::OutOfMemory(error)) => println!("{}", error.report()),
        Err(error) => return Err(error.into()),
        Ok(_) => return Err("the limit was not kept".into()),
    }

    let results = y.to_vec()?;
    let pairs = results.iter().zip(&numbers);
    let right = pairs.filter(|(y, x)| **y == 5.0 * **x).count();
    drop((x, y, pool));
    allocator.close()?;
    let recorded = recorder.finish()?;
    println!("{} events are in {}", recorded.events, path.display());
    println!("tutorial: {right} elements correct");
    match right {
        LEN => Ok(()),
        _ => Err(format!("{} elements are wrong", LEN - right).into()),
    }
}
