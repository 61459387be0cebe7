//! The simulator built as a shared library goes through the real loading path.

use crate::common::{Folder, compile, compiler};
use cualloc::driver::{Context, Driver};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The library that `cargo test` without a target filter, or `cargo build --example simdriver`, builds beside this test's
/// executable.
fn library() -> Option<PathBuf> {
    let mut folder = std::env::current_exe().unwrap();
    folder.pop();
    folder.pop();
    let suffix = std::env::consts::DLL_SUFFIX;
    let path = folder
        .join("examples")
        .join(format!("libsimdriver{suffix}"));
    if !path.exists() {
        eprintln!("SKIPPED: {} is not built", path.display());
        return None;
    }
    Some(path)
}

#[test]
fn the_library_loads_and_allocates() {
    let Some(path) = library() else { return };
    // SAFETY: the library is a simulated driver.
    let driver = unsafe { Driver::open(&path) }.unwrap();
    assert_eq!(driver.version(), 13000);
    assert_eq!(driver.device_count().unwrap(), 1);
    let device = driver.device(0).unwrap();
    assert!(device.supports_vmm().unwrap());
    assert!(device.supports_pools().unwrap());
    let context = Context::primary(&device).unwrap();
    let entered = context.enter().unwrap();
    let address = entered.mem_alloc(4096).unwrap();
    assert_eq!(entered.mem_info().unwrap().free, (80 << 30) - (2 << 20));
    // SAFETY: allocated above, not used since.
    unsafe { entered.mem_free(address) }.unwrap();
    assert_eq!(driver.calls().get("cuMemAlloc_v2"), 1);
}

#[test]
fn every_function_of_the_table_is_exported() {
    let Some(path) = library() else { return };
    // SAFETY: the library runs nothing when it is loaded.
    let library = unsafe { libloading::Library::new(&path) }.unwrap();
    let header = include_str!("../../wrapper.h");
    let mut count = 0;
    for line in header
        .lines()
        .filter_map(|line| line.strip_prefix("CUresult "))
    {
        let name = line.split('(').next().unwrap();
        // SAFETY: the symbol is looked up, not called.
        let symbol = unsafe { library.get::<unsafe extern "C" fn()>(name) };
        assert!(symbol.is_ok(), "{name} is not exported");
        count += 1;
    }
    assert!(count >= 100, "{count} functions in the header");
}

/// The program beside the library, compiled and run.
#[test]
fn a_program_in_c_runs_on_the_library() {
    let Some(path) = library() else { return };
    let Some(cc) = compiler() else { return };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = Folder::new("simdriver-program");
    let program = folder.file("program");
    let mut rpath = std::ffi::OsString::from("-Wl,-rpath,");
    rpath.push(path.parent().unwrap());
    let arguments = [
        "-std=gnu11".into(),
        "-Wall".into(),
        "-Wextra".into(),
        "-Werror".into(),
        "-I".into(),
        root.into(),
        root.join("examples/simdriver/program.c").into(),
        path.clone().into(),
        rpath,
        "-o".into(),
        program.clone().into(),
    ];
    compile(&cc, &arguments).unwrap();
    let output = Command::new(&program).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said == "ok\n", "{said}{errors}");
    assert!(errors.is_empty(), "the simulator found: {errors}");
}
