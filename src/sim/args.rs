//! Arguments of driver functions: C pointers turned into types that the simulator uses safely.

use super::call::{R, fail};
use crate::driver::sys::CUresult;
use std::ffi::c_void;

/// Conversion of a C argument of type `C`; the parameter type of the method decides.
pub(super) trait Arg<C> {
    /// # Safety
    /// A pointer must be null or valid as the driver function's documentation says.
    unsafe fn from_c(c: C) -> Self;
}

impl<T> Arg<T> for T {
    unsafe fn from_c(c: T) -> T {
        c
    }
}

/// Converts one argument.
///
/// # Safety
/// As [`Arg::from_c`].
pub(super) unsafe fn arg<C, A: Arg<C>>(c: C) -> A {
    // SAFETY: same contract, passed on.
    unsafe { A::from_c(c) }
}

/// Where a result goes: null or writable for the duration of the call.
pub(super) struct Out<T>(*mut T);

impl<T> Arg<*mut T> for Out<T> {
    unsafe fn from_c(c: *mut T) -> Self {
        Out(c)
    }
}

impl<T> Out<T> {
    /// Stores `value`; a null pointer is an invalid value.
    pub(super) fn set(&self, value: T) -> R {
        if self.0.is_null() {
            return fail(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, so writable by the contract of `Arg::from_c`; alignment is not assumed.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Returns another pointer to the same place.
    pub(super) fn same(other: &Out<T>) -> Out<T> {
        Out(other.0)
    }

    /// Stores `value` unless the pointer is null, which means that the caller does not want it.
    pub(super) fn set_if(&self, value: T) {
        if !self.0.is_null() {
            let _ = self.set(value);
        }
    }

    /// Checks that the pointer is not null.
    pub(super) fn check(&self) -> R {
        if self.0.is_null() {
            fail(CUresult::CUDA_ERROR_INVALID_VALUE)
        } else {
            Ok(())
        }
    }

    /// The value now stored there, for arguments that go both ways.
    pub(super) fn get(&self) -> Result<T, CUresult>
    where
        T: Copy,
    {
        self.check()?;
        // SAFETY: not null, so readable by the contract of `Arg::from_c`.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// The same place, for arrays that are passed by a non-const pointer and only read.
    pub(super) fn read_only(&self) -> In<T> {
        In(self.0)
    }

    /// Stores the elements of an array that the caller has declared large enough.
    pub(super) fn fill(&self, values: impl IntoIterator<Item = T>) {
        if self.0.is_null() {
            return;
        }
        for (index, value) in values.into_iter().enumerate() {
            // SAFETY: not null, and the function's documentation asks for that many elements.
            unsafe { self.0.add(index).write_unaligned(value) };
        }
    }

    /// The first `count` elements, for arrays passed by a non-const pointer.
    pub(super) fn read(&self, count: usize) -> Result<Vec<T>, CUresult>
    where
        T: Copy,
    {
        self.check()?;
        // SAFETY: not null, and the function's documentation asks for `count` elements.
        Ok((0..count)
            .map(|index| unsafe { self.0.add(index).read_unaligned() })
            .collect())
    }

    /// Writes `bytes`, cut to `capacity` elements of one byte with a final zero.
    pub(super) fn set_text(&self, text: &str, capacity: i32) -> R {
        self.check()?;
        let Ok(capacity @ 1..) = usize::try_from(capacity) else {
            return fail(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        let bytes = &text.as_bytes()[..text.len().min(capacity - 1)];
        // SAFETY: the caller gives a buffer of `capacity` bytes, and at most that many are written.
        unsafe {
            self.0
                .cast::<u8>()
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            self.0.cast::<u8>().add(bytes.len()).write(0);
        }
        Ok(())
    }
}

impl Out<c_void> {
    /// The same place, holding a `U`.
    pub(super) fn cast<U>(&self) -> Out<U> {
        Out(self.0.cast())
    }
}

/// Read-only input: null or readable for the duration of the call.
pub(super) struct In<T>(*const T);

impl<T> Arg<*const T> for In<T> {
    unsafe fn from_c(c: *const T) -> Self {
        In(c)
    }
}

impl<T> In<T> {
    pub(super) fn none() -> In<T> {
        In(std::ptr::null())
    }
}

impl<T: Copy> In<T> {
    /// The value; a null pointer is an invalid value.
    pub(super) fn get(&self) -> Result<T, CUresult> {
        if self.0.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, so readable by the contract of `Arg::from_c`.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// The first `count` elements.
    pub(super) fn read(&self, count: usize) -> Result<Vec<T>, CUresult> {
        Out(self.0.cast_mut()).read(count)
    }
}

impl In<c_void> {
    /// The same place, holding a `U`.
    pub(super) fn cast<U>(&self) -> In<U> {
        In(self.0.cast())
    }
}

impl In<std::ffi::c_char> {
    /// The zero-terminated text.
    pub(super) fn text(&self) -> Result<String, CUresult> {
        if self.0.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, so a zero-terminated string by the contract of the driver function.
        Ok(unsafe { std::ffi::CStr::from_ptr(self.0) }
            .to_string_lossy()
            .into_owned())
    }
}

/// The array of pointers to kernel parameters.
pub(super) struct Params(*mut *mut c_void);

impl Arg<*mut *mut c_void> for Params {
    unsafe fn from_c(c: *mut *mut c_void) -> Self {
        Params(c)
    }
}

impl From<*mut *mut c_void> for Params {
    /// Takes the pointer from a structure that the caller of a driver function passes, under the same contract.
    fn from(params: *mut *mut c_void) -> Params {
        Params(params)
    }
}

impl Params {
    /// The parameter at `index`, which the kernel declares to be a `T`.
    pub(super) fn get<T: Copy>(&self, index: usize) -> Result<T, CUresult> {
        if self.0.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: a launch passes one valid pointer per declared parameter.
        Ok(unsafe { (*self.0.add(index)).cast::<T>().read_unaligned() })
    }
}

/// A host address kept for later: the caller of an asynchronous operation keeps it valid until then.
#[derive(Clone, Copy, Debug)]
pub(super) struct Host {
    address: usize,
    /// The life of the page-locked block that contained it when the operation was submitted; 0 for other memory.
    pub(super) life: u64,
}

impl Host {
    pub(super) fn new(address: usize) -> Host {
        Host { address, life: 0 }
    }

    pub(super) fn address(self) -> usize {
        self.address
    }

    /// Copies `len` bytes at `offset` out of host memory.
    pub(super) fn read(self, offset: u64, len: u64) -> Vec<u8> {
        let source = (self.address + offset as usize) as *const u8;
        // SAFETY: the caller of the copy keeps its source readable until the copy completes.
        unsafe { std::slice::from_raw_parts(source, len as usize) }.to_vec()
    }

    /// Copies `bytes` to host memory at `offset`.
    pub(super) fn write(self, offset: u64, bytes: &[u8]) {
        let target = (self.address + offset as usize) as *mut u8;
        // SAFETY: the caller of the copy keeps its target writable until the copy completes.
        unsafe { target.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}

impl Arg<*const c_void> for Host {
    unsafe fn from_c(c: *const c_void) -> Self {
        Host::new(c as usize)
    }
}

impl Arg<*mut c_void> for Host {
    unsafe fn from_c(c: *mut c_void) -> Self {
        Host::new(c as usize)
    }
}
