//! Default streams by their special handles: null and 1 for the legacy one, 2 for the calling thread's own.
//!
//! A handle of this kind names no stream by itself: the driver takes the one of the context that is current.
//! Here it always means the stream of the allocator's context, so that a block's order does not depend on
//! what happens to be current where it is allocated, recorded or freed.

use std::sync::OnceLock;

use crate::driver::{Stream, sys};

use super::engine::{Engine, is_per_thread};
use super::error::Error;
use super::streams::StreamKey;

/// What an allocator knows about the default streams of its context.
#[derive(Debug)]
pub(crate) struct Defaults {
    /// Another current context is an error.
    checked: bool,
    /// Id of the legacy stream, once it was asked: it lives as long as its context.
    legacy: OnceLock<u64>,
}

impl Defaults {
    pub(crate) fn new(checked: bool) -> Self {
        Defaults {
            checked,
            legacy: OnceLock::new(),
        }
    }
}

impl Engine {
    /// Names the default stream of the allocator's context that a special handle stands for, whichever context
    /// is current, or none. The same name as that of a [`Stream`] made of the handle and this context.
    pub(crate) fn special_key(&self, raw: sys::CUstream) -> Result<StreamKey, Error> {
        if self.defaults.checked {
            self.refuse_other_context(raw)?;
        }
        let shared = !is_per_thread(raw as usize);
        if shared && let Some(id) = self.defaults.legacy.get() {
            return Ok(StreamKey::Id(*id));
        }
        // SAFETY: special handles are always valid.
        let stream = unsafe { Stream::from_raw(&self.context, raw) };
        let id = stream
            .and_then(|stream| stream.id())
            .map_err(|e| self.unnamed(raw, e))?;
        if shared {
            self.defaults.legacy.get_or_init(|| id);
        }
        Ok(StreamKey::Id(id))
    }

    /// Who has another context current and passes a special handle means that context's stream, most likely.
    #[inline(never)]
    fn refuse_other_context(&self, raw: sys::CUstream) -> Result<(), Error> {
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
