//! Options, and the beginning and the end of an allocator.

use std::ffi::{c_char, c_void};

use cualloc::Allocator;

use crate::entry::{call, call_with, give, text, value};
use crate::{cualloc_options_t, cualloc_t, device, handles, options};

/// New options, with nothing set; null if that is not possible. To be freed with cualloc_options_free.
///
/// Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_options_new() -> *mut cualloc_options_t {
    value(options::add)
}

/// Frees options. Allocators that were made with them stay as they are. Null, and what was freed before, change
/// nothing.
///
/// Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_options_free(options: *mut cualloc_options_t) {
    call(|| match options.is_null() {
        true => Ok(()),
        false => options::remove(options),
    });
}

/// Sets one option; the last value of a key counts.
///
/// Keys are those of CUALLOC_CONFIG: policy (auto, packed, classic), limit (bytes, with K, M, G or T, or a share of
/// the device as 80%), headroom (bytes), waits (scarce, always, never), profile (default, dense), peers (1+3), decay
/// (10s), keep (20%), captures (watched, never), debug (off, or guard, poison, quarantine:SIZE, leaks with + between),
/// and with the prefix tune. views, capture_checks, unretired_streams, self_test (on, off), checks (context, none),
/// handle (bytes), nvtx (auto, off). And device: cuda (the default), or sim, a simulated device of 80 GiB in host
/// memory, in a library that was built with the feature sim. tune.checks is none unless it is set, and
/// tune.unretired_streams is on in shared allocators. Settings that contradict each other are refused by
/// cualloc_create.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for null, an unknown key, a value that the key does not take, or text that is not
/// UTF-8; CUALLOC_CLOSED for options that were freed; CUALLOC_UNSUPPORTED for device=sim without the simulator.
///
/// Any thread.
///
/// # Safety
/// `key` and `value` are null or end with a zero.
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

/// Makes an allocator for a device, by its number from 0 (CUDA_VISIBLE_DEVICES counts), on the device's primary
/// context, which the CUDA runtime uses too. Loads the driver when it is first needed. options may be null: then the
/// environment variable CUALLOC_CONFIG has the settings, as it has those that options do not set.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null out, a device that is not there, or settings that contradict each
/// other; CUALLOC_CLOSED for options that were freed; CUALLOC_NO_DRIVER; CUALLOC_UNSUPPORTED if the device cannot do
/// what the settings ask for, or 4096 allocators are open; CUALLOC_CONTEXT_LOST in a forked child; CUALLOC_DRIVER.
/// *out is null then.
///
/// Any thread, whatever context is current. That stays current.
///
/// # Safety
/// `out` is null or may be written.
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

/// Makes an allocator in a context of the caller's (a CUcontext); null means the one that is current on the calling
/// thread. The context stays the caller's, who destroys it after cualloc_destroy. If it is destroyed before, calls
/// that need it fail with CUALLOC_CONTEXT_LOST from the first one on that finds out, and nothing more is called on it.
///
/// Errors: as cualloc_create, and CUALLOC_INVALID_ARGUMENT if there is no such context, or none is current.
///
/// Any thread.
///
/// # Safety
/// `cu_context` is null or a live context of the driver; `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_create_in(
    cu_context: *mut c_void,
    options: *const cualloc_options_t,
    out: *mut *mut cualloc_t,
) -> i32 {
    let run = || {
        let options = options::find(options)?;
        let config = options.config()?;
        // SAFETY: the caller's contract; one that dies is found out when it is entered.
        let context = unsafe { device::given(&options.source.driver()?, cu_context) }?;
        handles::add(Allocator::with_config(&context, config)?)
    };
    // SAFETY: the caller's contract.
    unsafe { give(out, run) }
}

/// Makes the allocator's context current on the calling thread if none is, as the CUDA runtime's first call there
/// does. One that is current stays. No other function needs a context to be current, but what others do with the
/// memory may: the runtime's calls make one current for themselves, the driver's and those of C++ over it do not.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER.
///
/// Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_make_current(allocator: *mut cualloc_t) -> i32 {
    call_with(allocator, |allocator| {
        Ok(allocator.context().make_current_if_none()?)
    })
}

/// Gives all memory back to the driver and ends the handle. May wait for work of the device: for that which used freed
/// blocks. Calls that other threads are in with this allocator come to their end first, or fail with CUALLOC_CLOSED,
/// as all later ones do. Its graph pools end with it, and their scopes. When this has returned CUALLOC_OK, nothing of
/// the context is used any more.
///
/// Errors: CUALLOC_BUSY while blocks are live, a graph may use memory of a pool, a guard keeps memory or a call on
/// another thread holds some, also one of the calling thread's own (in a predicate of a scope); CUALLOC_CAPTURING if a
/// stream would have to be waited for that is being captured; CUALLOC_DRIVER. In each of them nothing was done, and
/// the allocator goes on. CUALLOC_CONTEXT_LOST: the context is gone, memory is left alone, and the handle is ended all
/// the same (not so in a forked child, and not while the process ends). CUALLOC_INVALID_ARGUMENT for null,
/// CUALLOC_CLOSED for a handle that was ended before.
///
/// Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_destroy(allocator: *mut cualloc_t) -> i32 {
    call(|| handles::destroy(allocator))
}
