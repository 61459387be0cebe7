//! The cache line of a thread in code that is linked at run time, and that of two builds in one program.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use crate::common::Folder;

/// A library around the line, with functions of its own at it and ones that are inlined into others.
const LIBRARY: &str = r#"
#![allow(dead_code, missing_docs)]
#[path = "LINE"]
pub mod line;

#[inline(never)]
pub fn keep(word: usize) {
    line::learn();
    line::set_of_caller(word as *const ());
    line::set_pairs([(word + 1, std::ptr::null()); line::PAIRS]);
}

#[inline(never)]
pub fn kept() -> (usize, usize) {
    (line::of_caller() as usize, line::first().0)
}

#[inline(always)]
pub fn keep_here(word: usize) {
    line::set_of_caller(word as *const ());
    line::set_pairs([(word + 1, std::ptr::null()); line::PAIRS]);
}

#[inline(always)]
pub fn kept_here() -> (usize, usize) {
    (line::of_caller() as usize, line::first().0)
}
"#;

/// Each sees what it has kept. The code that is inlined sees that, or what it has kept itself.
const PROGRAM: &str = r#"
fn of_a_thread(own: usize) {
    assert_eq!((first::kept(), first::kept_here()), ((0, 0), (0, 0)));
    first::keep(own);
    assert_eq!(first::kept(), (own, own + 1));
    assert!([(own, own + 1), (0, 0)].contains(&first::kept_here()));
    first::keep_here(own + 5);
    assert_eq!(first::kept_here(), (own + 5, own + 6));
    assert!([own, own + 5].contains(&first::kept().0));
    assert_eq!((second::kept(), second::kept_here()), ((0, 0), (0, 0)));
    second::keep(1);
    second::keep_here(1);
    assert_eq!(first::kept_here(), (own + 5, own + 6));
}

fn main() {
    let threads: Vec<_> = (1..9).map(|own| std::thread::spawn(move || of_a_thread(own * 100))).collect();
    of_a_thread(7);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
"#;

/// Runs the compiler in a folder; false, with a word about it, where there is none.
fn compiled(folder: &Path, out_dir: &str, arguments: &[&str]) -> bool {
    let output = Command::new("rustc")
        .args(["--edition=2024", "-L."])
        .args(arguments)
        .env("OUT_DIR", out_dir)
        .current_dir(folder)
        .output();
    let Ok(output) = output else {
        eprintln!("SKIPPED: no rustc");
        return false;
    };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    true
}

/// The folder that has the standard library for programs that load it.
fn libraries_of_rust() -> OsString {
    let printed = Command::new("rustc")
        .args(["--print", "target-libdir"])
        .output();
    let printed = String::from_utf8(printed.unwrap().stdout).unwrap();
    printed.trim().into()
}

/// The program with two builds of the library, of this kind.
fn linked(name: &str, kind: &str, further: &[&str]) {
    let folder = Folder::new(name);
    let line = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/locks/thread_line.rs");
    let library = LIBRARY.replace("LINE", line.to_str().unwrap());
    std::fs::write(folder.file("library.rs"), library).unwrap();
    std::fs::write(folder.file("program.rs"), PROGRAM).unwrap();
    for (name, out_dir) in [
        ("first", "/release/build/cualloc-1234/out"),
        ("second", "/release/build/cualloc-5678/out"),
    ] {
        let of = ["library.rs", "--crate-name", name, "--crate-type", kind];
        let arguments = [&of[..], further].concat();
        if !compiled(folder.path(), out_dir, &arguments) {
            return;
        }
    }
    let of = ["program.rs", "--extern", "first", "--extern", "second"];
    let arguments = [&of[..], further].concat();
    assert!(compiled(folder.path(), "", &arguments));
    let mut paths = folder.path().as_os_str().to_owned();
    paths.push(":");
    paths.push(libraries_of_rust());
    let output = Command::new(folder.file("program"))
        .env("LD_LIBRARY_PATH", paths)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{kind} {further:?}: {said}");
}

#[test]
fn code_that_is_inlined_across_shared_libraries_is_linked() {
    linked(
        "linked-dylib",
        "dylib",
        &["-Cprefer-dynamic", "-Copt-level=3"],
    );
    linked("linked-dylib-0", "dylib", &["-Cprefer-dynamic"]);
}

#[test]
fn two_builds_in_one_program_have_lines_of_their_own() {
    linked(
        "linked-rlib",
        "rlib",
        &["-Copt-level=3", "-Ccodegen-units=4"],
    );
    linked("linked-rlib-0", "rlib", &[]);
}
