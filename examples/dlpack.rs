//! Device memory shared with another library as a DLPack tensor, and taken back from one.
//!
//! ```text
//! cargo run --example dlpack --features sim
//! ```

use std::error::Error;

use cualloc::column::{Column, Consumer, DlpackTensor, Producer};
use cualloc::driver::Driver;
use cualloc::{Allocator, Config};

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::load_or_simulate()?;
    let context = driver.context(0)?;
    let allocator = Allocator::with_config(&context, Config::from_env()?)?;
    let (ours, theirs) = (allocator.create_stream()?, allocator.create_stream()?);

    let values: Vec<f32> = (0..1000_u16).map(f32::from).collect();
    let column = Column::from_slice(&allocator, &values, &ours)?;
    let address = column.ptr();

    // The other library works on a stream of its own: that waits for ours, and the memory is not reused before
    // it is done. What goes to the library is one pointer, a `DLManagedTensorVersioned *`.
    let tensor = column.to_dlpack_versioned(&Consumer::Tracked(theirs.clone()))?;
    drop(column);
    assert!(
        allocator.stats().all.allocated.current > 0,
        "the tensor keeps the memory"
    );
    let handed_over = tensor.into_raw().address();

    // What it would do: look at the tensor, and hand one back, here the same.
    // SAFETY: the pointer was made just now, and is owned by whoever has it.
    let back = unsafe { DlpackTensor::from_raw_versioned(handed_over.cast()) }?;
    assert_eq!(back.tensor()?.data as u64, address);

    let again = Column::from_dlpack(back, &ours, Producer::Stream(theirs.clone()))?;
    assert_eq!((again.ptr(), again.rows()), (address, 1000));
    assert!(
        !again.is_external(),
        "our own memory is known when it comes back"
    );
    drop(again);
    allocator.close()?;
    println!(
        "{} numbers went out and came back without a copy",
        values.len()
    );
    Ok(())
}
