//! The race detector fires where nothing orders two operations, and stays silent where something
//! does.

use crate::support::*;
use cualloc::sim::{Mode, Report};

fn is_race(report: &Report) -> bool {
    matches!(report, Report::Race { .. })
}

#[test]
fn unordered_writes_race_even_when_they_ran_one_after_the_other() {
    let bench = bench();
    let (a, b) = (bench.stream(), bench.stream());
    let memory = bench.alloc(4096);
    bench.sim.set_site("first owner");
    bench.fill(memory, 1024, 0, a);
    bench.sim.set_site("second owner");
    bench.memset(memory + 1000, 1, 8, b);
    let reports = bench.sim.take_reports();
    let [Report::Race { first, second }] = &reports[..] else {
        panic!("{reports:?}");
    };
    assert_eq!(
        (first.kind, first.label.as_str()),
        ("cualloc_fill", "first owner")
    );
    assert_eq!(
        (second.kind, second.label.as_str()),
        ("cuMemsetD8Async", "second owner")
    );
    assert_eq!(
        (first.stream, second.stream),
        (bench.stream_id(a), bench.stream_id(b))
    );
    assert_eq!((second.address, second.bytes), (memory + 1000, 8));
}

#[test]
fn a_query_orders_only_if_it_reports_completion() {
    let bench = bench();
    let (a, b) = (bench.stream(), bench.stream());
    let memory = bench.alloc(512);
    let event = bench.event();
    bench.sim.set_mode(Mode::Lag(1));
    bench.memset(memory, 1, 512, a);
    bench.record(event, a);
    assert_eq!(bench.query(event), CUDA_ERROR_NOT_READY);
    bench.memset(memory, 2, 512, b);
    bench.sim.advance_row();
    bench.reported(is_race);

    assert_eq!(bench.query(event), OK);
    bench.sync();
    bench.memset(memory, 3, 512, a);
    bench.record(event, a);
    bench.sim.advance_row();
    assert_eq!(bench.query(event), OK);
    bench.memset(memory, 4, 512, b);
    bench.sim.advance_row();
    bench.silent();
}
const CUDA_ERROR_NOT_READY: cualloc::driver::sys::CUresult =
    cualloc::driver::sys::CUresult::CUDA_ERROR_NOT_READY;

#[test]
fn aliases_of_one_handle_race_through_different_addresses() {
    let bench = bench();
    let (a, b) = (bench.stream(), bench.stream());
    let (home, handle) = bench.mapped(GRANULE);
    let view = bench.view(handle);
    bench.memset(home + 512, 7, 512, a);
    bench.memset(view + 512, 8, 512, b);
    bench.reported(is_race);
    bench.sync();
    bench.memset(home, 1, 512, a);
    bench.memset(view, 2, 512, a);
    bench.silent();
    assert_eq!(bench.word(home), 0x0202_0202);
}

#[test]
fn a_new_stream_gets_no_credit_for_the_work_of_a_destroyed_one() {
    let bench = bench();
    let old = bench.stream();
    let memory = bench.alloc(512);
    bench.memset(memory, 1, 512, old);
    let id = bench.stream_id(old);
    ok!(bench, cuStreamDestroy_v2(old));
    let new = bench.stream();
    assert_eq!(new, old, "handle values are reused");
    assert_ne!(bench.stream_id(new), id, "ids are not");
    bench.memset(memory, 2, 512, new);
    bench.reported(is_race);
}

#[test]
fn the_legacy_stream_orders_blocking_streams_but_not_others() {
    let bench = bench();
    let mut blocking = std::ptr::null_mut();
    ok!(bench, cuStreamCreate(&mut blocking, 0));
    let free = bench.stream();
    let legacy = std::ptr::null_mut();
    let memory = bench.alloc(512);
    bench.memset(memory, 1, 512, blocking);
    bench.memset(memory, 2, 512, legacy);
    bench.memset(memory, 3, 512, blocking);
    bench.memset(memory, 4, 512, legacy);
    bench.silent();
    bench.memset(memory, 5, 512, free);
    bench.reported(is_race);
}

#[test]
fn counters_updated_by_checks_on_two_streams_do_not_race() {
    let bench = bench();
    let (a, b) = (bench.stream(), bench.stream());
    let (left, right, bad) = (bench.alloc(4096), bench.alloc(4096), bench.alloc(4));
    bench.memset(bad, 0, 4, a);
    bench.sync();
    bench.fill(left, 1024, 5, a);
    bench.fill(right, 1024, 6, b);
    bench.check(left, 1024, 5, bad, a);
    bench.check(right, 1024, 7, bad, b);
    bench.silent();
    assert_eq!(bench.word(bad), 1024);
}

#[test]
fn long_runs_do_not_grow_and_stay_silent() {
    let bench = bench();
    let streams = [bench.stream(), bench.stream()];
    let memory = bench.alloc(1 << 20);
    let event = bench.event();
    for round in 0..50_000u64 {
        let (a, b) = (
            streams[round as usize % 2],
            streams[(round as usize + 1) % 2],
        );
        let at = memory + round * 7919 * 16 % (1 << 19);
        bench.memset(at, round as u8, 4000, a);
        bench.record(event, a);
        bench.wait(b, event);
    }
    bench.silent();
}
