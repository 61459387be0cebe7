//! The command from outside: results, files, words and terminals, how dense memory is packed, and memory that does not
//! grow.

mod advise;
mod efficiency;
mod files;
mod foreign;
mod help;
mod memory;
mod pages;
#[path = "../../../tests/common/recorded.rs"]
mod recorded;
mod results;
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[path = "../../../tests/common/watchdog.rs"]
mod watchdog;
mod words;

use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

pub fn cualloc() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cualloc"));
    for variable in [
        "RUST_LOG",
        "CUALLOC_CONFIG",
        "COLUMNS",
        "NO_COLOR",
        "CLICOLOR_FORCE",
    ] {
        command.env_remove(variable);
    }
    command.current_dir(scratch());
    command
}

/// The words of a command line.
pub fn split(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

pub fn run(arguments: &[&str]) -> Output {
    cualloc().args(arguments).output().unwrap()
}

/// A replay of a file on the simulator, with its result as JSON.
pub fn replayed(path: &Path) -> Output {
    let path = path.to_str().unwrap();
    run(&["replay", "--device", "sim", "--json", path])
}

/// Runs the command with this on stdin.
pub fn fed(arguments: &[&str], input: &[u8]) -> Output {
    let mut child = cualloc()
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It may go before it has read everything.
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap()
}

pub fn data(path: &str) -> String {
    format!("{}/../tests/data/{path}", env!("CARGO_MANIFEST_DIR"))
}

/// The folder in which the command runs.
pub fn scratch() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("usage");
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// A file of a test's own, by its name in the folder.
pub fn file(name: &str, content: &[u8]) -> PathBuf {
    let path = scratch().join(name);
    std::fs::write(&path, content).unwrap();
    path
}

pub fn stderr(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(!text.contains("panicked"), "{text}");
    text
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The objects on stdout, one per line.
pub fn objects(output: &Output) -> Vec<Value> {
    let text = stdout(output);
    let objects = text.lines().map(|line| serde_json::from_str(line).unwrap());
    objects.collect()
}

/// The only object on stdout.
pub fn object(output: &Output) -> Value {
    let mut objects = objects(output);
    assert_eq!(objects.len(), 1, "{objects:?} {}", stderr(output));
    objects.remove(0)
}

/// The figures and words of a page of `view`.
pub fn meta(page: &str) -> Value {
    let meta = page.split("id=\"meta\">").nth(1).unwrap();
    serde_json::from_str(meta.split("</script>").next().unwrap()).unwrap()
}

pub fn packed(content: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(content).unwrap();
    packed.finish().unwrap()
}

/// Refused with exit code 2 and these words, and without a result.
pub fn refused(output: &Output, words: &str) {
    let complaint = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{complaint}");
    assert!(complaint.contains(words), "{complaint}");
    assert!(output.stdout.is_empty());
}
