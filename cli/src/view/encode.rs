//! Encodings of bytes and text for the page.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use flate2::Compression;
use flate2::write::DeflateEncoder;
use std::collections::BTreeMap;
use std::io::{self, BufWriter};

/// The largest integer that a script computes with exactly.
pub const MOST: u64 = (1 << 53) - 1;

/// Limits a number to what a script can represent: at most [`MOST`].
pub fn exact(number: impl Into<Option<u64>>) -> Option<u64> {
    number.into().map(|number| number.min(MOST))
}

/// Columns of integers by name, delta-encoded.
#[derive(Default)]
pub struct Columns(BTreeMap<&'static str, Vec<i64>>);

impl Columns {
    /// Adds a column. Numbers above [`MOST`] are reduced to it.
    pub fn add(&mut self, name: &'static str, numbers: impl IntoIterator<Item = u64>) {
        let mut last = 0;
        let steps = numbers.into_iter().map(|number| {
            let number = number.min(MOST).cast_signed();
            number - std::mem::replace(&mut last, number)
        });
        self.0.insert(name, steps.collect());
    }

    /// Returns all columns as JSON, deflated, in base64.
    pub fn packed(&self) -> io::Result<String> {
        let mut packer = BufWriter::new(DeflateEncoder::new(Vec::new(), Compression::default()));
        serde_json::to_writer(&mut packer, &self.0)?;
        Ok(BASE64_STANDARD.encode(packer.into_inner()?.finish()?))
    }
}

/// Escapes JSON for a script element: it then cannot end the element or begin a comment.
pub fn in_script(json: &str) -> String {
    // In JSON these characters occur only inside strings.
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
        let steps: BTreeMap<String, Vec<i64>> =
            serde_json::from_reader(DeflateDecoder::new(&packed[..])).unwrap();
        for (name, numbers) in [("first", &first[..]), ("none", &[]), ("second", &[MOST, 1])] {
            let sums = steps[name].iter().scan(0, |last, step| {
                *last += step;
                Some(*last as u64)
            });
            assert_eq!(Vec::from_iter(sums), numbers);
        }
    }

    #[test]
    fn no_text_ends_its_script() {
        let hostile = "</script><script>alert(1)</script><!-- \u{2028} \" \\";
        let embedded = in_script(&serde_json::to_string(hostile).unwrap());
        assert!(!embedded.contains(['<', '>']), "{embedded}");
        assert_eq!(serde_json::from_str::<String>(&embedded).unwrap(), hostile);
    }
}
