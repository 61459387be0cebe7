//! Memory held for later.

use super::block::{DeallocateError, Tag};
use super::error::ResourceError;
use super::owned::OwnedBlock;
use super::traits::MemoryResource;
use crate::driver::Stream;

/// Device memory that is held until it is released or dropped, so that nobody else gets it.
///
/// ```
/// use cualloc::resource::Reservation;
/// # use cualloc::{driver::Context, sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = Context::primary(&driver, driver.device(0)?)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// let mut reservation = Reservation::new(allocator, 64 << 20, &stream)?;
/// assert_eq!((reservation.bytes(), reservation.device()), (64 << 20, 0));
/// assert_eq!(reservation.release()?, 64 << 20);
/// assert_eq!(reservation.release()?, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Reservation<R: MemoryResource + Clone> {
    device: usize,
    resource: R,
    block: Option<OwnedBlock<R>>,
}

impl<R: MemoryResource + Clone> Reservation<R> {
    /// Takes the memory.
    ///
    /// # Errors
    /// As [`MemoryResource::allocate_block`].
    pub fn new(resource: R, bytes: usize, stream: &Stream) -> Result<Self, ResourceError> {
        let tag = Tag::new("reservation");
        let block = OwnedBlock::allocate(resource.clone(), bytes, stream, tag)?;
        Ok(Reservation {
            device: resource.device(),
            resource,
            block: Some(block),
        })
    }

    /// Bytes held: 0 after the release.
    pub fn bytes(&self) -> u64 {
        self.block.as_ref().map_or(0, |block| block.bytes() as u64)
    }

    /// The ordinal of the device.
    pub fn device(&self) -> usize {
        self.device
    }

    /// Gives the memory back; how many bytes, or 0 if none are held.
    ///
    /// # Errors
    /// As [`MemoryResource::deallocate_block`]; the memory is still held then.
    pub fn release(&mut self) -> Result<u64, ResourceError> {
        let bytes = self.bytes();
        let Some(block) = self.block.take() else {
            return Ok(0);
        };
        match block.free() {
            Ok(()) => Ok(bytes),
            Err(DeallocateError { block, error }) => {
                self.block = Some(OwnedBlock::from_parts(self.resource.clone(), *block));
                Err(error)
            }
        }
    }
}
