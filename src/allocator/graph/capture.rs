//! The state of a capture that uses graph pools: its streams, their order, and its leases.

use crate::allocator::graph::few::Few;
use crate::allocator::graph::lease::Lease;
use crate::allocator::graph::order::{Edge, LastNodes, Order};
use crate::allocator::graph::user::{Trace, User};
use crate::allocator::stream::slot::StreamKey;
use crate::driver::sys;
use crate::locks::thread_id::ThreadId;

/// A capture in progress.
#[derive(Debug, Default)]
pub(crate) struct Capture {
    /// Distinguishes this state from one of the same capture that was discarded earlier.
    pub number: u64,
    pub order: Order,
    /// Its streams; a stream's place in the order is its index.
    pub(crate) streams: Vec<Member>,
    /// The scopes through which it got memory, each with its pool.
    pub(crate) served: Vec<(u64, u64)>,
    /// Pools that its graph has leased.
    pub(crate) leased: Vec<u64>,
    /// These leases, except for those whose end the driver does not report.
    pub(crate) leases: Vec<(u64, Lease)>,
    /// Pools whose scopes were closed: the capture gets no more of their memory.
    pub(crate) left: Vec<u64>,
}

impl Capture {
    /// Whether it uses a pool and may get more of its memory.
    pub(crate) fn may_use(&self, pool: u64) -> bool {
        self.leased.contains(&pool) && !self.left.contains(&pool)
    }

    /// Returns the place of a known stream, by its name.
    pub(crate) fn place_of_named(&self, key: StreamKey, raw: usize) -> Option<usize> {
        let mut streams = self.streams.iter();
        streams.position(|known| known.user.is_named(key, raw))
    }

    /// Returns a stream's place in the order, which is assigned at its first call.
    pub(crate) fn place_of(&mut self, user: &User) -> usize {
        match self.place_of_named(user.key, user.raw) {
            Some(at) => at,
            None => {
                self.streams.push(Member {
                    user: user.name(),
                    thread: ThreadId::current(),
                    route: None,
                });
                self.order.add_stream()
            }
        }
    }
}

/// A stream of a capture.
#[derive(Debug)]
pub(crate) struct Member {
    pub user: User,
    /// The thread that named it last.
    pub thread: ThreadId,
    /// The route of its last request.
    pub route: Option<Route>,
}

/// The route of requests of a stream in a capture, valid while the scopes do not change.
#[derive(Debug)]
pub(crate) struct Route {
    /// The [version](crate::allocator::graph::scope::Scopes::version) of the scopes.
    pub version: u64,
    pub pool: u64,
    /// The user of the allocated block.
    pub user: Trace,
    /// The requesting thread, because scopes may apply to one thread.
    pub thread: ThreadId,
}

/// The driver's answer about a stream in a capture.
#[derive(Debug)]
pub(crate) struct CaptureStatus {
    pub id: u64,
    pub graph: sys::CUgraph,
    /// The dependencies of the next node that is captured on the stream.
    pub edges: Few<Edge>,
}

/// The point up to which a stream of a capture has used its memory.
#[derive(Debug)]
pub(crate) struct UsePoint {
    pub capture: u64,
    /// The capture's [number](Capture::number).
    pub number: u64,
    pub seen: LastNodes,
}
