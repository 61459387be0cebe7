//! Bytes that have not left, and budgets over them.

use cualloc::resource::*;
use cualloc::sim::Mode;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::*;
use crate::common::*;
use crate::held;

/// S5.25, S5.26, S5.66: live, retired, quarantined, freed; per stream.
#[test]
fn s5_25_s5_26_s5_66_pending_bytes_leave_by_reap() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let resource = asynchronous(rig);
        let [a, b, c] = rig.streams();
        assert_eq!(resource.reap().unwrap(), 0, "nothing pending");
        let sizes = [(&a, 1000), (&b, 2000), (&c, 4000)];
        let blocks = sizes.map(|(stream, bytes)| take(&resource, bytes, stream));
        let [one, two, three] = [0, 1, 2].map(|at: usize| blocks[at].id());
        for block in blocks {
            resource.deallocate_block(block).unwrap();
        }
        assert_eq!(resource.state(&one), BlockState::Pending);
        assert_eq!(held(&resource), (0, 7000));
        for (stream, bytes) in sizes {
            assert_eq!(resource.pending_on(stream.id().unwrap()), bytes as u64);
        }
        // The second stream fails: the first has left, the second and the rest stay for the next call.
        sim.fail(refusal("cuEventSynchronize").nth(2));
        assert!(resource.reap().is_err());
        assert_eq!(resource.state(&one), BlockState::Free);
        assert_eq!(resource.state(&two), BlockState::Quarantined);
        assert_eq!(resource.state(&three), BlockState::Pending);
        assert_eq!(resource.usage().unwrap().pending, 6000);
        assert_eq!(resource.pending_on(c.id().unwrap()), 4000, "the rest");
        assert_eq!(resource.reap().unwrap(), 6000);
        for id in [two, three] {
            assert_eq!(resource.state(&id), BlockState::Free);
        }
        assert_eq!(held(&resource), (0, 0));
    });
}

/// S5.28, S5.29: exact limit, no reap for the impossible, one reap and one retry otherwise.
#[test]
fn s5_28_s5_29_budget_is_exact_and_reaps_once() {
    packed(|rig| {
        let stream = rig.stream();
        let inner = asynchronous(rig);
        let early = take(&inner, 24, &stream);
        let budget = Budget::new(inner, Some(1024));
        assert_eq!((outstanding(&budget), budget.remaining()), (24, Some(1000)));
        let block = take(&budget, 1000, &stream);
        assert!(ask(&budget, 1, &stream).is_err());
        budget.deallocate_block(block).unwrap();
        assert_eq!(outstanding(&budget), 1024, "pending counts");
        let waits = rig.calls("cuEventSynchronize");
        assert!(ask(&budget, 1025, &stream).is_err());
        assert_eq!(
            rig.calls("cuEventSynchronize"),
            waits,
            "no reap for the impossible"
        );
        let block = take(&budget, 1000, &stream);
        assert_eq!(rig.calls("cuEventSynchronize"), waits + 1, "one reap");
        budget.deallocate_block(block).unwrap();
        budget.deallocate_block(early).unwrap();
        budget.reap().unwrap();
        assert_eq!(
            outstanding(&budget),
            0,
            "what was there before has left too"
        );
        if !fail(rig, "cuEventRecord") {
            return;
        }
        assert!(ask(&budget, 100, &stream).is_err());
        assert_eq!(outstanding(&budget), 0, "rolled back");
    });
}

/// S5.30: only what leaves the inner resource is released, and an unknown block is nothing.
#[test]
fn s5_30_budget_follows_actual_frees() {
    packed(|rig| {
        let stream = rig.stream();
        let direct = Budget::new(CudaMemory::new(&rig.context), Some(4096));
        let block = take(&direct, 4096, &stream);
        let stranger = CudaMemory::new(&rig.context);
        let unknown = take(&stranger, 4096, &stream);
        let failure = direct.deallocate_block(unknown).unwrap_err();
        assert_eq!(outstanding(&direct), 4096);
        stranger.deallocate_block(*failure.value).unwrap();
        direct.deallocate_block(block).unwrap();
        assert_eq!(outstanding(&direct), 0, "synchronous: freed immediately");
        // Two budgets over one resource keep apart what each has let through.
        let shared = Arc::new(asynchronous(rig));
        let one = Budget::new(Arc::clone(&shared), Some(4096));
        let two = Budget::new(Arc::clone(&shared), Some(4096));
        let first = take(&one, 1000, &stream);
        let second = take(&two, 2000, &stream);
        one.deallocate_block(first).unwrap();
        two.deallocate_block(second).unwrap();
        assert_eq!((outstanding(&one), outstanding(&two)), (1000, 2000));
        one.reap().unwrap();
        assert_eq!((outstanding(&one), outstanding(&two)), (0, 0));
    });
}

/// S5.56: a reap that waits for a stream blocks no other thread.
#[test]
fn s5_56_reap_blocks_no_thread() {
    packed(|rig| {
        let resource = asynchronous(rig);
        let [a, b] = rig.streams();
        let block = take(&resource, 4096, &a);
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
        resource.deallocate_block(block).unwrap();
        let (shared, other) = (&resource, &b);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                // A reap that does not wait lets nothing begin: that fails the test, not its runner.
                begun.recv_timeout(Duration::from_secs(60)).unwrap();
                let hit = take(&shared, 4096, other);
                shared.deallocate_block(hit).unwrap();
                let _ = end.send(());
            });
            resource.reap().unwrap();
        });
        assert_eq!(meeting.2.load(Ordering::SeqCst), 1, "held up by the reap");
        if let Some(sim) = rig.maybe_sim() {
            sim.set_mode(Mode::Instant);
        }
        resource.reap().unwrap();
        assert_eq!(held(&resource), (0, 0));
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

/// S1.51, S1.52, S5.57: sixteen threads at the border of the budget never pass it, and it agrees with what is below it.
#[test]
fn s1_51_s1_52_s5_57_budget_agrees_with_the_resource_below() {
    packed(|rig| {
        let limit = 4 * MIB as u64;
        let budget = Budget::new(asynchronous(rig), Some(limit));
        let streams: Vec<_> = (0..16).map(|_| rig.stream()).collect();
        std::thread::scope(|scope| {
            for (number, stream) in streams.iter().enumerate() {
                let budget = &budget;
                scope.spawn(move || {
                    let mut live = Vec::new();
                    for step in 0..200usize {
                        let size = 1 + (step * 7919 + number * 104_729) % (300 * KIB);
                        match ask(&budget, size, stream) {
                            Ok(block) => live.push(block),
                            Err(error) => assert!(error.is_out_of_memory(), "{error:?}"),
                        }
                        assert!(outstanding(&budget) <= limit);
                        assert!(outstanding(budget.get_ref()) <= limit);
                        if step % 2 == 0 && !live.is_empty() {
                            budget
                                .deallocate_block(live.swap_remove(step % live.len()))
                                .unwrap();
                        }
                        if step % 50 == 0 {
                            budget.reap().unwrap();
                        }
                    }
                    for block in live {
                        budget.deallocate_block(block).unwrap();
                    }
                });
            }
        });
        assert_eq!(outstanding(&budget), outstanding(budget.get_ref()));
        budget.reap().unwrap();
        assert_eq!(
            (outstanding(&budget), outstanding(budget.get_ref())),
            (0, 0)
        );
    });
}
