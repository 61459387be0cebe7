//! Pools whose segments come from another allocator.

use std::sync::{Arc, Mutex};

use super::support::*;
use cualloc::allocator::{Contents, Segment, SegmentChange, SegmentHook, SegmentSource, Select};
use cualloc::driver::sys;

/// Segments from the driver, as far as the budget lasts, and those that are in use.
struct Plain {
    context: Context,
    budget: Mutex<u64>,
    segments: Mutex<Vec<(u64, u64)>>,
    /// Called by each allocation.
    during: Box<dyn Fn() + Send + Sync>,
}

// SAFETY: segments are memory of the driver until they are freed.
unsafe impl SegmentSource for Plain {
    fn allocate(&self, bytes: u64, _: sys::CUstream) -> Option<u64> {
        (self.during)();
        let mut budget = self.budget.lock().unwrap();
        *budget = budget.checked_sub(bytes)?;
        let entered = self.context.enter().unwrap();
        let address = entered.mem_alloc(bytes as usize).unwrap();
        self.segments.lock().unwrap().push((address, bytes));
        Some(address)
    }

    fn free(&self, address: u64, bytes: u64) {
        let mut segments = self.segments.lock().unwrap();
        let at = segments.iter().position(|known| *known == (address, bytes));
        segments.remove(at.expect("a segment is freed once"));
        *self.budget.lock().unwrap() += bytes;
        let entered = self.context.enter().unwrap();
        // SAFETY: the pool frees what nothing uses.
        unsafe { entered.mem_free(address) }.unwrap();
    }
}

impl Plain {
    fn calling(rig: &Rig, budget: usize, during: impl Fn() + Send + Sync + 'static) -> Arc<Plain> {
        Arc::new(Plain {
            context: rig.context.clone(),
            budget: Mutex::new(budget as u64),
            segments: Mutex::default(),
            during: Box::new(during),
        })
    }

    fn segments(&self) -> Vec<(u64, u64)> {
        self.segments.lock().unwrap().clone()
    }

    fn holds(&self, block: &Block) -> bool {
        let segments = self.segments();
        segments
            .iter()
            .any(|(at, bytes)| (*at..at + bytes).contains(&block.ptr()))
    }
}

/// A pool over a source of 64 MiB.
fn over_a_source(test: impl Fn(&Rig, Allocator, Arc<Plain>, GraphPool, Stream)) {
    packed(|rig| {
        let (allocator, source) = (rig.allocator(), Plain::calling(rig, 64 * MIB, || ()));
        let pool = allocator.graph_pool_over(Arc::clone(&source) as _).unwrap();
        test(rig, allocator, source, pool, rig.stream());
    });
}

#[test]
fn blocks_lie_in_the_segments_of_the_source() {
    over_a_source(|rig, allocator, source, pool, stream| {
        let scope = pool.enter(Scope::Thread).unwrap();
        let creates = rig.calls("cuMemCreate");
        let first = used(rig, &allocator, 3 * MIB, &stream);
        let second = used(rig, &allocator, MIB / 2, &stream);
        let sizes: Vec<u64> = source.segments().iter().map(|(_, bytes)| *bytes).collect();
        assert_eq!(
            sizes,
            [4 * MIB as u64],
            "the second is in the rest of the first"
        );
        assert!(source.holds(&first) && source.holds(&second));
        let at = first.ptr();
        drop(first);
        assert_eq!(used(rig, &allocator, 3 * MIB, &stream).ptr(), at);
        let large = used(rig, &allocator, 9 * MIB, &stream);
        assert!(source.holds(&large));
        let snapshot = pool.snapshot().unwrap();
        let mut segments = source.segments();
        segments.sort_unstable();
        let listed: Vec<_> = snapshot.iter().map(|one| (one.address, one.size)).collect();
        assert_eq!(listed, segments);
        assert_eq!(rig.calls("cuMemCreate"), creates);
        // A pool with a live block keeps its segments.
        allocator.empty_cache().unwrap();
        assert_eq!(source.segments().len(), 2);
        // A free segment is not extended by a view.
        drop(large);
        let larger = used(rig, &allocator, 17 * MIB, &stream);
        let last = source.segments().pop().unwrap();
        assert_eq!(last, (larger.ptr(), 18 * MIB as u64));
        drop((second, larger, scope));
        allocator.empty_cache().unwrap();
        assert_eq!(source.segments(), []);
        allocator.check().unwrap();
    });
}

#[test]
fn free_segments_return_to_the_source() {
    over_a_source(|rig, allocator, source, pool, stream| {
        let scope = pool.enter(Scope::Thread).unwrap();
        let blocks = [3, 9, 5].map(|mib| used(rig, &allocator, mib * MIB, &stream));
        let [kept, free, more] = blocks;
        drop((free, more));
        assert_eq!(pool.empty_cache().unwrap(), 16 * MIB as u64);
        assert_eq!(source.segments(), [(kept.ptr(), 4 * MIB as u64)]);
        drop(used(rig, &allocator, 9 * MIB, &stream));
        assert_eq!(source.segments().len(), 2);
        drop((kept, scope));
        assert_eq!(pool.empty_cache().unwrap(), 14 * MIB as u64);
        assert_eq!(source.segments(), []);
        allocator.check().unwrap();
    });
}

#[test]
fn captures_use_segments_as_long_as_their_graphs_exist() {
    over_a_source(|rig, allocator, source, pool, stream| {
        let mut block = None;
        let graph = capture(&pool, &stream, || {
            let kept = used(rig, &allocator, 5 * MIB, &stream);
            drop(used(rig, &allocator, 6 * MIB, &stream));
            block = Some(kept);
        });
        assert!(source.holds(block.as_ref().unwrap()));
        drop((block, pool));
        allocator.empty_cache().unwrap();
        assert_eq!(source.segments().len(), 2, "the graph may be launched");
        run(&graph, &stream);
        drop(graph);
        wait_until("the graph is gone", || {
            allocator.empty_cache().unwrap();
            source.segments().is_empty()
        });
    });
}

#[test]
fn a_source_without_memory_is_an_error_and_may_call_the_allocator() {
    packed(|rig| {
        let (allocator, stream) = (rig.allocator(), rig.stream());
        let (other, side) = (allocator.clone(), rig.stream());
        let source = Plain::calling(rig, 4 * MIB, move || {
            drop(other.allocate(MIB, &side).unwrap());
        });
        let pool = allocator.graph_pool_over(Arc::clone(&source) as _).unwrap();
        let scope = pool.enter(Scope::Stream(&stream)).unwrap();
        let block = allocator.allocate(3 * MIB, &stream).unwrap();
        let error = allocator.allocate(3 * MIB, &stream).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        // SAFETY: nothing uses the memory.
        let suspended = unsafe { allocator.suspend(Select::Pool(&pool), Contents::Drop) };
        drop(block);
        stream.synchronize().unwrap();
        assert_matches!(suspended.unwrap_err(), Error::NotSupported { .. });
        drop(allocator.allocate(4 * MIB, &stream).unwrap());
        drop((scope, pool));
        allocator.close().unwrap();
        assert_eq!(source.segments(), []);
    });
}

#[test]
fn an_unusable_address_is_given_back() {
    struct Odd(Mutex<Vec<u64>>);
    // SAFETY: its addresses are refused.
    unsafe impl SegmentSource for Odd {
        fn allocate(&self, _: u64, _: sys::CUstream) -> Option<u64> {
            Some((1 << 40) + 8)
        }
        fn free(&self, address: u64, _: u64) {
            self.0.lock().unwrap().push(address);
        }
    }
    packed(|rig| {
        let (allocator, stream) = (rig.allocator(), rig.stream());
        let source = Arc::new(Odd(Mutex::default()));
        let pool = allocator.graph_pool_over(Arc::clone(&source) as _).unwrap();
        let scope = pool.enter(Scope::Thread).unwrap();
        let address = (1 << 40) + 8;
        let error = allocator.allocate(MIB, &stream).unwrap_err();
        assert_eq!(
            graph_pool_error(error),
            GraphPoolError::Misaligned { address }
        );
        assert_eq!(*source.0.lock().unwrap(), [address]);
        drop(scope);
    });
}

/// Segments of the driver, of a source, and those that a capture takes over from the allocator.
#[test]
fn segment_hooks_receive_the_segments_of_pools_with_their_number() {
    over_a_source(|rig, allocator, source, over, stream| {
        let reports: Arc<Mutex<Vec<(SegmentChange, Segment)>>> = Arc::default();
        let listen = |allocator: &Allocator| {
            let keeps = Arc::clone(&reports);
            allocator.add_segment_hook(SegmentHook::new("test", move |change, segments| {
                let reports = segments.iter().map(|segment| (change, *segment));
                keeps.lock().unwrap().extend(reports);
            }));
        };
        listen(&allocator);
        let taken = || {
            let taken = std::mem::take(&mut *reports.lock().unwrap());
            let brief = |(change, segment): (_, Segment)| (change, segment.pool, segment.bytes);
            taken.into_iter().map(brief).collect::<Vec<_>>()
        };
        let plain = allocator.graph_pool().unwrap();
        assert_ne!(plain.id(), over.id());
        for pool in [&plain, &over] {
            let scope = pool.enter(Scope::Thread).unwrap();
            let block = used(rig, &allocator, 2 * MIB, &stream);
            let born = (SegmentChange::Birth, Some(pool.id()), 2 * MIB as u64);
            assert_eq!(taken(), [born]);
            let around = allocator.block_around(block.ptr()).unwrap();
            assert_eq!(around.pool, Some(pool.id()));
            drop((block, scope));
            rig.settle(&stream);
            allocator.empty_cache().unwrap();
            let dead = (SegmentChange::Death, Some(pool.id()), 2 * MIB as u64);
            assert_eq!(taken(), [dead]);
        }
        assert_eq!(source.segments(), []);
        // With nothing left below the limit, a capture takes over idle memory.
        let limited = rig.limited(2 * MIB);
        listen(&limited);
        drop(used(rig, &limited, 2 * MIB, &stream));
        rig.settle(&stream);
        let pool = limited.graph_pool().unwrap();
        let graph = capture(&pool, &stream, || {
            drop(used(rig, &limited, 2 * MIB, &stream))
        });
        let (bytes, id) = (2 * MIB as u64, Some(pool.id()));
        let moved = [
            (SegmentChange::Birth, None, bytes),
            (SegmentChange::Death, None, bytes),
            (SegmentChange::Birth, id, bytes),
        ];
        assert_eq!(taken(), moved);
        drop(graph);
    });
}
