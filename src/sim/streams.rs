//! Streams and events.

use super::args::Out;
use super::call::{R, fail};
use super::reports::Report;
use super::state::{CONTEXT_BASE, EVENT_BASE, Event, HANDLE_STEP, Recorded, STREAM_BASE, State};
use super::work::Work;
use crate::driver::sys::*;
use std::ffi::{c_int, c_uint};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
const BAD_HANDLE: CUresult = CUresult::CUDA_ERROR_INVALID_HANDLE;

fn index(value: u64, base: u64) -> Option<usize> {
    let offset = value.checked_sub(base)?;
    (offset % HANDLE_STEP == 0).then_some((offset / HANDLE_STEP) as usize)
}

impl State {
    /// Returns the queue of a stream handle on this thread.
    pub(super) fn queue(&mut self, stream: CUstream) -> R<u32> {
        let value = stream as u64;
        if value <= 2 {
            let ctx = self.current()?;
            return self.default_queue(ctx, value == 2);
        }
        let slot = index(value, STREAM_BASE);
        match slot.and_then(|slot| self.streams.get(slot)) {
            Some(Some(queue)) => {
                let queue = *queue;
                let ctx = self.queues[queue as usize].ctx;
                match self.ctxs[ctx].lost {
                    Some(code) => fail(code),
                    None => Ok(queue),
                }
            }
            other => {
                let existed = other.is_some();
                self.dead("stream", value, existed);
                fail(BAD_HANDLE)
            }
        }
    }

    fn default_queue(&mut self, ctx: usize, per_thread: bool) -> R<u32> {
        let thread = self.threads[self.thread].id;
        let known = match per_thread {
            true => self.ctxs[ctx].per_thread.get(&thread).copied(),
            false => self.ctxs[ctx].legacy,
        };
        if let Some(queue) = known {
            return Ok(queue);
        }
        let queue = self.new_queue(ctx, true);
        if per_thread {
            self.ctxs[ctx].per_thread.insert(thread, queue);
        } else {
            self.ctxs[ctx].legacy = Some(queue);
        }
        Ok(queue)
    }

    fn event(&mut self, event: CUevent) -> R<usize> {
        let value = event as u64;
        let slot = index(value, EVENT_BASE);
        match slot.and_then(|slot| self.events.get(slot)) {
            Some(Some(entry)) => match self.ctxs[entry.ctx].lost {
                Some(code) => fail(code),
                None => Ok(slot.unwrap_or_default()),
            },
            other => {
                let existed = other.is_some();
                self.dead("event", value, existed);
                fail(BAD_HANDLE)
            }
        }
    }

    fn recorded(&self, slot: usize) -> Recorded {
        self.events[slot]
            .as_ref()
            .map_or(Recorded::Never, |event| event.state.clone())
    }

    fn new_stream(&mut self, out: Out<CUstream>, flags: c_uint) -> R {
        out.check()?;
        let ctx = self.current()?;
        if flags > 1 {
            return fail(INVALID);
        }
        let queue = self.new_queue(ctx, flags == 0);
        let slot = self.free_streams.pop().unwrap_or_else(|| {
            self.streams.push(None);
            self.streams.len() - 1
        });
        self.streams[slot] = Some(queue);
        out.set((STREAM_BASE + slot as u64 * HANDLE_STEP) as CUstream)
    }
}

#[allow(non_snake_case)]
impl State {
    pub(super) fn cuStreamCreate(&mut self, out: Out<CUstream>, flags: c_uint) -> R {
        self.new_stream(out, flags)
    }

    pub(super) fn cuStreamCreateWithPriority(
        &mut self,
        out: Out<CUstream>,
        flags: c_uint,
        _priority: c_int,
    ) -> R {
        self.new_stream(out, flags)
    }

    pub(super) fn cuStreamDestroy_v2(&mut self, stream: CUstream) -> R {
        if stream as u64 <= 2 {
            return fail(BAD_HANDLE);
        }
        let queue = self.queue(stream)?;
        if self.queues[queue as usize].capture.is_some() {
            self.invalidate_capture_of(queue);
            self.queues[queue as usize].capture = None;
        }
        self.retire_queue(queue);
        if let Some(slot) = index(stream as u64, STREAM_BASE) {
            self.streams[slot] = None;
            self.free_streams.push(slot);
        }
        Ok(())
    }

    pub(super) fn cuStreamSynchronize(&mut self, stream: CUstream) -> R {
        let queue = self.queue(stream)?;
        self.refuse_if_capturing(queue)?;
        self.refuse_during_capture()?;
        self.begin_wait()?;
        self.host_wait_queue(queue)?;
        self.pools_synchronised();
        Ok(())
    }

    pub(super) fn cuStreamQuery(&mut self, stream: CUstream) -> R {
        let queue = self.queue(stream)?;
        self.refuse_if_capturing(queue)?;
        self.refuse_during_capture()?;
        let entry = &self.queues[queue as usize];
        if entry.done < entry.submitted {
            return fail(CUresult::CUDA_ERROR_NOT_READY);
        }
        let (seq, clock) = (entry.submitted, entry.clock.clone());
        self.observe(queue, seq, &clock);
        Ok(())
    }

    pub(super) fn cuStreamWaitEvent(
        &mut self,
        stream: CUstream,
        event: CUevent,
        flags: c_uint,
    ) -> R {
        let queue = self.queue(stream)?;
        let slot = self.event(event)?;
        if flags > 1 {
            return fail(INVALID);
        }
        match self.recorded(slot) {
            Recorded::Never => {
                self.refuse_implicit(queue)?;
                Ok(())
            }
            Recorded::At {
                queue: other,
                seq,
                clock,
            } => {
                if self.queues[queue as usize].capture.is_some() {
                    return self.isolation(queue);
                }
                self.refuse_implicit(queue)?;
                self.submit_wait(queue, other, seq, &clock);
                Ok(())
            }
            Recorded::Captured { capture, links } => self.join_capture(queue, capture, &links),
        }
    }

    pub(super) fn cuStreamGetCtx(&mut self, stream: CUstream, out: Out<CUcontext>) -> R {
        let queue = self.queue(stream)?;
        let ctx = self.queues[queue as usize].ctx;
        out.set((CONTEXT_BASE + ctx as u64 * HANDLE_STEP) as CUcontext)
    }

    pub(super) fn cuStreamGetId(&mut self, stream: CUstream, out: Out<u64>) -> R {
        let queue = self.queue(stream)?;
        self.refuse_captured(queue)?;
        out.set(self.queues[queue as usize].id)
    }

    pub(super) fn cuStreamGetDevice(&mut self, stream: CUstream, out: Out<CUdevice>) -> R {
        let queue = self.queue(stream)?;
        out.set(self.ctxs[self.queues[queue as usize].ctx].device as CUdevice)
    }

    pub(super) fn cuEventCreate(&mut self, out: Out<CUevent>, flags: c_uint) -> R {
        out.check()?;
        let ctx = self.current()?;
        if flags > 7 {
            return fail(INVALID);
        }
        let slot = self.free_events.pop().unwrap_or_else(|| {
            self.events.push(None);
            self.events.len() - 1
        });
        self.events[slot] = Some(Event {
            ctx,
            state: Recorded::Never,
        });
        out.set((EVENT_BASE + slot as u64 * HANDLE_STEP) as CUevent)
    }

    pub(super) fn cuEventRecord(&mut self, event: CUevent, stream: CUstream) -> R {
        let queue = self.queue(stream)?;
        let slot = self.event(event)?;
        let Some(entry) = &self.events[slot] else {
            return fail(BAD_HANDLE);
        };
        if entry.ctx != self.queues[queue as usize].ctx {
            let call = self.now.name();
            self.report(Report::WrongContext { call });
            return fail(BAD_HANDLE);
        }
        let state = match self.captured_links(queue)? {
            Some((capture, links)) => Recorded::Captured { capture, links },
            None => {
                let seq = self.submit(queue, Work::Record, 0);
                let clock = self.queues[queue as usize].clock.clone();
                Recorded::At { queue, seq, clock }
            }
        };
        if let Some(entry) = &mut self.events[slot] {
            entry.state = state;
        }
        Ok(())
    }

    pub(super) fn cuEventQuery(&mut self, event: CUevent) -> R {
        let slot = self.event(event)?;
        match self.recorded(slot) {
            Recorded::Never => self.refuse_during_capture(),
            Recorded::Captured { capture, .. } => self.captured_event(capture),
            Recorded::At { queue, seq, clock } => {
                self.refuse_during_capture()?;
                if self.queues[queue as usize].done < seq {
                    return fail(CUresult::CUDA_ERROR_NOT_READY);
                }
                self.observe(queue, seq, &clock);
                Ok(())
            }
        }
    }

    pub(super) fn cuEventSynchronize(&mut self, event: CUevent) -> R {
        let slot = self.event(event)?;
        match self.recorded(slot) {
            Recorded::Never => self.refuse_during_capture(),
            Recorded::Captured { capture, .. } => self.captured_event(capture),
            Recorded::At { queue, seq, clock } => {
                self.refuse_during_capture()?;
                self.begin_wait()?;
                self.host_wait(queue, seq, &clock)?;
                self.pools_synchronised();
                Ok(())
            }
        }
    }

    pub(super) fn cuEventDestroy_v2(&mut self, event: CUevent) -> R {
        let slot = self.event(event)?;
        self.events[slot] = None;
        self.free_events.push(slot);
        Ok(())
    }
}

impl State {
    /// Submits work to a stream: the common way of copies, fills and launches.
    pub(super) fn enqueue(&mut self, stream: CUstream, work: Work, nanos: u64) -> R {
        let queue = self.queue(stream)?;
        self.enqueue_on(queue, work, nanos)
    }

    /// As [`State::enqueue`], on a queue already found.
    pub(super) fn enqueue_on(&mut self, queue: u32, mut work: Work, nanos: u64) -> R {
        self.mark_host(&mut work);
        if !self.captured(queue, &work, self.now.name(), nanos)? {
            self.submit(queue, work, nanos);
        }
        Ok(())
    }
}
