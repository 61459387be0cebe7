//! One figure, as a line of text or of JSON.

use serde::Serialize;
use std::fmt;

/// A figure of one source under one work.
#[derive(Serialize, Clone, Debug, PartialEq)]
pub struct Line<'a> {
    pub schema: u32,
    /// What was done.
    pub work: &'a str,
    /// Who did it.
    pub name: &'a str,
    /// With which size, or how many threads.
    pub case: String,
    /// None if there is an error.
    pub value: Option<f64>,
    pub unit: &'a str,
    pub device: &'a str,
    pub policy: &'a str,
    /// Why there is no value.
    pub error: Option<String>,
}

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Line {
            work,
            name,
            case,
            value,
            unit,
            ..
        } = self;
        let digits = match *unit {
            "Mops/s" => 2,
            "calls" => 4,
            _ => 1,
        };
        match value {
            Some(value) => write!(f, "{work} {name} {case}: {value:.digits$} {unit}"),
            None => write!(f, "{work} {name} {case}: - {unit}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_read_as_those_of_other_harnesses() {
        let mut line = Line {
            schema: 1,
            work: "pair",
            name: "cualloc",
            case: "4096 B".to_owned(),
            value: Some(25.04),
            unit: "ns",
            device: "sim",
            policy: "packed",
            error: None,
        };
        assert_eq!(line.to_string(), "pair cualloc 4096 B: 25.0 ns");
        line.work = "threads own-stream";
        line.case = "T=16".to_owned();
        line.unit = "Mops/s";
        assert_eq!(
            line.to_string(),
            "threads own-stream cualloc T=16: 25.04 Mops/s"
        );
    }
}
