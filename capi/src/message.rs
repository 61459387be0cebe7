//! The text of a thread's last failure.

use std::cell::{Cell, UnsafeCell};
use std::ffi::c_char;
use std::fmt::{self, Write};

use crate::results::CUALLOC_OK;

/// Longer texts are truncated at a character boundary.
const BYTES: usize = 4096;

thread_local! {
    /// Zero-terminated. It has no destructor, so that destructors of other thread-local variables can use it.
    static TEXT: UnsafeCell<[u8; BYTES]> = const { UnsafeCell::new([0; BYTES]) };
    /// The code that goes with the text.
    static CODE: Cell<i32> = const { Cell::new(CUALLOC_OK) };
}

/// Keeps a code for [`last_code`] and a text for [`last`].
#[cold]
pub(crate) fn set(code: i32, text: fmt::Arguments<'_>) {
    CODE.set(code);
    // If formatting the text calls back into this function, its bytes are overwritten one at a time through the same
    // pointer.
    let mut end = End {
        text: TEXT.with(|text| text.get().cast()),
        at: 0,
    };
    end.push(0);
    // The text is truncated to what fits; the error this reports is expected.
    let _ = end.write_fmt(text);
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
    text: *mut u8,
    at: usize,
}

impl End {
    fn push(&mut self, byte: u8) {
        debug_assert!(self.at < BYTES);
        // SAFETY: `at` is less than `BYTES`; the text is this thread's, and no reference to it exists.
        unsafe { self.text.add(self.at).write(byte) };
    }
}

impl Write for End {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for letter in text.chars() {
            // A C string ends at its first zero, so zeros inside are replaced.
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
