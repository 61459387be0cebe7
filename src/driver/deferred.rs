//! Deferred destruction: handles that a destructor could not destroy because it could not call the driver. A later call
//! in the same context destroys them.

use super::error::DriverError;
use super::pages;
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
pub(super) enum Deferred {
    Stream(sys::CUstream),
    Event(sys::CUevent),
    Graph(sys::CUgraph),
    GraphExec(sys::CUgraphExec),
    UserObject(sys::CUuserObject),
    Module(sys::CUmodule),
    Pool(sys::CUmemoryPool),
    Host(NonNull<c_void>),
    /// Page-locked pages of the process, and their bytes.
    Pages(NonNull<c_void>, usize),
    /// The retain of the primary context of a device.
    Primary(sys::CUdevice),
}

// SAFETY: handles may be destroyed on any thread, and these have no other owner.
unsafe impl Send for Deferred {}

impl Deferred {
    /// Whether destroying the handle may wait for work.
    pub(super) fn waits(&self) -> bool {
        matches!(
            self,
            Deferred::Module(_) | Deferred::Host(_) | Deferred::Pages(..) | Deferred::Primary(_)
        )
    }

    /// Destroys the handle in its context, which is current.
    pub(super) fn destroy(&self, driver: &Driver) -> Result<(), DriverError> {
        // SAFETY: each handle is owned, no longer reachable, and was not destroyed before. The driver keeps what
        // submitted work still needs of streams, events, pools and executables. Executables are independent of their
        // graph, which keeps its own references to user objects. No function of a module is held any more, and work on
        // page-locked memory was waited for.
        unsafe {
            match *self {
                Deferred::Stream(raw) => {
                    // The driver may reuse the handle for another stream from here on.
                    driver.found().remove(raw, u64::MAX);
                    call!(driver, cuStreamDestroy_v2(raw))
                }
                Deferred::Event(raw) => call!(driver, cuEventDestroy_v2(raw)),
                Deferred::Graph(raw) => call!(driver, cuGraphDestroy(raw)),
                Deferred::GraphExec(raw) => call!(driver, cuGraphExecDestroy(raw)),
                Deferred::UserObject(raw) => call!(driver, cuUserObjectRelease(raw, 1)),
                Deferred::Module(raw) => call!(driver, cuModuleUnload(raw)),
                Deferred::Pool(raw) => call!(driver, cuMemPoolDestroy(raw)),
                Deferred::Host(address) => call!(driver, cuMemFreeHost(address.as_ptr())),
                Deferred::Pages(address, bytes) => {
                    call!(driver, cuMemHostUnregister(address.as_ptr()))?;
                    pages::unmap(address, bytes);
                    Ok(())
                }
                Deferred::Primary(device) => call!(driver, cuDevicePrimaryCtxRelease_v2(device)),
            }
        }
    }
}

impl fmt::Display for Deferred {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Deferred::Stream(_) => "a stream",
            Deferred::Event(_) => "an event",
            Deferred::Graph(_) => "a graph",
            Deferred::GraphExec(_) => "an executable graph",
            Deferred::UserObject(_) => "a user object",
            Deferred::Module(_) => "a module",
            Deferred::Pool(_) => "a memory pool",
            Deferred::Host(_) | Deferred::Pages(..) => "page-locked memory",
            Deferred::Primary(_) => "a primary context",
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
pub(super) struct DeferredList {
    any: AtomicBool,
    list: Mutex<Vec<Deferred>>,
}

impl DeferredList {
    /// Takes over the deferred destructions that a former object of the context with this id left behind.
    pub(super) fn inherited(driver: &Driver, context: u64) -> DeferredList {
        if driver.forbids_destruction() {
            return DeferredList::default();
        }
        let left = driver.deferred().lock().remove(&context);
        let list = left.and_then(|left| left.get::<DeferredList>());
        let list = list.map_or_else(Vec::new, |left| std::mem::take(&mut *left.list.lock()));
        DeferredList {
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
        let mut all = driver.deferred().lock();
        let none = || Entry::Forever(Arc::<DeferredList>::default());
        let left = all.entry(context).or_insert_with(none);
        if let Some(left) = left.get::<DeferredList>() {
            left.list.lock().extend(list);
        }
    }

    pub(super) fn add(&self, handle: Deferred) {
        let mut list = self.list.lock();
        list.push(handle);
        self.any.store(true, Ordering::Relaxed);
    }

    /// Destroys the deferred handles in their context, which is current; those whose destruction may wait for work only
    /// if the caller allows it.
    pub(super) fn destroy(&self, driver: &Driver, may_wait: bool) {
        if !self.any() || driver.forbids_destruction() {
            return;
        }
        let due: Vec<Deferred> = {
            let mut list = self.list.lock();
            let (due, kept) = list
                .drain(..)
                .partition(|handle| may_wait || !handle.waits());
            *list = kept;
            self.any.store(!list.is_empty(), Ordering::Relaxed);
            due
        };
        for handle in due {
            if let Err(error) = handle.destroy(driver) {
                driver.drop_failed(&handle, error);
            }
        }
    }
}
