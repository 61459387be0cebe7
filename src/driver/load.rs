//! Finds and opens the driver's shared library.

use super::error::{DriverError, LoadError, OpenFailure};
use super::process;
use super::symbols;
use super::sys::{self, CUresult};
use super::table::{Driver, OLDEST_VERSION, Origin};
use crate::environment;
use libloading::Library;
use std::ffi::OsStr;
use std::mem;
use std::path::Path;
use std::sync::OnceLock;

/// The variable that names the library to load; see [`Driver::load`].
const OVERRIDE: &str = "CUALLOC_DRIVER";

// By soname only: the plain `libcuda.so` may be the toolkit's stub.
#[cfg(target_os = "linux")]
const CANDIDATES: &[&str] = &["libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"];
#[cfg(windows)]
const CANDIDATES: &[&str] = &["nvcuda.dll"];
#[cfg(not(any(target_os = "linux", windows)))]
const CANDIDATES: &[&str] = &[];

struct Opened {
    functions: sys::CuFunctions,
    library: String,
}

static LOADED: OnceLock<Driver> = OnceLock::new();
static OPENED: OnceLock<Opened> = OnceLock::new();

impl Driver {
    /// Returns the process's driver: found, opened and initialised by the first call, and the same table from then on.
    ///
    /// On Linux that is `libcuda.so.1` by the system's search path, then `/usr/lib/wsl/lib/libcuda.so.1`; on Windows
    /// `nvcuda.dll` of the system folder. A non-empty environment variable `CUALLOC_DRIVER` names the only library to
    /// try, on every platform. As with the system's own search path, the environment is trusted to name a driver. The
    /// library stays open for the life of the process.
    ///
    /// # Errors
    /// See [`LoadError`]. Failures are not cached: the next call tries again.
    pub fn load() -> Result<Driver, LoadError> {
        if process::is_forked_child() {
            return Err(LoadError::Init(DriverError::new(
                "cuInit",
                CUresult::CUDA_ERROR_NOT_INITIALIZED,
            )));
        }
        if let Some(driver) = LOADED.get() {
            return Ok(driver.clone());
        }
        // Opening a library and starting the driver run foreign code, so no lock is held here. Two threads may do it at
        // the same time, which is harmless; the first one's driver is kept.
        let opened = match OPENED.get() {
            Some(opened) => opened,
            None => {
                let opened = open_default()?;
                OPENED.get_or_init(|| opened)
            }
        };
        let origin = Origin {
            library: Some(opened.library.clone()),
            process_wide: true,
            ground: None,
        };
        // SAFETY: the functions come from the driver's library, which is never closed.
        let driver = unsafe { Driver::start(opened.functions, origin) }?;
        Ok(LOADED.get_or_init(|| driver).clone())
    }

    /// Loads and initialises the driver in the shared library at `path`, separate from every other driver and with its
    /// own counters. The library stays open for the life of the process, even if an error is returned.
    ///
    /// # Errors
    /// See [`LoadError`].
    ///
    /// # Safety
    /// The library's initialisers run in this process, and its exports are called with the types of the bindings: the
    /// file at `path` must be a CUDA driver, or behave as one under every name of [`sys::CuFunctions`] that it exports.
    ///
    /// ```compile_fail,E0133
    /// # use cualloc::driver::Driver;
    /// let driver = Driver::open("/tmp/whatever.so");
    /// ```
    pub unsafe fn open(path: impl AsRef<Path>) -> Result<Driver, LoadError> {
        let opened = open_one(path.as_ref().as_os_str(), open_given)?;
        let origin = Origin {
            library: Some(opened.library),
            process_wide: false,
            ground: None,
        };
        // SAFETY: the caller is responsible for the library, which is never closed.
        unsafe { Driver::start(opened.functions, origin) }
    }
}

fn open_default() -> Result<Opened, LoadError> {
    if let Some(path) = environment::variable(OVERRIDE).filter(|path| !path.is_empty()) {
        return open_one(&path, open_given);
    }
    let mut failed = Vec::new();
    for name in CANDIDATES {
        match open_one(name.as_ref(), open_system) {
            Err(LoadError::NotFound { tried }) => failed.extend(tried),
            result => return result,
        }
    }
    Err(if failed.is_empty() {
        LoadError::UnsupportedPlatform
    } else {
        LoadError::NotFound { tried: failed }
    })
}

type Open = fn(&OsStr) -> Result<Library, libloading::Error>;

fn open_one(name: &OsStr, open: Open) -> Result<Opened, LoadError> {
    let text = name.to_string_lossy().into_owned();
    let library = match open(name) {
        Ok(library) => library,
        Err(source) => {
            let name = text.clone();
            let tried = vec![(text, OpenFailure { name, source }.into())];
            return Err(LoadError::NotFound { tried });
        }
    };
    // SAFETY: the library is trusted to be a driver, whose exports have the types of the bindings: the suffix of an
    // exported name is the version of its ABI.
    let (functions, missing) = unsafe { symbols::read_library(&library) };
    // A driver installs handlers and starts threads, so it cannot be closed once opened.
    mem::forget(library);
    let Some((name, source)) = missing else {
        return Ok(Opened {
            functions,
            library: text,
        });
    };
    // A driver that lacks functions because it is old is reported as too old rather than by the name of one function.
    if let Some(have) = reported_version(&functions).filter(|have| *have < OLDEST_VERSION) {
        return Err(LoadError::TooOld {
            have,
            need: OLDEST_VERSION,
        });
    }
    Err(LoadError::SymbolMissing {
        name,
        library: text,
        source: Some(source),
    })
}

/// Returns the version that a library reports before it is initialised.
fn reported_version(functions: &sys::CuFunctions) -> Option<u32> {
    let mut version = 0;
    let get = functions.cuDriverGetVersion?;
    // SAFETY: the function has the type of the bindings, may be called before `cuInit`, and the
    // pointer is to a local integer.
    match unsafe { get(&mut version) } {
        CUresult::CUDA_SUCCESS => u32::try_from(version).ok().filter(|version| *version > 0),
        _ => None,
    }
}

/// Opens a library named by the user: lazily bound and local where the system supports that.
fn open_given(name: &OsStr) -> Result<Library, libloading::Error> {
    // SAFETY: the user trusts the initialisers of the library.
    unsafe { Library::new(name) }
}

#[cfg(not(windows))]
fn open_system(name: &OsStr) -> Result<Library, libloading::Error> {
    open_given(name)
}

/// Only from the system folder, so that a library planted beside the program is not loaded.
#[cfg(windows)]
fn open_system(name: &OsStr) -> Result<Library, libloading::Error> {
    use libloading::os::windows::{LOAD_LIBRARY_SEARCH_SYSTEM32, Library as SystemLibrary};
    // SAFETY: the driver's initialisers are part of the system.
    unsafe { SystemLibrary::load_with_flags(name, LOAD_LIBRARY_SEARCH_SYSTEM32) }.map(Library::from)
}
