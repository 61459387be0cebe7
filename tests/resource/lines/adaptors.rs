//! Logging, probes and tracking.

use cualloc::driver::Stream;
use cualloc::resource::*;
use cualloc::sim::{SimConfig, Simulator};
use cualloc::{Allocator, Error, Refused, Request};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::*;
use crate::common::*;

/// S5.31, S5.32: one record per call with all its fields, in one order.
#[test]
fn s5_31_s5_32_records_are_complete() {
    packed(|rig| {
        let stream = rig.stream();
        let ring = Arc::new(RingSink::default());
        let clock = Clock::manual();
        clock.advance(std::time::Duration::from_secs(5));
        let budget = Budget::new(rig.allocator(), Some(1000));
        let log = Logging::new(budget, ring.clone()).with_clock(&clock);
        let block = log
            .allocate_block(&Request::new(1000).tag("named"), &stream)
            .unwrap();
        let (ptr, generation) = (block.ptr(), block.id().generation());
        assert!(ask(&log, 1, &stream).is_err());
        log.reap().unwrap();
        let log = &log;
        std::thread::scope(|scope| {
            scope.spawn(move || log.deallocate_block(block).unwrap());
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
        assert!(!records[1].message.is_empty());
        assert_eq!(records[2].action, LogAction::Reap);
        assert_eq!(records[3].action, LogAction::Deallocate);
        let columns = LogRecord::CSV_HEADER.split(',').count();
        assert!(
            records
                .iter()
                .all(|r| r.to_csv().split(',').count() == columns)
        );
        let line = records[1].to_csv();
        assert!(
            line.contains("allocate failure") && line.ends_with(",test,out of budget"),
            "{line}"
        );
        assert_ne!(records[3].thread, first.thread);
        ring.clear();
        assert!(ring.is_empty());
        // A sink that fails costs its caller nothing.
        let broken = Logging::new(rig.allocator(), |_: &LogRecord| {
            Err(std::io::Error::other("full"))
        });
        let block = take(&broken, 8, &stream);
        broken.deallocate_block(block).unwrap();
        assert_eq!(broken.dropped(), 2);
    });
}

/// S5.68, S5.69: nothing is allocated without a sink, and the ring is bounded.
#[test]
fn s5_68_s5_69_null_sink_allocates_nothing_and_the_ring_is_bounded() {
    packed(|rig| {
        let stream = rig.stream();
        let plain = rig.allocator();
        let logged = Logging::new(plain.clone(), ());
        let count = |resource: &dyn MemoryResource| {
            let before = ALLOCATIONS.with(Cell::get);
            for _ in 0..100 {
                let block = take(&resource, 512, &stream);
                resource.deallocate_block(block).unwrap();
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

/// A use whose end cannot be marked: the call says so, and the last fill comes after whatever the stream was given
/// until the block is freed. Where even that cannot be marked the block is not taken back.
#[test]
fn poison_is_ordered_after_uses_that_could_not_be_recorded() {
    each(|rig| {
        let Some(sim) = rig.sim() else { return };
        let [a, b] = rig.streams();
        let fail = |call| sim.fail(refusal(call));
        for finish in [false, true] {
            let resource = poisoned(rig.allocator());
            let made = ask(&resource, 4096, &a);
            let block = made.unwrap();
            let (ptr, id) = (block.ptr(), block.id());
            a.synchronize().unwrap();
            let hold = rig.hold(&b);
            rig.stamp(ptr, 4096, 0x0101_0101, &b);
            fail("cuEventRecord");
            let recorded = match finish {
                true => resource.finish_use(&id, &b, Access::Write),
                false => resource.record_use(&id, &b),
            };
            let error = recorded.unwrap_err();
            assert_eq!(error.driver_error().map(|e| e.code()), Some(REFUSAL));
            // Nor can it be marked now: there is no fill, and the block is the caller's still.
            fail("cuEventRecord");
            let refused = resource.deallocate_block(block).unwrap_err();
            assert!(refused.error.driver_error().is_some());
            assert!(a.is_complete().unwrap(), "there is a fill");
            resource.deallocate_block(*refused.value).unwrap();
            assert!(!a.is_complete().unwrap(), "the fill came before the use");
            hold.release();
            rig.settle(&a);
            assert_eq!(sim.read_memory(ptr, 4096), Some(vec![0xDD; 4096]));
        }
    });
}

/// S5.70, S5.11: fills are in the order of the block's stream, after all recorded uses.
#[test]
fn s5_11_s5_70_poison_comes_after_recorded_uses() {
    each(|rig| {
        let Some(sim) = rig.sim() else { return };
        let stacks: [Box<dyn MemoryResource>; 2] = [
            Box::new(poisoned(asynchronous(rig)).poison_allocated(Some(0xCD))),
            Box::new(poisoned(rig.allocator()).poison_allocated(Some(0xCD))),
        ];
        for resource in stacks {
            let [a, b] = rig.streams();
            let block = take(&resource, 4096, &a);
            let (ptr, id) = (block.ptr(), block.id());
            a.synchronize().unwrap();
            assert_eq!(sim.read_memory(ptr, 4096), Some(vec![0xCD; 4096]));
            let hold = rig.hold(&b);
            rig.stamp(ptr, 4096, 0x0101_0101, &b);
            resource.record_use(&id, &b).unwrap();
            resource.deallocate_block(block).unwrap();
            // The fill waits for b, without a wait on the host.
            assert!(!a.is_complete().unwrap(), "the fill came before the use");
            hold.release();
            rig.settle(&a);
            assert_eq!(sim.read_memory(ptr, 4096), Some(vec![0xDD; 4096]));
            resource.reap().unwrap();
        }
    });
}

/// The variables of the probes, and what each sets.
const PROBES: [(&str, &str); 3] = [
    ("CUALLOC_POISON_ALLOC", "poison_allocated: Some(221)"),
    ("CUALLOC_POISON_FREE", "poison_freed: Some(221)"),
    ("CUALLOC_OVERLAP_GUARD", "overlap: true"),
];

/// S5.11: each probe has a variable of its own; what is not set, 0 or empty is off.
#[test]
fn s5_11_each_variable_turns_its_probe_on() {
    let told = |set: Option<(&str, &str)>| {
        let mut child = itself("lines::adaptors::probe_child");
        child.env("CUALLOC_PROBE_CHILD", "1");
        for (name, _) in PROBES {
            child.env_remove(name);
        }
        child.envs(set);
        let output = child.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}");
        text
    };
    for (at, (name, _)) in PROBES.iter().enumerate() {
        let text = told(Some((name, "1")));
        for (other, (_, sign)) in PROBES.iter().enumerate() {
            assert_eq!(text.contains(sign), other == at, "{name}: {sign} in {text}");
        }
        assert_eq!(text.contains("new memory: 221"), at == 0, "{text}");
    }
    for set in [None, Some((PROBES[0].0, "0")), Some((PROBES[1].0, ""))] {
        let text = told(set);
        let on = PROBES.iter().any(|(_, sign)| text.contains(sign));
        assert!(!on && !text.contains("new memory: 221"), "{text}");
    }
}

/// The other process of the test above, and nothing by itself: what the environment asks for, also of the
/// usual runtime, and once for all.
#[test]
fn probe_child() {
    if std::env::var_os("CUALLOC_PROBE_CHILD").is_none() {
        return;
    }
    let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30)).unwrap();
    let driver = sim.driver().unwrap();
    let context = driver.context(0).unwrap();
    let allocator = Allocator::with_config(&context, cualloc::Config::new()).unwrap();
    let asked = || format!("{:?}", Sanitizer::from_env(allocator.clone()));
    let checks = asked();
    println!("{checks}");
    let resource = standard(&context).unwrap();
    let stream = Stream::new(&context).unwrap();
    let block = take(&resource, 64, &stream);
    stream.synchronize().unwrap();
    let memory = sim.read_memory(block.ptr(), 1).unwrap();
    println!("new memory: {}", memory[0]);
    resource.deallocate_block(block).unwrap();
    resource.reap().unwrap();
    for (name, _) in PROBES {
        // SAFETY: no other thread of this process reads the environment.
        unsafe { std::env::set_var(name, "1") };
    }
    assert_eq!(asked(), checks, "read once");
}

/// S5.71: an overlap is an error value, and no panic.
#[test]
fn s5_71_overlap_is_an_error_with_both_ranges() {
    packed(|rig| {
        let stream = rig.stream();
        let twice = Twice(rig.allocator(), Mutex::default());
        let probe = Sanitizer::new(twice).check_overlap(true);
        let block = take(&probe, 600, &stream);
        match ask(&probe, 600, &stream) {
            Err(Error::Overlap { new, old }) => {
                assert_eq!((new.0, old), (block.ptr(), (block.ptr(), 1024)));
            }
            other => panic!("{other:?}"),
        }
        probe.deallocate_block(block).unwrap();
    });
}

/// R69: the entry goes before the block does.
#[test]
fn r69_tracking_erases_before_the_free() {
    packed(|rig| {
        let stream = rig.stream();
        let seen = Arc::new(AtomicU64::new(u64::MAX));
        let tracked: Arc<std::sync::OnceLock<Arc<Sanitizer<Spy>>>> = Arc::default();
        let (look, count) = (Arc::clone(&tracked), Arc::clone(&seen));
        let spy = Spy(
            rig.allocator(),
            Box::new(move || {
                let live = look.get().map_or(0, |t| t.live().len());
                count.store(live as u64, Ordering::SeqCst);
            }),
        );
        let adaptor = Arc::new(Sanitizer::new(spy));
        let _ = tracked.set(Arc::clone(&adaptor));
        let block = take(&adaptor, 64, &stream);
        adaptor.deallocate_block(block).unwrap();
        assert_eq!(
            seen.load(Ordering::SeqCst),
            0,
            "the entry was there during the free"
        );
    });
}

/// Runs something before each deallocation.
struct Spy(Allocator, Box<dyn Fn() + Send + Sync>);

// SAFETY: passes everything on.
unsafe impl MemoryResource for Spy {
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        MemoryResource::allocate_block(&self.0, request, stream)
    }
    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        (self.1)();
        self.0.deallocate_block(block)
    }
    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.0)
    }
}
