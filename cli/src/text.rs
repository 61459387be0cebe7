//! Text for people: what a terminal may be shown, and errors in words.

use console::measure_text_width;
use cualloc::trace::Capacity;
use std::error::Error;
use std::path::Path;

/// Indentation of the further lines of a long message.
const INDENT: &str = "    ";

/// The text with all that could steer a terminal, or turn the order of letters, written as an escape.
pub fn visible(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        let steers = c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if steers {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// The name of a file in a message; `-` stands for one of the standard streams, named by the caller.
pub fn file(path: &Path, standard: &str) -> String {
    if is_standard(path) {
        standard.to_owned()
    } else {
        visible(&path.display().to_string())
    }
}

/// Whether this is `-`: stdin for what is read, stdout for what is written.
pub fn is_standard(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// A number of things, by the name of one.
pub fn counted(number: usize, name: &str) -> String {
    match number {
        1 => format!("1 {name}"),
        number => format!("{number} {name}s"),
    }
}

/// That a trace with this requested peak runs under no limit that was tried.
pub fn no_limit(requested_peak: u64) -> String {
    let most = requested_peak.saturating_mul(Capacity::FACTOR);
    format!("runs under no limit up to {most} bytes")
}

/// The messages of an error and of all its sources, in one line.
pub fn chain(error: &dyn Error) -> String {
    messages(error).join(": ")
}

/// The message of an error, then those of its sources that say something new.
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

/// A message as lines no wider than `width`, as far as its words allow; all behind the first are indented.
pub fn fold(message: &str, width: usize) -> String {
    let (mut folded, mut used) = (String::new(), 0);
    for word in message.split(' ') {
        let length = measure_text_width(word);
        if used > 0 && used + 1 + length > width {
            folded.push('\n');
            folded += INDENT;
            used = INDENT.len();
        } else if used > 0 {
            folded.push(' ');
            used += 1;
        }
        folded += word;
        used += length;
    }
    folded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_messages_are_folded_between_words() {
        let message = "error: a.csv:7: row 6 failed: out of memory: 2 GiB requested, 1 GiB live";
        assert_eq!(fold(message, 200), message);
        assert_eq!(
            fold(message, 30),
            "error: a.csv:7: row 6 failed:\n    out of memory: 2 GiB\n    requested, 1 GiB live"
        );
        let long = format!("note: {}/file.csv: größe", "folder".repeat(9));
        let folded = fold(&long, 30);
        assert_eq!(folded.replace("\n    ", " "), long);
        assert_eq!(folded.lines().count(), 3, "{folded}");
        assert_eq!(fold("", 0), "");
    }
}
