//! Graph pools by handle, and their open scopes, by numbers that are never reused.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use cualloc::allocator::{GraphPool, PoolScope, SegmentSource, as_predicate, is_in_predicate};
use cualloc::error::GraphPoolError;
use cualloc::held::{Locked, Mutex};
use cualloc::{Allocator, Error, Tag};

use crate::results::{CUALLOC_CLOSED, CUALLOC_INVALID_ARGUMENT, Failure, NULL};
use crate::{cualloc_pool_t, cualloc_t, handle_table, handles};

/// No valid address on a 64-bit processor has this prefix, and no other handle does.
const MARK: u64 = 0xca12_0000_0000_0000;
const SHIFT: u32 = 4;

/// A pool. It keeps its allocator alive, and is removed with the allocator's handle at the latest.
struct PoolEntry {
    /// The allocator's handle.
    allocator: u64,
    pool: Arc<GraphPool>,
    open: BTreeMap<u64, Opened>,
}

/// An open scope and its predicate. Left when dropped.
pub(crate) struct Opened {
    /// None once the scope was left.
    pub scope: Option<PoolScope>,
    pub predicate: Option<Arc<Predicate>>,
}

impl Opened {
    fn leave(mut self) -> Result<(), Error> {
        self.scope.take().map_or(Ok(()), PoolScope::leave)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // First stop new calls of the predicate, then wait for those in progress.
        drop(self.scope.take());
        if let Some(predicate) = &self.predicate {
            predicate.close();
        }
    }
}

#[derive(Default)]
struct Known {
    by_handle: BTreeMap<u64, PoolEntry>,
    pools: u64,
    scopes: u64,
}

/// Nothing is dropped under this lock: destructors may call the allocator and the caller's predicates.
fn known() -> Result<Locked<'static, Known>, Failure> {
    static KNOWN: Mutex<Known> = Mutex::new(Known {
        by_handle: BTreeMap::new(),
        pools: 0,
        scopes: 0,
    });
    handle_table::refuse_child()?;
    Ok(KNOWN.lock())
}

const CLOSED: Failure = Failure::Reason(
    CUALLOC_CLOSED,
    "the handle belongs to no graph pool: the pool was released, its allocator was destroyed, or it never existed",
);

const FOREIGN: Failure = Failure::Reason(
    CUALLOC_INVALID_ARGUMENT,
    "the graph pool belongs to another allocator",
);

/// What distinguishes a new pool.
pub(crate) enum PoolKind {
    Plain,
    Tagged(Tag),
    /// Its segments come from a source.
    Over(Arc<dyn SegmentSource>),
}

/// Creates a pool of an allocator.
pub(crate) fn add(
    allocator: *mut cualloc_t,
    kind: PoolKind,
) -> Result<*mut cualloc_pool_t, Failure> {
    drop(known()?);
    let entered = handles::enter(allocator)?;
    let pool = match kind {
        PoolKind::Plain => entered.allocator().graph_pool(),
        PoolKind::Tagged(tag) => entered.allocator().graph_pool_for(tag),
        PoolKind::Over(source) => entered.allocator().graph_pool_over(source),
    };
    let pool = pool.map_err(|error| handles::convert_error(entered.allocator(), error))?;
    // The allocator is entered, so a destroy that begins now will find the pool here.
    let mut known = known()?;
    known.pools += 1;
    let handle = MARK | known.pools << SHIFT;
    let kept = PoolEntry {
        allocator: allocator as u64,
        pool: Arc::new(pool),
        open: BTreeMap::new(),
    };
    known.by_handle.insert(handle, kept);
    Ok(handle as *mut cualloc_pool_t)
}

/// Runs a call with a pool and its allocator, which stays alive until the call is over.
pub(crate) fn with<T>(
    handle: *mut cualloc_pool_t,
    run: impl FnOnce(&GraphPool, &Allocator) -> Result<T, Error>,
) -> Result<T, Failure> {
    if handle.is_null() {
        return Err(NULL);
    }
    let handle = handle as u64;
    let owner = known()?.by_handle.get(&handle).map(|kept| kept.allocator);
    let entered = handles::enter(owner.ok_or(CLOSED)? as *mut cualloc_t).map_err(|_| CLOSED)?;
    let found = known()?
        .by_handle
        .get(&handle)
        .map(|kept| Arc::clone(&kept.pool));
    let pool = found.ok_or(CLOSED)?;
    let done = run(&pool, entered.allocator());
    drop(pool);
    done.map_err(|error| handles::convert_error(entered.allocator(), error))
}

/// Like [`with`], for a pool that must belong to the given allocator.
pub(crate) fn with_of<T>(
    allocator: *mut cualloc_t,
    handle: *mut cualloc_pool_t,
    run: impl FnOnce(&Allocator, &GraphPool) -> Result<T, Error>,
) -> Result<T, Failure> {
    let found = known()?
        .by_handle
        .get(&(handle as u64))
        .map(|kept| kept.allocator);
    match found {
        Some(owner) if owner != allocator as u64 => Err(FOREIGN),
        _ => with(handle, |pool, allocator| run(allocator, pool)),
    }
}

/// Stores an open scope of a pool and returns its number.
pub(crate) fn keep(handle: *mut cualloc_pool_t, scope: Opened) -> Result<u64, Failure> {
    let mut known = known()?;
    let number = known.scopes + 1;
    match known.by_handle.get_mut(&(handle as u64)) {
        Some(kept) => {
            kept.open.insert(number, scope);
            known.scopes = number;
            Ok(number)
        }
        None => {
            drop(known);
            drop(scope);
            Err(CLOSED)
        }
    }
}

pub(crate) fn leave(handle: *mut cualloc_pool_t, scope: u64) -> Result<(), Failure> {
    with(handle, |_, _| {
        let left = known().ok().and_then(|mut known| {
            let kept = known.by_handle.get_mut(&(handle as u64))?;
            kept.open.remove(&scope)
        });
        match left {
            Some(left) => left.leave(),
            None => Err(GraphPoolError::NotEntered.into()),
        }
    })
}

/// Whether the predicate of a scope accepts a stream. It is called without the lock, and never from inside a predicate,
/// which could recurse without end.
pub(crate) fn accepts(handle: u64, scope: u64, stream: *mut c_void) -> bool {
    if is_in_predicate() {
        return false;
    }
    let predicate = known().ok().and_then(|known| {
        let opened = known.by_handle.get(&handle)?.open.get(&scope)?;
        opened.predicate.clone()
    });
    predicate.is_some_and(|predicate| as_predicate(|| predicate.call(stream)))
}

/// Ends a pool's handle and its open scopes: no further capture uses the pool.
pub(crate) fn release(handle: *mut cualloc_pool_t) -> Result<(), Failure> {
    with(handle, |_, _| {
        let removed = known().ok();
        let removed = removed.and_then(|mut known| known.by_handle.remove(&(handle as u64)));
        match removed {
            Some(kept) => {
                // Scopes end first: otherwise matching requests would find a released pool.
                drop(kept.open);
                kept.pool.release()
            }
            // Another thread was faster.
            None => Err(GraphPoolError::Released.into()),
        }
    })
}

/// A predicate supplied by the caller.
pub(crate) struct Predicate {
    when: unsafe extern "C" fn(*mut c_void, *mut c_void) -> bool,
    done: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
    /// Whether the scope was entered, and `done` is therefore called at its end.
    armed: AtomicBool,
    /// Whether the predicate must not be called any more.
    closed: AtomicBool,
    /// Held for reading by each thread that is in the predicate.
    calls: RwLock<()>,
}

// SAFETY: the caller of `cualloc_pool_enter` has promised that both functions and the data may be used from any thread.
unsafe impl Send for Predicate {}
// SAFETY: as above.
unsafe impl Sync for Predicate {}

impl Predicate {
    pub(crate) fn new(
        when: unsafe extern "C" fn(*mut c_void, *mut c_void) -> bool,
        done: Option<unsafe extern "C" fn(*mut c_void)>,
        data: *mut c_void,
    ) -> Predicate {
        Predicate {
            when,
            done,
            data,
            armed: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            calls: RwLock::new(()),
        }
    }

    /// From here on `done` is called at the end of the scope, possibly immediately.
    pub(crate) fn arm(&self) {
        self.armed.store(true, Ordering::Release);
    }

    pub(crate) fn call(&self, stream: *mut c_void) -> bool {
        // A scope may be left after its predicate was chosen and before this call.
        let within = self.calls.read().unwrap_or_else(PoisonError::into_inner);
        let answer = !self.closed.load(Ordering::Acquire) && {
            // SAFETY: the caller of `cualloc_pool_enter` has promised that it may be called until `done` is called.
            unsafe { (self.when)(self.data, stream) }
        };
        drop(within);
        answer
    }

    /// Stops all further calls of the predicate and waits for those in progress. From inside a predicate it does not
    /// wait: the other threads may be waiting for this one.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        if !is_in_predicate() {
            drop(self.calls.write());
        }
    }
}

impl Drop for Predicate {
    fn drop(&mut self) {
        if self.armed.load(Ordering::Acquire)
            && let Some(done) = self.done
        {
            // SAFETY: as in `ask`; the predicate is no longer used.
            unsafe { done(self.data) };
        }
    }
}

/// Removes the pools of a destroyed allocator. No call is in progress with it.
pub(crate) fn end_of(allocator: u64) {
    let ended: Vec<PoolEntry> = match known() {
        Ok(mut known) => {
            let of_it = |kept: &PoolEntry| kept.allocator == allocator;
            let all = known.by_handle.iter().filter(|(_, kept)| of_it(kept));
            let ended: Vec<u64> = all.map(|(handle, _)| *handle).collect();
            ended
                .iter()
                .filter_map(|handle| known.by_handle.remove(handle))
                .collect()
        }
        Err(_) => return,
    };
    drop(ended);
}
