//! `include/cualloc.h` is what cbindgen writes from the source.
//!
//! `CUALLOC_BLESS_HEADER=1 cargo test -p cualloc-capi --test header` regenerates it.

#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[path = "../../tests/common/watchdog.rs"]
mod watchdog;

use std::path::Path;

const TOP: &str = "\
/* cualloc: a caching allocator of GPU memory. Written from capi/src by cbindgen: do not edit.
 *
 * Functions return CUALLOC_OK (0) or another code below; cualloc_last_error() has a text then. After a failure, every
 * value that a call returns through a pointer is 0. All functions may be called from any thread, with any context
 * current or none, and leave that as it is (except cualloc_make_current). Handles (cualloc_t *, cualloc_options_t *,
 * cualloc_pool_t *) are numbers, never dereferenced and never reused: a null handle is CUALLOC_INVALID_ARGUMENT, any
 * other value that is not a live handle CUALLOC_CLOSED. In a forked child of the process that made it, every use of a
 * handle is CUALLOC_CONTEXT_LOST. Addresses of device memory are uint64_t (CUdeviceptr); streams and contexts are
 * handles of the CUDA driver as void *. docs/clients/c.md describes building, installation and use. */
";

fn written() -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).unwrap();
    let bindings = cbindgen::Builder::new()
        .with_crate(folder)
        .with_config(config)
        .with_header(TOP)
        .generate()
        .unwrap();
    let mut text = Vec::new();
    bindings.write(&mut text);
    let text = String::from_utf8(text).unwrap();
    // A heading of Rust's documentation.
    text.replace(" * # Safety\n", " * The caller guarantees:\n")
}

#[test]
fn the_header_is_that_of_the_source() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/cualloc.h");
    let written = written();
    if std::env::var_os("CUALLOC_BLESS_HEADER").is_some_and(|value| value == "1") {
        std::fs::write(&path, &written).unwrap();
    }
    let checked_in = std::fs::read_to_string(&path).unwrap_or_default();
    for (number, (new, old)) in written.lines().zip(checked_in.lines()).enumerate() {
        assert_eq!(new, old, "line {} of {}", number + 1, path.display());
    }
    assert_eq!(written, checked_in, "{} is out of date", path.display());
}
