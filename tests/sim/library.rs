//! The simulator built as a shared library goes through the real loading path.

use cualloc::driver::{Context, Driver};
use std::path::PathBuf;

/// The library that `cargo test` builds beside this test's executable.
fn library() -> PathBuf {
    let mut folder = std::env::current_exe().unwrap();
    folder.pop();
    folder.pop();
    let suffix = std::env::consts::DLL_SUFFIX;
    folder
        .join("examples")
        .join(format!("libsimdriver{suffix}"))
}

#[test]
fn the_library_loads_and_allocates() {
    let path = library();
    if !path.exists() {
        // Built by `cargo test` without a target filter, or by `cargo build --example simdriver`.
        eprintln!("SKIPPED: {} is not built", path.display());
        return;
    }
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
    let path = library();
    if !path.exists() {
        eprintln!("SKIPPED: {} is not built", path.display());
        return;
    }
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
