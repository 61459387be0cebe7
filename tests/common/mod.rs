//! Shared parts of tests: the driver under test, and drivers compiled from C.

// Each test program uses its own part of this.
#![allow(dead_code, unused_imports, unused_macros)]

#[cfg(feature = "sim")]
pub mod capturing;
#[cfg(feature = "sim")]
pub mod interlude;
#[cfg(feature = "sim")]
pub mod lost;
pub mod program;
#[cfg(feature = "sim")]
mod raw;
#[cfg(feature = "sim")]
mod rig;
pub mod rng;
pub mod shrink;
#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod watchdog;
#[cfg(feature = "sim")]
pub use raw::*;
#[cfg(feature = "sim")]
pub use rig::*;

use cualloc::driver::{Driver, Stream, Symbol};
use cualloc::exchange::{Element, Peer, Tensor};
use cualloc::resource::Source;
use cualloc::{DeviceBuffer, Error};
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// This and what most tests name.
#[cfg(feature = "sim")]
pub mod prelude {
    pub use super::*;
    pub use cualloc::allocator::{Allocator, Block, Config, Policy, Request};
    pub use cualloc::driver::sys::{self, CUresult};
    pub use cualloc::driver::{Context, Driver, Stream};
    pub use cualloc::sim::{FailPlan, Mode, SimConfig, Simulator};
    pub use cualloc::{DeviceBuffer, Error};
    pub use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    pub use std::sync::{Arc, Mutex};
}

/// Fails with the value that does not match.
macro_rules! assert_matches {
    ($value:expr, $pattern:pat $(if $condition:expr)? $(, $($text:tt)+)?) => {
        match $value {
            $pattern $(if $condition)? => {}
            ref other => panic!(
                "expected {}, found {other:?}{}",
                stringify!($pattern $(if $condition)?),
                // The test's own settings.
                String::new() $(+ ": " + &format!($($text)+))?
            ),
        }
    };
}
pub(crate) use assert_matches;

/// A tensor of one dimension with these values.
pub fn column<T: Element>(from: &impl Source, values: &[T], on: &Stream) -> Result<Tensor, Error> {
    let buffer = DeviceBuffer::from_slice(from, values, on)?;
    Ok(Tensor::from_buffer(buffer, &[values.len()])?)
}

/// All elements of a tensor.
pub fn values<T: Element>(tensor: &Tensor) -> Result<Vec<T>, Error> {
    tensor.as_slice::<T>()?.to_vec()
}

/// Gives a tensor these values.
pub fn set<T: Element>(tensor: &mut Tensor, values: &[T]) -> Result<(), Error> {
    tensor.as_mut_slice::<T>()?.copy_from_slice(values)
}

/// A peer that orders nothing by itself.
pub fn ordered() -> Peer {
    // SAFETY: the tests see to the order, or look at what comes of it without one.
    unsafe { Peer::ordered() }
}

/// A folder that is removed when this is dropped.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        let path =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// This program as a process of its own, to run this one test.
pub fn itself(test: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command
}

/// Runs the calling test's work in a separate process, where other tests cannot change process-wide state, such as a
/// known capture.
pub fn alone(work: impl FnOnce()) {
    const ALONE: &str = "CUALLOC_TEST_ALONE";
    if env::var_os(ALONE).is_some() {
        return work();
    }
    let thread = std::thread::current();
    let test = thread.name().expect("tests run on threads of their names");
    let output = itself(test).env(ALONE, "1").output().unwrap();
    let said =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{}\n{}", said[0], said[1]);
    assert!(
        said[0].contains("1 passed"),
        "{test} did not run: {}",
        said[0]
    );
}

/// Waits for a condition that another thread brings about. Fails if it does not occur within a limit, which is far
/// above the usual time.
pub fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(
            begun.elapsed() < Duration::from_secs(120),
            "waited in vain: {what}"
        );
        std::thread::yield_now();
    }
}

/// Sets a flag when it is dropped, also by a failing test: for threads that work until then.
pub struct SetAtEnd<'a>(pub &'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// The C compiler: `$CC`, else `gcc`; none, with a note, if there is none.
pub fn compiler() -> Option<OsString> {
    let name = env::var_os("CC").unwrap_or_else(|| "gcc".into());
    match Command::new(&name).arg("--version").output() {
        Ok(output) if output.status.success() => Some(name),
        _ => {
            eprintln!("SKIPPED: no C compiler ({})", name.to_string_lossy());
            None
        }
    }
}

/// Runs the compiler; its messages if it fails.
pub fn compile(compiler: &OsString, arguments: &[OsString]) -> Result<(), String> {
    let output = Command::new(compiler).args(arguments).output().unwrap();
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A library to make.
pub struct Fake<'a> {
    pub defines: &'a [&'a str],
    pub without: fn(&Symbol) -> bool,
}

impl Default for Fake<'_> {
    fn default() -> Self {
        Fake {
            defines: &[],
            without: |_| false,
        }
    }
}

/// A name for what a test makes, from that of the test.
pub fn test_name() -> String {
    let thread = std::thread::current();
    thread.name().unwrap_or("test").replace("::", "-")
}

/// A driver as a library in a separate folder, unless there is no compiler.
pub fn library(fake: Fake<'_>) -> Option<(Folder, PathBuf)> {
    let compiler = compiler()?;
    let folder = Folder::new(&test_name());
    let path = folder.file("driver.so");
    fake.build(&compiler, &path);
    Some((folder, path))
}

/// Opens a [`library`], which behaves as a driver, as far as it is one.
pub fn open(path: impl AsRef<Path>) -> Result<Driver, cualloc::driver::LoadError> {
    // SAFETY: the tests' libraries are made for this.
    unsafe { Driver::open(path) }
}

const SOURCE: &str = include_str!("fake_driver.c");

/// The functions that check their arguments, each at the start of a line.
pub const CHECKED_CALLS: &str = include_str!("fake_calls.c");

impl<'a> Fake<'a> {
    /// One that lacks some functions.
    pub fn without(without: fn(&Symbol) -> bool) -> Fake<'a> {
        let defines = &[];
        Fake { defines, without }
    }

    /// One with macros of its source set.
    pub fn defining(defines: &'a [&'a str]) -> Fake<'a> {
        let without = |_: &Symbol| false;
        Fake { defines, without }
    }

    /// Compiles the library to `target`.
    pub fn build(&self, compiler: &OsString, target: &Path) {
        let mut text = SOURCE.to_owned();
        let mut hidden = String::new();
        for symbol in Driver::symbols() {
            let name = symbol.name();
            let written = SOURCE.contains(&format!("int {name}("))
                || CHECKED_CALLS.contains(&format!("CUresult {name}("));
            let without = (self.without)(&symbol);
            if written && without {
                hidden += &format!("#define {name} hidden_{name}\n");
            } else if !written && !without {
                text += &format!("int {name}(void) {{ fake_check(); return 0; }}\n");
            }
        }
        let source = target.with_extension("c");
        let calls = target.with_extension("calls.c");
        fs::write(&source, hidden.clone() + &text).unwrap();
        fs::write(&calls, hidden + CHECKED_CALLS).unwrap();
        let mut arguments: Vec<OsString> = ["-shared", "-fPIC", "-Wall", "-o"]
            .iter()
            .map(OsString::from)
            .collect();
        arguments.push(target.into());
        arguments.push(source.into());
        arguments.push(calls.into());
        arguments.push("-I".into());
        // The package's own folder, or that of a package inside it.
        let folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
        let header = folders.filter(|folder| folder.join("wrapper.h").is_file());
        arguments.extend(header.map(OsString::from).take(1));
        arguments.extend(
            self.defines
                .iter()
                .map(|define| format!("-D{define}").into()),
        );
        compile(compiler, &arguments).unwrap();
    }
}

/// The chain of an error's texts, one a line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        text += "\n";
        text += &error.to_string();
        next = error.source();
    }
    text
}
