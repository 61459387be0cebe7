//! Work as it is queued.

use super::args::Host;
use super::clocks::Clock;
use super::contents::Content;
use crate::driver::sys::CUhostFn;
use std::collections::VecDeque;
use std::sync::Arc;

/// What an operation does when it completes.
#[derive(Clone, Debug)]
pub(super) enum Work {
    /// An event record: a marker.
    Record,
    /// Waits for an operation of another queue.
    Wait {
        queue: u32,
        seq: u64,
    },
    /// Pool memory is allocated or freed in the order of a stream: its contents are lost, and its users must be ordered
    /// with this operation. Takes no time.
    Turn {
        address: u64,
        bytes: u64,
        device: usize,
    },
    Fill {
        address: u64,
        bytes: u64,
        content: Content,
    },
    /// Copies device memory; the devices are those that need access.
    Copy {
        target: u64,
        source: u64,
        bytes: u64,
        devices: (usize, usize),
    },
    Upload {
        target: u64,
        source: Host,
        bytes: u64,
    },
    Download {
        target: Host,
        source: u64,
        bytes: u64,
    },
    HostCopy {
        target: Host,
        source: Host,
        bytes: u64,
    },
    /// Counts words that differ from a pattern.
    Check {
        address: u64,
        words: u64,
        seed: u32,
        bad: u64,
    },
    /// Keeps the device busy.
    Spin,
    Callback {
        function: CUhostFn,
        data: usize,
    },
    /// Ends a launch of an executable graph: all its nodes are complete.
    Launched {
        exec: u64,
    },
}

/// The origin of the work of a graph's node.
#[derive(Clone, Copy, Debug)]
pub(super) struct NodePlace {
    /// The id of the stream that it was launched on.
    pub(super) stream: u64,
    /// Which node of the executable it is, counted from 1.
    pub(super) position: u64,
    pub(super) node: u64,
}

#[derive(Debug)]
pub(super) struct Op {
    pub(super) seq: u64,
    pub(super) row: u64,
    pub(super) nanos: u64,
    pub(super) label: u32,
    pub(super) name: &'static str,
    pub(super) clock: Arc<Clock>,
    pub(super) work: Work,
    /// The place in the graph, for work of a launched graph.
    pub(super) place: Option<NodePlace>,
}

/// The work of one stream. Outlives the stream's handle until all of it is done.
pub(super) struct Queue {
    pub(super) id: u64,
    pub(super) ctx: usize,
    pub(super) blocking: bool,
    pub(super) alive: bool,
    pub(super) ops: VecDeque<Op>,
    pub(super) submitted: u64,
    pub(super) done: u64,
    pub(super) clock: Arc<Clock>,
    pub(super) host_version: u64,
    pub(super) capture: Option<u64>,
    pub(super) active: bool,
    /// Whether it runs nodes of an executable graph instead of a stream's work.
    pub(super) lane: bool,
}
