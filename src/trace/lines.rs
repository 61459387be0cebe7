//! Lines of a file, each of a bounded length.

use std::io::{BufRead, Read};

use super::error::{LINE_LIMIT, TraceError, TraceFault};

/// The byte order mark that some programs write at the start of files.
const BYTE_ORDER_MARK: &[u8] = "\u{FEFF}".as_bytes();

pub(super) struct Lines<R> {
    reader: R,
    /// The number of the last line, counted from 1.
    pub line: u64,
    /// Whether the last line had an end.
    pub ended: bool,
    buffer: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(reader: R) -> Lines<R> {
        Lines {
            reader,
            line: 0,
            ended: true,
            buffer: Vec::new(),
        }
    }

    /// Returns the next line without its end, LF or CRLF; `None` at the end of the file. A byte order mark before the
    /// first one is removed.
    pub(super) fn next_line(&mut self) -> Result<Option<&[u8]>, TraceError> {
        self.line += 1;
        let line = self.line;
        self.buffer.clear();
        let read = (&mut self.reader)
            .take(LINE_LIMIT)
            .read_until(b'\n', &mut self.buffer)
            .map_err(|source| TraceFault::Read { source }.at(line))?;
        if read == 0 {
            return Ok(None);
        }
        let text = match self.buffer.strip_suffix(b"\n") {
            Some(text) => text.strip_suffix(b"\r").unwrap_or(text),
            None if read as u64 == LINE_LIMIT => return Err(TraceFault::LineTooLong.at(line)),
            None => &self.buffer,
        };
        self.ended = text.len() < read;
        Ok(Some(match line {
            1 => text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text),
            _ => text,
        }))
    }
}
