//! Contexts, and calls made with one of them current.

use super::defaults;
use super::deferred::{Deferred, DeferredList, is_host_function};
use super::device::Device;
use super::error::DriverError;
use super::process;
use super::registry::Entry;
use super::symbols::Feature;
use super::sys::{self, CUresult, CUstreamCaptureMode};
use super::table::{Driver, call, thin};
use std::fmt;
use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;

/// A context of a device: the primary one, retained by this crate, or a foreign one.
///
/// Cheap to clone. `Send` and `Sync`: any thread may enter it. The caller's current context is never changed, except
/// while an [`Entered`] exists.
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    raw: sys::CUcontext,
    device: Device,
    id: u64,
    /// Distinguishes its default streams from those of other contexts.
    number: u64,
    /// Whether it is the device's primary context, retained here; otherwise it is foreign.
    primary: bool,
    /// Handles of the context whose destruction is deferred.
    deferred: DeferredList,
    /// The object that keeps the context alive, if there is one; otherwise the caller guarantees it.
    owner: Owner,
}

/// An object that keeps a foreign handle alive.
pub(super) type Owner = Option<Box<dyn Send + Sync>>;

// SAFETY: a context handle may be used from any thread; the driver synchronises.
unsafe impl Send for Inner {}
// SAFETY: as above, and nothing in here changes.
unsafe impl Sync for Inner {}

impl Context {
    /// Returns the primary context of `device`, retained while it is in use here. The process-wide driver never
    /// releases it; any other driver releases it when the last clone is dropped.
    pub fn primary(device: &Device) -> Result<Context, DriverError> {
        let driver = device.driver();
        // Checked before taking the lock, which a thread of the parent may have held when it forked.
        if process::is_forked_child() {
            let code = CUresult::CUDA_ERROR_NOT_INITIALIZED;
            return Err(DriverError::new("cuDevicePrimaryCtxRetain", code));
        }
        let number = device.ordinal() as u64;
        if let Some(inner) = driver.primaries().find(number) {
            return Ok(Context(inner));
        }
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a local handle.
        unsafe { call!(driver, cuDevicePrimaryCtxRetain(&mut raw, device.raw())) }?;
        // From here on dropping the context releases it, also on the error path.
        let mut inner = Inner {
            raw,
            device: device.clone(),
            id: raw as u64,
            number: 0,
            primary: true,
            deferred: DeferredList::default(),
            owner: None,
        };
        inner.id = id_of(driver, raw)?;
        inner.number = defaults::number_of(inner.id);
        inner.deferred = DeferredList::inherited(driver, inner.id);
        let context = Context(Arc::new(inner));
        // The process-wide driver keeps its primary contexts forever. Any other driver keeps them only while they are
        // in use, since the context itself keeps the driver alive.
        let entry = match driver.is_process_wide() {
            true => Entry::Forever(context.0.clone()),
            false => Entry::while_used(&context.0),
        };
        // If another thread was faster, this context is dropped and released after the lock.
        let faster = driver.primaries().keep(number, entry);
        Ok(faster.map_or(context, Context))
    }

    /// Wraps a foreign context. It is never destroyed here.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_CONTEXT` for null, or the driver's.
    ///
    /// # Safety
    /// `raw` must be a live context of `driver`, and outlive the result, its clones and everything made from them.
    pub unsafe fn from_raw(driver: &Driver, raw: sys::CUcontext) -> Result<Context, DriverError> {
        // SAFETY: the caller's contract.
        unsafe { Context::borrowed(driver, raw, None) }
    }

    /// Like [`Context::from_raw`], with an object that keeps the context alive: it is dropped with the last clone of
    /// the result and of everything made from it.
    ///
    /// # Errors
    /// As [`Context::from_raw`]; then `owner` has been dropped.
    ///
    /// # Safety
    /// `raw` must be a live context of `driver` while `owner` exists.
    pub unsafe fn from_raw_with_owner(
        driver: &Driver,
        raw: sys::CUcontext,
        owner: impl Send + Sync + 'static,
    ) -> Result<Context, DriverError> {
        // SAFETY: the caller's contract; the owner stays with the result.
        unsafe { Context::borrowed(driver, raw, Some(Box::new(owner))) }
    }

    /// # Safety
    /// As for [`Context::from_raw`].
    unsafe fn borrowed(
        driver: &Driver,
        raw: sys::CUcontext,
        owner: Owner,
    ) -> Result<Context, DriverError> {
        if raw.is_null() {
            let code = CUresult::CUDA_ERROR_INVALID_CONTEXT;
            return Err(DriverError::new("cuCtxSetCurrent", code));
        }
        let switched = CurrentGuard::to(driver, raw)?;
        let device = current_device(driver)?;
        drop(switched);
        let id = id_of(driver, raw)?;
        Ok(Context(Arc::new(Inner {
            raw,
            device,
            id,
            number: defaults::number_of(id),
            primary: false,
            deferred: DeferredList::inherited(driver, id),
            owner,
        })))
    }

    /// Returns the context that is current on the calling thread, borrowed; none if there is none.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// As for [`Context::from_raw`]: the owner of the context does not destroy it while the result, its clones or
    /// anything made from them exist.
    ///
    /// ```compile_fail,E0133
    /// # use cualloc::driver::{Context, Driver};
    /// let driver = Driver::load()?;
    /// let context = Context::current(&driver)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub unsafe fn current(driver: &Driver) -> Result<Option<Context>, DriverError> {
        let raw = driver.current_raw()?;
        if raw.is_null() {
            return Ok(None);
        }
        // SAFETY: a current context is alive, and the caller keeps it alive.
        unsafe { Context::from_raw(driver, raw) }.map(Some)
    }

    /// Returns the driver's handle.
    pub fn raw(&self) -> sys::CUcontext {
        self.0.raw
    }

    /// Returns the driver that this context belongs to.
    #[inline]
    pub fn driver(&self) -> &Driver {
        self.0.device.driver()
    }

    /// Returns the device that this context is on.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Returns an id that distinguishes this context from all others of the driver. It is never reused; where the
    /// driver has no ids ([`Feature::StreamIds`]), it is the value of the handle.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    #[inline]
    pub(crate) fn legacy_id(&self) -> u64 {
        defaults::legacy(self.0.number)
    }

    #[inline]
    pub(crate) fn per_thread_id(&self) -> u64 {
        defaults::per_thread(self.0.number)
    }

    /// Waits until all work submitted to the context has completed.
    ///
    /// # Errors
    /// The driver's, including those of the work itself.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        self.enter()?.synchronize()
    }

    /// Makes this context current on the calling thread and its stream capture mode relaxed, so that calls which a
    /// capture forbids by default (allocation, queries, waits) succeed. Dropping the result restores both. Guards must
    /// be dropped in reverse order of creation.
    ///
    /// # Errors
    /// The driver's; then nothing has changed.
    pub fn enter(&self) -> Result<Entered<'_>, DriverError> {
        let switched = self.switch()?;
        let mode = relax(self.driver())?;
        Ok(Entered {
            context: self,
            mode,
            _switched: switched,
        })
    }

    /// Makes this context current on the calling thread without changing its stream capture mode: sufficient for
    /// submitting work to a stream, which no capture forbids, and cheaper than [`enter`](Self::enter). After an error
    /// nothing has changed.
    pub(crate) fn make_current(&self) -> Result<Current<'_>, DriverError> {
        let switched = self.switch()?;
        let switched = if switched.previous == self.raw() {
            // Submitting work never changes the current context, so there is nothing to restore.
            std::mem::forget(switched);
            None
        } else {
            Some(switched)
        };
        Ok(Current {
            driver: self.driver(),
            _switched: switched,
        })
    }

    /// Makes this context current on the calling thread if none is, as the CUDA runtime does in its first call; a
    /// context that is already current stays current.
    ///
    /// # Errors
    /// The driver's; then nothing has changed.
    pub fn make_current_if_none(&self) -> Result<(), DriverError> {
        if self.driver().current_raw()?.is_null() {
            std::mem::forget(self.switch()?);
        }
        Ok(())
    }

    /// Whether the context is certain to stay alive: it was retained here, or its owner is stored here.
    pub(crate) fn is_kept(&self) -> bool {
        self.0.is_kept()
    }

    /// Makes this context current without changing the capture mode: for cheap queries.
    pub(super) fn switch(&self) -> Result<CurrentGuard<'_>, DriverError> {
        self.0.check_identity()?;
        CurrentGuard::to(self.driver(), self.raw())
    }

    /// For destructors: destroys a handle with this context current, and logs a failure. Does nothing where destructors
    /// must not call the driver.
    ///
    /// If the context cannot be entered, the destruction is deferred. A failed destroy call is not repeated: the driver
    /// may have destroyed the handle anyway, and its value may have been reused by another thread since.
    pub(super) fn release(&self, handle: Deferred) {
        let driver = self.driver();
        if driver.forbids_destruction() {
            return;
        }
        if is_host_function() {
            return self.0.deferred.add(handle);
        }
        match self.enter() {
            Ok(_entered) => {
                self.0.deferred.destroy(driver, handle.waits());
                if let Err(error) = handle.destroy(driver) {
                    driver.drop_failed(&handle, error);
                }
            }
            Err(error) => {
                driver.drop_failed(&handle, error);
                if !is_over(&error) {
                    self.0.deferred.add(handle);
                }
            }
        }
    }

    pub(super) fn deferred(&self) -> &DeferredList {
        &self.0.deferred
    }
}

debug_fields!(Context, self =>
    device: self.0.device.ordinal(), id: self.0.id, primary: self.0.primary
);

impl Inner {
    fn is_kept(&self) -> bool {
        self.primary || self.owner.is_some()
    }

    /// Fails if the handle now belongs to another context: the driver reuses handles of destroyed contexts. A kept
    /// context is never destroyed.
    fn check_identity(&self) -> Result<(), DriverError> {
        if !self.is_kept() && id_of(self.device.driver(), self.raw)? != self.id {
            let code = CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED;
            return Err(DriverError::new("cuCtxGetId", code));
        }
        Ok(())
    }

    /// Performs all deferred destructions, because no later call will.
    fn destroy_all(&self) -> Result<(), DriverError> {
        let driver = self.device.driver();
        if !self.deferred.any() {
            return Ok(());
        }
        self.check_identity()?;
        let _switched = CurrentGuard::to(driver, self.raw)?;
        let mut mode = relax(driver)?;
        self.deferred.destroy(driver, true);
        exchange_mode(driver, &mut mode)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The process-wide driver keeps its primary contexts forever, so this is not one of them.
        let driver = self.device.driver();
        if driver.forbids_destruction() {
            return;
        }
        let retained = self.primary && driver.has(Feature::PrimaryRelease);
        if is_host_function() {
            if retained {
                self.deferred.add(Deferred::Primary(self.device.raw()));
            }
            return self.deferred.leave(driver, self.id);
        }
        match self.destroy_all() {
            Err(error) if !is_over(&error) => self.deferred.leave(driver, self.id),
            _ => {}
        }
        if !retained {
            return;
        }
        // SAFETY: this releases the one retain made in `Context::primary`; everything that used the context held a
        // reference to it and has been dropped.
        let result = unsafe { call!(driver, cuDevicePrimaryCtxRelease_v2(self.device.raw())) };
        if let Err(error) = result {
            driver.drop_failed(&"a primary context", error);
        }
    }
}

/// Whether the context is permanently lost, with everything in it.
fn is_over(error: &DriverError) -> bool {
    error.is_fatal()
        || matches!(
            error.code(),
            CUresult::CUDA_ERROR_INVALID_CONTEXT | CUresult::CUDA_ERROR_NOT_INITIALIZED
        )
}

fn id_of(driver: &Driver, raw: sys::CUcontext) -> Result<u64, DriverError> {
    if !driver.has(Feature::StreamIds) {
        return Ok(raw as u64);
    }
    let mut id = 0;
    // SAFETY: the context is alive by the caller's contract; the pointer is to a local integer.
    unsafe { call!(driver, cuCtxGetId(raw, &mut id)) }?;
    Ok(id)
}

fn current_device(driver: &Driver) -> Result<Device, DriverError> {
    let mut raw = 0;
    // SAFETY: the pointer is to a local handle.
    unsafe { call!(driver, cuCtxGetDevice(&mut raw)) }?;
    Ok(Device::from_raw(driver, raw))
}

/// Makes the calling thread's capture mode relaxed and returns the previous mode. After an error the previous mode is
/// in effect.
fn relax(driver: &Driver) -> Result<CUstreamCaptureMode, DriverError> {
    let relaxed = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    let mut mode = relaxed;
    let exchanged = exchange_mode(driver, &mut mode);
    if exchanged.is_err() && mode != relaxed {
        // The mode was exchanged despite the error.
        let _ = exchange_mode(driver, &mut mode);
    }
    exchanged.map(|()| mode)
}

fn exchange_mode(driver: &Driver, mode: &mut CUstreamCaptureMode) -> Result<(), DriverError> {
    // SAFETY: a valid location; the call changes only the calling thread's mode.
    unsafe { call!(driver, cuThreadExchangeStreamCaptureMode(mode)) }
}

impl Driver {
    /// Returns the primary context of the device with this number ([`Context::primary`]). Fails like
    /// [`device`](Self::device).
    pub fn context(&self, ordinal: usize) -> Result<Context, DriverError> {
        Context::primary(&self.device(ordinal)?)
    }

    /// Returns the handle of the calling thread's current context, or null. Not counted.
    pub(crate) fn current_raw(&self) -> Result<sys::CUcontext, DriverError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a local handle.
        unsafe { call!(uncounted self, cuCtxGetCurrent(&mut raw)) }?;
        Ok(raw)
    }
}

/// A context made current on this thread; dropping it restores the previous one.
pub(super) struct CurrentGuard<'a> {
    driver: &'a Driver,
    previous: sys::CUcontext,
    /// The current context belongs to the thread.
    _thread: PhantomData<*mut ()>,
}

impl<'a> CurrentGuard<'a> {
    fn to(driver: &'a Driver, wanted: sys::CUcontext) -> Result<CurrentGuard<'a>, DriverError> {
        let switched = CurrentGuard {
            driver,
            previous: driver.current_raw()?,
            _thread: PhantomData,
        };
        if switched.previous != wanted {
            // A call that fails may have changed what is current; dropping the guard undoes it.
            // SAFETY: `wanted` is alive by the contract of the context it comes from.
            unsafe { call!(driver, cuCtxSetCurrent(wanted)) }?;
        }
        Ok(switched)
    }
}

impl Drop for CurrentGuard<'_> {
    fn drop(&mut self) {
        // Also after a fatal error the thread gets its previous context back.
        if process::is_unavailable() {
            return;
        }
        let result = self.driver.current_raw().and_then(|now| {
            if now == self.previous {
                return Ok(());
            }
            // SAFETY: this was current before; null stands for none.
            unsafe { call!(self.driver, cuCtxSetCurrent(self.previous)) }
        });
        if let Err(error) = result {
            self.driver
                .drop_failed(&"the caller's current context", error);
        }
    }
}

/// A context that is current on this thread, whatever the thread's stream capture mode.
pub(crate) struct Current<'a> {
    driver: &'a Driver,
    _switched: Option<CurrentGuard<'a>>,
}

impl<'a> Current<'a> {
    pub(super) fn driver(&self) -> &'a Driver {
        self.driver
    }
}

/// A context that is current on this thread, with the thread's stream capture mode relaxed, for direct driver calls
/// ([`Driver::functions`]).
///
/// Stays on its thread: neither `Send` nor `Sync`.
///
/// ```compile_fail
/// fn is_send<T: Send>() {}
/// is_send::<cualloc::driver::Entered<'static>>();
/// ```
pub struct Entered<'a> {
    context: &'a Context,
    mode: CUstreamCaptureMode,
    /// Dropped after the capture mode is restored.
    _switched: CurrentGuard<'a>,
}

impl<'a> Entered<'a> {
    /// Returns the context that is current.
    pub fn context(&self) -> &'a Context {
        self.context
    }

    /// Returns the driver that the calls go to.
    pub fn driver(&self) -> &'a Driver {
        self.context.driver()
    }
}

/// Calls that act on the context. They are hidden, like all calls on `Entered`; they take effect immediately and wait
/// for the device only where documented.
#[doc(hidden)]
impl Entered<'_> {
    thin! {
        /// Waits until all work submitted to the context has completed.
        pub fn synchronize(&self) = cuCtxSynchronize();
    }

    /// Gives kernels in this context access to plain allocations of `peer`'s context. Mapped memory has its own access
    /// rights ([`Entered::set_access`]). Succeeds if access is already enabled.
    pub fn enable_peer_access(&self, peer: &Context) -> Result<(), DriverError> {
        self.driver()
            .refuse_foreign(peer.driver(), "cuCtxEnablePeerAccess")?;
        // SAFETY: both contexts are alive while their wrappers are.
        match unsafe { call!(self.driver(), cuCtxEnablePeerAccess(peer.raw(), 0)) } {
            Err(error) if error.code() == CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {
                Ok(())
            }
            result => result,
        }
    }
}

impl fmt::Debug for Entered<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Entered").field(self.context).finish()
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let relaxed = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        if self.mode == relaxed || process::is_unavailable() {
            return;
        }
        if let Err(error) = exchange_mode(self.driver(), &mut self.mode) {
            self.driver()
                .drop_failed(&"the caller's stream capture mode", error);
        }
    }
}
