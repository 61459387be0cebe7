//! Graph pools: memory for stream captures.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use cualloc::allocator::{Footprint, GraphPool, PoolScope, Scope, is_in_predicate};
use cualloc::driver::Stream;
use cualloc::{Allocator, Error};

use crate::entry::{call, give};
use crate::pool_table::{self, Opened, PoolKind, Predicate};
use crate::results::{CUALLOC_BUSY, CUALLOC_INVALID_ARGUMENT, Failure, NULL};
use crate::stats::{self, room, write};
use crate::{cualloc_pool_t, cualloc_t, tags};

/// Requests of the capture whose id is cualloc_scope_t.capture, on all its streams.
pub const CUALLOC_SCOPE_CAPTURE: i32 = 1;
/// Requests of the next capture in which the calling thread allocates, on all its streams.
pub const CUALLOC_SCOPE_NEXT_CAPTURE: i32 = 2;
/// Requests on the stream cualloc_scope_t.stream, captured or not.
pub const CUALLOC_SCOPE_STREAM: i32 = 3;
/// Requests on streams for which cualloc_scope_t.when returns true.
pub const CUALLOC_SCOPE_WHEN: i32 = 4;
/// Requests of the calling thread, on all streams, captured or not.
pub const CUALLOC_SCOPE_THREAD: i32 = 5;

/// A predicate: whether requests on a stream go to a pool. Receives the data of its scope. Called by allocating
/// threads, possibly by several at the same time, without any lock held: for each request outside of captures, and
/// within a capture once per stream and thread while the set of open scopes is unchanged. It must not throw. It may
/// call the library, but allocating from an allocator that has open scopes fails with CUALLOC_BUSY.
pub type cualloc_when_t =
    Option<unsafe extern "C" fn(data: *mut c_void, stream: *mut c_void) -> bool>;

/// Called once with the scope's data, after the last call of the scope's predicate.
pub type cualloc_done_t = Option<unsafe extern "C" fn(data: *mut c_void)>;

/// Selects the requests that go to a pool. Set struct_size to sizeof(cualloc_scope_t), set kind, and set all other
/// fields to 0 unless the kind uses them. Later versions of the library add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct cualloc_scope_t {
    /// Size of this structure in bytes, as the caller knows it.
    pub struct_size: usize,
    /// The kind of scope: CUALLOC_SCOPE_CAPTURE, ...
    pub kind: i32,
    /// The id of a capture, as returned by cuStreamGetCaptureInfo.
    pub capture: u64,
    /// A stream, as passed to cualloc_alloc.
    pub stream: *mut c_void,
    /// The predicate.
    pub when: cualloc_when_t,
    /// Null, or the function to call when the predicate is no longer needed.
    pub done: cualloc_done_t,
    /// Passed to both functions.
    pub data: *mut c_void,
}

/// Statistics of a graph pool. Set struct_size to sizeof(cualloc_footprint_t) before the call; the structure grows as
/// cualloc_stats_t does.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct cualloc_footprint_t {
    /// Size of this structure in bytes, as the caller knows it. Not changed.
    pub struct_size: usize,
    /// Bytes of live blocks, after rounding.
    pub live: u64,
    /// Number of live blocks.
    pub blocks: u64,
    /// Bytes of free memory.
    pub free_bytes: u64,
    /// The largest number of bytes that were live at the same time.
    pub peak: u64,
    /// Bytes reserved from the driver.
    pub physical: u64,
    /// Number of graphs, executables made of them, and launches that may use the pool's addresses.
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

/// Creates a graph pool: memory for stream captures, in an arena of its own. Its addresses stay valid as long as a
/// graph captured with them, an executable made of it, or a launch of that may use them. Scopes (cualloc_pool_enter)
/// send requests to it; the requests are ordinary calls of cualloc_alloc, and blocks are freed with cualloc_free.
/// Inside a capture, freed memory is reused after the nodes that used it last. The caller promises that launches of
/// graphs that share a pool are ordered one after another on the device: docs/graphs.md.
///
/// Errors: CUALLOC_UNSUPPORTED under the classic policy; CUALLOC_INVALID_ARGUMENT for a null handle or out;
/// CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST. *out is then null.
///
/// May be called from any thread.
///
/// # Safety
/// `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_pool_create(
    allocator: *mut cualloc_t,
    out: *mut *mut cualloc_pool_t,
) -> i32 {
    // SAFETY: the caller's contract.
    unsafe { give(out, || pool_table::add(allocator, PoolKind::Plain)) }
}

/// Like cualloc_pool_create, with a tag: a text by which all pools that share it are suspended together
/// (CUALLOC_SELECT_TAG). Every driver handle holds memory of one pool only. A process keeps the texts of its tags, at
/// most 65536.
///
/// Errors: as cualloc_pool_create, and CUALLOC_INVALID_ARGUMENT for a tag that is null, not UTF-8, or one too many.
///
/// May be called from any thread.
///
/// # Safety
/// `tag` is null or zero-terminated; `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_pool_create_tagged(
    allocator: *mut cualloc_t,
    tag: *const c_char,
    out: *mut *mut cualloc_pool_t,
) -> i32 {
    // SAFETY: the caller's contract.
    unsafe {
        give(out, || {
            pool_table::add(allocator, PoolKind::Tagged(tags::of(tag)?))
        })
    }
}

/// Opens a scope: sends matching requests to a pool until *scope is left. If several scopes match a request, one for
/// its capture takes precedence, then one for its stream, then a predicate, then one for its thread; among scopes of
/// the same kind, the one entered last. A capture gets no more memory of the pool once all its scopes are left, so
/// leave a scope only after cuStreamEndCapture.
///
/// For a scope with a predicate: if this call fails, done is not called, and the predicate is not called any more,
/// although threads may have called it during the call. Otherwise done is called on any thread once the scope was left,
/// or ended with the pool or the allocator, and the last call of the predicate has returned.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null pool, which, when or scope, a struct_size smaller than that of the first
/// version, an unknown kind, or a stream of another device; CUALLOC_CLOSED for a pool that was released;
/// CUALLOC_CAPTURING for CUALLOC_SCOPE_STREAM with a stream that is being captured already (use another kind);
/// CUALLOC_BUSY for CUALLOC_SCOPE_WHEN inside a predicate; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. *scope is then 0.
///
/// May be called from any thread.
///
/// # Safety
/// `which` is null or points to `struct_size` bytes. If its kind needs a stream, that is a live stream, or null, 1 or
/// 2, and is retired before it is destroyed. The predicate and its data may be used from any thread until done is
/// called. `scope` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_pool_enter(
    pool: *mut cualloc_pool_t,
    which: *const cualloc_scope_t,
    scope: *mut u64,
) -> i32 {
    // SAFETY: the caller's contract.
    unsafe { give(scope, || enter(pool, &stats::read_struct(which)?)) }
}

/// Opens a scope and returns its number.
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
            // If entering failed later, this call could not wait for the threads that are in the predicate.
            CUALLOC_SCOPE_WHEN if is_in_predicate() => {
                kept = Err(Failure::Reason(
                    CUALLOC_BUSY,
                    "the thread is in a predicate",
                ));
                return Ok(());
            }
            CUALLOC_SCOPE_WHEN => match which.when {
                Some(when) => {
                    let made = Arc::new(Predicate::new(when, which.done, which.data));
                    let asked = Arc::clone(&made);
                    predicate = Some(made);
                    pool.enter(Scope::When(Box::new(move |stream| {
                        asked.call(stream.cast())
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
        predicate.arm();
    }
    kept
}

const UNKNOWN: Failure = Failure::Reason(CUALLOC_INVALID_ARGUMENT, "unknown kind of scope");

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

/// Leaves a scope. Blocks allocated through it are not affected. Its predicate is not called any more: this call waits
/// for threads that are in it, unless the calling thread is itself in a predicate.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null pool, or for a scope that was left before or belongs to another pool;
/// CUALLOC_CLOSED for a pool that was released, which has left its scopes; CUALLOC_CONTEXT_LOST.
///
/// May be called from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_pool_leave(pool: *mut cualloc_pool_t, scope: u64) -> i32 {
    call(|| pool_table::leave(pool, scope))
}

/// Ends a pool's handle: no further capture uses the pool, and its open scopes are left. The memory returns to the
/// driver once no graph, executable, launch or block uses it. cualloc_destroy releases the pools of its allocator, and
/// returns CUALLOC_BUSY while a graph may use their memory.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for null, CUALLOC_CLOSED for a pool that was released before,
/// CUALLOC_CONTEXT_LOST.
///
/// May be called from any thread, also during a capture.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_pool_release(pool: *mut cualloc_pool_t) -> i32 {
    call(|| pool_table::release(pool))
}

/// Permits requests outside of captures to get free memory that graphs of the pool write, from now on. Without the
/// permission, a pool in which new work is warmed up before each capture holds the memory of all warm-ups.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null pool; CUALLOC_CLOSED for a pool that was released; CUALLOC_CONTEXT_LOST.
///
/// May be called from any thread.
///
/// # Safety
/// If a block is allocated from the pool outside of captures after this call, no graph of the pool is launched while its
/// contents are needed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_pool_reuse_graph_memory(pool: *mut cualloc_pool_t) -> i32 {
    // SAFETY: the caller's contract.
    call(|| pool_table::with(pool, |pool, _| unsafe { pool.reuse_graph_memory() }))
}

/// Releases free memory of a pool to the driver, as far as whole handles are free, after waiting for the work that uses
/// them. A pool that a graph or a capture in progress may use keeps its memory. Writes the released bytes to *released,
/// unless it is null.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null pool; CUALLOC_CLOSED for a pool that was released; CUALLOC_SUSPENDED;
/// CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. *released is then 0.
///
/// May be called from any thread.
///
/// # Safety
/// `released` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_pool_empty_cache(
    pool: *mut cualloc_pool_t,
    released: *mut u64,
) -> i32 {
    let mut bytes = 0;
    let code = call(|| {
        bytes = pool_table::with(pool, |pool, _| pool.empty_cache())?;
        Ok(())
    });
    if !released.is_null() {
        // SAFETY: the caller's contract.
        unsafe { released.write(bytes) };
    }
    code
}

/// Writes the current statistics of a pool. Set out->struct_size before the call. The pool's bytes are not part of the
/// figures of cualloc_stats, but they count against the limit.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null pool or out, or a struct_size smaller than the field itself;
/// CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST. The fields are then 0, if out is not null and has a valid size.
///
/// May be called from any thread.
///
/// # Safety
/// `out` is null or points to a structure of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_pool_footprint(
    pool: *mut cualloc_pool_t,
    out: *mut cualloc_footprint_t,
) -> i32 {
    call(|| {
        // SAFETY: the caller's contract.
        let room = unsafe { room(out) }?;
        // SAFETY: the caller's contract.
        let write = |footprint: &cualloc_footprint_t| unsafe { write(footprint, out, room) };
        write(&cualloc_footprint_t::default());
        write(&pool_table::with(pool, |pool, _| {
            Ok(pool.footprint()?.into())
        })?);
        Ok(())
    })
}

/// Declares that a graph (a CUgraph) that was not captured with a pool uses its memory: the pool's addresses stay as
/// long as the graph, the executables made of it, and their launches.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for null; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER, also if the driver
/// cannot report the end of a graph.
///
/// May be called from any thread.
///
/// # Safety
/// `graph` is null or a live graph that no other thread uses during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_pool_retain(pool: *mut cualloc_pool_t, graph: *mut c_void) -> i32 {
    call(|| match graph.is_null() {
        true => Err(NULL),
        // SAFETY: the caller's contract.
        false => pool_table::with(pool, |pool, _| unsafe { pool.retain(graph.cast()) }),
    })
}
