//! Options, and the creation and destruction of an allocator.

use std::ffi::{c_char, c_void};

use cualloc::Allocator;

use crate::entry::{call, call_with, give, text, value};
use crate::{cualloc_options_t, cualloc_t, device, handles, options, pool_table};

/// Returns new, empty options to be freed with cualloc_options_free; null on failure.
///
/// May be called from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_options_new() -> *mut cualloc_options_t {
    value(options::add)
}

/// Frees options. Allocators created with them are not affected. Null, or options freed before, are ignored.
///
/// May be called from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_options_free(options: *mut cualloc_options_t) {
    call(|| match options.is_null() {
        true => Ok(()),
        false => options::remove(options),
    });
}

/// Sets one option; the last value set for a key wins.
///
/// The keys are those of CUALLOC_CONFIG: policy (auto, packed, classic), limit (bytes, with K, M, G or T, or a share of
/// the device such as 80%), headroom (bytes), waits (scarce, always, never), profile (default, dense), peers (1+3),
/// decay (10s), keep (20%), captures (watched, never), debug (off, or guard, poison, quarantine:SIZE, leaks, joined by
/// +). With the prefix tune.: views, capture_checks, unretired_streams, self_test (on, off), checks (context, none),
/// handle and host_cache (bytes), nvtx (auto, off). One more key is device: cuda (the default), or sim, a simulated device of 80 GiB
/// in host memory, if the library was built with the feature sim. tune.checks defaults to none, and
/// tune.unretired_streams is on in shared allocators. cualloc_create rejects settings that contradict each other.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for null, an unknown key, a value that the key does not accept, or text that is not
/// UTF-8; CUALLOC_CLOSED for options that were freed; CUALLOC_UNSUPPORTED for device=sim without the simulator.
///
/// May be called from any thread.
///
/// # Safety
/// `key` and `value` are null or zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_options_set(
    options: *mut cualloc_options_t,
    key: *const c_char,
    value: *const c_char,
) -> i32 {
    call(|| {
        let why = "a key or a value is not UTF-8";
        // SAFETY: the caller's contract.
        let (key, value) = unsafe { (text(key, why)?, text(value, why)?) };
        options::set(options, key, value)
    })
}

/// Creates an allocator for a device, numbered from 0 as CUDA_VISIBLE_DEVICES orders them, on the device's primary
/// context, which the CUDA runtime uses too. Loads the driver on first use. options may be null. Settings that options
/// do not set come from the environment variable CUALLOC_CONFIG.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null out, a device that does not exist, or settings that contradict each
/// other; CUALLOC_CLOSED for options that were freed; CUALLOC_NO_DRIVER; CUALLOC_UNSUPPORTED if the device cannot do
/// what the settings ask for, or if 4096 allocators are open; CUALLOC_CONTEXT_LOST in a forked child; CUALLOC_DRIVER.
/// *out is then null.
///
/// May be called from any thread. The current context does not matter and stays current.
///
/// # Safety
/// `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_create(
    device: i32,
    options: *const cualloc_options_t,
    out: *mut *mut cualloc_t,
) -> i32 {
    let run = || {
        let options = options::find(options)?;
        let config = options.config()?;
        let context = device::primary(&options.source.driver()?, device)?;
        handles::add(Allocator::with_config(&context, config)?)
    };
    // SAFETY: the caller's contract.
    unsafe { give(out, run) }
}

/// Creates an allocator in a context of the caller (a CUcontext); null means the context that is current on the calling
/// thread. The caller keeps ownership of the context and destroys it after cualloc_destroy. If it is destroyed earlier,
/// the first call that detects this, and every later call that needs the context, fails with CUALLOC_CONTEXT_LOST and
/// makes no further driver calls on it.
///
/// Errors: as cualloc_create, and CUALLOC_INVALID_ARGUMENT if the context does not exist or none is current.
///
/// May be called from any thread.
///
/// # Safety
/// `cu_context` is null or a live context of the driver; `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_create_in(
    cu_context: *mut c_void,
    options: *const cualloc_options_t,
    out: *mut *mut cualloc_t,
) -> i32 {
    let run = || {
        let options = options::find(options)?;
        let config = options.config()?;
        // SAFETY: the caller's contract; a context destroyed later is detected when it is entered.
        let context = unsafe { device::context_of(&options.source.driver()?, cu_context) }?;
        handles::add(Allocator::with_config(&context, config)?)
    };
    // SAFETY: the caller's contract.
    unsafe { give(out, run) }
}

/// Makes the allocator's context current on the calling thread if none is, as the CUDA runtime does in a thread's first
/// call. A context that is already current stays current. No other function of this library needs a current context,
/// but code that uses the memory may: calls of the runtime make one current themselves; calls of the driver, and C++
/// libraries built on it, do not.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER.
///
/// May be called from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_make_current(allocator: *mut cualloc_t) -> i32 {
    call_with(allocator, |allocator| {
        Ok(allocator.context().make_current_if_none()?)
    })
}

/// Returns all memory to the driver and ends the handle. May wait for device work that used freed blocks. Calls of
/// other threads that are in progress with this allocator complete first, or fail with CUALLOC_CLOSED, as all later
/// ones do. The allocator's graph pools and their scopes end with it. After CUALLOC_OK the library no longer uses the
/// context.
///
/// Errors: CUALLOC_BUSY while blocks are live, a graph may use memory of a pool, a guard keeps memory, or a call in
/// progress holds memory, on another thread or (in a predicate of a scope) on the calling thread itself;
/// CUALLOC_CAPTURING if it would have to wait for a stream that is being captured; CUALLOC_DRIVER. After these, nothing
/// was done and the allocator remains usable. CUALLOC_CONTEXT_LOST: the context is lost; the memory is not released,
/// but the handle is ended (except in a forked child or while the process exits). CUALLOC_INVALID_ARGUMENT for null;
/// CUALLOC_CLOSED for a handle that was ended before.
///
/// May be called from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_destroy(allocator: *mut cualloc_t) -> i32 {
    call(|| {
        let lost = handles::destroy(allocator)?;
        pool_table::end_of(allocator as u64);
        lost.map_or(Ok(()), |error| Err(error.into()))
    })
}
