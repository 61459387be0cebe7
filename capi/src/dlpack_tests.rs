//! Memory with several owners, copies, and the order of two streams, over the simulator.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

use cualloc::driver::Stream;
use cualloc::exchange::dlpack::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLTensor,
};

use super::*;
use crate::pool_tests::allocator;
use crate::tests::world;

unsafe extern "C" fn count(data: *mut c_void) {
    // SAFETY: the tests give a counter that outlives the owner.
    unsafe { &*data.cast::<AtomicU32>() }.fetch_add(1, Ordering::Relaxed);
}

fn owner(released: &AtomicU32) -> *mut cualloc_owner_t {
    let (data, mut owner) = (std::ptr::from_ref(released).cast_mut(), null_mut());
    // SAFETY: the pointer is to a local.
    let code = unsafe { cualloc_owner_create(Some(count), data.cast(), &mut owner) };
    assert_eq!(code, CUALLOC_OK);
    owner
}

fn tensor(shape: *mut i64, strides: *mut i64, ndim: i32) -> DLTensor {
    DLTensor {
        data: 0x200 as *mut c_void,
        device: DLDevice {
            device_type: DLDevice::CUDA,
            device_id: 0,
        },
        ndim,
        dtype: DLDataType {
            code: 2,
            bits: 32,
            lanes: 1,
        },
        shape,
        strides,
        byte_offset: 0,
    }
}

fn export(owner: *mut cualloc_owner_t, tensor: &DLTensor, flags: u64) -> (i32, *mut c_void) {
    let mut out = std::ptr::dangling_mut();
    // SAFETY: the tests' shapes have as many numbers, or are null.
    let code = unsafe {
        let tensor = std::ptr::from_ref(tensor).cast();
        cualloc_dlpack_export(owner, tensor, flags, &mut out)
    };
    (code, out)
}

#[test]
fn memory_is_released_with_its_last_owner() {
    let released = AtomicU32::new(0);
    let count = || released.load(Ordering::Relaxed);
    let owner = owner(&released);
    let (mut shape, mut strides) = ([2i64, 3], [3i64, 1]);
    let read_only = DLManagedTensorVersioned::READ_ONLY;
    let described = tensor(shape.as_mut_ptr(), strides.as_mut_ptr(), 2);
    let (code, first) = export(owner, &described, read_only);
    assert_eq!(code, CUALLOC_OK);
    let described = tensor(shape.as_mut_ptr(), null_mut(), 2);
    let (code, second) = export(owner, &described, CUALLOC_DLPACK_LEGACY);
    assert_eq!(code, CUALLOC_OK);
    // Shape and strides are copies.
    (shape, strides) = ([0; 2], [0; 2]);
    assert_eq!((shape, strides), ([0; 2], [0; 2]));
    let (first, second): (*mut DLManagedTensorVersioned, *mut DLManagedTensor) =
        (first.cast(), second.cast());
    // SAFETY: both live until their deleters are called below, each once.
    unsafe {
        let tensor = (*first).dl_tensor;
        assert_eq!((tensor.data as usize, (*first).flags), (0x200, read_only));
        assert_eq!(std::slice::from_raw_parts(tensor.shape, 2), [2, 3]);
        assert_eq!(std::slice::from_raw_parts(tensor.strides, 2), [3, 1]);
        assert!((*second).dl_tensor.strides.is_null());
        (*first).deleter.unwrap()(first);
        assert_eq!(cualloc_owner_release(owner), CUALLOC_OK);
        assert_eq!(count(), 0, "the second tensor holds the memory");
        let thread = second as usize;
        std::thread::spawn(move || {
            let second = thread as *mut DLManagedTensor;
            (*second).deleter.unwrap()(second);
        })
        .join()
        .unwrap();
    }
    assert_eq!(count(), 1);
    assert_eq!(cualloc_owner_release(owner), CUALLOC_CLOSED);
    let scalar = tensor(null_mut(), null_mut(), 0);
    assert_eq!(export(owner, &scalar, 0), (CUALLOC_CLOSED, null_mut()));
    assert_eq!(count(), 1);
}

#[test]
fn wrong_arguments_of_owners_are_refused() {
    let released = AtomicU32::new(0);
    let owner = owner(&released);
    let refused = (CUALLOC_INVALID_ARGUMENT, null_mut());
    let scalar = tensor(null_mut(), null_mut(), 0);
    assert_eq!(export(null_mut(), &scalar, 0), refused);
    for ndim in [-1, 1] {
        assert_eq!(
            export(owner, &tensor(null_mut(), null_mut(), ndim), 0),
            refused
        );
    }
    let mut made = null_mut();
    // SAFETY: null is allowed.
    unsafe {
        let code = cualloc_dlpack_export(owner, null(), 0, &mut made);
        assert_eq!((code, made), refused);
        let code = cualloc_owner_create(None, null_mut(), null_mut());
        assert_eq!(code, CUALLOC_INVALID_ARGUMENT);
        assert!(cualloc_dlpack_capsule_destructor(None, None).is_none());
    }
    assert_eq!(cualloc_owner_release(null_mut()), CUALLOC_INVALID_ARGUMENT);
    assert_eq!(cualloc_owner_release(owner), CUALLOC_OK);
    assert_eq!(released.load(Ordering::Relaxed), 1);
}

/// A capsule of Python, as far as the destructor sees it.
struct Capsule(&'static CStr, *mut c_void);

unsafe extern "C" fn is_valid(capsule: *mut c_void, name: *const c_char) -> i32 {
    // SAFETY: the test's capsule, and the name of a form.
    unsafe { ((*capsule.cast::<Capsule>()).0 == CStr::from_ptr(name)).into() }
}

unsafe extern "C" fn pointer(capsule: *mut c_void, _: *const c_char) -> *mut c_void {
    // SAFETY: the test's capsule.
    unsafe { (*capsule.cast::<Capsule>()).1 }
}

#[test]
fn a_capsule_without_a_consumer_deletes_its_tensor() {
    let released = AtomicU32::new(0);
    let scalar = tensor(null_mut(), null_mut(), 0);
    // SAFETY: the functions are those of the test's capsules.
    let destroy = unsafe { cualloc_dlpack_capsule_destructor(Some(is_valid), Some(pointer)) };
    for (turn, (name, flags)) in [
        (c"dltensor_versioned", 0),
        (c"dltensor", CUALLOC_DLPACK_LEGACY),
    ]
    .into_iter()
    .enumerate()
    {
        let owner = owner(&released);
        let (_, made) = export(owner, &scalar, flags);
        assert_eq!(cualloc_owner_release(owner), CUALLOC_OK);
        let mut capsule = Capsule(c"used_dltensor", made);
        let at = std::ptr::from_mut(&mut capsule).cast();
        // SAFETY: the capsule is alive, and its tensor is deleted once.
        unsafe { destroy.unwrap()(at) };
        assert_eq!(released.load(Ordering::Relaxed), turn as u32);
        capsule.0 = name;
        // SAFETY: as above.
        unsafe { destroy.unwrap()(std::ptr::from_mut(&mut capsule).cast()) };
        assert_eq!(released.load(Ordering::Relaxed), turn as u32 + 1);
    }
}

#[test]
fn copies_follow_the_order_of_two_streams() {
    let (_one, simulator, driver) = world();
    let allocator = allocator();
    let context = driver.context(0).unwrap();
    let [first, second] = [(); 2].map(|()| Stream::new(&context).unwrap());
    let (mut at, values, mut back) = (0, [7u8; 4096], [0u8; 4096]);
    let handle = |stream: &Stream| stream.raw().cast::<c_void>();
    // SAFETY: the streams and the memory live until the last synchronisation.
    unsafe {
        let made = cualloc_alloc(allocator, 4096, handle(&first), &mut at);
        assert_eq!(made, CUALLOC_OK);
        let [from, to] = [values.as_ptr() as u64, back.as_mut_ptr() as u64];
        let code = cualloc_copy(allocator, at, from, 4096, handle(&first));
        assert_eq!(code, CUALLOC_OK);
        for _ in 0..2 {
            let code = cualloc_stream_wait(allocator, handle(&second), handle(&first));
            assert_eq!(code, CUALLOC_OK);
        }
        let same = cualloc_stream_wait(allocator, null_mut(), std::ptr::without_provenance_mut(1));
        assert_eq!(same, CUALLOC_OK);
        let code = cualloc_copy(allocator, to, at, 4096, handle(&second));
        assert_eq!(code, CUALLOC_OK);
        let code = cualloc_stream_synchronize(allocator, handle(&second));
        assert_eq!((code, back), (CUALLOC_OK, values));
        assert_eq!(cualloc_free_on(allocator, at, handle(&second)), CUALLOC_OK);
        for stream in [&first, &second] {
            assert_eq!(cualloc_retire_stream(allocator, handle(stream)), CUALLOC_OK);
        }
        let closed = cualloc_copy(null_mut(), at, from, 4096, null_mut());
        assert_eq!(closed, CUALLOC_INVALID_ARGUMENT);
    }
    assert_eq!(cualloc_destroy(allocator), CUALLOC_OK);
    assert!(simulator.take_reports().is_empty());
}
