//! Generates the driver bindings from `wrapper.h`.
//!
//! With the feature `bindgen` they are written afresh where libclang loads. Elsewhere the checked-in copy is
//! taken, and tests show that it is the same. With `CUALLOC_NO_LIBCLANG=1` libclang is not looked for; with
//! `CUALLOC_BLESS_BINDINGS=1` the checked-in copy is rewritten. The build says something only where generation was
//! asked for, by that or by `LIBCLANG_PATH`, or began, and failed.

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
    let bless = is_set("CUALLOC_BLESS_BINDINGS");
    let result = match generated(bless || env::var_os("LIBCLANG_PATH").is_some()) {
        Some(text) => {
            println!("cargo:rustc-cfg=cualloc_generated_bindings");
            let blessed = if bless {
                fs::write(CHECKED_IN, &text)
            } else {
                Ok(())
            };
            blessed.and_then(|()| fs::write(&target, text))
        }
        None => copy(Path::new(CHECKED_IN), &target),
    };
    if let Err(error) = result {
        println!("cargo:error=cannot write the driver bindings: {error}");
    }
}

fn is_set(name: &str) -> bool {
    env::var_os(name).is_some_and(|value| value == "1")
}

/// Fresh bindings, or none where the checked-in ones are to be taken.
#[cfg(feature = "bindgen")]
fn generated(asked_for: bool) -> Option<String> {
    let refused = |reason: &dyn std::fmt::Display| {
        println!("cargo:warning={reason}: using the checked-in bindings {CHECKED_IN}");
        None
    };
    if is_set("CUALLOC_NO_LIBCLANG") {
        return None;
    }
    // bindgen panics when libclang is missing, so ask first; what is loaded here, bindgen reuses.
    match clang_sys::load() {
        Ok(()) => generate().map_or_else(|reason| refused(&reason), Some),
        Err(reason) if asked_for => refused(&format!("libclang does not load ({reason})")),
        Err(_) => None,
    }
}

#[cfg(not(feature = "bindgen"))]
fn generated(asked_for: bool) -> Option<String> {
    if asked_for {
        println!("cargo:warning=bindings are generated with the feature `bindgen` only");
    }
    None
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::write(to, fs::read(from)?)
}

#[cfg(feature = "bindgen")]
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
