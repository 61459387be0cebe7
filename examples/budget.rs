//! A budget with a log: a stack of resources over an allocator, whose records go to the `log` crate and from there
//! to env_logger.
//!
//! ```text
//! RUST_LOG=info cargo run --example budget --features sim
//! ```

use std::sync::Arc;

use cualloc::driver::Driver;
use cualloc::resource::{Budget, LogRecord, Logging, MemoryResource};
use cualloc::{Allocator, Config, DeviceBuffer, Error, Request};

const MIB: usize = 1 << 20;

/// Hands a record to the `log` crate.
fn to_log(record: &LogRecord) -> std::io::Result<()> {
    match record.error {
        None => log::info!("{}", record.to_csv()),
        Some(_) => log::warn!("{}: {}", record.to_csv(), record.message),
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    env_logger::init();
    let driver = Driver::load_or_simulate()?;
    let context = driver.context(0)?;
    let allocator = Allocator::with_config(&context, Config::from_env()?)?;
    let stream = allocator.create_stream()?;

    // Refusals of the budget are logged as well, since the log stands above it.
    let budget = Arc::new(Budget::new(allocator.clone(), Some(64 * MIB as u64)));
    let memory = Arc::new(Logging::new(Arc::clone(&budget), to_log));

    let request = Request::array::<f32>(12 * MIB)?.tag("weights");
    let weights = DeviceBuffer::<f32>::uninit_with(&memory, request, &stream)?;
    let refused = DeviceBuffer::<f32>::zeroed(&memory, 8 * MIB, &stream);
    match refused {
        Err(error @ Error::OverBudget { .. }) => println!("refused: {error}"),
        Err(error) => return Err(error.into()),
        Ok(_) => return Err("the budget was not kept".into()),
    }
    assert_eq!(budget.remaining(), Some(16 * MIB as u64));

    drop(weights);
    assert_eq!(budget.usage()?.outstanding(), 0);
    drop((memory, budget));
    allocator.close()?;
    Ok(())
}
