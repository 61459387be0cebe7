//! Bytes and text as the page takes them.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use flate2::Compression;
use flate2::write::DeflateEncoder;
use std::io::{self, Write};

/// The largest whole number that a script computes with exactly.
pub const MOST: u64 = (1 << 53) - 1;

/// Columns of whole numbers, one behind the other.
#[derive(Default)]
pub struct Columns {
    bytes: Vec<u8>,
    /// The name of each, and how many numbers it has.
    pub counts: Vec<(String, usize)>,
}

impl Columns {
    /// Appends a column. Each number is the difference to the one before it: the sign in the lowest bit, then
    /// seven bits a byte, the lowest first, and the highest bit of a byte says that more follow. Numbers above
    /// [`MOST`] become that.
    pub fn add(&mut self, name: impl Into<String>, numbers: impl IntoIterator<Item = u64>) {
        let (mut last, mut count) = (0u64, 0);
        for number in numbers {
            let number = number.min(MOST);
            let mut rest = number.abs_diff(last) << 1 | u64::from(number < last);
            while rest >= 0x80 {
                self.bytes.push(rest as u8 | 0x80);
                rest >>= 7;
            }
            self.bytes.push(rest as u8);
            (last, count) = (number, count + 1);
        }
        self.counts.push((name.into(), count));
    }

    /// All columns, deflated, in base64.
    pub fn packed(&self) -> io::Result<String> {
        let mut packer = DeflateEncoder::new(Vec::new(), Compression::default());
        packer.write_all(&self.bytes)?;
        Ok(BASE64_STANDARD.encode(packer.finish()?))
    }
}

/// JSON as it may stand in a script element: nothing in it ends the element or begins a comment.
pub fn in_script(json: &str) -> String {
    // Outside of strings JSON has neither.
    json.replace('<', "\\u003c").replace('>', "\\u003e")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of a column, as the page's script reads them.
    pub fn numbers(bytes: &mut impl Iterator<Item = u8>, count: usize) -> Vec<u64> {
        let mut last = 0u64;
        let mut number = || {
            let (mut word, mut shift) = (0u64, 0);
            for byte in bytes.by_ref() {
                word |= u64::from(byte & 0x7f) << shift;
                shift += 7;
                if byte < 0x80 {
                    break;
                }
            }
            last = match word & 1 {
                0 => last + (word >> 1),
                _ => last - (word >> 1),
            };
            last
        };
        std::iter::repeat_with(&mut number).take(count).collect()
    }

    #[test]
    fn columns_are_read_back() {
        let first = [0, 5, 4, MOST, 0, 63, 64, 127, 1 << 40];
        let mut columns = Columns::default();
        columns.add("first", first);
        columns.add("none", []);
        columns.add("second", [u64::MAX, 1]);
        let counts: Vec<usize> = columns.counts.iter().map(|(_, count)| *count).collect();
        assert_eq!(counts, [9, 0, 2]);
        let mut bytes = columns.bytes.iter().copied();
        assert_eq!(numbers(&mut bytes, 9), first);
        assert_eq!(numbers(&mut bytes, 2), [MOST, 1]);
        assert_eq!(bytes.next(), None);
    }

    #[test]
    fn no_text_ends_its_script() {
        let hostile = "</script><script>alert(1)</script><!-- \u{2028} \" \\";
        let json = serde_json::to_string(hostile).unwrap();
        let embedded = in_script(&json);
        assert!(!embedded.contains(['<', '>']), "{embedded}");
        assert_eq!(serde_json::from_str::<String>(&embedded).unwrap(), hostile);
    }
}
