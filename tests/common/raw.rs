//! Streams and blocks by their raw values, as C code uses them.

use cualloc::Error;
use cualloc::allocator::{Allocator, Block, Request};
use cualloc::driver::{Context, Driver, Stream, sys};

use super::Rig;

/// The calls of an allocator by addresses and handles. What their callers promise holds in every test: a stream is
/// alive where it is passed, and the simulator reports a block that is used after its free.
pub trait RawCalls {
    fn raw_allocate(&self, bytes: usize, stream: sys::CUstream) -> Result<u64, Error>;
    fn raw_allocate_with(&self, request: Request, stream: sys::CUstream) -> Result<u64, Error>;
    fn raw_free(&self, ptr: u64) -> Result<(), Error>;
    fn raw_record_stream(&self, ptr: u64, stream: sys::CUstream) -> Result<(), Error>;
    fn raw_record_use(&self, ptr: u64, stream: sys::CUstream) -> Result<(), Error>;
    fn raw_mark(&self, stream: sys::CUstream) -> Result<(), Error>;
    fn raw_adopt(&self, stream: sys::CUstream) -> Result<(), Error>;
    fn raw_retire(&self, stream: sys::CUstream) -> Result<(), Error>;
    /// Equal blocks.
    fn allocate_blocks(&self, count: usize, bytes: usize, stream: &Stream) -> Vec<Block>;
}

impl RawCalls for Allocator {
    fn raw_allocate(&self, bytes: usize, stream: sys::CUstream) -> Result<u64, Error> {
        // SAFETY: as the trait says.
        unsafe { self.allocate_raw(bytes, stream) }
    }

    fn raw_allocate_with(&self, request: Request, stream: sys::CUstream) -> Result<u64, Error> {
        // SAFETY: as the trait says.
        unsafe { self.allocate_raw_with(request, stream) }
    }

    fn raw_free(&self, ptr: u64) -> Result<(), Error> {
        // SAFETY: as the trait says.
        unsafe { self.free_raw(ptr) }
    }

    fn raw_record_stream(&self, ptr: u64, stream: sys::CUstream) -> Result<(), Error> {
        // SAFETY: as the trait says.
        unsafe { self.record_stream_raw(ptr, stream) }
    }

    fn raw_record_use(&self, ptr: u64, stream: sys::CUstream) -> Result<(), Error> {
        // SAFETY: as the trait says.
        unsafe { self.record_use_raw(ptr, stream) }
    }

    fn raw_mark(&self, stream: sys::CUstream) -> Result<(), Error> {
        // SAFETY: as the trait says.
        unsafe { self.mark_raw(stream) }
    }

    fn raw_adopt(&self, stream: sys::CUstream) -> Result<(), Error> {
        // SAFETY: as the trait says.
        unsafe { self.adopt_raw(stream) }
    }

    fn raw_retire(&self, stream: sys::CUstream) -> Result<(), Error> {
        // SAFETY: as the trait says.
        unsafe { self.retire_raw(stream) }
    }

    fn allocate_blocks(&self, count: usize, bytes: usize, stream: &Stream) -> Vec<Block> {
        let allocate = |_| self.allocate(bytes, stream).unwrap();
        (0..count).map(allocate).collect()
    }
}

/// A raw stream that only its creator knows, as C code would pass it.
pub struct RawStream {
    driver: Driver,
    context: Context,
    raw: usize,
}

impl RawStream {
    pub fn new(rig: &Rig) -> RawStream {
        // CU_STREAM_NON_BLOCKING
        RawStream::with_flags(rig, 1)
    }

    /// One that the legacy stream orders itself with.
    pub fn blocking(rig: &Rig) -> RawStream {
        RawStream::with_flags(rig, 0)
    }

    fn with_flags(rig: &Rig, flags: u32) -> RawStream {
        RawStream::in_context(rig, &rig.context, flags)
    }

    /// A stream of another context of the rig's driver, with the driver's flags.
    pub fn in_context(rig: &Rig, context: &Context, flags: u32) -> RawStream {
        let _entered = context.enter().unwrap();
        let create = rig.driver.functions().cuStreamCreate.unwrap();
        let mut raw: sys::CUstream = std::ptr::null_mut();
        // SAFETY: a context is current; the output is a local.
        let code = unsafe { create(&mut raw, flags) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        RawStream {
            driver: rig.driver.clone(),
            context: context.clone(),
            raw: raw as usize,
        }
    }

    pub fn raw(&self) -> sys::CUstream {
        self.raw as sys::CUstream
    }

    /// As a borrowed stream.
    pub fn borrowed(&self) -> Stream {
        // SAFETY: alive as long as this.
        unsafe { Stream::from_raw(&self.context, self.raw()) }.unwrap()
    }

    /// Ends the allocator's use of the stream, and destroys it.
    pub fn retire(self, allocator: &Allocator) {
        allocator.raw_retire(self.raw()).unwrap();
        self.destroy();
    }

    /// Destroys the stream, as its foreign owner would.
    pub fn destroy(self) {}
}

impl Drop for RawStream {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let _entered = self.context.enter().unwrap();
        let destroy = self.driver.functions().cuStreamDestroy_v2.unwrap();
        // SAFETY: made by this, and not used again.
        let code = unsafe { destroy(self.raw()) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    }
}
