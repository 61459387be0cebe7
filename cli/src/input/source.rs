//! Opened files, decompressed and bounded.

use super::{Fault, UNREAD, kind};
use crate::text;
use flate2::bufread::MultiGzDecoder;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::Path;

/// How many bytes are read to detect the kind of a file: no more than a pipe holds at least.
const TELLING: usize = 1 << 12;

/// A file whose first bytes were read, enough to detect its kind: a pipe may return one byte at a time.
pub struct Begun<R> {
    first: Cursor<Vec<u8>>,
    /// Why reading the first bytes stopped early; reported after the bytes that were read.
    fault: Option<io::Error>,
    rest: R,
}

impl<R: Read> Begun<R> {
    /// Fails if not even one byte can be read.
    pub fn new(mut rest: R) -> io::Result<Begun<R>> {
        let (mut first, mut fault) = (Vec::new(), None);
        let mut part = [0; TELLING];
        // White space before JSON does not help to detect the kind.
        while kind::significant_bytes(&first).len() < TELLING && first.len() < 1 << 16 {
            match rest.read(&mut part) {
                Ok(0) => break,
                Ok(read) => first.extend_from_slice(&part[..read]),
                Err(again) if again.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if first.is_empty() => return Err(error),
                Err(error) => {
                    fault = Some(error);
                    break;
                }
            }
        }
        let first = Cursor::new(first);
        Ok(Begun { first, fault, rest })
    }

    pub fn first(&self) -> &[u8] {
        self.first.get_ref()
    }

    pub fn fault(&mut self) -> Option<io::Error> {
        self.fault.take()
    }
}

impl<R: Read> Read for Begun<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match (
            self.first.read(into)?,
            self.fault.take_if(|_| !into.is_empty()),
        ) {
            (0, Some(fault)) => Err(fault),
            (0, None) => self.rest.read(into),
            (read, fault) => {
                self.fault = fault;
                Ok(read)
            }
        }
    }
}

pub type Source = Begun<Box<dyn Read>>;

pub(super) fn open(path: &Path) -> Result<Source, Fault> {
    let source: io::Result<Box<dyn Read>> = match text::is_standard(path) {
        true => Ok(Box::new(io::stdin().lock())),
        false => File::open(path).map(|file| Box::new(file) as Box<dyn Read>),
    };
    let begun = source.and_then(Begun::new);
    begun.map_err(|source| Fault::new("cannot be opened").with_source(source))
}

pub fn buffered<R: Read>(file: R) -> BufReader<R> {
    BufReader::with_capacity(1 << 16, file)
}

pub fn decompress(file: Source) -> Box<dyn Read> {
    Box::new(MultiGzDecoder::new(buffered(file)))
}

/// Reads a whole file of at most `rows` rows, each of a maximum number of bytes.
pub(super) fn whole(file: impl Read, rows: u64) -> Result<Vec<u8>, Fault> {
    const OTHERS: u64 = 64 << 20;
    const ROW: u64 = 1 << 10;
    let most = rows.saturating_mul(ROW).saturating_add(OTHERS);
    let mut bytes = Vec::new();
    let read = file.take(most).read_to_end(&mut bytes);
    let full = read.and_then(|read| match read as u64 == most {
        true => Err(io::Error::other(format!(
            "it has more than {most} bytes; --max-rows N takes more"
        ))),
        false => Ok(bytes),
    });
    full.map_err(|source| Fault::new(UNREAD).with_source(source))
}

pub fn too_many(rows: u64) -> io::Error {
    io::Error::other(format!(
        "there are more than {rows} rows; --max-rows N takes more"
    ))
}

/// A reader that fails after a number of rows, before they exhaust memory.
pub struct Bounded<R> {
    reader: R,
    rows: u64,
    /// Number of line ends left, including the header's.
    left: u64,
}

impl<R> Bounded<R> {
    pub fn new(reader: R, rows: u64) -> Bounded<R> {
        let left = rows.saturating_add(1);
        Bounded { reader, rows, left }
    }
}

impl<R: BufRead> BufRead for Bounded<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        let buffer = self.reader.fill_buf()?;
        match self.left {
            0 if !buffer.is_empty() => Err(too_many(self.rows)),
            _ => Ok(buffer),
        }
    }

    fn consume(&mut self, amount: usize) {
        // A line is consumed either completely or not at all, so it suffices to look at the last consumed byte.
        let ends = match self.reader.fill_buf() {
            Ok(buffer) => buffer
                .iter()
                .take(amount)
                .filter(|byte| **byte == b'\n')
                .count(),
            Err(_) => 0,
        };
        self.left = self.left.saturating_sub(ends as u64);
        self.reader.consume(amount);
    }
}

impl<R: BufRead> Read for Bounded<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let amount = self.fill_buf()?.read(into)?;
        self.consume(amount);
        Ok(amount)
    }
}
