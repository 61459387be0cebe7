//! Logs of calls that no allocator may make, one for each thing that the judge finds wrong with graphs, and beside each
//! the log that differs from it in what makes it right.

use cualloc::driver::sys::*;

use super::checker::tracker::Tracker;

const MIB: u64 = 1 << 20;
const POOL: Option<u64> = Some(1);
const OTHER: Option<u64> = Some(2);
/// Where the pool's memory is mapped, and once more.
const A: u64 = 1 << 32;
const VIEW: u64 = 2 << 32;
const GRAPH: u64 = 0x77;
const EXEC: u64 = 0xee;
const EVENT: u64 = 0xe0;

/// A log, of streams by small numbers.
struct Log(Tracker);

fn raw<T>(value: u64) -> *mut T {
    value as usize as *mut T
}

fn stream(number: u64) -> CUstream {
    raw(0x100 + number)
}

impl Log {
    /// Sixteen megabytes at [`A`] and, the same ones, at [`VIEW`].
    fn new() -> Log {
        let mut tracker = Tracker::new(CuFunctions::default());
        tracker.handle(1);
        for at in [A, VIEW] {
            tracker.mapped(at, 16 * MIB, 1, 0);
            tracker.accessible(at, 16 * MIB);
        }
        for number in 0..4 {
            tracker.created(stream(number), false);
        }
        Log(tracker)
    }

    fn block(&mut self, pool: Option<u64>, at: u64, on: u64) {
        let lane = self.0.number(stream(on));
        self.0.handed_out_of(pool, at, MIB, lane);
    }

    fn free(&mut self, at: u64) {
        self.0.freed(at).expect("a live block");
    }

    fn work(&mut self, on: u64, at: u64) {
        self.0.works(stream(on), &[(at, MIB)]);
    }

    /// A block that is used, and freed.
    fn layer(&mut self, at: u64, on: u64) {
        self.block(POOL, at, on);
        self.work(on, at);
        self.free(at);
    }

    fn begin(&mut self, on: u64) {
        self.0.captures(stream(on), None);
    }

    fn end(&mut self, on: u64, graph: u64) {
        self.0.captured(stream(on), || raw(graph));
    }

    /// The other stream's next thing comes behind this one's last.
    fn order(&mut self, from: u64, to: u64) {
        self.0.event(raw(EVENT));
        self.0.records(raw(EVENT), stream(from));
        self.0.waits(stream(to), raw(EVENT));
    }

    /// A graph with a node on a block that is freed, at the start of the pool, and an executable of it.
    fn graph(&mut self) {
        self.begin(0);
        self.layer(A, 0);
        self.end(0, GRAPH);
        self.0.instantiated(raw(EXEC), raw(GRAPH));
    }

    fn launch(&mut self, on: u64) {
        self.0.launched(raw(EXEC), stream(on));
    }

    fn see(&mut self, on: u64) {
        self.0.stream_done(stream(on));
    }

    #[track_caller]
    fn fine(&mut self) {
        assert_eq!(self.0.take_violation(), None);
    }

    #[track_caller]
    fn fine_if(&mut self, right: bool, otherwise: &str) {
        match right {
            true => self.fine(),
            false => self.wrong(otherwise),
        }
    }

    #[track_caller]
    fn wrong(&mut self, words: &str) {
        let violation = self.0.take_violation().expect("a violation");
        assert!(violation.contains(words), "{violation}");
    }
}

// ---- reuse inside a capture --------------------------------------------------------------------

#[test]
fn a_branch_gets_no_bytes_of_a_parallel_branch() {
    for joined in [true, false] {
        let mut log = Log::new();
        log.begin(0);
        log.order(0, 1);
        log.layer(A, 0);
        if joined {
            log.order(0, 1);
        }
        // The same bytes at another address.
        log.block(POOL, VIEW, 1);
        log.fine_if(joined, "block 0x200000000 for stream 1 of capture 1: byte 0x0 of it is touched by a node of stream 0 with \
                 the block 0x100000000, which stream 1 is not behind");
    }
}

#[test]
fn order_in_a_capture_goes_over_other_streams() {
    let mut log = Log::new();
    log.begin(0);
    log.layer(A, 0);
    log.order(0, 1);
    log.work(1, A + 8 * MIB);
    log.order(1, 2);
    log.block(POOL, A, 2);
    log.fine();
}

#[test]
fn a_node_that_may_run_beside_the_next_one_is_not_over() {
    for whole in [true, false] {
        let mut log = Log::new();
        log.begin(0);
        log.order(0, 1);
        log.layer(A, 0);
        log.0.named(stream(0), 5);
        log.0.depends(stream(1), &[(5, whole)], true);
        log.block(POOL, A, 1);
        log.fine_if(whole, "which stream 1 is not behind");
        // Who launches the next one itself waits in it.
        log.0.depends(stream(0), &[(5, false)], false);
        log.layer(A + MIB, 0);
        log.block(POOL, A + MIB, 0);
        log.fine();
    }
}

#[test]
fn a_stream_that_is_set_back_is_not_behind_its_own_work() {
    for back in [false, true] {
        let mut log = Log::new();
        log.begin(0);
        log.work(0, A + 8 * MIB);
        log.0.named(stream(0), 5);
        log.layer(A, 0);
        log.0.named(stream(0), 6);
        log.0
            .depends(stream(0), &[(if back { 5 } else { 6 }, true)], false);
        log.block(POOL, A, 0);
        log.fine_if(!back, "which stream 0 is not behind");
        // It waits in no node of its own for what began on the branch.
        log.free(A);
        log.0.depends(stream(0), &[(6, false)], true);
        log.block(POOL, A, 0);
        log.fine_if(!back, "which stream 0 is not behind");
    }
}

#[test]
fn captures_of_one_graph_are_branches_of_it() {
    for behind in [vec![(5, true)], vec![]] {
        let mut log = Log::new();
        log.begin(0);
        log.layer(A, 0);
        log.0.named(stream(0), 5);
        log.end(0, GRAPH);
        let good = !behind.is_empty();
        log.0.captures(stream(1), Some((raw(GRAPH), behind)));
        log.block(POOL, A, 1);
        log.fine_if(good, "which stream 1 is not behind");
    }
}

#[test]
fn a_capture_gets_nothing_that_work_outside_may_use() {
    for seen in [true, false] {
        let mut log = Log::new();
        log.layer(A, 0);
        if seen {
            log.see(0);
        }
        // Also of its own stream: the launch may be another one's.
        log.begin(0);
        log.block(POOL, A, 0);
        log.fine_if(seen, "may be used by work of stream 0 outside until 1");
    }
}

#[test]
fn captures_of_a_pool_share_it_and_those_of_others_do_not() {
    let mut log = Log::new();
    log.graph();
    log.begin(1);
    log.block(POOL, A, 1);
    log.fine();
    log.free(A);
    log.block(OTHER, A, 1);
    log.wrong("of pool 2 has memory of pool 1");
    log.free(A);
    log.block(None, A, 2);
    log.wrong("of no pool has memory of pool 1");
}

/// A handle whose memory no pool had is a pool's when nothing of it is mapped elsewhere any more.
#[test]
fn memory_of_no_pool_moves_into_one_without_its_mappings() {
    for (owner, gone) in [(None, 2), (None, 1), (POOL, 2)] {
        let mut log = Log::new();
        log.block(owner, A, 0);
        log.free(A);
        for at in [A, VIEW].into_iter().take(gone) {
            log.0.unmapped("cuMemUnmap", at, 16 * MIB);
        }
        log.0.mapped(3 * A, 16 * MIB, 1, 0);
        log.0.accessible(3 * A, 16 * MIB);
        log.block(OTHER, 3 * A, 0);
        match (owner, gone) {
            (None, 2) => log.fine(),
            (None, _) => log.wrong("of pool 2 has memory of no pool"),
            _ => log.wrong("of pool 2 has memory of pool 1"),
        }
    }
}

/// Nothing happened in a capture that failed.
#[test]
fn a_capture_that_failed_uses_nothing() {
    for graph in [0, GRAPH] {
        let mut log = Log::new();
        log.begin(0);
        log.layer(A, 0);
        log.end(0, graph);
        log.block(POOL, A, 1);
        match graph {
            0 => log.fine(),
            _ => log.wrong("has memory that graph 0x77 may touch at 0x100000000"),
        }
        log.work(1, A);
        log.fine();
    }
}

// ---- leases -------------------------------------------------------------------------------------

/// What is left of a graph with its executable after a number of steps: both, the executable, its launch in progress,
/// nothing.
fn left(steps: usize) -> Log {
    let mut log = Log::new();
    log.graph();
    if steps > 0 {
        log.0.graph_destroyed(raw(GRAPH));
    }
    if steps > 1 {
        log.launch(1);
        log.0.exec_destroyed(raw(EXEC));
    }
    if steps > 2 {
        log.see(1);
    }
    log
}

/// A graph, an executable and a launch under way, each alone.
#[test]
fn memory_of_a_graph_is_not_given_out_before_the_graph_ends() {
    for last in 0..4 {
        let mut log = left(last);
        // Through another address, and whichever stream asks.
        log.block(POOL, VIEW, 1);
        match last {
            3 => log.fine(),
            _ => log.wrong("block 0x200000000 for stream 1 has memory that graph 0x77 may touch"),
        }
        let mut log = left(last);
        log.0.unmapped("cuMemUnmap", A, 16 * MIB);
        match last {
            3 => log.fine(),
            _ => log.wrong("cuMemUnmap of 0x100000000..0x101000000: graph 0x77 may touch 0x100000000..0x100100000"),
        }
    }
    let mut log = Log::new();
    log.graph();
    log.0.addresses_freed(A, 16 * MIB);
    log.wrong("cuMemAddressFree");
}

#[test]
fn clones_and_updates_keep_their_sources() {
    let mut log = Log::new();
    log.graph();
    log.0.graph_cloned(raw(GRAPH + 1), raw(GRAPH));
    log.0.graph_destroyed(raw(GRAPH));
    log.0.exec_destroyed(raw(EXEC));
    log.block(POOL, A, 1);
    log.wrong("may touch");
    log.free(A);
    log.0.graph_destroyed(raw(GRAPH + 1));
    log.block(POOL, A, 1);
    log.fine();
    // An executable that is changed has what it was changed to, and not what it was made of.
    let mut log = Log::new();
    log.graph();
    log.begin(1);
    log.layer(A + MIB, 1);
    log.end(1, GRAPH + 1);
    log.0.updated(raw(EXEC), raw(GRAPH + 1));
    for graph in [GRAPH, GRAPH + 1] {
        log.0.graph_destroyed(raw(graph));
    }
    log.block(POOL, A, 1);
    log.fine();
    log.block(POOL, A + MIB, 1);
    log.wrong("may touch at 0x100100000");
}

#[test]
fn a_block_that_a_capture_recorded_or_freed_is_its_graphs() {
    for how in ["recorded", "freed", "neither"] {
        let mut log = Log::new();
        log.block(POOL, A, 0);
        log.begin(if how == "freed" { 0 } else { 1 });
        let capturing = if how == "freed" { 0 } else { 1 };
        if how == "recorded" {
            let lane = log.0.number(stream(1));
            log.0.recorded(A, lane);
        }
        if how != "neither" {
            log.work(capturing, A);
        }
        if how == "freed" {
            log.free(A);
        }
        log.end(capturing, GRAPH);
        if how != "freed" {
            log.free(A);
        }
        log.block(POOL, A, 0);
        match how {
            "neither" => log.fine(),
            _ => log.wrong("may touch at 0x100000000"),
        }
    }
}

#[test]
fn a_graph_built_by_nodes_keeps_all_of_a_retained_pool() {
    let mut log = Log::new();
    log.layer(A, 0);
    log.0.graph(raw(GRAPH));
    log.block(POOL, A, 0);
    log.free(A);
    log.fine();
    log.0.retained(raw(GRAPH), 1);
    log.block(POOL, A + 8 * MIB, 0);
    log.wrong("may touch");
    log.free(A + 8 * MIB);
    log.0.graph_destroyed(raw(GRAPH));
    log.block(POOL, A + 8 * MIB, 0);
    log.fine();
}

/// The driver reports the end of the launches through a user object.
#[test]
fn the_end_of_a_user_object_is_the_end_of_launches() {
    for reported in [true, false] {
        let mut log = Log::new();
        log.begin(0);
        log.layer(A, 0);
        log.end(0, GRAPH);
        log.0.object(raw(0x99), 7);
        log.0.object_retained(raw(GRAPH), raw(0x99));
        log.0.instantiated(raw(EXEC), raw(GRAPH));
        log.launch(2);
        log.0.graph_destroyed(raw(GRAPH));
        log.0.exec_destroyed(raw(EXEC));
        if reported {
            log.0.object_over(7);
        }
        log.0.unmapped("cuMemUnmap", A, 16 * MIB);
        log.fine_if(reported, "graph 0x77 may touch");
    }
}

// ---- launches -----------------------------------------------------------------------------------

#[test]
fn a_launch_is_ordered_after_the_users_of_its_bytes() {
    for ordered in [true, false] {
        // Work on an output, then the launch.
        let mut log = Log::new();
        log.begin(0);
        log.block(POOL, A, 0);
        log.work(0, A);
        log.end(0, GRAPH);
        log.0.instantiated(raw(EXEC), raw(GRAPH));
        log.work(1, VIEW);
        if ordered {
            log.order(1, 2);
        }
        log.launch(2);
        log.fine_if(ordered, "a launch of graph 0x77 on stream 2 touches 0x100000000, which work of stream 1 may use until 1");
        // Two graphs of the pool.
        let mut log = Log::new();
        log.graph();
        log.begin(1);
        log.layer(VIEW, 1);
        log.end(1, GRAPH + 1);
        log.0.instantiated(raw(EXEC + 1), raw(GRAPH + 1));
        log.launch(2);
        if ordered {
            log.order(2, 3);
        }
        log.0.launched(raw(EXEC + 1), stream(3));
        log.fine_if(ordered, "which a launch of stream 2 may use");
    }
}

/// The driver orders them.
#[test]
fn launches_of_one_executable_come_one_behind_another() {
    let mut log = Log::new();
    log.graph();
    log.launch(1);
    log.launch(2);
    log.fine();
}

#[test]
fn memory_is_reused_behind_a_launch() {
    for (on, seen) in [(1, false), (2, false), (2, true)] {
        let mut log = Log::new();
        log.block(POOL, A, 0);
        // Whose the bytes are not: the program gave them to a graph of its own.
        log.0.graph(raw(GRAPH));
        log.0.node(raw(GRAPH), raw(5), &[], &[(A, MIB)]);
        log.0.instantiated(raw(EXEC), raw(GRAPH));
        log.launch(1);
        log.free(A);
        if seen {
            log.see(1);
        }
        log.block(POOL, A, on);
        match (on, seen) {
            (2, false) => log.wrong("may be used by a launch on stream 1 until 1"),
            _ => log.fine(),
        }
        if !seen {
            log.free(A);
            log.0.unmapped("cuMemUnmap", A, 16 * MIB);
            log.wrong("a launch on stream 1 may use 0x100000000");
        }
    }
}

#[test]
fn a_launch_writes_no_block_of_another_owner() {
    let mut log = Log::new();
    log.begin(0);
    log.layer(A, 0);
    log.end(0, GRAPH);
    log.0.instantiated(raw(EXEC), raw(GRAPH));
    // A later capture's block: by the promise.
    log.begin(1);
    log.block(POOL, A, 1);
    log.end(1, GRAPH + 1);
    log.launch(0);
    log.fine();
    log.free(A);
    log.block(POOL, VIEW, 2);
    log.wrong("may touch");
    log.launch(0);
    log.wrong("writes 0x100000000..0x100100000, which is in the live block 0x200000000");
}

/// A pool came back to an earlier time.
#[test]
fn a_revived_block_is_exclusive_and_writable_by_graphs() {
    let mut log = Log::new();
    log.graph();
    log.0.revived(1, A, MIB);
    log.launch(0);
    log.fine();
    log.0.revived(1, VIEW, MIB);
    log.wrong("block 0x200000000 shares memory with the live block 0x100000000");
}

// ---- memory that is away ------------------------------------------------------------------------

#[test]
fn suspended_memory_is_not_used() {
    let mut log = Log::new();
    log.block(POOL, A + 4 * MIB, 3);
    log.graph();
    log.0.sleeps(&[POOL]);
    log.0.unmapped("cuMemUnmap", A, 16 * MIB);
    log.0.unmapped("cuMemUnmap", VIEW, 16 * MIB);
    log.0.handle_released(1);
    log.fine();
    log.work(3, A + 4 * MIB);
    log.wrong("work of stream 3 on the block 0x100400000 while its memory is away");
    log.launch(2);
    log.wrong("touches 0x100000000..0x100100000, which is not there");
    log.block(POOL, A + 8 * MIB, 2);
    log.wrong("is handed out while that memory is away");
    log.free(A + 8 * MIB);
    while log.0.take_violation().is_some() {}
    // Half of it comes back.
    log.0.handle(2);
    log.0.mapped(A, 4 * MIB, 2, 0);
    log.0.accessible(A, 4 * MIB);
    log.0.wakes(&[POOL]);
    log.wrong("block 0x100400000..0x100500000 has not got its memory back");
    log.launch(2);
    log.fine();
}

#[test]
fn suspended_memory_is_restored_for_graphs() {
    let mut log = Log::new();
    log.graph();
    log.0.sleeps(&[POOL]);
    log.0.unmapped("cuMemUnmap", A, 16 * MIB);
    log.0.wakes(&[POOL]);
    log.wrong("graph 0x77 has not got 0x100000000..0x100100000 back");
}

/// What lies there by then is as much the pool's as what lay there before.
#[test]
fn restored_memory_belongs_to_its_pool() {
    let mut log = Log::new();
    log.graph();
    log.0.sleeps(&[POOL]);
    log.0.unmapped("cuMemUnmap", A, 16 * MIB);
    log.0.handle(2);
    log.0.mapped(A, 16 * MIB, 2, 0);
    log.0.accessible(A, 16 * MIB);
    log.0.wakes(&[POOL]);
    log.fine();
    log.block(None, A + 8 * MIB, 1);
    log.wrong("of no pool has memory of pool 1");
}

#[test]
fn suspension_affects_no_launch_and_no_graph_of_another_pool() {
    let mut log = Log::new();
    log.graph();
    log.launch(1);
    log.0.sleeps(&[POOL]);
    log.0.unmapped("cuMemUnmap", A, 16 * MIB);
    log.wrong("a launch on stream 1 may use 0x100000000 until 1");
    let mut log = Log::new();
    log.graph();
    log.0.sleeps(&[OTHER]);
    log.0.unmapped("cuMemUnmap", A, 16 * MIB);
    log.wrong("graph 0x77 may touch");
}
