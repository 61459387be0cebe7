//! What the metadata is checked for: the first thing that does not agree.

use crate::error::Error;

pub(crate) fn same(what: &'static str, expected: u64, found: u64) -> Result<(), Error> {
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
    same(what, 1, u64::from(condition))
}
