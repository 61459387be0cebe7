//! Queues of submitted work, and the order of completion.

use super::call::{R, fail};
use super::clocks::Clock;
use super::config::Mode;
use super::race::Entry;
use super::reports::Report;
use super::state::State;
use super::work::{NodePlace, Op, Queue, Work};
use crate::driver::sys::CUresult;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Modelled nanoseconds of one row in [`Mode::Lag`].
const ROW_NANOS: u64 = 1000;

impl State {
    /// A queue for a new stream of `ctx`.
    pub(super) fn new_queue(&mut self, ctx: usize, blocking: bool) -> u32 {
        // Of all simulators of the process: no id of one is ever another's.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let fresh = Queue {
            id,
            ctx,
            blocking,
            alive: true,
            ops: VecDeque::new(),
            submitted: 0,
            done: 0,
            clock: self.host.clone(),
            host_version: self.host_version,
            capture: None,
            active: false,
            lane: false,
        };
        self.drop_idle();
        // The place of a destroyed stream may be reused once the host has observed all of its work complete: only then
        // is the new stream ordered after it.
        let reusable = self.dead_queues.iter().rev().take(8).position(|&queue| {
            let old = &self.queues[queue as usize];
            old.ops.is_empty() && !old.active && self.host.covers(queue, old.submitted)
        });
        let index = match reusable {
            Some(back) => {
                let queue = self.dead_queues.remove(self.dead_queues.len() - 1 - back);
                let old = &mut self.queues[queue as usize];
                let submitted = old.submitted;
                *old = Queue {
                    submitted,
                    done: submitted,
                    ..fresh
                };
                queue
            }
            None => {
                self.queues.push(fresh);
                (self.queues.len() - 1) as u32
            }
        };
        if blocking {
            self.ctxs[ctx].blocking.push(index);
        }
        index
    }

    /// A queue for nodes of an executable graph.
    pub(super) fn new_lane(&mut self, ctx: usize) -> u32 {
        let lane = self.new_queue(ctx, false);
        self.queues[lane as usize].lane = true;
        lane
    }

    /// Marks the queue as destroyed; its work continues.
    pub(super) fn retire_queue(&mut self, queue: u32) {
        let entry = &mut self.queues[queue as usize];
        entry.alive = false;
        if entry.blocking {
            let ctx = entry.ctx;
            self.ctxs[ctx].blocking.retain(|&other| other != queue);
        }
        self.dead_queues.push(queue);
    }

    fn is_done(&self, queue: u32, seq: u64) -> bool {
        self.queues[queue as usize].done >= seq
    }

    /// Whether anything is submitted and not complete.
    pub(super) fn anything_pending(&mut self) -> bool {
        self.active
            .iter()
            .any(|&queue| !self.queues[queue as usize].ops.is_empty())
    }

    /// Adds the operations that the host has observed to the queue's clock.
    pub(super) fn follow_host(&mut self, queue: u32) {
        let entry = &mut self.queues[queue as usize];
        if entry.host_version != self.host_version {
            entry.host_version = self.host_version;
            Arc::make_mut(&mut entry.clock).merge(&self.host);
        }
    }

    /// Orders all later work of `queue` after the operation `seq` of `other`.
    pub(super) fn order_after(&mut self, queue: u32, other: u32, seq: u64, clock: &Arc<Clock>) {
        let entry = &mut self.queues[queue as usize];
        if queue != other && !entry.clock.covers(other, seq) {
            let known = Arc::make_mut(&mut entry.clock);
            known.merge(clock);
            known.raise(other, seq);
        }
    }

    /// The implicit synchronisation between the legacy stream and the blocking streams.
    fn follow_legacy(&mut self, queue: u32) {
        let ctx = &self.ctxs[self.queues[queue as usize].ctx];
        let Some(legacy) = ctx.legacy else {
            return;
        };
        if legacy != queue {
            self.wait_for_all(queue, legacy, "implicit wait");
        } else {
            for other in ctx.blocking.clone() {
                if other != queue {
                    self.wait_for_all(queue, other, "implicit wait");
                }
            }
        }
    }

    /// Makes later work of `queue` wait for all that `other` has.
    pub(super) fn wait_for_all(&mut self, queue: u32, other: u32, name: &'static str) {
        let entry = &self.queues[other as usize];
        let (seq, clock) = (entry.submitted, entry.clock.clone());
        self.wait_for(queue, other, seq, &clock, name);
        if queue != other {
            // The other queue may have waited for completed work since its last operation.
            let known = &mut self.queues[queue as usize].clock;
            if !known.includes(&clock) {
                Arc::make_mut(known).merge(&clock);
            }
        }
    }

    /// Makes later work of `queue` wait for the operation `seq` of `other`.
    pub(super) fn wait_for(
        &mut self,
        queue: u32,
        other: u32,
        seq: u64,
        clock: &Arc<Clock>,
        name: &'static str,
    ) {
        if queue != other && !self.queues[queue as usize].clock.covers(other, seq) {
            self.order_after(queue, other, seq, clock);
            if !self.is_done(other, seq) {
                self.push(queue, Work::Wait { queue: other, seq }, name, 0);
            }
        }
    }

    /// Adds the work that the host has observed, and that implicit synchronisation orders, to the queue's clock.
    pub(super) fn follow(&mut self, queue: u32) {
        self.follow_host(queue);
        if self.queues[queue as usize].blocking {
            self.follow_legacy(queue);
        }
    }

    /// Submits work to a queue that does not capture; returns its position.
    pub(super) fn submit(&mut self, queue: u32, work: Work, nanos: u64) -> u64 {
        let name = self.now.name();
        self.submit_as(queue, work, name, nanos)
    }

    /// [`State::submit`] with a name for reports.
    pub(super) fn submit_as(
        &mut self,
        queue: u32,
        work: Work,
        name: &'static str,
        nanos: u64,
    ) -> u64 {
        self.follow(queue);
        self.submit_named(queue, work, name, nanos)
    }

    fn submit_named(&mut self, queue: u32, work: Work, name: &'static str, nanos: u64) -> u64 {
        let entry = &mut self.queues[queue as usize];
        let instant = match work {
            Work::Record | Work::Turn { .. } => self.mode != Mode::Manual,
            Work::Wait { .. } => false,
            _ => matches!(self.mode, Mode::Instant | Mode::Lag(0)),
        };
        if instant && entry.ops.is_empty() {
            entry.submitted += 1;
            let seq = entry.submitted;
            entry.done = seq;
            if !matches!(work, Work::Record) {
                let label = self.threads[self.thread].label;
                let clock = entry.clock.clone();
                let op = Op {
                    seq,
                    row: self.row,
                    nanos,
                    label,
                    name,
                    clock,
                    work,
                    place: None,
                };
                self.execute(queue, &op);
            }
            return seq;
        }
        let seq = self.push(queue, work, name, nanos);
        if self.mode != Mode::Manual && self.run_queue(queue) && self.active.len() > 1 {
            self.pump();
        }
        seq
    }

    pub(super) fn push(&mut self, queue: u32, work: Work, name: &'static str, nanos: u64) -> u64 {
        let label = self
            .threads
            .get(self.thread)
            .map_or(0, |thread| thread.label);
        self.push_op(queue, work, (name, nanos, label), None)
    }

    /// Adds an operation with its origin.
    pub(super) fn push_op(
        &mut self,
        queue: u32,
        work: Work,
        (name, nanos, label): (&'static str, u64, u32),
        place: Option<NodePlace>,
    ) -> u64 {
        let entry = &mut self.queues[queue as usize];
        entry.submitted += 1;
        let seq = entry.submitted;
        let clock = entry.clock.clone();
        entry.ops.push_back(Op {
            seq,
            row: self.row,
            nanos,
            label,
            name,
            clock,
            work,
            place,
        });
        if !entry.active {
            entry.active = true;
            self.active.push(queue);
        }
        seq
    }

    /// Makes later work of `queue` wait for the operation `seq` of `other`.
    pub(super) fn submit_wait(&mut self, queue: u32, other: u32, seq: u64, clock: &Arc<Clock>) {
        self.follow(queue);
        self.order_after(queue, other, seq, clock);
        if queue != other && !self.is_done(other, seq) {
            self.submit_named(
                queue,
                Work::Wait { queue: other, seq },
                "cuStreamWaitEvent",
                0,
            );
        }
    }

    /// Whether the queue's next operation may legally complete now.
    pub(super) fn is_free(&self, queue: u32) -> bool {
        match self.queues[queue as usize].ops.front() {
            Some(Op {
                work: Work::Wait { queue, seq },
                ..
            }) => self.is_done(*queue, *seq),
            Some(_) => true,
            None => false,
        }
    }

    fn is_due(&self, queue: u32) -> bool {
        let Some(op) = self.queues[queue as usize].ops.front() else {
            return false;
        };
        match (&op.work, self.mode) {
            (Work::Wait { queue, seq }, _) => self.is_done(*queue, *seq),
            (Work::Record | Work::Turn { .. } | Work::Launched { .. }, _) | (_, Mode::Instant) => {
                true
            }
            (_, Mode::Lag(lag)) => self.row >= op.row.saturating_add(lag),
            (_, Mode::Manual) => false,
        }
    }

    /// Completes the queue's next operation.
    pub(super) fn step(&mut self, queue: u32) {
        if let Some(op) = self.queues[queue as usize].ops.pop_front() {
            self.execute(queue, &op);
            self.queues[queue as usize].done = op.seq;
        }
    }

    fn run_queue(&mut self, queue: u32) -> bool {
        let mut moved = false;
        while self.is_due(queue) {
            self.step(queue);
            moved = true;
        }
        moved
    }

    /// Completes nodes of launched graphs that are due, in an order that the graphs allow: sometimes few of one
    /// queue, sometimes many.
    fn run_lanes(&mut self) -> bool {
        let mut moved = false;
        loop {
            let due = |queue: &u32| self.queues[*queue as usize].lane && self.is_due(*queue);
            let lanes: Vec<u32> = self.active.iter().copied().filter(due).collect();
            if lanes.is_empty() {
                return moved;
            }
            let lane = lanes[self.random(lanes.len())];
            let mut left = 1 << self.random(4);
            while left > 0 && self.is_due(lane) {
                self.step(lane);
                left -= 1;
            }
            moved = true;
        }
    }

    /// Completes everything that is due.
    pub(super) fn pump(&mut self) {
        if self.mode == Mode::Manual {
            self.drop_idle();
            return;
        }
        loop {
            let mut moved = false;
            for index in 0..self.active.len() {
                let queue = self.active[index];
                moved |= !self.queues[queue as usize].lane && self.run_queue(queue);
            }
            moved |= self.run_lanes();
            if !moved {
                break;
            }
        }
        self.drop_idle();
    }

    /// Forgets queues without work.
    pub(super) fn drop_idle(&mut self) {
        let queues = &mut self.queues;
        self.active.retain(|&queue| {
            let entry = &mut queues[queue as usize];
            entry.active = !entry.ops.is_empty();
            entry.active
        });
    }

    /// Completes the operation `seq` of `queue` and everything before it; returns the modelled nanoseconds that this
    /// takes.
    pub(super) fn finish(&mut self, queue: u32, seq: u64) -> R<u64> {
        if self.is_done(queue, seq) {
            return Ok(0);
        }
        let mut nanos = 0;
        let mut rows = 0;
        let mut stack = vec![(queue, seq)];
        while let Some(&(queue, seq)) = stack.last() {
            if self.is_done(queue, seq) {
                stack.pop();
                continue;
            }
            match self.queues[queue as usize].ops.front() {
                None => {
                    let stream = self.queues[queue as usize].id;
                    self.report(Report::ImpossibleWait { stream });
                    return fail(CUresult::CUDA_ERROR_UNKNOWN);
                }
                Some(Op {
                    work: Work::Wait { queue, seq },
                    ..
                }) if !self.is_done(*queue, *seq) => {
                    stack.push((*queue, *seq));
                }
                Some(op) => {
                    nanos = op.nanos.saturating_add(nanos);
                    if let (Mode::Lag(lag), false) = (
                        self.mode,
                        matches!(
                            op.work,
                            Work::Wait { .. }
                                | Work::Record
                                | Work::Turn { .. }
                                | Work::Launched { .. }
                        ),
                    ) {
                        rows = rows.max(op.row.saturating_add(lag).saturating_sub(self.row));
                    }
                    self.step(queue);
                }
            }
        }
        self.pump();
        Ok(rows.saturating_mul(ROW_NANOS).saturating_add(nanos))
    }

    /// Counts a wait of the host, and refuses it if the test forbids such waits.
    pub(super) fn begin_wait(&mut self) -> R {
        self.counters.waits += 1;
        if self.deny_waits {
            let call = self.now.name();
            self.report(Report::DeniedWait { call });
            return fail(CUresult::CUDA_ERROR_UNKNOWN);
        }
        Ok(())
    }

    /// Waits for an operation, and records that the host has observed its completion.
    pub(super) fn host_wait(&mut self, queue: u32, seq: u64, clock: &Arc<Clock>) -> R {
        if !self.is_done(queue, seq) {
            self.counters.blocked_waits += 1;
        }
        let nanos = self.finish(queue, seq)?;
        self.counters.nanos = self.counters.nanos.saturating_add(nanos);
        self.observe(queue, seq, clock);
        Ok(())
    }

    pub(super) fn host_wait_queue(&mut self, queue: u32) -> R {
        let entry = &self.queues[queue as usize];
        let (seq, clock) = (entry.submitted, entry.clock.clone());
        self.host_wait(queue, seq, &clock)
    }

    pub(super) fn host_wait_ctx(&mut self, ctx: usize) -> R {
        let blocked = self.counters.blocked_waits;
        for queue in 0..self.queues.len() {
            if self.queues[queue].ctx == ctx {
                self.host_wait_queue(queue as u32)?;
            }
        }
        self.counters.blocked_waits = self.counters.blocked_waits.min(blocked + 1);
        Ok(())
    }

    /// Counts a blocking wait, if the context has work.
    pub(super) fn note_blocked(&mut self, ctx: usize) {
        let busy = |queue: &&u32| {
            let queue = &self.queues[**queue as usize];
            queue.ctx == ctx && !queue.ops.is_empty()
        };
        if self.active.iter().any(|queue| busy(&queue)) {
            self.counters.blocked_waits += 1;
        }
    }

    /// Records that the present call reports the completion of the operation `seq` of `queue` to the host.
    pub(super) fn observe(&mut self, queue: u32, seq: u64, clock: &Arc<Clock>) {
        if !self.silent {
            self.see(queue, seq, clock);
        }
    }

    /// Records that the host has observed the completion of the operation `seq` of `queue`.
    pub(super) fn see(&mut self, queue: u32, seq: u64, clock: &Arc<Clock>) {
        // A wait for completed work only adds to the clock, without an operation of its own.
        if !self.host.covers(queue, seq) || !self.host.includes(clock) {
            let host = Arc::make_mut(&mut self.host);
            host.merge(clock);
            host.raise(queue, seq);
            self.host_version += 1;
        }
    }

    /// Returns the operations that precede everything pending and everything that can still be submitted.
    pub(super) fn floor(&self) -> Clock {
        let mut floor = (*self.host).clone();
        for queue in &self.queues {
            if let Some(op) = queue.ops.front() {
                floor.intersect(&op.clock);
            }
        }
        floor
    }

    pub(super) fn entry(&self, queue: u32, op: &Op, address: u64, bytes: u64) -> Entry {
        Entry {
            queue,
            label: op.label,
            seq: op.seq,
            position: op.place.map_or(op.seq, |place| place.position),
            node: op.place.map_or(0, |place| place.node),
            kind: op.name,
            stream: op
                .place
                .map_or(self.queues[queue as usize].id, |place| place.stream),
            address,
            bytes,
        }
    }
}
