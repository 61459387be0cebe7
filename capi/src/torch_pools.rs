//! PyTorch's hooks for the memory of graphs: maps its pools, identified by device and id, to graph pools of the shared
//! allocators.
//!
//! PyTorch calls begin before a capture and end after it, both with the id of a pool, and releases the pool once for
//! each begin, when a graph is destroyed. After a capture that failed, or that was never ended, it calls neither;
//! `cualloc_torch_pool_abandon` is for that case.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::atomic::Ordering;

use cualloc::held::{Locked, Mutex};
use cualloc::{Tag, ThreadId};

use crate::entry::{call, value};
use crate::pool_table::{self, PoolKind};
use crate::pools::{CUALLOC_SCOPE_WHEN, cualloc_done_t, cualloc_scope_t, cualloc_when_t, enter};
use crate::results::{CUALLOC_NOT_LIVE, Failure};
use crate::sources::{self, cualloc_source_t};
use crate::{cualloc_pool_t, handle_table, shared, tags, torch};

/// PyTorch's id of a pool, passed by value (MempoolId_t).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct cualloc_torch_pool_id_t {
    /// Not 0 for a pool that a capture created.
    pub first: u64,
    /// Not 0 for a pool that a program created.
    pub second: u64,
}

type Name = (i32, cualloc_torch_pool_id_t);

struct Pool {
    handle: u64,
    /// Number of begins and retains that no release has matched.
    begun: u64,
}

impl Pool {
    /// Counts one more begin and returns the handle.
    fn begin(&mut self) -> u64 {
        self.begun += 1;
        self.handle
    }
}

/// A scope that was begun and not yet ended.
struct Open {
    name: Name,
    thread: ThreadId,
    handle: u64,
    scope: u64,
}

#[derive(Default)]
struct Known {
    pools: BTreeMap<Name, Pool>,
    open: Vec<Open>,
    /// Kept when a pool is released: PyTorch may use its id again.
    tags: BTreeMap<Name, Tag>,
}

/// Result of cualloc_torch_pool_state: the scope was ended, or never begun.
pub const CUALLOC_TORCH_POOL_ENDED: i32 = 0;
/// Result of cualloc_torch_pool_state: the scope was not ended, and its capture is over as far as is known.
pub const CUALLOC_TORCH_POOL_OPEN: i32 = 1;
/// Result of cualloc_torch_pool_state: the capture of the scope is still in progress.
pub const CUALLOC_TORCH_POOL_GOES_ON: i32 = 2;

thread_local! {
    /// The number of pool releases by this thread.
    static RELEASES: Cell<u64> = const { Cell::new(0) };
}

fn known() -> Result<Locked<'static, Known>, Failure> {
    static KNOWN: Mutex<Known> = Mutex::new(Known {
        pools: BTreeMap::new(),
        open: Vec::new(),
        tags: BTreeMap::new(),
    });
    handle_table::refuse_child()?;
    Ok(KNOWN.lock())
}

/// Counts one more use of a pool, which is created if there is none, and returns the pool's handle.
fn count_use(name: Name, kind: PoolKind) -> Result<u64, Failure> {
    let allocator = shared::of(name.0)?;
    if let Some(handle) = known()?.pools.get_mut(&name).map(Pool::begin) {
        return Ok(handle);
    }
    let made = pool_table::add(allocator, kind)? as u64;
    let new = Pool {
        handle: made,
        begun: 0,
    };
    let (handle, tag) = {
        let mut known = known()?;
        let handle = known.pools.entry(name).or_insert(new).begin();
        (handle, known.tags.get(&name).copied())
    };
    if handle != made {
        // Another thread was faster.
        pool_table::release(made as *mut cualloc_pool_t)?;
    } else if let Some(tag) = tag {
        // A pool over segments of another allocator has no tag.
        let _ = pool_table::with(made as *mut cualloc_pool_t, |pool, _| pool.set_tag(tag));
    }
    Ok(handle)
}

/// PyTorch's hook before a capture (and for any other use of a pool): until cualloc_torch_pool_end, sends requests on
/// those streams of a device that the predicate accepts to the pool with this id, which is created if there is none.
/// Pools are graph pools of the device's shared allocator.
///
/// Errors: as cualloc_create, cualloc_pool_create and cualloc_pool_enter; then nothing was begun, and done is not
/// called.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// As cualloc_pool_enter.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_torch_pool_begin(
    device: i32,
    id: cualloc_torch_pool_id_t,
    when: cualloc_when_t,
    done: cualloc_done_t,
    data: *mut c_void,
) -> i32 {
    call(|| {
        let name = (device, id);
        let handle = count_use(name, PoolKind::Plain)?;
        let which = cualloc_scope_t {
            struct_size: size_of::<cualloc_scope_t>(),
            kind: CUALLOC_SCOPE_WHEN,
            capture: 0,
            stream: ptr::null_mut(),
            when,
            done,
            data,
        };
        // SAFETY: the caller's contract.
        match unsafe { enter(handle as *mut cualloc_pool_t, &which) } {
            Ok(scope) => {
                let thread = ThreadId::current();
                known()?.open.push(Open {
                    name,
                    thread,
                    handle,
                    scope,
                });
                torch::OPEN_SCOPES.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
            Err(failure) => {
                release(name)?;
                Err(failure)
            }
        }
    })
}

/// PyTorch's hook after a capture: ends the scope that cualloc_torch_pool_begin opened with this id, preferring one
/// opened on the calling thread. Returns CUALLOC_OK if there is no such scope or it was already ended.
///
/// Errors: CUALLOC_CONTEXT_LOST in a forked child.
///
/// May be called from any thread, with any current context.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_torch_pool_end(device: i32, id: cualloc_torch_pool_id_t) -> i32 {
    call(|| {
        let (name, thread) = ((device, id), ThreadId::current());
        let ended = {
            let mut known = known()?;
            let last = |own: bool| {
                let mut open = known.open.iter();
                open.rposition(|open| open.name == name && (!own || open.thread == thread))
            };
            let at = last(true).or_else(|| last(false));
            at.map(|at| known.open.remove(at))
        };
        ended.map_or(Ok(()), |ended| end(&ended))
    })
}

fn end(open: &Open) -> Result<(), Failure> {
    let left = pool_table::leave(open.handle as *mut cualloc_pool_t, open.scope);
    torch::OPEN_SCOPES.fetch_sub(1, Ordering::Relaxed);
    torch::free_deferred();
    left
}

/// PyTorch's hook when a graph is destroyed: called once for each begin. The last call releases the pool
/// (cualloc_pool_release). For a pool that was not begun, returns CUALLOC_OK.
///
/// Errors: CUALLOC_CONTEXT_LOST in a forked child; CUALLOC_CLOSED if the device's allocator was destroyed.
///
/// May be called from any thread, with any current context.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_torch_pool_release(device: i32, id: cualloc_torch_pool_id_t) -> i32 {
    call(|| {
        RELEASES.set(RELEASES.get() + 1);
        release((device, id))
    })
}

/// PyTorch's hook when a program creates a pool (MemPool): counts one use of the pool with this id. If there is none,
/// creates it, with segments from the source unless source is null; otherwise the source is not used, and its done is
/// called. cualloc_torch_pool_release ends the use.
///
/// Errors: as cualloc_create and cualloc_pool_create_over; then nothing was counted.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// `source` is null, or as for cualloc_pool_create_over.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_torch_pool_retain(
    device: i32,
    id: cualloc_torch_pool_id_t,
    source: *const cualloc_source_t,
) -> i32 {
    call(|| {
        let kind = match source.is_null() {
            true => PoolKind::Plain,
            // SAFETY: the caller's contract.
            false => unsafe { sources::kind_of(source) }?,
        };
        count_use((device, id), kind).map(drop)
    })
}

/// Sets the tag of the pool with this id (cualloc_pool_create_tagged), in place of an earlier one. If there is no such
/// pool now, it gets the tag when it is created. The tag holds for all memory of the pool, also that of graphs that
/// were captured before.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a tag as in cualloc_pool_create_tagged; CUALLOC_SUSPENDED while the pool is
/// suspended; CUALLOC_UNSUPPORTED for a pool with segments of another allocator; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST.
/// After an error the tag is unchanged.
///
/// May be called from any thread.
///
/// # Safety
/// `tag` is null or zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_torch_pool_tag(
    device: i32,
    id: cualloc_torch_pool_id_t,
    tag: *const c_char,
) -> i32 {
    call(|| {
        // SAFETY: the caller's contract.
        let (name, tag) = ((device, id), unsafe { tags::of(tag) }?);
        let (handle, before) = {
            let mut known = known()?;
            let before = known.tags.insert(name, tag);
            (known.pools.get(&name).map(|pool| pool.handle), before)
        };
        let set = handle.map_or(Ok(()), |handle| {
            pool_table::with(handle as *mut cualloc_pool_t, |pool, _| pool.set_tag(tag))
        });
        if set.is_err() {
            let mut known = known()?;
            match before {
                Some(before) => known.tags.insert(name, before),
                None => known.tags.remove(&name),
            };
        }
        set
    })
}

/// Returns the number of uses of the pool with this id: calls of begin and retain that no release has matched. 0 if
/// there is no such pool, and in a forked child.
///
/// May be called from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_torch_pool_uses(device: i32, id: cualloc_torch_pool_id_t) -> u64 {
    value(|| {
        let uses = known()?.pools.get(&(device, id)).map(|pool| pool.begun);
        Ok(uses.unwrap_or_default())
    })
}

/// Returns how often the calling thread has called cualloc_torch_pool_release. A layer above uses it to detect whether
/// a version of PyTorch releases the pool of a capture that failed.
///
/// May be called from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_torch_pool_releases() -> u64 {
    value(|| Ok(RELEASES.get()))
}

fn release(name: Name) -> Result<(), Failure> {
    let last = {
        let mut known = known()?;
        match known.pools.get_mut(&name) {
            Some(pool) if pool.begun > 1 => {
                pool.begun -= 1;
                None
            }
            _ => known.pools.remove(&name),
        }
    };
    last.map_or(Ok(()), |pool| {
        pool_table::release(pool.handle as *mut cualloc_pool_t)
    })
}

/// Returns the number of the newest scope that the calling thread has begun and not ended; 0 if there is none, and in a
/// forked child. Numbers grow and are never reused.
///
/// May be called from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_torch_pool_newest() -> u64 {
    value(|| {
        let (known, thread) = (known()?, ThreadId::current());
        let own = known.open.iter().rfind(|open| open.thread == thread);
        Ok(own.map_or(0, |open| open.scope))
    })
}

/// Writes the device and the pool id of the open scope with this number (cualloc_torch_pool_newest). Either pointer may
/// be null; both values are 0 after a failure.
///
/// Errors: CUALLOC_NOT_LIVE if the scope was ended or never begun; CUALLOC_CONTEXT_LOST in a forked child.
///
/// May be called from any thread.
///
/// # Safety
/// `device` and `id` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_torch_pool_name(
    number: u64,
    device: *mut i32,
    id: *mut cualloc_torch_pool_id_t,
) -> i32 {
    let mut name = Name::default();
    let code = call(|| {
        let known = known()?;
        let open = known.open.iter().find(|open| open.scope == number);
        let why = "no capture with this number is open";
        name = open.ok_or(Failure::Reason(CUALLOC_NOT_LIVE, why))?.name;
        Ok(())
    });
    if !device.is_null() {
        // SAFETY: the caller's contract.
        unsafe { device.write(name.0) };
    }
    if !id.is_null() {
        // SAFETY: the caller's contract.
        unsafe { id.write(name.1) };
    }
    code
}

/// Returns the state of the scope with this number: CUALLOC_TORCH_POOL_ENDED, CUALLOC_TORCH_POOL_OPEN, or, if its
/// predicate accepts the stream, CUALLOC_TORCH_POOL_GOES_ON. With a null stream the predicate is not called. In a
/// forked child all scopes are ended.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// `stream` is null or a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_torch_pool_state(number: u64, stream: *mut c_void) -> i32 {
    value(|| {
        let known = known()?;
        let open = known.open.iter().find(|open| open.scope == number);
        let handle = open.map(|open| open.handle);
        drop(known);
        // Called without a lock, as is all code that calls a predicate.
        let asked = |handle| pool_table::accepts(handle, number, stream);
        Ok(match handle {
            None => CUALLOC_TORCH_POOL_ENDED,
            Some(handle) if !stream.is_null() && asked(handle) => CUALLOC_TORCH_POOL_GOES_ON,
            Some(_) => CUALLOC_TORCH_POOL_OPEN,
        })
    })
}

/// Ends and releases the scope with this number (cualloc_torch_pool_newest), for captures that failed or were never
/// ended, for which PyTorch calls no hook. Does nothing if the predicate accepts the stream, since the capture is then
/// still in progress; with a null stream the predicate is not called. For a scope that was already ended, returns
/// CUALLOC_OK.
///
/// Errors: CUALLOC_CONTEXT_LOST in a forked child.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// `stream` is null or a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_torch_pool_abandon(number: u64, stream: *mut c_void) -> i32 {
    call(|| {
        let at = |known: &Known| known.open.iter().position(|open| open.scope == number);
        if !stream.is_null() {
            let handle = {
                let known = known()?;
                at(&known).map(|at| known.open[at].handle)
            };
            if handle.is_some_and(|handle| pool_table::accepts(handle, number, stream)) {
                return Ok(());
            }
        }
        let abandoned = {
            let mut known = known()?;
            at(&known).map(|at| known.open.remove(at))
        };
        if let Some(open) = abandoned {
            // A scope or pool that no longer exists needs no further cleanup.
            let _ended = end(&open).and(release(open.name));
        }
        Ok(())
    })
}

/// Returns the graph pool that currently belongs to PyTorch's pool with this id, for cualloc_pool_footprint,
/// cualloc_pool_checkpoint and cualloc_pool_restore; null if there is none. PyTorch releases the pool.
///
/// May be called from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_torch_pool(
    device: i32,
    id: cualloc_torch_pool_id_t,
) -> *mut cualloc_pool_t {
    let handle = value(|| {
        let pool = known()?.pools.get(&(device, id)).map(|pool| pool.handle);
        Ok(pool.unwrap_or_default())
    });
    handle as *mut cualloc_pool_t
}
