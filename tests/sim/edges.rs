//! Edges of graphs, and what may leave a node that is not over.

use super::graphs::{PROGRAMMATIC, RELAXED, captured, counted, launch, race, stream};
use crate::common::wait_until;
use crate::support::*;
use cualloc::driver::Dependency;
use cualloc::driver::sys::*;
use cualloc::sim::{Report, SimConfig};
use std::ptr::{null, null_mut};
use std::sync::atomic::Ordering;

#[test]
fn data_of_edges_is_kept_and_never_lost_in_silence() {
    let bench = bench();
    let own = stream(&bench);
    let capture = own.capture(RELAXED).unwrap();
    bench.spin(1, own.raw());
    let first = own.capture_info().unwrap().unwrap().dependencies[0].node;
    let early = Dependency::on(first).with_edge(PROGRAMMATIC);
    // SAFETY: a node of the capture.
    unsafe {
        bench
            .driver
            .set_capture_dependencies(own.raw(), &[early], false)
    }
    .unwrap();
    assert_eq!(own.capture_info().unwrap().unwrap().dependencies, [early]);
    let lossy = CUresult::CUDA_ERROR_LOSSY_QUERY;
    let mut status = CUstreamCaptureStatus(9);
    let (mut nodes, mut edges, mut count) = (null(), null(), 0);
    let (raw, none) = (own.raw(), null_mut());
    let code = call!(
        bench,
        cuStreamGetCaptureInfo_v2(raw, &mut status, none, null_mut(), &mut nodes, &mut count)
    );
    assert_eq!(code, lossy);
    for (edges, expected) in [(null_mut(), lossy), (&raw mut edges, OK)] {
        let none = null_mut();
        let code = call!(
            bench,
            cuStreamGetCaptureInfo_v3(
                raw,
                &mut status,
                none,
                null_mut(),
                &mut nodes,
                edges,
                &mut count
            )
        );
        assert_eq!(code, expected);
    }
    assert_eq!(count, 1);
    bench.spin(1, own.raw());
    let graph = capture.end().unwrap();
    let last = graph.nodes().unwrap()[1];
    assert_eq!(graph.edges().unwrap(), [(last, early)]);
    let (mut node, mut count) = (null_mut(), 1);
    assert_eq!(
        call!(
            bench,
            cuGraphNodeGetDependencies(last, &mut node, &mut count)
        ),
        lossy
    );
    assert_eq!(
        call!(
            bench,
            cuGraphNodeGetDependencies_v2(last, &mut node, null_mut(), &mut count)
        ),
        lossy
    );
    // The count alone is no query of edges.
    ok!(
        bench,
        cuGraphNodeGetDependencies(last, null_mut(), &mut count)
    );
    assert_eq!(count, 1);
}

/// The later kernel may run beside the earlier one, yet never before what that one waits for.
#[test]
fn a_programmatic_edge_orders_behind_the_beginning_only() {
    let bench = bench();
    let memory = bench.alloc(4096);
    let own = stream(&bench);
    let early = |second_word: u64, third_word: u64| {
        captured(&own, |raw| {
            bench.fill(memory, 8, 0, raw);
            bench.fill(memory + second_word * 4, 8, 0, raw);
            let last = own.capture_info().unwrap().unwrap().dependencies[0];
            let early = last.with_edge(PROGRAMMATIC);
            // SAFETY: a node of the capture.
            unsafe { bench.driver.set_capture_dependencies(raw, &[early], false) }.unwrap();
            bench.fill(memory + third_word * 4, 8, 0, raw);
            // The last node stands for both in what comes later.
            // SAFETY: as above.
            unsafe { bench.driver.set_capture_dependencies(raw, &[last], true) }.unwrap();
        })
    };
    for (second, third, races) in [(8, 0, false), (8, 8, true)] {
        let graph = early(second, third);
        launch(&mut graph.instantiate().unwrap(), &own);
        let found = race(&bench);
        assert_eq!(found.is_some(), races, "{found:?}");
        bench.sync();
    }
}

/// As the driver's documentation has it: such an edge leads from a kernel to a kernel, from a port for it.
#[test]
fn programmatic_edges_are_between_kernels() {
    let bench = bench();
    let memory = bench.alloc(4096);
    let own = stream(&bench);
    let raw = own.raw();
    let capture = own.capture(RELAXED).unwrap();
    let present = || own.capture_info().unwrap().unwrap().dependencies[0];
    // SAFETY: nodes of the capture.
    let set = |on: Dependency| unsafe { bench.driver.set_capture_dependencies(raw, &[on], false) };
    let invalid = |on| {
        let refused = set(on).unwrap_err();
        assert_eq!(refused.code(), CUresult::CUDA_ERROR_INVALID_VALUE);
    };
    bench.memset(memory, 1, 64, raw);
    invalid(present().with_edge(PROGRAMMATIC));
    bench.spin(1, raw);
    let kernel = present();
    for (from_port, to_port, type_) in [(1, 0, 0), (0, 0, 1), (3, 0, 1), (1, 1, 1), (1, 0, 2)] {
        invalid(kernel.with_edge(CUgraphEdgeData {
            from_port,
            to_port,
            type_,
            ..PROGRAMMATIC
        }));
    }
    assert_eq!(present(), kernel, "what is refused changes nothing");
    set(kernel.with_edge(PROGRAMMATIC)).unwrap();
    let code = call!(bench, cuMemsetD8Async(memory, 1, 64, raw));
    assert_eq!(code, CUresult::CUDA_ERROR_INVALID_VALUE);
    bench.spin(1, raw);
    // The next node has no dependency.
    // SAFETY: no node is named.
    unsafe { bench.driver.set_capture_dependencies(raw, &[], false) }.unwrap();
    assert!(own.capture_info().unwrap().unwrap().dependencies.is_empty());
    drop(capture.end().unwrap());
}

/// A real driver tells the end of an object on a thread of its own.
#[test]
fn a_user_object_may_end_after_the_call_that_dropped_it() {
    let bench = with(SimConfig {
        late_destructors: true,
        ..SimConfig::with_devices(1, 1 << 30)
    });
    let own = stream(&bench);
    let late = (0..1000).any(|_| {
        let (object, ends) = counted(&bench);
        let mut graph = captured(&own, |raw| bench.spin(1, raw));
        graph.retain(&object).unwrap();
        drop(object);
        drop(graph);
        let late = ends.load(Ordering::Relaxed) == 0;
        wait_until("the object ends", || ends.load(Ordering::Relaxed) > 0);
        late
    });
    assert!(late);
}

/// A user object ends behind the launches that held it: the function called at the end may release their memory.
#[test]
fn a_thread_that_learns_of_a_launchs_end_is_ordered_after_it() {
    for told in [true, false] {
        let bench = bench();
        let own = stream(&bench);
        let (at, _) = bench.mapped(2 * MIB as usize);
        let (object, ends) = counted(&bench);
        let mut graph = captured(&own, |raw| bench.memset(at, 1, 4096, raw));
        if told {
            graph.retain(&object).unwrap();
        }
        drop(object);
        let mut exec = graph.instantiate().unwrap();
        drop(graph);
        launch(&mut exec, &own);
        drop(exec);
        assert_eq!(ends.load(Ordering::Relaxed), 1);
        ok!(bench, cuMemUnmap(at, 2 * MIB as usize));
        match told {
            true => bench.silent(),
            false => reported!(bench, Report::InUse { .. }),
        }
    }
}
