//! Objects that live as long as graphs.

use super::context::Context;
use super::deferred::{Deferred, in_host_function};
use super::error::DriverError;
use super::sys;
use crate::foreign::guarded;
use std::ffi::c_void;

/// A function that the driver calls when nothing references the object any more: this value is dropped, and every graph
/// that [retains](super::Graph::retain) it is destroyed together with its clones, its executables and their launches.
///
/// `Send` and `Sync`.
pub struct UserObject {
    context: Context,
    raw: sys::CUuserObject,
}

// SAFETY: the driver counts references to the object under its own lock.
unsafe impl Send for UserObject {}
// SAFETY: as above, and nothing in here changes.
unsafe impl Sync for UserObject {}

type Hook = Box<dyn FnOnce() + Send>;

/// Runs a doubly boxed function.
///
/// # Safety
/// `data` comes from `Box::<Hook>::into_raw`, and this is its only call.
unsafe extern "C" fn run(data: *mut c_void) {
    // SAFETY: the caller's contract.
    let hook = unsafe { Box::from_raw(data.cast::<Hook>()) };
    guarded("the function of a user object", || in_host_function(*hook));
}

impl UserObject {
    /// Creates an object whose end calls `hook` on a thread of the driver, some time after the last reference is
    /// dropped. The hook must neither call the driver nor wait for it; handles dropped in it are destroyed by a later
    /// call. A panic is logged.
    ///
    /// # Errors
    /// The driver's; then `hook` is dropped. `CUDA_ERROR_NOT_FOUND` without
    /// [`Feature::GraphLifetime`](super::Feature::GraphLifetime).
    pub fn new(
        context: &Context,
        hook: impl FnOnce() + Send + 'static,
    ) -> Result<UserObject, DriverError> {
        let entered = context.enter()?;
        context.deferred().destroy(entered.driver(), false);
        let hook: Hook = Box::new(hook);
        let data = Box::into_raw(Box::new(hook));
        // SAFETY: the function is called once, with the data it expects.
        let created = unsafe { entered.create_object(run, data.cast()) };
        // SAFETY: the driver did not take ownership.
        let raw = created.inspect_err(|_| drop(unsafe { Box::from_raw(data) }))?;
        Ok(UserObject {
            context: context.clone(),
            raw,
        })
    }

    /// Returns the driver's handle.
    pub fn raw(&self) -> sys::CUuserObject {
        self.raw
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }
}

debug_fields!(UserObject, self => raw: self.raw);

impl Drop for UserObject {
    fn drop(&mut self) {
        self.context.release(Deferred::UserObject(self.raw));
    }
}
