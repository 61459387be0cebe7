//! Graph pools: memory for stream captures.

use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use cualloc::allocator::{Footprint, GraphPool, PoolScope, Scope, is_in_predicate};
use cualloc::driver::Stream;
use cualloc::{Allocator, Error};

use crate::entry::{call, give};
use crate::pool_table::{self, Opened};
use crate::results::{CUALLOC_BUSY, CUALLOC_INVALID_ARGUMENT, Failure, NULL};
use crate::stats::{self, room, write};
use crate::{cualloc_pool_t, cualloc_t, tags};

/// Requests of the capture with the id that cualloc_scope_t.capture has, on all its streams.
pub const CUALLOC_SCOPE_CAPTURE: i32 = 1;
/// Requests of the next capture for which the calling thread asks for memory, on all its streams.
pub const CUALLOC_SCOPE_NEXT_CAPTURE: i32 = 2;
/// Requests on the stream cualloc_scope_t.stream, captured or not.
pub const CUALLOC_SCOPE_STREAM: i32 = 3;
/// Requests on streams to which cualloc_scope_t.when says yes.
pub const CUALLOC_SCOPE_WHEN: i32 = 4;
/// Requests of the calling thread, on all streams, captured or not.
pub const CUALLOC_SCOPE_THREAD: i32 = 5;

/// Whether requests on a stream go to a pool; with the data of its scope. Called by threads that allocate, without any
/// lock held, by several at once: for each request outside of captures, and in a capture once for each stream and
/// thread, as long as the same scopes are open. It must not throw. It may call the library, but an allocation from an
/// allocator that has open scopes is CUALLOC_BUSY there.
pub type cualloc_when_t =
    Option<unsafe extern "C" fn(data: *mut c_void, stream: *mut c_void) -> bool>;

/// Is told, once, that nobody will call the predicate of a scope any more; with the scope's data.
pub type cualloc_done_t = Option<unsafe extern "C" fn(data: *mut c_void)>;

/// Which requests go to a pool. All fields but struct_size, which is set to sizeof(cualloc_scope_t), and kind are 0
/// unless the kind needs them. Later versions of the library add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct cualloc_scope_t {
    /// Bytes of this structure as the caller knows it.
    pub struct_size: usize,
    /// CUALLOC_SCOPE_CAPTURE, ...
    pub kind: i32,
    /// The id of a capture, as cuStreamGetCaptureInfo tells it.
    pub capture: u64,
    /// A stream, as cualloc_alloc takes it.
    pub stream: *mut c_void,
    /// The predicate.
    pub when: cualloc_when_t,
    /// Null, or what is told when the predicate is not needed any more.
    pub done: cualloc_done_t,
    /// What both are called with.
    pub data: *mut c_void,
}

/// What a graph pool holds. The caller sets struct_size to sizeof(cualloc_footprint_t) before the call; it grows as
/// cualloc_stats_t does.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct cualloc_footprint_t {
    /// Bytes of this structure as the caller knows it. Not changed.
    pub struct_size: usize,
    /// Bytes of live blocks, rounded up as they are handed out.
    pub live: u64,
    /// Live blocks, a number.
    pub blocks: u64,
    /// Bytes of free memory.
    pub free_bytes: u64,
    /// The most bytes of live blocks at once.
    pub peak: u64,
    /// Bytes held from the driver.
    pub physical: u64,
    /// Graphs, with the executables made of them and their launches, that may use the pool's addresses: a number.
    pub leases: u64,
}

impl From<Footprint> for cualloc_footprint_t {
    fn from(from: Footprint) -> Self {
        cualloc_footprint_t {
            struct_size: size_of::<cualloc_footprint_t>(),
            live: from.live,
            blocks: from.blocks,
            free_bytes: from.free,
            peak: from.peak,
            physical: from.physical,
            leases: from.leases,
        }
    }
}

/// Makes a pool of memory for stream captures: an arena of its own, whose addresses stay as they are as long as a graph
/// that was captured with them, an executable made of it or a launch of that may use them. Requests go there by scopes
/// (cualloc_pool_enter); they are ordinary calls of cualloc_alloc, and blocks are freed by cualloc_free. Inside a
/// capture freed memory is used again behind the nodes that used it last. The caller promises that launches of graphs
/// that share a pool are ordered one behind another on the device: docs/graphs.md.
///
/// Errors: CUALLOC_UNSUPPORTED under the classic policy; CUALLOC_INVALID_ARGUMENT for a null handle or out,
/// CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST. *out is null then.
///
/// Any thread.
///
/// # Safety
/// `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_pool_create(
    allocator: *mut cualloc_t,
    out: *mut *mut cualloc_pool_t,
) -> i32 {
    // SAFETY: the caller's contract.
    unsafe { give(out, || pool_table::add(allocator, None)) }
}

/// cualloc_pool_create of a pool with a tag, a text by which all pools that have it are suspended together
/// (CUALLOC_SELECT_TAG). No handle of the driver has memory of two pools. A process keeps the texts of its tags, 65536
/// at most.
///
/// Errors: as cualloc_pool_create; CUALLOC_INVALID_ARGUMENT also for a tag that is null or not UTF-8, or one too many.
///
/// Any thread.
///
/// # Safety
/// `tag` is null or ends with a zero; `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_pool_create_tagged(
    allocator: *mut cualloc_t,
    tag: *const c_char,
    out: *mut *mut cualloc_pool_t,
) -> i32 {
    // SAFETY: the caller's contract.
    unsafe { give(out, || pool_table::add(allocator, Some(tags::of(tag)?))) }
}

/// Sends requests to a pool from here on, until *scope is left. Of several scopes that fit a request that of its
/// capture counts, else of its stream, of a predicate, of its thread; and among equals the one that was entered last.
/// A capture whose scopes were all left gets no more memory of the pool, so leave after cuStreamEndCapture.
///
/// With a predicate: where this fails done is not called, and nobody will call the predicate any more, but threads may
/// have called it meanwhile. Else done is called, on whichever thread, when the scope was left, or ended with the pool
/// or the allocator, and nobody will call the predicate any more.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null pool, which, when or scope, a struct_size smaller than that of the first
/// version, an unknown kind, or a stream of another device; CUALLOC_CLOSED for a pool that was released;
/// CUALLOC_CAPTURING for CUALLOC_SCOPE_STREAM with a stream that is being captured already, for which there are the
/// other kinds; CUALLOC_BUSY for CUALLOC_SCOPE_WHEN inside a predicate; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. *scope is
/// 0 then.
///
/// Any thread.
///
/// # Safety
/// `which` is null or points to as many bytes as its `struct_size` says; a stream there is live, or null, 1 or 2, and
/// retired before it is destroyed; predicate and data may be used from any thread until done is called. `scope` is null
/// or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_pool_enter(
    pool: *mut cualloc_pool_t,
    which: *const cualloc_scope_t,
    scope: *mut u64,
) -> i32 {
    // SAFETY: the caller's contract.
    unsafe { give(scope, || enter(pool, &stats::given(which)?)) }
}

/// Opens a scope; its number.
///
/// # Safety
/// As [`cualloc_pool_enter`].
pub(crate) unsafe fn enter(
    handle: *mut cualloc_pool_t,
    which: &cualloc_scope_t,
) -> Result<u64, Failure> {
    let (mut predicate, mut kept) = (None::<Arc<Predicate>>, Err(UNKNOWN));
    pool_table::with(handle, |pool, allocator| {
        let scope = match which.kind {
            CUALLOC_SCOPE_CAPTURE => pool.enter(Scope::Capture(which.capture))?,
            CUALLOC_SCOPE_NEXT_CAPTURE => pool.enter(Scope::NextCapture)?,
            CUALLOC_SCOPE_THREAD => pool.enter(Scope::Thread)?,
            // SAFETY: the caller's contract.
            CUALLOC_SCOPE_STREAM => unsafe { enter_stream(pool, allocator, which.stream) }?,
            // If it failed later nobody could wait for the threads that are in it.
            CUALLOC_SCOPE_WHEN if is_in_predicate() => {
                kept = Err(Failure::Said(CUALLOC_BUSY, "the thread is in a predicate"));
                return Ok(());
            }
            CUALLOC_SCOPE_WHEN => match which.when {
                Some(when) => {
                    let made = Arc::new(Predicate {
                        when,
                        done: which.done,
                        data: which.data,
                        armed: AtomicBool::new(false),
                        closed: AtomicBool::new(false),
                        calls: RwLock::new(()),
                    });
                    let asked = Arc::clone(&made);
                    predicate = Some(made);
                    pool.enter(Scope::When(Box::new(move |stream| {
                        asked.ask(stream.cast())
                    })))?
                }
                None => {
                    kept = Err(NULL);
                    return Ok(());
                }
            },
            _ => return Ok(()),
        };
        let opened = Opened {
            scope: Some(scope),
            predicate: predicate.clone(),
        };
        kept = pool_table::keep(handle, opened);
        Ok(())
    })?;
    if kept.is_ok()
        && let Some(predicate) = predicate
    {
        // It is told of the end from here on; that may be at once.
        predicate.armed.store(true, Ordering::Release);
    }
    kept
}

const UNKNOWN: Failure = Failure::Said(CUALLOC_INVALID_ARGUMENT, "there is no such kind of scope");

/// # Safety
/// `stream` is a live stream, or null, 1 or 2.
unsafe fn enter_stream(
    pool: &GraphPool,
    allocator: &Allocator,
    stream: *mut c_void,
) -> Result<PoolScope, Error> {
    // SAFETY: the caller's contract; it is used in this call alone.
    let stream = unsafe { Stream::from_raw(allocator.context(), stream.cast()) }?;
    pool.enter(Scope::Stream(&stream))
}

/// A predicate of the caller's.
pub(crate) struct Predicate {
    when: unsafe extern "C" fn(*mut c_void, *mut c_void) -> bool,
    done: cualloc_done_t,
    data: *mut c_void,
    /// Whether the scope was entered, so that its end is told.
    armed: AtomicBool,
    /// Whether it is to be asked no more.
    closed: AtomicBool,
    /// Held for reading by each thread that is in it.
    calls: RwLock<()>,
}

// SAFETY: the caller of `cualloc_pool_enter` has promised that both functions and the data may be used from any thread.
unsafe impl Send for Predicate {}
// SAFETY: as above.
unsafe impl Sync for Predicate {}

impl Predicate {
    pub(crate) fn ask(&self, stream: *mut c_void) -> bool {
        // A scope may be left between the choice of its predicate and this call.
        let within = self.calls.read().unwrap_or_else(PoisonError::into_inner);
        let answer = !self.closed.load(Ordering::Acquire) && {
            // SAFETY: the caller of `cualloc_pool_enter` has promised that it may be called until `done` is.
            unsafe { (self.when)(self.data, stream) }
        };
        drop(within);
        answer
    }

    /// From here on nobody is in it, and nobody calls it. Inside a predicate there is no wait for other threads: they
    /// may wait for this one.
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
            // SAFETY: as in `ask`; nobody has the predicate any more.
            unsafe { done(self.data) };
        }
    }
}

/// Leaves a scope. Blocks that it gave stay as they are. Its predicate is not called any more: a thread that is in it
/// is waited for, unless the calling thread is in a predicate itself.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null pool, and a scope that was left before or is not one of this pool;
/// CUALLOC_CLOSED for a pool that was released, which has left its scopes; CUALLOC_CONTEXT_LOST.
///
/// Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_pool_leave(pool: *mut cualloc_pool_t, scope: u64) -> i32 {
    call(|| pool_table::leave(pool, scope))
}

/// Ends a pool's handle: no further capture comes. Scopes that are open are left. The memory goes back to the driver
/// as soon as no graph, executable or launch, and no block, uses it. cualloc_destroy ends the pools of its allocator;
/// while a graph may use their memory it is CUALLOC_BUSY.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for null, CUALLOC_CLOSED for a pool that was released before,
/// CUALLOC_CONTEXT_LOST.
///
/// Any thread, also while a capture is under way.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_pool_release(pool: *mut cualloc_pool_t) -> i32 {
    call(|| pool_table::release(pool))
}

/// Writes what a pool holds now. out->struct_size must be set before the call. The figures of cualloc_stats do not
/// count it, the limit does.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null pool or out, or a struct_size that is smaller than itself;
/// CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST. The fields are 0 then, if there is an out with a size.
///
/// Any thread.
///
/// # Safety
/// `out` is null or points to a structure that has as many bytes as its `struct_size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_pool_footprint(
    pool: *mut cualloc_pool_t,
    out: *mut cualloc_footprint_t,
) -> i32 {
    call(|| {
        // SAFETY: the caller's contract.
        let room = unsafe { room(out) }?;
        // SAFETY: the caller's contract.
        let say = |footprint: &cualloc_footprint_t| unsafe { write(footprint, out, room) };
        say(&cualloc_footprint_t::default());
        say(&pool_table::with(pool, |pool, _| {
            Ok(pool.footprint()?.into())
        })?);
        Ok(())
    })
}

/// Says that a graph (a CUgraph) which was not captured with a pool uses its memory: the pool's addresses stay as long
/// as the graph, the executables made of it, and their launches.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for null, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER, also where the
/// driver tells nobody of a graph's end.
///
/// Any thread.
///
/// # Safety
/// `graph` is null or a live graph, which no other thread uses meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_pool_retain(pool: *mut cualloc_pool_t, graph: *mut c_void) -> i32 {
    call(|| match graph.is_null() {
        true => Err(NULL),
        // SAFETY: the caller's contract.
        false => pool_table::with(pool, |pool, _| unsafe { pool.retain(graph.cast()) }),
    })
}
