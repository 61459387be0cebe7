//! Graphs: what a capture makes, in what order launches run it, and how long what it holds is held.

use crate::support::*;
use cualloc::driver::sys::*;
use cualloc::driver::{Dependency, Graph, GraphExec, Stream, UserObject};
use cualloc::sim::{Mode, Report, SimConfig, Site};
use std::collections::HashSet;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

pub const RELAXED: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
pub const PROGRAMMATIC: CUgraphEdgeData = CUgraphEdgeData {
    from_port: 1,
    to_port: 0,
    type_: 1,
    reserved: [0; 5],
};

pub fn stream(bench: &Bench) -> Stream {
    Stream::new(&bench.context).unwrap()
}

/// The work submitted in the closure, as a graph.
pub fn captured(stream: &Stream, work: impl FnOnce(CUstream)) -> Graph {
    let capture = stream.capture(RELAXED).unwrap();
    work(stream.raw());
    capture.end().unwrap()
}

pub fn launch(exec: &mut GraphExec, stream: &Stream) {
    // SAFETY: the simulator says what is wrong with the memory.
    unsafe { exec.launch(stream) }.unwrap();
}

/// Makes `to` wait for what `from` has.
fn order(bench: &Bench, from: CUstream, to: CUstream) {
    let event = bench.event();
    bench.record(event, from);
    bench.wait(to, event);
    ok!(bench, cuEventDestroy_v2(event));
}

/// An object that counts its ends.
pub fn counted(bench: &Bench) -> (UserObject, Arc<AtomicU32>) {
    let ends = Arc::new(AtomicU32::new(0));
    let seen = Arc::clone(&ends);
    let hook = move || {
        seen.fetch_add(1, Ordering::Relaxed);
    };
    (UserObject::new(&bench.context, hook).unwrap(), ends)
}

pub fn race(bench: &Bench) -> Option<(Site, Site)> {
    bench
        .sim
        .take_reports()
        .into_iter()
        .find_map(|report| match report {
            Report::Race { first, second } => Some((first, second)),
            _ => None,
        })
}

/// Two branches behind a first fill, on two streams, joined again; each fills its part of the memory.
fn forked(bench: &Bench, memory: u64, second_at: u64) -> Graph {
    let (main, side) = (stream(bench), bench.stream());
    captured(&main, |main| {
        bench.fill(memory, 1024, 0, main);
        order(bench, main, side);
        bench.memset(memory, 1, 512, main);
        bench.memset(memory + second_at, 2, 512, side);
        order(bench, side, main);
    })
}

#[test]
fn each_launch_runs_the_captured_work() {
    let bench = bench();
    let (memory, copy) = (bench.alloc(4096), bench.alloc(4096));
    let own = stream(&bench);
    let graph = captured(&own, |raw| {
        bench.fill(memory, 1024, 7, raw);
        ok!(bench, cuMemcpyDtoDAsync_v2(copy, memory, 4096, raw));
    });
    let mut exec = graph.instantiate().unwrap();
    assert_eq!(
        bench.sim.read_memory(copy, 4).unwrap(),
        [0xdb; 4],
        "not yet run"
    );
    drop(graph);
    for value in [3, 4] {
        bench.memset(copy, value, 4096, own.raw());
        launch(&mut exec, &own);
        assert_eq!(bench.word(copy + 40), 17);
    }
    bench.silent();
}

#[test]
fn nodes_depend_on_the_earlier_nodes_of_their_stream() {
    let bench = bench();
    let memory = bench.alloc(4096);
    let graph = forked(&bench, memory, 512);
    let nodes = graph.nodes().unwrap();
    assert_eq!(nodes.len(), 3, "events are no nodes");
    let edges: HashSet<(usize, usize)> = graph
        .edges()
        .unwrap()
        .into_iter()
        .map(|(later, first)| {
            assert!(first.is_complete());
            (first.node as usize, later as usize)
        })
        .collect();
    let [first, one, two] = [0, 1, 2].map(|at| nodes[at] as usize);
    assert_eq!(edges, HashSet::from([(first, one), (first, two)]));
    let mut kind = CUgraphNodeType(99);
    for (node, expected) in nodes.iter().zip([0, 2, 2]) {
        ok!(bench, cuGraphNodeGetType(*node, &mut kind));
        assert_eq!(kind.0, expected);
    }
    // The same once more, all at a time and with too little room.
    let (mut from, mut to) = ([null_mut(); 2], [null_mut(); 2]);
    let mut count = 1;
    let code = call!(
        bench,
        cuGraphGetEdges_v2(
            graph.raw(),
            from.as_mut_ptr(),
            to.as_mut_ptr(),
            null_mut(),
            &mut count
        )
    );
    assert_eq!(
        (code, count, from[0] as usize, to[1]),
        (OK, 1, first, null_mut())
    );
}

#[test]
fn a_stream_reports_the_dependencies_of_its_next_node() {
    let bench = bench();
    let (main, side) = (stream(&bench), stream(&bench));
    assert_eq!(main.capture_info().unwrap(), None);
    let capture = main.capture(RELAXED).unwrap();
    let empty = main.capture_info().unwrap().unwrap();
    assert!(empty.dependencies.is_empty());
    assert_eq!(Some(empty.id), main.capture_id().unwrap());
    bench.spin(1, main.raw());
    let first = main.capture_info().unwrap().unwrap().dependencies;
    assert_eq!(first.len(), 1);
    order(&bench, main.raw(), side.raw());
    assert_eq!(side.capture_info().unwrap().unwrap().dependencies, first);
    bench.spin(1, side.raw());
    bench.spin(1, main.raw());
    order(&bench, side.raw(), main.raw());
    let info = main.capture_info().unwrap().unwrap();
    assert_eq!(info.dependencies.len(), 2);
    let graph = capture.end().unwrap();
    assert_eq!(graph.raw(), info.graph);
    assert_eq!(graph.nodes().unwrap().len(), 3);
}

#[test]
fn a_capture_continues_in_an_existing_graph() {
    let bench = bench();
    let memory = bench.alloc(4096);
    let own = stream(&bench);
    let mut graph = Graph::new(&bench.context).unwrap();
    let handle = graph.raw();
    // SAFETY: nodes of the graph.
    unsafe {
        let fill = graph.add_memset(&[], memory, 5, 4096).unwrap();
        let join = graph.add_empty(&[fill]).unwrap();
        own.begin_capture_into(graph, &[Dependency::on(join)], RELAXED)
    }
    .unwrap();
    bench.memset(memory, 6, 4, own.raw());
    let graph = own.end_capture().unwrap();
    assert_eq!((graph.raw(), graph.nodes().unwrap().len()), (handle, 3));
    launch(&mut graph.instantiate().unwrap(), &own);
    let found = (bench.word(memory), bench.word(memory + 4));
    assert_eq!(found, (0x0606_0606, 0x0505_0505));
    bench.silent();
}

#[test]
fn nodes_that_nothing_orders_run_in_every_order() {
    for mode in [Mode::Instant, Mode::Lag(2)] {
        let mut orders = HashSet::new();
        for seed in 0..64 {
            let mut config = SimConfig::with_devices(1, 1 << 30);
            (config.seed, config.races, config.mode) = (seed, false, mode);
            let bench = with(config);
            let memory = bench.alloc(4096);
            let own = stream(&bench);
            let mut exec = forked(&bench, memory, 0).instantiate().unwrap();
            launch(&mut exec, &own);
            own.synchronize().unwrap();
            orders.insert(bench.word(memory));
        }
        assert_eq!(
            orders,
            HashSet::from([0x0101_0101, 0x0202_0202]),
            "{mode:?}"
        );
    }
}

/// Written through one address and read through another, behind an edge: as measured on views. Without the edge
/// the bytes are the same ones all the same.
#[test]
fn addresses_of_the_same_memory_race_unless_an_edge_orders_them() {
    let bench = bench();
    let (home, handle) = bench.mapped(GRANULE);
    let view = bench.view(handle);
    let bad = bench.alloc(4);
    for ordered in [true, false] {
        let (own, side) = (stream(&bench), bench.stream());
        let graph = captured(&own, |raw| {
            order(&bench, raw, side);
            bench.fill(home, 1024, 5, raw);
            if ordered {
                order(&bench, raw, side);
            }
            bench.check(view, 1024, 5, bad, side);
            order(&bench, side, raw);
        });
        let mut exec = graph.instantiate().unwrap();
        for _ in 0..20 {
            bench.memset(bad, 0, 4, own.raw());
            launch(&mut exec, &own);
            assert!(!ordered || bench.word(bad) == 0);
        }
        assert_eq!(race(&bench).is_some(), !ordered);
        bench.sync();
    }
}

/// Other memory at the same addresses, again and again: as measured.
#[test]
fn an_executable_uses_the_memory_mapped_at_its_addresses() {
    let bench = bench();
    let (at, mut handle) = bench.mapped(GRANULE);
    let own = stream(&bench);
    let graph = captured(&own, |raw| {
        bench.fill(at, 64, 9, raw);
        ok!(bench, cuMemcpyDtoDAsync_v2(at + 4096, at, 256, raw));
        bench.memset(at, 1, 4, raw);
    });
    let mut exec = graph.instantiate().unwrap();
    for _ in 0..20 {
        launch(&mut exec, &own);
        own.synchronize().unwrap();
        let words = [at, at + 4, at + 4096, at + 4100].map(|word| bench.word(word));
        assert_eq!(words, [0x0101_0101, 10, 9, 10]);
        ok!(bench, cuMemUnmap(at, GRANULE));
        ok!(bench, cuMemRelease(handle));
        handle = bench.create(GRANULE).1;
        assert_eq!(bench.map(at, GRANULE, handle), OK);
        assert_eq!(bench.access(at, GRANULE), OK);
        assert_eq!(bench.sim.read_memory(at, 4).unwrap(), [0xdb; 4], "fresh");
    }
    bench.silent();
}

/// It would wait for the driver's own thread: it is refused, and that is a finding.
#[test]
fn the_function_of_a_user_object_must_not_call_the_driver() {
    let bench = bench();
    let own = stream(&bench);
    let (driver, seen) = (bench.driver.clone(), Arc::new(AtomicU32::new(0)));
    let answer = Arc::clone(&seen);
    let object = UserObject::new(&bench.context, move || {
        let code = driver.device_count().unwrap_err().code();
        answer.store(code.0, Ordering::Relaxed);
    });
    let object = object.unwrap();
    let mut graph = captured(&own, |raw| bench.spin(1, raw));
    graph.retain(&object).unwrap();
    drop((object, graph));
    assert_eq!(
        seen.load(Ordering::Relaxed),
        CUresult::CUDA_ERROR_NOT_PERMITTED.0
    );
    reported!(
        bench,
        Report::Misuse {
            call: "cuDeviceGetCount",
            ..
        }
    );
    assert!(
        bench.driver.device_count().is_ok(),
        "afterwards everything is allowed again"
    );
}

#[test]
fn live_objects_are_counted() {
    let bench = bench();
    let own = stream(&bench);
    let before = bench.sim.leaks();
    let (object, _) = counted(&bench);
    let graph = captured(&own, |raw| bench.spin(1, raw));
    let exec = graph.instantiate().unwrap();
    let now = bench.sim.leaks();
    assert_eq!((now.graphs, now.executables, now.user_objects), (1, 1, 1));
    drop((object, graph, exec));
    assert_eq!(bench.sim.leaks(), before);
}

/// A thousand graphs, one after the other, leave nothing behind and need no more queues than one.
#[test]
fn graphs_are_created_and_destroyed() {
    let bench = bench();
    let memory = bench.alloc(4096);
    let own = stream(&bench);
    let before = bench.sim.leaks();
    let mut handles = HashSet::new();
    for _ in 0..1000 {
        let graph = captured(&own, |raw| bench.fill(memory, 64, 0, raw));
        let mut exec = graph.instantiate().unwrap();
        launch(&mut exec, &own);
        own.synchronize().unwrap();
        handles.insert((graph.raw() as usize, exec.raw() as usize));
    }
    assert_eq!(handles.len(), 1, "values of handles come back at once");
    assert_eq!(bench.sim.leaks(), before);
    bench.silent();
}

#[test]
fn a_race_within_a_graph_names_both_nodes() {
    let bench = bench();
    let memory = bench.alloc(4096);
    let own = stream(&bench);
    let apart = forked(&bench, memory, 512);
    launch(&mut apart.instantiate().unwrap(), &own);
    bench.silent();
    bench.sim.set_site("the branches");
    let graph = forked(&bench, memory, 256);
    bench.sim.set_site("the launch");
    launch(&mut graph.instantiate().unwrap(), &own);
    let (first, second) = race(&bench).unwrap();
    let named = HashSet::from([first.node, second.node]);
    let nodes = graph.nodes().unwrap();
    assert_eq!(named, HashSet::from([nodes[1] as u64, nodes[2] as u64]));
    for site in [first, second] {
        assert_eq!(
            (site.kind, site.label.as_str()),
            ("cuMemsetD8Async", "the branches")
        );
        assert_eq!(site.stream, own.id().unwrap());
        assert!(site.sequence == 2 || site.sequence == 3);
    }
}

#[test]
fn launches_are_ordered_with_their_stream_and_with_each_other() {
    let bench = bench();
    bench.manual();
    let memory = bench.alloc(4096);
    let (own, other) = (stream(&bench), stream(&bench));
    let mut exec = captured(&own, |raw| bench.fill(memory, 16, 1, raw))
        .instantiate()
        .unwrap();
    bench.memset(memory, 9, 64, own.raw());
    launch(&mut exec, &own);
    let node = |op: &&cualloc::sim::PendingOp| op.node != 0;
    let pending = bench.sim.pending();
    let lane = pending.iter().find(node).unwrap().stream;
    // Neither on their own stream nor, behind an earlier launch, on another one is there another order.
    assert_eq!(bench.sim.complete_stream(lane, 9), 0);
    launch(&mut exec, &other);
    bench.memset(memory, 3, 64, other.raw());
    bench.sim.complete_all();
    assert_eq!(bench.word(memory), 0x0303_0303);
    bench.silent();
    // Work that runs beside a launch races with its nodes.
    launch(&mut exec, &own);
    bench.memset(memory, 3, 64, other.raw());
    bench.sim.complete_all();
    let (first, second) = race(&bench).unwrap();
    assert_ne!(first.node == 0, second.node == 0);
    let eager = if first.node == 0 { first } else { second };
    assert_eq!(eager.stream, other.id().unwrap());
}

#[test]
fn waiting_for_the_stream_is_waiting_for_the_nodes() {
    let bench = bench();
    let (at, handle) = bench.mapped(GRANULE);
    let (own, other) = (stream(&bench), stream(&bench));
    let mut exec = forked(&bench, at, 512).instantiate().unwrap();
    launch(&mut exec, &own);
    let unmap = || call!(bench, cuMemUnmap(at, GRANULE));
    own.synchronize().unwrap();
    bench.memset(at, 1, 512, other.raw());
    other.synchronize().unwrap();
    bench.silent();
    assert_eq!(unmap(), OK);
    bench.silent();
    // The same addresses with other memory are as good, and none is a finding that names the node.
    assert_eq!(bench.map(at, GRANULE, handle), OK);
    assert_eq!(bench.access(at, GRANULE), OK);
    launch(&mut exec, &own);
    assert_eq!(unmap(), OK);
    reported!(bench, Report::InUse { user, .. } if user.node != 0);
}

#[test]
fn a_node_that_touches_unmapped_memory_is_named() {
    let mut config = SimConfig::with_devices(1, 1 << 30);
    config.sticky_errors = false;
    let bench = with(config);
    let (at, _handle) = bench.mapped(GRANULE);
    let plain = bench.alloc(4096);
    let own = stream(&bench);
    let graph = captured(&own, |raw| {
        bench.fill(at, 16, 0, raw);
        bench.fill(plain, 16, 0, raw);
    });
    let mut exec = graph.instantiate().unwrap();
    launch(&mut exec, &own);
    own.synchronize().unwrap();
    ok!(bench, cuMemUnmap(at, GRANULE));
    ok!(bench, cuMemFree_v2(plain));
    bench.silent();
    launch(&mut exec, &own);
    let gone: Vec<u64> = bench
        .sim
        .take_reports()
        .into_iter()
        .map(|report| match report {
            Report::Unmapped { site } => site.node,
            other => panic!("{other}"),
        })
        .collect();
    let nodes: Vec<u64> = graph
        .nodes()
        .unwrap()
        .iter()
        .map(|node| *node as u64)
        .collect();
    assert_eq!(gone, nodes);
}

#[test]
fn a_user_object_ends_with_the_last_holder() {
    let bench = bench();
    let own = stream(&bench);
    let (object, ends) = counted(&bench);
    let ended = || ends.load(Ordering::Relaxed);
    let mut graph = captured(&own, |raw| bench.spin(1, raw));
    graph.retain(&object).unwrap();
    drop(object);
    let clone = graph.try_clone().unwrap();
    let exec = clone.instantiate().unwrap();
    drop(graph);
    drop(clone);
    assert_eq!(ended(), 0, "the executable holds it");
    drop(exec);
    assert_eq!(ended(), 1);
}

#[test]
fn a_user_object_outlives_launches_under_way() {
    let bench = bench();
    bench.manual();
    let own = stream(&bench);
    let (object, ends) = counted(&bench);
    let mut graph = captured(&own, |raw| bench.spin(1, raw));
    graph.retain(&object).unwrap();
    drop(object);
    let mut exec = graph.instantiate().unwrap();
    drop(graph);
    launch(&mut exec, &own);
    launch(&mut exec, &own);
    drop(exec);
    assert_eq!(ends.load(Ordering::Relaxed), 0);
    bench.sim.complete_all();
    assert_eq!(ends.load(Ordering::Relaxed), 1);
}

/// Attached while the capture is under way, as measured; a capture that fails gives it up.
#[test]
fn a_capture_holds_the_memory_of_its_graph() {
    let bench = bench();
    let own = stream(&bench);
    for spoilt in [false, true] {
        let (object, ends) = counted(&bench);
        let capture = own.capture(RELAXED).unwrap();
        bench.spin(1, own.raw());
        let graph = own.capture_info().unwrap().unwrap().graph;
        let move_it = CU_GRAPH_USER_OBJECT_MOVE;
        ok!(bench, cuUserObjectRetain(object.raw(), 1));
        ok!(
            bench,
            cuGraphRetainUserObject(graph, object.raw(), 1, move_it)
        );
        drop(object);
        if spoilt {
            assert_ne!(call!(bench, cuStreamQuery(own.raw())), OK);
        }
        let ended = capture.end();
        assert_eq!(
            (ended.is_err(), ends.load(Ordering::Relaxed)),
            (spoilt, spoilt.into())
        );
        drop(ended);
        assert_eq!(ends.load(Ordering::Relaxed), 1);
    }
}

#[test]
fn an_update_replaces_work_and_user_objects() {
    let bench = bench();
    bench.manual();
    let (memory, own) = (bench.alloc(4096), stream(&bench));
    let fill = |value| captured(&own, |raw| bench.memset(memory, value, 64, raw));
    let (object, ends) = counted(&bench);
    let mut graph = fill(1);
    graph.retain(&object).unwrap();
    drop(object);
    let mut exec = graph.instantiate().unwrap();
    drop(graph);
    launch(&mut exec, &own);
    exec.update(&fill(2)).unwrap();
    assert_eq!(ends.load(Ordering::Relaxed), 0, "the launch has it");
    bench.sim.complete_all();
    assert_eq!(
        (bench.word(memory), ends.load(Ordering::Relaxed)),
        (0x0101_0101, 1)
    );
    let longer = captured(&own, |raw| {
        bench.spin(1, raw);
        bench.spin(1, raw);
    });
    let kernel = captured(&own, |raw| bench.spin(1, raw));
    for other in [longer, kernel] {
        let failed = exec.update(&other).unwrap_err().code();
        assert_eq!(failed, CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
    }
    launch(&mut exec, &own);
    bench.sim.complete_all();
    assert_eq!(bench.word(memory), 0x0202_0202);
}

#[test]
fn destroyed_handles_are_reported() {
    let bench = bench();
    let own = stream(&bench);
    let graph = captured(&own, |raw| bench.spin(1, raw));
    let exec = graph.instantiate().unwrap();
    let (graph_handle, exec_handle) = (graph.raw(), exec.raw());
    let node = graph.nodes().unwrap()[0];
    drop((graph, exec));
    let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
    let mut count = 0;
    assert_eq!(
        call!(bench, cuGraphGetNodes(graph_handle, null_mut(), &mut count)),
        invalid
    );
    assert_eq!(call!(bench, cuGraphLaunch(exec_handle, own.raw())), invalid);
    assert_eq!(
        call!(
            bench,
            cuGraphNodeGetDependencies(node, null_mut(), &mut count)
        ),
        invalid
    );
    assert_eq!(call!(bench, cuGraphDestroy(graph_handle)), invalid);
    let gone: Vec<&str> = bench
        .sim
        .take_reports()
        .into_iter()
        .map(|report| match report {
            Report::Destroyed { object, .. } => object,
            other => panic!("{other}"),
        })
        .collect();
    assert_eq!(gone, ["graph", "executable graph", "graph node", "graph"]);
}
