//! Environment variables, ignored where the environment cannot be trusted.

use std::ffi::OsString;

/// Returns the value of a variable; none if the process has more privileges than its caller, whose environment is then
/// untrusted.
pub(crate) fn variable(name: &str) -> Option<OsString> {
    if is_secure() {
        return None;
    }
    std::env::var_os(name)
}

/// Like [`variable`], for variables that must be valid text.
pub(crate) fn text(name: &str) -> Option<String> {
    variable(name)?.into_string().ok()
}

/// Whether the process has more privileges than its caller, so that its environment is untrusted.
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
