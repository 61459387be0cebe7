//! Log lines, and their frequency.
#![cfg(feature = "sim")]

mod calls_back;
#[path = "../common/mod.rs"]
mod common;
mod trial;

use std::cell::{Cell, RefCell};
use std::sync::Once;

use common::prelude::*;
use cualloc::Tag;
use cualloc::pool::{DriverPool, DriverPoolConfig, PinnedConfig, PinnedPool, ThresholdPool};
use cualloc::resource::{AccessOrdered, Launch, MemoryResource};

/// Gets the text of a line.
type Call = Box<dyn FnMut(&str)>;

thread_local! {
    /// The lines logged by the calling thread.
    static LINES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    /// The events that allocators logged on this thread.
    static DEEDS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    /// The action of the logger at each line of the thread, except for lines that it causes itself.
    static CALL: Cell<Option<Call>> = const { Cell::new(None) };
}

struct Collector;

/// Collects what is logged from here on.
fn collect() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        log::set_logger(&Collector).unwrap();
        log::set_max_level(log::LevelFilter::Trace);
    });
    taken();
}

/// The lines logged by the calling thread since the last call.
fn taken() -> Vec<String> {
    LINES.take()
}

impl log::Log for Collector {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        assert_unlocked(record);
        let text = record.args().to_string();
        let debug = ["Some(", "None", "Ok(", "Err("];
        assert!(
            !debug.iter().any(|form| text.contains(form)),
            "a value in Rust's Debug form: {text}"
        );
        if let Some(mut call) = CALL.take() {
            call(&text);
            CALL.set(Some(call));
        }
        if record.level() >= log::Level::Info && record.target().starts_with("cualloc::allocator") {
            DEEDS.with_borrow_mut(|lines| lines.push(record.args().to_string()));
        } else if record.level() <= log::Level::Info {
            LINES.with_borrow_mut(|lines| lines.push(record.args().to_string()));
        }
    }

    fn flush(&self) {}
}

#[test]
fn allocators_log_the_memory_they_take_and_release() {
    collect();
    for policy in [Policy::Packed, Policy::Classic] {
        only(policy, |rig| {
            DEEDS.take();
            let allocator = rig.allocator();
            let id = allocator.id();
            let stream = rig.stream();
            drop(allocator.allocate(5 * MIB, &stream).unwrap());
            let reserved = allocator.stats().all.reserved.current;
            allocator.set_limit(Some(64 << 20));
            let released = allocator.empty_cache().unwrap().released;
            assert_eq!(released, reserved);
            allocator.set_limit(None);
            let (name, held) = (policy.name(), format!("{}.00 MiB", reserved >> 20));
            let said = DEEDS.take();
            let expected = [
                format!("allocator {id} on device 0: policy {name}, no limit, views o"),
                format!(
                    "allocator {id}: allocating {held} from the driver for a request of 5.00 MiB: \
                     all free memory together is less than that"
                ),
                format!("allocator {id}: limit 64.00 MiB"),
                format!("allocator {id}: released {held} to the driver, 0 B pending"),
                format!("allocator {id}: no limit"),
            ];
            assert_eq!(said.len(), expected.len(), "{said:?}");
            for (line, start) in said.iter().zip(&expected) {
                assert!(line.starts_with(start), "{line}: not {start}");
            }
        });
    }
}

/// S3.3: a drop of a pool's buffer neither panics nor fails for what its pool could not give back, and says so
/// rarely.
#[test]
fn s3_3_drops_of_pooled_buffers_log_what_failed() {
    collect();
    only_simulated(Policy::Packed, |rig, sim| {
        let config = Config::new().policy(rig.policy);
        let pool = ThresholdPool::on_driver(&rig.driver, 0, config);
        let stream = rig.stream();
        pool.set_release_threshold(Some(0)).unwrap();
        let mut logged = Vec::new();
        for _ in 0..5 {
            let buffer = pool.uninit::<u8>(4 * MIB, &stream).unwrap();
            sim.fail(FailPlan::call("cuMemUnmap", CUresult::CUDA_ERROR_NOT_PERMITTED).unwrap());
            taken();
            drop(buffer);
            logged.push(taken());
        }
        let lines: Vec<_> = logged.iter().map(Vec::len).collect();
        assert_eq!(lines, [1, 1, 0, 1, 0], "{logged:?}");
        assert!(logged[0][0].contains("surplus"), "{logged:?}");
        assert_eq!(pool.usage().unwrap().used.current, 0);
        pool.trim(0).unwrap();
    });
}

/// S3.8: a driver's pool that its drop could not destroy is reported.
#[test]
fn s3_8_a_drop_that_destroys_no_pool_is_logged() {
    collect();
    only_simulated(Policy::Packed, |rig, sim| {
        let pool = DriverPool::new(&rig.context, DriverPoolConfig::new()).unwrap();
        sim.fail(FailPlan::call("cuMemPoolDestroy", CUresult::CUDA_ERROR_NOT_PERMITTED).unwrap());
        taken();
        drop(pool);
        let lines = taken();
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("a memory pool"), "{lines:?}");
    });
}

/// A page-locked buffer whose work has an unknown end is reported as leaked, once; one that a refused query says
/// nothing about is not.
#[test]
fn a_leaked_page_locked_buffer_is_logged_once() {
    collect();
    only_simulated(Policy::Packed, |rig, sim| {
        let config = PinnedConfig::new().initial(1).buffer_bytes(64 * KIB);
        let pool = PinnedPool::new(&rig.context, config).unwrap();
        let mut buffer = pool.acquire::<u8>(1).unwrap();
        buffer.record_use(&rig.stream()).unwrap();
        drop(buffer);
        taken();
        let leaks = |code| {
            sim.fail(FailPlan::call("cuEventQuery", code).unwrap());
            assert_eq!(pool.usage().cached_blocks, 0);
            sim.clear_failures();
            let lines = taken().into_iter();
            let leaks = lines.filter(|line| line.contains("leaking page-locked memory"));
            leaks.count()
        };
        let codes = [
            CUresult::CUDA_ERROR_NOT_PERMITTED,
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
        ];
        assert_eq!(codes.map(leaks), [0, 1, 0]);
    });
}

/// S5.42: a recorder that is dropped without a commit says how many buffers, on which stream, in which mode; in
/// debug builds, once, and never if it was committed.
#[test]
fn s5_42_an_abandoned_recorder_warns() {
    collect();
    each(|rig| {
        let (resource, stream) = (AccessOrdered::new(rig.allocator()), rig.stream());
        let tag = Tag::new("test");
        let blocks = [(); 2].map(|()| {
            resource
                .allocate_block(&Request::new(64).tag(tag), &stream)
                .unwrap()
        });
        for (mut recorder, name) in [
            (Launch::strict(&resource, &stream), "strict"),
            (Launch::permissive(&resource, &stream), "permissive"),
        ] {
            recorder.read(&blocks[0]).unwrap();
            recorder.write(&blocks[1]).unwrap();
            taken();
            drop(recorder);
            let lines = taken();
            if cfg!(debug_assertions) {
                let raw = format!("stream {:?}", stream.raw());
                assert_eq!(lines.len(), 1, "{lines:?}");
                for part in ["2 buffers", &raw, name, "without a commit"] {
                    assert!(lines[0].contains(part), "{part} in {lines:?}");
                }
            } else {
                assert!(lines.is_empty(), "{lines:?}");
            }
        }
        let mut recorder = Launch::strict(&resource, &stream);
        recorder.read(&blocks[0]).unwrap();
        recorder.preflight().unwrap();
        recorder.commit().unwrap();
        drop(Launch::strict(&resource, &stream));
        assert_eq!(taken(), [""; 0], "nothing was forgotten");
        for block in blocks {
            resource.deallocate_block(block).unwrap();
        }
        resource.reap().unwrap();
    });
}

/// R13: what the allocator recovers from by itself does not fill the log, however often it happens.
#[test]
fn r13_recoverable_trouble_is_logged_rarely() {
    collect();
    each_simulated(|rig, sim| {
        const BLOCK: usize = 12 * MIB;
        let (allocator, [a, b]) = rig.scene_limit(2 * BLOCK);
        taken();
        // Requests that fail, and ones that succeed after making room.
        for _ in 0..500 {
            assert!(allocator.allocate(3 * BLOCK, &a).is_err());
            drop(allocator.allocate(2 * BLOCK, &a).unwrap());
            drop(allocator.allocate(BLOCK, &a).unwrap());
        }
        let lines = taken();
        assert!(lines.is_empty(), "{lines:#?}");
        // Markers that cannot be recorded: said, but not each time.
        let code = sys::CUresult::CUDA_ERROR_NOT_SUPPORTED;
        sim.fail(
            FailPlan::call("cuEventRecord", code)
                .unwrap()
                .times(1 << 20),
        );
        for _ in 0..1000 {
            let block = allocator.allocate(BLOCK, &a).unwrap();
            block.record_stream(&b).unwrap();
            drop(block);
            allocator.synchronize().unwrap();
        }
        sim.clear_failures();
        // Not one for each free: streams that are idle at the request need none.
        assert!(allocator.stats().failed_markers >= 100);
        let lines = taken();
        assert!((1..=16).contains(&lines.len()), "{} lines", lines.len());
    });
}
