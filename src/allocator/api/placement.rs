//! What one request may ask about where its block lies.

use crate::driver::{Stream, sys};

use crate::allocator::api::Allocator;
use crate::allocator::api::block::Block;
use crate::allocator::error::Error;
use crate::allocator::heap::request::Request;

/// Where a block has to lie. The default asks nothing; every block begins at a multiple of 512 bytes
/// in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Placement {
    /// The block begins at a multiple of this many bytes: a power of two up to 2 MiB.
    pub alignment: usize,
    /// The block lies inside one physical handle, so that it can be exported or registered as one.
    /// Under the classic policy every block lies in one segment anyway. A block for which no free
    /// handle is large enough costs a new one, where two would have done.
    pub single_handle: bool,
    /// Whether the block may lie in a view; on by default. See
    /// [`Config::views`](crate::allocator::Config::views) for what views do not promise.
    pub views: bool,
}

impl Default for Placement {
    fn default() -> Self {
        Placement {
            alignment: 1,
            single_handle: false,
            views: true,
        }
    }
}

impl Placement {
    /// Anywhere.
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks for an alignment in bytes.
    pub fn alignment(mut self, bytes: usize) -> Self {
        self.alignment = bytes;
        self
    }

    /// Asks for a block inside one physical handle.
    pub fn single_handle(mut self, on: bool) -> Self {
        self.single_handle = on;
        self
    }

    /// Allows or forbids a place in a view.
    pub fn views(mut self, on: bool) -> Self {
        self.views = on;
        self
    }

    fn request(&self, bytes: usize) -> Result<Request, Error> {
        let mut request = Request::new(bytes, self.alignment)?;
        request.single = self.single_handle;
        request.views = self.views;
        Ok(request)
    }
}

impl Allocator {
    /// [`allocate`](Self::allocate) with wishes about the block's place.
    ///
    /// # Errors
    /// As [`allocate_aligned`](Self::allocate_aligned).
    pub fn allocate_with(
        &self,
        bytes: usize,
        placement: &Placement,
        stream: &Stream,
    ) -> Result<Block, Error> {
        let request = placement.request(bytes)?;
        let named = self.engine().named(stream)?;
        let grant = self.engine().allocate_request(&named, &request)?;
        Ok(Block::new(self.engine(), grant, bytes))
    }

    /// [`allocate_raw`](Self::allocate_raw) with wishes about the block's place.
    ///
    /// # Errors
    /// As [`allocate_aligned`](Self::allocate_aligned).
    ///
    /// # Safety
    /// As [`allocate_raw`](Self::allocate_raw), special handles included.
    pub unsafe fn allocate_raw_with(
        &self,
        bytes: usize,
        placement: &Placement,
        stream: sys::CUstream,
    ) -> Result<sys::CUdeviceptr, Error> {
        let request = placement.request(bytes)?;
        // SAFETY: the caller's contract.
        let named = unsafe { self.engine().named_raw(stream) }?;
        Ok(self.engine().allocate_request(&named, &request)?.ptr())
    }
}
