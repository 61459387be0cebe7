//! A bounded set of streams with stable numbers.

use std::sync::Arc;

use crate::allocator::Limit;
use crate::driver::{Context, Stream, process};
use crate::error::Error;
use crate::locks::held::{Locked, Mutex};

/// Streams of one context that are created on request and kept, up to a capacity. Numbers count up from 1; 0 is the
/// default stream. Cheap to clone.
///
/// ```
/// use cualloc::resource::StreamPool;
/// # use cualloc::{sim::{SimConfig, Simulator}};
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let context = sim.driver()?.context(0)?;
/// let pool = StreamPool::new(&context);
/// let (id, stream) = pool.acquire()?;
/// assert_eq!(pool.get(id).map(|s| s.raw()), Some(stream.raw()));
/// assert!(pool.get(99).is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct StreamPool(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    context: Context,
    capacity: usize,
    state: Mutex<State>,
}

/// The stream with number n is at n - 1.
#[derive(Debug, Default)]
struct State {
    streams: Vec<Stream>,
    /// The number of streams being created.
    coming: usize,
}

impl StreamPool {
    /// A pool of at most 16 streams.
    pub fn new(context: &Context) -> StreamPool {
        StreamPool::with_capacity(context, 16)
    }

    /// A pool of at most `capacity` streams, at least 1.
    pub fn with_capacity(context: &Context, capacity: usize) -> StreamPool {
        StreamPool(Arc::new(Inner {
            context: context.clone(),
            capacity: capacity.max(1),
            state: Mutex::default(),
        }))
    }

    /// Bytes that a program may plan per stream, for instance as the limit of a [`Budget`](super::Budget): 256 MiB, or
    /// the size in `CUALLOC_STREAM_BUDGET`; 0 and invalid sizes are ignored. This crate does not use it.
    pub fn planned_bytes() -> u64 {
        stream_budget(crate::environment::text("CUALLOC_STREAM_BUDGET").as_deref())
    }

    fn lock(&self) -> Locked<'_, State> {
        process::lock(&self.0.state)
    }

    /// Creates a stream, and returns it with its number.
    ///
    /// # Errors
    /// [`Error::Exhausted`] at capacity; driver errors.
    pub fn acquire(&self) -> Result<(u64, Stream), Error> {
        if process::is_forked_child() {
            return Err(Error::ForkedChild);
        }
        {
            let mut state = self.lock();
            if state.streams.len() + state.coming >= self.0.capacity {
                let (what, maximum) = ("streams", self.0.capacity);
                return Err(Error::Exhausted { what, maximum });
            }
            state.coming += 1;
        }
        let created = Stream::new(&self.0.context);
        let mut state = self.lock();
        state.coming -= 1;
        let stream = created?;
        state.streams.push(stream.clone());
        Ok((state.streams.len() as u64, stream))
    }

    /// Returns the stream with a number; none if the pool has not created it.
    pub fn get(&self, id: u64) -> Option<Stream> {
        match usize::try_from(id).ok()?.checked_sub(1) {
            None => Some(Stream::legacy(&self.0.context)),
            Some(at) => self.lock().streams.get(at).cloned(),
        }
    }
}

fn stream_budget(setting: Option<&str>) -> u64 {
    match setting.map(|text| text.trim().parse()) {
        Some(Ok(Limit::Bytes(bytes))) => bytes,
        _ => 256 << 20,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// S5.36: 256 MiB, another number of bytes, and nothing else.
    #[test]
    fn s5_36_stream_budget_ignores_invalid_sizes() {
        assert_eq!(stream_budget(None), 256 << 20);
        assert_eq!(stream_budget(Some("4096")), 4096);
        assert_eq!(stream_budget(Some("64MiB")), 64 << 20);
        for ignored in ["", "0", "-1", "1.5", "50%", "lots", "99999999999999999999"] {
            assert_eq!(stream_budget(Some(ignored)), 256 << 20, "{ignored}");
        }
    }
}
