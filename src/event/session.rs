//! The current recording, if there is one: its rings and their writers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread::Thread;

use crate::event::clock;
use crate::event::file::Start;
use crate::event::mapped::Mapped;
use crate::event::names;
use crate::event::record::{self, Event, Kind, Record, StreamLap};
use crate::event::ring::{Place, Ring, Writer};
use crate::locks::held::{Locked, Mutex};

/// The number of the current recording; 0 for none.
static NUMBER: AtomicU64 = AtomicU64::new(0);
static CURRENT: Mutex<Option<Arc<Session>>> = Mutex::new(None);
/// The process that started it. A forked child sees the session of its parent, and must not use it: a thread that does
/// not exist there may hold any of its locks.
static PROCESS: AtomicU32 = AtomicU32::new(0);

fn current() -> Locked<'static, Option<Arc<Session>>> {
    CURRENT.lock()
}

#[derive(Debug)]
pub(crate) struct Session {
    number: u64,
    /// The process that started it.
    process: u32,
    pub start: Start,
    capacity: usize,
    /// The file of its rings, if they are not in ordinary memory.
    mapped: Option<Arc<Mapped>>,
    rings: Mutex<Vec<Arc<Ring>>>,
    /// Notified when a ring is half full.
    reader: Mutex<Option<Thread>>,
}

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
    /// Starts a recording with rings of `records` records each, a power of two; `None` if another one is running, or
    /// still has [rings in use](Self::leave).
    pub(crate) fn begin(
        capacity: usize,
        start: Start,
        mapped: Option<Mapped>,
    ) -> Option<Arc<Session>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut current = current();
        if is_active(&current) {
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

    /// Stops it: event writers without a ring get none any more. Those with a ring continue writing to it until they
    /// are [cleared](EventWriter::clear).
    pub(crate) fn end(&self) {
        if self.is_current() {
            NUMBER.store(0, Ordering::Release);
        }
    }

    /// Allows another recording to start. Called once no event writer has a ring of this one, so that all rings always
    /// belong to a single recording.
    pub(crate) fn leave(&self) {
        let mut current = current();
        if current
            .as_ref()
            .is_some_and(|now| now.number == self.number)
        {
            *current = None;
        }
    }

    /// Whether a recording of this process is running, or still has rings in use.
    pub(crate) fn is_active() -> bool {
        is_active(&current())
    }

    /// Whether this process was forked after the recording started.
    pub(crate) fn is_of_parent(&self) -> bool {
        self.process != std::process::id()
    }

    pub(crate) fn is_current(&self) -> bool {
        NUMBER.load(Ordering::Acquire) == self.number
    }

    /// Sets the thread to notify when a ring created from now on is half full.
    pub(crate) fn set_reader(&self, reader: Thread) {
        *self.reader.lock() = Some(reader);
    }

    fn rings(&self) -> Locked<'_, Vec<Arc<Ring>>> {
        self.rings.lock()
    }

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

    /// Returns a ring with room for a number of records; `None` if rings are in a file, or there are no records.
    fn ring_for(&self, records: usize) -> Option<Arc<Ring>> {
        if records == 0 || self.mapped.is_some() {
            return None;
        }
        // Readers skip the slot that the writer may be writing to.
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

fn is_active(current: &Option<Arc<Session>>) -> bool {
    current.as_ref().is_some_and(|now| !now.is_of_parent())
}

/// Whether the current recording belongs to this process rather than to a parent.
fn is_own() -> bool {
    PROCESS.load(Ordering::Relaxed) == std::process::id()
}

fn own() -> Option<Arc<Session>> {
    match is_own() {
        true => current().clone().filter(|session| session.is_current()),
        false => None,
    }
}

/// Passes new names to the current recording.
pub(crate) fn names_changed() {
    if let Some(session) = own() {
        session.write_names();
    }
}

/// The maximum number of explaining events written together to their ring: a fraction of its size.
const MOST_RARE: usize = 1 << 12;

/// The event writer of code that has none of its own.
static SHARED: Mutex<EventWriter> = Mutex::new(EventWriter::none());
/// The event writer for rare events that explain others: allocators, streams, and driver memory. Frequent large blocks
/// must not overwrite these.
static RARE: Mutex<EventWriter> = Mutex::new(EventWriter::none());

pub(crate) fn clear() {
    for event_writer in [&SHARED, &RARE] {
        *event_writer.lock() = EventWriter::none();
    }
}

/// Records an event by the shared event writers.
pub(crate) fn push(event: Event) {
    push_in(event, names::context());
}

/// [`push`] in a context other than the thread's.
pub(crate) fn push_in(event: Event, context: u32) {
    let event_writer = match event.kind {
        Kind::Source
        | Kind::Map
        | Kind::Unmap
        | Kind::Limit
        | Kind::DeviceMemory
        | Kind::Regime => &RARE,
        // An explanation stays before the block that it explains.
        Kind::Stream if record::has_number(event.stream) => &RARE,
        _ => &SHARED,
    };
    // The order in the ring is that of time: the time is taken under the lock.
    let mut event_writer = event_writer.lock();
    event_writer.push_at(clock::ticks(), event, context);
}

/// [`push_in`] for an event of a stream without a number in records: its handle comes before it.
pub(crate) fn push_of(handle: u64, event: Event, context: u32) {
    push_together(Some(handle), &[event], context);
}

/// Records events of one stream contiguously, after its handle if it has no number in records.
pub(crate) fn push_together(handle: Option<u64>, events: &[Event], context: u32) {
    let mut event_writer = SHARED.lock();
    let ticks = clock::ticks();
    for event in events {
        let record = event.at_time(ticks, context);
        match handle {
            Some(handle) => event_writer.write_of(handle, record),
            None => event_writer.write(record),
        }
    }
}

/// Records the state at a given time, independent of the thread's context: explaining events, and the blocks held. All
/// blocks, and explanations that would overwrite each other, get a ring with enough room, unless rings must be in a
/// file.
pub(crate) fn push_held(ticks: u64, rare: &[Event], held: &[Event]) {
    let session = own().filter(|session| session.mapped.is_none());
    let apart = match session.is_some() && rare.len() > MOST_RARE {
        true => rare,
        false => &[],
    };
    // Records that explain others come first: all have the same time, and rings created earlier are read first.
    if apart.is_empty() {
        let mut event_writer = RARE.lock();
        rare.iter()
            .for_each(|event| event_writer.push_at(ticks, *event, 0));
    }
    let ring = session.and_then(|session| session.ring_for(apart.len() + held.len()));
    if ring.is_some() {
        let mut writer = Writer::new(ring, StreamLap::NONE);
        for event in apart.iter().chain(held) {
            writer.push(event.at_time(ticks, 0));
        }
        return;
    }
    let mut event_writer = SHARED.lock();
    held.iter()
        .for_each(|event| event_writer.push_at(ticks, *event, 0));
}

/// The place where one writer writes: its own ring in the current recording. Protected by the writer's lock.
#[derive(Debug)]
pub(crate) struct EventWriter {
    number: u64,
    /// The handle of the writer's own stream, if that has no number in records.
    handle: u64,
    writer: Writer,
}

impl Default for EventWriter {
    fn default() -> EventWriter {
        EventWriter::none()
    }
}

impl EventWriter {
    const fn none() -> EventWriter {
        EventWriter {
            number: 0,
            handle: 0,
            writer: Writer::none(),
        }
    }

    /// Restricts the writer to events of one stream, given by slot and handle. A stream without a number in records
    /// gets no ring: its events go to the shared event writer, each preceded by the handle.
    pub(crate) fn set_whose(&mut self, (stream, handle): (u32, u64), allocator: u64) {
        let whose = StreamLap::new(stream, allocator);
        let rings = [whose, self.writer.whose()].map(|whose| !whose.is_unnumbered());
        // A thread that waited for the stream may have been missed when its recording ended.
        if self.number != NUMBER.load(Ordering::Relaxed) || rings != [true; 2] {
            self.clear();
        }
        self.handle = handle;
        self.writer.set_whose(whose);
    }

    /// Releases the ring of an ended recording. The writer's stream stays.
    pub(crate) fn clear(&mut self) {
        *self = EventWriter {
            number: 0,
            handle: self.handle,
            writer: Writer::new(None, self.writer.whose()),
        };
    }

    /// Records a current event of the writer's own stream in the thread's context: kind, address and bytes.
    #[inline]
    pub(crate) fn push_own(&mut self, event: (Kind, u64, u64)) -> u32 {
        let context = names::context();
        let now = (clock::ticks(), context);
        self.write(self.writer.whose().record(event, now));
        context
    }

    /// Returns the place for [`put_own`](Self::put_own), which then is the only step left. `None` if there is no ring
    /// in the current recording, or no room left in its half.
    #[inline(always)]
    pub(crate) fn place(&self) -> Option<Place> {
        self.writer.place()
    }

    /// [`push_own`](Self::push_own) without further checks, in the thread's context.
    ///
    /// # Safety
    /// The [place](Self::place) was returned by this event writer and not used since.
    #[inline(always)]
    pub(crate) unsafe fn put_own(&mut self, place: Place, event: (Kind, u64, u64)) -> u32 {
        let context = names::context();
        let record = self.writer.whose().record(event, (clock::ticks(), context));
        // SAFETY: the place is the writer's, as the caller knows.
        unsafe { self.writer.put(place, record) };
        context
    }

    /// Records an event of a past time in a context.
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

    /// Records an event of a stream without a number in records.
    fn write_of(&mut self, handle: u64, record: Record) {
        self.write(record::handle_of(record, handle));
        self.write(record);
    }

    /// Gets a ring in the current recording, and releases that of an earlier one.
    #[cold]
    #[inline(never)]
    fn renew(&mut self) {
        let session = own();
        self.number = match &session {
            Some(session) => session.number,
            None if is_own() => 0,
            // This child of the recording process does not try again while the recording of its parent is the current
            // one.
            None => NUMBER.load(Ordering::Relaxed),
        };
        let session = session.filter(|_| !self.writer.whose().is_unnumbered());
        let ring = session.and_then(|session| session.new_ring());
        self.writer = Writer::new(ring, self.writer.whose());
    }

    /// Records an event for which there is no ring. One of a stream without a number goes to the shared event writer.
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
    fn a_reused_stream_has_no_ring_of_an_ended_recording() {
        let whose = StreamLap::new(1, 2);
        let ring = Some(Arc::new(Ring::new(8, None)));
        let mut event_writer = EventWriter {
            number: u64::MAX,
            handle: 0,
            writer: Writer::new(ring, whose),
        };
        assert!(event_writer.place().is_some());
        event_writer.set_whose((3, 0), 4);
        assert!(event_writer.place().is_none());
        let own = |event_writer: &EventWriter| {
            let whose = event_writer.writer.whose();
            record::parts(&whose.record((Kind::Free, 512, 1), (0, 5)))
        };
        assert_eq!(own(&event_writer), (2, 512, 1, 3, 5, 4));
        // This stays when the writer's ring is released.
        event_writer.clear();
        assert_eq!(own(&event_writer), (2, 512, 1, 3, 5, 4));
    }
}
