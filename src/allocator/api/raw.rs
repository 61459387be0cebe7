//! Blocks by address on streams by handle, for callers that keep both themselves.

use crate::allocator::calls::record;
use crate::allocator::inspect::snapshot::block_info_around;
use crate::driver::{DriverError, Stream, sys};

use crate::allocator::api::Allocator;
use crate::allocator::cache::grant::{Grant, Missed};
use crate::allocator::cache::stream_cache::thread::{self, Known};
use crate::allocator::cache::stream_cache::{Small, StreamCache};
use crate::allocator::calls::cached::unaligned;
use crate::allocator::engine::naming::Named;
use crate::allocator::heap::request::Checked;
use crate::allocator::report::BlockInfo;
use crate::allocator::request::Request;
use crate::allocator::stream::slot::{is_special, to_compare};
use crate::error::Error;

impl Allocator {
    /// Allocates `bytes` for use on a stream given by its handle: null and 1 mean the legacy default stream of the
    /// allocator's context, 2 the calling thread's default stream in that context, whichever context is current.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate), and [`Error::WrongContext`].
    ///
    /// # Safety
    /// `stream` must be a live stream or a special handle. Memory that is requested by a special handle follows the
    /// stream order of the allocator's context, not of the caller's current context (see [`Allocator`]): work on
    /// another stream, including the null stream of another context, must be ordered explicitly and recorded. The
    /// caller follows the contract for raw streams that [`Allocator`] states: [`retire_raw`](Self::retire_raw) before
    /// the stream is destroyed.
    #[inline]
    pub unsafe fn allocate_raw(
        &self,
        bytes: usize,
        stream: sys::CUstream,
    ) -> Result<sys::CUdeviceptr, Error> {
        let raw = to_compare(stream);
        let known = thread::find_handle(raw);
        let lasting = match known {
            Known::Lasting(cache) => Some(cache),
            _ => None,
        };
        let Some(small) = unaligned(bytes) else {
            // SAFETY: the caller's contract.
            return unsafe { self.allocate_raw_large(bytes, stream, lasting) };
        };
        if let Some(cache) = lasting {
            return match Grant::take_by_handle(cache, (&self.pages, raw), small) {
                Some(grant) => Ok(grant.ptr()),
                // SAFETY: the caller's contract.
                None => unsafe { self.allocate_raw_slow(bytes, stream, lasting) },
            };
        }
        if is_special(stream) {
            let key = self.engine.special_key(stream)?;
            return match self.engine.hit(key, small) {
                Ok(grant) => Ok(grant.ptr()),
                Err(missed) => self.allocate_raw_missed(bytes, (stream, key), missed),
            };
        }
        if !self.engine.is_fast() {
            // SAFETY: the caller's contract.
            return unsafe { self.allocate_raw_slow(bytes, stream, None) };
        }
        // SAFETY: the caller's contract.
        match unsafe { self.engine.raw_id(stream) } {
            Ok(Some(key)) => match self.hit_by_id((raw, key), small, known) {
                Ok(grant) => Ok(grant.ptr()),
                Err(missed) => self.allocate_raw_missed(bytes, (stream, key), missed),
            },
            // SAFETY: the caller's contract.
            Ok(None) => unsafe { self.allocate_raw_slow(bytes, stream, None) },
            Err(error) => Err(self.engine.unnamed(stream, error)),
        }
    }

    /// The fast path for a stream whose id the driver has just reported.
    #[inline(always)]
    fn hit_by_id(
        &self,
        (raw, key): (usize, u64),
        small: Small,
        known: Known,
    ) -> Result<Grant, Missed> {
        let Known::Passing(cache) = known else {
            let grant = self.engine.hit(key, small)?;
            thread::remember_reusable(raw, grant.place.home());
            return Ok(grant);
        };
        if !cache.now().is_normal() {
            return Err(Missed(None));
        }
        let grant = Grant::take(cache, self.engine.owner(key), small)?;
        // The stream may have been adopted since the thread used it last.
        thread::remember_handle(cache);
        Ok(grant)
    }

    /// Like [`allocate_raw`](Self::allocate_raw), but succeeds only if the thread's cached line and the stream's cache
    /// suffice: the stream is the one that the thread used last, its handle stays valid, and no mode bit requires the
    /// slow path.
    ///
    /// # Safety
    /// As [`allocate_raw`](Self::allocate_raw).
    #[doc(hidden)]
    #[inline(always)]
    pub unsafe fn try_allocate_raw(
        &self,
        bytes: usize,
        stream: sys::CUstream,
    ) -> Option<sys::CUdeviceptr> {
        let (request, raw) = (unaligned(bytes)?, to_compare(stream));
        let cache = thread::find_first(raw)?;
        let grant = Grant::take_by_handle(cache, (&self.pages, raw), request)?;
        Some(grant.ptr())
    }

    /// Like [`allocate_raw`](Self::allocate_raw), with constraints.
    ///
    /// # Errors
    /// As [`allocate_with`](Self::allocate_with), and [`Error::WrongContext`].
    ///
    /// # Safety
    /// As [`allocate_raw`](Self::allocate_raw), special handles included.
    #[inline(never)]
    pub unsafe fn allocate_raw_with(
        &self,
        request: Request,
        stream: sys::CUstream,
    ) -> Result<sys::CUdeviceptr, Error> {
        // SAFETY: the caller's contract.
        let named = unsafe { self.engine.named_raw(stream) }?;
        Ok(self.engine.allocate(&named, &request, Missed(None))?.ptr())
    }

    /// Allocates what is too large for stream caches. `cache` is the cache of a stream whose handle stays valid.
    ///
    /// # Safety
    /// As [`allocate_raw`](Self::allocate_raw).
    #[inline(never)]
    unsafe fn allocate_raw_large(
        &self,
        bytes: usize,
        stream: sys::CUstream,
        cache: Option<&'static StreamCache>,
    ) -> Result<sys::CUdeviceptr, Error> {
        let engine = &self.engine;
        let key = match cache {
            Some(cache) if engine.serves_large_from_heap() => {
                cache.lock().key_in(engine.id, to_compare(stream))
            }
            _ => None,
        };
        let Some(key) = key else {
            // SAFETY: the caller's contract.
            return unsafe { self.allocate_raw_slow(bytes, stream, cache) };
        };
        let named = Named {
            cache,
            ..Named::by_handle(key, stream)
        };
        let made = engine.allocate_missed(&named, &Checked::new(bytes, 1)?);
        made.map(|grant| grant.ptr())
    }

    /// Allocates what the fast path could not serve. `cache` is the cache of a stream whose handle stays valid.
    ///
    /// # Safety
    /// As [`allocate_raw`](Self::allocate_raw).
    #[inline(never)]
    unsafe fn allocate_raw_slow(
        &self,
        bytes: usize,
        stream: sys::CUstream,
        cache: Option<&'static StreamCache>,
    ) -> Result<sys::CUdeviceptr, Error> {
        let mut missed = Missed(cache.map(|cache| (cache, None)));
        let known = match self.engine.is_fast() {
            true => missed.key_of_handle(self.engine.id, to_compare(stream)),
            false => None,
        };
        let named = match known {
            Some(key) => Named::by_handle(key, stream),
            // SAFETY: the caller's contract.
            None => unsafe { self.engine.named_raw(stream) }?,
        };
        let made = self.engine.allocate(&named, &Request::new(bytes), missed);
        made.map(|grant| grant.ptr())
    }

    /// Allocates what the fast path could not serve for a stream whose id was determined.
    #[inline(never)]
    fn allocate_raw_missed(
        &self,
        bytes: usize,
        (stream, key): (sys::CUstream, u64),
        missed: Missed,
    ) -> Result<sys::CUdeviceptr, Error> {
        let named = Named::by_handle(key, stream);
        let made = self.engine.allocate(&named, &Request::new(bytes), missed);
        if !is_special(stream) {
            thread::refresh_reusable(stream as usize, key);
        }
        made.map(|grant| grant.ptr())
    }

    /// Frees a block by the address that [`allocate_raw`](Self::allocate_raw) or
    /// [`Block::into_raw`](crate::allocator::Block::into_raw) returned.
    ///
    /// # Errors
    /// [`Error::NotOurs`], [`Error::NotLive`] (also for a second free), [`Error::InteriorPointer`],
    /// [`Error::Capturing`], [`Error::Closed`], a lost context. None of them changes anything.
    ///
    /// # Safety
    /// No work submitted after this call uses the block, and the block has no other owner. The block is freed in the
    /// order of the stream that it was allocated on, whichever context is current. That stream, and every stream
    /// recorded on the block, is alive or was retired.
    #[inline]
    pub unsafe fn free_raw(&self, ptr: sys::CUdeviceptr) -> Result<(), Error> {
        match self.pages.free_quick(ptr) {
            true => Ok(()),
            false => self.engine.free_raw(ptr),
        }
    }

    /// [`free_raw`](Self::free_raw) where the stream's cache suffices; otherwise returns false and changes nothing.
    ///
    /// # Safety
    /// As [`free_raw`](Self::free_raw).
    #[doc(hidden)]
    #[inline(always)]
    pub unsafe fn try_free_raw(&self, ptr: sys::CUdeviceptr) -> bool {
        self.pages.free_quick(ptr)
    }

    /// Records that another stream uses the block around `ptr` (any address inside it): after its free the block is
    /// reused only when everything submitted to that stream before the free has completed. In a capture that a graph
    /// pool serves, the use takes effect at the end of the capture.
    ///
    /// # Errors
    /// [`Error::NotOurs`], [`Error::NotLive`], [`Error::Capturing`], [`Error::WrongContext`], driver errors.
    ///
    /// # Safety
    /// As [`allocate_raw`](Self::allocate_raw): a special handle means a default stream of the allocator's
    /// context. Any other stream may be of another context or device.
    pub unsafe fn record_stream_raw(
        &self,
        ptr: sys::CUdeviceptr,
        stream: sys::CUstream,
    ) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        let named = unsafe { self.engine.named_raw(stream) }?;
        record::use_by(&self.engine, ptr, &named, false)
    }

    /// Records that another stream has used the block around `ptr` and will not use it again: reuse waits only for the
    /// work submitted to that stream so far.
    ///
    /// # Errors
    /// As [`record_stream_raw`](Self::record_stream_raw).
    ///
    /// # Safety
    /// As [`record_stream_raw`](Self::record_stream_raw), special handles included.
    pub unsafe fn record_use_raw(
        &self,
        ptr: sys::CUdeviceptr,
        stream: sys::CUstream,
    ) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        let named = unsafe { self.engine.named_raw(stream) }?;
        record::use_by(&self.engine, ptr, &named, true)
    }

    /// Returns the live block around `ptr`, or an error that says why there is none. [`block_of`](Self::block_of) is
    /// the variant without an error.
    ///
    /// # Errors
    /// [`Error::NotOurs`], [`Error::NotLive`], [`Error::Closed`], a lost context.
    pub fn block_around(&self, ptr: sys::CUdeviceptr) -> Result<BlockInfo, Error> {
        let block = {
            let mut heap = self.engine.open()?;
            block_info_around(&mut heap, ptr)
        };
        block.ok_or_else(|| self.engine.lock().physical.not_live(ptr))
    }

    /// Declares that the allocator's context was destroyed with everything in it, for a caller that knows so. Returns
    /// the error that every later call returns; none of them calls the driver.
    pub fn declare_context_lost(&self) -> Error {
        let code = sys::CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED;
        self.engine.error(DriverError::new("cuCtxSetCurrent", code))
    }

    /// Like [`Block::record_use`](crate::allocator::Block::record_use), by address, for a block with another owner.
    pub(crate) fn record_use_at(
        &self,
        ptr: sys::CUdeviceptr,
        stream: &Stream,
    ) -> Result<(), Error> {
        record::use_by(&self.engine, ptr, &self.engine.named(stream)?, true)
    }
}
