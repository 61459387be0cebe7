//! The function table, and the counted call.

use super::counts::{CallCounts, Counters};
use super::error::{DriverError, LoadError};
use super::found::Found;
use super::process;
use super::registry::Registry;
use super::symbols::{Call, Feature, SYMBOLS, Symbol, name_of, present};
use super::sys::{self, CUresult};
use super::trials::Trials;
use std::any::Any;
use std::ffi::CStr;
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use log::Level;

use crate::locks::lines;

/// The oldest supported driver: 10.1, where the youngest required function appeared.
pub(super) const OLDEST_VERSION: u32 = 10010;

/// Calls `$name` through `$driver`'s table: counted, refused in a forked child, and
/// `CUDA_ERROR_NOT_FOUND` where the driver does not export it. Expands to a call of a foreign
/// function, so it must stand in an `unsafe` block.
macro_rules! call {
    ($driver:expr, $name:ident($($argument:expr),* $(,)?)) => {
        $crate::driver::table::call!(counted $driver, $name($($argument),*))
    };
    ($how:ident $driver:expr, $name:ident($($argument:expr),*)) => {{
        let driver: &$crate::driver::Driver = $driver;
        match driver.functions().$name {
            Some(function) => driver.$how($crate::driver::symbols::Call::$name, || {
                function($($argument),*)
            }),
            None => Err(driver.absent($crate::driver::symbols::Call::$name)),
        }
    }};
}

/// Methods that pass their arguments to one function of the driver. An output of the function, if any, is named after
/// the arrow, and converted by the expression after the call. `self` has a method `driver`.
macro_rules! thin {
    ($(
        $(#[$meta:meta])* $vis:vis $($word:ident)+ (&$this:ident $(, $arg:ident: $type:ty)* $(,)?)
            $(-> $out:ident: $of:ty)? = $call:ident($($pass:expr),* $(,)?) $(=> $made:ty: $value:expr)?;
    )*) => {$(
        $(#[$meta])*
        $vis $($word)+ (&$this, $($arg: $type),*)
            -> Result<thin!(@last () $(, ($of))? $(, ($made))?), DriverError>
        {
            // SAFETY: all bytes zero are a valid value of every type that the driver writes.
            $(let mut $out: $of = unsafe { std::mem::zeroed() };)?
            // SAFETY: outputs are locals. Where the driver requires valid memory, handles or streams, the method is
            // unsafe and its caller is responsible for them; the driver checks the rest.
            unsafe { call!($this.driver(), $call($($pass),*)) }?;
            Ok(thin!(@last () $(, ($out))? $(, ($value))?))
        }
    )*};
    (@last ()) => { () };
    (@last $first:tt, ($($last:tt)*)) => { $($last)* };
    (@last $first:tt, $second:tt, ($($last:tt)*)) => { $($last)* };
}

pub(super) use {call, thin};

/// A loaded function table of the driver, initialised.
///
/// Cheap to clone; clones share the table and its counters. `Send` and `Sync`: all methods may be
/// called from any thread at any time.
#[derive(Clone)]
pub struct Driver(Arc<Inner>);

/// The first part is read by every call and never written; the alignment keeps the reference count off its cache lines.
#[repr(align(128))]
struct Inner {
    functions: sys::CuFunctions,
    features: u32,
    version: u32,
    process_wide: bool,
    library: Option<String>,
    /// The resource behind the functions, kept while they may be called.
    #[cfg_attr(not(feature = "sim"), expect(dead_code))]
    ground: KeptSlot,
    counters: Counters,
    state: State,
}

#[repr(align(128))]
struct State {
    lost: AtomicBool,
    warned: AtomicBool,
    /// The primary contexts that were retained, by device.
    primaries: Registry,
    /// Deferred destructions of contexts without a live object, by context id.
    deferred: Registry,
    captures: Found,
    /// The owned streams by id, so that a caller who has only a handle can find the stream that owns it.
    streams: Registry,
    /// Results of the trials of virtual memory.
    trials: Trials,
}

/// A resource that must not be reused while a driver lives: the slot of its simulator.
type KeptSlot = Option<Arc<dyn Any + Send + Sync>>;

pub(super) struct Origin {
    /// None for functions of this process.
    pub(super) library: Option<String>,
    /// Whether this is the driver that [`Driver::load`] returns.
    pub(super) process_wide: bool,
    pub(super) ground: KeptSlot,
}

impl Driver {
    /// Creates a driver from functions of this process, such as a simulated one. It is initialised (`cuInit`) and
    /// counts its calls separately from every other driver.
    ///
    /// # Errors
    /// A required function that is null, a `cuInit` that fails, a version that is too old.
    ///
    /// # Safety
    /// Every function in the table must behave as the driver function of its name, and stay callable from any thread
    /// until the process ends.
    pub unsafe fn from_functions(functions: sys::CuFunctions) -> Result<Driver, LoadError> {
        let origin = Origin {
            library: None,
            process_wide: false,
            ground: None,
        };
        // SAFETY: the caller is responsible for the functions.
        unsafe { Driver::start(functions, origin) }
    }

    /// Like [`Driver::from_functions`], with the resource behind the functions.
    ///
    /// # Safety
    /// As for [`Driver::from_functions`].
    #[cfg(feature = "sim")]
    pub(crate) unsafe fn with_resource(
        functions: sys::CuFunctions,
        ground: Arc<dyn Any + Send + Sync>,
    ) -> Result<Driver, LoadError> {
        let origin = Origin {
            library: None,
            process_wide: false,
            ground: Some(ground),
        };
        // SAFETY: the caller is responsible for the functions.
        unsafe { Driver::start(functions, origin) }
    }

    /// Returns the resource passed to [`Driver::with_resource`].
    #[cfg(feature = "sim")]
    pub(crate) fn ground(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.0.ground.as_deref()
    }

    /// Initialises the driver behind a table.
    ///
    /// # Safety
    /// As for [`Driver::from_functions`].
    pub(super) unsafe fn start(
        functions: sys::CuFunctions,
        origin: Origin,
    ) -> Result<Driver, LoadError> {
        let present = present(&functions);
        let mut features = (1_u32 << Feature::ALL.len()) - 1;
        for (symbol, is_there) in SYMBOLS.iter().zip(present) {
            match symbol.feature() {
                _ if is_there => {}
                Some(feature) => features &= !(1 << feature as u32),
                None => {
                    return Err(LoadError::SymbolMissing {
                        name: symbol.name(),
                        library: library_name(&origin),
                        source: None,
                    });
                }
            }
        }
        let from_library = origin.library.is_some();
        let name = library_name(&origin);
        let inner = Inner {
            functions,
            features,
            version: 0,
            process_wide: origin.process_wide,
            library: origin.library,
            ground: origin.ground,
            counters: Counters::new(),
            state: State {
                lost: AtomicBool::new(false),
                warned: AtomicBool::new(false),
                primaries: Registry::default(),
                deferred: Registry::default(),
                captures: Found::default(),
                streams: Registry::default(),
                trials: Trials::default(),
            },
        };
        let mut driver = Driver(Arc::new(inner));
        process::watch_forks();
        // SAFETY: `cuInit` takes a number and may be called any number of times.
        unsafe { call!(&driver, cuInit(0)) }.map_err(|error| match error.code() {
            CUresult::CUDA_ERROR_STUB_LIBRARY => LoadError::StubLibrary { library: name },
            _ => LoadError::Init(error),
        })?;
        process::watch_exit(from_library);
        let mut version = 0;
        // SAFETY: the pointer is to a local integer.
        unsafe { call!(&driver, cuDriverGetVersion(&mut version)) }.map_err(LoadError::Init)?;
        let version = u32::try_from(version).unwrap_or(0);
        if version < OLDEST_VERSION {
            return Err(LoadError::TooOld {
                have: version,
                need: OLDEST_VERSION,
            });
        }
        if let Some(inner) = Arc::get_mut(&mut driver.0) {
            inner.version = version;
        }
        Ok(driver)
    }

    /// Returns the functions, for calls that this crate does not wrap. Direct calls are not counted.
    #[inline]
    pub fn functions(&self) -> &sys::CuFunctions {
        &self.0.functions
    }

    /// Whether the driver exports every function of the group.
    #[inline]
    pub fn has(&self, feature: Feature) -> bool {
        self.0.features & (1 << feature as u32) != 0
    }

    /// Returns the version of the CUDA API that the driver supports: 1000 x major + 10 x minor, such as 13000.
    pub fn version(&self) -> u32 {
        self.0.version
    }

    /// Returns the library that this driver was loaded from, as passed to the system's loader; none for functions of
    /// this process.
    pub fn library(&self) -> Option<&str> {
        self.0.library.as_deref()
    }

    /// Iterates over the functions of the table: required ones first, then group by group.
    #[doc(hidden)]
    pub fn symbols() -> impl Iterator<Item = Symbol> {
        SYMBOLS.iter().copied()
    }

    /// Returns how often each function was called so far through this driver and its clones.
    pub fn calls(&self) -> CallCounts {
        self.0.counters.snapshot()
    }

    /// Adds `count` handles that the caller mapped into a view to [`CallCounts::handle_ops`]; the table itself counts
    /// creations and releases.
    #[doc(hidden)]
    pub fn add_view_maps(&self, count: u64) {
        self.0.counters.add_handle_ops(count);
    }

    /// Turns timing for [`CallCounts::nanos`] on or off; initially off. It costs two clock readings per call.
    pub fn set_timing(&self, on: bool) {
        self.0.counters.set_timing(on);
    }

    /// Whether this is a child process forked after a driver was started in its parent. Every call then fails with
    /// `CUDA_ERROR_NOT_INITIALIZED`. Makes no system call.
    #[doc(hidden)]
    #[inline]
    pub fn is_forked_child(&self) -> bool {
        process::is_forked_child()
    }

    /// Whether exit handlers of the process are running: the driver may have shut down already and should not be called
    /// any more. Makes no system call.
    #[doc(hidden)]
    pub fn is_exiting(&self) -> bool {
        process::is_exiting()
    }

    /// Whether a counted call has returned a code that means that the driver's contexts are lost
    /// ([`DriverError::is_fatal`], except for a context destroyed by its owner). From then on destructors make no
    /// driver call.
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.0.state.lost.load(Ordering::Relaxed)
    }

    /// Returns the driver's own name and text for a code, including codes unknown to this crate; none if the driver
    /// does not know it either.
    #[doc(hidden)]
    pub fn describe(&self, code: CUresult) -> Option<String> {
        let text = |pointer: *const std::ffi::c_char| {
            // SAFETY: the driver hands out null or a static string that ends in zero.
            (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy())
        };
        let (mut name, mut words) = (ptr::null(), ptr::null());
        // SAFETY: both pointers are to locals.
        let name = unsafe { call!(self, cuGetErrorName(code, &mut name)) }
            .ok()
            .and_then(|()| text(name))?;
        // SAFETY: as above.
        let words = unsafe { call!(self, cuGetErrorString(code, &mut words)) }
            .ok()
            .and_then(|()| text(words));
        Some(match words {
            Some(words) => format!("{name}: {words}"),
            None => name.into_owned(),
        })
    }

    /// Returns itself; used by [`thin!`].
    #[inline]
    pub(super) fn driver(&self) -> &Driver {
        self
    }

    #[inline]
    pub(super) fn counted(
        &self,
        call: Call,
        run: impl FnOnce() -> CUresult,
    ) -> Result<(), DriverError> {
        if process::is_forked_child() {
            return Err(refused(call));
        }
        match self.0.counters.run(call, run) {
            CUresult::CUDA_SUCCESS => Ok(()),
            code => Err(self.failed(call, code)),
        }
    }

    /// Runs a query that is not counted and therefore writes no shared memory.
    #[inline]
    pub(super) fn uncounted(
        &self,
        call: Call,
        run: impl FnOnce() -> CUresult,
    ) -> Result<(), DriverError> {
        if process::is_forked_child() {
            return Err(refused(call));
        }
        match run() {
            CUresult::CUDA_SUCCESS => Ok(()),
            code => Err(self.failed(call, code)),
        }
    }

    #[cold]
    pub(super) fn failed(&self, call: Call, code: CUresult) -> DriverError {
        let error = DriverError::new(name_of(call), code);
        if error.loses_driver() && !self.0.state.lost.swap(true, Ordering::Relaxed) {
            lines::log(
                Level::Error,
                module_path!(),
                format_args!("the CUDA driver's contexts are lost: {error}"),
            );
        }
        error
    }

    #[cold]
    pub(super) fn absent(&self, call: Call) -> DriverError {
        DriverError::new(name_of(call), CUresult::CUDA_ERROR_NOT_FOUND)
    }

    /// Whether destructors must leave handles alone.
    pub(crate) fn forbids_destruction(&self) -> bool {
        process::is_unavailable() || self.is_lost()
    }

    /// Logs a failure in a destructor: the first one as a warning, later ones at debug level.
    #[cold]
    pub(super) fn drop_failed(&self, what: &dyn fmt::Display, error: DriverError) {
        let (level, more) = match self.0.state.warned.swap(true, Ordering::Relaxed) {
            true => (Level::Debug, ""),
            false => (Level::Warn, " (later failures are logged at debug)"),
        };
        lines::log(
            level,
            module_path!(),
            format_args!("{what} was not released: {error}{more}"),
        );
    }

    /// Whether two drivers are clones, and so share the table and its counters.
    pub(crate) fn same_table(&self, other: &Driver) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether handles of the other driver are valid for this one: true also for tables loaded separately from one
    /// library, or made of the same functions.
    #[inline]
    pub(crate) fn same_library(&self, other: &Driver) -> bool {
        self.same_table(other) || self.library_number() == other.library_number()
    }

    /// Returns a number that identifies the driver's library: the address of one of its functions.
    pub(crate) fn library_number(&self) -> usize {
        self.0.functions.cuInit.map_or(0, |init| init as usize)
    }

    /// Rejects objects of another driver, whose handles would be invalid here or mean another object.
    #[inline]
    pub(super) fn refuse_foreign(
        &self,
        other: &Driver,
        call: &'static str,
    ) -> Result<(), DriverError> {
        if self.same_library(other) {
            return Ok(());
        }
        Err(DriverError::new(call, CUresult::CUDA_ERROR_INVALID_HANDLE))
    }

    pub(super) fn add_handle_op(&self) {
        self.0.counters.add_handle_ops(1);
    }

    pub(super) fn is_process_wide(&self) -> bool {
        self.0.process_wide
    }

    /// Whether writes through one mapping are visible through another on a device, if this was tested.
    pub(crate) fn aliasing(&self, ordinal: usize) -> Option<bool> {
        self.trials().aliasing(ordinal)
    }

    pub(crate) fn set_aliasing(&self, ordinal: usize, good: bool) {
        self.trials().set_aliasing(ordinal, good);
    }

    pub(crate) fn trials(&self) -> &Trials {
        &self.0.state.trials
    }

    pub(super) fn streams(&self) -> &Registry {
        &self.0.state.streams
    }

    pub(super) fn primaries(&self) -> &Registry {
        &self.0.state.primaries
    }

    pub(super) fn deferred(&self) -> &Registry {
        &self.0.state.deferred
    }

    #[inline]
    pub(super) fn found(&self) -> &Found {
        &self.0.state.captures
    }
}

debug_fields!(Driver, self => library: self.0.library, version: self.0.version);

fn refused(call: Call) -> DriverError {
    DriverError::new(name_of(call), CUresult::CUDA_ERROR_NOT_INITIALIZED)
}

fn library_name(origin: &Origin) -> String {
    match &origin.library {
        Some(library) => library.clone(),
        None => "functions of this process".to_owned(),
    }
}
