//! A table of driver functions with something of a test's own beside each call.

/// Defines `install`, which puts `$before` and `$after` around calls of this thread; both are told the name.
macro_rules! hooked {
    (
        $(#[$doc:meta])*
        before $before:expr, after $after:expr;
        $($name:ident($($argument:ident: $type:ty),*);)*
    ) => {
        thread_local! {
            static TRUE_FUNCTIONS: Cell<CuFunctions> = Cell::new(CuFunctions::default());
        }

        $(#[allow(non_snake_case)]
        unsafe extern "C" fn $name($($argument: $type),*) -> CUresult {
            $before(stringify!($name));
            // SAFETY: the caller's arguments, to the function that stood here.
            let code = unsafe { TRUE_FUNCTIONS.get().$name.unwrap()($($argument),*) };
            $after(stringify!($name));
            code
        })*

        $(#[$doc])*
        pub fn install(functions: CuFunctions) -> CuFunctions {
            TRUE_FUNCTIONS.set(functions);
            CuFunctions {
                $($name: functions.$name.and(Some($name)),)*
                ..functions
            }
        }
    };
}
pub(crate) use hooked;
