//! Text for people: what a terminal may be shown, and errors in words.

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

/// A message as lines no wider than `width` where it has places to break: all behind the first is
/// indented, one fact a line.
pub fn fold(message: &str, width: usize) -> String {
    if message.chars().count() <= width {
        return message.to_owned();
    }
    let mut lines = vec![String::new()];
    let (mut depth, mut quoted, mut last) = (0u32, false, ' ');
    for c in message.chars() {
        let ends = c == ' ' && depth == 0 && !quoted && matches!(last, ',' | ':' | ';');
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            '`' => quoted = !quoted,
            _ => {}
        }
        if ends {
            lines.push(String::new());
        } else if let Some(line) = lines.last_mut() {
            line.push(c);
        }
        last = c;
    }
    // Short ones share the first line, which names the file.
    let mut folded = lines.remove(0);
    let mut first = folded.chars().count();
    for line in lines {
        let length = line.chars().count();
        if line.ends_with(':') && first + 1 + length <= width && !folded.contains('\n') {
            folded.push(' ');
            first += 1 + length;
        } else {
            folded.push('\n');
            folded += INDENT;
        }
        folded += &line;
    }
    folded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{said}")]
    struct Link {
        said: &'static str,
        source: Option<Box<Link>>,
    }

    fn link(said: &'static str, source: Option<Link>) -> Link {
        let source = source.map(Box::new);
        Link { said, source }
    }

    #[test]
    fn nothing_is_said_twice() {
        let error = link("a.csv:3: unknown op", Some(link("unknown op", None)));
        assert_eq!(chain(&error), "a.csv:3: unknown op");
        let cause = link("is a directory", None);
        let error = link("cannot be opened", Some(link("cannot", Some(cause))));
        assert_eq!(chain(&error), "cannot be opened: is a directory");
    }

    #[test]
    fn terminals_are_not_steered() {
        assert_eq!(
            visible("a\u{1b}[31mb\n\u{9b}\u{202e}"),
            "a\\u{1b}[31mb\\n\\u{9b}\\u{202e}"
        );
        assert_eq!(visible("größe 大.csv"), "größe 大.csv");
        assert_eq!(file(Path::new("-"), "<stdin>"), "<stdin>");
        assert_eq!(file(Path::new("./-\r"), "<stdin>"), "./-\\r");
    }

    #[test]
    fn long_messages_become_a_block() {
        let message = "error: a.csv:7: row 6: out of memory: asked for 2 GiB, held 1 GiB (3 live, 4 cached), limit 1 GiB";
        assert_eq!(fold(message, 200), message);
        assert_eq!(
            fold(message, 40),
            "error: a.csv:7: row 6: out of memory:\n    asked for 2 GiB,\n    held 1 GiB (3 live, 4 cached),\n    limit 1 GiB"
        );
    }
}
