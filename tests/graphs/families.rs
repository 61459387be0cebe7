//! Families: pools that have their memory together, and addresses and ends of their own (G6).

use super::support::*;
use cualloc::allocator::{Contents, GraphFamily, Request, Select};
use cualloc::driver::sys::CUresult;
use cualloc::sim::{FailPlan, Leaks};

/// A graph with so many layers of some bytes, each read by the next, that leaves a word in its output.
fn layers(
    rig: &Rig,
    allocator: &Allocator,
    pool: &GraphPool,
    stream: &Stream,
    (bytes, count, word): (usize, usize, u32),
) -> (Graph, Block) {
    let mut output = None;
    let graph = capture(pool, stream, || {
        let mut last = used(rig, allocator, bytes, stream);
        for _ in 1..count {
            last = used(rig, allocator, bytes, stream);
        }
        rig.stamp(last.ptr(), bytes, word, stream);
        let out = allocator.allocate(MIB, stream).unwrap();
        // SAFETY: both are live, and the copy is captured.
        unsafe { stream.memcpy(out.ptr(), last.ptr(), MIB) }.unwrap();
        drop(last);
        output = Some(out);
    });
    (graph, output.unwrap())
}

fn two(allocator: &Allocator) -> (GraphFamily, [GraphPool; 2]) {
    let family = allocator.graph_family().unwrap();
    let pools = [(); 2].map(|()| family.graph_pool().unwrap());
    (family, pools)
}

#[test]
fn two_pools_of_a_family_hold_what_the_larger_needs() {
    packed(|rig| {
        let (allocator, stream) = (rig.allocator(), rig.stream());
        let sizes = [(70 * MIB + 512, 9, 7), (45 * MIB, 6, 8)];
        let alone = {
            let pool = allocator.graph_pool().unwrap();
            let made = layers(rig, &allocator, &pool, &stream, sizes[0]);
            let physical = footprint(&allocator, &pool).physical;
            drop(made);
            physical
        };
        let (family, pools) = two(&allocator);
        let graphs = [0, 1].map(|at| layers(rig, &allocator, &pools[at], &stream, sizes[at]));
        let held = pools.each_ref().map(|pool| footprint(&allocator, pool));
        assert_eq!(held[0].physical, held[1].physical, "they have it together");
        assert_eq!(held.map(|one| (one.blocks, one.leases)), [(1, 1), (1, 1)]);
        // The outputs are held beside each other.
        let most = alone as f64 * 1.02 + MIB as f64;
        eprintln!("{} held, {alone} by the larger alone", held[0].physical);
        assert!(held[0].physical as f64 <= most, "{held:?}");
        let mut execs = graphs
            .each_ref()
            .map(|(graph, _)| graph.instantiate().unwrap());
        for round in [0, 1, 1, 0, 0, 1, 0] {
            launch(&mut execs[round], &stream);
            let (_, output) = &graphs[round];
            assert_eq!(
                rig.mismatches(output.ptr(), MIB, sizes[round].2, &stream),
                0
            );
        }
        // What one leaves the other does not write.
        launch(&mut execs[0], &stream);
        launch(&mut execs[1], &stream);
        assert_eq!(rig.mismatches(graphs[0].1.ptr(), MIB, 7, &stream), 0);
        drop((execs, graphs, pools, family));
        rig.close(&allocator);
    });
}

/// A pool that goes while work outside of captures still uses what was a block of it.
#[test]
fn views_of_a_pool_of_a_family_outlive_the_work_on_its_blocks() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let (allocator, stream) = (rig.allocator(), rig.stream());
        // The other pool has blocks of the same memory on the same stream meanwhile, or none.
        for beside in [false, true] {
            let (family, [a, b]) = two(&allocator);
            let in_pool = |pool: &GraphPool| {
                let scope = pool.enter(Scope::Thread).unwrap();
                let block = allocator.allocate(8 * MIB, &stream).unwrap();
                scope.leave().unwrap();
                block
            };
            let block = in_pool(&a);
            let busy = rig.busy(&stream);
            rig.stamp(block.ptr(), 8 * MIB, 5, &stream);
            drop(block);
            let other = beside.then(|| in_pool(&b));
            drop(other);
            let unmaps = rig.calls("cuMemUnmap");
            drop(a);
            drop(allocator.allocate(MIB, &stream).unwrap());
            allocator.trim(0).unwrap();
            assert!(sim.reports().is_empty(), "{:?}", sim.reports());
            drop(busy);
            allocator.empty_cache().unwrap();
            assert!(
                rig.calls("cuMemUnmap") > unmaps,
                "it goes once the work is over"
            );
            drop((b, family));
            allocator.check().unwrap();
        }
        rig.close(&allocator);
    });
}

#[test]
fn no_address_is_of_two_pools_of_a_family() {
    packed(|rig| {
        let (allocator, stream) = (rig.allocator(), rig.stream());
        let (_family, pools) = two(&allocator);
        let mut seen: [Vec<(u64, u64)>; 2] = Default::default();
        for round in 0..12 {
            for (pool, seen) in pools.iter().zip(&mut seen) {
                let graph = capture(pool, &stream, || {
                    let blocks = [3, 1, 2]
                        .map(|size| used(rig, &allocator, (size + round % 5) * MIB + 512, &stream));
                    seen.extend(
                        blocks
                            .iter()
                            .map(|b| (b.ptr(), b.ptr() + b.requested() as u64)),
                    );
                });
                run(&graph, &stream);
            }
        }
        let [ours, theirs] = seen;
        let meet = |one: &(u64, u64)| {
            theirs
                .iter()
                .any(|other| one.0 < other.1 && other.0 < one.1)
        };
        assert!(!ours.iter().any(meet));
        drop(pools);
        rig.close(&allocator);
    });
}

/// The memory that a pool needed alone goes with it, and the rest with the last.
#[test]
fn each_pool_of_a_family_has_an_end_of_its_own() {
    packed(|rig| {
        let (allocator, stream) = (rig.allocator(), rig.stream());
        let (family, [large, small]) = two(&allocator);
        let (graph, output) = layers(rig, &allocator, &small, &stream, (10 * MIB, 3, 5));
        let needs = footprint(&allocator, &small).physical;
        let other = layers(rig, &allocator, &large, &stream, (60 * MIB, 4, 6));
        assert!(footprint(&allocator, &small).physical > 2 * needs);
        run(&other.0, &stream);
        drop(other);
        await_leases(&allocator, &large, 0);
        drop(large);
        let left = || {
            allocator.trim(0).unwrap();
            footprint(&allocator, &small).physical
        };
        wait_until("what nobody sees goes", || left() <= needs + 2 * MIB as u64);
        assert_held(rig, left() as usize, "nothing else is held");
        run(&graph, &stream);
        assert_eq!(rig.mismatches(output.ptr(), MIB, 5, &stream), 0);
        // A pool that comes later finds what is there.
        let later = family.graph_pool().unwrap();
        let again = layers(rig, &allocator, &later, &stream, (9 * MIB, 3, 9));
        assert!(footprint(&allocator, &later).physical <= needs + 4 * MIB as u64);
        run(&again.0, &stream);
        run(&graph, &stream);
        assert_eq!(rig.mismatches(output.ptr(), MIB, 5, &stream), 0);
        drop((again, later, graph, output, small, family));
        assert_trimmed(rig, &allocator);
        rig.close(&allocator);
    });
}

/// One capture has memory of both; what it freed by one is behind its nodes for the other, also when a scope is left.
#[test]
fn branches_of_a_capture_are_in_order_across_a_family() {
    packed(|rig| {
        for late in [false, true] {
            let (allocator, [main, side]) = (rig.allocator(), rig.streams());
            let (_family, pools) = two(&allocator);
            let first = pools[0].enter(Scope::Stream(&main)).unwrap();
            let second = pools[1].enter(Scope::Stream(&side)).unwrap();
            let under_way = Capturing::begin(&main, MODE);
            let start = used(rig, &allocator, 512, &main);
            side.wait_for(&main).unwrap();
            if !late {
                drop(used(rig, &allocator, 512, &side));
            }
            drop(used(rig, &allocator, 8 * MIB, &main));
            first.leave().unwrap();
            let beside = allocator.allocate(8 * MIB, &side);
            if late {
                // Others may have what the main stream used, which this one is not behind.
                assert!(matches!(beside, Err(Error::Capturing { .. })), "{beside:?}");
            } else {
                let beside = beside.unwrap();
                rig.stamp(beside.ptr(), 8 * MIB, 2, &side);
                assert!(footprint(&allocator, &pools[1]).physical >= 16 * MIB as u64);
                drop(beside);
            }
            drop(start);
            main.wait_for(&side).unwrap();
            let graph = under_way.end().unwrap();
            second.leave().unwrap();
            for _ in 0..8 {
                run(&graph, &main);
            }
            drop((graph, pools));
            rig.close(&allocator);
        }
    });
}

#[test]
fn work_outside_gets_no_memory_that_a_launch_of_another_pool_would_write() {
    packed(|rig| {
        let (allocator, stream) = (rig.allocator(), rig.stream());
        let (_family, pools) = two(&allocator);
        let (graph, output) = layers(rig, &allocator, &pools[0], &stream, (8 * MIB, 3, 4));
        let scope = pools[1].enter(Scope::Thread).unwrap();
        let outside = allocator.allocate(8 * MIB, &stream).unwrap();
        scope.leave().unwrap();
        rig.stamp(outside.ptr(), 8 * MIB, 11, &stream);
        run(&graph, &stream);
        assert_eq!(rig.mismatches(outside.ptr(), 8 * MIB, 11, &stream), 0);
        // When the graph is gone it is free for all.
        drop((graph, output));
        await_leases(&allocator, &pools[0], 0);
        let before = footprint(&allocator, &pools[1]).physical;
        let scope = pools[1].enter(Scope::Thread).unwrap();
        let more = allocator.allocate(8 * MIB, &stream).unwrap();
        scope.leave().unwrap();
        assert_eq!(footprint(&allocator, &pools[1]).physical, before);
        drop((more, outside, pools));
        rig.settle(&stream);
        rig.close(&allocator);
    });
}

#[test]
fn a_family_is_suspended_as_a_whole() {
    packed(|rig| {
        let (allocator, stream) = (rig.allocator(), rig.stream());
        let (_family, pools) = two(&allocator);
        let graphs = [0, 1].map(|at| {
            layers(
                rig,
                &allocator,
                &pools[at],
                &stream,
                (6 * MIB, 3, 40 + at as u32),
            )
        });
        let mut execs = graphs
            .each_ref()
            .map(|(graph, _)| graph.instantiate().unwrap());
        for at in [0, 1] {
            launch(&mut execs[at], &stream);
            // SAFETY: nobody uses the memory until it is back.
            let done = unsafe { allocator.suspend(Select::Pool(&pools[at]), Contents::Pinned) };
            assert_eq!(done.unwrap().kept, 2 * MIB as u64, "what both hold");
            for pool in &pools {
                assert!(matches!(pool.launching(), Err(Error::Suspended)));
                assert_eq!(footprint(&allocator, pool).physical, 0);
            }
            assert_held(rig, 0, "all is away");
            allocator.resume(Select::Pool(&pools[1 - at])).unwrap();
            assert_eq!(
                rig.mismatches(graphs[at].1.ptr(), MIB, 40 + at as u32, &stream),
                0
            );
        }
        for at in [0, 1] {
            launch(&mut execs[at], &stream);
            assert_eq!(
                rig.mismatches(graphs[at].1.ptr(), MIB, 40 + at as u32, &stream),
                0
            );
        }
        drop((execs, graphs, pools));
        rig.close(&allocator);
    });
}

#[test]
fn a_pool_of_a_family_comes_back_to_a_checkpoint_where_no_other_has_the_memory() {
    packed(|rig| {
        let (allocator, stream) = (rig.allocator(), rig.stream());
        let (family, pools) = two(&allocator);
        let mut live = Vec::new();
        let mut graphs = vec![capture(&pools[0], &stream, || {
            live.push(used(rig, &allocator, 6 * MIB, &stream));
            live.push(used(rig, &allocator, MIB, &stream));
        })];
        let point = pools[0].checkpoint().unwrap();
        let then: Vec<_> = point.blocks().collect();
        assert_eq!(then.len(), 2, "{then:?}");
        live.remove(0);
        rig.settle(&stream);
        let physical = footprint(&allocator, &pools[0]).physical;
        let mut other = None;
        graphs.push(capture(&pools[1], &stream, || {
            other = Some(used(rig, &allocator, 5 * MIB, &stream));
        }));
        rig.settle(&stream);
        let held = footprint(&allocator, &pools[1]);
        assert_eq!(
            (held.physical, held.blocks),
            (physical, 1),
            "they have it together"
        );
        // The other pool's block is in no checkpoint of this one.
        let now = pools[0].checkpoint().unwrap();
        assert_eq!(now.blocks().count(), 1);
        // SAFETY: no block ceases.
        let restore = || unsafe { pools[0].restore(&point) };
        let error = graph_pool_error(restore().unwrap_err());
        assert!(
            matches!(error, GraphPoolError::Taken { bytes } if bytes >= 4 * MIB as u64),
            "{error:?}"
        );
        assert_eq!(
            footprint(&allocator, &pools[0]).blocks,
            1,
            "nothing changed"
        );
        drop(other.take());
        rig.settle(&stream);
        let restored = restore().unwrap();
        assert!(restored.ceased.is_empty());
        live.extend(restored.revived);
        let mut found: Vec<_> = live.iter().map(|b| (b.ptr(), b.size())).collect();
        found.sort_unstable();
        assert_eq!(found, then);
        // Nobody else gets it from here on.
        graphs.push(capture(&pools[1], &stream, || {
            other = Some(used(rig, &allocator, 5 * MIB, &stream));
        }));
        allocator.check().unwrap();
        assert!(footprint(&allocator, &pools[1]).physical > physical);
        // SAFETY: the block that ceases is only freed.
        let back = unsafe { pools[0].restore(&now) }.unwrap();
        assert_eq!(back.ceased.len(), 1, "of one pool alone");
        assert_eq!(footprint(&allocator, &pools[1]).blocks, 1);
        drop((back, live, other, graphs, pools, family));
        rig.close(&allocator);
    });
}

#[test]
fn what_a_family_cannot_have_is_refused() {
    packed(|rig| {
        let (allocator, stream) = (rig.allocator(), rig.stream());
        let (family, pools) = two(&allocator);
        let unsupported =
            |error: Error| assert!(matches!(error, Error::NotSupported { .. }), "{error:?}");
        let scope = pools[0].enter(Scope::Thread).unwrap();
        let at_home = Request::new(MIB).views(false);
        unsupported(allocator.allocate_with(at_home, &stream).unwrap_err());
        drop(allocator.allocate(MIB, &stream).unwrap());
        scope.leave().unwrap();
        // The pools live on without the family's handle.
        drop(family);
        let scope = pools[1].enter(Scope::Thread).unwrap();
        drop(allocator.allocate(5 * MIB, &stream).unwrap());
        scope.leave().unwrap();
        stream.synchronize().unwrap();
        drop(pools);
        assert_trimmed(rig, &allocator);
        let without = rig.allocator_with(Config::new().views(false));
        unsupported(without.graph_family().unwrap_err());
        rig.close(&without);
        rig.close(&allocator);
    });
}

/// Every call that makes or gives back memory of a family fails in turn, executed or not; a capture is not spoilt by it.
#[test]
fn calls_that_fail_leave_a_family_as_it_was() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let calls = [
            "cuMemAddressReserve",
            "cuMemCreate",
            "cuMemMap",
            "cuMemSetAccess",
            "cuMemUnmap",
            "cuMemRelease",
        ];
        for call in calls {
            for (nth, executed) in (1..12).flat_map(|nth| [(nth, false), (nth, true)]) {
                let before = sim.leaks();
                let (allocator, stream) = (rig.allocator(), rig.stream());
                let (family, [one, other]) = two(&allocator);
                let kept = layers(rig, &allocator, &one, &stream, (4 * MIB, 3, 3));
                let plan = FailPlan::call(call, CUresult::CUDA_ERROR_NOT_PERMITTED).unwrap();
                let plan = plan.nth(nth);
                sim.fail(if executed { plan.executed() } else { plan });
                let graph = capture(&other, &stream, || {
                    let mut live = Vec::new();
                    for bytes in [9 * MIB, 3 * MIB, 30 * MIB, 700] {
                        if let Ok(block) = allocator.allocate(bytes, &stream) {
                            rig.stamp(block.ptr(), bytes / 4 * 4, 1, &stream);
                            live.push(block);
                        }
                        allocator.check().unwrap();
                    }
                });
                run(&graph, &stream);
                drop(graph);
                await_leases(&allocator, &other, 0);
                drop(other);
                let _trimmed = allocator.trim(0);
                sim.clear_failures();
                allocator.check().unwrap();
                run(&kept.0, &stream);
                assert_eq!(rig.mismatches(kept.1.ptr(), MIB, 3, &stream), 0);
                drop(kept);
                await_leases(&allocator, &one, 0);
                drop((one, family));
                rig.settle(&stream);
                rig.end(&allocator);
                let left = sim.leaks();
                let loses = match executed {
                    true => ["cuMemCreate", "cuMemAddressReserve"].contains(&call),
                    false => call == "cuMemRelease",
                };
                let held = |leaks: &Leaks| (leaks.handles, leaks.reservations);
                assert!(
                    loses || held(&left) == held(&before),
                    "{call} {nth}: {left:?}"
                );
                assert_eq!(left.mappings, 0, "{call} {nth}");
            }
        }
    });
}
