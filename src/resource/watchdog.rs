//! A thread that monitors the device's free memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::clock::{Clock, Wakeup};
use crate::driver::process;
use crate::foreign::guarded;
use crate::locks::held::Mutex;

/// Probes the device's free bytes at an interval, and blocks callers of [`wait_if_paused`](Self::wait_if_paused) while
/// they are below a threshold. Stops when it is dropped.
///
/// ```
/// use cualloc::resource::Watchdog;
/// use std::time::Duration;
/// let watchdog = Watchdog::start(100, Duration::from_secs(1), || Some(99))?;
/// if watchdog.wait_for_first_check(Duration::from_secs(60)) {
///     assert!(watchdog.is_paused());
/// }
/// watchdog.stop();
/// watchdog.wait_if_paused(); // stopped: no wait
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Watchdog {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Shared {
    clock: Clock,
    paused: AtomicBool,
    checked: AtomicBool,
    stopped: AtomicBool,
    /// Wakes the thread, and the callers that wait for it.
    wakeup: Arc<Wakeup>,
}

impl Shared {
    fn run(&self, threshold: u64, interval: Duration, probe: impl Fn() -> Option<u64>) {
        while !self.stopped.load(Ordering::SeqCst) {
            let free = guarded("a watchdog's probe", &probe).flatten();
            let short = free.is_some_and(|free| free < threshold);
            self.paused.store(short, Ordering::SeqCst);
            self.checked.store(true, Ordering::SeqCst);
            self.wakeup.wake();
            let next = self.clock.now().saturating_add(interval);
            self.wait(next, || false);
        }
    }

    /// Waits for a condition, a stop, or the end of the time; whether the condition holds.
    fn wait(&self, end: Duration, done: impl Fn() -> bool) -> bool {
        loop {
            let seen = self.wakeup.count();
            if done() {
                return true;
            }
            let over = self.stopped.load(Ordering::SeqCst) || self.clock.now() >= end;
            if over || process::is_forked_child() {
                return false;
            }
            self.clock.wait(end, &self.wakeup, seen);
        }
    }
}

impl Watchdog {
    /// Starts the thread. `probe` returns the free bytes, as from
    /// [`Context::mem_info`](crate::driver::Context::mem_info); callers are not blocked while they are unknown.
    ///
    /// # Errors
    /// Those of the system when it starts a thread.
    pub fn start(
        threshold: u64,
        interval: Duration,
        probe: impl Fn() -> Option<u64> + Send + 'static,
    ) -> std::io::Result<Watchdog> {
        Watchdog::start_with_clock(&Clock::default(), threshold, interval, probe)
    }

    #[doc(hidden)]
    pub fn start_with_clock(
        clock: &Clock,
        threshold: u64,
        interval: Duration,
        probe: impl Fn() -> Option<u64> + Send + 'static,
    ) -> std::io::Result<Watchdog> {
        let shared = Arc::new(Shared {
            clock: clock.clone(),
            ..Shared::default()
        });
        let inside = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("cualloc-watchdog".into())
            .spawn(move || inside.run(threshold, interval, probe))?;
        Ok(Watchdog {
            shared,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Whether the last probe found too few free bytes, and the watchdog was not stopped.
    pub fn is_paused(&self) -> bool {
        self.shared.paused.load(Ordering::SeqCst) && !self.shared.stopped.load(Ordering::SeqCst)
    }

    /// Blocks while it is paused and not stopped.
    pub fn wait_if_paused(&self) {
        self.shared.wait(Duration::MAX, || !self.is_paused());
    }

    /// Blocks until the first probe, for at most `timeout`; whether there was one.
    pub fn wait_for_first_check(&self, timeout: Duration) -> bool {
        let end = self.shared.clock.now().saturating_add(timeout);
        let checked = || self.shared.checked.load(Ordering::SeqCst);
        self.shared.wait(end, checked)
    }

    /// Stops the thread and releases all waiters.
    pub fn stop(&self) {
        self.shared.stopped.store(true, Ordering::SeqCst);
        self.shared.wakeup.wake();
        let thread = process::lock(&self.thread).take();
        // The probe itself may call this, on a thread that cannot join itself.
        if let Some(thread) = thread
            && thread.thread().id() != thread::current().id()
        {
            // Panics of the probe are caught.
            let _ = thread.join();
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop();
    }
}
