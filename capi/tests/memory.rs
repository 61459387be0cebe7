//! Calls that are refused allocate no host memory: they return their errors to a program that has none left.

#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[path = "../../tests/common/watchdog.rs"]
mod watchdog;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::{CStr, c_char};
use std::ptr;

use cualloc_capi::*;

thread_local! {
    static TAKEN: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: everything is passed on.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        TAKEN.set(TAKEN.get() + 1);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static HEAP: Counting = Counting;

fn last() -> &'static CStr {
    // SAFETY: the text ends with a zero, and is used before the next call.
    unsafe { CStr::from_ptr(cualloc_last_error()) }
}

#[test]
fn an_error_takes_no_memory() {
    let text = |text: &'static CStr| -> *const c_char { text.as_ptr() };
    let (mut allocator, mut stale, mut ptr) = (ptr::null_mut(), ptr::null_mut(), 0);
    // SAFETY: handles are looked up, the pointers are to locals, and no device uses the block.
    unsafe {
        let options = cualloc_options_new();
        assert_eq!(
            cualloc_options_set(options, text(c"device"), text(c"sim")),
            CUALLOC_OK
        );
        assert_eq!(cualloc_create(0, options, &mut allocator), CUALLOC_OK);
        assert_eq!(cualloc_create(0, options, &mut stale), CUALLOC_OK);
        cualloc_options_free(options);
        assert_eq!(cualloc_destroy(stale), CUALLOC_OK);
        assert_eq!(
            cualloc_alloc(allocator, 4096, ptr::null_mut(), &mut ptr),
            CUALLOC_OK
        );
        let freed = ptr;
        assert_eq!(cualloc_free(allocator, freed), CUALLOC_OK);
        let mut block = 0;
        assert_eq!(
            cualloc_alloc(allocator, 8192, ptr::null_mut(), &mut block),
            CUALLOC_OK
        );
        let calls: [(i32, &dyn Fn() -> i32, &str); 8] = [
            (
                CUALLOC_INVALID_ARGUMENT,
                &|| cualloc_free(ptr::null_mut(), 1),
                "null",
            ),
            (CUALLOC_CLOSED, &|| cualloc_free(stale, 1), "destroyed"),
            (
                CUALLOC_NOT_OURS,
                &|| cualloc_free(allocator, 4096),
                "0x1000",
            ),
            (
                CUALLOC_NOT_LIVE,
                &|| cualloc_free(allocator, freed),
                "freed before",
            ),
            (
                CUALLOC_INVALID_ARGUMENT,
                &|| cualloc_alloc(allocator, 0, ptr::null_mut(), &mut 0),
                "0 bytes",
            ),
            (
                CUALLOC_INVALID_ARGUMENT,
                &|| cualloc_alloc(allocator, 1, ptr::null_mut(), ptr::null_mut()),
                "null",
            ),
            (
                CUALLOC_INVALID_ARGUMENT,
                &|| cualloc_alloc_aligned(allocator, 1, 3, ptr::null_mut(), &mut 0),
                "alignment",
            ),
            (
                CUALLOC_NOT_OURS,
                &|| cualloc_usable_size(allocator, 1, &mut 0),
                "0x1",
            ),
        ];
        // Everything that is created on first use is created now.
        for (code, call, _) in &calls {
            assert_eq!(call(), *code);
        }
        for (code, call, named) in &calls {
            let before = TAKEN.get();
            let got = call();
            assert_eq!(TAKEN.get(), before, "{named}: memory was taken");
            assert_eq!(got, *code);
            assert!(
                last().to_str().unwrap().contains(named),
                "{named}: {:?}",
                last()
            );
        }
        assert_eq!(cualloc_free(allocator, block), CUALLOC_OK);
        assert_eq!(cualloc_destroy(allocator), CUALLOC_OK);
    }
}
