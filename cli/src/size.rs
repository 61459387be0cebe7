//! Sizes and limits as they are written on the command line.

use cualloc::allocator;
use std::fmt;
use std::str::FromStr;

const UNITS: [(&str, u64); 4] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
];

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Debug)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        match text.parse() {
            Ok(allocator::Limit::Bytes(bytes)) => Ok(Size(bytes)),
            _ => Err(format!(
                "`{text}` is not a size above 0, like 512M, 1.5GiB or 4096"
            )),
        }
    }
}

/// Formats the size in the largest unit that divides it; parsing the result gives the same size.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(_, unit)| self.0.is_multiple_of(*unit)) {
            Some((name, unit)) => write!(f, "{} {name}", self.0 / unit),
            None => write!(f, "{}", self.0),
        }
    }
}

/// Parses the maximum of live bytes of a generated program: at least one smallest block.
pub fn live(text: &str) -> Result<Size, String> {
    let size: Size = text.parse()?;
    match size.0 {
        bytes if bytes < 512 => Err(format!(
            "{bytes} bytes are less than the smallest block, of 512"
        )),
        _ => Ok(size),
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Limit {
    /// Bytes, or a share of the device's memory.
    Of(allocator::Limit),
    /// A multiple of the trace's requested peak.
    Ratio(f64),
}

impl Limit {
    /// Returns the limit in bytes for a trace with this requested peak, on a device with this memory.
    pub fn bytes(self, requested_peak: u64, device: u64) -> u64 {
        // The error of rounding to a float and back is far below the granularity of memory.
        let bytes = match self {
            Limit::Of(allocator::Limit::Bytes(bytes)) => bytes,
            Limit::Of(allocator::Limit::Fraction(share)) => (device as f64 * share) as u64,
            Limit::Ratio(ratio) => (requested_peak as f64 * ratio) as u64,
        };
        bytes.max(1)
    }
}

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Limit, String> {
        let wrong = || {
            format!(
                "`{text}` is neither a size above 0 like 6G, nor a share of the device's memory like 90%, nor a \
                 multiple of the requested peak like 1.02x"
            )
        };
        match text.strip_suffix('x') {
            None => text.parse().map(Limit::Of).map_err(|_| wrong()),
            Some(ratio) => match ratio.parse::<f64>() {
                Ok(ratio) if ratio.is_finite() && ratio > 0.0 => Ok(Limit::Ratio(ratio)),
                _ => Err(wrong()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_written_as_they_are_read() {
        for (bytes, text) in [
            (144 << 30, "144 GiB"),
            (3 << 29, "1536 MiB"),
            (4097, "4097"),
        ] {
            assert_eq!(Size(bytes).to_string(), text);
            assert_eq!(text.parse(), Ok(Size(bytes)));
        }
        for text in ["50%", "0", "1.5", "much"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
        assert!(live("511").is_err() && live("512").is_ok());
    }
}
