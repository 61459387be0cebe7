//! What the shared library is called at run time, and that it stays loaded.

use std::env;
use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let version = |part: &str| env::var(format!("CARGO_PKG_VERSION_{part}")).unwrap_or_default();
    // A new major version may break programs, and before the first one a new minor version.
    let suffix = match version("MAJOR").as_str() {
        "0" => format!("0.{}", version("MINOR")),
        major => major.to_owned(),
    };
    let target = |what: &str| env::var(format!("CARGO_CFG_TARGET_{what}")).unwrap_or_default();
    if target("OS") != "linux" {
        return;
    }
    let soname = format!("libcualloc.so.{suffix}");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,{soname}");
    // Threads, their local variables and handlers of the process's end outlive a dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,defs");
    // A program that was linked against the library where it was built looks there for its run-time name.
    #[cfg(unix)]
    if let Some(folder) = env::var_os("OUT_DIR").and_then(|out| {
        let profile = Path::new(&out).ancestors().nth(3);
        profile.map(Path::to_owned)
    }) {
        for (name, file) in [
            (soname.as_str(), "libcualloc_capi.so"),
            ("libcualloc.so", "libcualloc_capi.so"),
            ("libcualloc.a", "libcualloc_capi.a"),
        ] {
            let link = folder.join(name);
            // Without the links the library is as good, where it is named by its path or is installed.
            let _ = std::fs::remove_file(&link);
            let _ = std::os::unix::fs::symlink(file, &link);
        }
    }
}
