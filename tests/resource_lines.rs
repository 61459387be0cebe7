//! Resources, line by line: identity, order, events, budgets, adaptors.

#[cfg(feature = "sim")]
mod common;

#[cfg(feature = "sim")]
mod lines {
    use super::common::*;
    use cualloc::driver::{Context, Stream, sys};
    use cualloc::resource::*;
    use cualloc::sim::{FailPlan, Mode, SimConfig};
    use cualloc::{Allocator, Policy};
    use std::alloc::{GlobalAlloc, Layout, System};
    use std::cell::Cell;
    use std::ffi::c_void;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::mpsc::{Receiver, Sender};
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    thread_local! {
        static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    }

    struct Counting;

    // SAFETY: passes everything on.
    unsafe impl GlobalAlloc for Counting {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
            // SAFETY: the caller's contract.
            unsafe { System.alloc(layout) }
        }
        unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
            // SAFETY: the caller's contract.
            unsafe { System.dealloc(ptr, layout) }
        }
    }

    #[global_allocator]
    static GLOBAL: Counting = Counting;

    const T: Tag = Tag::new("test");

    fn packed(test: impl Fn(&Rig)) {
        only(Policy::Packed, test);
    }

    fn asynchronous(rig: &Rig) -> AsyncResource {
        AsyncResource::new(rig.allocator())
    }

    fn code() -> sys::CUresult {
        sys::CUresult::CUDA_ERROR_LAUNCH_FAILED
    }

    /// Not fatal, so that the driver goes on.
    fn refusal() -> sys::CUresult {
        sys::CUresult::CUDA_ERROR_INVALID_VALUE
    }

    fn fail(rig: &Rig, call: &str) -> bool {
        let Some(sim) = rig.sim() else { return false };
        sim.fail(FailPlan::call(call, refusal()).unwrap());
        true
    }

    /// S5.13, S5.14: identity is source, record and generation, never used again.
    #[test]
    fn s5_13_s5_14_identity_survives_reuse_of_the_address() {
        packed(|rig| {
            let (allocator, other, stream) = (rig.allocator(), rig.allocator(), rig.stream());
            let first = MemoryResource::allocate(&allocator, 512, &stream, T).unwrap();
            let old = first.identity();
            assert!(old.key.source >= 1 && old.key.generation >= 1);
            assert_eq!((old.ptr, old.bytes, old.device), (first.ptr(), 512, 0));
            assert_eq!(
                (first.alignment(), first.stream_id()),
                (1, stream.id().unwrap())
            );
            allocator.deallocate(first).unwrap();
            let second = MemoryResource::allocate(&allocator, 512, &stream, T).unwrap();
            assert_eq!(second.ptr(), old.ptr, "the same memory");
            assert_ne!(second.identity().key, old.key);
            assert_eq!(allocator.state(&old), BlockState::Freed);
            let used = MemoryResource::record_use(&allocator, &old, &stream);
            assert!(matches!(used, Err(ResourceError::UseAfterFree { .. })));
            // Another allocator's block is refused and comes back.
            let failure = other.deallocate(second).unwrap_err();
            assert!(matches!(failure.error, ResourceError::UseAfterFree { .. }));
            assert_eq!(other.outstanding().live, 0);
            allocator.deallocate(*failure.block).unwrap();
            let direct = DirectResource::new(&rig.context);
            let block = direct.allocate(8, &stream, T).unwrap();
            assert_ne!(block.identity().key.source, old.key.source);
            direct.deallocate(block).unwrap();
        });
    }

    /// S5.15, S5.16, S5.17: tags, accesses and errors with their data.
    #[test]
    fn s5_15_s5_16_s5_17_tags_accesses_and_errors() {
        packed(|rig| {
            assert_eq!(Tag::default().as_str(), "untagged");
            assert_eq!(Access::Read.merge(Access::Write), Access::ReadWrite);
            assert_eq!(Access::Read.merge(Access::Read), Access::Read);
            let budget = Budget::new(rig.allocator(), 100);
            let stream = rig.stream();
            let block = budget.allocate(60, &stream, T).unwrap();
            match budget.allocate(41, &stream, T) {
                Err(ResourceError::OutOfBudget {
                    requested,
                    remaining,
                    limit,
                    used,
                    ..
                }) => {
                    assert_eq!((requested, remaining, limit, used), (41, 40, 100, 60));
                }
                other => panic!("{other:?}"),
            }
            let id = block.identity();
            assert_eq!(id.range(20, 40).unwrap(), id.ptr + 20);
            let outside = id.range(20, 41);
            assert!(matches!(
                outside,
                Err(ResourceError::OutOfBounds { size: 60, .. })
            ));
            assert!(id.range(usize::MAX, 2).is_err());
            budget.deallocate(block).unwrap();
            // Stream 0 is the default stream.
            let pool = StreamPool::new(&rig.context);
            let default = pool.resolve(0).unwrap();
            let legacy = Stream::legacy_default(&rig.context).unwrap();
            assert_eq!(default.id().unwrap(), legacy.id().unwrap());
        });
    }

    /// S5.18: what cannot track says so.
    #[test]
    fn s5_18_use_tracking_is_refused_by_default() {
        packed(|rig| {
            let [a, b] = rig.streams();
            let direct = DirectResource::new(&rig.context);
            let block = direct.allocate(64, &a, T).unwrap();
            let id = block.identity();
            assert_eq!(direct.tracking(), Tracking::None);
            for refused in [
                direct.record_use(&id, &b),
                direct.prepare_use(&id, &b, Access::Read),
                direct.finish_use(&id, &b, Access::Write),
            ] {
                let misuse = StreamMisuse::NotTracked {
                    asked: "",
                    stream: b.id().unwrap(),
                };
                match refused {
                    Err(ResourceError::StreamMisuse(StreamMisuse::NotTracked {
                        stream, ..
                    })) => {
                        assert!(
                            matches!(misuse, StreamMisuse::NotTracked { stream: s, .. } if s == stream)
                        );
                    }
                    other => panic!("{other:?}"),
                }
            }
            direct.deallocate(block).unwrap();
            // The caching resource does not put streams in order, and says so.
            let caching = rig.allocator();
            let block = MemoryResource::allocate(&caching, 64, &a, T).unwrap();
            let refused = caching.prepare_use(&block.identity(), &b, Access::Read);
            assert!(matches!(refused, Err(ResourceError::StreamMisuse(_))));
            caching
                .prepare_use(&block.identity(), &a, Access::Write)
                .unwrap();
            caching.deallocate(block).unwrap();
        });
    }

    /// S5.19, S5.61, S5.62: synchronous, whatever the stream does.
    #[test]
    fn s5_19_s5_61_s5_62_direct_resource_waits_for_the_device() {
        packed(|rig| {
            let stream = rig.stream();
            let direct = DirectResource::new(&rig.context);
            let calls = rig.calls("cuMemAlloc_v2");
            let zero = direct.allocate(0, &stream, T);
            assert!(matches!(
                zero,
                Err(ResourceError::InvalidSize { requested: 0 })
            ));
            assert_eq!(rig.calls("cuMemAlloc_v2"), calls);
            let block = direct.allocate(4096, &stream, T).unwrap();
            let id = block.identity();
            let busy = rig.busy(&stream);
            rig.stamp(block.ptr(), 4096, 9, &stream);
            direct.deallocate(block).unwrap();
            assert!(stream.is_complete().unwrap(), "the work is done");
            assert_eq!(direct.outstanding(), Outstanding::default());
            assert_eq!(direct.state(&id), BlockState::Freed);
            busy.release();
        });
    }

    /// S5.20: what is refused is refused before any change.
    #[test]
    fn s5_20_foreign_streams_and_collisions_change_nothing() {
        only_on(
            Policy::Packed,
            SimConfig::with_devices(2, GIB as u64),
            |rig| {
                if rig.driver.device_count().unwrap() < 2 {
                    eprintln!("SKIPPED: needs two devices");
                    return;
                }
                let resource = asynchronous(rig);
                let second = Context::primary(&rig.driver, rig.driver.device(1).unwrap()).unwrap();
                let elsewhere = Stream::new(&second).unwrap();
                let calls = rig.memory_calls();
                let wrong = resource.allocate(64, &elsewhere, T);
                assert!(
                    matches!(
                        wrong,
                        Err(ResourceError::WrongDevice {
                            expected: 0,
                            found: 1
                        })
                    ),
                    "{wrong:?}"
                );
                let Some(_) = rig.sim() else { return };
                let sim =
                    cualloc::sim::Simulator::new(SimConfig::with_devices(1, 1 << 30)).unwrap();
                let driver = sim.driver().unwrap();
                let context = Context::primary(&driver, driver.device(0).unwrap()).unwrap();
                let foreign = Stream::new(&context).unwrap();
                let refused = resource.allocate(64, &foreign, T);
                assert!(
                    matches!(
                        refused,
                        Err(ResourceError::StreamMisuse(StreamMisuse::ForeignDriver))
                    ),
                    "{refused:?}"
                );
                assert_eq!(rig.memory_calls(), calls);
                // A source that hands the same memory out twice.
                let same = AsyncResource::new(Twice(rig.allocator(), Mutex::default()));
                let stream = rig.stream();
                let block = same.allocate(64, &stream, T).unwrap();
                let collision = same.allocate(64, &stream, T);
                assert!(
                    matches!(collision, Err(ResourceError::Collision { .. })),
                    "{collision:?}"
                );
                assert_eq!(same.state(&block.identity()), BlockState::Live);
                assert_eq!(same.outstanding().live, 64);
                same.prepare_use(&block.identity(), &stream, Access::Read)
                    .unwrap();
                same.deallocate(block).unwrap();
                assert_eq!(same.reap().unwrap(), 64);
            },
        );
    }

    /// Hands its first block out again and again, under new keys.
    struct Twice(Allocator, Mutex<Option<(BlockIdentity, u64)>>);

    impl MemoryResource for Twice {
        fn allocate_aligned(
            &self,
            bytes: usize,
            alignment: usize,
            stream: &Stream,
            tag: Tag,
        ) -> Result<ResourceBlock, ResourceError> {
            let mut first = self.1.lock().unwrap();
            if let Some((mut identity, size)) = *first {
                identity.key.generation += 1;
                return Ok(ResourceBlock::new(identity, size, alignment, tag));
            }
            let block = MemoryResource::allocate_aligned(&self.0, bytes, alignment, stream, tag)?;
            *first = Some((block.identity(), block.size()));
            Ok(block)
        }
        fn deallocate(&self, block: ResourceBlock) -> Result<(), DeallocateError> {
            self.0.deallocate(block)
        }
        fn context(&self) -> &Context {
            self.0.context()
        }
        fn outstanding(&self) -> Outstanding {
            self.0.outstanding()
        }
        fn state(&self, block: &BlockIdentity) -> BlockState {
            self.0.state(block)
        }
    }

    /// S5.21: the first use on another stream waits for the allocation, and for no later work.
    #[test]
    fn s5_21_allocation_is_the_first_write() {
        packed(|rig| {
            if rig.sim().is_none() {
                return;
            }
            let resource = asynchronous(rig);
            let [a, b] = rig.streams();
            let hold = rig.hold(&a);
            let block = resource.allocate(4096, &a, T).unwrap();
            let id = block.identity();
            resource.prepare_use(&id, &b, Access::Read).unwrap();
            rig.stamp(block.ptr(), 4096, 1, &b);
            assert!(!b.is_complete().unwrap(), "b follows the allocation on a");
            hold.release();
            rig.settle(&b);
            let later = rig.hold(&a);
            resource.prepare_use(&id, &b, Access::Read).unwrap();
            rig.stamp(block.ptr(), 4096, 2, &b);
            rig.settle(&b);
            resource.finish_use(&id, &b, Access::Write).unwrap();
            later.release();
            resource.deallocate(block).unwrap();
            resource.reap().unwrap();
        });
    }

    /// S5.22, S5.23: reads wait for the last write, writes for all reads; same stream: nothing.
    #[test]
    fn s5_22_s5_23_waits_follow_the_accesses() {
        packed(|rig| {
            let resource = asynchronous(rig);
            let [a, b, c] = rig.streams();
            let block = resource.allocate(4096, &a, T).unwrap();
            let id = block.identity();
            let waits = || rig.calls("cuStreamWaitEvent");
            let prepare = |stream: &Stream, access| {
                let before = waits();
                resource.prepare_use(&id, stream, access).unwrap();
                waits() - before
            };
            assert_eq!(prepare(&a, Access::Write), 0, "same stream");
            resource.finish_use(&id, &a, Access::Write).unwrap();
            assert_eq!(prepare(&b, Access::Read), 1, "the write");
            resource.finish_use(&id, &b, Access::Read).unwrap();
            assert_eq!(prepare(&c, Access::Read), 1, "the write, not the read");
            resource.finish_use(&id, &c, Access::Read).unwrap();
            assert_eq!(
                prepare(&a, Access::Write),
                2,
                "both reads; the write was its own"
            );
            resource.finish_use(&id, &a, Access::Write).unwrap();
            assert_eq!(prepare(&b, Access::Write), 1, "the reads are cleared");
            resource.finish_use(&id, &b, Access::Write).unwrap();
            // Recording a use is finishing a read.
            resource.record_use(&id, &c).unwrap();
            assert_eq!(prepare(&b, Access::Write), 1);
            assert_eq!(prepare(&a, Access::ReadWrite), 2);
            resource.deallocate(block).unwrap();
            resource.reap().unwrap();
        });
    }

    /// S5.23: a write that did not wait for a read does not make it forgotten.
    #[test]
    fn s5_23_unprepared_write_keeps_other_uses() {
        packed(|rig| {
            let resource = asynchronous(rig);
            let [a, b, c] = rig.streams();
            let block = resource.allocate(4096, &a, T).unwrap();
            let id = block.identity();
            resource.finish_use(&id, &b, Access::Read).unwrap();
            resource.finish_use(&id, &c, Access::Write).unwrap();
            let before = rig.calls("cuStreamWaitEvent");
            resource.deallocate(block).unwrap();
            assert_eq!(rig.calls("cuStreamWaitEvent") - before, 2, "b and c");
            resource.reap().unwrap();
        });
    }

    /// S5.24, S5.60: a failed deallocation leaves everything as it was and returns the block.
    #[test]
    fn s5_24_s5_60_failed_deallocation_returns_the_block() {
        each(|rig| {
            let Some(sim) = rig.sim() else { return };
            let resource = Statistics::new(Tracked::new(Budget::new(asynchronous(rig), 1 << 30)));
            let [a, b] = rig.streams();
            let mut block = resource.allocate(4096, &a, T).unwrap();
            let id = block.identity();
            resource.prepare_use(&id, &b, Access::Write).unwrap();
            resource.finish_use(&id, &b, Access::Write).unwrap();
            for call in ["cuStreamWaitEvent", "cuEventRecord"] {
                sim.fail(FailPlan::call(call, refusal()).unwrap());
                let failure = resource.deallocate(block).unwrap_err();
                assert!(failure.error.driver_error().is_some());
                block = *failure.block;
                assert_eq!(block.identity(), id);
                assert_eq!(resource.state(&id), BlockState::Live);
                assert_eq!(
                    resource.outstanding(),
                    Outstanding {
                        live: 4096,
                        pending: 0
                    }
                );
                assert_eq!(resource.inner().inner().reserved(), 4096);
                assert_eq!(resource.inner().live().len(), 1);
                assert_eq!(resource.stats().bytes, 4096);
                resource.record_use(&id, &b).unwrap();
            }
            resource.deallocate(block).unwrap();
            assert_eq!(
                resource.outstanding(),
                Outstanding {
                    live: 0,
                    pending: 4096
                }
            );
            resource.reap().unwrap();
            assert_eq!(resource.inner().inner().reserved(), 0);
        });
    }

    /// S5.25, S5.26, S5.66: live, retired, quarantined, freed; per stream.
    #[test]
    fn s5_25_s5_26_s5_66_pending_bytes_leave_by_reap() {
        packed(|rig| {
            let Some(sim) = rig.sim() else { return };
            let resource = asynchronous(rig);
            let [a, b] = rig.streams();
            assert_eq!(resource.reap().unwrap(), 0, "nothing pending");
            let first = resource.allocate(1000, &a, T).unwrap();
            let second = resource.allocate(2000, &b, T).unwrap();
            let (one, two) = (first.identity(), second.identity());
            resource.deallocate(first).unwrap();
            resource.deallocate(second).unwrap();
            assert_eq!(resource.state(&one), BlockState::Retired);
            assert_eq!(
                resource.outstanding(),
                Outstanding {
                    live: 0,
                    pending: 3000
                }
            );
            assert_eq!(resource.pending_on(a.id().unwrap()), 1000);
            assert_eq!(resource.pending_on(b.id().unwrap()), 2000);
            // The second stream fails: the first has left, the second stays for the next call.
            sim.fail(
                FailPlan::call("cuEventSynchronize", refusal())
                    .unwrap()
                    .nth(2),
            );
            assert!(resource.reap().is_err());
            assert_eq!(resource.state(&one), BlockState::Freed);
            assert_eq!(resource.state(&two), BlockState::Quarantined);
            assert_eq!(resource.outstanding().pending, 2000);
            assert_eq!(resource.reap().unwrap(), 2000);
            assert_eq!(resource.state(&two), BlockState::Freed);
            assert_eq!(resource.outstanding(), Outstanding::default());
        });
    }

    /// S5.27: a stale identity is refused at every call, without a driver call.
    #[test]
    fn s5_27_stale_identity_has_no_effect() {
        packed(|rig| {
            let resource = asynchronous(rig);
            let [a, b] = rig.streams();
            let old = resource.allocate(512, &a, T).unwrap();
            let id = old.identity();
            resource.deallocate(old).unwrap();
            let new = resource.allocate(512, &a, T).unwrap();
            assert_eq!(new.ptr(), id.ptr, "the address is in use again");
            let calls = rig.driver.calls().total();
            for refused in [
                resource.record_use(&id, &b),
                resource.prepare_use(&id, &b, Access::Write),
                resource.finish_use(&id, &b, Access::Write),
            ] {
                assert!(matches!(refused, Err(ResourceError::UseAfterFree { .. })));
            }
            assert_eq!(rig.driver.calls().total(), calls);
            resource.deallocate(new).unwrap();
            resource.reap().unwrap();
        });
    }

    /// S5.28, S5.29: exact limit, no reap for the impossible, one reap and one retry otherwise.
    #[test]
    fn s5_28_s5_29_budget_is_exact_and_reaps_once() {
        packed(|rig| {
            let stream = rig.stream();
            let inner = asynchronous(rig);
            let early = inner.allocate(24, &stream, T).unwrap();
            let budget = Budget::new(inner, 1024);
            assert_eq!((budget.reserved(), budget.remaining()), (24, 1000));
            let block = budget.allocate(1000, &stream, T).unwrap();
            assert!(budget.allocate(1, &stream, T).is_err());
            budget.deallocate(block).unwrap();
            assert_eq!(budget.reserved(), 1024, "pending counts");
            let waits = rig.calls("cuEventSynchronize");
            assert!(budget.allocate(1025, &stream, T).is_err());
            assert_eq!(
                rig.calls("cuEventSynchronize"),
                waits,
                "no reap for the impossible"
            );
            let block = budget.allocate(1000, &stream, T).unwrap();
            assert_eq!(rig.calls("cuEventSynchronize"), waits + 1, "one reap");
            budget.deallocate(block).unwrap();
            budget.deallocate(early).unwrap();
            budget.reap().unwrap();
            assert_eq!(budget.reserved(), 0, "what was there before has left too");
            if !fail(rig, "cuEventRecord") {
                return;
            }
            assert!(budget.allocate(100, &stream, T).is_err());
            assert_eq!(budget.reserved(), 0, "rolled back");
        });
    }

    /// S5.30: only what leaves the inner resource is released, and an unknown block is nothing.
    #[test]
    fn s5_30_budget_follows_what_really_left() {
        packed(|rig| {
            let stream = rig.stream();
            let direct = Budget::new(DirectResource::new(&rig.context), 4096);
            let block = direct.allocate(4096, &stream, T).unwrap();
            let stranger = DirectResource::new(&rig.context);
            let unknown = stranger.allocate(4096, &stream, T).unwrap();
            let failure = direct.deallocate(unknown).unwrap_err();
            assert_eq!(direct.reserved(), 4096);
            stranger.deallocate(*failure.block).unwrap();
            direct.deallocate(block).unwrap();
            assert_eq!(direct.reserved(), 0, "synchronous: at once");
            // Two budgets over one resource keep apart what each has let through.
            let shared = Arc::new(asynchronous(rig));
            let one = Budget::new(Arc::clone(&shared), 4096);
            let two = Budget::new(Arc::clone(&shared), 4096);
            let first = one.allocate(1000, &stream, T).unwrap();
            let second = two.allocate(2000, &stream, T).unwrap();
            one.deallocate(first).unwrap();
            two.deallocate(second).unwrap();
            assert_eq!((one.reserved(), two.reserved()), (1000, 2000));
            one.reap().unwrap();
            assert_eq!((one.reserved(), two.reserved()), (0, 0));
        });
    }

    /// S5.31, S5.32: one record per call with all its fields, in one order.
    #[test]
    fn s5_31_s5_32_records_say_everything() {
        packed(|rig| {
            let stream = rig.stream();
            let ring = Arc::new(RingSink::default());
            let clock = ManualClock::default();
            clock.advance(std::time::Duration::from_secs(5));
            let budget = Budget::new(rig.allocator(), 1000);
            let log = Logging::with_clock(budget, ring.clone(), Arc::new(clock));
            let block = log.allocate(1000, &stream, "named".into()).unwrap();
            let (ptr, generation) = (block.ptr(), block.generation());
            assert!(log.allocate(1, &stream, T).is_err());
            log.reap().unwrap();
            let log = &log;
            std::thread::scope(|scope| {
                scope.spawn(move || log.deallocate(block).unwrap());
            });
            let records = ring.snapshot();
            assert_eq!(records.len(), 4);
            assert!(records.windows(2).all(|pair| pair[0].order < pair[1].order));
            let first = &records[0];
            assert_eq!((first.action, first.device), (LogAction::Allocate, 0));
            assert_eq!(
                (first.ptr, first.bytes, first.generation),
                (ptr, 1000, generation)
            );
            assert_eq!(
                (first.tag.as_str(), first.stream),
                ("named", stream.id().unwrap())
            );
            assert_eq!((first.time.as_secs(), first.error), (5, None));
            assert_eq!(records[1].error, Some("out of budget"));
            assert!(!records[1].message().is_empty());
            assert_eq!(records[2].action, LogAction::Reap);
            assert_eq!(records[3].action, LogAction::Deallocate);
            assert_ne!(records[3].thread, first.thread);
            ring.clear();
            assert!(ring.is_empty());
            // A sink that fails costs its caller nothing.
            let broken = Logging::new(rig.allocator(), Broken);
            let block = broken.allocate(8, &stream, T).unwrap();
            broken.deallocate(block).unwrap();
            assert_eq!(broken.dropped(), 2);
        });
    }

    struct Broken;

    impl LogSink for Broken {
        fn write(&self, _: &LogRecord) -> Result<(), SinkError> {
            Err(SinkError)
        }
    }

    /// S5.68, S5.69: nothing is allocated for nobody, and the ring is bounded.
    #[test]
    fn s5_68_s5_69_null_sink_allocates_nothing_and_the_ring_is_bounded() {
        packed(|rig| {
            let stream = rig.stream();
            let plain = rig.allocator();
            let logged = Logging::new(plain.clone(), NullSink);
            let count = |resource: &dyn MemoryResource| {
                let before = ALLOCATIONS.with(Cell::get);
                for _ in 0..100 {
                    let block = resource.allocate(512, &stream, T).unwrap();
                    resource.deallocate(block).unwrap();
                }
                ALLOCATIONS.with(Cell::get) - before
            };
            count(&plain);
            let (without, with) = (count(&plain), count(&logged));
            assert_eq!(with, without, "heap allocations of the adaptor");
            let ring = Arc::new(RingSink::new(10));
            let kept = Logging::new(plain.clone(), ring.clone());
            count(&kept);
            assert_eq!((ring.len(), ring.dropped()), (10, 190));
        });
    }

    /// S5.34: bounded, numbered, and never a stream that was not asked for.
    #[test]
    fn s5_34_stream_pool_is_bounded() {
        packed(|rig| {
            let pool = StreamPool::new(&rig.context);
            assert_eq!(pool.capacity(), 16);
            assert_eq!(StreamPool::with_capacity(&rig.context, 0).capacity(), 1);
            let ids: Vec<u64> = (0..16).map(|_| pool.acquire().unwrap().0).collect();
            assert_eq!(ids, (1..=16).collect::<Vec<u64>>());
            let full = pool.acquire();
            assert!(matches!(
                full,
                Err(ResourceError::NoStreamLeft { capacity: 16 })
            ));
            assert!(pool.resolve(17).is_none());
            let unknown = pool.get(17);
            assert!(matches!(
                unknown,
                Err(ResourceError::StreamMisuse(StreamMisuse::UnknownId(17)))
            ));
            assert!(pool.resolve(16).is_some());
            let one = StreamPool::with_capacity(&rig.context, 1);
            if fail(rig, "cuStreamCreate") {
                assert!(one.acquire().is_err());
                assert_eq!(one.acquire().unwrap().0, 1, "a failure takes no place");
            }
        });
    }

    /// S5.35: one per device, built once, failed builds tried again.
    #[test]
    fn s5_35_runtimes_are_built_once() {
        only_on(
            Policy::Packed,
            SimConfig::with_devices(2, GIB as u64),
            |rig| {
                let builds = Arc::new(AtomicU64::new(0));
                let counted = Arc::clone(&builds);
                let runtimes = Runtimes::with(&rig.driver, move |context| {
                    if counted.fetch_add(1, Ordering::SeqCst) == 0 {
                        return Err(ResourceError::NoRuntime { device: 0 });
                    }
                    Runtime::on(context)
                });
                assert!(runtimes.get(0).is_err());
                let all: Vec<Runtime> = std::thread::scope(|scope| {
                    let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| runtimes.get(0))).collect();
                    threads
                        .into_iter()
                        .map(|t| t.join().unwrap().unwrap())
                        .collect()
                });
                assert!(all.iter().all(|runtime| runtime.is_same(&all[0])));
                assert_eq!(builds.load(Ordering::SeqCst), 2);
                let count = rig.driver.device_count().unwrap();
                let beyond = runtimes.get(count);
                assert!(
                    matches!(beyond, Err(ResourceError::InvalidDevice { .. })),
                    "{beyond:?}"
                );
                assert_eq!(all[0].device(), 0);
            },
        );
    }

    /// S5.53, S5.58: events come from a pool, and all go in the end.
    #[test]
    fn s5_53_s5_58_steady_state_creates_no_event() {
        packed(|rig| {
            let created = || rig.calls("cuEventCreate");
            let resource = asynchronous(rig);
            let [a, b] = rig.streams();
            let cycle = || {
                let block = resource.allocate(4096, &a, T).unwrap();
                let id = block.identity();
                resource.prepare_use(&id, &b, Access::Write).unwrap();
                resource.finish_use(&id, &b, Access::Write).unwrap();
                resource.deallocate(block).unwrap();
            };
            (0..2000).for_each(|_| cycle());
            let warm = created();
            assert!(warm < 50, "{warm} events for 2000 cycles");
            let rounds = if cfg!(debug_assertions) {
                10_000
            } else {
                100_000
            };
            (0..rounds).for_each(|_| cycle());
            assert_eq!(created(), warm);
            resource.reap().unwrap();
            drop(resource);
            if let Some(sim) = rig.sim() {
                assert_eq!(sim.leaks().events, 0, "created and destroyed");
            }
        });
    }

    /// S5.56: a reap that waits for a stream holds nobody up.
    #[test]
    fn s5_56_reap_holds_nobody_up() {
        packed(|rig| {
            let resource = asynchronous(rig);
            let [a, b] = rig.streams();
            let block = resource.allocate(4096, &a, T).unwrap();
            if let Some(sim) = rig.maybe_sim() {
                sim.set_mode(Mode::Manual);
            }
            // Work of stream a ends when another thread has allocated, or after a long time.
            let (begin, begun) = std::sync::mpsc::channel();
            let (end, ended) = std::sync::mpsc::channel();
            let meeting = Arc::new(Meeting(begin, Mutex::new(ended), AtomicU64::new(0)));
            let data = Arc::into_raw(Arc::clone(&meeting)) as *mut c_void;
            let entered = rig.context.enter().unwrap();
            // SAFETY: the stream is alive, the meeting is counted for the callback.
            unsafe { entered.launch_host(a.raw(), meet, data) }.unwrap();
            resource.deallocate(block).unwrap();
            let (shared, other) = (&resource, &b);
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    begun.recv().unwrap();
                    let hit = shared.allocate(4096, other, T).unwrap();
                    shared.deallocate(hit).unwrap();
                    let _ = end.send(());
                });
                resource.reap().unwrap();
            });
            assert_eq!(meeting.2.load(Ordering::SeqCst), 1, "held up by the reap");
            if let Some(sim) = rig.maybe_sim() {
                sim.set_mode(Mode::Instant);
            }
            resource.reap().unwrap();
            assert_eq!(resource.outstanding(), Outstanding::default());
        });
    }

    struct Meeting(Sender<()>, Mutex<Receiver<()>>, AtomicU64);

    unsafe extern "C" fn meet(data: *mut c_void) {
        // SAFETY: counted for this call.
        let meeting = unsafe { Arc::from_raw(data.cast_const().cast::<Meeting>()) };
        let _ = meeting.0.send(());
        let ended = meeting.1.lock().unwrap();
        if ended.recv_timeout(Duration::from_secs(20)).is_ok() {
            meeting.2.store(1, Ordering::SeqCst);
        }
    }

    /// S5.57: sixteen threads, and the budget agrees with what is below it.
    #[test]
    fn s5_57_budget_agrees_with_the_resource_below() {
        packed(|rig| {
            let limit = 4 * MIB as u64;
            let budget = Budget::new(asynchronous(rig), limit);
            let streams: Vec<_> = (0..16).map(|_| rig.stream()).collect();
            std::thread::scope(|scope| {
                for (number, stream) in streams.iter().enumerate() {
                    let budget = &budget;
                    scope.spawn(move || {
                        let mut live = Vec::new();
                        for step in 0..200usize {
                            let size = 1 + (step * 7919 + number * 104_729) % (300 * KIB);
                            match budget.allocate(size, stream, T) {
                                Ok(block) => live.push(block),
                                Err(error) => assert!(error.is_out_of_memory(), "{error:?}"),
                            }
                            assert!(budget.reserved() <= limit);
                            assert!(budget.inner().outstanding().total() <= limit);
                            if step % 2 == 0 && !live.is_empty() {
                                budget
                                    .deallocate(live.swap_remove(step % live.len()))
                                    .unwrap();
                            }
                            if step % 50 == 0 {
                                budget.reap().unwrap();
                            }
                        }
                        for block in live {
                            budget.deallocate(block).unwrap();
                        }
                    });
                }
            });
            assert_eq!(budget.reserved(), budget.inner().outstanding().total());
            budget.reap().unwrap();
            assert_eq!(
                (budget.reserved(), budget.inner().outstanding().total()),
                (0, 0)
            );
        });
    }

    /// S5.59: a million reads on one stream are one read.
    #[test]
    fn s5_59_reads_of_a_stream_collapse() {
        packed(|rig| {
            let resource = asynchronous(rig);
            let [a, b, c] = rig.streams();
            let block = resource.allocate(4096, &a, T).unwrap();
            let id = block.identity();
            let rounds = if cfg!(debug_assertions) {
                20_000
            } else {
                1_000_000
            };
            for _ in 0..rounds {
                resource.record_use(&id, &b).unwrap();
            }
            let before = rig.calls("cuStreamWaitEvent");
            resource.prepare_use(&id, &c, Access::Write).unwrap();
            assert_eq!(
                rig.calls("cuStreamWaitEvent") - before,
                2,
                "the allocation and one read"
            );
            resource.deallocate(block).unwrap();
            resource.reap().unwrap();
        });
    }

    /// S5.70, S5.11: fills are in the order of the block's stream, after all recorded uses.
    #[test]
    fn s5_11_s5_70_poison_comes_after_recorded_uses() {
        each(|rig| {
            let Some(sim) = rig.sim() else { return };
            let mut config = ProbeConfig::from_settings(|name| {
                (name == "CUALLOC_POISON_FREE").then(|| "1".to_owned())
            });
            assert_eq!(
                (config.poison_allocated, config.poison_freed),
                (None, Some(0xDD))
            );
            assert_eq!(
                ProbeConfig::from_settings(|_| Some("0".into())),
                ProbeConfig::default()
            );
            assert_eq!(ProbeConfig::from_settings(|_| None), ProbeConfig::default());
            config.poison_allocated = Some(0xCD);
            let stacks: [Box<dyn MemoryResource>; 2] = [
                Box::new(Probe::new(asynchronous(rig), config)),
                Box::new(Probe::new(rig.allocator(), config)),
            ];
            for resource in stacks {
                let [a, b] = rig.streams();
                let block = resource.allocate(4096, &a, T).unwrap();
                let (ptr, id) = (block.ptr(), block.identity());
                a.synchronize().unwrap();
                assert_eq!(sim.read_memory(ptr, 4096), Some(vec![0xCD; 4096]));
                let hold = rig.hold(&b);
                rig.stamp(ptr, 4096, 0x0101_0101, &b);
                resource.record_use(&id, &b).unwrap();
                resource.deallocate(block).unwrap();
                // The fill waits for b, and nobody waited on the host.
                assert!(!a.is_complete().unwrap(), "the fill came before the use");
                hold.release();
                rig.settle(&a);
                assert_eq!(sim.read_memory(ptr, 4096), Some(vec![0xDD; 4096]));
                resource.reap().unwrap();
            }
        });
    }

    /// S5.71: an overlap is an error value; it panics only if asked to.
    #[test]
    fn s5_71_overlap_is_an_error_with_both_ranges() {
        packed(|rig| {
            let stream = rig.stream();
            let mut config = ProbeConfig::default();
            config.overlap = true;
            let probe = Probe::new(Twice(rig.allocator(), Mutex::default()), config);
            let block = probe.allocate(600, &stream, T).unwrap();
            match probe.allocate(600, &stream, T) {
                Err(ResourceError::Overlap {
                    new_ptr,
                    old_ptr,
                    old_bytes,
                    ..
                }) => {
                    assert_eq!(
                        (new_ptr, old_ptr, old_bytes),
                        (block.ptr(), block.ptr(), 1024)
                    );
                }
                other => panic!("{other:?}"),
            }
            probe.deallocate(block).unwrap();
            config.panic = true;
            let loud = Probe::new(Twice(rig.allocator(), Mutex::default()), config);
            let block = loud.allocate(600, &stream, T).unwrap();
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let _ = loud.allocate(600, &stream, T);
            }));
            assert!(panicked.is_err());
            loud.deallocate(block).unwrap();
        });
    }

    /// S5.72: a destroyed stream's pending bytes leave by its last marker.
    #[test]
    fn s5_72_destroyed_stream_is_known_by_its_marker() {
        packed(|rig| {
            let Some(sim) = rig.sim() else { return };
            let resource = asynchronous(rig);
            let raw = RawStream::new(rig);
            let stream = raw.borrowed();
            let block = resource.allocate(4096, &stream, T).unwrap();
            sim.set_mode(Mode::Manual);
            rig.stamp(block.ptr(), 4096, 1, &stream);
            let id = block.identity();
            resource.deallocate(block).unwrap();
            resource.inner().retire(&stream).unwrap();
            raw.destroy();
            assert_eq!(resource.outstanding().pending, 4096, "not assumed done");
            assert_eq!(resource.state(&id), BlockState::Retired);
            sim.deny_host_waits(true);
            let denied = resource.reap();
            sim.deny_host_waits(false);
            if denied.is_err() {
                assert_eq!(resource.outstanding().pending, 4096);
                resource.reap().unwrap();
            }
            assert_eq!(resource.outstanding().pending, 0);
            sim.set_mode(Mode::Instant);
            let _ = sim.take_reports();
        });
    }

    /// R33: an event is recorded on streams of its own context only.
    #[test]
    fn r33_events_are_pooled_per_context() {
        packed(|rig| {
            let Some(sim) = rig.sim() else { return };
            let raw = sim.create_context(0).unwrap();
            // SAFETY: just created, destroyed at the end.
            let second = unsafe { Context::from_raw(&rig.driver, raw) }.unwrap();
            let resource = asynchronous(rig);
            let (a, other) = (rig.stream(), Stream::new(&second).unwrap());
            for _ in 0..50 {
                let block = resource.allocate(4096, &a, T).unwrap();
                let id = block.identity();
                for stream in [&other, &a, &other] {
                    resource.prepare_use(&id, stream, Access::Write).unwrap();
                    resource.finish_use(&id, stream, Access::Write).unwrap();
                }
                resource.deallocate(block).unwrap();
                resource.reap().unwrap();
            }
            assert!(rig.calls("cuEventCreate") < 20);
        });
    }

    /// R69: the entry goes before the block does.
    #[test]
    fn r69_tracking_erases_before_the_free() {
        packed(|rig| {
            let stream = rig.stream();
            let seen = Arc::new(AtomicU64::new(u64::MAX));
            let tracked: Arc<std::sync::OnceLock<Arc<Tracked<Spy>>>> = Arc::default();
            let (look, count) = (Arc::clone(&tracked), Arc::clone(&seen));
            let spy = Spy(
                rig.allocator(),
                Box::new(move || {
                    let live = look.get().map_or(0, |t| t.live().len());
                    count.store(live as u64, Ordering::SeqCst);
                }),
            );
            let adaptor = Arc::new(Tracked::new(spy));
            let _ = tracked.set(Arc::clone(&adaptor));
            let block = adaptor.allocate(64, &stream, T).unwrap();
            adaptor.deallocate(block).unwrap();
            assert_eq!(
                seen.load(Ordering::SeqCst),
                0,
                "the entry was there during the free"
            );
        });
    }

    /// Runs something before each deallocation.
    struct Spy(Allocator, Box<dyn Fn() + Send + Sync>);

    impl MemoryResource for Spy {
        fn allocate_aligned(
            &self,
            bytes: usize,
            alignment: usize,
            stream: &Stream,
            tag: Tag,
        ) -> Result<ResourceBlock, ResourceError> {
            MemoryResource::allocate_aligned(&self.0, bytes, alignment, stream, tag)
        }
        fn deallocate(&self, block: ResourceBlock) -> Result<(), DeallocateError> {
            (self.1)();
            self.0.deallocate(block)
        }
        fn context(&self) -> &Context {
            self.0.context()
        }
        fn outstanding(&self) -> Outstanding {
            self.0.outstanding()
        }
        fn state(&self, block: &BlockIdentity) -> BlockState {
            self.0.state(block)
        }
    }

    /// The code that is fatal is not used here, where drivers must go on.
    #[test]
    fn lost_context_is_an_error() {
        packed(|rig| {
            let Some(sim) = rig.sim() else { return };
            let resource = asynchronous(rig);
            let stream = rig.stream();
            let block = resource.allocate(64, &stream, T).unwrap();
            sim.fail(FailPlan::call("cuEventRecord", code()).unwrap());
            let failure = resource.deallocate(block).unwrap_err();
            assert!(failure.error.driver_error().is_some_and(|e| e.is_fatal()));
            std::mem::forget(failure);
        });
    }
}
