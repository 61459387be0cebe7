//! Text for people: safe for terminals, and errors as messages.

use cualloc::trace::Capacity;
use std::error::Error;
use std::path::Path;

/// Escapes all characters that could control a terminal or change the direction of text.
pub fn escape(text: &str) -> String {
    let turns = |c| matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_control() || turns(c) {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
    }
    shown
}

/// Returns the name of a file for messages; for `-` the given name of the standard stream.
pub fn file(path: &Path, standard: &str) -> String {
    match is_standard(path) {
        true => standard.to_owned(),
        false => escape(&path.display().to_string()),
    }
}

pub fn place(path: &Path, standard: &str, line: Option<u64>) -> String {
    let file = file(path, standard);
    line.map_or(file.clone(), |line| format!("{file}:{line}"))
}

/// Whether the path is `-`: stdin for input, stdout for output.
pub fn is_standard(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Returns the name of the file without folder and extensions; `stdin` for `-`.
pub fn trace_name(path: &Path) -> String {
    if is_standard(path) {
        return "stdin".to_owned();
    }
    let name = path
        .file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    let endings = [".csv", ".rec", ".pickle", ".json", ".html"];
    let plain = endings.iter().find_map(|end| name.strip_suffix(end));
    plain.unwrap_or(name).to_owned()
}

/// Formats a count with its noun.
pub fn count_noun(number: usize, name: &str) -> String {
    match number {
        1 => format!("1 {name}"),
        number => format!("{number} {name}s"),
    }
}

/// What the results of `advise` and `capacity` assume.
pub const ASSUMED: &str = "sizes are what the allocator may hold: the device needs the headroom and what other programs take \
                           beside them; memory is scarce near the limit, else plentiful";

/// The message for a trace that runs under none of the limits tried.
pub fn no_limit_message(requested_peak: u64) -> String {
    let most = requested_peak.saturating_mul(Capacity::FACTOR);
    format!("runs under no limit up to {most} bytes")
}

/// Joins the messages of an error and all its sources in one line.
pub fn chain(error: &dyn Error) -> String {
    messages(error).join(": ")
}

/// Returns the message of an error, then those of its sources that add information.
pub fn messages(error: &dyn Error) -> Vec<String> {
    let mut messages = vec![error.to_string()];
    let mut source = error.source();
    while let Some(error) = source {
        let message = error.to_string();
        if !messages.iter().any(|said| said.contains(&message)) {
            messages.push(message);
        }
        source = error.source();
    }
    messages
}
