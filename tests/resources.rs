//! One suite over all resources, adaptors, stacks and stacks of stacks.

#[cfg(feature = "sim")]
mod common;

#[cfg(feature = "sim")]
mod suite {
    use super::common::*;
    use cualloc::driver::sys;
    use cualloc::resource::*;
    use cualloc::sim::FailPlan;
    use std::collections::BTreeMap;
    use std::sync::Arc;

    /// Two live blocks never overlap, each is large enough, and all bytes are accounted for.
    fn basic(rig: &Rig, resource: &dyn MemoryResource) {
        let stream = rig.stream();
        assert_eq!(resource.outstanding(), Outstanding::default());
        let calls = rig.memory_calls();
        assert!(resource.allocate(0, &stream, Tag::default()).is_err());
        assert!(
            resource
                .allocate(usize::MAX, &stream, Tag::default())
                .is_err()
        );
        assert_eq!(
            rig.memory_calls(),
            calls,
            "no driver call for what cannot be"
        );
        let first = resource.allocate(1000, &stream, "first".into()).unwrap();
        assert_eq!((first.bytes(), first.tag().as_str()), (1000, "first"));
        assert!(first.size() >= 1000);
        assert_eq!(first.stream_id(), stream.id().unwrap());
        assert_eq!(first.device(), resource.device());
        assert_eq!(resource.state(&first.identity()), BlockState::Live);
        let second = resource
            .allocate_aligned(5000, 256, &stream, Tag::default())
            .unwrap();
        assert_eq!(second.ptr() % 256, 0);
        assert_eq!(second.tag().as_str(), "untagged");
        assert_ne!(first.identity().key, second.identity().key);
        assert!(first.ptr() + 1000 <= second.ptr() || second.ptr() + 5000 <= first.ptr());
        assert_eq!(
            resource.outstanding(),
            Outstanding {
                live: 6000,
                pending: 0
            }
        );
        rig.stamp(first.ptr(), 1000, 1, &stream);
        rig.stamp(second.ptr(), 5000, 2, &stream);
        assert_eq!(rig.mismatches(first.ptr(), 1000, 1, &stream), 0);
        let (old, pair) = (first.identity(), second.identity());
        resource.deallocate(first).unwrap();
        assert_ne!(resource.state(&old), BlockState::Live);
        assert_eq!(resource.outstanding().live, 5000);
        assert_eq!(rig.mismatches(pair.ptr, 5000, 2, &stream), 0);
        resource.deallocate(second).unwrap();
        resource.reap().unwrap();
        assert_eq!(resource.outstanding(), Outstanding::default());
        assert_eq!(resource.state(&old), BlockState::Freed);
        // A stale identity is refused by whoever looks at it, and has no effect.
        if resource.tracking() != Tracking::None {
            let used = resource.record_use(&old, &stream);
            assert!(
                matches!(used, Err(ResourceError::UseAfterFree { .. })),
                "{used:?}"
            );
        } else {
            let used = resource.record_use(&old, &stream);
            assert!(
                matches!(used, Err(ResourceError::StreamMisuse(_))),
                "{used:?}"
            );
        }
    }

    /// Random sizes in random order, each block's contents whole until it goes.
    fn mixes(rig: &Rig, resource: &dyn MemoryResource) {
        let stream = rig.stream();
        let mut random = Random(7);
        let mut live: Vec<(ResourceBlock, u32)> = Vec::new();
        let mut bytes = 0;
        for step in 0..400u32 {
            if live.len() < 30 && random.below(100) < 60 {
                let bits = 2 + random.below(17);
                let size = 4 * (1 + random.below(1 << bits)) as usize;
                let block = resource.allocate(size, &stream, Tag::default()).unwrap();
                rig.stamp(block.ptr(), size, step, &stream);
                bytes += size as u64;
                live.push((block, step));
            } else if !live.is_empty() {
                let (block, word) = live.swap_remove(random.below(live.len() as u64) as usize);
                assert_eq!(rig.mismatches(block.ptr(), block.bytes(), word, &stream), 0);
                bytes -= block.bytes() as u64;
                resource.deallocate(block).unwrap();
            }
            assert_eq!(resource.outstanding().live, bytes);
            let mut ranges = BTreeMap::new();
            for (block, _) in &live {
                assert_eq!(
                    ranges.insert(block.ptr(), block.ptr() + block.bytes() as u64),
                    None
                );
            }
            let starts = ranges.keys().skip(1).copied().collect::<Vec<_>>();
            assert!(
                ranges
                    .values()
                    .zip(starts)
                    .all(|(end, start)| *end <= start)
            );
        }
        for (block, _) in live {
            resource.deallocate(block).unwrap();
        }
        resource.reap().unwrap();
        assert_eq!(resource.outstanding(), Outstanding::default());
    }

    /// Threads on streams of their own, blocks freed by other threads.
    fn threads(rig: &Rig, resource: &dyn MemoryResource) {
        let streams: Vec<_> = (0..4).map(|_| rig.stream()).collect();
        let (sender, receiver) = std::sync::mpsc::channel::<ResourceBlock>();
        std::thread::scope(|scope| {
            for (number, stream) in streams.iter().enumerate() {
                let sender = sender.clone();
                scope.spawn(move || {
                    let mut random = Random(number as u64 + 1);
                    for step in 0..100 {
                        let size = 1 + random.below(100_000) as usize;
                        let block = resource.allocate(size, stream, Tag::default()).unwrap();
                        match step % 3 {
                            0 => sender.send(block).unwrap(),
                            1 => {
                                let seen = resource.state(&block.identity());
                                assert_eq!(seen, BlockState::Live);
                                resource.deallocate(block).unwrap();
                            }
                            _ => {
                                resource.deallocate(block).unwrap();
                                resource.reap().unwrap();
                            }
                        }
                    }
                });
            }
            drop(sender);
            scope.spawn(move || {
                for block in receiver {
                    resource.deallocate(block).unwrap();
                }
            });
        });
        resource.reap().unwrap();
        assert_eq!(resource.outstanding(), Outstanding::default());
    }

    /// Memory runs out as an error with data, nothing is lost, and it goes on afterwards.
    fn out_of_memory(rig: &Rig, resource: &dyn MemoryResource) {
        let stream = rig.stream();
        let most = 64 * MIB;
        let mut live = Vec::new();
        let error = loop {
            match resource.allocate(most, &stream, Tag::default()) {
                Ok(block) => live.push(block),
                Err(error) => break error,
            }
            assert!(live.len() < 10_000, "no end of memory");
        };
        assert!(error.is_out_of_memory(), "{error:?}");
        assert!(!live.is_empty());
        let whole = live.len() as u64 * most as u64;
        assert_eq!(resource.outstanding().live, whole);
        let kept = live.len();
        resource.deallocate(live.pop().unwrap()).unwrap();
        resource.reap().unwrap();
        live.push(resource.allocate(most, &stream, Tag::default()).unwrap());
        assert_eq!(live.len(), kept);
        for block in live {
            resource.deallocate(block).unwrap();
        }
        resource.reap().unwrap();
        resource.trim(0).unwrap();
        assert_eq!(resource.outstanding(), Outstanding::default());
        // The driver's refusal, whatever its text, is classified by its code.
        let Some(sim) = rig.sim() else { return };
        let code = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        for name in ["cuMemAlloc_v2", "cuMemCreate"] {
            sim.fail(FailPlan::call(name, code).unwrap().times(1000));
        }
        let refused = resource.allocate(200 * MIB, &stream, Tag::default());
        assert!(refused.unwrap_err().is_out_of_memory());
        sim.clear_failures();
        let block = resource.allocate(MIB, &stream, Tag::default()).unwrap();
        resource.deallocate(block).unwrap();
        resource.reap().unwrap();
    }

    /// A block that is given back while its stream is busy is not touched early by another stream,
    /// nor one that another stream uses.
    fn streams(rig: &Rig, resource: &dyn MemoryResource) {
        let [a, b] = rig.streams();
        for foreign in [false, true] {
            if foreign && resource.tracking() == Tracking::None {
                continue;
            }
            let block = resource.allocate(4 * MIB, &a, Tag::default()).unwrap();
            let (ptr, id) = (block.ptr(), block.identity());
            rig.stamp(ptr, 4 * MIB, 1, &a);
            let user = if foreign { &b } else { &a };
            if foreign {
                if resource.tracking() == Tracking::Access {
                    resource.finish_use(&id, &a, Access::Write).unwrap();
                    resource.prepare_use(&id, &b, Access::ReadWrite).unwrap();
                } else {
                    a.synchronize().unwrap();
                }
            }
            let busy = rig.busy(user);
            rig.stamp(ptr, 4 * MIB, 2, user);
            if foreign {
                match resource.tracking() {
                    Tracking::Access => {
                        resource.finish_use(&id, &b, Access::ReadWrite).unwrap();
                    }
                    _ => resource.record_use(&id, &b).unwrap(),
                }
            }
            resource.deallocate(block).unwrap();
            let other = if foreign { &a } else { &b };
            let next = resource.allocate(4 * MIB, other, Tag::default()).unwrap();
            rig.stamp(next.ptr(), 4 * MIB, 3, other);
            busy.release();
            assert_eq!(rig.mismatches(next.ptr(), 4 * MIB, 3, other), 0);
            resource.deallocate(next).unwrap();
            resource.reap().unwrap();
        }
        // A stream of another device is refused, where there is one.
        if rig.driver.device_count().unwrap() > 1 {
            let device = rig.driver.device(1).unwrap();
            let context = cualloc::driver::Context::primary(&rig.driver, device).unwrap();
            let foreign = cualloc::driver::Stream::new(&context).unwrap();
            assert!(resource.allocate(100, &foreign, Tag::default()).is_err());
            assert_eq!(resource.outstanding().live, 0);
        }
    }

    struct Random(u64);

    impl Random {
        fn below(&mut self, end: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 % end
        }
    }

    fn run<R: MemoryResource + 'static>(make: impl Fn(&Rig) -> R) {
        for policy in [cualloc::Policy::Packed, cualloc::Policy::Classic] {
            let config = cualloc::sim::SimConfig::with_devices(2, GIB as u64);
            only_on(policy, config, |rig| {
                // Both forms: the stack itself, and behind one pointer.
                let resource = make(rig);
                basic(rig, &resource);
                mixes(rig, &resource);
                threads(rig, &resource);
                if !on_cuda() {
                    out_of_memory(rig, &resource);
                }
                streams(rig, &resource);
                let shared: Arc<dyn MemoryResource> = Arc::new(resource);
                basic(rig, &shared);
                streams(rig, &shared);
                drop(shared);
                if let Some(held) = rig.driver_held() {
                    assert_eq!(held, 0, "the driver still holds memory");
                }
            });
        }
    }

    macro_rules! suite {
        ($($(#[$doc:meta])* $name:ident: $make:expr;)*) => {$(
            $(#[$doc])*
            #[test]
            fn $name() {
                run($make);
            }
        )*};
    }

    fn caching(rig: &Rig) -> cualloc::Allocator {
        rig.allocator()
    }

    fn tracked_order(rig: &Rig) -> AsyncResource {
        AsyncResource::new(caching(rig))
    }

    fn poison() -> ProbeConfig {
        let mut config = ProbeConfig::default();
        config.poison_allocated = Some(0xCD);
        config.poison_freed = Some(0xDD);
        config.overlap = true;
        config
    }

    type SmallStack = Statistics<Logging<Budget<AsyncResource>, RingSink>>;

    fn small_stack(rig: &Rig) -> SmallStack {
        Statistics::new(Logging::new(
            Budget::new(tracked_order(rig), GIB as u64),
            RingSink::new(64),
        ))
    }

    suite! {
        /// S5.12: the caching resource.
        s5_12_caching_resource_passes_the_suite: caching;
        /// S5.19: the direct resource.
        s5_19_direct_resource_passes_the_suite: |rig| DirectResource::new(&rig.context);
        /// S5.20: the async resource.
        s5_20_async_resource_passes_the_suite: tracked_order;
        async_over_direct: |rig| AsyncResource::new(DirectResource::new(&rig.context));
        budget: |rig| Budget::new(caching(rig), GIB as u64);
        budget_over_direct: |rig| Budget::new(DirectResource::new(&rig.context), GIB as u64);
        budget_over_async: |rig| Budget::new(tracked_order(rig), GIB as u64 / 2);
        async_over_budget: |rig| AsyncResource::new(Budget::new(caching(rig), GIB as u64 / 2));
        statistics: |rig| Statistics::new(caching(rig));
        tracked: |rig| Tracked::new(caching(rig));
        logging: |rig| Logging::new(caching(rig), RingSink::new(16));
        logging_to_nowhere: |rig| Logging::new(caching(rig), NullSink);
        callback: |rig| FailureCallback::new(caching(rig), |_, _, _| false);
        guard: |rig| Guard::builder().budget(GIB as u64 / 2).build(caching(rig)).unwrap();
        guard_with_policy: |rig| Guard::builder()
            .policy(OomPolicy::FreeCaches)
            .build(caching(rig))
            .unwrap();
        probe_off: |rig| Probe::new(caching(rig), ProbeConfig::default());
        probe_over_caching: |rig| Probe::new(caching(rig), poison());
        probe_over_async: |rig| Probe::new(tracked_order(rig), poison());
        probe_over_direct: |rig| Probe::new(DirectResource::new(&rig.context), poison());
        /// S5.33: adaptors pass on what is asked of them.
        s5_33_stack_passes_the_suite: small_stack;
        stack_of_stacks: |rig| {
            let below: Arc<dyn MemoryResource> = Arc::new(small_stack(rig));
            let watched = Guard::builder()
                .budget(GIB as u64)
                .policy(OomPolicy::FreeCaches)
                .build(below)
                .unwrap();
            Probe::new(Tracked::new(FailureCallback::new(watched, |_, _, n| n < 2)), poison())
        };
        order_twice: |rig| AsyncResource::new(Budget::new(
            AsyncResource::new(Budget::new(caching(rig), GIB as u64)),
            GIB as u64,
        ));
        runtime: |rig| Arc::clone(Runtime::on(&rig.context).unwrap().resource());
    }
}
