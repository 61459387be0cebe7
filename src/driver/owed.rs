//! Deferred destruction: handles that a destructor could not destroy because it could not call the driver. A later call
//! in the same context destroys them.

use super::error::DriverError;
use super::registry::Entry;
use super::symbols::Feature;
use super::sys;
use super::table::{Driver, call};
use std::cell::Cell;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::locks::held::Mutex;

/// A handle that is no longer reachable and still has to be destroyed.
#[derive(Debug)]
pub(super) enum Owed {
    Stream(sys::CUstream),
    Event(sys::CUevent),
    Graph(sys::CUgraph),
    GraphExec(sys::CUgraphExec),
    UserObject(sys::CUuserObject),
    Module(sys::CUmodule),
    Pool(sys::CUmemoryPool),
    Host(NonNull<c_void>),
    /// The retain of the primary context of a device.
    Primary(sys::CUdevice),
}

// SAFETY: handles may be destroyed on any thread, and these have no other owner.
unsafe impl Send for Owed {}

impl Owed {
    /// Whether destroying the handle may wait for work.
    pub(super) fn waits(&self) -> bool {
        matches!(self, Owed::Module(_) | Owed::Host(_) | Owed::Primary(_))
    }

    /// Destroys the handle in its context, which is current.
    pub(super) fn destroy(&self, driver: &Driver) -> Result<(), DriverError> {
        // SAFETY: each handle is owned, no longer reachable, and was not destroyed before. The driver keeps what
        // submitted work still needs of streams, events, pools and executables. Executables are independent of their
        // graph, which keeps its own references to user objects. No function of a module is held any more, and work on
        // page-locked memory was waited for.
        unsafe {
            match *self {
                Owed::Stream(raw) => {
                    // The driver may reuse the handle for another stream from here on.
                    driver.found().remove(raw, u64::MAX);
                    call!(driver, cuStreamDestroy_v2(raw))
                }
                Owed::Event(raw) => call!(driver, cuEventDestroy_v2(raw)),
                Owed::Graph(raw) => call!(driver, cuGraphDestroy(raw)),
                Owed::GraphExec(raw) => call!(driver, cuGraphExecDestroy(raw)),
                Owed::UserObject(raw) => call!(driver, cuUserObjectRelease(raw, 1)),
                Owed::Module(raw) => call!(driver, cuModuleUnload(raw)),
                Owed::Pool(raw) => call!(driver, cuMemPoolDestroy(raw)),
                Owed::Host(address) => call!(driver, cuMemFreeHost(address.as_ptr())),
                Owed::Primary(device) => call!(driver, cuDevicePrimaryCtxRelease_v2(device)),
            }
        }
    }
}

impl fmt::Display for Owed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Owed::Stream(_) => "a stream",
            Owed::Event(_) => "an event",
            Owed::Graph(_) => "a graph",
            Owed::GraphExec(_) => "an executable graph",
            Owed::UserObject(_) => "a user object",
            Owed::Module(_) => "a module",
            Owed::Pool(_) => "a memory pool",
            Owed::Host(_) => "page-locked memory",
            Owed::Primary(_) => "a primary context",
        })
    }
}

thread_local!(static HOST_FUNCTION: Cell<bool> = const { Cell::new(false) });

/// Runs a host function of a stream, which must not call the driver: everything dropped in it is destroyed later.
pub(crate) fn in_host_function<R>(run: impl FnOnce() -> R) -> R {
    /// Ends the host function, also on a panic.
    struct Running(bool);
    impl Drop for Running {
        fn drop(&mut self) {
            HOST_FUNCTION.set(self.0);
        }
    }
    let _running = Running(HOST_FUNCTION.replace(true));
    run()
}

pub(super) fn is_host_function() -> bool {
    HOST_FUNCTION.get()
}

#[derive(Debug, Default)]
pub(super) struct Debts {
    any: AtomicBool,
    list: Mutex<Vec<Owed>>,
}

impl Debts {
    /// Takes over the deferred destructions that a former object of the context with this id left behind.
    pub(super) fn inherited(driver: &Driver, context: u64) -> Debts {
        if driver.drops_nothing() {
            return Debts::default();
        }
        let left = driver.debts().lock().remove(&context);
        let list = left.and_then(|left| left.get::<Debts>());
        let list = list.map_or_else(Vec::new, |left| std::mem::take(&mut *left.list.lock()));
        Debts {
            any: AtomicBool::new(!list.is_empty()),
            list: Mutex::new(list),
        }
    }

    pub(super) fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Leaves the deferred destructions to the next object of the same context. If the driver has no context ids,
    /// another context may have the same key by then, so the handles are leaked.
    pub(super) fn leave(&self, driver: &Driver, context: u64) {
        if !self.any() || !driver.has(Feature::StreamIds) {
            return;
        }
        let list = std::mem::take(&mut *self.list.lock());
        let mut all = driver.debts().lock();
        let none = || Entry::Forever(Arc::<Debts>::default());
        let left = all.entry(context).or_insert_with(none);
        if let Some(left) = left.get::<Debts>() {
            left.list.lock().extend(list);
        }
    }

    pub(super) fn add(&self, owed: Owed) {
        let mut list = self.list.lock();
        list.push(owed);
        self.any.store(true, Ordering::Relaxed);
    }

    /// Destroys the deferred handles in their context, which is current; those whose destruction may wait for work only
    /// if the caller allows it.
    pub(super) fn pay(&self, driver: &Driver, may_wait: bool) {
        if !self.any() || driver.drops_nothing() {
            return;
        }
        let due: Vec<Owed> = {
            let mut list = self.list.lock();
            let (due, kept) = list.drain(..).partition(|owed| may_wait || !owed.waits());
            *list = kept;
            self.any.store(!list.is_empty(), Ordering::Relaxed);
            due
        };
        for owed in due {
            if let Err(error) = owed.destroy(driver) {
                driver.drop_failed(&owed, error);
            }
        }
    }
}
