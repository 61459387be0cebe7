//! Checkpoints and sources of graph pools, visits to memory, peers and deferred frees, over the simulator.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use cualloc::driver::Stream;
use cualloc::sim::Mode;

use super::*;
use crate::pool_tests::{
    Asked, allocator, enter, pool_of, scope, shared_is_simulated, torch_begin, torch_footprint,
    torch_id,
};
use crate::tests::world;

unsafe extern "C" fn note(data: *mut c_void, address: u64, bytes: u64) {
    // SAFETY: the test passes its list.
    unsafe { &mut *data.cast::<Vec<(u64, u64)>>() }.push((address, bytes));
}

unsafe extern "C" fn note_segment(data: *mut c_void, segment: *const cualloc_segment_t) {
    // SAFETY: the test passes its lists, and the segment is valid during the call.
    unsafe { (*data.cast::<Visited>()).segments.push(*segment) };
}

unsafe extern "C" fn note_block(data: *mut c_void, block: *const cualloc_block_t) {
    // SAFETY: as above.
    unsafe { (*data.cast::<Visited>()).blocks.push(*block) };
}

#[derive(Default)]
struct Visited {
    segments: Vec<cualloc_segment_t>,
    blocks: Vec<cualloc_block_t>,
}

impl Visited {
    /// The visits of a pool, or of the allocator's own memory.
    fn of(allocator: *mut cualloc_t, pool: Option<*mut cualloc_pool_t>) -> Visited {
        let mut visited = Visited::default();
        let data = (&raw mut visited).cast();
        let (segment, block) = (Some(note_segment as _), Some(note_block as _));
        // SAFETY: the functions take the lists.
        let code = unsafe {
            match pool {
                Some(pool) => cualloc_pool_visit(pool, segment, block, data),
                None => cualloc_visit(allocator, segment, block, data),
            }
        };
        assert_eq!(code, CUALLOC_OK);
        visited
    }

    /// Checks that the blocks of each segment that is no view cover it, in ascending order.
    fn assert_covered(&self) {
        let mut blocks = self.blocks.iter();
        for segment in &self.segments {
            let own: Vec<_> = blocks.by_ref().take(segment.blocks as usize).collect();
            if !segment.view {
                let end = own.iter().fold(segment.address, |at, block| {
                    assert_eq!(block.address, at);
                    at + block.bytes
                });
                assert_eq!(end, segment.address + segment.bytes);
            }
        }
        assert_eq!(blocks.next(), None);
    }

    /// Addresses of the blocks in a state, each with its requested bytes.
    fn in_state(&self, state: i32) -> Vec<(u64, u64)> {
        let blocks = self.blocks.iter().filter(|block| block.state == state);
        blocks
            .map(|block| (block.address, block.requested))
            .collect()
    }
}

fn blocks_of(checkpoint: *const cualloc_checkpoint_t) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    // SAFETY: the function takes the list.
    let code = unsafe { cualloc_checkpoint_visit(checkpoint, Some(note), (&raw mut found).cast()) };
    assert_eq!(code, CUALLOC_OK);
    found
}

fn checkpoint_of(pool: *mut cualloc_pool_t) -> *mut cualloc_checkpoint_t {
    let mut made = null_mut();
    // SAFETY: the pointer is to a local.
    let code = unsafe { cualloc_pool_checkpoint(pool, &mut made) };
    assert_eq!(code, CUALLOC_OK);
    made
}

fn take(allocator: *mut cualloc_t, bytes: usize) -> u64 {
    let mut out = 0;
    // SAFETY: the pointer is to a local.
    let code = unsafe { cualloc_alloc(allocator, bytes, null_mut(), &mut out) };
    assert_eq!(code, CUALLOC_OK);
    out
}

#[test]
fn checkpoints_restore_the_live_blocks_of_a_pool() {
    const MIB: u64 = 1 << 20;
    let _one = world();
    let (allocator, asked) = (allocator(), Asked::default());
    let (pool, other) = (pool_of(allocator), pool_of(allocator));
    let (code, number) = enter(pool, &scope(CUALLOC_SCOPE_THREAD, &asked));
    assert_eq!(code, CUALLOC_OK);
    let first = take(allocator, 3 << 20);
    let point = checkpoint_of(pool);
    assert_eq!(blocks_of(point), [(first, 3 * MIB)]);
    // SAFETY: nothing uses the blocks.
    unsafe {
        let second = take(allocator, 5 << 20);
        assert_eq!(cualloc_free(allocator, first), CUALLOC_OK);
        let visited = Visited::of(allocator, Some(pool));
        assert_eq!(visited.in_state(CUALLOC_BLOCK_LIVE), [(second, 5 * MIB)]);
        visited.assert_covered();
        assert_eq!(cualloc_pool_restore(other, point), CUALLOC_INVALID_ARGUMENT);
        assert_eq!(cualloc_pool_restore(pool, point), CUALLOC_OK);
        assert_eq!(cualloc_free(allocator, second), CUALLOC_NOT_OURS);
        let again = checkpoint_of(pool);
        assert_eq!(blocks_of(again), blocks_of(point));
        assert_eq!(cualloc_free(allocator, first), CUALLOC_OK);
        for made in [point, again] {
            assert_eq!(cualloc_checkpoint_free(made), CUALLOC_OK);
            assert_eq!(cualloc_checkpoint_free(made), CUALLOC_CLOSED);
            assert_eq!(cualloc_pool_restore(pool, made), CUALLOC_CLOSED);
        }
        assert_eq!(cualloc_checkpoint_free(null_mut()), CUALLOC_OK);
        assert_eq!(
            cualloc_pool_restore(pool, null_mut()),
            CUALLOC_INVALID_ARGUMENT
        );
        assert_eq!(cualloc_pool_leave(pool, number), CUALLOC_OK);
        let plain = take(allocator, 2 << 20);
        let own = Visited::of(allocator, None);
        own.assert_covered();
        assert!(own.in_state(CUALLOC_BLOCK_LIVE).contains(&(plain, 2 * MIB)));
        assert_eq!(own.in_state(CUALLOC_BLOCK_LIVE).len(), 1);
        assert_eq!(cualloc_free(allocator, plain), CUALLOC_OK);
    }
    for pool in [pool, other] {
        assert_eq!(cualloc_pool_release(pool), CUALLOC_OK);
    }
    assert_eq!(cualloc_destroy(allocator), CUALLOC_OK);
}

/// Memory that work in flight may still use is visited as pending, and as free afterwards.
#[test]
fn freed_memory_is_pending_until_its_work_is_complete() {
    let (_one, simulator, driver) = world();
    let allocator = allocator();
    let context = driver.context(0).unwrap();
    let [home, user] = [(); 2].map(|()| Stream::new(&context).unwrap());
    let mut at = 0;
    simulator.set_mode(Mode::Manual);
    // SAFETY: the streams are alive, and the pointer is to a local.
    unsafe {
        let code = cualloc_alloc(allocator, 4 << 20, home.raw().cast(), &mut at);
        assert_eq!(code, CUALLOC_OK);
        simulator.busy(user.raw(), 1000).unwrap();
        let code = cualloc_record_stream(allocator, at, user.raw().cast());
        assert_eq!(code, CUALLOC_OK);
        assert_eq!(cualloc_free(allocator, at), CUALLOC_OK);
    }
    let state = || {
        let visited = Visited::of(allocator, None);
        let mut blocks = visited.blocks.iter();
        let block = blocks.find(|block| block.address <= at && at < block.address + block.bytes);
        block.map(|block| block.state)
    };
    assert_eq!(state(), Some(CUALLOC_BLOCK_PENDING));
    simulator.complete_all();
    simulator.set_mode(Mode::Instant);
    // SAFETY: null pointers are ignored.
    let trimmed = unsafe { cualloc_trim(allocator, u64::MAX, null_mut(), null_mut()) };
    assert_eq!((trimmed, state()), (CUALLOC_OK, Some(CUALLOC_BLOCK_FREE)));
    let mut released = 0;
    // SAFETY: the pointer is to a local, the other one is null.
    let trimmed = unsafe { cualloc_trim_device(allocator, 0, &mut released, null_mut()) };
    assert_eq!((trimmed, state()), (CUALLOC_OK, None));
    assert!(released >= 4 << 20);
    assert_eq!(cualloc_destroy(allocator), CUALLOC_OK);
}

#[test]
fn a_peer_is_added_by_its_number() {
    let _one = world();
    let allocator = allocator();
    // The allocator's own device has access.
    assert_eq!(cualloc_add_peer(allocator, 0), CUALLOC_OK);
    assert_eq!(cualloc_add_peer(allocator, -1), CUALLOC_INVALID_ARGUMENT);
    assert_eq!(cualloc_add_peer(allocator, 99), CUALLOC_DRIVER);
    assert_eq!(cualloc_add_peer(null_mut(), 0), CUALLOC_INVALID_ARGUMENT);
    assert_eq!(cualloc_destroy(allocator), CUALLOC_OK);
    assert_eq!(cualloc_add_peer(allocator, 0), CUALLOC_CLOSED);
}

/// Segments of an allocator; counts how often one was requested and freed, and how often the source was given up.
struct Segments {
    allocator: *mut cualloc_t,
    counts: [AtomicU32; 3],
}

unsafe extern "C" fn segment(data: *mut c_void, bytes: u64, stream: *mut c_void) -> u64 {
    // SAFETY: the test passes its segments.
    let segments = unsafe { &*data.cast::<Segments>() };
    segments.counts[0].fetch_add(1, Ordering::Relaxed);
    let mut address = 0;
    // SAFETY: the stream is the request's, and the pointer is to a local.
    unsafe { cualloc_alloc(segments.allocator, bytes as usize, stream, &mut address) };
    address
}

unsafe extern "C" fn free_segment(data: *mut c_void, address: u64, _: u64) {
    // SAFETY: as above; the pool frees what nothing uses.
    let segments = unsafe { &*data.cast::<Segments>() };
    segments.counts[1].fetch_add(1, Ordering::Relaxed);
    // SAFETY: as above.
    let freed = unsafe { cualloc_free(segments.allocator, address) };
    assert_eq!(freed, CUALLOC_OK);
}

unsafe extern "C" fn give_up(data: *mut c_void) {
    // SAFETY: as above.
    unsafe { &*data.cast::<Segments>() }.counts[2].fetch_add(1, Ordering::Relaxed);
}

#[test]
fn a_pool_over_a_source_frees_its_segments_and_then_the_source() {
    let _one = world();
    let (own, asked) = (allocator(), Asked::default());
    let segments = Segments {
        allocator: allocator(),
        counts: Default::default(),
    };
    let counts = || {
        segments
            .counts
            .each_ref()
            .map(|count| count.load(Ordering::Relaxed))
    };
    let mut source = cualloc_source_t {
        struct_size: size_of::<cualloc_source_t>(),
        alloc: Some(segment),
        free_segment: Some(free_segment),
        done: Some(give_up),
        data: (&raw const segments).cast_mut().cast(),
    };
    let mut pool = null_mut();
    // SAFETY: the source and its data outlive the pool.
    let create = |source: &cualloc_source_t, pool: &mut _| unsafe {
        cualloc_pool_create_over(own, source, pool)
    };
    assert_eq!(create(&source, &mut pool), CUALLOC_OK);
    let (code, number) = enter(pool, &scope(CUALLOC_SCOPE_THREAD, &asked));
    assert_eq!(code, CUALLOC_OK);
    let blocks = [3 << 20, 1 << 20, 5 << 20].map(|bytes| take(own, bytes));
    assert_eq!(counts(), [2, 0, 0]);
    for block in blocks {
        // SAFETY: nothing uses it.
        assert_eq!(unsafe { cualloc_free(own, block) }, CUALLOC_OK);
    }
    assert_eq!(cualloc_pool_leave(pool, number), CUALLOC_OK);
    assert_eq!(cualloc_pool_release(pool), CUALLOC_OK);
    // SAFETY: null pointers are ignored.
    let emptied = unsafe { cualloc_empty_cache(own, null_mut(), null_mut()) };
    assert_eq!(emptied, CUALLOC_OK);
    assert_eq!(counts(), [2, 2, 1]);
    // PyTorch's pool of an id has one source; another one is given up.
    shared_is_simulated();
    let id = cualloc_torch_pool_id_t {
        first: 0,
        second: 77,
    };
    for uses in 1..=2 {
        // SAFETY: as above.
        let code = unsafe { cualloc_torch_pool_retain(0, id, &source) };
        assert_eq!((code, counts()[2]), (CUALLOC_OK, uses));
        assert_eq!(cualloc_torch_pool_uses(0, id), u64::from(uses));
    }
    for uses in [1, 0] {
        assert_eq!(cualloc_torch_pool_release(0, id), CUALLOC_OK);
        assert_eq!(cualloc_torch_pool_uses(0, id), uses);
    }
    assert_eq!(counts(), [2, 2, 3]);
    source.alloc = None;
    assert_eq!(create(&source, &mut pool), CUALLOC_INVALID_ARGUMENT);
    assert_eq!(counts(), [2, 2, 3]);
    for allocator in [own, segments.allocator] {
        assert_eq!(cualloc_destroy(allocator), CUALLOC_OK);
    }
}

#[test]
fn pools_of_pytorch_have_tags_and_return_their_free_memory() {
    let _one = world();
    shared_is_simulated();
    let (asked, id, none) = (Asked::default(), torch_id(78), torch_id(79));
    let tag = |id, text: *const std::ffi::c_char| {
        // SAFETY: texts end with a zero.
        unsafe { cualloc_torch_pool_tag(0, id, text) }
    };
    // The tag of a pool that does not exist yet, and another one in its place.
    assert_eq!(tag(id, c"early".as_ptr()), CUALLOC_OK);
    // SAFETY: there is no source.
    let code = unsafe { cualloc_torch_pool_retain(0, id, null_mut()) };
    assert_eq!(code, CUALLOC_OK);
    assert_eq!(tag(id, null_mut()), CUALLOC_INVALID_ARGUMENT);
    let pool = cualloc_torch_pool(0, id);
    let (code, number) = enter(pool, &scope(CUALLOC_SCOPE_THREAD, &asked));
    assert_eq!(code, CUALLOC_OK);
    // SAFETY: the stream is the thread's own.
    let blocks = [(); 3].map(|()| unsafe { cualloc_torch_alloc(2 << 20, 0, 2 as *mut c_void) });
    let suspend = |tag: &std::ffi::CStr| {
        let (mut allocator, mut bytes) = (null_mut(), 0);
        // SAFETY: the pointers are to locals, and nothing uses the memory.
        unsafe {
            assert_eq!(cualloc_shared(0, &mut allocator), CUALLOC_OK);
            let which = tag.as_ptr().cast_mut().cast();
            let (all, drop) = (CUALLOC_SELECT_TAG, CUALLOC_CONTENTS_DROP);
            let mut code = cualloc_suspend(allocator, all, which, drop, &mut bytes);
            // A destroyed stream of another test was last found capturing, which refuses one suspension.
            if code == CUALLOC_CAPTURING {
                code = cualloc_suspend(allocator, all, which, drop, &mut bytes);
            }
            let resumed = cualloc_resume(allocator, all, which, &mut 0);
            assert_eq!(resumed, code);
            (code, bytes)
        }
    };
    let (code, held) = suspend(c"early");
    assert_eq!(code, CUALLOC_OK);
    assert!(held >= 6 << 20, "{held}");
    assert_eq!(tag(id, c"late".as_ptr()), CUALLOC_OK);
    assert_eq!(suspend(c"early"), (CUALLOC_INVALID_ARGUMENT, 0));
    assert_eq!(suspend(c"late"), (CUALLOC_OK, held));
    let empty = |pool| {
        let mut released = 1;
        // SAFETY: the pointer is to a local.
        let code = unsafe { cualloc_pool_empty_cache(pool, &mut released) };
        (code, released)
    };
    assert_eq!(empty(pool), (CUALLOC_OK, held - (6 << 20)));
    // SAFETY: nothing uses it.
    unsafe { cualloc_torch_delete(blocks[1]) };
    assert_eq!(empty(pool), (CUALLOC_OK, 2 << 20));
    for block in [blocks[0], blocks[2]] {
        // SAFETY: as above.
        unsafe { cualloc_torch_delete(block) };
    }
    // SAFETY: there is no graph.
    let reuse = |pool| unsafe { cualloc_pool_reuse_graph_memory(pool) };
    assert_eq!(reuse(pool), CUALLOC_OK);
    assert_eq!(cualloc_pool_leave(pool, number), CUALLOC_OK);
    assert_eq!(empty(pool), (CUALLOC_OK, 4 << 20));
    assert_eq!(cualloc_torch_pool_release(0, id), CUALLOC_OK);
    assert_eq!(empty(pool), (CUALLOC_CLOSED, 0));
    assert_eq!(empty(null_mut()), (CUALLOC_INVALID_ARGUMENT, 0));
    assert_eq!(
        [pool, null_mut()].map(reuse),
        [CUALLOC_CLOSED, CUALLOC_INVALID_ARGUMENT]
    );
    assert!(cualloc_torch_pool(0, none).is_null());
}

#[test]
fn deferred_frees_are_retried_when_a_scope_ends_although_others_are_open() {
    let _one = world();
    shared_is_simulated();
    let (asked, [open, id, last]) = (Asked::default(), [4, 5, 6].map(torch_id));
    asked.answer.store(true, Ordering::Relaxed);
    for begun in [open, id] {
        torch_begin(begun, &asked);
    }
    // SAFETY: the stream is the thread's own.
    let block = unsafe { cualloc_torch_alloc(1 << 20, 0, 2 as *mut c_void) };
    let address = block as usize;
    assert_eq!(cualloc_torch_pool_end(0, id), CUALLOC_OK);
    let freed = thread::spawn(move || {
        // SAFETY: nothing uses it.
        unsafe { cualloc_torch_delete(address as *mut c_void) };
    });
    freed.join().unwrap();
    let blocks = || torch_footprint(id).map(|now| now.blocks);
    assert_eq!(blocks(), Some(1));
    torch_begin(last, &asked);
    assert_eq!(cualloc_torch_pool_end(0, last), CUALLOC_OK);
    assert_eq!(blocks(), Some(0));
    assert_eq!(cualloc_torch_pool_end(0, open), CUALLOC_OK);
    for begun in [open, id, last] {
        assert_eq!(cualloc_torch_pool_release(0, begun), CUALLOC_OK);
    }
}

/// What a segment hook has received, and whether its data may be dropped.
#[derive(Default)]
struct Reports {
    reports: Vec<(i32, cualloc_mapped_segment_t)>,
    done: u32,
}

unsafe extern "C" fn note_change(
    data: *mut c_void,
    change: i32,
    segments: *const cualloc_mapped_segment_t,
    count: usize,
) {
    // SAFETY: the test passes its reports, and the segments are valid during the call.
    unsafe {
        let segments = std::slice::from_raw_parts(segments, count);
        let reports = segments.iter().map(|segment| (change, *segment));
        (*data.cast::<Reports>()).reports.extend(reports);
    }
}

unsafe extern "C" fn note_done(data: *mut c_void) {
    // SAFETY: as above.
    unsafe { (*data.cast::<Reports>()).done += 1 };
}

#[test]
fn a_segment_hook_receives_changes_until_it_is_removed() {
    const MIB: u64 = 1 << 20;
    let _one = world();
    let (allocator, asked) = (allocator(), Asked::default());
    let pool = pool_of(allocator);
    let mut reports = Reports::default();
    let data: *mut c_void = (&raw mut reports).cast();
    let (hook, done) = (Some(note_change as _), Some(note_done as _));
    // SAFETY: the functions take the reports, which outlive the hook; nothing uses the blocks.
    unsafe {
        let name = c"test".as_ptr();
        let add = |name, hook| cualloc_add_segment_hook(allocator, name, hook, done, data);
        assert_eq!(add(null_mut(), hook), CUALLOC_INVALID_ARGUMENT);
        assert_eq!(add(name, None), CUALLOC_INVALID_ARGUMENT);
        assert_eq!(add(name, hook), CUALLOC_OK);
        assert_eq!(add(name, hook), CUALLOC_OK, "it replaces the first");
        assert_eq!((*data.cast::<Reports>()).done, 1);
        let (code, number) = enter(pool, &scope(CUALLOC_SCOPE_THREAD, &asked));
        assert_eq!(code, CUALLOC_OK);
        let pooled = take(allocator, 2 << 20);
        assert_eq!(cualloc_pool_leave(pool, number), CUALLOC_OK);
        let plain = take(allocator, 2 << 20);
        for block in [pooled, plain] {
            assert_eq!(cualloc_free(allocator, block), CUALLOC_OK);
        }
        assert_eq!(
            cualloc_empty_cache(allocator, null_mut(), null_mut()),
            CUALLOC_OK
        );
        let of_pool = cualloc_pool_number(pool);
        assert_ne!(of_pool, 0);
        let reports = std::mem::take(&mut (*data.cast::<Reports>()).reports);
        let changes = |change| {
            let all = reports.iter().filter(move |report| report.0 == change);
            let mut bytes = [0, 0];
            for (_, segment) in all {
                assert!(segment.pool == 0 || segment.pool == of_pool);
                bytes[usize::from(segment.pool == of_pool)] += segment.bytes;
            }
            bytes
        };
        let born = changes(CUALLOC_SEGMENT_BIRTH);
        assert!(born[0] >= 2 * MIB && born[1] == 2 * MIB, "{born:?}");
        assert_eq!(changes(CUALLOC_SEGMENT_DEATH), born);
        assert_eq!(cualloc_remove_segment_hook(allocator, name), CUALLOC_OK);
        assert_eq!((*data.cast::<Reports>()).done, 2);
        let again = cualloc_remove_segment_hook(allocator, name);
        assert_eq!(again, CUALLOC_INVALID_ARGUMENT);
        let block = take(allocator, 2 << 20);
        assert_eq!(cualloc_free(allocator, block), CUALLOC_OK);
        assert!((*data.cast::<Reports>()).reports.is_empty());
    }
    assert_eq!(cualloc_pool_release(pool), CUALLOC_OK);
    assert_eq!(cualloc_pool_number(pool), 0);
    assert_eq!(cualloc_destroy(allocator), CUALLOC_OK);
}

/// Blocks of PyTorch are found by any address in them, and freed without a device.
#[test]
fn blocks_of_the_shared_allocators_are_described_and_freed_by_address() {
    let _one = world();
    shared_is_simulated();
    let stream = 2 as *mut c_void;
    // SAFETY: the stream is the thread's own.
    let made = unsafe { cualloc_torch_alloc(3 << 20, 0, stream) };
    let at = made.addr() as u64;
    let described = |at: u64| {
        let (mut device, mut block) = (7, MaybeUninit::<cualloc_block_t>::uninit());
        let at = at as *mut c_void;
        // SAFETY: both are locals, and the block is written if there is one.
        let found = unsafe {
            let found = cualloc_torch_block(at, &mut device, block.as_mut_ptr());
            found.then(|| block.assume_init())
        };
        found.map(|block| (device, block.address, block.requested, block.state))
    };
    let expected = Some((0, at, 3 << 20, CUALLOC_BLOCK_LIVE));
    assert_eq!((described(at), described(at + 4096)), (expected, expected));
    assert_eq!(described(64), None);
    // SAFETY: null pointers are allowed, and nothing uses the block.
    unsafe {
        assert!(cualloc_torch_block(made, null_mut(), null_mut()));
        cualloc_torch_delete(made);
    }
    cualloc_torch_retry_frees();
    assert_ne!(
        described(at).map(|(.., state)| state),
        Some(CUALLOC_BLOCK_LIVE)
    );
}

/// What calls the driver or logs may call back, and holds no lock of this library.
#[test]
fn no_callback_runs_under_a_lock() {
    let (_one, simulator, _) = world();
    shared_is_simulated();
    let (mut shared, asked) = (null_mut(), Asked::default());
    // SAFETY: the pointer is to a local.
    assert_eq!(unsafe { cualloc_shared(0, &mut shared) }, CUALLOC_OK);
    assert_eq!(cualloc_shared_made(0), shared);
    torch_begin(torch_id(77), &asked);
    assert_eq!(cualloc_torch_pool_end(0, torch_id(77)), CUALLOC_OK);
    assert_eq!(cualloc_torch_pool_release(0, torch_id(77)), CUALLOC_OK);
    // Debug builds report each call of the driver under a lock.
    assert_eq!(simulator.take_reports(), []);
}
