//! Pooled events, by context: an event can be recorded only on streams of its own context.

use std::collections::HashMap;
use std::sync::Arc;

use crate::driver::{Context, DriverError, Event, Stream, process};
use crate::locks::held::Mutex;

/// Unused events, by the key of their context. Cheap to clone; clones share the events.
#[derive(Debug, Clone, Default)]
pub(crate) struct EventPools(Arc<Pools>);

#[derive(Debug, Default)]
struct Pools {
    idle: Mutex<HashMap<u64, Vec<Event>>>,
    /// The key of the only context whose events are kept, if there is one: an event keeps its context alive.
    home: Option<u64>,
}

impl EventPools {
    /// Creates a pool that keeps events of one context only; others are destroyed after use.
    pub(crate) fn of(context: &Context) -> EventPools {
        EventPools(Arc::new(Pools {
            idle: Mutex::default(),
            home: Some(context.id()),
        }))
    }

    /// Creates a pool that keeps no events: each is destroyed after use, so that none keeps its context alive.
    pub(crate) fn unpooled() -> EventPools {
        EventPools(Arc::new(Pools {
            idle: Mutex::default(),
            home: Some(u64::MAX),
        }))
    }

    /// Destroys the unused events.
    pub(crate) fn clear(&self) {
        let idle = std::mem::take(&mut *process::lock(&self.0.idle));
        drop(idle);
    }

    /// Returns an event of a context: a pooled one, or a new one.
    pub(crate) fn take(&self, context: &Context) -> Result<Pooled, DriverError> {
        let pooled = {
            let mut pools = process::lock(&self.0.idle);
            pools.get_mut(&context.id()).and_then(Vec::pop)
        };
        let event = match pooled {
            Some(event) => event,
            None => context.enter()?.create_event()?,
        };
        Ok(Pooled {
            event: Some(event),
            pools: self.clone(),
        })
    }

    /// Returns an event recorded after all work submitted to a stream so far.
    pub(crate) fn record(&self, stream: &Stream) -> Result<Pooled, DriverError> {
        let pooled = self.take(stream.context())?;
        if let Some(event) = &pooled.event {
            stream.mark(event)?;
        }
        Ok(pooled)
    }
}

/// An event that returns to its pool when dropped. Waits already submitted keep the recorded work, so the event may be
/// recorded again immediately.
#[derive(Debug)]
pub(crate) struct Pooled {
    /// Present until the drop.
    event: Option<Event>,
    pools: EventPools,
}

impl Pooled {
    /// Makes later work of a stream wait for the recorded work.
    pub(crate) fn hold_back(&self, stream: &Stream) -> Result<(), DriverError> {
        match &self.event {
            Some(event) => stream.wait(event),
            None => Ok(()),
        }
    }

    /// Returns the context of the event.
    pub(crate) fn context(&self) -> Option<&Context> {
        self.event.as_ref().map(Event::context)
    }

    /// The pool that it returns to.
    pub(crate) fn pools(&self) -> &EventPools {
        &self.pools
    }

    /// Waits on the host.
    pub(crate) fn wait(&self) -> Result<(), DriverError> {
        match &self.event {
            Some(event) => event.context().enter()?.wait(event),
            None => Ok(()),
        }
    }

    pub(crate) fn is_complete(&self) -> Result<bool, DriverError> {
        match &self.event {
            Some(event) => event.context().enter()?.query(event),
            None => Ok(true),
        }
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        if let Some(event) = self.event.take() {
            let key = event.context().id();
            if self.pools.0.home.is_some_and(|home| home != key) {
                return;
            }
            let mut pools = process::lock(&self.pools.0.idle);
            pools.entry(key).or_default().push(event);
        }
    }
}
