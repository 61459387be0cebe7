//! Threads share a simulator: each has its own current context, capture mode and site.

use cualloc::driver::{Stream, sys};
use cualloc::sim::{Report, SimConfig, Simulator};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};

#[test]
fn sites_belong_to_threads() {
    let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30)).unwrap();
    let driver = sim.driver().unwrap();
    let context = driver.context(0).unwrap();
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

/// Each call has its two moments, by any thread; what a hook itself calls has none.
#[test]
fn hooks_run_around_calls_without_the_lock() {
    let sim = Arc::new(Simulator::new(SimConfig::with_devices(1, 1 << 30)).unwrap());
    let driver = sim.driver().unwrap();
    let context = driver.context(0).unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (other, log) = (driver.clone(), Arc::clone(&seen));
    sim.before(move |moment| {
        // The lock is free.
        let devices = other.device_count().ok();
        log.lock()
            .unwrap()
            .push((moment.call, moment.result, devices));
    });
    let log = Arc::clone(&seen);
    sim.after(move |moment| {
        log.lock()
            .unwrap()
            .push((moment.call, moment.result, Some(1)));
    });
    let stream = Stream::new(&context).unwrap();
    sim.clear_hooks();
    drop(stream);
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    assert!(seen.iter().all(|(_, _, devices)| *devices == Some(1)));
    let moments: Vec<_> = seen
        .iter()
        .filter(|(call, ..)| call.starts_with("cuStreamCreate"))
        .map(|(_, result, _)| *result)
        .collect();
    assert_eq!(moments, [None, Some(sys::CUresult::CUDA_SUCCESS)]);
    let inner = seen.iter().filter(|(call, ..)| *call == "cuDeviceGetCount");
    assert_eq!(inner.count(), 0, "calls of a hook");
}

/// A hook places an act of another thread inside a call: a capture that begins there is not this thread's.
#[test]
fn d4_a_hook_acts_as_another_thread_inside_a_call() {
    let sim = Arc::new(Simulator::new(SimConfig::with_devices(1, 1 << 30)).unwrap());
    let driver = sim.driver().unwrap();
    let context = driver.context(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let entered = context.enter().unwrap();
    let (table, raw) = (sim.functions(), stream.raw() as usize);
    let begun = Arc::new(AtomicU64::new(0));
    let (inner, number) = (Arc::downgrade(&sim), Arc::clone(&begun));
    sim.after(move |moment| {
        if moment.call != "cuStreamQuery" || number.load(Ordering::SeqCst) != 0 {
            return;
        }
        number.store(moment.number, Ordering::SeqCst);
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let begin = table.cuStreamBeginCapture_v2.unwrap();
        // SAFETY: the stream lives.
        let code = inner
            .upgrade()
            .map(|sim| sim.as_thread(1, || unsafe { begin(raw as _, mode) }));
        if code != Some(sys::CUresult::CUDA_SUCCESS) {
            number.store(0, Ordering::SeqCst);
        }
    });
    // SAFETY: the stream lives.
    let idle = unsafe { (table.cuStreamQuery.unwrap())(raw as _) };
    assert_eq!(idle, sys::CUresult::CUDA_SUCCESS);
    assert_ne!(begun.load(Ordering::SeqCst), 0);
    sim.clear_hooks();
    let end = || {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream lives, the output is a local.
        unsafe { (sim.functions().cuStreamEndCapture.unwrap())(stream.raw(), &mut graph) }
    };
    assert_eq!(end(), sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    assert_eq!(sim.as_thread(1, end), sys::CUresult::CUDA_SUCCESS);
    drop(entered);
}
