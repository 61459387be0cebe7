//! A ring of records with one writer and any number of readers, which never wait for each other.

use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
use std::thread::Thread;

use crate::event::mapped::Mapped;
use crate::event::record::{self, Record, StreamLap, with_lap};

/// The words before the records of a ring, alone on their cache line. The first is the *head*: the number of the first
/// record of the half being written.
const HEAD_WORDS: usize = 8;
const WORDS: usize = size_of::<Slot>() / 8;

/// A ring with a fixed number of records, which keeps the newest.
///
/// All words are atomics, so a reader that is overtaken reads at worst invalid records, and discards those that the
/// writer may have overwritten. The last word of each record contains its lap, and is written last: so the head need
/// not be written with each record.
#[derive(Debug)]
pub(crate) struct Ring {
    /// In `_own` or in `_file`: the head's cache line, then the records.
    words: *const AtomicU64,
    /// The number of records, a power of two.
    capacity: u64,
    /// Notified whenever half of the ring was filled.
    reader: Option<Thread>,
    _own: Box<[AtomicU64]>,
    _file: Option<Arc<Mapped>>,
}

// SAFETY: the words are atomics, in memory that the ring keeps.
unsafe impl Send for Ring {}
// SAFETY: as above.
unsafe impl Sync for Ring {}

#[derive(Debug, Default)]
pub(crate) struct Found {
    pub records: Vec<Record>,
    /// Number of records that were overwritten before they were read.
    pub lost: u64,
    /// The number of the next record.
    pub next: u64,
}

#[derive(Debug)]
#[repr(C)]
struct Slot {
    /// The low and the high half of the time, as processors return it: combining them would cost more than storing
    /// both.
    ticks: [AtomicU32; 2],
    place: AtomicU64,
    bytes: AtomicU64,
    whose: AtomicU64,
}

impl Slot {
    #[inline(always)]
    fn write(&self, [ticks, place, bytes, whose]: Record) {
        // A reader that sees any of the words below also sees the whole preceding record.
        fence(Ordering::Release);
        self.ticks[0].store(ticks as u32, Ordering::Relaxed);
        self.ticks[1].store((ticks >> 32) as u32, Ordering::Relaxed);
        self.place.store(place, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
        // A reader that sees this word sees the whole record.
        self.whose.store(whose, Ordering::Release);
    }

    fn read(&self) -> Record {
        let ticks = self.ticks.each_ref();
        let [low, high] = ticks.map(|half| u64::from(half.load(Ordering::Relaxed)));
        let words = [&self.place, &self.bytes, &self.whose];
        let [place, bytes, whose] = words.map(|word| word.load(Ordering::Relaxed));
        with_lap([high << 32 | low, place, bytes, whose], 0)
    }

    /// Whether its record belongs to a lap, or to a later one.
    fn is_of(&self, lap: u16) -> bool {
        record::is_of(self.whose.load(Ordering::Acquire), lap)
    }
}

impl Ring {
    /// Creates a ring with `records` records, a power of two greater than one.
    pub(crate) fn new(capacity: usize, reader: Option<Thread>) -> Ring {
        debug_assert!(capacity.is_power_of_two() && capacity > 1);
        let words = HEAD_WORDS + capacity * WORDS;
        let words: Box<[AtomicU64]> = (0..words).map(|_| AtomicU64::new(0)).collect();
        Ring {
            words: words.as_ptr(),
            capacity: capacity as u64,
            reader,
            _own: words,
            _file: None,
        }
    }

    /// Creates a ring in a file; `None` if the file has no room for another one.
    pub(crate) fn in_file(file: &Arc<Mapped>) -> Option<Ring> {
        let (words, capacity) = file.next_ring()?;
        Some(Ring {
            words,
            capacity: capacity as u64,
            reader: None,
            _own: Box::default(),
            _file: Some(Arc::clone(file)),
        })
    }

    fn half(&self) -> u64 {
        self.capacity / 2
    }

    fn head(&self) -> &AtomicU64 {
        // SAFETY: the head is the first word of the memory.
        unsafe { &*self.words }
    }

    /// Returns the places from that of a record, given by its number, to the end.
    fn place(&self, number: u64) -> *const Slot {
        let at = HEAD_WORDS + (number % self.capacity) as usize * WORDS;
        // SAFETY: the cache line of the head is followed by that many places.
        unsafe { self.words.add(at).cast() }
    }

    fn slot(&self, number: u64) -> &Slot {
        // SAFETY: a place is made of atomics, all of which may be zero.
        unsafe { &*self.place(number) }
    }

    fn lap(&self, number: u64) -> u16 {
        record::lap(number, self.capacity)
    }

    /// Returns a lower bound of the number of records written. A writer may be adding more; if it has overtaken the
    /// reader by a whole ring, the result is still a lower bound.
    fn written(&self, known: u64) -> u64 {
        let first = self.head().load(Ordering::Acquire).max(known);
        let end = first.saturating_add(self.capacity);
        (first..end)
            .find(|number| !self.slot(*number).is_of(self.lap(*number)))
            .unwrap_or(end)
    }

    /// Returns the records written from a number on.
    pub(crate) fn read(&self, from: u64) -> Found {
        // The slot of the oldest record may be the one that is being written.
        let readable = self.capacity - 1;
        let next = self.written(from);
        let mut first = from.max(next.saturating_sub(readable));
        let mut records: Vec<Record> = (first..next)
            .map(|number| self.slot(number).read())
            .collect();
        fence(Ordering::Acquire);
        let now = self.written(next);
        let whole = now.saturating_sub(readable).clamp(first, next);
        records.drain(..(whole - first) as usize);
        first = whole;
        Found {
            records,
            lost: first - from,
            next,
        }
    }
}

/// The place for a writer's next record.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place(*const Slot);

/// The only writer of a ring, if it has one. Usually it need not access the ring: it knows what is left of the current
/// half.
#[derive(Debug)]
pub(crate) struct Writer {
    /// The place of the next record. An atomic although only the writer accesses it: compilers then update it in memory
    /// and do not keep earlier values.
    at: AtomicPtr<Slot>,
    /// The end of the half being written.
    end: *const Slot,
    /// Set if all events are of one stream, and in the lap of the half.
    whose: StreamLap,
    ring: Option<Arc<Ring>>,
}

// SAFETY: the words are atomics, in memory that the ring keeps.
unsafe impl Send for Writer {}
// SAFETY: as above.
unsafe impl Sync for Writer {}

impl Writer {
    pub(crate) const fn none() -> Writer {
        Writer {
            at: AtomicPtr::new(std::ptr::null_mut()),
            end: std::ptr::null(),
            whose: StreamLap::NONE,
            ring: None,
        }
    }

    /// Creates the writer of an unused ring, if there is one, for events of one stream.
    pub(crate) fn new(ring: Option<Arc<Ring>>, whose: StreamLap) -> Writer {
        let mut writer = Writer {
            whose,
            ring,
            ..Writer::none()
        };
        writer.begin(0);
        writer
    }

    #[inline(always)]
    pub(crate) fn whose(&self) -> StreamLap {
        self.whose
    }

    pub(crate) fn set_whose(&mut self, whose: StreamLap) {
        self.whose = whose.in_lap(self.whose.lap());
    }

    /// Returns the place for [`put`](Self::put). `None` if there is no ring, or the half is full.
    #[inline(always)]
    pub(crate) fn place(&self) -> Option<Place> {
        let at = self.at.load(Ordering::Relaxed).cast_const();
        (at != self.end).then_some(Place(at))
    }

    /// Writes the next record, which belongs to [its own stream](Self::whose).
    ///
    /// # Safety
    /// The [place](Self::place) was returned by this writer and not used since.
    #[inline(always)]
    pub(crate) unsafe fn put(&mut self, place: Place, record: Record) {
        debug_assert_eq!(record::lap_of(record[3]), self.whose.lap());
        // SAFETY: the caller guarantees that the place is one of the writer's ring.
        unsafe { &*place.0 }.write(record);
        let next = self.at.load(Ordering::Relaxed).wrapping_add(1);
        self.at.store(next, Ordering::Relaxed);
    }

    /// Writes the next record of any stream. Returns false if there is no ring.
    pub(crate) fn push(&mut self, record: Record) -> bool {
        let Some(place) = self.place().or_else(|| self.turn()) else {
            return false;
        };
        // SAFETY: the writer has just returned this place.
        unsafe { self.put(place, with_lap(record, self.whose.lap())) };
        true
    }

    /// Continues with the next half, and notifies the reader. `None` if there is no ring.
    fn turn(&mut self) -> Option<Place> {
        let ring = self.ring.as_ref()?;
        // The head of a ring in a file may have been changed by another process: a half must begin at a multiple of its
        // size.
        let next = ring
            .head()
            .load(Ordering::Relaxed)
            .wrapping_add(ring.half());
        let next = next & !(ring.half() - 1);
        ring.head().store(next, Ordering::Release);
        if let Some(reader) = &ring.reader {
            reader.unpark();
        }
        self.begin(next);
        self.place()
    }

    /// Begins a half, by the number of its first record.
    fn begin(&mut self, number: u64) {
        let Some(ring) = &self.ring else { return };
        let at = ring.place(number);
        self.at = AtomicPtr::new(at.cast_mut());
        self.end = at.wrapping_add(ring.half() as usize);
        self.whose = self.whose.in_lap(ring.lap(number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    fn pair(capacity: usize) -> (Arc<Ring>, Writer) {
        let ring = Arc::new(Ring::new(capacity, None));
        let writer = Writer::new(Some(Arc::clone(&ring)), StreamLap::NONE);
        (ring, writer)
    }

    fn write(writer: &mut Writer, numbers: std::ops::Range<u64>) {
        for number in numbers {
            assert!(writer.push([number; 4]));
        }
    }

    /// Returns the first word of each record, how many records were lost before them, and the number of the next one.
    fn found(found: Found) -> (Vec<u64>, u64, u64) {
        let records = found.records.iter();
        let times = records.map(|record| {
            assert_eq!(*record, [record[0]; 4]);
            record[0]
        });
        (times.collect(), found.lost, found.next)
    }

    #[test]
    fn records_count_themselves_and_the_head_halves() {
        let (ring, mut writer) = pair(8);
        let mut pushed = Vec::new();
        for number in 0..20 {
            if let Some(place) = writer.place() {
                let lap = u64::from(writer.whose().lap()) << 48;
                // SAFETY: the writer has just returned this place.
                unsafe { writer.put(place, [number, number, number, lap | number]) };
            } else {
                pushed.push(number);
                write(&mut writer, number..number + 1);
            }
            assert_eq!(found(ring.read(number)), (vec![number], 0, number + 1));
            assert_eq!(ring.head().load(Ordering::Relaxed), number / 4 * 4);
        }
        assert_eq!(pushed, [4, 8, 12, 16]);
    }

    #[test]
    fn the_reader_is_woken_when_a_half_is_full() {
        let ring = Arc::new(Ring::new(8, Some(std::thread::current())));
        let mut writer = Writer::new(Some(Arc::clone(&ring)), StreamLap::NONE);
        let is_woken = |within| {
            let start = std::time::Instant::now();
            std::thread::park_timeout(within);
            start.elapsed() < within
        };
        write(&mut writer, 0..4);
        // A thread may also wake up spuriously.
        assert!((0..10).any(|_| !is_woken(std::time::Duration::from_millis(1))));
        for first in [4, 8] {
            write(&mut writer, first..first + 4);
            assert!(is_woken(std::time::Duration::from_secs(60)));
        }
    }

    #[test]
    fn another_stream_continues_in_the_same_lap() {
        let (ring, mut writer) = pair(8);
        write(&mut writer, 0..10);
        writer.set_whose(StreamLap::new(1, 2));
        let record = writer
            .whose()
            .record((crate::event::Kind::Free, 512, 3), (10, 4));
        let place = writer.place().unwrap();
        // SAFETY: the writer has just returned this place.
        unsafe { writer.put(place, record) };
        let found = ring.read(10);
        let parts: Vec<_> = found
            .records
            .iter()
            .map(crate::event::record::parts)
            .collect();
        assert_eq!(parts, [(2, 512, 3, 1, 4, 2)]);
    }

    #[test]
    fn laps_begin_anew_after_the_last() {
        let (ring, mut writer) = pair(4);
        for number in 0..4 * ((1 << 16) + 2) {
            write(&mut writer, number..number + 1);
            assert_eq!(found(ring.read(number)), (vec![number], 0, number + 1));
        }
    }

    /// Another process may write to the file of a ring.
    #[test]
    fn a_head_written_by_another_process_leads_nowhere_outside() {
        for head in [3, u64::MAX] {
            let (ring, mut writer) = pair(8);
            let behind = ring
                .words
                .wrapping_add(HEAD_WORDS + 8 * WORDS)
                .cast::<Slot>();
            write(&mut writer, 0..4);
            ring.head().store(head, Ordering::Relaxed);
            assert!(writer.turn().is_some());
            assert!(writer.end <= behind, "{head}");
            ring.read(0);
        }
    }

    #[test]
    fn lost_events_are_counted() {
        for capacity in [2, 8] {
            let (ring, mut writer) = pair(capacity);
            for last in 13..40 {
                write(&mut writer, ring.written(0)..last);
                let (times, lost, next) = found(ring.read(2));
                let first = last - (capacity as u64 - 1);
                assert_eq!(
                    (times, lost, next),
                    ((first..last).collect(), first - 2, last)
                );
            }
        }
    }

    #[test]
    fn a_reader_that_is_overtaken_reads_no_torn_record() {
        let (ring, mut writer) = pair(16);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                write(&mut writer, 0..200_000);
                done.store(true, Ordering::Release);
            });
            let (mut next, mut seen, mut lost) = (0, 0, 0);
            loop {
                let last = done.load(Ordering::Acquire);
                let found = ring.read(next);
                for (at, record) in found.records.iter().enumerate() {
                    assert_eq!(*record, [next + found.lost + at as u64; 4]);
                }
                (next, lost) = (found.next, lost + found.lost);
                seen += found.records.len() as u64;
                if last {
                    break;
                }
            }
            assert_eq!(seen + lost, 200_000);
        });
    }
}
