//! A bounded set of streams with stable numbers.

use std::sync::Arc;

use crate::driver::{Context, Stream, process};
use crate::locks::held::{Locked, Mutex};

use crate::error::Error;

/// Streams of one context that are made once and kept: at most as many as its capacity. Numbers
/// count up from 1 and are never used again; 0 is the default stream. Cheap to clone.
///
/// ```
/// use cualloc::resource::StreamPool;
/// # use cualloc::{driver::Context, sim::{SimConfig, Simulator}};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
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

#[derive(Debug, Default)]
struct State {
    streams: Vec<(u64, Stream)>,
    /// Streams that are being made.
    coming: usize,
    last: u64,
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

    /// Streams that it may make.
    pub fn capacity(&self) -> usize {
        self.0.capacity
    }

    /// Streams made.
    pub fn len(&self) -> usize {
        self.lock().streams.len()
    }

    /// Whether none was made.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> Locked<'_, State> {
        process::lock(&self.0.state)
    }

    /// Makes a stream; it and its number.
    ///
    /// # Errors
    /// [`Error::Exhausted`] at capacity, never another stream instead; driver errors.
    pub fn acquire(&self) -> Result<(u64, Stream), Error> {
        if process::is_forked_child() {
            return Err(Error::ForkedChild);
        }
        {
            let mut state = self.lock();
            if state.streams.len() + state.coming >= self.0.capacity {
                return Err(Error::Exhausted {
                    what: "streams",
                    maximum: self.0.capacity,
                });
            }
            state.coming += 1;
        }
        let made = Stream::new(&self.0.context);
        let mut state = self.lock();
        state.coming -= 1;
        let stream = made?;
        state.last += 1;
        let id = state.last;
        state.streams.push((id, stream.clone()));
        Ok((id, stream))
    }

    /// The stream of a number; none if the pool never gave it. 0 is the default stream.
    pub fn get(&self, id: u64) -> Option<Stream> {
        if id == 0 {
            return Some(Stream::legacy(&self.0.context));
        }
        let state = self.lock();
        let found = state.streams.iter().find(|(known, _)| *known == id);
        found.map(|(_, stream)| stream.clone())
    }
}
