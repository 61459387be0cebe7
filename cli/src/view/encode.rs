//! Bytes and text as the page takes them.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use flate2::Compression;
use flate2::write::DeflateEncoder;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{self, BufWriter};

/// The largest whole number that a script computes with exactly.
pub const MOST: u64 = (1 << 53) - 1;

/// Columns of whole numbers by name, each number as the difference to the one before it.
#[derive(Default, Serialize)]
pub struct Columns(BTreeMap<&'static str, Vec<i64>>);

impl Columns {
    /// Adds a column. Numbers above [`MOST`] become that.
    pub fn add(&mut self, name: &'static str, numbers: impl IntoIterator<Item = u64>) {
        let mut last = 0;
        let steps = numbers.into_iter().map(|number| {
            let number = number.min(MOST).cast_signed();
            number - std::mem::replace(&mut last, number)
        });
        self.0.insert(name, steps.collect());
    }

    /// All columns as JSON, deflated, in base64.
    pub fn packed(&self) -> io::Result<String> {
        let mut packer = BufWriter::new(DeflateEncoder::new(Vec::new(), Compression::default()));
        serde_json::to_writer(&mut packer, self)?;
        Ok(BASE64_STANDARD.encode(packer.into_inner()?.finish()?))
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
    use flate2::read::DeflateDecoder;

    #[test]
    fn columns_are_read_back() {
        let first = [0, 5, 4, MOST, 0, 63, 64, 127, 1 << 40];
        let mut columns = Columns::default();
        columns.add("first", first);
        columns.add("none", []);
        columns.add("second", [u64::MAX, 1]);
        let packed = BASE64_STANDARD.decode(columns.packed().unwrap()).unwrap();
        let json: BTreeMap<String, Vec<i64>> =
            serde_json::from_reader(DeflateDecoder::new(&packed[..])).unwrap();
        let read = |name: &str| {
            let sums = json[name].iter().scan(0, |last, step| {
                *last += step;
                Some(*last as u64)
            });
            sums.collect::<Vec<u64>>()
        };
        assert_eq!(read("first"), first);
        assert!(json["none"].is_empty());
        assert_eq!(read("second"), [MOST, 1]);
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
