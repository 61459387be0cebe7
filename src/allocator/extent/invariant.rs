//! Checks of the metadata, which report the first inconsistency.

use crate::error::Error;

/// A number of any width.
pub(crate) trait Number {
    fn number(self) -> u64;
}

impl Number for u32 {
    fn number(self) -> u64 {
        self.into()
    }
}

impl Number for u64 {
    fn number(self) -> u64 {
        self
    }
}

impl Number for usize {
    fn number(self) -> u64 {
        self as u64
    }
}

pub(crate) fn same(
    what: &'static str,
    expected: impl Number,
    found: impl Number,
) -> Result<(), Error> {
    let (expected, found) = (expected.number(), found.number());
    if expected == found {
        Ok(())
    } else {
        Err(Error::Inconsistent {
            what,
            expected,
            found,
        })
    }
}

pub(crate) fn holds(what: &'static str, condition: bool) -> Result<(), Error> {
    same(what, 1u32, u32::from(condition))
}
