//! A thread that watches the device's free memory.

use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::driver::process;
use crate::foreign::guarded;
use crate::locks::held::{Locked, Mutex};
use crate::locks::thread_id::ThreadId;

use crate::clock::{Clock, Wakeup};

/// Looks at the device's free bytes at an interval, and pauses whoever asks while they are below a
/// threshold. Stops when it is dropped.
///
/// It works without a device: where the free bytes cannot be had, nothing is paused.
///
/// ```
/// use cualloc::resource::Watchdog;
/// use std::time::Duration;
/// let watchdog = Watchdog::start(100, Duration::from_secs(1), || Some(99))?;
/// if watchdog.wait_for_first_check(Duration::from_secs(60)) {
///     assert!(watchdog.is_paused());
/// }
/// watchdog.stop();
/// watchdog.wait_if_paused(); // stopped: nobody waits
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Watchdog {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    /// Fewer free bytes than this pause.
    threshold: u64,
    /// Time between two looks.
    interval: Duration,
    clock: Clock,
    state: Mutex<State>,
    /// The thread, once it runs.
    id: OnceLock<ThreadId>,
    /// Wakes the thread.
    thread: Arc<Wakeup>,
    /// Wakes those who wait for the thread.
    waiters: Arc<Wakeup>,
}

#[derive(Debug, Default)]
struct State {
    paused: bool,
    checks: u64,
    stopped: bool,
}

impl Shared {
    fn state(&self) -> Locked<'_, State> {
        process::lock(&self.state)
    }

    fn run(&self, probe: impl Fn() -> Option<u64>) {
        self.id.get_or_init(ThreadId::current);
        loop {
            let seen = self.thread.count();
            if self.state().stopped {
                return;
            }
            let free = guarded("a watchdog's probe", &probe).flatten();
            {
                let mut state = self.state();
                state.paused = !state.stopped && free.is_some_and(|f| f < self.threshold);
                state.checks += 1;
            }
            self.waiters.wake();
            let next = self.clock.now().saturating_add(self.interval);
            self.clock.wait(next, &self.thread, seen);
        }
    }

    /// Waits for an answer about the state; none in time is no.
    fn wait(&self, end: Duration, answer: impl Fn(&State) -> Option<bool>) -> bool {
        loop {
            let seen = self.waiters.count();
            if let Some(answer) = answer(&self.state()) {
                return answer;
            }
            if self.clock.now() >= end {
                return false;
            }
            // Woken by the next look, or by the stop.
            self.clock.wait(end, &self.waiters, seen);
        }
    }
}

impl Watchdog {
    /// Starts the thread, which pauses while there are fewer than `threshold` free bytes and looks once in
    /// an `interval`. `probe` says how many bytes are free, or none if that is not known; the
    /// device's are those of [`Context::mem_info`](crate::driver::Context::mem_info).
    ///
    /// # Errors
    /// The system's, if it gives no thread.
    pub fn start(
        threshold: u64,
        interval: Duration,
        probe: impl Fn() -> Option<u64> + Send + 'static,
    ) -> std::io::Result<Watchdog> {
        Watchdog::start_with_clock(&Clock::default(), threshold, interval, probe)
    }

    /// [`start`](Self::start) by another clock than the system's.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    #[doc(hidden)]
    pub fn start_with_clock(
        clock: &Clock,
        threshold: u64,
        interval: Duration,
        probe: impl Fn() -> Option<u64> + Send + 'static,
    ) -> std::io::Result<Watchdog> {
        let shared = Arc::new(Shared {
            threshold,
            interval,
            clock: clock.clone(),
            state: Mutex::default(),
            id: OnceLock::new(),
            thread: Arc::default(),
            waiters: Arc::default(),
        });
        let inside = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("cualloc-watchdog".into())
            .spawn(move || inside.run(probe))?;
        Ok(Watchdog {
            shared,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Whether the last look found too little.
    pub fn is_paused(&self) -> bool {
        self.shared.state().paused
    }

    /// Looks so far.
    pub fn checks(&self) -> u64 {
        self.shared.state().checks
    }

    /// Blocks while it is paused and not stopped.
    pub fn wait_if_paused(&self) {
        let through = |state: &State| (!state.paused || state.stopped).then_some(true);
        self.shared.wait(Duration::MAX, through);
    }

    /// Blocks until the first look, for at most `timeout`; whether there was one.
    pub fn wait_for_first_check(&self, timeout: Duration) -> bool {
        if process::is_forked_child() {
            return false;
        }
        let end = self.shared.clock.now().saturating_add(timeout);
        let looked = |state: &State| match state.checks {
            0 => state.stopped.then_some(false),
            _ => Some(true),
        };
        self.shared.wait(end, looked)
    }

    /// Stops the thread and lets everybody go who waits. Again does nothing.
    pub fn stop(&self) {
        {
            let mut state = self.shared.state();
            state.stopped = true;
            state.paused = false;
        }
        self.shared.thread.wake();
        self.shared.waiters.wake();
        let thread = process::lock(&self.thread).take();
        // The probe may stop the thread, which cannot wait for itself.
        if let Some(thread) = thread
            && self.shared.id.get() != Some(&ThreadId::current())
        {
            // Its own panics are caught.
            let _ = thread.join();
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop();
    }
}
