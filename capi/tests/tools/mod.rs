//! Tools of the system, and where things are.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A file of this package.
pub fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Where cargo has put the libraries that belong to this test.
pub fn libraries() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().unwrap().to_owned()
}

pub fn has(tool: &str) -> bool {
    Command::new(tool)
        .arg("--version")
        .output()
        .is_ok_and(|output| output.status.success())
}

/// The checker that programs run under, if any.
pub fn checked() -> String {
    std::env::var("CUALLOC_CAPI_CHECKER").unwrap_or_default()
}

/// Runs a command, which must succeed; what it has printed.
pub fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{printed}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    printed
}
