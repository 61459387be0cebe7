//! Blocks shared with other processes, over the simulator; both ends are here.

use std::ffi::c_char;
use std::ptr::{null, null_mut};

use super::*;
use crate::pool_tests::allocator;
use crate::tests::world;

fn share(from: *mut cualloc_t, address: u64, flags: u32, token: &mut [c_char]) -> (i32, u64, u64) {
    let (mut offset, mut foreign) = (0, 0);
    // SAFETY: the pointers are to locals.
    let code = unsafe {
        let (to, size) = (token.as_mut_ptr(), token.len());
        cualloc_share(from, address, flags, to, size, &mut offset, &mut foreign)
    };
    (code, offset, foreign)
}

fn open(by: *mut cualloc_t, token: *const c_char) -> (i32, *mut cualloc_import_t, u64, u64) {
    let (mut import, mut address, mut bytes) = (null_mut(), 0, 0);
    // SAFETY: the token is null or ends with a zero; the other pointers are to locals.
    let code = unsafe { cualloc_share_open(by, token, &mut import, &mut address, &mut bytes) };
    (code, import, address, bytes)
}

#[test]
fn a_block_is_shared_opened_and_closed() {
    let (_one, _simulator, _driver) = world();
    let allocator = allocator();
    let mut at = 0;
    // SAFETY: the pointer is to a local.
    let made = unsafe { cualloc_alloc(allocator, 5 << 20, null_mut(), &mut at) };
    assert_eq!(made, CUALLOC_OK);
    let mut token = [1; CUALLOC_TOKEN_BYTES];
    assert_eq!(
        share(allocator, at + 512, 0, &mut token),
        (CUALLOC_OK, 512, 1 << 20)
    );
    let refuse = CUALLOC_SHARE_REFUSE_FOREIGN;
    for (address, flags, size, code) in [
        (at, refuse, 256, CUALLOC_INVALID_ARGUMENT),
        (at, 2, 256, CUALLOC_INVALID_ARGUMENT),
        (at, 0, 255, CUALLOC_INVALID_ARGUMENT),
        (64, 0, 256, CUALLOC_NOT_OURS),
    ] {
        let mut other = vec![1; size];
        assert_eq!(share(allocator, address, flags, &mut other).0, code);
        assert_eq!(other[0], 0);
    }
    let (code, import, address, bytes) = open(allocator, token.as_ptr());
    assert_eq!((code, bytes), (CUALLOC_OK, 5 << 20));
    assert!(address != 0 && address != at);
    assert_eq!(
        open(allocator, c"cualloc1-".as_ptr()).0,
        CUALLOC_INVALID_ARGUMENT
    );
    assert_eq!(open(allocator, null()).0, CUALLOC_INVALID_ARGUMENT);
    assert_eq!(cualloc_destroy(allocator), CUALLOC_BUSY);
    assert_eq!(cualloc_share_close(import), CUALLOC_OK);
    assert_eq!(cualloc_share_close(import), CUALLOC_CLOSED);
    assert_eq!(cualloc_share_close(null_mut()), CUALLOC_INVALID_ARGUMENT);
    // SAFETY: nothing uses the block.
    assert_eq!(unsafe { cualloc_free(allocator, at) }, CUALLOC_OK);
    assert_eq!(
        open(allocator, token.as_ptr()),
        (CUALLOC_NOT_LIVE, null_mut(), 0, 0)
    );
    // The server ends the guard on its own thread.
    let begun = std::time::Instant::now();
    while cualloc_destroy(allocator) == CUALLOC_BUSY {
        assert!(begun.elapsed().as_secs() < 120, "the guard has not ended");
        std::thread::yield_now();
    }
}
