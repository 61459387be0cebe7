//! Generates the driver bindings from `wrapper.h`.
//!
//! Where libclang loads, bindgen writes them afresh; elsewhere the checked-in copy is taken and the
//! build says so. With `CUALLOC_NO_LIBCLANG=1` libclang is not looked for; with
//! `CUALLOC_BLESS_BINDINGS=1` the checked-in copy is rewritten.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

const HEADER: &str = "wrapper.h";
const CHECKED_IN: &str = "src/driver/bindings.rs";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={HEADER}");
    println!("cargo:rerun-if-changed={CHECKED_IN}");
    println!("cargo:rerun-if-env-changed=LIBCLANG_PATH");
    println!("cargo:rerun-if-env-changed=CUALLOC_NO_LIBCLANG");
    println!("cargo:rerun-if-env-changed=CUALLOC_BLESS_BINDINGS");
    println!("cargo:rustc-check-cfg=cfg(cualloc_generated_bindings)");
    println!("cargo:rustc-check-cfg=cfg(loom)");

    let Some(out_dir) = env::var_os("OUT_DIR").map(PathBuf::from) else {
        println!("cargo:error=OUT_DIR is not set: build.rs must be run by cargo");
        return;
    };
    let target = out_dir.join("bindings.rs");
    let set = |name: &str| env::var_os(name).is_some_and(|value| value == "1");
    let bless = set("CUALLOC_BLESS_BINDINGS");

    // bindgen panics when libclang is missing, so ask first; what is loaded here, bindgen reuses.
    let generated = if set("CUALLOC_NO_LIBCLANG") {
        Err("libclang is not wanted (CUALLOC_NO_LIBCLANG)".to_owned())
    } else {
        match clang_sys::load() {
            Ok(()) => generate(),
            Err(reason) => Err(format!("libclang does not load ({reason})")),
        }
    };
    let result = match generated {
        Ok(text) => {
            println!("cargo:rustc-cfg=cualloc_generated_bindings");
            let blessed = if bless {
                fs::write(CHECKED_IN, &text)
            } else {
                Ok(())
            };
            blessed.and_then(|()| fs::write(&target, text))
        }
        Err(reason) => {
            println!("cargo:warning={reason}: using the checked-in bindings {CHECKED_IN}");
            copy(Path::new(CHECKED_IN), &target)
        }
    };
    if let Err(error) = result {
        println!("cargo:error=cannot write the driver bindings: {error}");
    }
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::write(to, fs::read(from)?)
}

fn generate() -> Result<String, String> {
    let rust = bindgen::RustTarget::stable(88, 0).map_err(|error| error.to_string())?;
    let bindings = bindgen::Builder::default()
        .header(HEADER)
        // One text for all targets. The header uses types only that are alike on all 64-bit ones,
        // but compilers for Windows take enums for signed; the layout assertions in the text hold
        // or fail when it is compiled for the real target.
        .clang_arg("--target=x86_64-unknown-linux-gnu")
        .rust_target(rust)
        .rust_edition(bindgen::RustEdition::Edition2024)
        .use_core()
        .wrap_unsafe_ops(true)
        // Any code that a driver returns must be a legal value, so no Rust enums.
        .default_enum_style(bindgen::EnumVariation::NewType {
            is_bitfield: false,
            is_global: false,
        })
        .must_use_type("cudaError_enum")
        .allowlist_type("CU.*|Cu.*|cudaError_enum")
        .allowlist_var("CU_.*")
        .ignore_functions()
        .derive_debug(true)
        .derive_default(true)
        .layout_tests(true)
        .formatter(bindgen::Formatter::Prettyplease)
        .generate()
        .map_err(|error| format!("bindgen failed ({error})"))?;
    Ok(bindings.to_string())
}
