//! Copies in progress.

use std::ffi::c_void;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};

use crate::driver::{DriverError, Entered, Stream, in_host_function, process};
use crate::error::{Error, Refused};
use crate::foreign::guarded;
use crate::sync::capture;
use crate::sync::order::wait;

use super::element::DeviceCopy;
use super::order::{Failed, Memory, submit};
use super::pinned::PinnedBuffer;
use crate::locks::held::Mutex;

/// A copy between a device and a [`PinnedBuffer`], which it owns until the copy is complete. Call [`wait`](Self::wait),
/// `await` it, or register a [callback](Self::on_complete).
///
/// Dropping it gives up the memory: memory of a [`PinnedPool`](crate::pool::PinnedPool) returns to the pool immediately
/// and is reused once the copy is over; other memory is freed, which waits for the copy. Leaking the value
/// (`std::mem::forget`) leaks the memory, so the device never writes to memory that was reused. `Send` and `Sync`.
///
/// # As a future
/// The future is ready when the copy is complete, with the result of [`wait`](Self::wait). A thread of the driver wakes
/// it when the work submitted to the stream before the first poll is done. Polls make driver calls, so they must not
/// run on such a thread. After the loss of the device no waker is called; the next poll reports the loss.
#[must_use = "the copy is of use to who waits for it"]
pub struct CopyInFlight<T: DeviceCopy> {
    /// None once the future was ready.
    host: Option<PinnedBuffer<T>>,
    /// The waker of the task that awaits the copy, once a wake-up was requested from the driver.
    woken: Option<Arc<Job>>,
}

/// The name of the callback when the log reports its panic.
const DONE: &str = "what was to be done after a copy";

/// A function that a thread of the driver calls once.
type Job = Mutex<Option<Box<dyn FnOnce() + Send>>>;

impl<T: DeviceCopy> CopyInFlight<T> {
    /// Starts a copy. `memory` is none if there is nothing to copy.
    ///
    /// # Safety
    /// `operation` copies between device memory and the host memory at the given address, within both; afterwards the
    /// elements of the host memory are valid values of `T`, which has the size and alignment of `H`.
    pub(super) unsafe fn start<H: DeviceCopy>(
        mut host: PinnedBuffer<H>,
        memory: Option<&Memory>,
        stream: &Stream,
        operation: impl FnOnce(&Entered<'_>, *mut H) -> Result<(), DriverError>,
    ) -> Result<Self, Refused<PinnedBuffer<H>>> {
        if let Some(memory) = memory {
            let ready = memory.same_device(stream);
            if let Err(error) = ready.and_then(|()| host.block.ready()) {
                return Err(Refused::new(host, error));
            }
            let raw = host.raw();
            match submit(stream, &[memory], false, |entered| operation(entered, raw)) {
                // If its end cannot be marked, the copy is waited for.
                Ok(()) => {
                    let _ = host.block.used_by(stream, memory.events());
                }
                Err(Failed::Before(error)) => return Err(Refused::new(host, error)),
                Err(Failed::Submitted(error)) => match wait(stream, memory.events()) {
                    Ok(()) => return Err(Refused::new(host, error)),
                    // The end of the copy may never become known.
                    Err(unseen) => host.block.lose(unseen),
                },
            }
        }
        Ok(CopyInFlight {
            // SAFETY: the elements are inaccessible until the copy is over.
            host: Some(unsafe { host.retyped() }),
            woken: None,
        })
    }

    /// Whether the copy is complete. Does not wait.
    ///
    /// # Errors
    /// Driver errors, among them those of the work itself; [`Error::Unseen`].
    pub fn is_complete(&self) -> Result<bool, Error> {
        self.host
            .as_ref()
            .map_or(Ok(true), |host| host.block.is_idle())
    }

    /// Blocks until the copy is complete, and returns the host memory.
    ///
    /// # Errors
    /// Driver errors, including those of the work itself. If no wait for the end of the copy succeeds, the host memory
    /// is leaked: [`Error::Unseen`].
    pub fn wait(mut self) -> Result<PinnedBuffer<T>, Error> {
        let mut host = self.take()?;
        host.block.wait()?;
        Ok(host)
    }

    /// Calls `run` with the host memory when the copy is complete, on a thread of the driver, ordered after everything
    /// submitted to the copy's stream so far. If the copy is already complete, or there is nothing to copy, the calling
    /// thread calls `run` immediately, so hold no lock that it takes. `run` must not call the driver, neither directly
    /// nor through this crate, but may drop the memory, send it to another thread, or wake one. A panic in it is
    /// logged. It is not called after the loss of the device.
    ///
    /// # Errors
    /// [`Error::Capturing`]; driver errors. `run` is then not called, and the host memory is given up.
    pub fn on_complete(
        mut self,
        run: impl FnOnce(PinnedBuffer<T>) + Send + 'static,
    ) -> Result<(), Error> {
        let mut host = self.take()?;
        if host.block.remove_completed()? {
            guarded(DONE, || run(host));
            return Ok(());
        }
        let stream = stream_behind(&host)?;
        let job: Arc<Job> = Arc::default();
        *process::lock(&job) = Some(Box::new(move || {
            host.block.end_use();
            run(host);
        }));
        call_behind(&stream, &job).inspect_err(|_| {
            // The memory is dropped without the lock.
            let never = process::lock(&job).take();
            drop(never);
        })
    }

    fn take(&mut self) -> Result<PinnedBuffer<T>, Error> {
        self.host.take().ok_or(Error::Abandoned)
    }
}

/// Returns a stream ordered after the copy: the copy's own stream, or, where its handle means another stream on this
/// thread, that stream after making it wait.
fn stream_behind<T: DeviceCopy>(host: &PinnedBuffer<T>) -> Result<Stream, Error> {
    let (end, stream) = host.block.uses().next().ok_or(Error::Abandoned)?;
    capture::refuse_capture(stream)?;
    end.hold_back(stream)?;
    Ok(stream.clone())
}

fn call_behind(stream: &Stream, job: &Arc<Job>) -> Result<(), Error> {
    let data = Arc::into_raw(Arc::clone(job)).cast_mut().cast();
    let entered = stream.context().enter()?;
    // SAFETY: the stream is alive by the contract under which it was made, and the job is a reference owned by the
    // call. It stays with the call even on an error, which may come from earlier work.
    Ok(unsafe { entered.launch_host(stream.raw(), do_job, data) }?)
}

/// Runs a job.
///
/// # Safety
/// `data` is a reference to a [`Job`], owned by this call.
unsafe extern "C" fn do_job(data: *mut c_void) {
    // SAFETY: the caller's contract.
    let job = unsafe { Arc::from_raw(data.cast_const().cast::<Job>()) };
    let run = process::lock(&job).take();
    let done = || in_host_function(|| run.map_or((), |run| run()));
    guarded(DONE, done);
}

impl<T: DeviceCopy> Future for CopyInFlight<T> {
    type Output = Result<PinnedBuffer<T>, Error>;

    fn poll(self: Pin<&mut Self>, task: &mut TaskContext<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        match this.poll_or_fail(task) {
            Ok(false) => Poll::Pending,
            Ok(true) => Poll::Ready(this.take().map(|mut host| {
                host.block.end_use();
                host
            })),
            Err(error) => {
                this.host = None;
                Poll::Ready(Err(error))
            }
        }
    }
}

impl<T: DeviceCopy> CopyInFlight<T> {
    /// Whether the copy is complete; if not, arranges for the task to be woken.
    fn poll_or_fail(&mut self, task: &TaskContext<'_>) -> Result<bool, Error> {
        if self.is_complete()? {
            return Ok(true);
        }
        let waker = task.waker().clone();
        let wake: Box<dyn FnOnce() + Send> = Box::new(move || waker.wake());
        if let Some(job) = &self.woken {
            let before = process::lock(job).replace(wake);
            drop(before);
        } else if let Some(host) = &self.host {
            let job: Arc<Job> = Arc::default();
            *process::lock(&job) = Some(wake);
            call_behind(&stream_behind(host)?, &job)?;
            self.woken = Some(job);
        }
        // The driver may have run the job before the waker was stored.
        self.is_complete()
    }
}

impl<T: DeviceCopy> Unpin for CopyInFlight<T> {}

debug_fields!([T: DeviceCopy] CopyInFlight<T>, self => host: self.host);
