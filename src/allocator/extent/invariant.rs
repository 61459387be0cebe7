//! What the metadata is checked for: the first thing that does not agree.

/// Something in the heap does not agree.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("inconsistent heap: {what} (expected {expected}, found {found})")]
#[non_exhaustive]
pub struct CheckError {
    /// What was compared.
    pub what: &'static str,
    /// What the walk says.
    pub expected: u64,
    /// What the heap says.
    pub found: u64,
}

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
) -> Result<(), CheckError> {
    let (expected, found) = (expected.number(), found.number());
    if expected == found {
        Ok(())
    } else {
        Err(CheckError {
            what,
            expected,
            found,
        })
    }
}

pub(crate) fn holds(what: &'static str, condition: bool) -> Result<(), CheckError> {
    same(what, 1u32, u32::from(condition))
}
