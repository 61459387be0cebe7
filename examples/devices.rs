//! Two devices in one process: an allocator on each, access of one to the memory of the other, and a copy. Simulated
//! devices are used where there are not two GPUs.
//!
//! ```text
//! cargo run --example devices --features sim
//! ```

use std::error::Error as StdError;

use cualloc::driver::Driver;
use cualloc::sim::{SimConfig, Simulator};
use cualloc::{Allocator, Config, DeviceBuffer, Error};

const LEN: usize = 1 << 20;

fn main() -> Result<(), Box<dyn StdError>> {
    let simulator = Simulator::new(SimConfig::with_devices(2, 1 << 30))?;
    let driver = match Driver::load() {
        Ok(driver) if driver.device_count()? >= 2 => driver,
        _ => {
            println!("simulated devices, for there are not two GPUs");
            simulator.driver()?
        }
    };
    let devices = [driver.device(0)?, driver.device(1)?];
    let mut allocators = Vec::new();
    for ordinal in 0..2 {
        // The primary context of the device.
        let context = driver.context(ordinal)?;
        allocators.push(Allocator::with_config(&context, Config::from_env()?)?);
    }
    let streams = [
        allocators[0].create_stream()?,
        allocators[1].create_stream()?,
    ];

    // Kernels of device 1 may access the memory of device 0, what it holds now and what it will hold. Copies do not
    // need that, but are faster with it.
    if devices[1].can_access_peer(&devices[0])? {
        match allocators[0].add_peer(1) {
            Ok(()) => println!("device 1 has access to the memory of device 0"),
            // The classic policy.
            Err(Error::NotSupported { what }) => println!("no access: not supported: {what}"),
            Err(error) => return Err(error.into()),
        }
    }

    let values: Vec<u32> = (0..LEN as u32).collect();
    let source = DeviceBuffer::from_slice(&allocators[0], &values, &streams[0])?;
    let mut target = DeviceBuffer::<u32>::zeroed(&allocators[1], LEN, &streams[1])?;
    // On a stream of either device. The buffers order the copy after the work on both, and later work after the copy.
    target.copy_from(&source.as_slice(), &streams[1])?;
    drop(source);
    if target.to_vec()? != values {
        return Err("the copy differs".into());
    }
    println!("devices: {LEN} elements correct");

    // An allocator serves streams of its own device.
    let wrong = DeviceBuffer::<u32>::zeroed(&allocators[0], LEN, &streams[1]);
    match wrong.map(drop) {
        Err(error @ Error::WrongDevice { .. }) => println!("as expected: {error}"),
        other => return Err(format!("a stream of another device: {other:?}").into()),
    }
    drop(target);
    for allocator in allocators {
        allocator.close()?;
    }
    Ok(())
}
