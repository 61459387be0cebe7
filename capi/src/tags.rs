//! Tags of graph pools by their texts. A tag lives as long as the process, and a program has few of them.

use std::collections::BTreeSet;
use std::ffi::c_char;

use cualloc::Tag;
use cualloc::held::Mutex;

use crate::results::{CUALLOC_INVALID_ARGUMENT, Failure};
use crate::{entry, options};

/// Most tags of a process.
const MOST: usize = 65_536;

static TAGS: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());

/// # Safety
/// `text` is null or ends with a zero, and stays as long as the result is used.
unsafe fn read<'a>(text: *const c_char) -> Result<&'a str, Failure> {
    options::refuse_child()?;
    // SAFETY: the caller's contract.
    unsafe { entry::text(text, "a tag is not UTF-8") }
}

/// The tag with a text, which is a new one if there is none.
///
/// # Safety
/// `text` is null or ends with a zero.
pub(crate) unsafe fn of(text: *const c_char) -> Result<Tag, Failure> {
    // SAFETY: the caller's contract.
    let text = unsafe { read(text) }?;
    let mut tags = TAGS.lock();
    if let Some(known) = tags.get(text) {
        return Ok(Tag::new(known));
    }
    if tags.len() == MOST {
        let why = "there are 65536 tags already";
        return Err(Failure::Said(CUALLOC_INVALID_ARGUMENT, why));
    }
    let kept: &'static str = Box::leak(text.into());
    tags.insert(kept);
    Ok(Tag::new(kept))
}

/// The tag with a text, if a pool was made with it.
///
/// # Safety
/// `text` is null or ends with a zero.
pub(crate) unsafe fn known(text: *const c_char) -> Result<Tag, Failure> {
    // SAFETY: the caller's contract.
    let text = unsafe { read(text) }?;
    let tags = TAGS.lock();
    let why = "no graph pool has this tag";
    let known = tags.get(text).map(|known| Tag::new(known));
    known.ok_or(Failure::Said(CUALLOC_INVALID_ARGUMENT, why))
}
