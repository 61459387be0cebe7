//! Tags of graph pools by text. A tag lives as long as the process; programs have few of them.

use std::collections::BTreeSet;
use std::ffi::c_char;

use cualloc::Tag;
use cualloc::held::Mutex;

use crate::results::{CUALLOC_INVALID_ARGUMENT, Failure};
use crate::{entry, handle_table};

/// The maximum number of tags in a process.
const MOST: usize = 65_536;

static TAGS: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());

/// # Safety
/// `text` is null or zero-terminated, and stays valid while the result is used.
unsafe fn read<'a>(text: *const c_char) -> Result<&'a str, Failure> {
    handle_table::refuse_child()?;
    // SAFETY: the caller's contract.
    unsafe { entry::text(text, "a tag is not UTF-8") }
}

/// Returns the tag with a text, creating it if necessary.
///
/// # Safety
/// `text` is null or zero-terminated.
pub(crate) unsafe fn of(text: *const c_char) -> Result<Tag, Failure> {
    // SAFETY: the caller's contract.
    let text = unsafe { read(text) }?;
    let mut tags = TAGS.lock();
    if let Some(known) = tags.get(text) {
        return Ok(Tag::new(known));
    }
    if tags.len() == MOST {
        let why = "there are 65536 tags already";
        return Err(Failure::Reason(CUALLOC_INVALID_ARGUMENT, why));
    }
    let kept: &'static str = Box::leak(text.into());
    tags.insert(kept);
    Ok(Tag::new(kept))
}

/// Returns the tag with a text if a pool was created with it.
///
/// # Safety
/// `text` is null or zero-terminated.
pub(crate) unsafe fn known(text: *const c_char) -> Result<Tag, Failure> {
    // SAFETY: the caller's contract.
    let text = unsafe { read(text) }?;
    let tags = TAGS.lock();
    let why = "no graph pool has this tag";
    let known = tags.get(text).map(|known| Tag::new(known));
    known.ok_or(Failure::Reason(CUALLOC_INVALID_ARGUMENT, why))
}
