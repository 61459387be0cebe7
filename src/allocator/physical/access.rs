//! The devices that may access an allocator's memory.
//!
//! A device can be added while other threads map memory. A thread that maps memory holds a [`Mapper`] from before it
//! reads the devices until the memory is published. An addition first extends the devices, then waits for the mappers
//! that began before, and then grants access to all published memory: mappers that begin later grant it themselves.

use std::sync::{Arc, Condvar};

use crate::driver::Device;
use crate::locks::held::Mutex;

/// The devices that may access an allocator's memory, its own first.
#[derive(Debug)]
pub(crate) struct Access {
    state: Mutex<State>,
    /// Notified when the last mapper of a generation or an addition ends.
    ended: Condvar,
}

#[derive(Debug)]
struct State {
    devices: Arc<[Device]>,
    /// Number of additions so far.
    generation: usize,
    /// Mappers of this generation and of the one before, by the parity of the generation.
    mappers: [usize; 2],
    /// Whether an addition is in progress.
    adding: bool,
}

/// A thread that maps memory, until dropped.
pub(crate) struct Mapper<'a> {
    access: &'a Access,
    generation: usize,
    devices: Arc<[Device]>,
}

/// An addition in progress. The device is removed again unless the addition is [finished](Self::finish).
pub(crate) struct Addition<'a> {
    access: &'a Access,
    finished: bool,
}

impl Access {
    pub(crate) fn new(devices: Vec<Device>) -> Access {
        let state = State {
            devices: devices.into(),
            generation: 0,
            mappers: [0; 2],
            adding: false,
        };
        Access {
            state: Mutex::new(state),
            ended: Condvar::new(),
        }
    }

    pub(crate) fn begin_mapping(&self) -> Mapper<'_> {
        let mut state = self.state.lock();
        let generation = state.generation;
        state.mappers[generation % 2] += 1;
        Mapper {
            access: self,
            generation,
            devices: Arc::clone(&state.devices),
        }
    }

    /// Begins to add a device, once no other addition is in progress and all memory that was mapped without the device
    /// is published. `None` if the device has access already.
    pub(crate) fn begin_adding(&self, device: &Device) -> Option<Addition<'_>> {
        let mut state = self.state.lock();
        while state.adding {
            state = state.wait(&self.ended);
        }
        if state.devices.contains(device) {
            return None;
        }
        state.adding = true;
        let added = state.devices.iter().chain([device]).cloned();
        state.devices = added.collect();
        let before = state.generation % 2;
        state.generation += 1;
        while state.mappers[before] > 0 {
            state = state.wait(&self.ended);
        }
        Some(Addition {
            access: self,
            finished: false,
        })
    }
}

impl Mapper<'_> {
    pub(crate) fn devices(&self) -> &[Device] {
        &self.devices
    }
}

impl Drop for Mapper<'_> {
    fn drop(&mut self) {
        let mappers = &mut self.access.state.lock().mappers[self.generation % 2];
        *mappers -= 1;
        if *mappers == 0 {
            self.access.ended.notify_all();
        }
    }
}

impl Addition<'_> {
    /// Keeps the device.
    pub(crate) fn finish(mut self) {
        self.finished = true;
    }
}

impl Drop for Addition<'_> {
    fn drop(&mut self) {
        let mut state = self.access.state.lock();
        if !self.finished {
            let left = state.devices.len() - 1;
            state.devices = state.devices[..left].into();
        }
        state.adding = false;
        self.access.ended.notify_all();
    }
}
