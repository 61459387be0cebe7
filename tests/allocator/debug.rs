//! Debug modes: injected errors, and the findings about them.

use std::ops::Deref;

use super::common::prelude::*;
use cualloc::error::{Finding, Misuse};
use cualloc::record::Context;

struct Scene {
    simulator: Simulator,
    allocator: Allocator,
    stream: Stream,
}

impl Scene {
    fn new(settings: &str) -> Scene {
        let simulator = Simulator::new(SimConfig::with_devices(1, 1 << 30)).unwrap();
        let context = simulator.driver().unwrap().context(0).unwrap();
        let config: Config = settings.parse().unwrap();
        let allocator = Allocator::with_config(&context, config).unwrap();
        let stream = Stream::new(&context).unwrap();
        Scene {
            simulator,
            allocator,
            stream,
        }
    }

    fn take(&self, bytes: usize) -> Block {
        self.allocator.allocate(bytes, &self.stream).unwrap()
    }

    fn write(&self, at: u64, bytes: usize, stream: &Stream) {
        // SAFETY: the simulator checks what is written where; an error is what the tests plant.
        unsafe { stream.memset(at, 7, bytes) }.unwrap();
    }

    /// The findings when the allocator is closed; the simulator had no reports.
    fn close(&self) -> Vec<Finding> {
        self.allocator.close().unwrap();
        assert_eq!(self.simulator.reports(), []);
        self.findings()
    }

    fn only(&self) -> Finding {
        let found = self.allocator.findings();
        assert_eq!(found.len(), 1, "{found:?}");
        found[0].clone()
    }
}

impl Deref for Scene {
    type Target = Allocator;

    fn deref(&self) -> &Allocator {
        &self.allocator
    }
}

/// Under both policies, with these modes.
fn each(modes: &str, test: impl Fn(&Scene)) {
    for policy in ["packed", "classic"] {
        test(&Scene::new(&format!("policy={policy},debug={modes}")));
    }
}

#[test]
fn a_write_past_a_block_is_found_at_its_free_and_by_a_check() {
    each("guard", |scene| {
        for (bytes, tag) in [
            (63, "small"),
            (512, "whole"),
            (3 * MIB, "large"),
            (3 * MIB + 5, "odd"),
        ] {
            let before = scene.findings().len();
            let context = Context::new("train;forward").enter();
            let request = Request::new(bytes).tag(tag);
            let block = scene.allocate_with(request, &scene.stream).unwrap();
            context.enter();
            assert_eq!(block.size(), bytes as u64);
            assert_eq!(scene.usable_size(block.ptr()), Some(bytes as u64));
            scene.write(block.ptr(), bytes, &scene.stream);
            scene.check().unwrap();
            scene.write(block.ptr() + bytes as u64, 1, &scene.stream);
            let Err(Error::Misused(finding)) = scene.check() else {
                panic!("the byte behind {bytes} was not found");
            };
            assert_eq!(
                (finding.misuse, finding.offset),
                (Misuse::Overrun, bytes as u64)
            );
            assert_eq!((finding.address, finding.tag), (block.ptr(), tag));
            assert_eq!(finding.context.as_deref(), Some("train;forward"));
            assert_eq!(finding.requested, bytes as u64);
            let text = finding.to_string();
            let said =
                format!("byte {bytes} was written, 1 behind the end of the block of {bytes} bytes");
            assert!(text.contains(&said), "{text}");
            drop(block);
            let found = scene.findings();
            assert_eq!(found.len(), before + 2, "by the check and at the free");
            assert_eq!(found[before], found[before + 1]);
        }
        scene.check().unwrap();
        scene.allocator.close().unwrap();
    });
}

#[test]
fn a_write_after_the_free_is_found_when_the_block_leaves_quarantine() {
    each("quarantine:4M", |scene| {
        let block = scene.take(MIB);
        let at = block.ptr();
        let raw = block.into_raw();
        scene.raw_free(raw).unwrap();
        let again = scene.raw_free(raw);
        assert_matches!(again, Err(Error::NotLive { ptr }) if ptr == at);
        scene.write(at + 100_000, 1, &scene.stream);
        scene.stream.synchronize().unwrap();
        for _ in 0..3 {
            let other = scene.take(MIB);
            assert_ne!(other.ptr(), at, "it is held back");
        }
        assert!(scene.findings().is_empty());
        let others = [scene.take(2 * MIB), scene.take(2 * MIB)];
        drop(others);
        let finding = scene.only();
        assert_eq!(
            (finding.misuse, finding.address),
            (Misuse::UseAfterFree, at)
        );
        assert_eq!((finding.offset, finding.requested), (100_000, MIB as u64));
        assert!(
            finding
                .to_string()
                .starts_with("use after free: byte 100000 was written")
        );
        scene.allocator.close().unwrap();
        assert_eq!(scene.findings().len(), 1, "nothing else was written");
    });
}

#[test]
fn work_of_a_stream_that_was_not_recorded_is_a_use_after_free() {
    each("quarantine", |scene| {
        let side = scene.create_stream().unwrap();
        for recorded in [true, false] {
            let block = scene.take(MIB);
            scene.simulator.set_mode(Mode::Manual);
            scene.write(block.ptr(), MIB, &side);
            if recorded {
                block.record_stream(&side).unwrap();
            }
            drop(block);
            scene.simulator.complete_all();
        }
        assert!(scene.findings().is_empty());
        scene.allocator.close().unwrap();
        assert_eq!(scene.only().misuse, Misuse::UseAfterFree);
    });
}

#[test]
fn the_quarantine_is_emptied_before_memory_runs_out() {
    each("quarantine:1G", |scene| {
        scene.set_limit(Some(64 << 20));
        for _ in 0..20 {
            drop(scene.take(20 * MIB));
        }
        assert!(scene.stats().all.allocated.current > 0);
        assert_eq!(scene.close(), []);
    });
}

#[test]
fn new_and_freed_blocks_are_poisoned() {
    each("poison", |scene| {
        let block = scene.take(5000);
        let at = block.ptr();
        scene.stream.synchronize().unwrap();
        let read = || scene.simulator.read_memory(at, 5000).unwrap();
        assert_eq!(read(), [0xDD; 5000]);
        scene.write(at, 5000, &scene.stream);
        scene.stream.synchronize().unwrap();
        assert_eq!(read(), [7; 5000]);
        drop(block);
        assert_eq!(read(), [0xDD; 5000]);
        scene.allocator.close().unwrap();
    });
}

#[test]
fn blocks_that_are_left_are_listed_with_their_tags() {
    each("leaks+quarantine", |scene| {
        drop(scene.take(MIB));
        let tagged = Request::new(3000).tag("weights");
        let left = scene.allocate_with(tagged, &scene.stream).unwrap();
        let context = Context::new("serve;cache").enter();
        let other = scene.take(2 * MIB);
        context.enter();
        for _ in 0..2 {
            let refused = scene.allocator.close();
            assert_matches!(refused, Err(Error::InUse { count: 2, .. }));
            let mut found = scene.findings();
            found.sort_by_key(|finding| finding.requested);
            assert_eq!(found.len(), 2, "each once, however often it is tried");
            assert!(found.iter().all(|finding| finding.misuse == Misuse::Leak));
            assert_eq!((found[0].address, found[0].tag), (left.ptr(), "weights"));
            assert_eq!((found[1].address, found[1].tag), (other.ptr(), "untagged"));
            assert_eq!(found[1].context.as_deref(), Some("serve;cache"));
        }
        drop((left, other));
        scene.allocator.close().unwrap();
    });
}

#[test]
fn retired_and_raw_streams_are_waited_for_as_well() {
    each("guard+quarantine:1M+poison+leaks", |scene| {
        let raw = scene.create_stream().unwrap();
        let allocator = &scene.allocator;
        let streams = [raw.raw(), std::ptr::null_mut(), 2 as sys::CUstream];
        let [ptr, default, thread] = streams.map(|on| allocator.raw_allocate(1000, on).unwrap());
        allocator.raw_record_stream(default, raw.raw()).unwrap();
        allocator.raw_record_use(thread + 5, raw.raw()).unwrap();
        allocator.synchronize().unwrap();
        scene.simulator.busy(raw.raw(), 1_000_000).unwrap();
        scene.write(ptr, 1000, &raw);
        scene.write(default, 1000, &raw);
        allocator.raw_retire(raw.raw()).unwrap();
        for block in [ptr, default, thread] {
            allocator.raw_free(block).unwrap();
        }
        assert_eq!(scene.close(), []);
    });
}

#[test]
fn a_program_without_errors_has_no_findings() {
    each("guard+quarantine:3M+poison+leaks", |scene| {
        let mut kept: Vec<Block> = Vec::new();
        let side = scene.create_stream().unwrap();
        for round in 0..300usize {
            let bytes = 1 + (round * 7919) % 97 * ((round % 5) * 9000 + 100);
            let on = if round % 3 == 0 { &side } else { &scene.stream };
            let block = scene.allocate(bytes, on).unwrap();
            scene.write(block.ptr(), bytes, on);
            if round % 7 == 0 {
                block.record_stream(&side).unwrap();
                block.record_use(&scene.stream).unwrap();
            }
            kept.push(block);
            if kept.len() > 20 {
                drop(kept.swap_remove(round % 20));
            }
            if round % 50 == 0 {
                scene.check().unwrap();
                scene.trim(0).unwrap();
            }
        }
        let stats = scene.stats();
        assert!(stats.all.requested.current > 0);
        drop(kept);
        assert_eq!(scene.close(), []);
    });
}

/// The driver refuses each call of a check and a free in turn, and is slow: a fill or read of a debug mode whose wait
/// failed is still queued when the block's memory is reused or unmapped. Returns whether a call was refused.
fn refuses(scene: &Scene, call: &str, nth: u64) -> bool {
    let (allocator, simulator) = (&scene.allocator, &scene.simulator);
    let bytes = 20 * MIB - 100;
    simulator.set_mode(Mode::Manual);
    let block = scene.take(bytes);
    simulator.complete_all();
    let code = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    simulator.fail(FailPlan::call(call, code).unwrap().nth(nth));
    let _ = allocator.check();
    drop(block);
    drop(scene.take(2 * MIB));
    let refused = simulator.clear_failures() == 0;
    allocator.trim(0).unwrap();
    let next = scene.take(bytes);
    scene.write(next.ptr(), bytes, &scene.stream);
    simulator.complete_stream(scene.stream.id().unwrap(), usize::MAX);
    let read = || simulator.read_memory(next.ptr(), 4096).unwrap();
    assert_eq!(read(), [7; 4096]);
    simulator.complete_all();
    assert_eq!(read(), [7; 4096], "a late fill");
    drop(next);
    allocator.trim(0).unwrap();
    simulator.complete_all();
    assert_eq!(scene.close(), []);
    refused
}

#[test]
fn memory_is_not_reused_under_a_fill_or_read_that_may_still_be_queued() {
    let modes = [
        "poison",
        "quarantine:1M",
        "guard",
        "guard+quarantine:30M+poison",
    ];
    let calls = [
        ("cuStreamSynchronize", 2),
        ("cuMemsetD8Async", 0),
        ("cuMemcpyDtoHAsync_v2", 0),
    ];
    for modes in modes {
        for (call, least) in calls {
            for policy in ["packed", "classic"] {
                let config = format!("policy={policy},debug={modes}");
                let refused = |nth: &u64| refuses(&Scene::new(&config), call, *nth);
                let count = (1..=6).take_while(refused).count();
                assert!(count >= least, "{config}, {call}: {count}");
            }
        }
    }
}

/// Unchecked blocks are counted, at frees and when they leave the quarantine.
#[test]
fn blocks_that_cannot_be_checked_are_counted() {
    each("quarantine:1M", |scene| {
        let code = sys::CUresult::CUDA_ERROR_NOT_PERMITTED;
        let fail = |call| scene.simulator.fail(FailPlan::call(call, code).unwrap());
        fail("cuMemsetD8Async");
        drop(scene.take(1000));
        assert_eq!(scene.unchecked_frees(), 1);
        drop(scene.take(1000));
        fail("cuMemcpyDtoHAsync_v2");
        drop(scene.take(2 * MIB));
        assert_eq!(scene.unchecked_frees(), 2, "the block of 1000 bytes");
        scene.allocator.close().unwrap();
        assert_eq!(scene.unchecked_frees(), 2);
    });
}

/// A failed query of a block's stream leaves the block live; the stream may be retired and destroyed then.
#[test]
fn a_free_that_fails_keeps_no_handle_of_its_stream() {
    each_simulated(|rig, sim| {
        for modes in ["guard", "quarantine:1M", "poison+leaks"] {
            let config: Config = format!("debug={modes}").parse().unwrap();
            let allocator = rig.checked_with(config);
            let raw = RawStream::new(rig);
            let ptr = allocator.raw_allocate(MIB, raw.raw()).unwrap();
            let code = sys::CUresult::CUDA_ERROR_INVALID_HANDLE;
            sim.fail(FailPlan::call("cuStreamIsCapturing", code).unwrap());
            let free = || allocator.raw_free(ptr);
            assert_matches!(free(), Err(Error::Driver(_)));
            assert!(allocator.owns(ptr));
            allocator.retire(&raw.borrowed()).unwrap();
            raw.destroy();
            allocator.check().unwrap();
            free().unwrap();
            assert_matches!(free(), Err(Error::NotLive { .. }));
        }
    });
}

/// Of two frees of a block one is refused, even while the other one waits for the block's streams or reads its guard;
/// neither frees another block that has the address by then.
#[test]
fn a_block_is_freed_once_however_long_its_free_takes() {
    each_with_interludes(|rig, _| {
        for syncs in 1..=3 {
            let config: Config = "debug=guard+poison".parse().unwrap();
            let (allocator, [stream]) = rig.scene_with(config);
            let ptr = allocator.allocate(MIB - 100, &stream).unwrap().into_raw();
            let again = allocator.clone();
            after_nth("cuStreamSynchronize", syncs, move || {
                let refused = again.raw_free(ptr);
                assert_matches!(refused, Err(Error::NotLive { .. }));
            });
            allocator.raw_free(ptr).unwrap();
            assert!(!interlude::is_due(), "{syncs} waits");
            assert!(!allocator.owns(ptr));
        }
    });
}

/// [`interlude::after`] the `nth` call from now.
fn after_nth(call: &'static str, nth: u32, work: impl FnOnce() + 'static) {
    interlude::after(call, move || match nth {
        0 | 1 => work(),
        _ => after_nth(call, nth - 1, work),
    });
}

#[test]
fn a_block_freed_while_a_check_reads_it_is_freed_after_the_read() {
    each_with_interludes(|rig, _| {
        for modes in ["guard", "guard+quarantine:30M+poison"] {
            let config: Config = format!("debug={modes}").parse().unwrap();
            let (allocator, [stream]) = rig.scene_with(config);
            let block = allocator.allocate(20 * MIB - 400, &stream).unwrap();
            let (at, others, on) = (block.ptr(), allocator.clone(), stream.clone());
            // The first is the wait for the block's stream, the second that for the read.
            interlude::after("cuStreamSynchronize", move || {
                interlude::before("cuStreamSynchronize", move || {
                    drop(block);
                    let next = others.allocate(20 * MIB - 400, &on).unwrap();
                    assert_ne!(next.ptr(), at, "it is read");
                    let again = others.raw_free(at);
                    assert_matches!(again, Err(Error::NotLive { .. }));
                    drop(next);
                    others.trim(0).unwrap();
                });
            });
            allocator.check().unwrap();
            assert!(!interlude::is_due());
            drop(allocator.allocate(40 * MIB, &stream).unwrap());
            assert!(!allocator.owns(at));
            assert_eq!(allocator.findings(), []);
        }
    });
}

#[test]
fn a_check_ignores_a_block_that_is_freed_meanwhile() {
    each_with_interludes(|rig, _| {
        let config: Config = "debug=guard".parse().unwrap();
        let (allocator, [stream]) = rig.scene_with(config);
        let block = allocator.allocate(3 * MIB - 400, &stream).unwrap();
        let (at, others) = (block.ptr(), allocator.clone());
        interlude::after("cuStreamSynchronize", move || {
            drop(block);
            let next = others.allocate(3 * MIB - 20, &stream).unwrap();
            assert_eq!(next.ptr(), at);
            // SAFETY: the block has these bytes.
            unsafe { stream.memset(at, 7, 3 * MIB - 20) }.unwrap();
            stream.synchronize().unwrap();
            std::mem::forget(next);
        });
        allocator.check().unwrap();
        assert!(!interlude::is_due());
        allocator.raw_free(at).unwrap();
        assert_eq!(allocator.findings(), []);
    });
}
