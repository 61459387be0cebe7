//! The stack of a thread: its addresses, which are cheap, and its names, which are not.

use std::backtrace::Backtrace;

/// Most frames of a stack; those that are further out are left out.
const MOST: usize = 64;

/// The addresses of the thread's stack, innermost first. None where they cannot be had cheaply: then all stacks are the
/// same one.
#[cfg(all(unix, not(miri)))]
pub(crate) fn addresses() -> Vec<usize> {
    use std::ffi::{c_int, c_void};

    unsafe extern "C-unwind" {
        fn _Unwind_Backtrace(
            each: extern "C" fn(*mut c_void, *mut c_void) -> c_int,
            data: *mut c_void,
        ) -> c_int;
        fn _Unwind_GetIP(frame: *mut c_void) -> usize;
    }

    extern "C" fn each(frame: *mut c_void, data: *mut c_void) -> c_int {
        const GO_ON: c_int = 0;
        const END: c_int = 5;
        // SAFETY: the vector below, which nobody else has meanwhile.
        let found = unsafe { &mut *data.cast::<Vec<usize>>() };
        if found.len() == MOST {
            return END;
        }
        // SAFETY: a frame that the unwinder just gave.
        found.push(unsafe { _Unwind_GetIP(frame) });
        GO_ON
    }

    let mut found = Vec::with_capacity(MOST);
    // SAFETY: the function is part of what every Rust program on Unix is linked with, and calls back before it returns.
    unsafe { _Unwind_Backtrace(each, (&raw mut found).cast()) };
    found
}

/// As above.
#[cfg(not(all(unix, not(miri))))]
pub(crate) fn addresses() -> Vec<usize> {
    Vec::new()
}

/// The names of a stack's functions, outermost first, with semicolons between; of so many bytes at most, of which the
/// innermost functions come first. This crate's own functions at its end are left out where their names have paths.
pub(crate) fn text(stack: &Backtrace, most: usize) -> String {
    let text = format!("{stack:#}");
    let frames: Vec<String> = text.lines().filter_map(function).collect();
    let own = |name: &String| {
        let name = name.trim_start_matches('<');
        ["cualloc::", "std::backtrace", "backtrace::"]
            .iter()
            .any(|own| name.starts_with(own))
    };
    let first = frames.iter().position(|name| !own(name)).unwrap_or(0);
    let mut text = String::new();
    for name in frames.iter().skip(first).take(MOST) {
        if text.len() + name.len() + 1 > most {
            break;
        }
        match text.is_empty() {
            true => text.push_str(name),
            false => text.insert_str(0, &format!("{name};")),
        }
    }
    text
}

/// The function that a line of a printed stack names: ` 3:  0x55d0c8 - name::of::it::h0123456789abcdef`, the beginning
/// of which is left out for what was inlined. Lines with a place in a file name none.
fn function(line: &str) -> Option<String> {
    let line = line.trim();
    if line.starts_with("at ") {
        return None;
    }
    let (address, name) = match line.split_once(" - ") {
        Some((before, name)) => (before.rsplit(' ').next()?, name.trim()),
        None => ("", line.split_once(": ").map_or(line, |(_, name)| name)),
    };
    let name = match name {
        "<unknown>" => address,
        name => name.rsplit_once("::h").map_or(name, |(path, hash)| {
            let is_hash = hash.len() == 16 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
            if is_hash { path } else { name }
        }),
    };
    // Semicolons stand between functions.
    (!name.is_empty()).then(|| name.replace(';', ","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_stack_name_functions() {
        let name = |line| function(line).unwrap_or_default();
        assert_eq!(name("   3:     0x55d0 - a::b::h0123456789abcdef"), "a::b");
        assert_eq!(name("                        a::<i32>::c"), "a::<i32>::c");
        assert_eq!(name("   4:     0x7f12 - <unknown>"), "0x7f12");
        assert_eq!(name("   4:     0x7f12 - at;e"), "at,e");
        assert_eq!(function("         at /rust/library/core.rs:5:1"), None);
    }

    #[test]
    #[cfg_attr(miri, ignore = "addresses are those of an unwinder")]
    fn a_stack_is_the_same_each_time_and_known_by_its_caller() {
        fn asked() -> (Vec<usize>, String) {
            (addresses(), text(&Backtrace::force_capture(), 4096))
        }
        let found: Vec<_> = (0..2).map(|_| asked()).collect();
        assert_eq!(found[0], found[1]);
        assert!(cfg!(not(unix)) || found[0].0.len() > 3);
        assert!(text(&Backtrace::force_capture(), 30).len() <= 30);
        if found[0].1.split(';').all(|name| name.starts_with("0x")) {
            return println!(
                "SKIPPED in part: this program was stripped of its symbols, so functions have no names"
            );
        }
        // The test is a function of this crate, so what called it is the innermost one that is named, unless the
        // debug information names functions without their paths.
        let innermost = found[0].1.rsplit(';').next().unwrap_or_default();
        assert!(!innermost.starts_with("cualloc::"), "{innermost}");
        assert!(found[0].1.contains("test"), "{}", found[0].1);
    }
}
