//! A capture under way, as far as it uses graph pools: its streams, their order, and its leases.

use std::thread::{self, ThreadId};

use crate::allocator::graph::lease::Lease;
use crate::allocator::graph::order::{Order, Seen};
use crate::allocator::graph::user::User;

/// A capture under way.
#[derive(Debug, Default)]
pub(crate) struct Capture {
    /// Tells it from what was known of the capture before it was forgotten.
    pub number: u64,
    pub order: Order,
    /// Its streams, each at its place in the order, with the thread that named it last.
    pub(crate) streams: Vec<(User, ThreadId)>,
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

    /// A stream's place in the order, which it has from its first call on.
    pub(crate) fn place_of(&mut self, user: &User) -> usize {
        match self.streams.iter().position(|(known, _)| known.is(user)) {
            Some(at) => at,
            None => {
                self.streams.push((user.name(), thread::current().id()));
                self.order.add_stream()
            }
        }
    }
}

/// Until where a stream of a capture has used what it used.
#[derive(Debug)]
pub(crate) struct Reached {
    pub capture: u64,
    /// The capture's [number](Capture::number).
    pub number: u64,
    pub seen: Seen,
}
