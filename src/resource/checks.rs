//! Checks that every source of memory makes, and the numbers of sources.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::allocator::Request;
use crate::driver::{Context, Device, Driver, Stream};
use crate::error::{Error, InvalidArgument, StreamMisuse};

/// Addresses of the driver's allocations are multiples of this many bytes.
pub(crate) const DRIVER_ALIGNMENT: usize = 256;

/// The next number of a source of blocks that is not an allocator. Allocators count up from 1.
pub(crate) fn next_source() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 63);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

pub(crate) fn device_of(driver: &Driver, ordinal: usize) -> Result<Device, Error> {
    let devices = driver.device_count()?;
    if ordinal >= devices {
        return Err(Error::InvalidDevice { ordinal, devices });
    }
    Ok(driver.device(ordinal)?)
}

/// Refuses an invalid size, and an alignment above `alignment` bytes.
pub(crate) fn check_request(request: &Request, alignment: usize) -> Result<(), Error> {
    let bytes = request.bytes();
    if bytes == 0 || Request::round(bytes).is_none() {
        let bytes = bytes as u64;
        return Err(InvalidArgument::Size { bytes }.into());
    }
    let wanted = request.alignment();
    if !wanted.is_power_of_two() || wanted > alignment {
        let bytes = wanted as u64;
        return Err(InvalidArgument::Alignment { bytes }.into());
    }
    Ok(())
}

/// Refuses a stream of another driver than the context's.
#[inline]
pub(crate) fn same_driver(home: Option<&Context>, stream: &Stream) -> Result<(), Error> {
    let driver = stream.context().driver();
    match home.is_none_or(|home| home.driver().same_library(driver)) {
        true => Ok(()),
        false => Err(StreamMisuse::ForeignDriver.into()),
    }
}

/// Refuses a stream of another driver, or of another device.
#[inline]
pub(crate) fn same_device(
    home: Option<&Context>,
    expected: usize,
    stream: &Stream,
) -> Result<(), Error> {
    same_driver(home, stream)?;
    match stream.context().device().ordinal() {
        found if found == expected => Ok(()),
        found => Err(Error::WrongDevice { expected, found }),
    }
}
