//! What a marker covers, and what markers cost.

use std::sync::{Mutex, PoisonError};

use crate::common::*;
use crate::two_devices;
use cualloc::allocator::{Allocator, Config, Policy};
use cualloc::driver::{Context, Driver, Stream, sys};
use cualloc::sim::{Mode, SimConfig, Simulator};

type EventRecord = unsafe extern "C" fn(sys::CUevent, sys::CUstream) -> sys::CUresult;
type Interlude = Box<dyn FnOnce() + Send>;

/// The driver's own function, and what to do once right after a call of it.
static RECORD: Mutex<(Option<EventRecord>, Option<Interlude>)> = Mutex::new((None, None));

unsafe extern "C" fn record_then(event: sys::CUevent, stream: sys::CUstream) -> sys::CUresult {
    let (real, interlude) = {
        let mut hook = RECORD.lock().unwrap_or_else(PoisonError::into_inner);
        (hook.0.unwrap(), hook.1.take())
    };
    // SAFETY: the caller's arguments.
    let code = unsafe { real(event, stream) };
    if let Some(interlude) = interlude {
        interlude();
    }
    code
}

/// R23: a block freed while a marker is being recorded is not covered by that marker.
#[test]
fn r23_marker_covers_no_free_that_came_after_its_record() {
    if on_cuda() {
        return eprintln!("SKIPPED on cuda: needs the simulator");
    }
    const BLOCK: usize = 12 * MIB;
    for policy in [Policy::Packed, Policy::Classic] {
        let sim = Simulator::new(SimConfig::with_devices(1, 8 << 30)).unwrap();
        let mut functions = sim.functions();
        RECORD.lock().unwrap().0 = functions.cuEventRecord;
        functions.cuEventRecord = Some(record_then);
        // SAFETY: the simulator's functions, and one around one of them.
        let driver = unsafe { Driver::from_functions(functions) }.unwrap();
        let context = Context::primary(&driver, driver.device(0).unwrap()).unwrap();
        let config = Config::new().policy(policy);
        let allocator = Allocator::with_config(&context, config).unwrap();
        let [a, b] = [0, 1].map(|_| Stream::new(&context).unwrap());
        drop(allocator.allocate(512, &b).unwrap());
        let early = allocator.allocate(BLOCK, &a).unwrap();
        let late = allocator.allocate(BLOCK, &a).unwrap();
        let (early_ptr, late_ptr) = (early.ptr(), late.ptr());
        sim.set_mode(Mode::Manual);
        let (on, inside) = (a.clone(), context.clone());
        RECORD.lock().unwrap().1 = Some(Box::new(move || {
            let entered = inside.enter().unwrap();
            // SAFETY: the block is live.
            unsafe { entered.memset_d8(late.ptr(), 1, BLOCK, on.raw()) }.unwrap();
            drop(late);
        }));
        // Records a marker, during which the other block is used and freed.
        drop(early);
        assert!(RECORD.lock().unwrap().1.is_none(), "no marker was recorded");
        // The marker that was recorded first completes, the late use does not.
        assert_eq!(sim.complete_stream(a.id().unwrap(), 1), 1);
        let entered = context.enter().unwrap();
        let taken: Vec<_> = (0..2)
            .map(|_| {
                let block = allocator.allocate(BLOCK, &b).unwrap();
                // SAFETY: the block is live.
                unsafe { entered.memset_d8(block.ptr(), 2, BLOCK, b.raw()) }.unwrap();
                block
            })
            .collect();
        assert_eq!(
            taken[0].ptr(),
            early_ptr,
            "{policy:?}: covered and complete"
        );
        let reports = sim.reports();
        sim.complete_all();
        assert!(
            reports.is_empty() && sim.reports().is_empty(),
            "{:#?}",
            sim.reports()
        );
        // Either elsewhere, or behind a wait.
        assert!(taken[1].ptr() != late_ptr || driver.calls().get("cuStreamWaitEvent") > 0);
        drop(taken);
        sim.set_mode(Mode::Instant);
        allocator.close().unwrap();
    }
}

/// R32: in steady state no event is created.
#[test]
fn r32_steady_state_creates_no_events() {
    each(|rig| {
        let allocator = rig.limited(200 * MIB);
        let streams: [Stream; 3] = rig.streams();
        if let Some(sim) = rig.maybe_sim() {
            sim.set_mode(Mode::Lag(4));
        }
        let round = |at: usize| {
            let (own, other) = (&streams[at % 3], &streams[(at + 1) % 3]);
            for bytes in [3 * KIB, 3 * MIB, 12 * MIB] {
                let block = allocator.allocate(bytes, own).unwrap();
                block.record_stream(other).unwrap();
                // A stream that is idle when somebody asks needs no marker.
                rig.stamp(block.ptr(), 3 * KIB, 1, own);
                drop(block);
            }
            if let Some(sim) = rig.maybe_sim() {
                sim.advance_row();
            } else {
                own.synchronize().unwrap();
            }
        };
        // Long enough for the batches of small blocks, too.
        (0..4000).for_each(round);
        let (events, markers) = (rig.calls("cuEventCreate"), allocator.stats().markers);
        (0..1000).for_each(round);
        if rig.maybe_sim().is_some() {
            let recorded = allocator.stats().markers - markers;
            assert!(recorded > 100, "{recorded} markers are recorded");
        }
        assert_eq!(rig.calls("cuEventCreate"), events);
        rig.close(&allocator);
    });
}

/// R33: events are reused in the context that they were made in only.
#[test]
fn r33_event_pools_are_per_context() {
    two_devices(|rig, second| {
        const BLOCK: usize = 12 * MIB;
        let allocator = rig.allocator();
        let [a, b] = rig.streams();
        let foreign = Stream::new(second).unwrap();
        for round in 0..30 {
            let block = allocator.allocate(BLOCK, &a).unwrap();
            let first = if round % 2 == 0 { &foreign } else { &b };
            block.record_use(first).unwrap();
            block.record_stream(&foreign).unwrap();
            drop(block);
        }
        let stats = allocator.stats();
        assert!(stats.markers > 30);
        assert_eq!(stats.failed_markers, 0);
        assert!(
            rig.calls("cuEventCreate") < stats.markers,
            "events are reused"
        );
        rig.close(&allocator);
    });
}
