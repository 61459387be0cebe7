//! Loading the driver: the real loader, on libraries compiled for the purpose.

use crate::common::*;
use cualloc::driver::{Context, Driver, Feature, LoadError, Stream, Symbol, sys};
use std::env;
use std::error::Error;
use std::fs;
use std::path::Path;
use std::process::{Output, abort};
use std::sync::Mutex;
use std::thread;

const CASE: &str = "CUALLOC_LOADER_CASE";
const OVERRIDE: &str = "CUALLOC_DRIVER";

#[test]
fn complete_driver_opens() {
    let Some((_folder, path)) = library(Fake::default()) else {
        return;
    };
    let driver = open(&path).unwrap();
    assert_eq!(driver.version(), 13000);
    assert_eq!(driver.library(), path.to_str());
    for feature in Feature::ALL {
        assert!(driver.has(*feature), "{feature:?}");
    }
    assert_eq!(driver.device_count().unwrap(), 2);
    assert!(!driver.is_lost());
    assert!(!driver.is_forked_child());
    // Opened again, it is another driver with counters of its own.
    let again = open(&path).unwrap();
    assert_eq!(again.calls().get("cuDeviceGetCount"), 0);
    assert_eq!(driver.calls().get("cuDeviceGetCount"), 1);
}

/// S3.34: a driver that has dropped everything optional is still a driver.
#[test]
fn s3_34_loads_without_any_optional_symbol() {
    let Some((_folder, path)) = library(Fake::without(|symbol| symbol.feature().is_some())) else {
        return;
    };
    // Functions newer than the oldest driver are never required.
    for young in [
        "cuMemPool",
        "cuMemCreate",
        "cuMemMap",
        "cuMemAddress",
        "cuStreamGetId",
    ] {
        let required = |symbol: &Symbol| symbol.feature().is_none();
        let mut symbols = Driver::symbols().filter(required);
        assert!(
            symbols.all(|symbol| !symbol.name().starts_with(young)),
            "{young}"
        );
    }
    let driver = open(&path).unwrap();
    for feature in Feature::ALL {
        assert!(!driver.has(*feature), "{feature:?}");
    }
    let device = driver.device(0).unwrap();
    assert!(!device.supports_vmm().unwrap());
    assert!(!device.supports_pools().unwrap());
    assert!(!device.can_access_peer(&device).unwrap());
    assert_eq!(device.uuid().unwrap(), None);
    assert_eq!(device.pci_bus_id().unwrap(), None);
    let context = Context::primary(&device).unwrap();
    let stream = Stream::new(&context).unwrap();
    assert_ne!(
        stream.id().unwrap(),
        Stream::new(&context).unwrap().id().unwrap()
    );
    let entered = context.enter().unwrap();
    let error = entered.address_reserve(2 << 20, 0, 0).unwrap_err();
    assert_eq!(error.code(), sys::CUresult::CUDA_ERROR_NOT_FOUND);
    assert_eq!(error.call(), "cuMemAddressReserve");
    assert!(error.is_not_supported());
    assert_eq!(driver.calls().get("cuMemAddressReserve"), 0);
}

/// S3.14: each optional function that is missing alone disables its group and no other.
#[test]
fn missing_optional_symbol_disables_its_feature_only() {
    let Some((_folder, path)) = library(Fake::without(|symbol| symbol.name() == "cuMemUnmap"))
    else {
        return;
    };
    let driver = open(&path).unwrap();
    for feature in Feature::ALL {
        assert_eq!(
            driver.has(*feature),
            *feature != Feature::Vmm,
            "{feature:?}"
        );
    }
}

/// S3.13, S3.36: the name of the missing symbol, and the loader's own words.
#[test]
fn s3_13_s3_36_missing_required_symbol_is_named() {
    let Some((_folder, path)) = library(Fake::without(|symbol| symbol.name() == "cuEventQuery"))
    else {
        return;
    };
    let error = open(&path).unwrap_err();
    let text = chain(&error);
    match error {
        LoadError::SymbolMissing { name, library, .. } => {
            assert_eq!(name, "cuEventQuery");
            assert_eq!(Some(library.as_str()), path.to_str());
        }
        other => panic!("{other:?}"),
    }
    assert!(text.contains("undefined symbol: cuEventQuery"), "{text}");
}

/// R72: the toolkit's stub library is distinguished from a driver.
#[test]
fn r72_a_stub_library_is_reported() {
    let Some((_folder, path)) = library(Fake::defining(&["INIT=34"])) else {
        return;
    };
    match open(&path).unwrap_err() {
        LoadError::StubLibrary { library } => assert_eq!(Some(library.as_str()), path.to_str()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn old_driver_is_too_old() {
    let Some(cc) = compiler() else { return };
    let folder = Folder::new("old");
    let path = folder.file("driver.so");
    // With all functions, and without those that it is too old to have.
    for without in [
        |_: &cualloc::driver::Symbol| false,
        |symbol: &cualloc::driver::Symbol| symbol.name() == "cuThreadExchangeStreamCaptureMode",
    ] {
        let fake = Fake {
            defines: &["VERSION=10000"],
            without,
        };
        fake.build(&cc, &path);
        let error = open(&path).unwrap_err();
        assert!(error.to_string().contains("CUDA 10.0"), "{error}");
        match error {
            LoadError::TooOld { have, need } => assert_eq!((have, need), (10000, 10010)),
            other => panic!("{other:?}"),
        }
        // The loader keeps an open library: another one needs another name.
        fs::remove_file(&path).unwrap();
    }
}

/// S3.13, S3.36: a missing path, one with a zero in it, and a file that is no library.
#[test]
fn s3_13_s3_36_broken_paths_keep_the_loaders_words() {
    let folder = Folder::new("broken");
    let broken = folder.file("driver.so");
    fs::write(
        &broken,
        "this is not a shared library, though it is long enough to be one\n".repeat(9),
    )
    .unwrap();
    let missing = folder.file("missing.so");
    let cases = [
        (broken.as_path(), "invalid ELF header"),
        (missing.as_path(), "No such file"),
        (folder.path(), "cannot"),
    ];
    for (path, words) in cases {
        let error = open(path).unwrap_err();
        assert!(chain(&error).contains(words), "{}", chain(&error));
        assert!(error.to_string().contains(words), "{error}");
        let mut last: &dyn Error = &error;
        while let Some(source) = last.source() {
            last = source;
        }
        assert!(last.to_string().contains(words), "{last}");
        match error {
            LoadError::NotFound { tried } => {
                assert_eq!(tried.len(), 1);
                assert_eq!(Some(tried[0].0.as_str()), path.to_str());
            }
            other => panic!("{other:?}"),
        }
    }
    let error = open(Path::new("with\0zero")).unwrap_err();
    assert_matches!(error, LoadError::NotFound { .. });
}

// ---- the process's own driver, in processes of their own -----------------------------------

/// Runs `child_entry` in a process of its own, where a panic is the end of it (as under
/// `panic=abort`, also if something would catch it).
fn child(case: &str, environment: &[(&str, &Path)]) -> Output {
    let mut command = itself("loader::child_entry");
    command
        .env_remove(OVERRIDE)
        .env_remove("LD_LIBRARY_PATH")
        .env(CASE, case);
    for (name, value) in environment {
        command.env(name, value);
    }
    let output = command.output().unwrap();
    let text = format!(
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "{case}: {}\n{text}", output.status);
    assert!(text.contains(&format!("DONE {case}")), "{case}:\n{text}");
    output
}

/// [`child`] with a driver of the test's own, if there is a compiler.
fn child_with(case: &str, fake: Fake<'_>) {
    if let Some((_folder, path)) = library(fake) {
        child(case, &[(OVERRIDE, &path)]);
    }
}

#[test]
fn child_entry() {
    let Ok(case) = env::var(CASE) else { return };
    std::panic::set_hook(Box::new(|info| {
        eprintln!("{info}");
        abort();
    }));
    match case.as_str() {
        "override" => case_override(),
        "missing" => case_missing(),
        "default" => case_default(),
        "retry-init" => case_retry_init(),
        "retry-open" => case_retry_open(),
        "threads" => case_threads(),
        "fork" => case_fork(),
        "exit" => case_exit(),
        other => panic!("unknown case {other}"),
    }
    println!("DONE {case}");
}

#[test]
fn override_is_taken() {
    child_with("override", Fake::default());
}

fn case_override() {
    let driver = Driver::load().unwrap();
    assert_eq!(driver.library(), env::var(OVERRIDE).ok().as_deref());
    // Once: the second is the first, with its counters.
    let again = Driver::load().unwrap();
    driver.device_count().unwrap();
    assert_eq!(again.calls().get("cuDeviceGetCount"), 1);
    assert_eq!(again.calls().get("cuInit"), 1);
    // Its primary contexts stay retained.
    let device = driver.device(0).unwrap();
    drop(Context::primary(&device).unwrap());
    drop(Context::primary(&device).unwrap());
    assert_eq!(driver.calls().get("cuDevicePrimaryCtxRetain"), 1);
    assert_eq!(driver.calls().get("cuDevicePrimaryCtxRelease_v2"), 0);
}

/// S0.6, R72: no driver is an error with its cause, also where a panic ends the process, and no
/// other library is taken instead.
#[test]
fn s0_6_r72_bad_override_is_an_error_without_fallback() {
    let folder = Folder::new("missing");
    let path = folder.file("missing.so");
    let output = child("missing", &[(OVERRIDE, &path)]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("missing.so"), "{text}");
    assert!(text.contains("No such file"), "{text}");
}

fn case_missing() {
    let error = Driver::load().unwrap_err();
    println!("{}", chain(&error));
    match error {
        LoadError::NotFound { tried } => assert_eq!(tried.len(), 1),
        other => panic!("{other:?}"),
    }
}

/// S0.6, S3.13: without an override the platform's names are tried in order.
#[test]
fn s0_6_s3_13_default_names_are_tried_in_order() {
    // A folder first on the search path decides what the first name finds: something broken.
    let folder = Folder::new("default");
    fs::write(folder.file("libcuda.so.1"), "broken ".repeat(99)).unwrap();
    let output = child("default", &[("LD_LIBRARY_PATH", folder.path())]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if text.contains("loaded ") {
        eprintln!("SKIPPED: this machine has a driver under the last name ({text})");
        return;
    }
    assert!(text.contains("invalid ELF header"), "{text}");
    // The same without the library.
    let Some(cc) = compiler() else { return };
    fs::remove_file(folder.file("libcuda.so.1")).unwrap();
    Fake::default().build(&cc, &folder.file("libcuda.so.1"));
    let output = child("default", &[("LD_LIBRARY_PATH", folder.path())]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("loaded Some(\"libcuda.so.1\")"), "{text}");
}

fn case_default() {
    match Driver::load() {
        Ok(driver) => println!("loaded {:?}", driver.library()),
        Err(error) => {
            println!("{}", chain(&error));
            match error {
                LoadError::NotFound { tried } => {
                    let names: Vec<&str> = tried.iter().map(|(name, _)| name.as_str()).collect();
                    assert_eq!(names, ["libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"]);
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

/// S3.35: a failed initialisation is not remembered.
#[test]
fn s3_35_failed_init_is_tried_again() {
    let fake = Fake::defining(&["INIT=(initialisations == 0 ? 100 : 0)"]);
    child_with("retry-init", fake);
}

fn case_retry_init() {
    match Driver::load().unwrap_err() {
        LoadError::Init(error) => {
            assert_eq!(error.code(), sys::CUresult::CUDA_ERROR_NO_DEVICE);
            assert_eq!(error.call(), "cuInit");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(Driver::load().unwrap().device_count().unwrap(), 2);
}

#[test]
fn missing_library_is_looked_for_again() {
    let Some(cc) = compiler() else { return };
    let folder = Folder::new("retry-open");
    Fake::default().build(&cc, &folder.file("later.so"));
    child("retry-open", &[(OVERRIDE, &folder.file("driver.so"))]);
}

fn case_retry_open() {
    let path = env::var(OVERRIDE).unwrap();
    assert_matches!(Driver::load().unwrap_err(), LoadError::NotFound { .. });
    fs::rename(Path::new(&path).with_file_name("later.so"), &path).unwrap();
    Driver::load().unwrap();
}

/// S3.12
#[test]
fn threads_load_once() {
    child_with("threads", Fake::default());
}

fn case_threads() {
    thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| Driver::load().unwrap().device_count().unwrap());
        }
    });
    let calls = Driver::load().unwrap().calls();
    assert_eq!(calls.get("cuInit"), 1);
    assert_eq!(calls.get("cuDeviceGetCount"), 16);
}

/// In a forked child every call is refused and every drop silent; the library would end the child
/// with a code of its own.
#[test]
fn forked_child_makes_no_call() {
    child_with("fork", Fake::default());
}

unsafe extern "C" {
    fn fork() -> i32;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    fn _exit(code: i32) -> !;
    fn atexit(handler: extern "C" fn()) -> i32;
}

fn case_fork() {
    let driver = Driver::load().unwrap();
    let context = driver.context(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let event = context.enter().unwrap().create_event().unwrap();
    assert!(!driver.is_forked_child());
    // SAFETY: nothing else runs in this process that could hold a lock.
    let pid = unsafe { fork() };
    if pid == 0 {
        let refused = |error: cualloc::driver::DriverError| {
            assert_eq!(error.code(), sys::CUresult::CUDA_ERROR_NOT_INITIALIZED);
        };
        assert!(driver.is_forked_child());
        refused(driver.device_count().unwrap_err());
        refused(context.enter().unwrap_err());
        refused(Stream::new(&context).unwrap_err());
        refused(stream.synchronize().unwrap_err());
        refused(stream.is_capturing().unwrap_err());
        // SAFETY: the stream is alive.
        refused(unsafe { driver.stream_id(stream.raw()) }.unwrap_err());
        match Driver::load().unwrap_err() {
            LoadError::Init(error) => refused(error),
            other => panic!("{other:?}"),
        }
        drop((event, stream, context, driver));
        // SAFETY: ends the child without the parent's exit handlers.
        unsafe { _exit(42) }
    }
    let mut status = 0;
    // SAFETY: the pointer is to a local integer, and the child is ours.
    assert_eq!(unsafe { waitpid(pid, &mut status, 0) }, pid);
    assert_eq!(status, 42 << 8, "wait status");
    assert!(!driver.is_forked_child());
    driver.device_count().unwrap();
}

/// R71: drops after the driver has shut down make no call; the library would end the process with
/// a code of its own.
#[test]
fn r71_drops_at_exit_make_no_call() {
    child_with("exit", Fake::default());
}

static KEPT: Mutex<Vec<Box<dyn Send>>> = Mutex::new(Vec::new());

extern "C" fn drop_kept() {
    KEPT.lock().unwrap().clear();
}

fn case_exit() {
    // Registered before the library's handler, so it runs after it.
    // SAFETY: the handler is a function of this program.
    assert_eq!(unsafe { atexit(drop_kept) }, 0);
    let driver = open(env::var(OVERRIDE).unwrap()).unwrap();
    let context = driver.context(0).unwrap();
    let event = context.enter().unwrap().create_event().unwrap();
    let stream = Stream::new(&context).unwrap();
    let mut kept = KEPT.lock().unwrap();
    kept.push(Box::new(event));
    kept.push(Box::new(stream));
    kept.push(Box::new(context));
    kept.push(Box::new(driver));
}
