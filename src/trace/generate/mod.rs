//! Programs that nobody recorded: sequences of allocations made up by rules, for work of which no
//! recording is at hand.
//!
//! A program is its [`Kind`] and its numbers; equal ones give equal traces on every machine.

#![forbid(unsafe_code)]

mod draft;
mod large;
mod random;
mod sharded;
mod vary;

use super::format::{Trace, TraceError};

pub use draft::{Kind, Program};

impl Program {
    /// The program as a trace. Of a program of n rows the first m are those of one of m rows.
    ///
    /// # Errors
    /// None but for numbers out of all bounds (more live bytes than 64 bits can count).
    pub fn trace(&self, name: impl Into<String>) -> Result<Trace, TraceError> {
        let rows = match self.kind {
            Kind::Large => large::rows(self),
            Kind::Sharded => sharded::rows(self),
            Kind::Random | Kind::Churn => random::rows(self),
        };
        Trace::from_rows(name, rows)
    }
}

/// The same program several times over, each time with every size changed at random by up to
/// `percent` (at most 99) of it: nothing repeats. Blocks that live to the end are freed at the end
/// of each copy.
///
/// # Errors
/// Only if the live bytes no longer fit into 64 bits.
pub fn vary(
    trace: &Trace,
    name: impl Into<String>,
    copies: usize,
    percent: u8,
    seed: u64,
) -> Result<Trace, TraceError> {
    Trace::from_rows(name, vary::rows(trace, copies, percent, seed))
}
