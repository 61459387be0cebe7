//! Stream capture: which calls are allowed during a capture, and on which threads.

use super::links::{Link, common, read_links};
use super::{Capture, Graph, QueryArrays, Task};
use crate::driver::sys::*;
use crate::sim::args::{In, Out};
use crate::sim::call::{R, fail};
use crate::sim::reports::Report;
use crate::sim::state::State;
use crate::sim::work::Work;
use std::collections::{HashMap, HashSet};
use std::ffi::c_uint;
use std::sync::Arc;

const GLOBAL: u32 = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL.0;
const RELAXED: u32 = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED.0;
const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
const UNSUPPORTED: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;

impl State {
    fn refuse_capture(&mut self) -> R {
        let call = self.now.name();
        self.report(Report::DuringCapture { call });
        fail(UNSUPPORTED)
    }

    /// Refuses a potentially unsafe call, as measured on a real driver. A thread in relaxed mode may make such calls,
    /// and a relaxed capture forbids none. Any other capture, even one in thread-local mode, forbids them to its own
    /// thread and to every thread in global mode, the mode in which threads start.
    pub(in crate::sim) fn refuse_during_capture(&mut self) -> R {
        if self.graphs.captures.is_empty() {
            return Ok(());
        }
        let thread = &self.threads[self.thread];
        let (id, mode) = (thread.id, thread.mode);
        if mode == RELAXED {
            return Ok(());
        }
        let mut hit = false;
        for capture in self.graphs.captures.values_mut() {
            if capture.mode != RELAXED && (capture.thread == id || mode == GLOBAL) {
                capture.invalid = true;
                hit = true;
            }
        }
        if hit { self.refuse_capture() } else { Ok(()) }
    }

    /// Rejects a wait or query of a capturing stream, which also invalidates the capture.
    pub(in crate::sim) fn refuse_if_capturing(&mut self, queue: u32) -> R {
        self.refuse_implicit(queue)?;
        self.refuse_captured(queue)
    }

    /// The same for calls that are allowed on the legacy stream.
    pub(in crate::sim) fn refuse_captured(&mut self, queue: u32) -> R {
        if self.queues[queue as usize].capture.is_none() {
            return Ok(());
        }
        self.invalidate_capture_of(queue);
        self.refuse_capture()
    }

    /// Rejects a wait for a context in which a stream captures, in any mode.
    pub(in crate::sim) fn refuse_ctx_during_capture(&mut self, ctx: usize) -> R {
        let queues = &self.queues;
        let inside = |capture: &&mut Capture| queues[capture.origin as usize].ctx == ctx;
        let mut hit = false;
        for capture in self.graphs.captures.values_mut().filter(inside) {
            capture.invalid = true;
            hit = true;
        }
        if hit { self.refuse_capture() } else { Ok(()) }
    }

    /// Rejects the legacy stream while a blocking stream of its context captures.
    pub(in crate::sim) fn refuse_implicit(&mut self, queue: u32) -> R {
        if self.graphs.captures.is_empty() {
            return Ok(());
        }
        let ctx = &self.ctxs[self.queues[queue as usize].ctx];
        let capturing = |other: &u32| self.queues[*other as usize].capture.is_some();
        if ctx.legacy == Some(queue) && ctx.blocking.iter().any(capturing) {
            return fail(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        }
        Ok(())
    }

    /// Invalidates the capture that a stream takes part in.
    pub(in crate::sim) fn invalidate_capture_of(&mut self, queue: u32) {
        let capture = self.queues[queue as usize].capture;
        if let Some(capture) = capture.and_then(|id| self.graphs.captures.get_mut(&id)) {
            capture.invalid = true;
        }
    }

    /// Returns the dependencies of the stream's next node, if it captures.
    pub(in crate::sim) fn captured_links(&mut self, queue: u32) -> R<Option<(u64, Arc<[Link]>)>> {
        let Some(id) = self.queues[queue as usize].capture else {
            self.refuse_implicit(queue)?;
            return Ok(None);
        };
        let Some(capture) = self.graphs.captures.get(&id) else {
            return Ok(None);
        };
        if capture.invalid {
            return fail(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        let links = capture.members.get(&queue).map(Vec::as_slice);
        Ok(Some((id, links.unwrap_or_default().into())))
    }

    /// If the stream captures, adds a node for the work instead of executing it; returns whether it did.
    pub(in crate::sim) fn captured(
        &mut self,
        queue: u32,
        work: &Work,
        name: &'static str,
        nanos: u64,
    ) -> R<bool> {
        let Some((id, links)) = self.captured_links(queue)? else {
            return Ok(false);
        };
        let task = Task {
            work: work.clone(),
            name,
            nanos,
            label: self.threads[self.thread].label,
            ctx: self.queues[queue as usize].ctx,
        };
        let kernel = task.kind() == CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL;
        if !kernel && links.iter().any(Link::is_programmatic) {
            return fail(INVALID);
        }
        let graph = self.graphs.captures.get(&id).map_or(0, |c| c.graph);
        let node = self.graphs.add_node(graph, Some(task), links.to_vec())?;
        if let Some(capture) = self.graphs.captures.get_mut(&id) {
            capture.members.insert(queue, vec![Link::whole(node)]);
        }
        Ok(true)
    }

    /// A wait of a capturing stream for an event that was not captured.
    pub(in crate::sim) fn isolation(&mut self, queue: u32) -> R {
        self.invalidate_capture_of(queue);
        fail(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
    }

    /// A query of, or host wait for, a captured event. After the end of its capture, the driver returns an invalid
    /// value (measured with driver 580 on an H200).
    pub(in crate::sim) fn captured_event(&mut self, capture: u64) -> R {
        let Some(capture) = self.graphs.captures.get_mut(&capture) else {
            return fail(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        capture.invalid = true;
        let call = self.now.name();
        self.report(Report::DuringCapture { call });
        fail(CUresult::CUDA_ERROR_CAPTURED_EVENT)
    }

    /// A wait for a captured event: the stream joins the capture.
    pub(in crate::sim) fn join_capture(&mut self, queue: u32, id: u64, links: &[Link]) -> R {
        self.refuse_implicit(queue)?;
        let own = self.queues[queue as usize].capture;
        let Some(capture) = self.graphs.captures.get_mut(&id) else {
            // The capture has ended, so the event belongs to a graph.
            return match own {
                Some(_) => self.isolation(queue),
                None => fail(CUresult::CUDA_ERROR_INVALID_VALUE),
            };
        };
        if capture.invalid {
            return fail(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        if own.is_some_and(|own| own != id) {
            capture.invalid = true;
            self.invalidate_capture_of(queue);
            return fail(CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE);
        }
        let member = capture.members.entry(queue).or_default();
        *member = common(member, links);
        self.queues[queue as usize].capture = Some(id);
        Ok(())
    }

    /// Begins a capture into a graph.
    fn begin_capture(
        &mut self,
        stream: CUstream,
        mode: CUstreamCaptureMode,
        into: Option<(u64, Vec<Link>)>,
    ) -> R {
        let queue = self.queue(stream)?;
        let legacy = self.ctxs[self.queues[queue as usize].ctx].legacy == Some(queue);
        if mode.0 > RELAXED {
            return fail(INVALID);
        }
        if legacy {
            return fail(UNSUPPORTED);
        }
        if self.queues[queue as usize].capture.is_some() {
            return fail(CUresult::CUDA_ERROR_ILLEGAL_STATE);
        }
        let id = self.graphs.next_capture;
        self.graphs.next_capture += 1;
        let known = into.is_some();
        let (graph, links) =
            into.unwrap_or_else(|| (self.graphs.graphs.add(Graph::default()), Vec::new()));
        if let Some(entry) = self.graphs.graphs.get_mut(graph) {
            entry.capture = Some(id);
        }
        let capture = Capture {
            origin: queue,
            thread: self.threads[self.thread].id,
            mode: mode.0,
            invalid: false,
            graph,
            into: known,
            members: HashMap::from([(queue, links)]),
            shown: HashMap::new(),
        };
        self.graphs.captures.insert(id, capture);
        self.queues[queue as usize].capture = Some(id);
        Ok(())
    }

    /// Whether everything that the streams of a capture added precedes the next node of the first stream.
    fn is_joined(&self, capture: &Capture) -> bool {
        let start = capture.members.get(&capture.origin).into_iter().flatten();
        let mut stack: Vec<u64> = start.map(|link| link.node).collect();
        let mut reached: HashSet<u64> = stack.iter().copied().collect();
        while let Some(node) = stack.pop() {
            let links = self
                .graphs
                .nodes
                .get(node)
                .map(|node| node.links.as_slice());
            for link in links.unwrap_or_default() {
                if reached.insert(link.node) {
                    stack.push(link.node);
                }
            }
        }
        let mut all = capture.members.values().flatten();
        all.all(|link| reached.contains(&link.node))
    }

    /// Returns the result of a capture query: the state of the stream, and the dependencies of its next node. None if
    /// it does not capture.
    fn capture_info(
        &mut self,
        stream: CUstream,
        status: &Out<CUstreamCaptureStatus>,
        edges_wanted: bool,
    ) -> R<Option<(u64, u64, &QueryArrays)>> {
        let queue = self.queue(stream)?;
        self.refuse_implicit(queue)?;
        let (state, id, graph) = self.status(queue);
        let capture = self.graphs.captures.get_mut(&id);
        let links = match &capture {
            Some(capture) if graph != 0 => capture.members.get(&queue),
            _ => None,
        };
        let links = links.map(Vec::as_slice).unwrap_or_default();
        if !edges_wanted && links.iter().any(Link::has_data) {
            return fail(CUresult::CUDA_ERROR_LOSSY_QUERY);
        }
        status.set(state)?;
        let shown = QueryArrays {
            nodes: links.iter().map(|link| link.node).collect(),
            edges: links.iter().map(Link::data).collect(),
        };
        Ok(capture.map(|capture| {
            let place = capture.shown.entry(queue).or_default();
            *place = shown;
            (id, graph, &*place)
        }))
    }

    fn status(&self, queue: u32) -> (CUstreamCaptureStatus, u64, u64) {
        type S = CUstreamCaptureStatus;
        let id = self.queues[queue as usize].capture;
        match id.and_then(|id| self.graphs.captures.get(&id).map(|capture| (id, capture))) {
            None => (S::CU_STREAM_CAPTURE_STATUS_NONE, 0, 0),
            Some((id, capture)) if capture.invalid => {
                (S::CU_STREAM_CAPTURE_STATUS_INVALIDATED, id, 0)
            }
            Some((id, capture)) => (S::CU_STREAM_CAPTURE_STATUS_ACTIVE, id, capture.graph),
        }
    }
}

#[allow(non_snake_case)]
impl State {
    pub(in crate::sim) fn cuStreamIsCapturing(
        &mut self,
        stream: CUstream,
        status: Out<CUstreamCaptureStatus>,
    ) -> R {
        let queue = self.queue(stream)?;
        self.refuse_implicit(queue)?;
        status.set(self.status(queue).0)
    }

    pub(in crate::sim) fn cuThreadExchangeStreamCaptureMode(
        &mut self,
        mode: Out<CUstreamCaptureMode>,
    ) -> R {
        let wanted = mode.get()?;
        if wanted.0 > RELAXED {
            return fail(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let thread = &mut self.threads[self.thread];
        let old = std::mem::replace(&mut thread.mode, wanted.0);
        mode.set(CUstreamCaptureMode(old))
    }

    pub(in crate::sim) fn cuStreamBeginCapture_v2(
        &mut self,
        stream: CUstream,
        mode: CUstreamCaptureMode,
    ) -> R {
        self.begin_capture(stream, mode, None)
    }

    pub(in crate::sim) fn cuStreamBeginCaptureToGraph(
        &mut self,
        stream: CUstream,
        graph: CUgraph,
        nodes: In<CUgraphNode>,
        edges: In<CUgraphEdgeData>,
        count: usize,
        mode: CUstreamCaptureMode,
    ) -> R {
        let graph = self.graph(graph)?;
        let links = read_links(&nodes, &edges, count)?;
        let taken = self.graphs.graphs.get(graph);
        if taken.is_some_and(|graph| graph.capture.is_some()) || !self.graphs.belong(graph, &links)
        {
            return fail(INVALID);
        }
        self.begin_capture(stream, mode, Some((graph, links)))
    }

    pub(in crate::sim) fn cuStreamEndCapture(
        &mut self,
        stream: CUstream,
        graph: Out<CUgraph>,
    ) -> R {
        graph.check()?;
        let queue = self.queue(stream)?;
        let Some(id) = self.queues[queue as usize].capture else {
            return fail(CUresult::CUDA_ERROR_ILLEGAL_STATE);
        };
        let thread = self.threads[self.thread].id;
        let Some(capture) = self.graphs.captures.get_mut(&id) else {
            return fail(CUresult::CUDA_ERROR_ILLEGAL_STATE);
        };
        if capture.origin != queue {
            capture.invalid = true;
            return fail(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
        }
        if capture.thread != thread && capture.mode != RELAXED {
            return fail(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
        }
        let Some(capture) = self.graphs.captures.remove(&id) else {
            return fail(CUresult::CUDA_ERROR_ILLEGAL_STATE);
        };
        for queue in &mut self.queues {
            if queue.capture == Some(id) {
                queue.capture = None;
            }
        }
        if let Some(entry) = self.graphs.graphs.get_mut(capture.graph) {
            entry.capture = None;
        }
        if !capture.invalid && self.is_joined(&capture) {
            return graph.set(capture.graph as CUgraph);
        }
        // The graph of a failed capture is dropped with everything it holds.
        if !capture.into {
            self.destroy_graph(capture.graph);
        }
        graph.set(std::ptr::null_mut())?;
        fail(match capture.invalid {
            true => CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            false => CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
        })
    }

    pub(in crate::sim) fn cuStreamGetCaptureInfo_v2(
        &mut self,
        stream: CUstream,
        status: Out<CUstreamCaptureStatus>,
        id: Out<u64>,
        graph: Out<CUgraph>,
        dependencies: Out<*const CUgraphNode>,
        count: Out<usize>,
    ) -> R {
        let wanted = dependencies.check().is_err();
        if let Some((capture, handle, shown)) = self.capture_info(stream, &status, wanted)? {
            id.set_if(capture);
            graph.set_if(handle as CUgraph);
            dependencies.set_if(shown.nodes.as_ptr().cast());
            count.set_if(shown.nodes.len());
        }
        Ok(())
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "the signature is the driver's own"
    )]
    pub(in crate::sim) fn cuStreamGetCaptureInfo_v3(
        &mut self,
        stream: CUstream,
        status: Out<CUstreamCaptureStatus>,
        id: Out<u64>,
        graph: Out<CUgraph>,
        dependencies: Out<*const CUgraphNode>,
        edges: Out<*const CUgraphEdgeData>,
        count: Out<usize>,
    ) -> R {
        let wanted = dependencies.check().is_err() || edges.check().is_ok();
        if let Some((capture, handle, shown)) = self.capture_info(stream, &status, wanted)? {
            id.set_if(capture);
            graph.set_if(handle as CUgraph);
            dependencies.set_if(shown.nodes.as_ptr().cast());
            edges.set_if(shown.edges.as_ptr());
            count.set_if(shown.nodes.len());
        }
        Ok(())
    }

    pub(in crate::sim) fn cuStreamUpdateCaptureDependencies_v2(
        &mut self,
        stream: CUstream,
        nodes: Out<CUgraphNode>,
        edges: In<CUgraphEdgeData>,
        count: usize,
        flags: c_uint,
    ) -> R {
        let queue = self.queue(stream)?;
        let links = read_links(&nodes.read_only(), &edges, count)?;
        let Some((id, old)) = self.captured_links(queue)? else {
            return fail(CUresult::CUDA_ERROR_ILLEGAL_STATE);
        };
        let graph = self.graphs.captures.get(&id).map_or(0, |c| c.graph);
        if flags > 1 || !self.graphs.belong(graph, &links) {
            return fail(INVALID);
        }
        let old = if flags == 0 { &*old } else { &[] };
        if let Some(capture) = self.graphs.captures.get_mut(&id) {
            capture.members.insert(queue, common(old, &links));
        }
        Ok(())
    }
}
