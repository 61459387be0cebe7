//! Captures, by this thread and by another one, between calls and inside them.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use cualloc::driver::sys::*;
use cualloc::sim::Report;

use super::program::nth;
use super::rng::Rng;
use super::table::{Checker, checker, inside, nothing_inside, own};
use super::world::{Done, Held, Kind, Lane, Who, World};

type Job = Box<dyn FnOnce() + Send>;

/// Another thread of the program, which only executes the calls that are sent to it.
pub struct Helper {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Helper {
    pub fn new(checker: &Arc<Checker>) -> Helper {
        let (jobs, next) = channel::<Job>();
        let checker = Arc::clone(checker);
        let thread = std::thread::spawn(move || {
            checker.enter();
            for job in next {
                job();
            }
            Checker::leave();
        });
        Helper {
            jobs: Some(jobs),
            thread: Some(thread),
        }
    }

    /// Has something done, and waits for it.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) {
        let Some(jobs) = &self.jobs else { return };
        let (told, done) = channel();
        let job = move || {
            job();
            let _ = told.send(());
        };
        if jobs.send(Box::new(job)).is_ok() {
            let _ = done.recv();
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // What is still to be done inside a call keeps the way to the thread open.
        nothing_inside();
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn mode(n: u32) -> CUstreamCaptureMode {
    CUstreamCaptureMode(n % 3)
}

fn begin(raw: usize, mode: CUstreamCaptureMode) -> bool {
    // SAFETY: the stream is live.
    let code = own(|f| unsafe { f.cuStreamBeginCapture_v2.unwrap()(raw as CUstream, mode) });
    code == CUresult::CUDA_SUCCESS
}

fn is_spoilt(raw: usize) -> bool {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the stream is live, the status is a local.
    let code = own(|f| unsafe { f.cuStreamIsCapturing.unwrap()(raw as CUstream, &mut status) });
    let spoilt = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    code == CUresult::CUDA_SUCCESS && status == spoilt
}

fn end(raw: usize) -> CUresult {
    own(|f| {
        let mut graph: CUgraph = std::ptr::null_mut();
        // SAFETY: the stream is live, the graph is ours.
        unsafe {
            let code = f.cuStreamEndCapture.unwrap()(raw as CUstream, &mut graph);
            if !graph.is_null() {
                let _ = f.cuGraphDestroy.unwrap()(graph);
            }
            code
        }
    })
}

impl World {
    fn helper(&mut self) -> &Helper {
        let checker = &self.checker;
        self.helper.get_or_insert_with(|| Helper::new(checker))
    }

    /// What the other thread has to say.
    pub fn helped<T: Send + 'static>(
        &mut self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        let (told, said) = channel();
        self.helper().run(move || {
            let _ = told.send(job());
        });
        said.recv().map_err(|e| e.to_string())
    }

    fn capturable(&self, a: u32) -> Option<usize> {
        let lane = a as usize % self.lanes.len();
        let it = &self.lanes[lane];
        let busy = self.lanes.iter().filter(|l| l.capturing.is_some()).count();
        (busy < 2 && !it.special && self.usable(lane)).then_some(lane)
    }

    pub fn begin_capture(&mut self, a: u32, b: u32) {
        let Some(lane) = self.capturable(a) else {
            return;
        };
        self.captured = true;
        let (raw, mode) = (self.lanes[lane].raw, mode(b));
        self.become_current(self.lanes[lane].place);
        if !b.is_multiple_of(4) {
            if begin(raw, mode) {
                self.lanes[lane].capturing = Some(Who::Main);
            }
            return;
        }
        let begun = Arc::clone(&self.begun);
        self.helper().run(move || {
            if begin(raw, mode) {
                *begun.lock().unwrap() = Some(lane);
            }
        });
        if self.begun.lock().unwrap().take().is_some() {
            self.lanes[lane].capturing = Some(Who::Helper);
        }
    }

    /// Captures that an interlude began are the program's to end.
    pub fn notice_begun(&mut self) {
        let begun = self.begun.lock().unwrap().take();
        if let Some(lane) = begun {
            self.lanes[lane].capturing = Some(Who::Helper);
            self.fresh.push(lane);
        }
    }

    /// No call invalidated a capture, except unavoidable ones: a query or wait that was in progress when the capture
    /// began, and a wait for the context during a capture of a stream that the allocator knows only by its handle.
    pub fn spares_captures(&mut self) -> Done {
        self.notice_begun();
        let fresh = std::mem::take(&mut self.fresh);
        for lane in &fresh {
            let raw = self.lanes[*lane].raw;
            self.lanes[*lane].doomed |= is_spoilt(raw);
        }
        for report in self.sim.take_reports() {
            let Report::DuringCapture { call } = report else {
                return Err(format!("the simulator reports: {report}"));
            };
            let of_stream = matches!(call, "cuStreamQuery" | "cuStreamGetId");
            let of_context = call == "cuCtxSynchronize";
            let excused = match fresh.is_empty() {
                false => of_stream || of_context,
                true => of_context && !self.all_known(),
            };
            if !excused {
                let lanes = self.lanes.iter().enumerate();
                let capturing = lanes.filter(|(_, l)| l.capturing.is_some());
                let capturing: Vec<usize> = capturing.map(|(at, _)| at).collect();
                return Err(format!("{call} although {capturing:?} capture"));
            }
            for (at, lane) in self.lanes.iter_mut().enumerate() {
                lane.doomed |= lane.capturing.is_some() && (of_context || fresh.contains(&at));
            }
        }
        Ok(())
    }

    /// Whether every allocator keeps each stream that captures, and so can ask it.
    fn all_known(&self) -> bool {
        let kept = |lane: &Lane| (0..self.slots.len()).all(|slot| lane.kept_in.contains(&slot));
        let mut capturing = self.lanes.iter().filter(|l| l.capturing.is_some());
        !self.abandoned && capturing.all(kept)
    }

    pub fn end_capture(&mut self, a: u32) -> Done {
        let capturing: Vec<usize> = (0..self.lanes.len())
            .filter(|&lane| self.lanes[lane].capturing.is_some())
            .collect();
        if capturing.is_empty() {
            return Ok(());
        }
        let lane = capturing[a as usize % capturing.len()];
        let raw = self.lanes[lane].raw;
        let code = match self.lanes[lane].capturing.take() {
            Some(Who::Helper) => self.helped(move || end(raw))?,
            _ => end(raw),
        };
        let doomed = std::mem::take(&mut self.lanes[lane].doomed);
        match code {
            CUresult::CUDA_SUCCESS => Ok(()),
            _ if doomed => Ok(()),
            code => Err(format!("a capture ended with {code:?}")),
        }
    }

    /// Another thread begins a capture inside one of the allocator's calls.
    pub fn capture_inside(&mut self, a: u32, b: u32, c: u32) {
        const CALLS: &str = "
            cuEventRecord cuEventRecord cuStreamIsCapturing cuStreamIsCapturing cuStreamQuery cuEventQuery
            cuStreamWaitEvent cuStreamGetId cuMemCreate cuMemUnmap cuMemSetAccess cuEventCreate
            cuCtxSynchronize
        ";
        let Some(lane) = self.capturable(a) else {
            return;
        };
        self.captured = true;
        let (raw, mode) = (self.lanes[lane].raw, mode(b));
        let begun = Arc::clone(&self.begun);
        self.helped_inside(nth(CALLS, c.into()), b, move || {
            if begin(raw, mode) {
                *begun.lock().unwrap() = Some(lane);
            }
        });
    }

    /// The other thread does something inside one of the allocator's calls.
    fn helped_inside(
        &mut self,
        name: Option<&'static str>,
        b: u32,
        job: impl FnOnce() + Send + 'static,
    ) {
        let (Some(name), Some(helper)) = (name, self.helper().jobs.clone()) else {
            return;
        };
        let (told, done) = channel();
        inside(name, b.is_multiple_of(2), (b >> 8) % 4, move || {
            let job = move || {
                job();
                let _ = told.send(());
            };
            if helper.send(Box::new(job)).is_ok() {
                let _ = done.recv();
            }
        });
    }

    /// Another thread frees a block, or takes one, inside one of the allocator's calls.
    pub fn act_inside(&mut self, a: u32, b: u32, c: u32) {
        const CALLS: &str = "
            cuEventRecord cuStreamWaitEvent cuMemCreate cuMemMap cuMemSetAccess cuMemUnmap cuMemRelease
            cuMemAlloc_v2 cuMemFree_v2 cuEventQuery cuStreamQuery cuCtxSynchronize
        ";
        let fits = |h: &Held| {
            let plain = matches!(h.kind, Kind::Block(_)) && !h.orphan && h.due.is_none();
            plain && self.lanes[h.home].stream.is_some()
        };
        let some: Vec<usize> = (0..self.held.len())
            .filter(|&n| fits(&self.held[n]))
            .collect();
        if some.is_empty() {
            return;
        }
        let index = some[a as usize % some.len()];
        // What is held back until then is not used by the program any more.
        let held = self.held.swap_remove(index);
        let stream = self.lanes[held.home].stream.clone();
        let home = held.home;
        let stash = Arc::clone(&self.stash);
        self.stash.lock().unwrap().push(held);
        let slot = c as usize % self.slots.len();
        let allocator = self.slots[slot].allocator.clone();
        let Some(stream) = stream else { return };
        let same = self.places[self.lanes[home].place].device
            == self.places[self.slots[slot].place].device;
        let epoch = self.lanes[home].epoch;
        // The other thread has no context current, by which a default stream could be told.
        let number = self.number(slot, home);
        self.helped_inside(nth(CALLS, u64::from(c / 7)), b, move || {
            let mut rng = Rng::new(u64::from(b));
            let next = stash.lock().unwrap().pop();
            if let Some(held) = next
                && let Kind::Block(block) = held.kind
            {
                checker().tracker().freed(held.ptr);
                drop(block);
            }
            let bytes = super::program::size(b, c, 16 << 20);
            if rng.chance(60)
                && same
                && let Ok(block) = allocator.allocate(bytes, &stream)
            {
                let (ptr, bytes) = (block.ptr(), bytes as u64);
                checker().tracker().handed_out(ptr, bytes, number);
                stash.lock().unwrap().push(Held {
                    slot,
                    orphan: false,
                    ptr,
                    bytes,
                    home,
                    epoch,
                    last: home,
                    recorded: Vec::new(),
                    due: None,
                    kind: Kind::Block(block),
                });
            }
        });
    }
}
