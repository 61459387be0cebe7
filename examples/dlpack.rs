//! Device memory shared with another library as a DLPack tensor of four dimensions, and taken back from one.
//!
//! ```text
//! cargo run --example dlpack --features sim
//! ```

use std::error::Error;

use cualloc::driver::Driver;
use cualloc::exchange::dlpack::DLManagedTensorVersioned;
use cualloc::exchange::{Dlpack, Peer, Tensor};
use cualloc::{Allocator, Config, DeviceBuffer};

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::load_or_simulate()?;
    let context = driver.context(0)?;
    let allocator = Allocator::with_config(&context, Config::from_env()?)?;
    let (ours, theirs) = (allocator.create_stream()?, allocator.create_stream()?);

    let values: Vec<f32> = (0..8 * 3 * 14 * 14_u16).map(f32::from).collect();
    let pixels = DeviceBuffer::from_slice(&allocator, &values, &ours)?;
    let images = Tensor::from_buffer(pixels, &[8, 3, 14, 14])?;
    let address = images.ptr();

    // The other library works on a stream of its own: that waits for ours, and the memory is not reused before
    // it is done. What goes to the library is one pointer.
    let tensor = images.to_dlpack(&Peer::on(&theirs))?;
    drop(images);
    assert!(
        allocator.stats().all.allocated.current > 0,
        "the tensor keeps the memory"
    );
    let handed_over: *mut DLManagedTensorVersioned = tensor.into_raw();

    // The other library would read the tensor and return one; here it returns the same.
    // SAFETY: the pointer was created above, and this code owns it.
    let back = unsafe { Dlpack::from_raw(handed_over) }?;
    assert_eq!(back.tensor()?.data as u64, address);

    let again = Tensor::from_dlpack(back, &ours, Peer::on(&theirs))?;
    assert_eq!((again.ptr(), again.shape()), (address, &[8, 3, 14, 14][..]));
    assert!(
        !again.is_external(),
        "our own memory is known when it comes back"
    );
    assert_eq!(again.as_slice::<f32>()?.to_vec()?, values);
    drop(again);
    allocator.close()?;
    println!(
        "{} numbers went out and came back without a copy",
        values.len()
    );
    Ok(())
}
