//! The text of a thread's last failure, in memory that a thread has from its first failure on.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::Cell;
use std::ffi::c_char;
use std::fmt::{self, Write};
use std::ptr;

use crate::results::CUALLOC_OK;

/// Longer texts are cut at a character's border.
const BYTES: usize = 4096;

type Text = [u8; BYTES];

thread_local! {
    /// Null until the thread's first failure. Not the text itself: what a library that is opened at run time has for each
    /// thread is to be small. Has no destructor, so that it can be asked until the thread's very end.
    static TEXT: Cell<*mut Text> = const { Cell::new(ptr::null_mut()) };
    static LEAVING: Leaving = const { Leaving };
    /// The code that goes with the text.
    static CODE: Cell<i32> = const { Cell::new(CUALLOC_OK) };
}

/// Frees the text when the thread ends.
struct Leaving;

impl Drop for Leaving {
    fn drop(&mut self) {
        let text = TEXT.replace(ptr::null_mut());
        if !text.is_null() {
            // SAFETY: it was made with this layout, and nobody has it any more.
            unsafe { dealloc(text.cast(), Layout::new::<Text>()) };
        }
    }
}

/// Memory for the thread's text, unless there is none.
fn made() -> Option<*mut Text> {
    if TEXT.get().is_null() {
        // SAFETY: the layout has a size.
        TEXT.set(unsafe { alloc_zeroed(Layout::new::<Text>()) }.cast());
        // A failure in a thread's end, behind that of its text, has one that stays for good.
        let _ended = LEAVING.try_with(|_| ());
    }
    Some(TEXT.get()).filter(|text| !text.is_null())
}

/// Keeps a code for [`last_code`] and a text for [`last`].
#[cold]
pub(crate) fn set(code: i32, text: fmt::Arguments<'_>) {
    CODE.set(code);
    let Some(kept) = made() else { return };
    // A text that calls back here while it is written has its bytes overwritten, one at a time, through the same pointer.
    let mut end = End { kept, at: 0 };
    end.push(0);
    // It writes what fits, and no more is needed.
    let _ = end.write_fmt(text);
}

/// The text of this thread's last failure, ended by a zero; empty before the first one.
pub(crate) fn last() -> *const c_char {
    let text = TEXT.get();
    match text.is_null() {
        true => c"".as_ptr(),
        false => text.cast_const().cast(),
    }
}

/// The code of this thread's last failure.
pub(crate) fn last_code() -> i32 {
    CODE.get()
}

struct End {
    kept: *mut Text,
    at: usize,
}

impl End {
    fn push(&mut self, byte: u8) {
        // SAFETY: the buffer is this thread's, which has it still, and no reference to it is made elsewhere.
        unsafe { (*self.kept)[self.at] = byte };
    }
}

impl Write for End {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for letter in text.chars() {
            // A text for C ends with its first zero.
            let letter = if letter == '\0' { '?' } else { letter };
            let mut bytes = [0; 4];
            let bytes = letter.encode_utf8(&mut bytes).as_bytes();
            if self.at + bytes.len() >= BYTES {
                return Err(fmt::Error);
            }
            for byte in bytes {
                self.push(*byte);
                self.at += 1;
            }
            self.push(0);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn text() -> String {
        // SAFETY: the text always has a zero, and is the thread's own.
        unsafe { CStr::from_ptr(last()) }
            .to_str()
            .unwrap()
            .to_owned()
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        assert_eq!((text().as_str(), last_code()), ("", CUALLOC_OK));
        let long = "ä€".repeat(BYTES);
        set(7, format_args!("x{long}"));
        assert_eq!(last_code(), 7);
        let kept = text();
        assert!(
            kept.len() < BYTES && kept.len() > BYTES - 4,
            "{}",
            kept.len()
        );
        assert!(format!("x{long}").starts_with(&kept));
        set(1, format_args!("short\0er"));
        assert_eq!(text(), "short?er");
        set(1, format_args!(""));
        let other = std::thread::spawn(text).join().unwrap();
        assert_eq!(other, "", "each thread has its own");
    }
}
