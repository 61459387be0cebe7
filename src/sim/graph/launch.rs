//! Launches of executables.

use crate::driver::sys::*;
use crate::sim::call::{R, fail};
use crate::sim::state::State;
use crate::sim::work::{NodePlace, Work};
use std::sync::Arc;

impl State {
    /// A number below `below`, by the seed of the configuration.
    pub(in crate::sim) fn random(&mut self, below: usize) -> usize {
        // The step and the mixing of SplitMix64.
        self.dice = self.dice.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.dice;
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits ^ bits >> 31) % below.max(1) as u64) as usize
    }

    /// Submits the nodes of an executable to its lanes: after the earlier work of the stream and the previous launch,
    /// and before later work of the stream.
    fn launch(&mut self, exec: u64, queue: u32) {
        let Some(entry) = self.graphs.execs.get_mut(exec) else {
            return;
        };
        entry.running += 1;
        let steps = Arc::clone(&entry.steps);
        let lanes: Vec<u32> = entry.lanes.iter().map(|(queue, _)| *queue).collect();
        if let Some((other, seq, clock)) = entry.last.take() {
            self.wait_for(queue, other, seq, &clock, "cuGraphLaunch");
        }
        let stream = self.queues[queue as usize].id;
        for &lane in &lanes {
            self.wait_for_all(lane, queue, "cuGraphLaunch");
        }
        let mut done = Vec::with_capacity(steps.len());
        for (position, step) in (1..).zip(steps.iter()) {
            let lane = lanes[step.lane];
            let mut before = step.after.clone();
            // The order of the waits is unspecified, so it varies.
            for left in (1..before.len()).rev() {
                before.swap(left, self.random(left + 1));
            }
            for index in before {
                let (other, seq, clock): &(u32, u64, Arc<_>) = &done[index];
                self.wait_for(lane, *other, *seq, clock, "cuGraphLaunch");
            }
            let place = NodePlace {
                stream,
                position,
                node: step.node,
            };
            let (work, how) = match &step.task {
                Some(task) => (task.work.clone(), (task.name, task.nanos, task.label)),
                None => (Work::Record, ("empty node", 0, 0)),
            };
            let seq = self.push_op(lane, work, how, Some(place));
            done.push((lane, seq, self.queues[lane as usize].clock.clone()));
        }
        let mut order = lanes;
        for left in (1..order.len()).rev() {
            order.swap(left, self.random(left + 1));
        }
        for lane in order {
            self.wait_for_all(queue, lane, "cuGraphLaunch");
        }
        let seq = self.push(queue, Work::Launched { exec }, "cuGraphLaunch", 0);
        let clock = self.queues[queue as usize].clock.clone();
        if let Some(entry) = self.graphs.execs.get_mut(exec) {
            entry.last = Some((queue, seq, clock));
        }
        self.pump();
    }
}

#[allow(non_snake_case)]
impl State {
    pub(in crate::sim) fn cuGraphLaunch(&mut self, exec: CUgraphExec, stream: CUstream) -> R {
        let exec = self.exec(exec)?;
        let queue = self.queue(stream)?;
        if self.queues[queue as usize].capture.is_some() {
            // Graphs within graphs are not modelled.
            return fail(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        self.refuse_implicit(queue)?;
        self.follow(queue);
        self.launch(exec, queue);
        Ok(())
    }
}
