//! Memory that a thread makes before it is needed: how much, for whom, and who is not disturbed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{current, yield_now};

use super::Shared;
use crate::Block;
use crate::allocator::carried::{Outcome, Rig};
use crate::allocator::config::Config;
use crate::allocator::physical::ahead::Plan;
use crate::allocator::report::MadeAhead;
use crate::allocator::{Allocator, Contents, Policy, Select};
use crate::driver::{Stream, sys};
use crate::error::Error;
use crate::sim::{FailPlan, Mode, SimConfig, Simulator};

const MIB: usize = 1 << 20;

fn rig() -> Result<Rig, Box<dyn std::error::Error>> {
    Rig::new(Config::new().policy(Policy::Packed).ahead(true))
}

fn shared(allocator: &Allocator) -> Arc<Shared> {
    let helper = allocator.engine().helper.as_ref();
    Arc::clone(&helper.expect("it is switched on").shared)
}

/// Whether the calling thread is one that makes memory ahead.
fn is_ahead() -> bool {
    current().name() == Some("cualloc-ahead")
}

fn made(allocator: &Allocator) -> MadeAhead {
    allocator.stats().packing.ahead
}

/// A growth, and what is made after it.
fn grow(allocator: &Allocator, mib: usize, stream: &Stream) -> Result<Block, Error> {
    let block = allocator.allocate(mib * MIB, stream)?;
    allocator.await_ahead();
    Ok(block)
}

/// Keeps the thread in its step, before or after the `nth` of its calls of a name, until it is told to stop, or the
/// test has gone on without that. Says whether it came so far.
struct Gate {
    reached: Arc<AtomicBool>,
    passed: Arc<AtomicBool>,
}

impl Gate {
    fn new(sim: &Simulator, allocator: &Allocator, call: &'static str, nth: u64) -> Gate {
        let (reached, passed) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let gate = Gate {
            reached: Arc::clone(&reached),
            passed: Arc::clone(&passed),
        };
        let (shared, count) = (shared(allocator), AtomicU64::new(0));
        sim.after(move |moment| {
            if !is_ahead()
                || moment.call != call
                || count.fetch_add(1, Ordering::Relaxed) + 1 != nth
            {
                return;
            }
            reached.store(true, Ordering::Release);
            while shared.state().stops == 0 && !passed.load(Ordering::Acquire) {
                yield_now();
            }
        });
        gate
    }

    fn await_step(&self) {
        while !self.reached.load(Ordering::Acquire) {
            yield_now();
        }
    }

    fn pass(&self) {
        self.passed.store(true, Ordering::Release);
    }
}

#[test]
fn growths_find_what_was_made_ahead() -> Outcome {
    let rig = rig()?;
    let [stream, other] = rig.streams()?;
    let allocator = &rig.allocator;
    let mut live = vec![grow(allocator, 20, &stream)?];
    let first = made(allocator);
    assert_eq!((first.bytes, first.used), (16 << 20, 0));
    let stats = allocator.stats();
    assert_eq!(stats.all.reserved.current, stats.packing.soft_cap);
    let calls = rig.sim.calls();
    // A part is cut from it, on another stream without a wait; then what is left.
    live.push(allocator.allocate(10 * MIB, &other)?);
    live.push(allocator.allocate(6 * MIB, &stream)?);
    let more = rig.sim.calls();
    for name in ["cuMemCreate", "cuMemMap", "cuStreamWaitEvent"] {
        assert_eq!(calls.get(name), more.get(name), "{name}");
    }
    allocator.await_ahead();
    let second = made(allocator);
    assert_eq!((second.bytes, second.used_bytes), (16 << 20, 16 << 20));
    assert_eq!(
        (second.handles, second.used),
        (first.handles, first.handles)
    );
    // A growth goes on where the memory ends, and takes what is free there along.
    live.push(grow(allocator, 12, &stream)?);
    let free = made(allocator).bytes - second.bytes;
    assert!(free > 0);
    let held = rig.sim.memory_in_use(0);
    live.push(allocator.allocate(free as usize + 2 * MIB, &stream)?);
    assert!(rig.sim.memory_in_use(0) - held < free + (20 << 20));
    let together: Vec<u64> = live.iter().map(Block::ptr).collect();
    assert_eq!(together[4] - together[0], 48 << 20, "{together:x?}");
    drop(live);
    rig.end()
}

#[test]
fn nothing_is_made_ahead_of_programs_that_do_not_grow_or_do_not_ask() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let allocator = &rig.allocator;
    drop(grow(allocator, 20, &stream)?);
    let before = (made(allocator), rig.sim.calls().get("cuMemCreate"));
    for mib in [20, 7, 12, 3, 20] {
        drop(grow(allocator, mib, &stream)?);
    }
    let after = (made(allocator), rig.sim.calls().get("cuMemCreate"));
    assert_eq!(before, after);
    rig.end()?;
    let rig = Rig::new(Config::new())?;
    let [stream] = rig.streams()?;
    assert!(rig.allocator.engine().helper.is_none());
    drop(grow(&rig.allocator, 20, &stream)?);
    assert_eq!(made(&rig.allocator), MadeAhead::default());
    assert_eq!(rig.sim.memory_in_use(0), 20 << 20);
    rig.end()
}

/// Random programs, of which the thread never makes more than the soft cap, or half of a limit, leaves room for.
#[test]
fn no_step_passes_the_soft_cap_or_half_of_a_limit() -> Outcome {
    for seed in 1..=12u64 {
        let rig = rig()?;
        let streams: [Stream; 3] = rig.streams()?;
        let limit = (seed % 3 == 0).then_some(192u64 << 20);
        rig.allocator.set_limit(limit);
        let (watched, told) = (
            Arc::downgrade(rig.allocator.shared()),
            Arc::<AtomicU64>::default(),
        );
        let (wrong, steps) = (Arc::clone(&told), Arc::<AtomicU64>::default());
        let counted = Arc::clone(&steps);
        rig.sim.before(move |moment| {
            if !is_ahead() || moment.call != "cuMemCreate" {
                return;
            }
            let Some(engine) = watched.upgrade() else {
                return;
            };
            let heap = engine.lock();
            let next = heap.stats.all.reserved.current + (2 << 20);
            let most = limit.map_or(u64::MAX, |limit| limit / 2);
            let good = next <= heap.soft_cap() && next <= most;
            wrong.fetch_add(u64::from(!good), Ordering::Relaxed);
            counted.fetch_add(1, Ordering::Relaxed);
        });
        let mut random = seed;
        let mut below = |most: usize| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (random >> 33) as usize % most
        };
        let mut live: Vec<Block> = Vec::new();
        for step in 0..150 {
            let bytes = 70_000 + below(9 * MIB);
            match rig.allocator.allocate(bytes, &streams[below(3)]) {
                Ok(block) => live.push(block),
                Err(Error::OutOfMemory(_)) if limit.is_some() => live.clear(),
                Err(error) => return Err(error.into()),
            }
            if live.len() > 4 + step / 8 {
                drop(live.swap_remove(below(live.len())));
            }
            if step % 40 == 39 {
                rig.allocator.trim(0)?;
            }
            // Now and then the thread works beside what comes next.
            if below(4) > 0 {
                rig.allocator.await_ahead();
            }
            rig.allocator.check()?;
        }
        rig.allocator.await_ahead();
        assert_eq!(told.load(Ordering::Relaxed), 0, "seed {seed}");
        assert!(steps.load(Ordering::Relaxed) > 10, "seed {seed}");
        rig.sim.clear_hooks();
        drop(live);
        rig.end()?;
    }
    Ok(())
}

#[test]
fn threads_that_grow_beside_it_lose_nothing() -> Outcome {
    let rig = rig()?;
    std::thread::scope(|threads| {
        for seed in 1..4u64 {
            let (allocator, context) = (&rig.allocator, &rig.context);
            threads.spawn(move || -> Result<(), Error> {
                let stream = Stream::new(context)?;
                let (mut random, mut live) = (seed, Vec::new());
                for round in 0..200 {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    let bytes = 70_000 + (random >> 40) as usize % (6 * MIB);
                    live.push(allocator.allocate(bytes, &stream)?);
                    if live.len() > 3 + round / 20 {
                        live.swap_remove((random >> 33) as usize % live.len());
                    }
                    if round % 16 == 0 {
                        allocator.check()?;
                    }
                    if round % 64 == 63 {
                        allocator.trim(0)?;
                    }
                }
                Ok(())
            });
        }
    });
    rig.end()
}

/// A close waits for the step under way, and no longer; no thread is left.
#[test]
fn a_close_ends_the_thread_in_the_middle_of_its_work() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let gate = Gate::new(&rig.sim, &rig.allocator, "cuMemCreate", 2);
    let block = rig.allocator.allocate(20 * MIB, &stream)?;
    gate.await_step();
    drop(block);
    let closed = rig.allocator.close();
    gate.pass();
    closed?;
    assert!(!shared(&rig.allocator).state().alive);
    let creates = rig.sim.calls().get("cuMemCreate");
    // The trial, the request, and one step of two.
    assert_eq!(creates, 1 + 10 + 4);
    assert_eq!(rig.sim.memory_in_use(0), 0);
    assert_eq!(rig.sim.reports(), []);
    Ok(())
}

/// The last handle goes on another thread while memory is being made, and everything goes with it.
#[test]
fn the_last_handle_may_go_beside_a_step() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let engine = Arc::downgrade(rig.allocator.shared());
    let gate = Gate::new(&rig.sim, &rig.allocator, "cuMemMap", 1);
    let block = rig.allocator.allocate(20 * MIB, &stream)?;
    gate.await_step();
    drop(block);
    let Rig { allocator, sim, .. } = rig;
    let gone = std::thread::spawn(move || drop(allocator));
    gone.join().map_err(|_| "it panicked")?;
    assert_eq!(sim.memory_in_use(0), 0);
    assert_eq!(engine.strong_count(), 0);
    assert_eq!(sim.reports(), []);
    Ok(())
}

/// Where the context is lost nothing is closed, and the thread ends all the same.
#[test]
fn the_last_handle_of_a_lost_allocator_ends_the_thread() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let gate = Gate::new(&rig.sim, &rig.allocator, "cuMemMap", 1);
    let _block = rig.allocator.allocate(20 * MIB, &stream)?;
    gate.await_step();
    let lost = sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    rig.sim.lose_context(0, lost);
    let refused = rig.allocator.allocate(40 * MIB, &stream);
    assert!(matches!(refused, Err(Error::ContextLost(_))), "{refused:?}");
    let shared = shared(&rig.allocator);
    assert!(shared.state().alive);
    drop(rig.allocator);
    assert!(!shared.state().alive);
    Ok(())
}

/// It notices itself that the context is lost, and ends; requests are told.
#[test]
fn a_context_that_is_lost_in_a_step_ends_the_thread() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let gate = Gate::new(&rig.sim, &rig.allocator, "cuMemMap", 1);
    let block = rig.allocator.allocate(20 * MIB, &stream)?;
    gate.await_step();
    rig.sim
        .lose_context(0, sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    gate.pass();
    while shared(&rig.allocator).state().alive {
        yield_now();
    }
    let refused = rig.allocator.allocate(40 * MIB, &stream);
    assert!(matches!(refused, Err(Error::ContextLost(_))), "{refused:?}");
    drop(block);
    Ok(())
}

/// Every call of the thread fails in turn, alone and together with the next one.
#[test]
fn failures_are_nobodys_and_lose_nothing() -> Outcome {
    let play = |plan: Option<FailPlan>| -> Result<_, Box<dyn std::error::Error>> {
        let rig = rig()?;
        let [stream] = rig.streams()?;
        let failing = Arc::new(std::sync::Mutex::new(Vec::new()));
        let seen = Arc::clone(&failing);
        rig.sim.before(move |moment| {
            if is_ahead() {
                let mut seen = seen.lock().unwrap_or_else(|held| held.into_inner());
                seen.push(moment.call);
            }
        });
        // The request is through before the thread begins.
        let hold = rig.allocator.engine().stop_ahead();
        let block = rig.allocator.allocate(20 * MIB, &stream)?;
        drop(hold);
        let (want, end) = (a_want(), block.ptr() + (20 << 20));
        if let Some(plan) = plan {
            rig.sim.fail(plan);
        }
        ask(&rig.allocator, want, end);
        rig.allocator.await_ahead();
        rig.sim.clear_failures();
        let calls = failing.lock().map_err(|_| "poisoned")?.clone();
        rig.allocator.check()?;
        let held = rig.allocator.stats().all.reserved.current;
        assert_eq!(held, rig.sim.memory_in_use(0));
        assert_eq!(rig.allocator.engine().lock().held(), held);
        assert_eq!(rig.allocator.engine().lock().ahead.under_way, 0);
        let bytes = made(&rig.allocator).bytes;
        drop(grow(&rig.allocator, 30, &stream)?);
        drop(block);
        rig.sim.clear_hooks();
        rig.end()?;
        Ok((calls, bytes))
    };
    let (calls, all) = play(None)?;
    assert_eq!(all, 16 << 20);
    let mut names = calls.clone();
    names.sort_unstable();
    names.dedup();
    assert!(names.contains(&"cuMemCreate") && names.contains(&"cuMemSetAccess"));
    let codes = [
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        sys::CUresult::CUDA_ERROR_INVALID_VALUE,
    ];
    for code in codes {
        for name in &names {
            let count = calls.iter().filter(|call| *call == name).count() as u64;
            for nth in 1..=count {
                let plan = FailPlan::call(name, code)?.nth(nth);
                let (_, bytes) =
                    play(Some(plan)).map_err(|error| format!("{name} {nth}: {error}"))?;
                assert!(bytes < all || !name.starts_with("cuMem"), "{name} {nth}");
            }
        }
        // Of two in a row the second may be one that undoes what the first left.
        for nth in 1..=calls.len() as u64 {
            for times in 2..=4 {
                play(Some(FailPlan::any(code).nth(nth).times(times)))
                    .map_err(|error| format!("{times} from {nth} on: {error}"))?;
            }
        }
    }
    Ok(())
}

fn a_want() -> crate::allocator::extent::want::Want {
    crate::allocator::extent::want::Want {
        space: crate::allocator::extent::record::SpaceId::Large,
        stream: 0,
        granules: (20 * MIB / 512) as u32,
        align: 1,
        requested: 20 << 20,
        single: false,
        views: true,
    }
}

/// Asks for 16 MiB at an address.
fn ask(allocator: &Allocator, want: crate::allocator::extent::want::Want, end: u64) {
    let engine = allocator.engine();
    let helper = engine.helper.as_ref().expect("it is switched on");
    let mut state = helper.shared.state();
    state.asked = Some(super::Asked {
        want,
        end,
        bytes: 16 << 20,
        leased: false,
    });
    assert!(helper.wake(state, &engine.me).is_empty());
}

/// Memory that the thread has in hand is waited for before a request fails for want of it.
#[test]
fn a_request_gets_what_is_in_the_hands_of_the_thread() -> Outcome {
    let sim = Simulator::new(SimConfig::with_devices(1, 40 << 20))?;
    let driver = sim.driver()?;
    let context = driver.context(0)?;
    let config = Config::new().policy(Policy::Packed).ahead(true);
    let allocator = Allocator::with_config(&context, config)?;
    let stream = Stream::new(&context)?;
    let gate = Gate::new(&sim, &allocator, "cuMemCreate", 4);
    let block = allocator.allocate(20 * MIB, &stream)?;
    gate.await_step();
    let other = allocator.allocate(20 * MIB, &stream);
    gate.pass();
    let other = other?;
    allocator.check()?;
    drop((block, other));
    allocator.close()?;
    assert_eq!((sim.memory_in_use(0), sim.reports().len()), (0, 0));
    Ok(())
}

#[test]
fn a_trim_gives_back_what_was_made_ahead_and_stops_more() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let gate = Gate::new(&rig.sim, &rig.allocator, "cuMemCreate", 4);
    let block = rig.allocator.allocate(20 * MIB, &stream)?;
    gate.await_step();
    let trimmed = rig.allocator.trim(0);
    gate.pass();
    assert_eq!(trimmed?.released, 8 << 20);
    rig.allocator.await_ahead();
    assert_eq!(rig.sim.memory_in_use(0), 20 << 20);
    let made = made(&rig.allocator);
    assert_eq!((made.bytes, made.used), (8 << 20, 0));
    // The next growth asks again.
    let next = grow(&rig.allocator, 10, &stream)?;
    assert!(rig.sim.memory_in_use(0) > 30 << 20);
    drop((block, next));
    assert_eq!(rig.allocator.empty_cache()?.pending, 0);
    assert_eq!(rig.sim.memory_in_use(0), 0);
    rig.end()
}

#[test]
fn nothing_is_made_while_memory_is_suspended() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let gate = Gate::new(&rig.sim, &rig.allocator, "cuMemCreate", 1);
    let block = rig.allocator.allocate(20 * MIB, &stream)?;
    gate.await_step();
    // SAFETY: nothing uses the memory.
    let done = unsafe { rig.allocator.suspend(Select::Allocator, Contents::Drop) };
    gate.pass();
    done?;
    assert_eq!(rig.sim.memory_in_use(0), 0);
    ask(&rig.allocator, a_want(), block.ptr() + (28 << 20));
    rig.allocator.await_ahead();
    assert_eq!(rig.sim.memory_in_use(0), 0);
    rig.allocator.resume(Select::Allocator)?;
    drop(grow(&rig.allocator, 40, &stream)?);
    assert!(made(&rig.allocator).bytes > 8 << 20);
    drop(block);
    rig.end()
}

/// D9: the thread does not exist in a forked child, and may have held its lock.
#[cfg(unix)]
#[test]
fn d9_a_forked_child_waits_for_no_thread() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let block = grow(&rig.allocator, 20, &stream)?;
    let shared = shared(&rig.allocator);
    let state = shared.state();
    let mut ours = Some((rig.allocator.clone(), block));
    let told = crate::driver::process::child_says(|| {
        let Some((allocator, block)) = ours.take() else {
            return false;
        };
        let refused = matches!(allocator.trim(0), Err(Error::ForkedChild))
            && allocator.close().is_err()
            && allocator.allocate(30 * MIB, &stream).is_err()
            // SAFETY: nothing uses the memory.
            && unsafe { allocator.suspend(Select::Allocator, Contents::Drop) }.is_err();
        allocator.await_ahead();
        drop((allocator, block));
        refused
    });
    drop(state);
    assert!(told);
    drop(ours);
    rig.end()
}

/// What an allocation created beyond the soft cap goes back on the thread.
#[test]
fn bursts_are_repaid_by_the_thread() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    rig.sim.set_mode(Mode::Instant);
    let allocator = &rig.allocator;
    let unmapped = Arc::<AtomicU64>::default();
    let counted = Arc::clone(&unmapped);
    rig.sim.before(move |moment| {
        if moment.call == "cuMemUnmap" {
            counted.fetch_add(if is_ahead() { 1 } else { 1 << 32 }, Ordering::Relaxed);
        }
    });
    let live = allocator.allocate(20 * MIB, &stream)?;
    allocator.await_ahead();
    drop(allocator.allocate(100 * MIB, &stream)?);
    allocator.await_ahead();
    allocator.synchronize()?;
    {
        let mut heap = allocator.engine().lock();
        (heap.peak_live, heap.physical.bursts.debt) = (20 << 20, true);
    }
    for round in 0..40 {
        // Not what the caches have at hand.
        drop(allocator.allocate((2 + round % 3) * MIB, &stream)?);
        allocator.await_ahead();
        allocator.synchronize()?;
    }
    let stats = allocator.stats();
    assert!(stats.packing.bursts.repaid > 8, "{:?}", stats.packing);
    assert!(stats.all.reserved.current <= stats.packing.soft_cap);
    let unmapped = unmapped.load(Ordering::Relaxed);
    assert_eq!(unmapped, stats.packing.bursts.repaid);
    assert!(!allocator.engine().lock().physical.bursts.debt);
    rig.sim.clear_hooks();
    drop(live);
    rig.end()
}

/// What a request under way may grow by is its own.
#[test]
fn room_that_a_request_has_made_is_left_to_it() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let stopped = rig.allocator.engine().stop_ahead();
    let block = rig.allocator.allocate(20 * MIB, &stream)?;
    drop(stopped);
    let asked = super::Asked {
        want: a_want(),
        end: block.ptr() + (20 << 20),
        bytes: 64 << 20,
        leased: true,
    };
    rig.allocator
        .engine()
        .reserve_span(crate::allocator::extent::record::SpaceId::Large, 64 << 20)?;
    let mut heap = rig.allocator.engine().lock();
    let planned = |heap: &mut crate::allocator::heap::Heap| {
        let (mut asked, mut plans) = (asked, Vec::new());
        while let Plan::Make(fresh) = heap.plan_ahead(&asked) {
            asked.end += fresh.bytes();
            plans.push(fresh);
        }
        let bytes = plans.iter().map(|fresh| fresh.bytes()).sum::<u64>() >> 20;
        for fresh in plans {
            heap.ahead.under_way -= fresh.bytes();
            heap.not_made(fresh);
        }
        bytes
    };
    assert_eq!(planned(&mut heap), 16);
    heap.streams[0].calls += 1;
    let peak = heap.announce(20 << 20);
    assert_eq!(planned(&mut heap), 16);
    // What is being made for the request is none of it.
    heap.physical.planned += 20 << 20;
    assert_eq!(planned(&mut heap), 16);
    heap.physical.planned -= 20 << 20;
    heap.withdraw(peak);
    heap.streams[0].calls -= 1;
    drop(heap);
    drop(block);
    rig.end()
}

/// What it calls, such as a logger, may come back to the allocator.
#[test]
fn the_thread_does_not_wait_for_itself() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let (back, trims) = (
        Arc::downgrade(rig.allocator.shared()),
        Arc::<AtomicU64>::default(),
    );
    let counted = Arc::clone(&trims);
    rig.sim.after(move |moment| {
        if is_ahead() && moment.call == "cuMemSetAccess" {
            let engine = back.upgrade();
            let trimmed = engine.is_some_and(|engine| {
                engine.await_ahead();
                engine.trim(0).is_ok()
            });
            counted.fetch_add(u64::from(trimmed), Ordering::Relaxed);
        }
    });
    let block = grow(&rig.allocator, 20, &stream)?;
    assert_eq!(trims.load(Ordering::Relaxed), 1, "no step came after it");
    rig.sim.clear_hooks();
    drop(block);
    rig.end()
}

/// A growth between other memory has no room behind it, and more addresses would not give it any.
#[test]
fn no_addresses_are_leased_for_what_they_do_not_continue() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let allocator = &rig.allocator;
    let first = grow(allocator, 20, &stream)?;
    let between = grow(allocator, 8, &stream)?;
    let last = grow(allocator, 40, &stream)?;
    let end = between.ptr() + 8 * MIB as u64;
    let at = between.ptr();
    assert!(last.ptr() >= end);
    drop(between);
    allocator.trim(0)?;
    let leased = || {
        let heap = allocator.engine().lock();
        let regions = heap.extents.large.regions().values();
        regions.map(|region| region.bytes).sum::<u64>()
    };
    let before = leased();
    for _ in 0..4 {
        let between = grow(allocator, 8, &stream)?;
        assert_eq!(between.ptr(), at);
        drop(between);
        allocator.trim(0)?;
    }
    assert_eq!(leased(), before);
    drop((first, last));
    rig.end()
}
