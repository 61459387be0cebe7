//! The common suite of resources: allocation and free, mixed sizes, threads, lack of memory, streams.

use std::collections::BTreeMap;
use std::sync::Arc;

use cualloc::driver::{Context, Stream, sys};
use cualloc::resource::*;
use cualloc::sim::{FailPlan, SimConfig};
use cualloc::{Error, Policy, Request};

use crate::common::rng::Rng;
use crate::common::*;
use crate::{ask, held, take};

/// Everything of this file, over what `make` makes: the stack itself, and behind one pointer.
pub fn run<R: MemoryResource + 'static>(make: impl Fn(&Rig) -> R) {
    for policy in [Policy::Packed, Policy::Classic] {
        only_on(policy, SimConfig::with_devices(2, GIB as u64), |rig| {
            let resource = make(rig);
            basic(rig, &resource);
            figures(rig, &resource);
            mixes(rig, &resource);
            threads(rig, &resource);
            if !on_cuda() {
                out_of_memory(rig, &resource);
            }
            streams(rig, &resource);
            other_streams(rig, &resource);
            recorded_streams(rig, &resource);
            let shared: Arc<dyn MemoryResource> = Arc::new(resource);
            basic(rig, &shared);
            streams(rig, &shared);
            drop(shared);
            // A pool of the driver may outlive its handle while work is in flight.
            rig.context.enter().unwrap().synchronize().unwrap();
            if let Some(held) = rig.driver_held() {
                assert_eq!(held, 0, "the driver still holds memory");
            }
        });
    }
}

/// Two live blocks never overlap, each is large enough, and all bytes are accounted for.
fn basic(rig: &Rig, resource: &dyn MemoryResource) {
    let stream = rig.stream();
    assert_eq!(held(&resource), (0, 0));
    let memory_calls = || rig.memory_calls() + rig.calls("cuMemAllocFromPoolAsync");
    let calls = memory_calls();
    assert!(ask(&resource, 0, &stream).is_err());
    assert!(ask(&resource, usize::MAX, &stream).is_err());
    assert_eq!(memory_calls(), calls, "no driver call for what cannot be");
    let first = resource
        .allocate_block(&Request::new(1000).tag("first"), &stream)
        .unwrap();
    assert_eq!((first.id().bytes(), first.tag().as_str()), (1000, "first"));
    assert!(first.size() >= 1000);
    assert_eq!(first.id().stream_id(), stream.id().unwrap());
    assert_eq!(first.id().ordinal(), resource.ordinal());
    assert_eq!(resource.state(&first.id()), BlockState::Live);
    let second = resource
        .allocate_block(&Request::new(5000).align(256), &stream)
        .unwrap();
    assert_eq!(second.ptr() % 256, 0);
    assert_eq!(second.tag().as_str(), "untagged");
    assert_ne!(first.id(), second.id());
    assert!(first.ptr() + 1000 <= second.ptr() || second.ptr() + 5000 <= first.ptr());
    assert_eq!(held(&resource), (6000, 0));
    rig.stamp(first.ptr(), 1000, 1, &stream);
    rig.stamp(second.ptr(), 5000, 2, &stream);
    assert_eq!(rig.mismatches(first.ptr(), 1000, 1, &stream), 0);
    let (old, pair) = (first.id(), second.id());
    resource.deallocate_block(first).unwrap();
    assert_ne!(resource.state(&old), BlockState::Live);
    assert_eq!(resource.usage().unwrap().requested.current, 5000);
    assert_eq!(rig.mismatches(pair.ptr(), 5000, 2, &stream), 0);
    resource.deallocate_block(second).unwrap();
    resource.reap().unwrap();
    assert_eq!(held(&resource), (0, 0));
    assert_eq!(resource.state(&old), BlockState::Free);
    // A stale id is refused by every call, and has no effect.
    if resource.use_tracking() != UseTracking::None {
        let used = resource.record_use(&old, &stream);
        assert_matches!(used, Err(Error::UseAfterFree { .. }));
    } else {
        let used = resource.record_use(&old, &stream);
        assert_matches!(used, Err(Error::Stream(_)));
    }
}

/// Held and used bytes cover the live bytes, and peaks can be reset.
fn figures(rig: &Rig, resource: &dyn MemoryResource) {
    let stream = rig.stream();
    let before = resource.usage().unwrap();
    let block = take(&resource, 3 * MIB, &stream);
    let with = resource.usage().unwrap();
    assert!(
        with.used.current >= before.used.current.min(1) + 3 * MIB as u64,
        "{with:?}"
    );
    assert!(with.reserved.current >= with.used.current, "{with:?}");
    assert!(with.used.peak >= with.used.current && with.reserved.peak >= with.reserved.current);
    resource.deallocate_block(block).unwrap();
    resource.reap().unwrap();
    stream.synchronize().unwrap();
    resource.trim(0).unwrap();
    let after = resource.usage().unwrap();
    assert_eq!(
        (after.used.current, after.reserved.current),
        (0, 0),
        "{after:?}"
    );
    resource.reset_peak_stats();
    let after = resource.usage().unwrap();
    assert_eq!((after.used.peak, after.reserved.peak), (0, 0), "{after:?}");
}

/// Random sizes in random order, each block's contents whole until it goes.
fn mixes(rig: &Rig, resource: &dyn MemoryResource) {
    let stream = rig.stream();
    let mut random = Rng::new(7);
    let mut live: Vec<(RawBlock, u32)> = Vec::new();
    let mut bytes = 0;
    for step in 0..400u32 {
        if live.len() < 30 && random.below(100) < 60 {
            let bits = 2 + random.below(17);
            let size = 4 * (1 + random.below(1 << bits)) as usize;
            let block = take(&resource, size, &stream);
            rig.stamp(block.ptr(), size, step, &stream);
            bytes += size as u64;
            live.push((block, step));
        } else if !live.is_empty() {
            let (block, word) = live.swap_remove(random.below(live.len() as u64) as usize);
            assert_eq!(
                rig.mismatches(block.ptr(), block.id().bytes(), word, &stream),
                0
            );
            bytes -= block.id().bytes() as u64;
            resource.deallocate_block(block).unwrap();
        }
        assert_eq!(resource.usage().unwrap().requested.current, bytes);
        let mut ranges = BTreeMap::new();
        for (block, _) in &live {
            assert_eq!(
                ranges.insert(block.ptr(), block.ptr() + block.id().bytes() as u64),
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
        resource.deallocate_block(block).unwrap();
    }
    resource.reap().unwrap();
    assert_eq!(held(&resource), (0, 0));
}

/// Threads on streams of their own, blocks freed by other threads.
fn threads(rig: &Rig, resource: &dyn MemoryResource) {
    let streams: Vec<_> = (0..4).map(|_| rig.stream()).collect();
    let (sender, receiver) = std::sync::mpsc::channel::<RawBlock>();
    std::thread::scope(|scope| {
        for (number, stream) in streams.iter().enumerate() {
            let sender = sender.clone();
            scope.spawn(move || {
                let mut random = Rng::new(number as u64 + 1);
                for step in 0..100 {
                    let size = 1 + random.below(100_000) as usize;
                    let block = take(&resource, size, stream);
                    match step % 3 {
                        0 => sender.send(block).unwrap(),
                        1 => {
                            let seen = resource.state(&block.id());
                            assert_eq!(seen, BlockState::Live);
                            resource.deallocate_block(block).unwrap();
                        }
                        _ => {
                            resource.deallocate_block(block).unwrap();
                            resource.reap().unwrap();
                            if step % 10 == 0 {
                                resource.trim(0).unwrap();
                            }
                        }
                    }
                }
            });
        }
        drop(sender);
        scope.spawn(move || {
            for block in receiver {
                resource.deallocate_block(block).unwrap();
            }
        });
    });
    resource.reap().unwrap();
    assert_eq!(held(&resource), (0, 0));
}

/// When memory runs out, the error has the figures, nothing is lost, and later requests succeed.
fn out_of_memory(rig: &Rig, resource: &dyn MemoryResource) {
    let stream = rig.stream();
    let most = 64 * MIB;
    let mut live = Vec::new();
    let error = loop {
        match ask(&resource, most, &stream) {
            Ok(block) => live.push(block),
            Err(error) => break error,
        }
        assert!(live.len() < 10_000, "no end of memory");
    };
    assert!(error.is_out_of_memory(), "{error:?}");
    assert!(!live.is_empty());
    let whole = live.len() as u64 * most as u64;
    assert_eq!(resource.usage().unwrap().requested.current, whole);
    let kept = live.len();
    resource.deallocate_block(live.pop().unwrap()).unwrap();
    resource.reap().unwrap();
    live.push(take(&resource, most, &stream));
    assert_eq!(live.len(), kept);
    for block in live {
        resource.deallocate_block(block).unwrap();
    }
    resource.reap().unwrap();
    resource.trim(0).unwrap();
    assert_eq!(held(&resource), (0, 0));
    // The driver's refusal, whatever its text, is classified by its code.
    let Some(sim) = rig.sim() else { return };
    let code = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    for name in ["cuMemAlloc_v2", "cuMemCreate", "cuMemAllocFromPoolAsync"] {
        sim.fail(FailPlan::call(name, code).unwrap().times(1000));
    }
    let refused = ask(&resource, 200 * MIB, &stream);
    assert!(refused.unwrap_err().is_out_of_memory());
    sim.clear_failures();
    let block = take(&resource, MIB, &stream);
    resource.deallocate_block(block).unwrap();
    resource.reap().unwrap();
}

/// A block that is given back while its stream is busy is not touched early by another stream,
/// nor one that another stream uses.
fn streams(rig: &Rig, resource: &dyn MemoryResource) {
    let [a, b] = rig.streams();
    for foreign in [false, true] {
        if foreign && resource.use_tracking() == UseTracking::None {
            continue;
        }
        let block = take(&resource, 4 * MIB, &a);
        let (ptr, id) = (block.ptr(), block.id());
        rig.stamp(ptr, 4 * MIB, 1, &a);
        let user = if foreign { &b } else { &a };
        if foreign {
            if resource.use_tracking() == UseTracking::Access {
                resource.finish_use(&id, &a, Access::Write).unwrap();
                resource.prepare_use(&id, &b, Access::ReadWrite).unwrap();
            } else {
                a.synchronize().unwrap();
            }
        }
        let busy = rig.busy(user);
        rig.stamp(ptr, 4 * MIB, 2, user);
        if foreign {
            match resource.use_tracking() {
                UseTracking::Access => {
                    resource.finish_use(&id, &b, Access::ReadWrite).unwrap();
                }
                _ => resource.record_use(&id, &b).unwrap(),
            }
        }
        resource.deallocate_block(block).unwrap();
        let other = if foreign { &a } else { &b };
        let next = take(&resource, 4 * MIB, other);
        rig.stamp(next.ptr(), 4 * MIB, 3, other);
        busy.release();
        assert_eq!(rig.mismatches(next.ptr(), 4 * MIB, 3, other), 0);
        resource.deallocate_block(next).unwrap();
        resource.reap().unwrap();
    }
}

/// Memory goes back while its stream is busy, and another stream asks for the same.
fn other_streams(rig: &Rig, resource: &dyn MemoryResource) {
    let [a, b] = rig.streams();
    for first_freed in [true, false] {
        let block = take(&resource, 3 * MIB, &a);
        let busy = rig.busy(&a);
        rig.stamp(block.ptr(), 3 * MIB, 1, &a);
        resource.deallocate_block(block).unwrap();
        let other = take(&resource, 3 * MIB, &b);
        // Were it the same memory without a wait, the simulator would report a race.
        rig.stamp(other.ptr(), 3 * MIB, 2, &b);
        if first_freed {
            resource.deallocate_block(other).unwrap();
            busy.release();
        } else {
            busy.release();
            resource.deallocate_block(other).unwrap();
        }
        a.synchronize().unwrap();
        b.synchronize().unwrap();
        resource.reap().unwrap();
    }
    // A stream of another device is refused, where there is one.
    if rig.driver.device_count().unwrap() > 1 {
        let device = rig.driver.device(1).unwrap();
        let context = Context::primary(&device).unwrap();
        let foreign = Stream::new(&context).unwrap();
        assert!(ask(&resource, 100, &foreign).is_err());
        assert_eq!(resource.usage().unwrap().requested.current, 0);
    }
}

/// A stream that was recorded comes before reuse, whether by one use or until the block is freed.
fn recorded_streams(rig: &Rig, resource: &dyn MemoryResource) {
    if resource.use_tracking() == UseTracking::None {
        return;
    }
    let [a, b] = rig.streams();
    for until_freed in [true, false] {
        let block = take(&resource, MIB, &a);
        let id = block.id();
        rig.stamp(block.ptr(), MIB, 1, &a);
        a.synchronize().unwrap();
        let busy = rig.busy(&b);
        if until_freed {
            // Work that comes later counts too.
            resource.record_stream(&id, &b).unwrap();
            rig.stamp(block.ptr(), MIB, 2, &b);
        } else {
            rig.stamp(block.ptr(), MIB, 2, &b);
            resource.record_use(&id, &b).unwrap();
        }
        resource.deallocate_block(block).unwrap();
        let gone = resource.record_stream(&id, &b);
        assert_matches!(gone, Err(Error::UseAfterFree { .. }));
        let again = take(&resource, MIB, &a);
        rig.stamp(again.ptr(), MIB, 3, &a);
        busy.release();
        assert_eq!(rig.mismatches(again.ptr(), MIB, 3, &a), 0);
        resource.deallocate_block(again).unwrap();
        resource.reap().unwrap();
        b.synchronize().unwrap();
    }
}
