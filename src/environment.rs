//! Environment variables, as far as the process may listen to them.

use std::ffi::OsString;

/// The value of a variable; none where the process runs with more rights than who started it, and would obey a
/// stranger.
pub(crate) fn variable(name: &str) -> Option<OsString> {
    if is_secure() {
        return None;
    }
    std::env::var_os(name)
}

/// As [`variable`], where only text is of use.
pub(crate) fn text(name: &str) -> Option<String> {
    variable(name)?.into_string().ok()
}

/// Whether the process was started with more rights than its caller has, so that its environment is a stranger's.
#[cfg(all(target_os = "linux", not(miri)))]
fn is_secure() -> bool {
    const AT_SECURE: std::ffi::c_ulong = 23;
    unsafe extern "C" {
        fn getauxval(kind: std::ffi::c_ulong) -> std::ffi::c_ulong;
    }
    #[cfg(test)]
    if tests::SECURE.get() {
        return true;
    }
    // SAFETY: the function takes any number, and reads what the process was started with.
    unsafe { getauxval(AT_SECURE) != 0 }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
fn is_secure() -> bool {
    false
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use super::*;
    use std::cell::Cell;

    thread_local! {
        pub(super) static SECURE: Cell<bool> = const { Cell::new(false) };
    }

    #[test]
    fn variables_are_ignored_under_secure_execution() {
        assert!(variable("PATH").is_some());
        SECURE.set(true);
        assert_eq!(variable("PATH"), None);
        assert_eq!(text("PATH"), None);
        SECURE.set(false);
    }
}
