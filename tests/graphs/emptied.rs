//! Free memory of a pool that returns to the driver while blocks of the pool live.

use super::support::*;

/// Blocks of a pool outside of captures.
fn eager<const N: usize>(test: impl Fn(&Rig, &Allocator, &GraphPool, [Stream; N])) {
    pooled(|rig, allocator, pool, streams| {
        let scope = pool.enter(Scope::Thread).unwrap();
        test(rig, &allocator, &pool, streams);
        drop(scope);
        rig.settle(&rig.stream());
        allocator.check().unwrap();
    });
}

#[test]
fn whole_free_handles_return_and_their_addresses_serve_again() {
    eager(|rig, allocator, pool, [stream]| {
        let blocks = [4, 6, 2, 8].map(|mib| used(rig, allocator, mib * MIB, &stream));
        let [first, second, third, fourth] = blocks;
        let (at, physical) = (second.ptr(), footprint(allocator, pool).physical);
        assert_eq!(pool.empty_cache().unwrap(), 0, "nothing is free");
        drop((second, fourth));
        // The work that used it may still run: the call waits for it.
        assert_eq!(pool.empty_cache().unwrap(), 14 * MIB as u64);
        let left = footprint(allocator, pool);
        assert_eq!(
            (left.physical, left.blocks),
            (physical - 14 * MIB as u64, 2)
        );
        assert_eq!(pool.empty_cache().unwrap(), 0);
        for (block, bytes) in [(&first, 4 * MIB), (&third, 2 * MIB)] {
            assert_eq!(rig.mismatches(block.ptr(), bytes, bytes as u32, &stream), 0);
        }
        let again = used(rig, allocator, 6 * MIB, &stream);
        assert_eq!(again.ptr(), at, "the addresses stayed with the pool");
        drop((first, third, again));
        pool.empty_cache().unwrap();
        assert_eq!(footprint(allocator, pool).physical, 0);
    });
}

#[test]
fn views_over_free_handles_go_and_others_keep_theirs() {
    eager(|rig, allocator, pool, [stream]| {
        let blocks = [(); 6].map(|()| used(rig, allocator, 2 * MIB, &stream));
        let [a, b, c, d, e, f] = blocks;
        drop((b, d));
        stream.synchronize().unwrap();
        let view = used(rig, allocator, 4 * MIB, &stream);
        assert_eq!(footprint(allocator, pool).physical, 12 * MIB as u64);
        drop(f);
        assert_eq!(pool.empty_cache().unwrap(), 2 * MIB as u64);
        assert_eq!(
            rig.mismatches(view.ptr(), 4 * MIB, 4 * MIB as u32, &stream),
            0
        );
        drop(view);
        // A block in one of the view's handles keeps the view, and the view its handles.
        stream.synchronize().unwrap();
        let inside = used(rig, allocator, 2 * MIB, &stream);
        assert_eq!(pool.empty_cache().unwrap(), 0);
        drop(inside);
        assert_eq!(pool.empty_cache().unwrap(), 4 * MIB as u64);
        let again = used(rig, allocator, 4 * MIB, &stream);
        drop((a, c, e, again));
    });
}

#[test]
fn a_pool_that_a_graph_or_a_capture_may_use_keeps_its_memory() {
    pooled(|rig, allocator, pool, [stream]| {
        let graph = capture(&pool, &stream, || {
            drop(used(rig, &allocator, 6 * MIB, &stream));
            assert_eq!(pool.empty_cache().unwrap(), 0);
        });
        assert_eq!(pool.empty_cache().unwrap(), 0);
        run(&graph, &stream);
        drop(graph);
        await_leases(&allocator, &pool, 0);
        assert_eq!(pool.empty_cache().unwrap(), 6 * MIB as u64);
        pool.release().unwrap();
        let error = graph_pool_error(pool.empty_cache().unwrap_err());
        assert_eq!(error, GraphPoolError::Released);
    });
}

#[test]
fn a_failed_release_leaves_the_rest_usable() {
    eager(|rig, allocator, pool, [stream]| {
        let Some(sim) = rig.sim() else { return };
        let blocks = [(); 4].map(|()| used(rig, allocator, 2 * MIB, &stream));
        let [a, b, c, d] = blocks;
        drop((b, d));
        stream.synchronize().unwrap();
        let code = sys::CUresult::CUDA_ERROR_INVALID_VALUE;
        sim.fail(FailPlan::call("cuMemUnmap", code).unwrap());
        pool.empty_cache().unwrap_err();
        allocator.check().unwrap();
        assert_eq!(rig.mismatches(a.ptr(), 2 * MIB, 2 * MIB as u32, &stream), 0);
        let others = [(); 3].map(|()| used(rig, allocator, 2 * MIB, &stream));
        drop((a, c, others));
    });
}

#[test]
fn random_blocks_outlive_emptied_caches() {
    eager(|rig, allocator, pool, [one, two]| {
        let (mut live, mut state, mut released) = (Vec::<(Block, usize, u32)>::new(), 7_u64, 0);
        for turn in 0..400_u32 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(turn.into());
            let pick = (state >> 33) as usize;
            let stream = [&one, &two][pick % 2];
            match pick / 2 % 8 {
                0..=3 if live.len() < 24 => {
                    let bytes = (pick / 16 % 20 + 1) * 512 * KIB;
                    let block = allocator.allocate(bytes, stream).unwrap();
                    rig.stamp(block.ptr(), bytes, turn, stream);
                    stream.synchronize().unwrap();
                    live.push((block, bytes, turn));
                }
                4..=6 if !live.is_empty() => {
                    let (block, bytes, stamp) = live.swap_remove(pick / 16 % live.len());
                    assert_eq!(rig.mismatches(block.ptr(), bytes, stamp, stream), 0);
                    drop(block);
                }
                _ => {
                    released += pool.empty_cache().unwrap();
                    allocator.check().unwrap();
                }
            }
        }
        assert!(released > 32 * MIB as u64, "{released}");
        for (block, bytes, stamp) in &live {
            assert_eq!(rig.mismatches(block.ptr(), *bytes, *stamp, &one), 0);
        }
    });
}
