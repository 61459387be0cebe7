//! The stack of a thread: addresses, which identify it cheaply, and function names, which are expensive.

use std::backtrace::Backtrace;

/// The maximum number of frames, from the innermost one outwards; frames further out are ignored.
const DEEPEST: usize = 128;

/// Returns the addresses of the thread's stack, innermost first. None if they cannot be obtained cheaply: all stacks
/// are then considered equal.
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
        // SAFETY: the vector below, which nothing else accesses until the unwinder returns.
        let found = unsafe { &mut *data.cast::<Vec<usize>>() };
        if found.len() == DEEPEST {
            return END;
        }
        // SAFETY: a frame that the unwinder just gave.
        found.push(unsafe { _Unwind_GetIP(frame) });
        GO_ON
    }

    let mut found = Vec::with_capacity(DEEPEST);
    // SAFETY: the function is part of what every Rust program on Unix is linked with, and calls back before it returns.
    unsafe { _Unwind_Backtrace(each, (&raw mut found).cast()) };
    found
}

#[cfg(not(all(unix, not(miri))))]
pub(crate) fn addresses() -> Vec<usize> {
    Vec::new()
}

/// Returns the names of a stack's functions, outermost first, separated by semicolons, without the functions of this
/// crate that took the stack.
pub(crate) fn text(stack: &Backtrace) -> String {
    users(&format!("{stack:#}"))
}

/// [`text`] of a stack as printed by the standard library in full.
fn users(printed: &str) -> String {
    let mut frames = frames(printed);
    frames.truncate(DEEPEST);
    let sources = sources(&frames);
    // Between functions of this crate are those of the standard library that it calls.
    let inner = frames
        .iter()
        .map(|frame| frame.origin(sources))
        .take_while(|origin| *origin != Some(Origin::Program));
    let own = inner
        .enumerate()
        .filter(|(_, origin)| *origin == Some(Origin::Own));
    let first = own.last().map_or(0, |(at, _)| at + 1);
    let shown = frames.get(first..).unwrap_or_default();
    // Frames further out belong to the standard library's start of the thread or program; without debug information, a
    // function inlined there has no other name.
    let start = |frame: &Frame<'_>| frame.name.contains("__rust_begin_short_backtrace");
    let end = shown.iter().position(start).filter(|end| *end > 0);
    let shown = shown.iter().take(end.unwrap_or(shown.len()));
    let names: Vec<String> = shown.rev().map(|frame| plain(frame.name)).collect();
    names.join(";")
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Origin {
    /// This crate, or the C library over it.
    Own,
    /// The standard library.
    Std,
    Program,
}

/// A function of a printed stack.
struct Frame<'a> {
    /// The printed name; an address if the function is unknown.
    name: &'a str,
    /// The source file; empty without debug information.
    file: &'a str,
}

impl Frame<'_> {
    /// The origin; none if the function is unknown. `sources` is the folder of this crate's sources.
    fn origin(&self, sources: Option<&str>) -> Option<Origin> {
        if sources.is_some_and(|sources| self.file.starts_with(sources)) {
            return Some(Origin::Own);
        }
        // Line tables name inlined functions without their paths, so the file decides.
        let is_std = || {
            let mut folders = ["/rustc/", "/rustlib/src/rust/"].iter();
            folders.any(|folder| self.file.contains(folder))
        };
        match origin_of(self.name) {
            Some(origin) => Some(origin),
            None if is_std() => Some(Origin::Std),
            None if !self.file.is_empty() => Some(Origin::Program),
            // Some inlined functions have no line either. C functions have none without debug information.
            None if sources.is_some() || self.name.starts_with("0x") => None,
            None => Some(Origin::Program),
        }
    }
}

/// Returns the origin of a function by its name with a path, in the spelling of either mangling.
fn origin_of(name: &str) -> Option<Origin> {
    // C functions have no paths, and C++ functions are printed mangled.
    let mut own = ["cualloc_", "_ZN7cualloc", "_ZNK7cualloc"].iter();
    if !name.contains("::") && own.any(|own| name.starts_with(own)) {
        return Some(Origin::Own);
    }
    let (own, of) = qualified(name);
    match (origin_of_path(own), of.and_then(origin_of_path)) {
        // A trait can be implemented for a type of the standard library only by the trait's crate.
        (None | Some(Origin::Std), Some(origin)) => Some(origin),
        (origin, _) => origin,
    }
}

/// Returns the crate that a path or a type begins with.
fn origin_of_path(path: &str) -> Option<Origin> {
    let mut path = path;
    while let Some(inner) = ["<", "&", "mut ", "*const ", "*", "dyn ", "[", "("]
        .iter()
        .find_map(|prefix| path.strip_prefix(prefix))
    {
        path = inner;
    }
    let (name, _) = path.split_once("::")?;
    let name = name.split('[').next().unwrap_or(name);
    if name.is_empty() || !name.chars().all(|c| c.is_alphanumeric() || c == '_') {
        return None;
    }
    Some(match name {
        "cualloc" | "cualloc_capi" => Origin::Own,
        "std" | "core" | "alloc" => Origin::Std,
        _ => Origin::Program,
    })
}

/// Splits `<type as trait>::function` into type and trait; for other names returns all of it, and nothing.
fn qualified(name: &str) -> (&str, Option<&str>) {
    let mut depth = 0;
    let mut before = ' ';
    for (at, c) in name.char_indices() {
        match c {
            '<' | '(' | '[' => depth += 1,
            // Not the `>` of an arrow.
            '>' if before == '-' => {}
            '>' | ')' | ']' => depth -= 1,
            ' ' if depth == 1 && name.starts_with('<') => {
                if let Some(of) = name[at..].strip_prefix(" as ") {
                    return (&name[..at], Some(of));
                }
            }
            _ if depth == 0 && at > 0 => break,
            _ => {}
        }
        before = c;
    }
    (name, None)
}

/// Returns the folder of this crate's sources as a stack spells it: every stack is taken by a function in its folder
/// `event`.
fn sources<'a>(frames: &[Frame<'a>]) -> Option<&'a str> {
    let here = file!().strip_suffix("stack.rs")?;
    let sources = here.strip_suffix("event/")?;
    frames.iter().find_map(|frame| {
        let at = frame.file.find(here)?;
        frame.file.get(..at + sources.len())
    })
}

/// Returns the frames of a printed stack, innermost first. A line ` 3:  0x55d0c8 - name::of::it` contains a function
/// (without the beginning if it was inlined); a line `at file:12:5` below it contains its position.
fn frames(printed: &str) -> Vec<Frame<'_>> {
    let mut frames: Vec<Frame<'_>> = Vec::new();
    for line in printed.lines().map(str::trim) {
        if let Some(place) = line.strip_prefix("at ") {
            let file = place.trim_end_matches(|c: char| c.is_ascii_digit() || c == ':');
            if let Some(frame) = frames.last_mut() {
                frame.file = file;
            }
            continue;
        }
        let (before, name) = match line.split_once(" - ") {
            Some((before, name)) => (before, name.trim()),
            None => ("", line.split_once(": ").map_or(line, |(_, name)| name)),
        };
        let name = match name {
            "<unknown>" => before.rsplit(' ').next().unwrap_or_default(),
            name => name,
        };
        // The unwinder may end with a null address.
        if !name.is_empty() && name != "0x0" {
            frames.push(Frame { name, file: "" });
        }
    }
    frames
}

/// Removes the hashes of either mangling from a name: `std[846817f741e54dfd]::a` and `std::a::h0123456789abcdef`.
/// Semicolons are replaced, since they separate names.
fn plain(name: &str) -> String {
    let is_hash = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_hexdigit());
    let name = match name.rsplit_once("::h") {
        Some((path, hash)) if hash.len() == 16 && is_hash(hash) => path,
        _ => name,
    };
    let mut parts = name.split('[');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        // Unlike a crate's hash, the brackets of a type such as `[f64]` do not follow a name.
        let follows_name = text.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        match part.split_once(']') {
            Some((hash, rest)) if follows_name && is_hash(hash) => text.push_str(rest),
            _ => {
                text.push('[');
                text.push_str(part);
            }
        }
    }
    text.replace(';', ",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lose_their_hashes_and_nothing_else() {
        let names = "
            trainer::main::h99103d1683c369cc = trainer::main
            trainer::main::h99103d1683c369c = trainer::main::h99103d1683c369c
            trainer[e28293b1aa0f68bd]::model::step = trainer::model::step
            <alloc[fdfd2bd8633a6659]::vec::Vec<[f64]> as core[c1]::ops::Drop>::drop = \
             <alloc::vec::Vec<[f64]> as core::ops::Drop>::drop
            <[f32] as trainer[0]::Sum>::sum = <[f32] as trainer::Sum>::sum
            trainer::rows::<[u8; 16]> = trainer::rows::<[u8, 16]>
            open[ = open[
            at;e = at,e";
        for line in names.lines().skip(1) {
            let (printed, name) = line.trim().split_once(" = ").unwrap();
            assert_eq!(plain(printed), name);
        }
    }

    /// Legacy names, and v0 ones as rustc-demangle prints them in full.
    const OWN: &str = "
        cualloc::event::sample::of_thread::h9d41709be0d8940b
        cualloc[3f1c]::event::sample::of_thread
        cualloc::allocator::engine::small::<impl cualloc::allocator::engine::Engine>::miss::h1907331794819af7
        <cualloc[3f1c]::allocator::engine::Engine>::miss
        <cualloc::Allocator as cualloc::resource::MemoryResource>::allocate
        <cualloc[3f1c]::Block as core[c1f1]::ops::drop::Drop>::drop
        cualloc_capi::blocks::cualloc_alloc::{{closure}}
        cualloc_alloc
        _ZN7cualloc9allocator8allocateEmP11CUstream_st
        <alloc[fd]::sync::Arc<cualloc[3f1c]::Allocator> as cualloc[3f1c]::resource::MemoryResource>::allocate
        <&mut T as cualloc::resource::MemoryResource>::allocate";
    /// Some of them name this crate.
    const PROGRAM: &str = "
        <trainer::Pool as cualloc::resource::MemoryResource>::allocate
        <trainer[91]::Pool as cualloc[3f1c]::resource::MemoryResource>::allocate
        trainer::hooks::<impl cualloc::LogSink for trainer::Log>::log::h0123456789abcdef
        <&dyn trainer::Step as core::ops::function::FnOnce<()>>::call_once
        <alloc::boxed::Box<dyn trainer::Step> as trainer::Step>::step
        <fn(&cualloc::Allocator) -> u32 as trainer::Step>::step
        trainer::model::Layer<cualloc::Block>::forward
        cualloc_trainer::main
        cuallocator::main";
    const STANDARD: &str = "
        core::ops::function::FnOnce::call_once::h65ef5d593c6c2f56
        <core[c1]::option::Option<usize>>::map::<cualloc[3f1c]::Block, trainer[91]::main::{closure#0}>
        std[e282]::panicking::catch_unwind::<i32, &dyn core[c1]::ops::Fn<(), Output = i32>>
        <alloc[fd]::vec::Vec<trainer[91]::T> as core[c1]::ops::drop::Drop>::drop";
    /// Without a path: functions of C, and inlined ones in line tables.
    const UNKNOWN: &str = "
        main
        forward<f32>
        allocated<cualloc::allocator::engine::recorded::{impl#3}::sample::{closure_env#0}>
        call_once<fn(), ()>
        0x7f12";

    #[test]
    fn origins_are_known_by_names_of_both_manglings() {
        for (names, origin) in [
            (OWN, Some(Origin::Own)),
            (PROGRAM, Some(Origin::Program)),
            (STANDARD, Some(Origin::Std)),
            (UNKNOWN, None),
        ] {
            for name in names.lines().skip(1).map(str::trim) {
                assert_eq!(origin_of(name), origin, "{name}");
            }
        }
    }

    /// A stack as the standard library prints it: names, and the files that debug information gives.
    fn printed(frames: &[(&str, &str)]) -> String {
        let lines = frames.iter().enumerate().map(|(at, (name, file))| match *file {
            "" => format!("{at:4}:     0x55f402c1c86b - {name}\n"),
            file => format!(
                "{at:4}:     0x55f402c1c86b - {name}\n                               at {file}:117:9\n"
            ),
        });
        lines.collect()
    }

    const STD: &str =
        "/rustc/59807616e1fa2540724bfbac14d7976d7e4a3860/library/std/src/backtrace.rs";
    const CORE: &str = "/rustc/59807616e1fa2540724bfbac14d7976d7e4a3860/library/core/src/option.rs";
    const SAMPLE: &str = "/home/x/cualloc/src/event/sample.rs";
    const SMALL: &str = "/home/x/cualloc/src/allocator/engine/small.rs";
    const MAIN: &str = "/home/x/cualloc/cli/src/main.rs";

    /// Functions and the files that they are in, if those are known: a line of each.
    fn listed(frames: &'static str) -> Vec<(&'static str, &'static str)> {
        let file = |name| match name {
            "STD" => STD,
            "CORE" => CORE,
            "SAMPLE" => SAMPLE,
            "SMALL" => SMALL,
            "MAIN" => MAIN,
            _ => "",
        };
        let lines = frames.lines().skip(1).map(str::trim);
        let parts = lines.map(|line| line.split_once(" | ").unwrap_or((line, "")));
        parts.map(|(name, of)| (name, file(of))).collect()
    }

    #[test]
    fn functions_of_this_crate_are_omitted_with_any_debug_information() {
        let with_v0 = "
            std[e28293b1aa0f68bd]::backtrace_rs::backtrace::libunwind::trace | STD
            <std[e28293b1aa0f68bd]::backtrace::Backtrace>::force_capture | STD
            cualloc[3f1c]::event::sample::of_thread | SAMPLE
            <core[c1]::option::Option<u32>>::map::<u32, cualloc[3f1c]::event::sample::allocated::{closure#0}> | CORE
            <cualloc[3f1c]::allocator::engine::Engine>::miss | SMALL
            <core[c1]::option::Option<usize>>::map::<u32, trainer[91]::step::{closure#0}> | CORE
            <trainer[91]::model::Layer<f32> as trainer[91]::Step>::step | MAIN
            trainer[91]::main | MAIN
            std[e28293b1aa0f68bd]::sys::backtrace::__rust_begin_short_backtrace::<fn(), ()> | STD
            main";
        let legacy = "
            std::backtrace_rs::backtrace::libunwind::trace::h0a1b2c3d4e5f6071 | STD
            std::backtrace::Backtrace::force_capture::h0a1b2c3d4e5f6071 | STD
            cualloc::event::sample::of_thread::h9d41709be0d8940b | SAMPLE
            core::option::Option<T>::map::h65ef5d593c6c2f56 | CORE
            cualloc::allocator::engine::small::<impl cualloc::Engine>::miss::h1907331794819af7 | SMALL
            core::option::Option<T>::map::h65ef5d593c6c2f56 | CORE
            <trainer::model::Layer<f32> as trainer::Step>::step::h640842e768f16594 | MAIN
            trainer::main::h99103d1683c369cc | MAIN
            std::sys::backtrace::__rust_begin_short_backtrace::hbaaf8cacd046937e | STD
            main";
        let outer = "trainer::main;<trainer::model::Layer<f32> as trainer::Step>::step";
        let v0_map = "<core::option::Option<usize>>::map::<u32, trainer::step::{closure#0}>";
        for (frames, map) in [(with_v0, v0_map), (legacy, "core::option::Option<T>::map")] {
            let mut frames = listed(frames);
            let expected = format!("{outer};{map}");
            assert_eq!(users(&printed(&frames)), expected);
            frames.iter_mut().for_each(|(_, file)| *file = "");
            assert_eq!(users(&printed(&frames)), expected);
        }
        // Line tables name inlined functions without paths, and leave out the lines of some.
        let lines = "
            <std[e28293b1aa0f68bd]::backtrace::Backtrace>::force_capture | STD
            of_thread | SAMPLE
            allocated<cualloc::allocator::engine::recorded::{impl#3}::sample::{closure_env#0}> | SAMPLE
            map<u32, cualloc::{closure_env#0}> | CORE
            miss
            allocate | SMALL
            forward<f32> | MAIN
            main | MAIN
            call_once<fn(), ()> | CORE
            main";
        let expected = "main;call_once<fn(), ()>;main;forward<f32>";
        assert_eq!(users(&printed(&listed(lines))), expected);
    }

    #[test]
    fn functions_of_this_crate_further_out_stay() {
        let hook = [
            ("cualloc::event::sample::of_thread", SAMPLE),
            ("cualloc::Allocator::allocate", SMALL),
            ("trainer::relief", MAIN),
            ("core::ops::function::FnOnce::call_once", CORE),
            ("cualloc::Allocator::allocate", SMALL),
            ("trainer::main", MAIN),
        ];
        let expected = "trainer::main;cualloc::Allocator::allocate;core::ops::function::FnOnce::call_once;trainer::relief";
        assert_eq!(users(&printed(&hook)), expected);
        // A call through the C library, from a program with and without function names.
        let inner = [
            ("cualloc::event::sample::of_thread", ""),
            ("cualloc_alloc", ""),
        ];
        let named = [inner[0], inner[1], ("step", ""), ("main", "")];
        assert_eq!(users(&printed(&named)), "main;step");
        let unnamed = [inner[0], inner[1], ("<unknown>", ""), ("main", "")];
        assert_eq!(users(&printed(&unnamed)), "main;0x55f402c1c86b");
        // A thread whose function was inlined into the start of the thread.
        let start = "std::sys::backtrace::__rust_begin_short_backtrace";
        let thread = [inner[0], inner[1], (start, ""), ("clone3", "")];
        assert_eq!(users(&printed(&thread)), format!("clone3;{start}"));
        // A thread of this crate, and a program without any names.
        let own = [
            inner[0],
            ("std::thread::start", ""),
            ("cualloc::helper", ""),
        ];
        assert_eq!(users(&printed(&own)), "");
        let none = [("<unknown>", ""), ("<unknown>", "")];
        assert_eq!(users(&printed(&none)), "0x55f402c1c86b;0x55f402c1c86b");
    }

    #[test]
    fn lines_of_a_stack_are_functions_and_places() {
        let text = "   0:     0x55d0 - a::b::h0123456789abcdef
               at /rust/library/core.rs:5:1
                        a::<i32>::c
               at ./x.rs:7
   4:     0x7f12 - at;e
   5:     0x7f12 - <unknown>
   6:                0x0 - <unknown>
";
        let frames = frames(text);
        let found: Vec<(&str, &str)> = frames.iter().map(|f| (f.name, f.file)).collect();
        let expected = [
            ("a::b::h0123456789abcdef", "/rust/library/core.rs"),
            ("a::<i32>::c", "./x.rs"),
            ("at;e", ""),
            ("0x7f12", ""),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn the_outer_functions_of_a_deep_stack_are_left_out() {
        let mut frames = vec![
            ("cualloc::event::sample::of_thread", ""),
            ("trainer::step", ""),
        ];
        frames.extend([("trainer::deep", ""); 200]);
        frames.push(("trainer::main", ""));
        let text = users(&printed(&frames));
        assert!(text.ends_with(";trainer::deep;trainer::step"), "{text}");
        assert_eq!(text.split(';').count(), DEEPEST - 1);
    }

    #[test]
    #[cfg_attr(miri, ignore = "addresses are those of an unwinder")]
    fn a_stack_is_the_same_each_time() {
        fn asked() -> (Vec<usize>, String) {
            (addresses(), text(&Backtrace::force_capture()))
        }
        let found: Vec<_> = (0..2).map(|_| asked()).collect();
        assert_eq!(found[0], found[1]);
        assert!(cfg!(not(unix)) || found[0].0.len() > 3);
        // This test is a function of the crate itself, so only its callers are left.
        let own =
            |name: &str| name.contains("asked") || name.ends_with("a_stack_is_the_same_each_time");
        assert!(!found[0].1.split(';').any(own), "{}", found[0].1);
    }
}
