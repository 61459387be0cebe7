//! One thing for each device.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Condvar;

use crate::driver::process;
use crate::error::Error;
use crate::locks::held::{Locked, Mutex};

type Build<T> = dyn Fn(usize) -> Result<T, Error> + Send + Sync;

/// One `T` for each device, built when it is first asked for. Each is built once, also if many threads ask; a
/// build that failed is tried again by the next call.
///
/// ```
/// use cualloc::resource::PerDevice;
/// let names = PerDevice::new(|ordinal| Ok(format!("GPU {ordinal}")));
/// assert_eq!(names.get(1)?, "GPU 1");
/// assert_eq!(names.all(), [(1, "GPU 1".to_owned())]);
/// # Ok::<(), cualloc::Error>(())
/// ```
pub struct PerDevice<T> {
    build: Box<Build<T>>,
    /// The values by ordinal of the device; none while one is being built.
    slots: Mutex<BTreeMap<usize, Option<T>>>,
    built: Condvar,
}

impl<T: Clone> PerDevice<T> {
    /// Of what a function builds for the ordinal of a device. The function runs without a lock; others who want that
    /// device's wait for it, so it must not ask for that itself.
    pub fn new(build: impl Fn(usize) -> Result<T, Error> + Send + Sync + 'static) -> PerDevice<T> {
        PerDevice {
            build: Box::new(build),
            slots: Mutex::default(),
            built: Condvar::new(),
        }
    }

    /// That of a device.
    ///
    /// # Errors
    /// Those of the function.
    pub fn get(&self, ordinal: usize) -> Result<T, Error> {
        {
            let mut slots = self.slots();
            loop {
                match slots.get(&ordinal) {
                    Some(Some(known)) => return Ok(known.clone()),
                    Some(None) => slots = slots.wait(&self.built),
                    None => break,
                }
            }
            slots.insert(ordinal, None);
        }
        // Ends also by a panic, so that nobody waits for ever.
        let mut attempt = Attempt {
            all: self,
            ordinal,
            result: None,
        };
        let made = (self.build)(ordinal)?;
        attempt.result = Some(made.clone());
        Ok(made)
    }

    /// All that were built, by ordinal.
    pub fn all(&self) -> Vec<(usize, T)> {
        let slots = self.slots();
        let built = slots
            .iter()
            .filter_map(|(ordinal, slot)| Some((*ordinal, slot.clone()?)));
        built.collect()
    }
}

impl<T> PerDevice<T> {
    fn slots(&self) -> Locked<'_, BTreeMap<usize, Option<T>>> {
        process::lock(&self.slots)
    }
}

struct Attempt<'a, T> {
    all: &'a PerDevice<T>,
    ordinal: usize,
    result: Option<T>,
}

impl<T> Drop for Attempt<'_, T> {
    fn drop(&mut self) {
        let result = self.result.take();
        let mut slots = self.all.slots();
        match result {
            Some(made) => slots.insert(self.ordinal, Some(made)),
            None => slots.remove(&self.ordinal),
        };
        drop(slots);
        self.all.built.notify_all();
    }
}

impl<T: fmt::Debug> fmt::Debug for PerDevice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerDevice")
            .field("slots", &*self.slots())
            .finish_non_exhaustive()
    }
}
