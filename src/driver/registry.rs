//! Objects of a driver, by number: the driver keeps the list, so that their creators find them again.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

use crate::locks::held::{Locked, Mutex};

/// Objects of one type, by number.
#[derive(Default)]
pub(super) struct Registry(Mutex<HashMap<u64, Entry>>);

/// An object, held weakly, or strongly forever.
pub(super) enum Entry {
    Forever(Arc<dyn Any + Send + Sync>),
    WhileUsed(Weak<dyn Any + Send + Sync>),
}

impl Entry {
    pub(super) fn while_used<T: Any + Send + Sync>(thing: &Arc<T>) -> Entry {
        let weak = Arc::downgrade(thing);
        Entry::WhileUsed(weak)
    }

    /// Returns the object if it still exists.
    pub(super) fn get<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        let found = match self {
            Entry::Forever(kept) => Some(Arc::clone(kept)),
            Entry::WhileUsed(weak) => weak.upgrade(),
        };
        found.and_then(|found| found.downcast().ok())
    }
}

impl Registry {
    pub(super) fn lock(&self) -> Locked<'_, HashMap<u64, Entry>> {
        self.0.lock()
    }

    pub(super) fn find<T: Any + Send + Sync>(&self, number: u64) -> Option<Arc<T>> {
        self.lock().get(&number).and_then(Entry::get)
    }

    pub(super) fn all<T: Any + Send + Sync>(&self) -> Vec<Arc<T>> {
        self.lock().values().filter_map(Entry::get).collect()
    }

    /// Adds an object, or returns the existing one with this number.
    pub(super) fn keep<T: Any + Send + Sync>(&self, number: u64, entry: Entry) -> Option<Arc<T>> {
        let mut things = self.lock();
        if let Some(there) = things.get(&number).and_then(Entry::get) {
            return Some(there);
        }
        things.insert(number, entry);
        None
    }
}
