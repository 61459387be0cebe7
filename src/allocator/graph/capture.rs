//! A capture under way, as far as it uses graph pools: its streams, their order, and its leases.

use crate::allocator::graph::few::Few;
use crate::allocator::graph::lease::Lease;
use crate::allocator::graph::order::{Edge, Order, Seen};
use crate::allocator::graph::user::{Trace, User};
use crate::allocator::stream::slot::StreamKey;
use crate::driver::sys;
use crate::locks::thread_id::ThreadId;

/// A capture under way.
#[derive(Debug, Default)]
pub(crate) struct Capture {
    /// Tells it from what was known of the capture before it was forgotten.
    pub number: u64,
    pub order: Order,
    /// Its streams, each at its place in the order.
    pub(crate) streams: Vec<Member>,
    /// The scopes by which it got memory, each with its pool.
    pub(crate) served: Vec<(u64, u64)>,
    /// Pools of which its graph has a lease.
    pub(crate) leased: Vec<u64>,
    /// These leases, but those of whose end the driver tells nobody.
    pub(crate) leases: Vec<(u64, Lease)>,
    /// Pools whose scopes were left: it gets no more memory of them.
    pub(crate) left: Vec<u64>,
}

impl Capture {
    /// Whether it uses a pool and may get more memory of it.
    pub(crate) fn may_use(&self, pool: u64) -> bool {
        self.leased.contains(&pool) && !self.left.contains(&pool)
    }

    /// The place of a stream that is known, by its name.
    pub(crate) fn place_of_named(&self, key: StreamKey, raw: usize) -> Option<usize> {
        let mut streams = self.streams.iter();
        streams.position(|known| known.user.is_named(key, raw))
    }

    /// A stream's place in the order, which it has from its first call on.
    pub(crate) fn place_of(&mut self, user: &User) -> usize {
        match self.place_of_named(user.key, user.raw) {
            Some(at) => at,
            None => {
                self.streams.push(Member {
                    user: user.name(),
                    thread: ThreadId::current(),
                    way: None,
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
    /// Where its last request went.
    pub way: Option<Way>,
}

/// Where the requests of a stream in a capture go, as long as the scopes are the same.
#[derive(Debug)]
pub(crate) struct Way {
    /// The [version](crate::allocator::graph::scope::Scopes::version) of the scopes.
    pub version: u64,
    pub pool: u64,
    /// Who got the block.
    pub user: Trace,
    /// The thread that asked: scopes may be of threads.
    pub thread: ThreadId,
}

/// What the driver says of a stream in a capture.
#[derive(Debug)]
pub(crate) struct Present {
    pub id: u64,
    pub graph: sys::CUgraph,
    /// What the next node that is captured on the stream depends on.
    pub edges: Few<Edge>,
}

/// Until where a stream of a capture has used what it used.
#[derive(Debug)]
pub(crate) struct Reached {
    pub capture: u64,
    /// The capture's [number](Capture::number).
    pub number: u64,
    pub seen: Seen,
}
