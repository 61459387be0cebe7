//! `wrapper.h` and the generated bindings against each other and against the vendor's header.

use crate::common::{Folder, compile, compiler};
use cualloc::driver::Driver;
use std::collections::HashSet;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

const HEADER: &str = include_str!("../../wrapper.h");
const BINDINGS: &str = include_str!("../../src/driver/bindings.rs");

/// The vendor's include folder, where one is named by the environment; aloud where not. Never
/// looked for by file name: `cuda.h` is also the name of unrelated headers.
fn vendor() -> Option<PathBuf> {
    if let Some(folder) = env::var_os("CUALLOC_CUDA_INCLUDE").map(PathBuf::from) {
        assert!(is_vendor(&folder), "no CUDA header in {}", folder.display());
        return Some(folder);
    }
    let folder = env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("include"));
    match folder.filter(|folder| is_vendor(folder)) {
        Some(folder) => Some(folder),
        None => {
            eprintln!("SKIPPED: neither CUALLOC_CUDA_INCLUDE nor CUDA_HOME leads to a CUDA header");
            None
        }
    }
}

fn is_vendor(folder: &Path) -> bool {
    fs::read(folder.join("cuda.h"))
        .is_ok_and(|bytes| String::from_utf8_lossy(&bytes).contains("#define CUDA_VERSION"))
}

/// Lets the compiler judge `text`; its messages if it objects.
fn judge(cc: &OsString, text: &str, include: Option<&Path>, name: &str) -> Result<(), String> {
    let folder = Folder::new(name);
    let source = folder.file("check.c");
    fs::write(&source, text).unwrap();
    let mut arguments: Vec<OsString> = vec!["-std=gnu11".into(), "-fsyntax-only".into()];
    if let Some(include) = include {
        arguments.push("-I".into());
        arguments.push(include.into());
    }
    arguments.push(source.into());
    compile(cc, &arguments)
}

/// The vendor's header without its redirections of names, so that every exported name means
/// itself, old ones too.
const VENDOR: &str = "#define __CUDA_API_VERSION_INTERNAL\n#include <cuda.h>\n#undef offsetof\n";

/// The vendor's header with the prototypes of `header` behind it: a difference is a conflict.
fn prototypes(header: &str) -> String {
    let mut text = format!("{VENDOR}#define CUALLOC_PROTOTYPES_ONLY\n");
    // A prototype that the vendor does not have would conflict with nothing.
    text += "void *const declared[] = {\n";
    for symbol in Driver::symbols() {
        text += &format!("  (void *)&{},\n", symbol.name());
    }
    text + "};\n" + header
}

/// The layouts and values in the text of the bindings, as assertions in C.
fn assertions(bindings: &str) -> Vec<String> {
    let flat = bindings.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut found = Vec::new();
    let number = |text: &str| -> u64 {
        let digits: String = text.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().unwrap()
    };
    let after =
        |text: &str, mark: &str| -> String { text.split_once(mark).unwrap().1.trim().to_owned() };
    for (start, _) in flat.match_indices("\"Size of ") {
        let text = &flat[start + 9..];
        let name = text.split('"').next().unwrap();
        let size = number(&after(text, ">() - "));
        found.push(format!("sizeof({}) == {size}", object(name)));
    }
    for (start, _) in flat.match_indices("\"Alignment of ") {
        let text = &flat[start + 14..];
        let name = text.split('"').next().unwrap();
        let alignment = number(&after(text, ">() - "));
        found.push(format!(
            "_Alignof(__typeof__({})) == {alignment}",
            object(name)
        ));
    }
    for (start, _) in flat.match_indices("\"Offset of field: ") {
        let text = &flat[start + 18..];
        let (name, field) = text.split('"').next().unwrap().split_once("::").unwrap();
        let offset = number(&after(text, ") - "));
        found.push(format!("{} == {offset}", offset_of(name, field)));
    }
    for (start, _) in flat.match_indices("pub const ") {
        let text = &flat[start + 10..];
        let Some((name, rest)) = text.split_once(':') else {
            continue;
        };
        if !name.starts_with("CU") {
            continue;
        }
        let value = after(rest, "= ");
        let value = value
            .split_once('(')
            .map_or(value.as_str(), |(tag, inner)| {
                if tag.contains(';') {
                    &value
                } else {
                    inner.trim()
                }
            });
        found.push(format!("{name} == {}", number(value)));
    }
    // The table is ours alone. Reserved bytes get names in later headers, which moves the field but
    // neither changes the struct's size nor the fields before it.
    found
        .retain(|assertion| !assertion.contains("CuFunctions") && !assertion.contains("reserved)"));
    found
}

/// An expression for an object of a struct of the bindings. It is never evaluated.
fn object(name: &str) -> String {
    match nested(name) {
        Some((outer, place)) => format!("((struct {outer} *)0)->{place}"),
        None => format!("*(struct {name} *)0"),
    }
}

/// An expression for the offset of a field.
fn offset_of(name: &str, field: &str) -> String {
    // Rust keeps the word `type` for itself.
    let field = field.trim_end_matches('_');
    match nested(name) {
        Some((outer, place)) => {
            format!("offsetof(struct {outer}, {place}.{field}) - offsetof(struct {outer}, {place})")
        }
        None => format!("offsetof(struct {name}, {field})"),
    }
}

/// The one struct without a name goes by its place in another.
fn nested(name: &str) -> Option<(&str, &'static str)> {
    let outer = name.strip_suffix("__bindgen_ty_1")?;
    Some((outer, "allocFlags"))
}

/// The header `head` and behind it all assertions.
fn asserted(head: &str, bindings: &str) -> String {
    let mut text =
        format!("{head}\n#define offsetof(type, field) __builtin_offsetof(type, field)\n");
    for assertion in assertions(bindings) {
        text += &format!("_Static_assert({assertion}, \"\");\n");
    }
    text
}

#[test]
fn header_declares_every_function_of_the_table_once() {
    let declared: Vec<&str> = HEADER
        .lines()
        .filter_map(|line| line.strip_prefix("CUresult "))
        .filter_map(|line| line.split('(').next())
        .collect();
    let known: HashSet<&str> = Driver::symbols().map(|symbol| symbol.name()).collect();
    assert_eq!(declared.len(), known.len());
    assert_eq!(declared.iter().copied().collect::<HashSet<_>>(), known);
    assert!(!HEADER.contains("#include"));
}

/// The checked-in bindings have the header's layouts and values, also where libclang is missing.
#[test]
fn bindings_match_the_header() {
    let Some(cc) = compiler() else { return };
    let found = assertions(BINDINGS);
    assert!(found.len() > 150, "{found:?}");
    judge(&cc, &asserted(HEADER, BINDINGS), None, "own").unwrap();
}

/// Names, parameters and results of all functions are the vendor's.
#[test]
fn prototypes_match_the_vendor() {
    let Some(cc) = compiler() else { return };
    let Some(include) = vendor() else { return };
    judge(&cc, &prototypes(HEADER), Some(&include), "prototypes").unwrap();
}

/// Sizes, alignments, offsets and values are the vendor's.
#[test]
fn layouts_and_values_match_the_vendor() {
    let Some(cc) = compiler() else { return };
    let Some(include) = vendor() else { return };
    judge(&cc, &asserted(VENDOR, BINDINGS), Some(&include), "layouts").unwrap();
}
