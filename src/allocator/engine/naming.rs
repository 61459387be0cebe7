//! Identification of streams: handles and ids, default streams, and whether a stream is capturing.

use crate::allocator::engine::leaving;
use crate::driver::{Context, DriverError, Stream, StreamKind, sys};

use crate::allocator::cache::stream_cache::{StreamCache, thread};
use crate::allocator::engine::Engine;
use crate::allocator::graph::user::User;
use crate::allocator::stream::slot::{Holder, Slot, StreamKey};
use crate::allocator::stream::slot::{is_per_thread, is_special};
use crate::error::{Error, StreamMisuse};
use crate::sync::capture::is_capture_refusal;

impl Engine {
    /// Refuses streams of another driver, because ids are unique only within a driver.
    #[inline]
    pub(crate) fn same_driver(&self, stream: &Stream) -> Result<(), Error> {
        if self.driver().same_library(stream.context().driver()) {
            return Ok(());
        }
        Err(Error::Stream(StreamMisuse::ForeignDriver))
    }

    pub(crate) fn named<'a>(&self, stream: &'a Stream) -> Result<Named<'a>, Error> {
        self.usable()?;
        self.same_driver(stream)?;
        Ok(Named {
            key: StreamKey::Id(stream.own_id()),
            raw: stream.raw(),
            stream: Some(stream),
            cache: None,
        })
    }

    /// Returns the error for a stream that could not be named. Drivers refuse to report the id of a capturing stream.
    pub(crate) fn unnamed(&self, raw: sys::CUstream, error: DriverError) -> Error {
        if !is_capture_refusal(error.code()) {
            return self.error_at(None, raw, error);
        }
        // The legacy stream represents other streams, so it is queried whenever that matters.
        if error.code() != sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
            self.driver().note_capture(raw);
        }
        Error::Capturing {
            stream: raw as usize,
        }
    }

    /// Names a stream by its handle. Handle values are reused, so the driver is queried for the id each time.
    ///
    /// # Safety
    /// `raw` must be a live stream or a special handle.
    pub(crate) unsafe fn named_raw(&self, raw: sys::CUstream) -> Result<Named<'static>, Error> {
        self.usable()?;
        let key = if is_special(raw) {
            StreamKey::Id(self.special_key(raw)?)
        } else if let Some(key) = thread::key_of_handle(self.id, raw as usize) {
            StreamKey::Id(key)
        } else {
            // SAFETY: the caller guarantees that the stream is valid.
            match unsafe { self.raw_id(raw) } {
                Ok(Some(id)) => StreamKey::Id(id),
                Ok(None) => StreamKey::Handle(raw as usize),
                // A pool may still serve the stream; any other path refuses it.
                Err(error) if self.is_scoped() && is_capture_refusal(error.code()) => {
                    self.key_of_capturing(raw as usize)
                }
                Err(error) => return Err(self.unnamed(raw, error)),
            }
        };
        Ok(Named {
            key,
            raw,
            stream: None,
            cache: None,
        })
    }

    /// Returns the key of a capturing stream, whose id the driver does not report: its handle, unless the handle is
    /// known to identify the stream.
    fn key_of_capturing(&self, raw: usize) -> StreamKey {
        if let Some(own) = self.driver().own_stream(raw) {
            return StreamKey::Id(own.own_id());
        }
        let heap = self.lock();
        let mut known = heap.streams.iter();
        let same = known.find(|(_, slot)| slot.named && slot.handle_to_query() == raw);
        same.map_or(StreamKey::Handle(raw), |(_, slot)| slot.key)
    }

    /// Returns the driver's id of a stream, if the driver has ids.
    ///
    /// # Safety
    /// `raw` must be a live stream.
    #[inline]
    pub(crate) unsafe fn raw_id(&self, raw: sys::CUstream) -> Result<Option<u64>, DriverError> {
        match self.no_captures {
            // SAFETY: the caller's contract.
            true => unsafe { self.driver().uncaptured_id(raw) },
            // SAFETY: as above.
            false => unsafe { self.driver().stream_id(raw) },
        }
    }

    /// Adopts a stream by its handle, which the caller promises to keep valid until the stream is retired.
    pub(crate) fn adopt(&self, named: &Named<'_>) -> Result<(), Error> {
        if is_per_thread(named.raw as usize) {
            return Err(Error::NotSupported {
                what: "adoption of the per-thread default stream",
            });
        }
        self.refuse_capture(named)?;
        let context = self.context_of(named)?;
        if context.id() != self.context.id() {
            return Err(Error::WrongContext {
                stream: named.raw as usize,
                current: context.raw() as usize,
                expected: self.context.raw() as usize,
            });
        }
        let (mut heap, stream) = self.slot(self.open()?, named)?;
        let state = &mut *heap;
        state.caches.keep_handle(&mut state.streams, stream);
        Ok(())
    }

    /// Refuses a stream that is capturing, because memory of a graph outlives the order of the stream.
    #[inline]
    pub(crate) fn refuse_capture(&self, named: &Named<'_>) -> Result<(), Error> {
        if self.no_captures {
            return Ok(());
        }
        if is_special(named.raw) {
            let context = named.stream.map_or(&self.context, Stream::context);
            return self.refuse_special_capture(named, context);
        }
        // SAFETY: the creator of the name guarantees that the stream is valid.
        match unsafe { self.driver().is_capturing(named.raw) } {
            Ok(false) => Ok(()),
            capturing => self.refuse_if(named, capturing, named.stream.map(Stream::context)),
        }
    }

    /// [`refuse_capture`](Self::refuse_capture) for a default stream of a context.
    #[inline(never)]
    pub(crate) fn refuse_special_capture(
        &self,
        named: &Named<'_>,
        context: &Context,
    ) -> Result<(), Error> {
        // This query is never refused, so the thread's capture mode need not be changed for it.
        let current = context
            .make_current()
            .map_err(|e| self.error_in(context, e))?;
        // SAFETY: special handles are valid while a context is current.
        let capturing = unsafe { self.driver().is_capturing(named.raw) };
        drop(current);
        self.refuse_if(named, capturing, Some(context))
    }

    #[cold]
    #[inline(never)]
    fn refuse_if(
        &self,
        named: &Named<'_>,
        capturing: Result<bool, DriverError>,
        context: Option<&Context>,
    ) -> Result<(), Error> {
        match capturing {
            Ok(false) => Ok(()),
            Ok(true) => Err(Error::Capturing {
                stream: named.raw as usize,
            }),
            Err(error) if error.code() == sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT => {
                Err(Error::Capturing {
                    stream: named.raw as usize,
                })
            }
            Err(error) => Err(self.error_at(context, named.raw, error)),
        }
    }

    /// Returns the error of a driver call that used a stream: [`error_in`](Self::error_in) for the given context, or
    /// else for that of the known stream with this handle.
    pub(crate) fn error_at(
        &self,
        context: Option<&Context>,
        raw: sys::CUstream,
        error: DriverError,
    ) -> Error {
        let known = |slot: &Slot| slot.raw == raw as usize && slot.named && !is_special(raw);
        let context = context.cloned().or_else(|| {
            let heap = self.lock();
            let mut slots = heap.streams.iter().map(|(_, slot)| slot);
            slots
                .find(|slot| known(slot))
                .map(|slot| slot.context.clone())
        });
        match context {
            Some(context) => self.error_in(&context, error),
            None => self.error(error),
        }
    }

    /// Returns what a new stream is registered with: its context, and the holder that keeps it alive. Streams that only
    /// the heap still references are dropped first.
    pub(crate) fn prepare_registration(
        &self,
        named: &Named<'_>,
    ) -> Result<(Context, Holder), Error> {
        let context = self.context_of(named)?;
        // A raw handle may belong to a stream that this crate destroys.
        let by_handle = match named.key {
            StreamKey::Id(id) if named.stream.is_none() => self.driver().owned_stream(id),
            _ => None,
        };
        // The legacy stream lives as long as its context, whichever way it is named.
        let legacy = is_special(named.raw) && !is_per_thread(named.raw as usize);
        let legacy = match named.stream {
            None if legacy => Some(Stream::legacy(&self.context)),
            _ => None,
        };
        let holder = match named.kept().cloned().or(by_handle).or(legacy) {
            Some(stream) => Holder::Kept(stream),
            None => Holder::foreign(),
        };
        if self.lock().streams.is_prune_due() {
            self.prune();
        }
        let former = std::mem::take(&mut self.lock().streams.former);
        drop(former);
        Ok((context, holder))
    }

    /// Retires streams that only the heap still references: records their last marker and drops them.
    pub(crate) fn prune(&self) {
        let alone = self.lock().streams.list_unreferenced();
        for (stream, key) in alone {
            if let Err(error) = leaving::retire_slot(self, stream, key) {
                self.log_marker_failure(&error);
            }
        }
    }

    pub(crate) fn context_of(&self, named: &Named<'_>) -> Result<Context, Error> {
        if let Some(stream) = named.stream {
            return Ok(stream.context().clone());
        }
        if is_special(named.raw) {
            return Ok(self.context.clone());
        }
        // SAFETY: the creator of the name guarantees that the stream is valid.
        let raw = unsafe { self.driver().stream_context(named.raw) }.map_err(|e| self.error(e))?;
        if raw == self.context.raw() {
            return Ok(self.context.clone());
        }
        // SAFETY: the context of a live stream is alive, and stays so while the stream is in use.
        unsafe { Context::from_raw(self.driver(), raw) }.map_err(|e| self.error(e))
    }

    /// Returns the key of the default stream of the allocator's context that a special handle means, whichever context
    /// is current, or none. It equals that of a [`Stream`] made from the handle and this context.
    #[inline]
    pub(crate) fn special_key(&self, raw: sys::CUstream) -> Result<u64, Error> {
        if self.context_checks {
            self.refuse_other_context(raw)?;
        }
        Ok(match is_per_thread(raw as usize) {
            true => self.context.per_thread_id(),
            false => self.context.legacy_id(),
        })
    }

    /// A caller that passes a special handle while another context is current most likely means a stream of that
    /// context.
    #[inline(never)]
    fn refuse_other_context(&self, raw: sys::CUstream) -> Result<(), Error> {
        self.usable()?;
        let current = self.driver().current_raw().map_err(|e| self.error(e))?;
        if current.is_null() || current == self.context.raw() {
            return Ok(());
        }
        Err(Error::WrongContext {
            stream: raw as usize,
            current: current as usize,
            expected: self.context.raw() as usize,
        })
    }
}

/// A stream as a call names it.
pub(crate) struct Named<'a> {
    pub key: StreamKey,
    pub raw: sys::CUstream,
    /// The caller's stream object, if it has one.
    pub stream: Option<&'a Stream>,
    /// The thread's stream cache for the stream, if the handle found it.
    pub cache: Option<&'static StreamCache>,
}

impl<'a> Named<'a> {
    /// A stream that a call names by its handle, and whose id is known.
    pub(crate) fn by_handle(key: u64, raw: sys::CUstream) -> Self {
        Named {
            key: StreamKey::Id(key),
            raw,
            stream: None,
            cache: None,
        }
    }

    /// Returns the stream as a user of graph pools, in the capture `since` if it is in one.
    pub(crate) fn user(&self, since: Option<u64>) -> User {
        User::new(self.key, self.raw as usize, self.kept().cloned(), since)
    }

    /// Returns the caller's stream object, if it may be kept as long as the stream is needed.
    pub(crate) fn kept(&self) -> Option<&'a Stream> {
        self.stream.filter(|stream| {
            !matches!(
                stream.kind(),
                StreamKind::Borrowed | StreamKind::PerThreadDefault
            )
        })
    }
}
