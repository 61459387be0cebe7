//! Streams by their names: handles and ids, default streams, and whether a stream is captured.

use std::sync::Arc;

use crate::driver::{Context, DriverError, Stream, StreamKind, sys};

use crate::allocator::engine::Engine;
use crate::allocator::heap::Heap;
use crate::allocator::stream::slot::{Holder, Slot, StreamKey};
use crate::allocator::stream::slot::{is_per_thread, is_special};
use crate::error::{Error, StreamMisuse};
use crate::sync::capture::is_capture_refusal;

impl Engine {
    /// Streams of another driver are refused: ids tell apart the streams of one.
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
        })
    }

    /// Why a stream could not be named. Drivers refuse to say the id of one that is being captured.
    pub(crate) fn unnamed(&self, raw: sys::CUstream, error: DriverError) -> Error {
        if !is_capture_refusal(error.code()) {
            return self.error_at(None, raw, error);
        }
        // The legacy stream, which stands behind others, is asked whenever it matters.
        if error.code() != sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
            self.driver().saw_capture(raw);
        }
        Error::Capturing {
            stream: raw as usize,
        }
    }

    /// Names a stream by its handle. Handle values are reused, so the driver is asked for the id
    /// each time.
    ///
    /// # Safety
    /// `raw` must be a live stream or a special handle.
    pub(crate) unsafe fn named_raw(&self, raw: sys::CUstream) -> Result<Named<'static>, Error> {
        self.usable()?;
        let key = if is_special(raw) {
            StreamKey::Id(self.special_key(raw)?)
        } else if let Some(key) = self.key_at_hand(raw as usize) {
            StreamKey::Id(key)
        } else {
            // SAFETY: the caller vouches for the stream.
            match unsafe { self.raw_id(raw) } {
                Ok(Some(id)) => StreamKey::Id(id),
                Ok(None) => StreamKey::Handle(raw as usize),
                // A pool may serve it all the same; what does not refuses it.
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
        })
    }

    /// The key of a stream that captures, so that the driver does not tell its id: its handle, unless that is known
    /// to be the stream's own.
    fn key_of_capturing(&self, raw: usize) -> StreamKey {
        if let Some(own) = self.driver().own_stream(raw) {
            return StreamKey::Id(own.own_id());
        }
        let heap = self.lock();
        let mut known = heap.streams.iter();
        let same = known.find(|(_, slot)| slot.named && slot.handle_to_ask() == raw);
        same.map_or(StreamKey::Handle(raw), |(_, slot)| slot.key)
    }

    /// The driver's id of a stream, if it has ids.
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

    /// Keeps a stream by its handle until that is retired, on the caller's word.
    pub(crate) fn adopt(&self, named: &Named<'_>) -> Result<(), Error> {
        if is_per_thread(named.raw as usize) {
            return Err(Error::NotSupported {
                what: "adoption of a stream that is another one on each thread",
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
        heap.keep_handle(stream);
        Ok(())
    }

    /// Refuses a stream that is being captured: memory of a graph outlives the order of the stream.
    #[inline]
    pub(crate) fn refuse_capture(&self, named: &Named<'_>) -> Result<(), Error> {
        if self.no_captures {
            return Ok(());
        }
        if is_special(named.raw) {
            let context = named.stream.map_or(&self.context, Stream::context);
            return self.refuse_special_capture(named, context);
        }
        // SAFETY: whoever made the name vouched for the stream.
        match unsafe { self.driver().is_capturing(named.raw) } {
            Ok(false) => Ok(()),
            capturing => self.refuse_if(named, capturing, named.stream.map(Stream::context)),
        }
    }

    /// [`refuse_capture`](Self::refuse_capture) of a default stream of a context.
    #[inline(never)]
    pub(crate) fn refuse_special_capture(
        &self,
        named: &Named<'_>,
        context: &Context,
    ) -> Result<(), Error> {
        // The question is never refused, so the thread's capture mode need not be changed for it.
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
    pub(crate) fn refuse_if(
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

    /// The error of a driver call that used a stream, as [`error_in`](Self::error_in) the context that is given, else in
    /// that of the known stream with this handle.
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

    /// What a stream that is not known yet is registered with: its context, and who keeps it alive. Streams that
    /// nobody else holds any more are let go of first.
    pub(crate) fn newcomer(&self, named: &Named<'_>) -> Result<(Context, Holder), Error> {
        let context = self.context_of(named)?;
        // A handle may be that of a stream which somebody here destroys.
        let by_handle = match named.key {
            StreamKey::Id(id) if named.stream.is_none() => self.driver().owned_stream(id),
            _ => None,
        };
        // As long as its context, whoever names it.
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

    /// Lets go of streams that only we still hold: records their last marker and drops them.
    pub(crate) fn prune(&self) {
        let alone = self.lock().streams.held_here_alone();
        for (stream, key) in alone {
            if let Err(error) = self.retire_slot(stream, key) {
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
        // SAFETY: whoever made the name vouched for the stream.
        let raw = unsafe { self.driver().stream_context(named.raw) }.map_err(|e| self.error(e))?;
        if raw == self.context.raw() {
            return Ok(self.context.clone());
        }
        // SAFETY: the context of a live stream is alive, and stays so while the stream is in use.
        unsafe { Context::from_raw(self.driver(), raw) }.map_err(|e| self.error(e))
    }

    /// Names the default stream of the allocator's context that a special handle stands for, whichever context
    /// is current, or none. The same name as that of a [`Stream`] made of the handle and this context.
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

    /// Who has another context current and passes a special handle means that context's stream, most likely.
    #[inline(never)]
    pub(crate) fn refuse_other_context(&self, raw: sys::CUstream) -> Result<(), Error> {
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

impl Heap {
    /// The slot that a call finds by a stream's name, also if it was registered by the handle alone while the stream
    /// captured. Where streams may go without being retired such a handle may be another stream's by now.
    pub(crate) fn find_slot(&mut self, named: &Named<'_>) -> Option<u32> {
        let by_handle = StreamKey::Handle(named.raw as usize);
        let known = self.streams.find(named.key);
        if known.is_some() || named.key == by_handle || self.streams.unretired {
            return known;
        }
        let stream = self.streams.find(by_handle)?;
        if !self.caches.of(stream).is_empty() {
            return None;
        }
        self.streams.rename(stream, named.key);
        Some(stream)
    }

    /// The slot of a stream, if it is known.
    pub(crate) fn known_slot(&mut self, named: &Named<'_>) -> Option<u32> {
        let stream = self.find_slot(named)?;
        self.streams.tell(stream);
        if self.streams.woken {
            self.streams_changed();
        }
        let slot = &mut self.streams[stream];
        if slot.holder.is_callers()
            && let Some(kept) = named.kept()
        {
            // It was named by its handle until now.
            let former = std::mem::replace(&mut slot.holder, Holder::Kept(kept.clone()));
            slot.former = Some(former);
            self.caches.set_handle(stream, self.lasting_handle(stream));
        }
        Some(stream)
    }

    /// The caller promises that the handle of a stream lives until it is retired.
    fn keep_handle(&mut self, stream: u32) {
        let slot = &mut self.streams[stream];
        if let Holder::Foreign(token) = &slot.holder {
            slot.holder = Holder::Adopted(Arc::clone(token));
            self.streams.list_full(stream);
            self.caches.set_handle(stream, self.lasting_handle(stream));
        }
    }
}

/// A stream as a call names it.
pub(crate) struct Named<'a> {
    pub key: StreamKey,
    pub raw: sys::CUstream,
    /// The caller's handle object, if it has one.
    pub stream: Option<&'a Stream>,
}

impl<'a> Named<'a> {
    /// The caller's handle object, if that may be kept as long as the stream is needed.
    pub(crate) fn kept(&self) -> Option<&'a Stream> {
        self.stream.filter(|stream| {
            !matches!(
                stream.kind(),
                StreamKind::Borrowed | StreamKind::PerThreadDefault
            )
        })
    }
}
