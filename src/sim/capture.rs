//! Stream capture: what may be called meanwhile, and by whom.

use super::args::Out;
use super::call::{R, fail};
use super::objects::{Capture, Member};
use super::reports::Report;
use super::state::{Callback, State};
use crate::driver::sys::*;
use std::collections::HashMap;
use std::ffi::{c_uint, c_void};

const GLOBAL: u32 = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL.0;
const RELAXED: u32 = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED.0;
const UNSUPPORTED: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;

impl State {
    fn refuse_capture(&mut self) -> R {
        let call = self.now.name();
        self.report(Report::DuringCapture { call });
        fail(UNSUPPORTED)
    }

    /// Refuses a potentially unsafe call. Nothing is refused to a thread in relaxed mode, nor by a
    /// relaxed capture; the others bind their own thread, and every thread in global mode, which is
    /// how each begins: so measured, also for captures in thread-local mode.
    pub(super) fn refuse_during_capture(&mut self) -> R {
        if self.captures.is_empty() {
            return Ok(());
        }
        let thread = &self.threads[self.thread];
        let (id, mode) = (thread.id, thread.mode);
        if mode == RELAXED {
            return Ok(());
        }
        let mut hit = false;
        for capture in self.captures.values_mut() {
            if capture.mode != RELAXED && (capture.thread == id || mode == GLOBAL) {
                capture.invalid = true;
                hit = true;
            }
        }
        if hit { self.refuse_capture() } else { Ok(()) }
    }

    /// Refuses to wait for or ask about a stream that captures, which also spoils the capture.
    pub(super) fn refuse_if_capturing(&mut self, queue: u32) -> R {
        self.refuse_implicit(queue)?;
        self.refuse_captured(queue)
    }

    /// The same for calls that the legacy stream allows.
    pub(super) fn refuse_captured(&mut self, queue: u32) -> R {
        if self.queues[queue as usize].capture.is_none() {
            return Ok(());
        }
        self.invalidate_capture_of(queue);
        self.refuse_capture()
    }

    /// Refuses to wait for a context in which a stream captures, in any mode.
    pub(super) fn refuse_ctx_during_capture(&mut self, ctx: usize) -> R {
        let queues = &self.queues;
        let inside = |capture: &&mut Capture| queues[capture.origin as usize].ctx == ctx;
        let mut hit = false;
        for capture in self.captures.values_mut().filter(inside) {
            capture.invalid = true;
            hit = true;
        }
        if hit { self.refuse_capture() } else { Ok(()) }
    }

    /// Refuses the legacy stream while a blocking stream of its context captures.
    pub(super) fn refuse_implicit(&mut self, queue: u32) -> R {
        if self.captures.is_empty() {
            return Ok(());
        }
        let ctx = &self.ctxs[self.queues[queue as usize].ctx];
        let capturing = |other: &u32| self.queues[*other as usize].capture.is_some();
        if ctx.legacy == Some(queue) && ctx.blocking.iter().any(capturing) {
            return fail(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        }
        Ok(())
    }

    /// Spoils the capture that a stream takes part in.
    pub(super) fn invalidate_capture_of(&mut self, queue: u32) {
        let capture = self.queues[queue as usize].capture;
        if let Some(capture) = capture.and_then(|id| self.captures.get_mut(&id)) {
            capture.invalid = true;
        }
    }

    /// If the stream captures, adds a node and says which; work is then not executed.
    pub(super) fn captured_node(&mut self, queue: u32) -> R<Option<(u64, u64)>> {
        let Some(id) = self.queues[queue as usize].capture else {
            self.refuse_implicit(queue)?;
            return Ok(None);
        };
        let Some(capture) = self.captures.get_mut(&id) else {
            return Ok(None);
        };
        if capture.invalid {
            return fail(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        let member = capture.members.entry(queue).or_default();
        member.nodes += 1;
        let (node, known) = (member.nodes, member.known.clone());
        capture.snapshots.insert((queue, node), known);
        Ok(Some((id, node)))
    }

    /// A wait of a capturing stream for an event that was not captured.
    pub(super) fn isolation(&mut self, queue: u32) -> R {
        self.invalidate_capture_of(queue);
        fail(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
    }

    /// Query or wait of the host for a captured event. That of a capture which has ended is an invalid value
    /// to the driver (measured with driver 580 on an H200).
    pub(super) fn captured_event(&mut self, capture: u64) -> R {
        let Some(capture) = self.captures.get_mut(&capture) else {
            return fail(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        capture.invalid = true;
        let call = self.now.name();
        self.report(Report::DuringCapture { call });
        fail(CUresult::CUDA_ERROR_CAPTURED_EVENT)
    }

    /// A wait for a captured event: the stream joins the capture.
    pub(super) fn join_capture(&mut self, queue: u32, id: u64, other: u32, node: u64) -> R {
        self.refuse_implicit(queue)?;
        let own = self.queues[queue as usize].capture;
        let Some(capture) = self.captures.get_mut(&id) else {
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
        let snapshot = capture
            .snapshots
            .get(&(other, node))
            .cloned()
            .unwrap_or_default();
        let member = capture.members.entry(queue).or_default();
        for (queue, node) in snapshot.into_iter().chain([(other, node)]) {
            let known = member.known.entry(queue).or_default();
            *known = (*known).max(node);
        }
        self.queues[queue as usize].capture = Some(id);
        Ok(())
    }

    fn status(&self, queue: u32) -> (CUstreamCaptureStatus, u64, u64) {
        type S = CUstreamCaptureStatus;
        let id = self.queues[queue as usize].capture;
        match id.and_then(|id| self.captures.get(&id).map(|capture| (id, capture))) {
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
    pub(super) fn cuStreamIsCapturing(
        &mut self,
        stream: CUstream,
        status: Out<CUstreamCaptureStatus>,
    ) -> R {
        let queue = self.queue(stream)?;
        self.refuse_implicit(queue)?;
        status.set(self.status(queue).0)
    }

    pub(super) fn cuThreadExchangeStreamCaptureMode(
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

    pub(super) fn cuStreamBeginCapture_v2(
        &mut self,
        stream: CUstream,
        mode: CUstreamCaptureMode,
    ) -> R {
        let queue = self.queue(stream)?;
        let legacy = self.ctxs[self.queues[queue as usize].ctx].legacy == Some(queue);
        if mode.0 > RELAXED {
            return fail(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if legacy {
            return fail(UNSUPPORTED);
        }
        if self.queues[queue as usize].capture.is_some() {
            return fail(CUresult::CUDA_ERROR_ILLEGAL_STATE);
        }
        let id = self.next_capture;
        self.next_capture += 1;
        let capture = Capture {
            origin: queue,
            thread: self.threads[self.thread].id,
            mode: mode.0,
            invalid: false,
            graph: id,
            members: HashMap::from([(queue, Member::default())]),
            snapshots: HashMap::new(),
        };
        self.captures.insert(id, capture);
        self.queues[queue as usize].capture = Some(id);
        Ok(())
    }

    pub(super) fn cuStreamEndCapture(&mut self, stream: CUstream, graph: Out<CUgraph>) -> R {
        graph.check()?;
        let queue = self.queue(stream)?;
        let Some(id) = self.queues[queue as usize].capture else {
            return fail(CUresult::CUDA_ERROR_ILLEGAL_STATE);
        };
        let thread = self.threads[self.thread].id;
        let Some(capture) = self.captures.get_mut(&id) else {
            return fail(CUresult::CUDA_ERROR_ILLEGAL_STATE);
        };
        if capture.origin != queue {
            capture.invalid = true;
            return fail(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
        }
        if capture.thread != thread && capture.mode != RELAXED {
            return fail(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
        }
        let known = capture.members.get(&queue).map(|member| &member.known);
        let joined = capture.members.iter().all(|(other, member)| {
            let reached = known
                .and_then(|known| known.get(other))
                .copied()
                .unwrap_or(0);
            *other == queue || reached >= member.nodes
        });
        let invalid = capture.invalid;
        self.captures.remove(&id);
        for queue in &mut self.queues {
            if queue.capture == Some(id) {
                queue.capture = None;
            }
        }
        if invalid || !joined {
            graph.set(std::ptr::null_mut())?;
            return fail(match invalid {
                true => CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
                false => CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
            });
        }
        self.graphs.entry(id).or_default();
        graph.set(id as CUgraph)
    }

    pub(super) fn cuStreamGetCaptureInfo_v2(
        &mut self,
        stream: CUstream,
        status: Out<CUstreamCaptureStatus>,
        id: Out<u64>,
        graph: Out<CUgraph>,
        dependencies: Out<*const CUgraphNode>,
        count: Out<usize>,
    ) -> R {
        let queue = self.queue(stream)?;
        self.refuse_implicit(queue)?;
        let (state, capture, handle) = self.status(queue);
        status.set(state)?;
        if state != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            id.set_if(capture);
            graph.set_if(handle as CUgraph);
            // Nodes are counted, not kept, so there are no handles to show.
            dependencies.set_if(std::ptr::null());
            count.set_if(0);
        }
        Ok(())
    }

    pub(super) fn cuGraphDestroy(&mut self, graph: CUgraph) -> R {
        let Some(objects) = self.graphs.remove(&(graph as u64)) else {
            let existed = (graph as u64) < self.next_capture;
            self.dead("graph", graph as u64, existed);
            return fail(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        for object in objects {
            let last = match self.user_objects.get_mut(&object) {
                Some((count, _)) => {
                    *count -= 1;
                    *count == 0
                }
                None => false,
            };
            if last && let Some((_, callback)) = self.user_objects.remove(&object) {
                self.defer(callback.function, callback.data);
            }
        }
        Ok(())
    }

    pub(super) fn cuUserObjectCreate(
        &mut self,
        object: Out<CUuserObject>,
        pointer: *mut c_void,
        destroy: CUhostFn,
        references: c_uint,
        _flags: c_uint,
    ) -> R {
        if destroy.is_none() || references == 0 {
            return fail(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let value = self.next_share;
        object.set(value as CUuserObject)?;
        self.next_share += 1;
        let callback = Callback {
            function: destroy,
            data: pointer as usize,
        };
        self.user_objects
            .insert(value, (references.into(), callback));
        Ok(())
    }

    pub(super) fn cuGraphRetainUserObject(
        &mut self,
        graph: CUgraph,
        object: CUuserObject,
        count: c_uint,
        flags: c_uint,
    ) -> R {
        /// The graph takes over the caller's references.
        const MOVE: c_uint = 1;
        let value = object as u64;
        let known = self.user_objects.get_mut(&value);
        let list = self.graphs.entry(graph as u64);
        let Some((references, _)) = known else {
            return fail(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        if flags & MOVE == 0 {
            *references += u64::from(count);
        }
        list.or_default().extend((0..count).map(|_| value));
        Ok(())
    }
}
