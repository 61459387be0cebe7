//! Captures: the streams that take part, and the nodes that they add. Nothing of it has happened yet.

use std::collections::HashMap;

use cualloc::driver::sys::*;

use super::claims::Claim;
use super::node_order::{Hand, Link, NodeOrder, Touch};
use super::{Stamp, Tracker};

/// Handles of graphs that no call has named yet.
const UNSEEN: u64 = 1 << 62;

/// A stream in a capture.
#[derive(Default)]
pub(super) struct Member {
    /// What its next node depends on.
    present: Vec<Link>,
    /// How often it went elsewhere than forward.
    stretch: u32,
}

pub(super) struct Capture {
    pub graph: u64,
    /// The graph was there before.
    into: bool,
    members: HashMap<usize, Member>,
}

/// What the driver says of a stream's capture: the graph, and the node that the next one depends on, if it is one.
fn ask(real: &CuFunctions, stream: CUstream) -> Option<(u64, Option<u64>)> {
    let ask = real.cuStreamGetCaptureInfo_v3?;
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut id, mut graph, mut count) = (0, std::ptr::null_mut(), 0);
    let (mut nodes, mut edges) = (std::ptr::null(), std::ptr::null());
    // SAFETY: the stream was given to a call just now, the outputs are locals.
    let code = unsafe {
        ask(
            stream,
            &mut status,
            &mut id,
            &mut graph,
            &mut nodes,
            &mut edges,
            &mut count,
        )
    };
    if code != CUresult::CUDA_SUCCESS || graph.is_null() {
        return None;
    }
    // SAFETY: the array has this many nodes, and is valid until the next call for the stream.
    let node = (count == 1).then(|| unsafe { *nodes } as u64);
    Some((graph as u64, node))
}

impl Tracker {
    /// A capture begins, in a new graph, or in one that is there behind some of its nodes.
    pub fn captures(&mut self, stream: CUstream, into: Option<(CUgraph, Vec<(u64, bool)>)>) {
        let lane = self.number(stream);
        self.count += 1;
        let capture = self.count;
        let known = into.is_some();
        let (graph, behind) = match into {
            Some((graph, behind)) => (graph as u64, behind),
            None => {
                let shown = ask(&self.real, stream);
                (shown.map_or(UNSEEN + capture, |(g, _)| g), Vec::new())
            }
        };
        let entry = self.graphs.entry(graph).or_default();
        entry.claims.push(capture);
        let present = entry.order.links(&behind);
        // Both the graph and the capture may touch what it gets.
        self.claims.insert(capture, Claim::new(graph, 2));
        let member = Member {
            present,
            stretch: 0,
        };
        self.captures.insert(
            capture,
            Capture {
                graph,
                into: known,
                members: HashMap::from([(lane, member)]),
            },
        );
        self.lanes[lane].capture = Some(capture);
    }

    /// A capture was to end; whether it did, the driver says. The graph is null if it failed.
    pub fn captured(&mut self, stream: CUstream, graph: impl Fn() -> CUgraph) {
        let lane = self.number(stream);
        let Some(capture) = self.lanes[lane].capture else {
            return;
        };
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let handle = self.by_handle.iter().find(|(_, number)| **number == lane);
        if let (Some(ask), Some((handle, _))) = (self.real.cuStreamIsCapturing, handle) {
            // SAFETY: the stream was given to a call just now, the output is a local.
            let _ = unsafe { ask(*handle as CUstream, &mut status) };
        }
        if status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return;
        }
        for lane in &mut self.lanes {
            if lane.capture == Some(capture) {
                lane.capture = None;
            }
        }
        let Some(ended) = self.captures.remove(&capture) else {
            return;
        };
        let made = graph() as u64;
        if made == 0 && !ended.into {
            self.graph_gone(ended.graph);
        } else if made != 0 && made != ended.graph {
            self.shown_as(ended.graph, made);
        }
        self.let_go(&[capture]);
    }

    /// Work that a capture takes note of becomes a node.
    pub(super) fn captured_work(&mut self, stream: CUstream, lane: usize, ranges: &[(u64, u64)]) {
        let Some(capture) = self.lanes[lane].capture else {
            return;
        };
        let (mut touches, mut parts) = (Vec::new(), Vec::new());
        for &(start, bytes) in ranges {
            touches.push(self.touch(start, start + bytes, Some(capture)));
            let physical = self.parts(start, start + bytes);
            parts.extend(physical.iter().map(|(s, e, p)| (*p, p + (e - s))));
        }
        let Some(under_way) = self.captures.get_mut(&capture) else {
            return;
        };
        let member = under_way.members.entry(lane).or_default();
        let hand = Some((capture, lane, member.stretch));
        let order = &mut self.graphs.entry(under_way.graph).or_default().order;
        let node = order.add(&member.present, hand, touches, &parts);
        member.present = vec![Link { node, whole: true }];
        if let Some((_, Some(handle))) = ask(&self.real, stream) {
            self.named(stream, handle);
        }
    }

    /// The handle of the last node of a stream that captures.
    pub fn named(&mut self, stream: CUstream, handle: u64) {
        let lane = self.number(stream);
        let Some((graph, present, _)) = self.present(lane) else {
            return;
        };
        if let Some(Link { node, .. }) = present.first().copied()
            && let Some(graph) = self.graphs.get_mut(&graph)
        {
            graph.order.handles.insert(handle, node);
        }
    }

    /// What a node touches, and where that lies.
    pub(super) fn touch(&mut self, start: u64, end: u64, capture: Option<u64>) -> Touch {
        let block = self.live.range_mut(..end).next_back();
        let block = block.filter(|(_, block)| block.end > start);
        let block = block.map(|(at, block)| {
            if let Some(capture) = capture
                && !block.touched.contains(&capture)
            {
                block.touched.push(capture);
            }
            *at
        });
        Touch {
            start,
            end,
            block,
            born: self.blocks,
        }
    }

    /// The graph that a stream captures, what its next node depends on, and who adds that.
    pub(super) fn present(&self, lane: usize) -> Option<(u64, Vec<Link>, Hand)> {
        let capture = self.lanes[lane].capture?;
        let under_way = self.captures.get(&capture)?;
        let member = under_way.members.get(&lane)?;
        let hand = (capture, lane, member.stretch);
        Some((under_way.graph, member.present.clone(), hand))
    }

    /// An event is recorded in a capture.
    pub(super) fn captured_stamp(&self, lane: usize) -> Stamp {
        match self.present(lane) {
            Some((_, present, hand)) => Stamp::Captured(hand.0, present),
            None => Stamp::Captured(0, Vec::new()),
        }
    }

    /// A stream waits for an event of a capture, whose it becomes.
    pub(super) fn joins(&mut self, lane: usize, capture: u64, links: &[Link]) {
        let Some(under_way) = self.captures.get_mut(&capture) else {
            return;
        };
        let member = under_way.members.entry(lane).or_default();
        let new = links.iter().filter(|link| !member.present.contains(link));
        let new: Vec<Link> = new.copied().collect();
        member.present.extend(new);
        self.lanes[lane].capture = Some(capture);
    }

    /// The next node of a stream is to depend on these nodes, or on these as well.
    pub fn depends(&mut self, stream: CUstream, on: &[(u64, bool)], as_well: bool) {
        let lane = self.number(stream);
        let Some((graph, old, _)) = self.present(lane) else {
            return;
        };
        let Some(graph) = self.graphs.get(&graph) else {
            return;
        };
        let mut new = graph.order.links(on);
        let mut back = false;
        if as_well {
            new.extend(old.iter().filter(|link| !on_list(on, &graph.order, link)));
        } else {
            back = !NodeOrder::have_begun(&graph.order.past(&new), &old);
        }
        let capture = self.lanes[lane].capture.unwrap_or(0);
        let under_way = self.captures.get_mut(&capture);
        if let Some(member) = under_way.and_then(|c| c.members.get_mut(&lane)) {
            member.present = new;
            member.stretch += u32::from(back);
        }
    }
}

fn on_list(list: &[(u64, bool)], order: &NodeOrder, link: &Link) -> bool {
    order.links(list).contains(link)
}

impl NodeOrder {
    /// Dependencies by the handles of nodes. Those of nodes that were never seen order nothing.
    pub(super) fn links(&self, on: &[(u64, bool)]) -> Vec<Link> {
        let known = |(handle, whole): &(u64, bool)| {
            let node = *self.handles.get(handle)?;
            let whole = *whole;
            Some(Link { node, whole })
        };
        on.iter().filter_map(known).collect()
    }
}
