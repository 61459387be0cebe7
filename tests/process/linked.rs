//! The cache line of a thread in code that is linked or opened at run time, and that of two builds in one program.

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

/// What a library has for programs that open it.
const OPENED: &str = r#"
#[unsafe(no_mangle)]
pub extern "C" fn keep_word(word: usize) {
    keep_here(word);
    keep(word);
}

#[unsafe(no_mangle)]
pub extern "C" fn kept_word() -> usize {
    assert_eq!(kept(), kept_here());
    kept().0
}
"#;

/// Opens it, and has threads keep words beside each other.
const OPENS: &str = r#"
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::Barrier;

unsafe extern "C" {
    fn dlopen(path: *const c_char, how: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

fn main() {
    let path = CString::new(std::env::args().nth(1).unwrap()).unwrap();
    let library = unsafe { dlopen(path.as_ptr(), 2) };
    assert!(!library.is_null());
    let keep: extern "C" fn(usize) = unsafe { std::mem::transmute(dlsym(library, c"keep_word".as_ptr())) };
    let kept: extern "C" fn() -> usize = unsafe { std::mem::transmute(dlsym(library, c"kept_word".as_ptr())) };
    // In the second round what the first one has learned is there from the start.
    for _ in 0..2 {
        let meet = Barrier::new(8);
        let of_a_thread = &|own| {
            assert_eq!(kept(), 0);
            meet.wait();
            keep(own);
            meet.wait();
            assert_eq!(kept(), own);
        };
        std::thread::scope(|scope| {
            for own in 1..9 {
                scope.spawn(move || of_a_thread(own * 100));
            }
        });
    }
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

/// With room among what the loader keeps for such libraries, where all threads have the line at one distance, and without.
#[test]
fn a_library_that_is_opened_at_run_time_finds_the_line_of_each_thread() {
    let folder = Folder::new("opened");
    let line = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/locks/thread_line.rs");
    let library = LIBRARY.replace("LINE", line.to_str().unwrap()) + OPENED;
    std::fs::write(folder.file("library.rs"), library).unwrap();
    std::fs::write(folder.file("program.rs"), OPENS).unwrap();
    let of = ["library.rs", "--crate-type=cdylib", "-oopened.so", "-O"];
    if !compiled(folder.path(), "/release/build/cualloc-1234/out", &of) {
        return;
    }
    assert!(compiled(folder.path(), "", &["program.rs"]));
    for room in ["512", "0"] {
        let output = Command::new(folder.file("program"))
            .arg(folder.file("opened.so"))
            .env(
                "GLIBC_TUNABLES",
                format!("glibc.rtld.optional_static_tls={room}"),
            )
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "room for {room}: {said}");
    }
}
