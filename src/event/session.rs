//! The recording that runs, if one does: its rings, and who writes to them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread::Thread;

use crate::event::clock;
use crate::event::file::Start;
use crate::event::mapped::Mapped;
use crate::event::names;
use crate::event::record::{self, Event, Kind, Record, Whose};
use crate::event::ring::{Place, Ring, Writer};
use crate::locks::held::{Locked, Mutex};

/// The number of the recording that runs; 0 for none.
static NUMBER: AtomicU64 = AtomicU64::new(0);
static CURRENT: Mutex<Option<Arc<Session>>> = Mutex::new(None);
/// The process that began it. A forked child knows the session of its parent, and has nothing to do with it: a thread
/// that is not there may hold any of its locks.
static PROCESS: AtomicU32 = AtomicU32::new(0);

fn current() -> Locked<'static, Option<Arc<Session>>> {
    CURRENT.lock()
}

/// One recording.
#[derive(Debug)]
pub(crate) struct Session {
    number: u64,
    /// The process that began it.
    process: u32,
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
    /// Begins a recording with rings of so many records, a power of two; `None` if one runs, or has not
    /// [gone](Self::leave).
    pub(crate) fn begin(
        capacity: usize,
        start: Start,
        mapped: Option<Mapped>,
    ) -> Option<Arc<Session>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut current = current();
        if is_there(&current) {
            return None;
        }
        let process = std::process::id();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let session = Arc::new(Session {
            number,
            process,
            start,
            capacity,
            mapped: mapped.map(Arc::new),
            rings: Mutex::default(),
            reader: Mutex::default(),
        });
        *current = Some(Arc::clone(&session));
        PROCESS.store(process, Ordering::Relaxed);
        NUMBER.store(session.number, Ordering::Release);
        Some(session)
    }

    /// Ends it: taps that have no ring of it get none from here on. Those that have one write there until they are
    /// [cleared](Tap::clear).
    pub(crate) fn end(&self) {
        if self.is_current() {
            NUMBER.store(0, Ordering::Release);
        }
    }

    /// It has gone when no tap has a ring of it: another one may begin. A tap that has a ring has it of the recording that
    /// runs, since there never are rings of two.
    pub(crate) fn leave(&self) {
        let mut current = current();
        if current
            .as_ref()
            .is_some_and(|now| now.number == self.number)
        {
            *current = None;
        }
    }

    /// Whether a recording of this process runs, or has not gone.
    pub(crate) fn is_there() -> bool {
        is_there(&current())
    }

    /// Whether this process was forked after it began.
    pub(crate) fn is_of_parent(&self) -> bool {
        self.process != std::process::id()
    }

    /// Whether it runs still.
    pub(crate) fn is_current(&self) -> bool {
        NUMBER.load(Ordering::Acquire) == self.number
    }

    /// Has a thread told when a ring that is made from here on is half full.
    pub(crate) fn set_reader(&self, reader: Thread) {
        *self.reader.lock() = Some(reader);
    }

    fn rings(&self) -> Locked<'_, Vec<Arc<Ring>>> {
        self.rings.lock()
    }

    /// The rings, as long as somebody else has them.
    #[cfg(test)]
    pub(crate) fn weak_rings(&self) -> Vec<std::sync::Weak<Ring>> {
        self.rings().iter().map(Arc::downgrade).collect()
    }

    fn new_ring(&self) -> Option<Arc<Ring>> {
        let ring = match &self.mapped {
            Some(file) => Ring::in_file(file)?,
            None => {
                let reader = self.reader.lock();
                Ring::new(self.capacity, reader.clone())
            }
        };
        let ring = Arc::new(ring);
        self.rings().push(Arc::clone(&ring));
        Some(ring)
    }

    /// A ring that so many records fit into; `None` where rings lie in a file, or there are no records.
    fn ring_for(&self, records: usize) -> Option<Arc<Ring>> {
        if records == 0 || self.mapped.is_some() {
            return None;
        }
        // Readers leave out the slot that may be written just now.
        let ring = Arc::new(Ring::new((records + 1).next_power_of_two(), None));
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
        if self.is_of_parent() {
            return Vec::new();
        }
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

fn is_there(current: &Option<Arc<Session>>) -> bool {
    current.as_ref().is_some_and(|now| !now.is_of_parent())
}

/// Whether the recording that runs is not one of a parent.
fn is_own() -> bool {
    PROCESS.load(Ordering::Relaxed) == std::process::id()
}

/// The recording of this process that runs.
fn own() -> Option<Arc<Session>> {
    match is_own() {
        true => current().clone().filter(|session| session.is_current()),
        false => None,
    }
}

/// Tells the recording that runs of new names.
pub(crate) fn names_changed() {
    if let Some(session) = own() {
        session.write_names();
    }
}

/// Most events that explain others and are told of at once in the ring of those: a part of it.
const MOST_RARE: usize = 1 << 12;

/// The tap of those who have none of their own.
static SHARED: Mutex<Tap> = Mutex::new(Tap::none());
/// The tap for what explains other events, and is rare: allocators, streams, and memory of the driver. Large blocks
/// that come and go must not push it out.
static RARE: Mutex<Tap> = Mutex::new(Tap::none());

/// Lets go of the rings of those who have no tap of their own.
pub(crate) fn clear() {
    for tap in [&SHARED, &RARE] {
        *tap.lock() = Tap::none();
    }
}

/// Records an event of somebody who has no tap.
pub(crate) fn push(event: Event) {
    push_in(event, names::context());
}

/// [`push`] in a context that is not the thread's.
pub(crate) fn push_in(event: Event, context: u32) {
    let tap = match event.kind {
        Kind::Source
        | Kind::Map
        | Kind::Unmap
        | Kind::Limit
        | Kind::DeviceMemory
        | Kind::Regime => &RARE,
        // What is told of before each of its blocks stays in their order.
        Kind::Stream if record::has_number(event.stream) => &RARE,
        _ => &SHARED,
    };
    // The ring's order is that of time: what waits for the lock is later.
    let mut tap = tap.lock();
    tap.push_at(clock::ticks(), event, context);
}

/// [`push_in`] of an event of a stream that has no number in records: its handle goes before.
pub(crate) fn push_of(handle: u64, event: Event, context: u32) {
    push_together(Some(handle), &[event], context);
}

/// Records events of one stream with nothing between them, behind its handle if it has no number in records.
pub(crate) fn push_together(handle: Option<u64>, events: &[Event], context: u32) {
    let mut tap = SHARED.lock();
    let ticks = clock::ticks();
    for event in events {
        let record = event.at_time(ticks, context);
        match handle {
            Some(handle) => tap.write_of(handle, record),
            None => tap.write(record),
        }
    }
}

/// Records what was there at a time, which nobody's context has to do with: what explains other events, and the blocks
/// held. What would push itself out, and all blocks, have a ring with room for them, but where rings have to lie in a file.
pub(crate) fn push_held(ticks: u64, rare: &[Event], held: &[Event]) {
    let session = own().filter(|session| session.mapped.is_none());
    let apart = match session.is_some() && rare.len() > MOST_RARE {
        true => rare,
        false => &[],
    };
    // What explains others comes before them: all are of one time, and rings that were made earlier come first.
    if apart.is_empty() {
        let mut tap = RARE.lock();
        rare.iter().for_each(|event| tap.push_at(ticks, *event, 0));
    }
    let ring = session.and_then(|session| session.ring_for(apart.len() + held.len()));
    if ring.is_some() {
        let mut writer = Writer::new(ring, Whose::NOBODY);
        for event in apart.iter().chain(held) {
            writer.push(event.at_time(ticks, 0));
        }
        return;
    }
    let mut tap = SHARED.lock();
    held.iter().for_each(|event| tap.push_at(ticks, *event, 0));
}

/// Where one writer writes: a ring of its own in the recording that runs. It lies under the writer's lock.
#[derive(Debug)]
pub(crate) struct Tap {
    number: u64,
    /// The handle of the writer's own stream, for one that has no number in records.
    handle: u64,
    writer: Writer,
}

impl Default for Tap {
    fn default() -> Tap {
        Tap::none()
    }
}

impl Tap {
    const fn none() -> Tap {
        Tap {
            number: 0,
            handle: 0,
            writer: Writer::none(),
        }
    }

    /// The writer has events of this stream alone from here on, by its slot and its handle. One that has no number in
    /// records has no ring either: its events go where those are that have no tap, as each has the handle before it.
    pub(crate) fn set_whose(&mut self, (stream, handle): (u32, u64), allocator: u64) {
        let whose = Whose::new(stream, allocator);
        let rings = [whose, self.writer.whose()].map(|whose| !whose.is_unnumbered());
        // Who waited for a stream may have been where nobody found it when its recording ended.
        if self.number != NUMBER.load(Ordering::Relaxed) || rings != [true; 2] {
            self.clear();
        }
        self.handle = handle;
        self.writer.set_whose(whose);
    }

    /// Lets go of the ring of a recording that is over. Whose the writer is stays.
    pub(crate) fn clear(&mut self) {
        *self = Tap {
            number: 0,
            handle: self.handle,
            writer: Writer::new(None, self.writer.whose()),
        };
    }

    /// Records an event of the writer's own stream now: its kind, address and bytes. The thread's context.
    #[inline]
    pub(crate) fn push_own(&mut self, event: (Kind, u64, u64)) -> u32 {
        let context = names::context();
        let now = (clock::ticks(), context);
        self.write(self.writer.whose().record(event, now));
        context
    }

    /// The place for [`put_own`](Self::put_own), which is all that there is to do then. `None` if there is no ring in the
    /// recording that runs, or no room left in its half.
    #[inline(always)]
    pub(crate) fn place(&self) -> Option<Place> {
        self.writer.place()
    }

    /// [`push_own`](Self::push_own) without a look at anything else. The thread's context.
    ///
    /// # Safety
    /// The [place](Self::place) is the tap's, which nobody has been at since.
    #[inline(always)]
    pub(crate) unsafe fn put_own(&mut self, place: Place, event: (Kind, u64, u64)) -> u32 {
        let context = names::context();
        let record = self.writer.whose().record(event, (clock::ticks(), context));
        // SAFETY: the place is the writer's, as the caller knows.
        unsafe { self.writer.put(place, record) };
        context
    }

    /// Records an event of a time that has been, in a context.
    #[inline]
    pub(crate) fn push_at(&mut self, ticks: u64, event: Event, context: u32) {
        self.write(event.at_time(ticks, context));
    }

    fn write(&mut self, record: Record) {
        if self.number != NUMBER.load(Ordering::Relaxed) {
            self.renew();
        }
        if !self.writer.push(record) {
            self.miss(record);
        }
    }

    /// Records an event of a stream that has no number in records.
    fn write_of(&mut self, handle: u64, record: Record) {
        self.write(record::handle_of(record, handle));
        self.write(record);
    }

    /// Gets a ring in the recording that runs, and lets go of that of an earlier one.
    #[cold]
    #[inline(never)]
    fn renew(&mut self) {
        let session = own();
        self.number = match &session {
            Some(session) => session.number,
            None if is_own() => 0,
            // Asked no more while the parent's number stands.
            None => NUMBER.load(Ordering::Relaxed),
        };
        let session = session.filter(|_| !self.writer.whose().is_unnumbered());
        let ring = session.and_then(|session| session.new_ring());
        self.writer = Writer::new(ring, self.writer.whose());
    }

    /// Counts an event that there is no ring for. One of a stream without a number goes to those who have no tap.
    #[cold]
    #[inline(never)]
    fn miss(&self, record: Record) {
        if self.writer.whose().is_unnumbered() {
            return SHARED.lock().write_of(self.handle, record);
        }
        if let Some(session) = own().filter(|session| session.number == self.number)
            && let Some(mapped) = &session.mapped
        {
            mapped.miss();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::record;

    #[test]
    fn who_gets_a_stream_has_no_ring_of_a_recording_that_is_over() {
        let whose = Whose::new(1, 2);
        let ring = Some(Arc::new(Ring::new(8, None)));
        let mut tap = Tap {
            number: u64::MAX,
            handle: 0,
            writer: Writer::new(ring, whose),
        };
        assert!(tap.place().is_some());
        tap.set_whose((3, 0), 4);
        assert!(tap.place().is_none());
        let own = |tap: &Tap| {
            let whose = tap.writer.whose();
            record::parts(&whose.record((Kind::Free, 512, 1), (0, 5)))
        };
        assert_eq!(own(&tap), (2, 512, 1, 3, 5, 4));
        // That stays when its ring goes.
        tap.clear();
        assert_eq!(own(&tap), (2, 512, 1, 3, 5, 4));
    }
}
