//! How a pool's memory is used again, inside a capture and across captures.

use super::support::*;

/// G2: layers on one stream, each with memory of its own while it runs, and none beside it.
#[test]
fn a_chain_of_layers_holds_the_blocks_that_are_live_together() {
    pooled(|rig, allocator, pool, [stream]| {
        // Each layer reads the one before it, so two are live at the same time; no size fits into another one.
        let sizes: Vec<usize> = (0..40)
            .map(|layer| (40 + 7 * (layer % 5)) * MIB + 512)
            .collect();
        let graph = capture(&pool, &stream, || {
            let mut last = used(rig, &allocator, sizes[0], &stream);
            for bytes in &sizes[1..] {
                last = used(rig, &allocator, *bytes, &stream);
            }
            drop(last);
        });
        let held = footprint(&allocator, &pool);
        eprintln!("{} held, {} live at once", held.physical, held.peak);
        assert!(
            held.physical as f64 <= held.peak as f64 * 1.02,
            "{} held, {} live at once",
            held.physical,
            held.peak
        );
        run(&graph, &stream);
    });
}

/// G3: memory that a side stream used is used again as soon as the join is behind it.
#[test]
fn memory_of_forks_is_used_again_behind_their_joins() {
    pooled(|rig, allocator, pool, [main, side]| {
        let graph = capture(&pool, &main, || {
            for _ in 0..20 {
                let input = used(rig, &allocator, 64 * MIB, &main);
                side.wait_for(&main).unwrap();
                rig.stamp(input.ptr(), 64 * MIB, 1, &side);
                input.record_stream(&side).unwrap();
                let own = used(rig, &allocator, 8 * MIB, &side);
                drop(input);
                drop(own);
                main.wait_for(&side).unwrap();
            }
        });
        let held = footprint(&allocator, &pool);
        assert_eq!(held.peak, 72 * MIB as u64);
        eprintln!("{} held, {} live at once", held.physical, held.peak);
        assert!(held.physical as f64 <= held.peak as f64 * 1.05, "{held:?}");
        for _ in 0..8 {
            run(&graph, &main);
        }
    });
}

#[test]
fn memory_of_a_branch_is_not_given_to_a_parallel_branch() {
    pooled(|rig, allocator, pool, [main, side]| {
        let graph = capture(&pool, &main, || {
            rig.stamp(used(rig, &allocator, MIB, &main).ptr(), MIB, 0, &main);
            side.wait_for(&main).unwrap();
            let first = used(rig, &allocator, 4 * MIB, &main);
            let at = first.ptr();
            drop(first);
            let beside = used(rig, &allocator, 4 * MIB, &side);
            assert_ne!(beside.ptr(), at, "nothing puts the branches in order");
            main.wait_for(&side).unwrap();
            let behind = used(rig, &allocator, 4 * MIB, &main);
            assert_eq!(behind.ptr(), at, "its own memory");
            drop(beside);
            drop(behind);
            let second = allocator.allocate(4 * MIB, &main).unwrap();
            assert_eq!(second.ptr(), at);
        });
        for _ in 0..16 {
            run(&graph, &main);
        }
    });
}

/// G5 on a simulated device: several graphs in one pool, in any order and from several streams.
#[test]
fn graphs_of_any_sizes_in_any_order_share_what_the_largest_needs() {
    packed(|rig| {
        let orders: [fn(u64) -> u64; 3] = [|at| at, |at| 34 - at, |at| at * 11 % 35];
        let mut alone = 0;
        let turns = orders.into_iter().cycle().zip([1, 1, 1, 4, 4, 4]);
        for (turn, (order, lanes)) in turns.enumerate() {
            let allocator = rig.checked();
            let pool = allocator.graph_pool().unwrap();
            let streams: [Stream; 4] = rig.streams();
            let batch = |size: u64, stream: &Stream| {
                capture(&pool, stream, || {
                    let bytes = (size as usize + 1) * 4 * MIB + 512;
                    let first = used(rig, &allocator, bytes, stream);
                    let second = used(rig, &allocator, bytes / 2, stream);
                    drop(first);
                    drop(used(rig, &allocator, bytes / 3, stream));
                    drop(second);
                })
            };
            if turn == 0 {
                let graph = batch(34, &streams[0]);
                alone = footprint(&allocator, &pool).physical;
                drop(graph);
                await_leases(&allocator, &pool, 0);
                allocator.trim(0).unwrap();
                assert_eq!(footprint(&allocator, &pool).physical, 0);
            }
            let graphs: Vec<Graph> = (0..35)
                .map(|at| batch(order(at), &streams[at as usize % lanes]))
                .collect();
            let held = footprint(&allocator, &pool);
            eprintln!(
                "turn {turn}: {} held, {alone} by the largest alone",
                held.physical
            );
            assert!(held.physical as f64 <= alone as f64 * 1.02, "turn {turn}");
            for graph in graphs.iter().rev() {
                run(graph, &streams[0]);
            }
        }
    });
}

#[test]
fn a_block_that_is_live_at_the_end_keeps_its_contents_beside_other_captures() {
    pooled(|rig, allocator, pool, [first, second]| {
        let mut output = None;
        let one = capture(&pool, &first, || {
            output = Some(used(rig, &allocator, 3 * MIB, &first));
        });
        let two = graph_of((rig, &allocator), &pool, 16 * MIB, &second);
        run(&one, &first);
        run(&two, &first);
        let block = output.take().unwrap();
        assert_eq!(
            rig.mismatches(block.ptr(), 3 * MIB, 3 * MIB as u32, &first),
            0
        );
    });
}

/// G11: an output that work outside still reads is given to no capture.
#[test]
fn memory_is_not_given_to_a_capture_while_work_outside_reads_it() {
    pooled(|rig, allocator, pool, [stream, reader]| {
        let (graph, block) =
            capture_output(&pool, &stream, || used(rig, &allocator, 2 * MIB, &stream));
        run(&graph, &stream);
        let at = block.ptr();
        let held = rig.hold(&reader);
        rig.stamp(at, 2 * MIB, 5, &reader);
        block.record_stream(&reader).unwrap();
        drop(block);
        let events = rig.calls("cuStreamWaitEvent");
        let _next = capture(&pool, &stream, || {
            let block = used(rig, &allocator, 2 * MIB, &stream);
            assert_ne!(block.ptr(), at, "the reader is not done");
        });
        assert_eq!(
            rig.calls("cuStreamWaitEvent"),
            events,
            "no wait became the graph's"
        );
        held.release();
        rig.settle(&reader);
        rig.settle(&stream);
        let _last = capture(&pool, &stream, || {
            let block = used(rig, &allocator, 4 * MIB, &stream);
            let blocks = at..at + 2 * MIB as u64;
            assert!(
                blocks.contains(&block.ptr()),
                "both are free, and side by side"
            );
        });
    });
}

/// G13: the layout of any earlier time can be had again.
#[test]
fn a_pool_can_be_restored_to_any_checkpoint_in_any_order() {
    pooled(|rig, allocator, pool, [stream]| {
        let (mut graphs, mut points, mut live) = (Vec::new(), Vec::new(), Vec::<Block>::new());
        for turn in 0..50usize {
            graphs.push(capture(&pool, &stream, || {
                drop(used(rig, &allocator, (turn % 7 + 1) * MIB, &stream));
                live.push(used(
                    rig,
                    &allocator,
                    (turn * 13 % 11 + 1) * 300 * KIB,
                    &stream,
                ));
                if turn % 3 == 2 {
                    drop(live.remove(turn % live.len()));
                }
            }));
            rig.settle(&stream);
            points.push(pool.checkpoint().unwrap());
        }
        let physical = footprint(&allocator, &pool).physical;
        let mut owners: Vec<Block> = live;
        for turn in 0..50 {
            let point = &points[turn * 17 % 50];
            // SAFETY: blocks that cease are only freed.
            let restored = unsafe { pool.restore(point) }.unwrap();
            // Those of blocks that ceased free nothing.
            let gone = |block: &Block| restored.ceased.contains(&block.ptr());
            let (ceased, kept): (Vec<Block>, Vec<Block>) = owners.into_iter().partition(gone);
            for block in ceased {
                let error = block.free().unwrap_err();
                assert_matches!(error.error, Error::NotLive { .. });
                std::mem::forget(error);
            }
            owners = kept;
            owners.extend(restored.revived);
            let mut found: Vec<_> = owners.iter().map(|b| (b.ptr(), b.size())).collect();
            found.sort_unstable();
            assert_eq!(found, point.blocks().collect::<Vec<_>>());
            assert_eq!(footprint(&allocator, &pool).physical, physical);
        }
        let other = allocator.graph_pool().unwrap();
        // SAFETY: it is refused.
        let error = unsafe { other.restore(&points[0]) }.unwrap_err();
        assert_eq!(graph_pool_error(error), GraphPoolError::ForeignCheckpoint);
    });
}

/// New work runs once outside of captures before it is captured, which needs no memory beside that of earlier graphs.
#[test]
fn a_warm_up_gets_the_memory_of_graphs_where_the_program_permits_it() {
    for permitted in [false, true] {
        pooled(|rig, allocator, pool, [stream]| {
            if permitted {
                // SAFETY: no block is live during a launch.
                unsafe { pool.reuse_graph_memory() }.unwrap();
            }
            let work = |size: usize| {
                let input = used(rig, &allocator, size, &stream);
                let output = used(rig, &allocator, size / 2, &stream);
                drop(input);
                drop(output);
            };
            let mut graphs = Vec::new();
            for size in [16 * MIB, 24 * MIB, 20 * MIB, 32 * MIB] {
                let scope = pool.enter(Scope::Thread).unwrap();
                work(size);
                drop(scope);
                rig.settle(&stream);
                graphs.push(capture(&pool, &stream, || work(size)));
                graphs.iter().for_each(|graph| run(graph, &stream));
            }
            let held = footprint(&allocator, &pool).physical as usize;
            assert_eq!(held < 64 * MIB, permitted, "{held}");
        });
    }
}

/// A snapshot lists free memory between two live blocks as one block, whichever graphs used its parts.
#[test]
fn a_snapshot_after_a_restore_equals_the_one_at_the_checkpoint() {
    pooled(|rig, allocator, pool, [stream]| {
        let mut blocks = Vec::new();
        let mut captured = || {
            capture(&pool, &stream, || {
                blocks.push(used(rig, &allocator, 512, &stream));
            })
        };
        let layout = || {
            let snapshot = pool.snapshot().unwrap();
            let blocks = snapshot.iter().flat_map(|segment| &segment.blocks);
            let blocks = blocks.map(|block| (block.address, block.size, block.state));
            blocks.collect::<Vec<_>>()
        };
        let mut graphs = vec![captured()];
        rig.settle(&stream);
        let (point, before) = (pool.checkpoint().unwrap(), layout());
        assert_eq!(before.len(), 2, "a live block, and free memory: {before:?}");
        graphs.push(captured());
        rig.settle(&stream);
        // SAFETY: blocks that cease are only freed.
        let restored = unsafe { pool.restore(&point) }.unwrap();
        assert_eq!(restored.ceased, [blocks[1].ptr()]);
        assert_eq!(layout(), before);
        std::mem::forget(blocks.pop().unwrap().free().unwrap_err());
    });
}
