//! Allocators by handle.
//!
//! A handle is a number: a mark that no address has, the index of a place in a table, and how often that place was
//! used. It is never dereferenced and never reused, so any value that a caller passes is either found in the table or
//! rejected.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};

use cualloc::driver::sys::CUresult;
use cualloc::held::Mutex;
use cualloc::{Allocator, Error};

use crate::barrier;
use crate::calls::{self, Announced};
use crate::cualloc_t;
use crate::results::{CUALLOC_BUSY, CUALLOC_CLOSED, CUALLOC_UNSUPPORTED, Failure, NULL};

/// The maximum number of allocators that exist at the same time.
const PLACES: usize = 4096;
/// No valid address on a 64-bit processor has this prefix.
const MARK: u64 = 0xca10_0000_0000_0000;
const LIFE_SHIFT: u32 = 16;
const PLACE_SHIFT: u32 = 4;

fn handle_of(place: usize, life: u32) -> u64 {
    MARK | u64::from(life) << LIFE_SHIFT | (place as u64) << PLACE_SHIFT
}

#[inline(always)]
fn place_of(handle: u64) -> usize {
    (handle >> PLACE_SHIFT) as usize % PLACES
}

/// A place of the table, on its own cache line. Every call reads it; only creating and destroying an allocator write
/// it.
#[repr(C, align(32))]
struct Place {
    /// The handle of the allocator stored here, or 0.
    handle: AtomicU64,
    /// Initialised while there is a handle, and until the last call that found it has ended.
    allocator: UnsafeCell<MaybeUninit<Allocator>>,
}

// SAFETY: an allocator is `Sync`, and is written only while no call can have found it.
unsafe impl Sync for Place {}

static TABLE: [Place; PLACES] = [const {
    Place {
        handle: AtomicU64::new(0),
        allocator: UnsafeCell::new(MaybeUninit::uninit()),
    }
}; PLACES];

/// Which places are free.
struct Places {
    /// The index of the first place never used.
    unused: usize,
    /// Places that were used and are free again, each with its next generation.
    left: Vec<(usize, u32)>,
}

static PLACES_LEFT: Mutex<Places> = Mutex::new(Places {
    unused: 0,
    left: Vec::new(),
});

/// Puts an allocator into the table.
pub(crate) fn add(allocator: Allocator) -> Result<*mut cualloc_t, Failure> {
    barrier::prepare();
    let mut places = PLACES_LEFT.lock();
    let (place, life) = match places.left.pop() {
        Some(left) => left,
        None if places.unused < PLACES => {
            places.unused += 1;
            (places.unused - 1, 1)
        }
        None => {
            let why = "cannot create another allocator: 4096 exist";
            return Err(Failure::Reason(CUALLOC_UNSUPPORTED, why));
        }
    };
    drop(places);
    let handle = handle_of(place, life);
    // SAFETY: this call owns the place exclusively, and it has no handle yet, so no other thread reads it.
    unsafe { (*TABLE[place].allocator.get()).write(allocator) };
    TABLE[place].handle.store(handle, Ordering::Release);
    Ok(handle as *mut cualloc_t)
}

/// An allocator that a call is using.
pub(crate) struct Entered {
    place: &'static Place,
    _announced: Announced,
}

impl Entered {
    #[inline(always)]
    fn found(handle: u64, announced: Announced) -> Option<Entered> {
        let place = &TABLE[place_of(handle)];
        (place.handle.load(Ordering::Acquire) == handle).then_some(Entered {
            place,
            _announced: announced,
        })
    }

    #[inline(always)]
    pub(crate) fn allocator(&self) -> &Allocator {
        // SAFETY: the place still had the handle after the announcement, so a thread that destroys the allocator waits
        // for the announcement, held by `self`, to end.
        unsafe { (*self.place.allocator.get()).assume_init_ref() }
    }
}

/// Enters an allocator on a thread that is in no other call and has made a call before.
#[inline(always)]
pub(crate) fn try_enter(handle: *mut cualloc_t) -> Option<Entered> {
    let value = handle as u64;
    if value == 0 {
        return None;
    }
    Entered::found(value, calls::announce(value)?)
}

/// Enters an allocator and keeps it alive until the result is dropped.
#[inline(always)]
pub(crate) fn enter(handle: *mut cualloc_t) -> Result<Entered, Failure> {
    match try_enter(handle) {
        Some(entered) => Ok(entered),
        None => enter_slow(handle as u64),
    }
}

#[cold]
#[inline(never)]
fn enter_slow(handle: u64) -> Result<Entered, Failure> {
    if handle == 0 {
        return Err(NULL);
    }
    // Values that cannot be a handle are not announced: they include 0, which marks an idle word.
    let known = handle & !0xffff_ffff_fff0 == MARK;
    let entered = || Entered::found(handle, calls::announce_any(handle));
    known.then(entered).flatten().ok_or(CLOSED)
}

const CLOSED: Failure = Failure::Reason(
    CUALLOC_CLOSED,
    "the handle belongs to no allocator: it was destroyed or never existed",
);

/// Runs a call with an allocator.
#[inline(always)]
pub(crate) fn with<T>(
    handle: *mut cualloc_t,
    run: impl FnOnce(&Allocator) -> Result<T, Error>,
) -> Result<T, Failure> {
    let entered = enter(handle)?;
    run(entered.allocator()).map_err(|error| convert_error(entered.allocator(), error))
}

/// Fails in a forked child, for calls that would have no effect there.
pub(crate) fn refuse_child(allocator: &Allocator) -> Result<(), Error> {
    match allocator.context().driver().is_forked_child() {
        true => Err(Error::ForkedChild),
        false => Ok(()),
    }
}

/// Converts an error; one that suggests a lost context triggers a single check of the context.
#[cold]
#[inline(never)]
pub(crate) fn convert_error(allocator: &Allocator, error: Error) -> Failure {
    let suspect = |code| {
        matches!(
            code,
            CUresult::CUDA_ERROR_INVALID_CONTEXT
                | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
                | CUresult::CUDA_ERROR_INVALID_HANDLE
        )
    };
    match error {
        // In a forked child the driver's error code means nothing.
        Error::Driver(_) if allocator.context().driver().is_forked_child() => {
            Error::ForkedChild.into()
        }
        Error::Driver(cause) if suspect(cause.code()) => match allocator.context().enter() {
            Err(found) if suspect(found.code()) => allocator.declare_context_lost().into(),
            _ => error.into(),
        },
        error => error.into(),
    }
}

/// Closes an allocator and ends its handle, unless something still uses it. Returns the error of a lost context, in which
/// case the handle has ended as well.
pub(crate) fn destroy(handle: *mut cualloc_t) -> Result<Option<Error>, Failure> {
    if calls::inside() {
        let why = "this thread is in another call of this library";
        return Err(Failure::Reason(CUALLOC_BUSY, why));
    }
    let entered = enter(handle)?;
    let closed = entered.allocator().close();
    let lost = match closed {
        Ok(()) => None,
        // The context has its memory back; only the handle is left to end.
        Err(error @ Error::ContextLost(_)) => Some(error),
        Err(error) => match convert_error(entered.allocator(), error) {
            Failure::Library(error @ Error::ContextLost(_)) => Some(error),
            failure => return Err(failure),
        },
    };
    let place = entered.place;
    drop(entered);
    forget(place, handle as u64)?;
    Ok(lost)
}

/// Removes a closed allocator from the table after all calls that found it have ended.
fn forget(place: &'static Place, handle: u64) -> Result<(), Failure> {
    let (alive, dead) = (handle, 0);
    if place
        .handle
        .compare_exchange(alive, dead, Ordering::SeqCst, Ordering::SeqCst)
        .is_err()
    {
        // Another thread was faster.
        return Err(CLOSED);
    }
    if !calls::wait_for(handle) {
        // It is unknown when the last call ends, so the closed allocator stays in memory.
        return Ok(());
    }
    // SAFETY: the place has no handle any more, and every call that found one has ended.
    let allocator = unsafe { (*place.allocator.get()).assume_init_read() };
    drop(allocator);
    let life = (handle >> LIFE_SHIFT) as u32;
    if let Some(next) = life.checked_add(1) {
        let mut places = PLACES_LEFT.lock();
        places.left.push((place_of(handle), next));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_not_an_address_and_encodes_its_place() {
        for (place, life) in [(0, 1), (1, 7), (PLACES - 1, u32::MAX)] {
            let handle = handle_of(place, life);
            assert_eq!(place_of(handle), place);
            assert_eq!((handle >> LIFE_SHIFT) as u32, life);
            assert_eq!(handle & !0xffff_ffff_fff0, MARK);
            let high = handle >> 47;
            assert!(
                high != 0 && high != 0x1_ffff,
                "{handle:#x} could be an address"
            );
        }
    }
}
