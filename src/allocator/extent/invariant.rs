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

pub(crate) fn same(what: &'static str, expected: u64, found: u64) -> Result<(), CheckError> {
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
    same(what, 1, u64::from(condition))
}
