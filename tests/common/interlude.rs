//! What somebody else does while a driver call of the allocator is under way.

use std::cell::{Cell, RefCell};

use cualloc::driver::sys::*;

type Work = Box<dyn FnOnce()>;

thread_local! {
    static TRUE_FUNCTIONS: Cell<CuFunctions> = Cell::new(CuFunctions::default());
    /// A call, and what happens right after its next one on this thread.
    static NEXT: RefCell<Option<(&'static str, Work)>> = const { RefCell::new(None) };
}

fn played(call: &str) {
    let next = NEXT.take();
    match next {
        Some((name, work)) if name == call => work(),
        other => NEXT.set(other),
    }
}

macro_rules! with_interludes {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        $(#[allow(non_snake_case)]
        unsafe extern "C" fn $name($($argument: $type),*) -> CUresult {
            // SAFETY: the caller's arguments, to the function that stood here.
            let code = unsafe { TRUE_FUNCTIONS.get().$name.unwrap()($($argument),*) };
            played(stringify!($name));
            code
        })*

        /// Makes room for interludes in the calls of this thread; returns the table to use instead.
        pub fn install(functions: CuFunctions) -> CuFunctions {
            TRUE_FUNCTIONS.set(functions);
            CuFunctions {
                $($name: functions.$name.and(Some($name)),)*
                ..functions
            }
        }
    };
}

with_interludes! {
    cuEventRecord(event: CUevent, stream: CUstream);
    cuStreamQuery(stream: CUstream);
    cuMemUnmap(address: CUdeviceptr, bytes: usize);
}

/// Has `work` done once, when the driver has done the next call of a name on this thread and before the
/// allocator knows. On a rig [with interludes](super::Rig::with_interludes).
pub fn after(call: &'static str, work: impl FnOnce() + 'static) {
    NEXT.set(Some((call, Box::new(work))));
}

/// Whether the call has not come yet.
pub fn is_due() -> bool {
    NEXT.with_borrow(Option::is_some)
}
