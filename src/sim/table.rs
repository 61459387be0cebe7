//! The function table: C functions that reach the simulators of this process.

use super::call::Call;
use super::hooks::SLOT_COUNT;
use super::slots;
use crate::driver::sys::*;
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void};

macro_rules! table {
    ($($name:ident($($arg:ident: $ty:ty),*);)*) => {
        /// The common part of all shims: lock, count, inject failures, and call the simulator's method.
        mod enter {
            #![allow(non_snake_case, clippy::too_many_arguments)]
            use super::*;
            use crate::sim::args::arg;
            $(
                /// # Safety
                /// Pointers must be as the driver's documentation of the function asks for.
                pub(super) unsafe fn $name(slot: usize, $($arg: $ty),*) -> CUresult {
                    slots::call(
                        slot,
                        Call::$name,
                        || {
                            let list: &[(&str, &dyn std::fmt::Debug)] =
                                &[$((stringify!($arg), &$arg)),*];
                            slots::summary(list)
                        },
                        // SAFETY: the caller of the driver function is responsible for its pointers.
                        |state| state.$name($(unsafe { arg($arg) }),*),
                    )
                }
            )*
        }

        /// The functions as C sees them: one set per slot, because C functions carry no user data.
        mod shims {
            #![allow(non_snake_case, clippy::too_many_arguments)]
            use super::*;
            $(
                pub(super) unsafe extern "C" fn $name<const SLOT: usize>(
                    $($arg: $ty),*
                ) -> CUresult {
                    // SAFETY: same contract, passed on.
                    unsafe { enter::$name(SLOT, $($arg),*) }
                }
            )*
        }

        fn table_of<const SLOT: usize>() -> CuFunctions {
            CuFunctions { $($name: Some(shims::$name::<SLOT>)),* }
        }

        /// Removes a function from a table, as a driver that does not export it.
        pub(super) fn remove(table: &mut CuFunctions, name: &str) {
            match name {
                $(stringify!($name) => table.$name = None,)*
                _ => {}
            }
        }
    };
}
sim_driver_functions!(table);

/// The table whose functions reach the simulator in `slot`.
pub(super) fn functions(slot: usize) -> CuFunctions {
    macro_rules! pick {
        ($($number:literal)*) => {
            match slot {
                $($number => table_of::<$number>(),)*
                _ => CuFunctions::default(),
            }
        };
    }
    const { assert!(SLOT_COUNT == 32) };
    pick!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31)
}
