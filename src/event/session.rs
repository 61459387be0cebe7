//! The recording that runs, if one does: its rings, and who writes to them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;

use crate::event::clock;
use crate::event::file::Start;
use crate::event::mapped::Mapped;
use crate::event::names;
use crate::event::record::{Event, Record};
use crate::event::ring::Ring;

/// The number of the recording that runs; 0 for none.
static NUMBER: AtomicU64 = AtomicU64::new(0);
static CURRENT: Mutex<Option<Arc<Session>>> = Mutex::new(None);

fn current() -> MutexGuard<'static, Option<Arc<Session>>> {
    CURRENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One recording.
#[derive(Debug)]
pub(crate) struct Session {
    number: u64,
    pub start: Start,
    capacity: usize,
    /// Where its rings lie, if not in memory of their own.
    mapped: Option<Arc<Mapped>>,
    rings: Mutex<Vec<Arc<Ring>>>,
    /// Told when a ring is half full.
    reader: Mutex<Option<Thread>>,
}

/// Records that were read from a ring.
#[derive(Debug)]
pub(crate) struct Batch {
    pub ring: u32,
    pub lost: u64,
    pub records: Vec<Record>,
}

/// How far a reader has read each ring.
#[derive(Debug, Default)]
pub(crate) struct Progress(Vec<u64>);

impl Session {
    /// Begins a recording with rings of so many records, a power of two; `None` if one runs.
    pub(crate) fn begin(
        capacity: usize,
        start: Start,
        mapped: Option<Mapped>,
    ) -> Option<Arc<Session>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut current = current();
        if current.is_some() {
            return None;
        }
        let session = Arc::new(Session {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            start,
            capacity,
            mapped: mapped.map(Arc::new),
            rings: Mutex::default(),
            reader: Mutex::default(),
        });
        *current = Some(Arc::clone(&session));
        NUMBER.store(session.number, Ordering::Release);
        Some(session)
    }

    /// Ends it: taps write nowhere from here on, or to rings that nobody reads.
    pub(crate) fn end(&self) {
        let mut current = current();
        if current
            .as_ref()
            .is_some_and(|now| now.number == self.number)
        {
            NUMBER.store(0, Ordering::Release);
            *current = None;
        }
    }

    /// Whether a recording runs.
    pub(crate) fn is_running() -> bool {
        NUMBER.load(Ordering::Acquire) != 0
    }

    /// Whether it runs still.
    pub(crate) fn is_current(&self) -> bool {
        NUMBER.load(Ordering::Acquire) == self.number
    }

    /// Has a thread told when a ring that is made from here on is half full.
    pub(crate) fn set_reader(&self, reader: Thread) {
        *self.reader.lock().unwrap_or_else(PoisonError::into_inner) = Some(reader);
    }

    fn rings(&self) -> MutexGuard<'_, Vec<Arc<Ring>>> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn new_ring(&self) -> Option<Arc<Ring>> {
        let ring = match &self.mapped {
            Some(file) => Ring::in_file(file)?,
            None => {
                let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
                Ring::new(self.capacity, reader.clone())
            }
        };
        let ring = Arc::new(ring);
        self.rings().push(Arc::clone(&ring));
        Some(ring)
    }

    /// Writes new names to the file of rings, if there is one.
    pub(crate) fn write_names(&self) {
        if let Some(mapped) = &self.mapped {
            mapped.write_names();
        }
    }

    /// What came since the reader read last.
    pub(crate) fn read(&self, progress: &mut Progress) -> Vec<Batch> {
        let rings = self.rings().clone();
        progress.0.resize(rings.len(), 0);
        let batches = rings.iter().zip(&mut progress.0).enumerate();
        let batches = batches.map(|(ring, (from, next))| {
            let found = from.read(*next);
            *next = found.next;
            Batch {
                ring: ring as u32,
                lost: found.lost,
                records: found.records,
            }
        });
        batches
            .filter(|batch| batch.lost > 0 || !batch.records.is_empty())
            .collect()
    }
}

/// Tells the recording that runs of new names.
pub(crate) fn names_changed() {
    let session = current().clone();
    if let Some(session) = session {
        session.write_names();
    }
}

/// The tap of those who have none of their own.
static SHARED: Mutex<Tap> = Mutex::new(Tap {
    number: 0,
    ring: None,
});

/// Records an event of somebody who has no tap.
pub(crate) fn push(event: Event) {
    push_at(clock::ticks(), event);
}

/// [`push`] of a time that has been.
pub(crate) fn push_at(ticks: u64, event: Event) {
    let mut tap = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    tap.push_at(ticks, event);
}

/// Where one writer writes: a ring of its own in the recording that runs. It lies under the writer's lock.
#[derive(Debug, Default)]
pub(crate) struct Tap {
    number: u64,
    ring: Option<Arc<Ring>>,
}

impl Tap {
    /// Records an event now.
    #[inline]
    pub(crate) fn push(&mut self, event: Event) {
        self.push_at(clock::ticks(), event);
    }

    /// Records an event of a time that has been.
    #[inline]
    pub(crate) fn push_at(&mut self, ticks: u64, event: Event) {
        if self.number != NUMBER.load(Ordering::Relaxed) {
            self.renew();
        }
        if let Some(ring) = &self.ring {
            ring.push(event.at_time(ticks, names::context()));
        }
    }

    /// Gets a ring in the recording that runs, and lets go of that of an earlier one.
    #[cold]
    #[inline(never)]
    fn renew(&mut self) {
        let session = current().clone();
        self.number = session.as_ref().map_or(0, |session| session.number);
        self.ring = session.and_then(|session| session.new_ring());
    }
}
