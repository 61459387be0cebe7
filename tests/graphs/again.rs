//! Requests in a capture that go where the last one went: what may not be remembered.

use super::support::*;
use cualloc::driver::Dependency;

fn present(stream: &Stream) -> Vec<Dependency> {
    stream.capture_info().unwrap().unwrap().dependencies
}

/// The stream continues behind these nodes.
fn set(rig: &Rig, stream: &Stream, on: &[Dependency]) {
    // SAFETY: the nodes are of the stream's capture, which this thread alone uses.
    unsafe { rig.driver.set_capture_dependencies(stream.raw(), on, false) }.unwrap();
}

/// Captures the work of streams, beginning on the first of them; the graph runs sixteen times, and the simulator
/// reports where two uses of memory race. The work says whether it was given what it had freed before.
fn captured<const N: usize>(given: bool, work: impl Fn(&Rig, &Allocator, &[Stream; N]) -> bool) {
    packed(|rig| {
        let allocator = rig.allocator();
        let (pool, streams) = (allocator.graph_pool().unwrap(), rig.streams::<N>());
        let mut same = None;
        let graph = capture(&pool, &streams[0], || {
            same = Some(work(rig, &allocator, &streams));
        });
        for _ in 0..16 {
            run(&graph, &streams[0]);
        }
        drop((graph, pool));
        rig.close(&allocator);
        assert_eq!(same, Some(given));
    });
}

/// The address of a block that was used and freed.
fn freed(rig: &Rig, allocator: &Allocator, bytes: usize, stream: &Stream) -> u64 {
    used(rig, allocator, bytes, stream).ptr()
}

/// A stream alone is set back to a node that was asked for: what it captures then runs beside what it had captured.
#[test]
fn a_stream_that_was_set_back_is_behind_nothing_that_came_later() {
    captured(false, |rig, allocator, [main]| {
        let base = used(rig, allocator, 512, main); // k0
        let first = present(main);
        let at = freed(rig, allocator, 4 * MIB, main); // k1
        set(rig, main, &first);
        freed(rig, allocator, 1024, main); // k2
        rig.stamp(base.ptr(), 512, 1, main); // k3
        rig.stamp(base.ptr(), 512, 1, main); // k4
        freed(rig, allocator, 4 * MIB, main) == at // k5, beside k1
    });
}

/// A stream unknown to the allocator joins: a stream that joins later is behind everything before it.
#[test]
fn an_unknown_stream_does_not_hide_the_streams_it_joined() {
    captured(true, |rig, allocator, [main, side, third]| {
        let base = used(rig, allocator, 512, main); // k0
        let b2 = used(rig, allocator, 512, main); // k1
        let b3 = used(rig, allocator, 512, main); // k2, chain k0 k1
        let _b4 = used(rig, allocator, 512, main); // k3
        third.wait_for(main).unwrap();
        rig.stamp(b3.ptr(), 512, 1, third); // t1
        drop(allocator.allocate(512, main).unwrap()); // chain to k3
        rig.stamp(b2.ptr(), 512, 1, main); // k4
        main.wait_for(third).unwrap();
        let at = freed(rig, allocator, 4 * MIB, main); // k5, behind k4 and t1
        rig.stamp(base.ptr(), 512, 1, main); // k6
        drop(allocator.allocate(512, main).unwrap());
        side.wait_for(main).unwrap();
        let same = freed(rig, allocator, 4 * MIB, side) == at;
        main.wait_for(side).unwrap();
        same
    });
}

/// Another thread's scope for its next capture gets this one: a scope of the capture comes before that of a thread.
#[test]
fn a_capture_that_another_threads_scope_gets_goes_to_its_pool() {
    pooled(|_, allocator, one, [main, side]| {
        let two = allocator.graph_pool().unwrap();
        let under_way = Capturing::begin(&main, MODE);
        side.wait_for(&main).unwrap();
        let _scope = one.enter(Scope::Thread).unwrap();
        let mut live = [0; 2];
        std::thread::scope(|threads| {
            let (entered, is_entered) = std::sync::mpsc::channel::<()>();
            let (go, wait) = std::sync::mpsc::channel::<()>();
            let (two, side, allocator) = (&two, &side, &allocator);
            let other = threads.spawn(move || {
                let scope = two.enter(Scope::NextCapture).unwrap();
                entered.send(()).unwrap();
                wait.recv().unwrap();
                drop(allocator.allocate(MIB, side).unwrap());
                scope
            });
            is_entered.recv().unwrap();
            drop(allocator.allocate(4 * MIB, &main).unwrap());
            go.send(()).unwrap();
            let bound = other.join().unwrap();
            let block = allocator.allocate(4 * MIB, &main).unwrap();
            live = [&one, two].map(|pool| pool.footprint().unwrap().live);
            drop(block);
            main.wait_for(side).unwrap();
            drop(bound);
        });
        drop(under_way.end().unwrap());
        assert_eq!(live[0], 0, "the capture's scope comes first");
    });
}

/// A filter enters another scope while it is asked.
#[test]
fn a_scope_entered_while_a_filter_ran_counts() {
    pooled(|_, allocator, one, [main]| {
        let two = allocator.graph_pool().unwrap();
        let under_way = Capturing::begin(&main, MODE);
        let _scope = one.enter(Scope::Thread).unwrap();
        let slot = Arc::new(Mutex::new(None));
        let (inner, pool) = (slot.clone(), Mutex::new(Some(two)));
        let _made = one
            .enter(Scope::When(Box::new(move |_| {
                if let Some(pool) = pool.lock().unwrap().take() {
                    let scope = pool.enter(Scope::When(Box::new(|_| true))).unwrap();
                    *inner.lock().unwrap() = Some((pool, scope));
                }
                false
            })))
            .unwrap();
        drop(allocator.allocate(4 * MIB, &main).unwrap());
        let (two, _entered) = slot.lock().unwrap().take().unwrap();
        let block = allocator.allocate(4 * MIB, &main).unwrap();
        let live = [&one, &two].map(|pool| pool.footprint().unwrap().live);
        drop(block);
        drop(under_way.end().unwrap());
        assert_eq!(live[0], 0, "the filter that was entered says yes");
    });
}

/// A scope of a thread is for that thread alone, also where another one named the stream in between.
#[test]
fn the_route_of_a_request_is_remembered_for_its_thread() {
    pooled(|rig, allocator, one, [main]| {
        let two = allocator.graph_pool().unwrap();
        let (go, wait) = std::sync::mpsc::channel::<Block>();
        let (entered, is_entered) = std::sync::mpsc::channel::<()>();
        let under_way = Capturing::begin(&main, MODE);
        let _scope = one.enter(Scope::Thread).unwrap();
        std::thread::scope(|threads| {
            let (two, main, allocator) = (&two, &main, &allocator);
            let other = threads.spawn(move || {
                let scope = two.enter(Scope::Thread).unwrap();
                entered.send(()).unwrap();
                let block = wait.recv().unwrap();
                block.record_stream(main).unwrap();
                let got = allocator.allocate(4 * MIB, main).unwrap();
                let live = two.footprint().unwrap().live;
                drop((got, block, scope));
                live
            });
            is_entered.recv().unwrap();
            let block = used(rig, allocator, MIB, main);
            drop(used(rig, allocator, 4 * MIB, main));
            go.send(block).unwrap();
            assert_eq!(other.join().unwrap(), 4 * MIB as u64, "of its own pool");
        });
        let _graph = under_way.end().unwrap();
    });
}

/// The block freed last is not the best fit if free memory lies beside it.
#[test]
fn the_last_freed_block_is_not_cut_from_a_longer_run() {
    packed(|rig| {
        for views in [false, true] {
            let allocator = rig.checked_with(Config::new().views(views));
            let (pool, main) = (allocator.graph_pool().unwrap(), rig.stream());
            let _graph = capture(&pool, &main, || {
                let blocks = [5, 2, 4, 4, 2].map(|mib| used(rig, &allocator, mib * MIB, &main));
                let held = || pool.footprint().unwrap().physical;
                let before = held();
                let [hole, one, x, y, two] = blocks;
                let at = hole.ptr();
                drop((hole, y));
                drop(x);
                let small = used(rig, &allocator, 4 * MIB, &main);
                assert_eq!(small.ptr(), at);
                drop((used(rig, &allocator, 8 * MIB, &main), small, one, two));
                assert_eq!(held(), before, "views {views}");
            });
        }
    });
}

/// A block that may not lie in a view does not, whatever is free there.
#[test]
fn a_request_without_views_gets_memory_at_home() {
    pooled(|rig, allocator, pool, [main]| {
        let _graph = capture(&pool, &main, || {
            let blocks = [(); 6].map(|()| used(rig, &allocator, 2 * MIB, &main));
            let [a, b, c, d, e, f] = blocks;
            drop((b, d));
            let held = || pool.footprint().unwrap().physical;
            let before = held();
            let view = used(rig, &allocator, 4 * MIB, &main);
            assert_eq!(held(), before, "it lies in a view");
            let at = view.ptr();
            let half = MIB as u64;
            let guard = allocator.guard(at + half, 2 * half).unwrap();
            let parts = guard.segments().iter();
            let parts: Vec<_> = parts
                .map(|part| (part.address, part.bytes, part.offset))
                .collect();
            assert_eq!(parts, [(at + half, half, half), (at + 2 * half, half, 0)]);
            drop(guard);
            drop(view);
            let request = Request::new(4 * MIB).views(false);
            let without = allocator.allocate_with(request, &main).unwrap();
            assert_ne!(without.ptr(), at);
            drop((without, a, c, e, f));
        });
    });
}

/// Of two free runs that are as long as a request the lower one is given, not the one that was freed last.
#[test]
fn the_lowest_of_equal_runs_is_chosen() {
    pooled(|rig, allocator, pool, [main]| {
        let _graph = capture(&pool, &main, || {
            let blocks = [4, 2, 4, 2].map(|mib| used(rig, &allocator, mib * MIB, &main));
            let [low, one, high, two] = blocks;
            let at = low.ptr().min(high.ptr());
            let (first, last) = match low.ptr() == at {
                true => (low, high),
                false => (high, low),
            };
            drop(first);
            drop(last);
            assert_eq!(used(rig, &allocator, 4 * MIB, &main).ptr(), at);
            drop((one, two));
        });
    });
}
