//! Shared parts of these tests.

pub use super::common::capturing::{Capturing, MODE, capture, capture_output, pooled_on};
pub use super::common::prelude::*;
pub use cualloc::allocator::{Footprint, GraphPool, Scope};
pub use cualloc::driver::{Graph, GraphExec};
pub use cualloc::error::GraphPoolError;

/// The simulator tells the end of a graph as late as a driver.
pub fn late() -> SimConfig {
    SimConfig {
        late_destructors: true,
        ..SimConfig::with_devices(1, 8 << 30)
    }
}

/// Graph pools are packed memory.
pub fn packed(test: impl Fn(&Rig)) {
    only_on(Policy::Packed, late(), test);
}

/// [`pooled_on`] with [`late`].
pub fn pooled<const N: usize>(test: impl Fn(&Rig, Allocator, GraphPool, [Stream; N])) {
    pooled_on(late(), test);
}

/// Waits until this number of graphs have memory of a pool.
pub fn await_leases(allocator: &Allocator, pool: &GraphPool, count: u64) {
    let leases = || footprint(allocator, pool).leases;
    wait_until("graphs that were destroyed have no leases", || {
        leases() == count
    });
}

/// A graph that uses a block of a pool, which its capture frees.
pub fn graph_of(
    (rig, allocator): (&Rig, &Allocator),
    pool: &GraphPool,
    bytes: usize,
    stream: &Stream,
) -> Graph {
    capture(pool, stream, || drop(used(rig, allocator, bytes, stream)))
}

/// A block with all its bytes written, and read, by nodes of its stream.
pub fn used(rig: &Rig, allocator: &Allocator, bytes: usize, stream: &Stream) -> Block {
    let block = allocator.allocate(bytes, stream).unwrap();
    rig.stamp(block.ptr(), bytes, bytes as u32, stream);
    block
}

pub fn launch(exec: &mut GraphExec, stream: &Stream) {
    // SAFETY: the simulator says what is wrong with the memory.
    unsafe { exec.launch(stream) }.unwrap();
}

/// Makes an executable of a graph and runs it to the end.
pub fn run(graph: &Graph, stream: &Stream) {
    let mut exec = graph.instantiate().unwrap();
    launch(&mut exec, stream);
    stream.synchronize().unwrap();
}

pub fn footprint(allocator: &Allocator, pool: &GraphPool) -> Footprint {
    allocator.check().unwrap();
    pool.footprint().unwrap()
}

pub fn graph_pool_error(error: Error) -> GraphPoolError {
    match error {
        Error::GraphPool(error) => error,
        error => panic!("{error:?}"),
    }
}

/// The bytes allocated on the device; only the simulated one reports them for this process alone.
pub fn assert_held(rig: &Rig, bytes: usize, why: &str) {
    match rig.driver_held() {
        Some(held) => assert_eq!(held, bytes as u64, "{why}"),
        None => eprintln!("SKIPPED in part on cuda: the device's memory is not asked"),
    }
}

/// Trims until the device has everything back, where it can be asked.
pub fn assert_trimmed(rig: &Rig, allocator: &Allocator) {
    wait_until("no graph has memory of a pool", || {
        allocator.trim(0).unwrap();
        rig.driver_held().is_none_or(|held| held == 0)
    });
}
