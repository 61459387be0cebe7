//! One allocator for each device, shared by all parts of a process that cannot pass a handle to each other, and by
//! libraries that do not know each other.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use cualloc::Allocator;
use cualloc::held::{Locked, Mutex};

use crate::entry::{call, give, value};
use crate::options::{self, Options};
use crate::results::{CUALLOC_BUSY, CUALLOC_UNSUPPORTED, Failure};
use crate::{cualloc_options_t, cualloc_t, device, handle_table, handles};

/// The number of devices that can have a shared allocator.
const DEVICES: usize = 128;

/// The handles by device; 0 if not yet created.
static MADE: [AtomicU64; DEVICES] = [const { AtomicU64::new(0) }; DEVICES];

/// One more than the highest device that has an allocator.
static END: AtomicUsize = AtomicUsize::new(0);

/// The settings that shared allocators are created with.
struct Settings {
    /// None for the defaults.
    options: Option<Options>,
    /// The number of allocators being created with these settings.
    making: usize,
}

static SETTINGS: Mutex<Settings> = Mutex::new(Settings {
    options: None,
    making: 0,
});

fn settings() -> Result<Locked<'static, Settings>, Failure> {
    handle_table::refuse_child()?;
    Ok(SETTINGS.lock())
}

/// An allocator that is being created with the settings.
struct SettingsInUse(Options);

impl SettingsInUse {
    fn begin() -> Result<SettingsInUse, Failure> {
        let mut settings = settings()?;
        settings.making += 1;
        Ok(SettingsInUse(settings.options.clone().unwrap_or_default()))
    }
}

impl Drop for SettingsInUse {
    fn drop(&mut self) {
        SETTINGS.lock().making -= 1;
    }
}

/// Returns the handle of a device's allocator, null if none was created yet.
#[inline(always)]
pub(crate) fn made(device: i32) -> *mut cualloc_t {
    let made = usize::try_from(device)
        .ok()
        .and_then(|device| MADE.get(device));
    made.map_or(0, |made| made.load(Ordering::Acquire)) as *mut cualloc_t
}

/// Returns all that have been created so far.
pub(crate) fn all() -> impl Iterator<Item = *mut cualloc_t> {
    let end = END.load(Ordering::Acquire);
    let handles = MADE.iter().take(end);
    let handles = handles.map(|made| made.load(Ordering::Acquire));
    handles
        .filter(|&handle| handle != 0)
        .map(|handle| handle as *mut cualloc_t)
}

/// Returns the handle of a device's allocator, which is created if there is none.
pub(crate) fn of(device: i32) -> Result<*mut cualloc_t, Failure> {
    let known = made(device);
    if !known.is_null() {
        return Ok(known);
    }
    let making = SettingsInUse::begin()?;
    let options = &making.0;
    let context = device::primary(&options.source.driver()?, device)?;
    let Some(place) = usize::try_from(device)
        .ok()
        .and_then(|device| MADE.get(device))
    else {
        let why = "devices from 128 on have no shared allocator";
        return Err(Failure::Reason(CUALLOC_UNSUPPORTED, why));
    };
    let allocator = Allocator::with_config(&context, options.shared_config()?)?;
    let publishing = SETTINGS.lock();
    let known = made(device);
    if !known.is_null() {
        // Another thread was faster, or a logger called during creation. The discarded allocator holds no memory yet.
        drop(publishing);
        return Ok(known);
    }
    let made = handles::add(allocator)?;
    // Stored first, so that a free of the allocator's memory on another thread finds the allocator.
    END.fetch_max(device as usize + 1, Ordering::Release);
    place.store(made as u64, Ordering::Release);
    Ok(made)
}

/// Sets the options that shared allocators (cualloc_shared) are created with; null means the defaults. The options are
/// copied. For these allocators unretired_streams is on unless it is set to off: streams that are not adopted may be
/// destroyed without being retired.
///
/// Errors: CUALLOC_BUSY if a shared allocator already exists; CUALLOC_CLOSED for options that were freed;
/// CUALLOC_CONTEXT_LOST in a forked child.
///
/// May be called from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_shared_options(options: *const cualloc_options_t) -> i32 {
    call(|| {
        let chosen = options::find(options)?;
        let mut settings = settings()?;
        if settings.making > 0 || all().next().is_some() {
            let why = "cannot change the options: a shared allocator exists already";
            return Err(Failure::Reason(CUALLOC_BUSY, why));
        }
        settings.options = Some(chosen);
        Ok(())
    })
}

/// Returns the allocator of a device (numbered from 0) that all parts of the process share, on the device's primary
/// context. The first call creates it, with the options of cualloc_shared_options. The functions for PyTorch
/// (cualloc_torch_alloc) allocate from it. It lives as long as the process and should not be destroyed: after a destroy
/// every call with it, by any of its users, returns CUALLOC_CLOSED.
///
/// Errors: as cualloc_create. *out is then null, and the next call tries again.
///
/// May be called from any thread. The current context does not matter and stays current.
///
/// # Safety
/// `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_shared(device: i32, out: *mut *mut cualloc_t) -> i32 {
    // SAFETY: the caller's contract.
    unsafe { give(out, || of(device)) }
}

/// Returns the allocator of a device that cualloc_shared has created, null if there is none. Creates neither an
/// allocator nor a context.
///
/// May be called from any thread at any time.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_shared_made(device: i32) -> *mut cualloc_t {
    value(|| Ok(made(device)))
}
