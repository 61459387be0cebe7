//! How much is made ahead, and where; what it is counted as; what a burst owes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::{Asked, Gate, MIB, a_want, ask, grow, is_ahead, made, rig};
use crate::Block;
use crate::allocator::carried::{Outcome, Rig};
use crate::allocator::config::Config;
use crate::allocator::extent::record::SpaceId;
use crate::allocator::heap::Heap;
use crate::allocator::physical::ahead::Plan;
use crate::allocator::report::MadeAhead;
use crate::allocator::{Allocator, Policy};
use crate::driver::{Stream, sys};
use crate::error::Error;
use crate::sim::{FailPlan, Mode, SimConfig, Simulator};

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

/// What a request under way may grow by is its own.
#[test]
fn room_that_a_request_has_made_is_left_to_it() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let stopped = rig.allocator.engine().stop_ahead();
    let block = rig.allocator.allocate(20 * MIB, &stream)?;
    drop(stopped);
    let asked = Asked {
        want: a_want(),
        end: block.ptr() + (20 << 20),
        bytes: 64 << 20,
        leased: true,
    };
    rig.allocator
        .engine()
        .reserve_span(SpaceId::Large, 64 << 20)?;
    let mut heap = rig.allocator.engine().lock();
    let planned = |heap: &mut Heap| {
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
    // Nor what a request needs below a limit.
    heap.physical.limit = Some(100 << 20);
    let peak = heap.announce(70 << 20);
    assert_eq!(planned(&mut heap), 10);
    heap.withdraw(peak);
    heap.physical.limit = None;
    heap.streams[0].calls -= 1;
    drop(heap);
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

/// A request that fails raised the soft cap in vain: what was made beside it stays below the one that is left.
#[test]
fn a_request_that_fails_leaves_nothing_beyond_the_soft_cap() -> Outcome {
    let sim = Simulator::new(SimConfig::with_devices(1, 6 << 30))?;
    let driver = sim.driver()?;
    let context = driver.context(0)?;
    let config = Config::new().policy(Policy::Packed).ahead(true);
    let allocator = Allocator::with_config(&context, config)?;
    let stream = Stream::new(&context)?;
    let stopped = allocator.engine().stop_ahead();
    let block = allocator.allocate(2 << 30, &stream)?;
    drop(stopped);
    let engine = Arc::downgrade(allocator.shared());
    let (end, asked) = (block.ptr() + (2 << 30), AtomicBool::new(false));
    // While memory is made for the request, of which there is not enough. It has taken the hole behind the block.
    sim.before(move |moment| {
        if !is_ahead()
            && moment.call == "cuMemCreate"
            && !asked.swap(true, Ordering::Relaxed)
            && let Some(engine) = engine.upgrade()
        {
            ask(&engine, end + (5 << 30), 64 << 20);
            engine.await_ahead();
        }
    });
    let refused = allocator.allocate(5 << 30, &stream);
    assert!(matches!(refused, Err(Error::OutOfMemory(_))), "{refused:?}");
    // A hundredth of what is live.
    assert_eq!(made(&allocator).bytes, 20 << 20);
    let stats = allocator.stats();
    assert!(stats.all.reserved.current <= stats.packing.soft_cap);
    allocator.check()?;
    sim.clear_hooks();
    drop(block);
    allocator.close()?;
    assert_eq!((sim.memory_in_use(0), sim.reports().len()), (0, 0));
    Ok(())
}

/// A limit that is lowered in a step holds from the next one on, and what the step makes is there for requests.
#[test]
fn a_limit_that_is_lowered_in_a_step_is_kept() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let gate = Gate::new(&rig.sim, &rig.allocator, "cuMemCreate", 2);
    let block = rig.allocator.allocate(20 * MIB, &stream)?;
    gate.await_step();
    rig.allocator.set_limit(Some(30 << 20));
    gate.pass();
    rig.allocator.await_ahead();
    assert_eq!(made(&rig.allocator).bytes, 8 << 20);
    let last = rig.allocator.allocate(10 * MIB, &stream)?;
    assert_eq!(rig.sim.memory_in_use(0), 30 << 20);
    drop((block, last));
    rig.end()
}

/// Of what is being given back nobody says that it was used; what stays is used once it is.
#[test]
fn what_goes_back_unused_is_not_counted_as_used() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let block = grow(&rig.allocator, 20, &stream)?;
    let handles = made(&rig.allocator).handles;
    assert!(handles > 1);
    let (engine, used) = (
        Arc::downgrade(rig.allocator.shared()),
        Arc::<AtomicU64>::default(),
    );
    let (seen, calls) = (Arc::clone(&used), Arc::<AtomicU64>::default());
    let counted = Arc::clone(&calls);
    rig.sim.before(move |moment| {
        if moment.call == "cuMemUnmap"
            && let Some(engine) = engine.upgrade()
        {
            let figures = engine.lock().made_ahead_figures();
            seen.fetch_add(figures.used, Ordering::Relaxed);
            counted.fetch_add(1, Ordering::Relaxed);
        }
    });
    let code = sys::CUresult::CUDA_ERROR_INVALID_VALUE;
    rig.sim.fail(FailPlan::call("cuMemUnmap", code)?);
    let refused = rig.allocator.trim(0);
    assert!(matches!(refused, Err(Error::Driver(_))), "{refused:?}");
    assert_eq!(calls.load(Ordering::Relaxed), handles);
    assert_eq!(used.load(Ordering::Relaxed), 0);
    assert_eq!(made(&rig.allocator).used, 0);
    rig.sim.clear_hooks();
    let left = rig.sim.memory_in_use(0) - (20 << 20);
    let other = rig.allocator.allocate(left as usize, &stream)?;
    assert_eq!(rig.sim.memory_in_use(0), left + (20 << 20));
    assert_eq!(made(&rig.allocator).used, 1);
    drop((block, other));
    rig.end()
}
