//! Pooled events: those of one context are recorded on streams of that context only.

use std::collections::HashMap;
use std::sync::Arc;

use crate::driver::{Context, DriverError, Event, Stream, process};
use crate::locks::held::Mutex;

/// Events that are not in use, by the key of their context. Cheap to clone; clones share the events.
#[derive(Debug, Clone, Default)]
pub(crate) struct EventPools(Arc<Pools>);

#[derive(Debug, Default)]
struct Pools {
    idle: Mutex<HashMap<u64, Vec<Event>>>,
    /// The key of the only context whose events are kept, if there is one: an event keeps its context
    /// alive.
    home: Option<u64>,
}

impl EventPools {
    /// Keeps events of one context alone; those of others are destroyed after their use.
    pub(crate) fn of(context: &Context) -> EventPools {
        EventPools(Arc::new(Pools {
            idle: Mutex::default(),
            home: Some(context.id()),
        }))
    }

    /// Keeps no events: each is destroyed after its use, so that none keeps its context.
    pub(crate) fn kept_by_nobody() -> EventPools {
        EventPools(Arc::new(Pools {
            idle: Mutex::default(),
            home: Some(u64::MAX),
        }))
    }

    /// Destroys the events that are not in use.
    pub(crate) fn clear(&self) {
        let idle = std::mem::take(&mut *process::lock(&self.0.idle));
        drop(idle);
    }

    /// An event of a context: a pooled one, or a new one.
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

    /// An event that stands for everything given to a stream so far.
    pub(crate) fn record(&self, stream: &Stream) -> Result<Pooled, DriverError> {
        let pooled = self.take(stream.context())?;
        if let Some(event) = &pooled.event {
            stream.mark(event)?;
        }
        Ok(pooled)
    }
}

/// An event that goes back to its pool when it is dropped. Waits that were submitted on it hold what
/// it stood for, so it may be recorded anew at once.
#[derive(Debug)]
pub(crate) struct Pooled {
    /// There until the drop.
    event: Option<Event>,
    pools: EventPools,
}

impl Pooled {
    /// Lets later work of a stream start only after what the event stands for.
    pub(crate) fn hold_back(&self, stream: &Stream) -> Result<(), DriverError> {
        match &self.event {
            Some(event) => stream.wait(event),
            None => Ok(()),
        }
    }

    /// The context of the event.
    pub(crate) fn context(&self) -> Option<&Context> {
        self.event.as_ref().map(Event::context)
    }

    /// Where it goes back to.
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
