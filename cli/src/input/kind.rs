//! The kind of a file, detected by its first bytes.

use crate::text;
use cualloc::record::Recording;
use cualloc::trace::{AllocationLog, Trace};

/// The byte order mark that some programs write at the start of text files.
const MARK: &[u8] = "\u{FEFF}".as_bytes();

/// The maximum number of characters of a line that a message quotes.
const QUOTED: usize = 60;

#[derive(PartialEq, Eq, Debug)]
pub enum Kind {
    /// Rows of allocations and frees.
    Trace,
    /// A log of RMM, or of the library's logging adaptor.
    Log,
    Recording,
    /// A memory snapshot as pickle or JSON, judging by its first bytes.
    Snapshot,
    /// A page of PyTorch's viewer, judging by its first bytes: the pickle is inside.
    Page,
    /// A file of another kind, described by the text.
    Other(String),
}

/// First bytes of other known kinds of file, and their descriptions.
const OTHERS: [(&[u8], &str); 12] = [
    // The magic number of old `torch.save` files.
    (
        b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19",
        "a file of torch.save",
    ),
    (
        b"PK\x03\x04",
        "a zip archive, as torch.save and numpy.savez write",
    ),
    (b"\x1f\x8b", "gzip data within gzip data"),
    (b"\x28\xb5\x2f\xfd", "data compressed by zstd"),
    (b"\xfd7zXZ", "data compressed by xz"),
    (b"BZh", "data compressed by bzip2"),
    (
        b"SQLite format 3",
        "an SQLite database, as Nsight Systems exports",
    ),
    (b"\xff\xfe", "text in UTF-16 (UTF-8 is read)"),
    (b"\xfe\xff", "text in UTF-16 (UTF-8 is read)"),
    (b"(dp", "a pickle of protocol 0 (2 to 5 are read)"),
    (b"(lp", "a pickle of protocol 0 (2 to 5 are read)"),
    (b"}q", "a pickle of protocol 1 (2 to 5 are read)"),
];

impl Kind {
    /// Returns the kind of a file that begins with these bytes; for a short file they are all of it.
    pub fn of(first: &[u8]) -> Kind {
        if first.starts_with(&Recording::MAGIC) {
            return Kind::Recording;
        }
        if let Some((_, name)) = OTHERS.iter().find(|(magic, _)| first.starts_with(magic)) {
            return Kind::Other((*name).to_owned());
        }
        let text = significant_bytes(first);
        let line = text.split(|byte| *byte == b'\n').next().unwrap_or(text);
        let line = line.trim_ascii_end();
        match text {
            [0x80, 2..=5, ..] => Kind::Snapshot,
            [b'[', ..] if is_debug_log(line) => Kind::Other("a debug log of RMM".to_owned()),
            [b'{' | b'[', ..] => Kind::Snapshot,
            [b'<', ..] => Kind::Page,
            _ if line == Trace::HEADER.as_bytes() => Kind::Trace,
            _ if AllocationLog::is_header(line) => Kind::Log,
            _ => Kind::Other(other(first, line)),
        }
    }
}

/// Returns the bytes that determine the kind: those after a byte order mark and white space.
pub fn significant_bytes(first: &[u8]) -> &[u8] {
    let text = first.strip_prefix(MARK).unwrap_or(first);
    text.trim_ascii_start()
}

/// Whether a line comes from RMM's debug log: thread, time and level in brackets.
fn is_debug_log(line: &[u8]) -> bool {
    let line = String::from_utf8_lossy(line);
    let mut parts = line.split(['[', ']']).filter(|part| !part.is_empty());
    let is_number = |part: &str| part.trim().bytes().all(|byte| byte.is_ascii_digit());
    let is_time = |part: &str| {
        let digits = |byte: u8| byte.is_ascii_digit() || matches!(byte, b':' | b'.');
        part.contains(':') && part.bytes().all(digits)
    };
    parts.next().is_some_and(is_number) && parts.next().is_some_and(is_time)
}

/// Describes a file of no known kind.
fn other(first: &[u8], line: &[u8]) -> String {
    if first.is_empty() {
        return "an empty file".to_owned();
    }
    if first.get(257..262) == Some(b"ustar") {
        return "a tar archive".to_owned();
    }
    // The last character may be truncated.
    let text = std::str::from_utf8(first);
    if text.is_err_and(|error| error.error_len().is_some()) || first.contains(&0) {
        return "binary data".to_owned();
    }
    let line = String::from_utf8_lossy(line);
    let quoted: String = line.chars().take(QUOTED).collect();
    let dots = if quoted.len() < line.len() { "…" } else { "" };
    let line = format!("`{}{dots}`", text::escape(&quoted));
    let kind = if quoted.contains(',') { "CSV" } else { "text" };
    format!("{kind} with the first line {line}")
}
