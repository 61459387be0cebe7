//! The text of a thread's last failure, in memory that is there from the thread's start.

use std::cell::{Cell, UnsafeCell};
use std::ffi::c_char;
use std::fmt::{self, Write};

use crate::results::CUALLOC_OK;

/// Longer texts are cut at a character's border.
const BYTES: usize = 1024;

thread_local! {
    /// Has no destructor, so that it is there until the thread's very end.
    static TEXT: UnsafeCell<[u8; BYTES]> = const { UnsafeCell::new([0; BYTES]) };
    /// The code that goes with it.
    static CODE: Cell<i32> = const { Cell::new(CUALLOC_OK) };
}

/// Keeps a code for [`last_code`] and a text for [`last`]. Takes no memory of its own.
#[cold]
pub(crate) fn set(code: i32, text: fmt::Arguments<'_>) {
    CODE.set(code);
    TEXT.with(|kept| {
        // SAFETY: the buffer is the thread's own. A text that calls back here while it is written has its bytes
        // overwritten, one at a time, through the same pointer.
        let mut end = End {
            kept: kept.get(),
            at: 0,
        };
        end.push(0);
        // It writes what fits, and no more is needed.
        let _ = end.write_fmt(text);
    });
}

/// The text of this thread's last failure, ended by a zero; empty before the first one.
pub(crate) fn last() -> *const c_char {
    TEXT.with(|text| text.get().cast_const().cast())
}

/// The code of this thread's last failure.
pub(crate) fn last_code() -> i32 {
    CODE.get()
}

struct End {
    kept: *mut [u8; BYTES],
    at: usize,
}

impl End {
    fn push(&mut self, byte: u8) {
        // SAFETY: the buffer is this thread's, lives as long as it, and no reference to it is made elsewhere.
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
        // SAFETY: the buffer always has a zero, and is the thread's own.
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
