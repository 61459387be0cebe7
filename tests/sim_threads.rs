//! Threads share a simulator: each has its own current context, capture mode and site.

use cualloc::driver::{Context, Stream};
use cualloc::sim::{Report, SimConfig, Simulator};
use std::sync::Barrier;

#[test]
fn threads_work_side_by_side_and_leave_nothing() {
    let sim = Simulator::new(SimConfig::with_devices(2, 1 << 30)).unwrap();
    let driver = sim.driver().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8usize {
            let driver = &driver;
            scope.spawn(move || {
                let device = driver.device(thread % 2).unwrap();
                let context = Context::primary(driver, device).unwrap();
                let stream = Stream::new(&context).unwrap();
                for round in 0..200usize {
                    let entered = context.enter().unwrap();
                    let bytes = 1 + thread * 1000 + round;
                    let memory = entered.mem_alloc(bytes).unwrap();
                    let event = entered.create_event().unwrap();
                    // SAFETY: memory and stream live until after the synchronisation.
                    unsafe {
                        entered
                            .memset_d8(memory, thread as u8, bytes, stream.raw())
                            .unwrap();
                        entered.record(&event, stream.raw()).unwrap();
                    }
                    entered.wait(&event).unwrap();
                    let found = entered.driver().is_forked_child();
                    assert!(!found);
                    // SAFETY: no longer used.
                    unsafe { entered.mem_free(memory) }.unwrap();
                }
                assert!(
                    // SAFETY: its owner keeps it meanwhile.
                    unsafe { Context::current(driver) }.unwrap().is_none(),
                    "left as it was"
                );
            });
        }
    });
    assert!(sim.take_reports().is_empty());
    assert!(sim.leaks().is_empty());
    assert_eq!(driver.calls().get("cuMemAlloc_v2"), 8 * 200);
}

#[test]
fn sites_belong_to_threads() {
    let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30)).unwrap();
    let driver = sim.driver().unwrap();
    let context = Context::primary(&driver, driver.device(0).unwrap()).unwrap();
    let memory = context.enter().unwrap().mem_alloc(512).unwrap();
    let turn = Barrier::new(2);
    std::thread::scope(|scope| {
        for label in ["left", "right"] {
            let (sim, context, turn) = (&sim, &context, &turn);
            scope.spawn(move || {
                let stream = Stream::new(context).unwrap();
                sim.set_site(label);
                turn.wait();
                let entered = context.enter().unwrap();
                // SAFETY: simulated memory; the race is what the test is about.
                unsafe { entered.memset_d8(memory, 1, 512, stream.raw()) }.unwrap();
            });
        }
    });
    let reports = sim.take_reports();
    let [Report::Race { first, second }] = &reports[..] else {
        panic!("{reports:?}");
    };
    let mut labels = [first.label.as_str(), second.label.as_str()];
    labels.sort_unstable();
    assert_eq!(labels, ["left", "right"]);
}
