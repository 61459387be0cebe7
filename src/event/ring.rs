//! A ring of records with one writer and any number of readers, which never wait for each other.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::thread::Thread;

use crate::event::mapped::Mapped;
use crate::event::record::Record;

/// Words before the records of a ring: the number of records written so far, alone on its cache line.
pub(crate) const HEAD_WORDS: usize = 8;
/// Words of a record.
pub(crate) const WORDS: usize = 4;

/// Records, the newest so many of them.
///
/// All words are atomics, so a reader that is overtaken reads nonsense and no more: it throws away what the
/// writer may have overwritten meanwhile.
#[derive(Debug)]
pub(crate) struct Ring {
    /// In `_own` or in `_file`: the head's line, and then the records.
    words: *const AtomicU64,
    mask: u64,
    /// Half of the records less one.
    half: u64,
    /// Told when the ring is half full again.
    reader: Option<Thread>,
    _own: Box<[AtomicU64]>,
    _file: Option<Arc<Mapped>>,
}

// SAFETY: the words are atomics, in memory that the ring keeps.
unsafe impl Send for Ring {}
// SAFETY: as above.
unsafe impl Sync for Ring {}

/// What a reader found in a ring.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub records: Vec<Record>,
    /// Records that were overwritten before they were read.
    pub lost: u64,
    /// The number of the next record.
    pub next: u64,
}

impl Ring {
    /// A ring of so many records, a power of two.
    pub(crate) fn new(capacity: usize, reader: Option<Thread>) -> Ring {
        debug_assert!(capacity.is_power_of_two());
        let words = HEAD_WORDS + capacity * WORDS;
        let words: Box<[AtomicU64]> = (0..words).map(|_| AtomicU64::new(0)).collect();
        Ring {
            words: words.as_ptr(),
            mask: capacity as u64 - 1,
            half: capacity as u64 / 2 - 1,
            reader,
            _own: words,
            _file: None,
        }
    }

    /// A ring in a file; `None` if it has room for no more.
    pub(crate) fn in_file(file: &Arc<Mapped>) -> Option<Ring> {
        let (words, capacity) = file.next_ring()?;
        Some(Ring {
            words,
            mask: capacity as u64 - 1,
            half: capacity as u64 / 2 - 1,
            reader: None,
            _own: Box::default(),
            _file: Some(Arc::clone(file)),
        })
    }

    #[inline(always)]
    fn word(&self, at: usize) -> &AtomicU64 {
        // SAFETY: callers stay below the head's words and those of all records, which that memory has.
        unsafe { &*self.words.add(at) }
    }

    fn slot(&self, index: u64) -> usize {
        HEAD_WORDS + (index & self.mask) as usize * WORDS
    }

    /// Writes a record over the oldest. One thread at a time calls this: who holds the tap.
    pub(crate) fn push(&self, record: Record) {
        let number = self.word(0).load(Ordering::Relaxed);
        let slot = self.slot(number);
        let slot = [0, 1, 2, 3].map(|at| self.word(slot + at));
        write(slot, self.word(0), record);
        // It is half full.
        if (number + 1) & self.half == 0 {
            self.wake();
        }
    }

    #[cold]
    #[inline(never)]
    fn wake(&self) {
        if let Some(reader) = &self.reader {
            reader.unpark();
        }
    }

    /// What was written from a record on, by its number.
    pub(crate) fn read(&self, from: u64) -> Found {
        let next = self.word(0).load(Ordering::Acquire);
        // The slot of the oldest may be the one that is written just now.
        let mut first = from.max(next.saturating_sub(self.mask)).min(next);
        let mut records: Vec<Record> = (first..next)
            .map(|index| {
                let slot = self.slot(index);
                [0, 1, 2, 3].map(|at| self.word(slot + at).load(Ordering::Relaxed))
            })
            .collect();
        fence(Ordering::Acquire);
        let now = self.word(0).load(Ordering::Relaxed);
        let whole = now.saturating_sub(self.mask).clamp(first, next);
        records.drain(..(whole - first) as usize);
        first = whole;
        Found {
            records,
            lost: first.saturating_sub(from),
            next,
        }
    }
}

/// Writes the next record over the oldest, whose words these are.
#[inline(always)]
fn write(slot: [&AtomicU64; WORDS], head: &AtomicU64, record: Record) {
    // A reader that sees any of the words below sees the head that was stored last, too.
    fence(Ordering::Release);
    slot[0].store(record[0], Ordering::Relaxed);
    slot[1].store(record[1], Ordering::Relaxed);
    slot[2].store(record[2], Ordering::Relaxed);
    slot[3].store(record[3], Ordering::Relaxed);
    head.store(head.load(Ordering::Relaxed) + 1, Ordering::Release);
}

/// The one writer of a ring, if it has one, and where it goes on: mostly it need not look at the ring for that.
#[derive(Debug)]
pub(crate) struct Writer {
    /// The words of the next record.
    at: *const AtomicU64,
    /// The words of the first record that is not written [quickly](Self::put): for it the reader is woken, or the ring begins anew.
    stop: *const AtomicU64,
    head: *const AtomicU64,
    ring: Option<Arc<Ring>>,
}

// SAFETY: the words are atomics, in memory that the ring keeps.
unsafe impl Send for Writer {}
// SAFETY: as above.
unsafe impl Sync for Writer {}

impl Writer {
    /// Without a ring.
    pub(crate) const NONE: Writer = Writer {
        at: std::ptr::null(),
        stop: std::ptr::null(),
        head: std::ptr::null(),
        ring: None,
    };

    pub(crate) fn new(ring: Arc<Ring>) -> Writer {
        let mut writer = Writer {
            ring: Some(ring),
            ..Writer::NONE
        };
        writer.look();
        writer
    }

    /// Whether the next record may be written by [`put`](Self::put).
    #[inline(always)]
    pub(crate) fn is_ready(&self) -> bool {
        self.at != self.stop
    }

    /// Writes the next record.
    ///
    /// # Safety
    /// The writer [is ready](Self::is_ready).
    #[inline(always)]
    pub(crate) unsafe fn put(&mut self, record: Record) {
        debug_assert!(self.is_ready());
        // SAFETY: a writer that is ready has a ring, and between `at` and `stop` there are whole records of it.
        let (slot, head) = unsafe { (&*self.at.cast::<[AtomicU64; WORDS]>(), &*self.head) };
        write(slot.each_ref(), head, record);
        self.at = self.at.wrapping_add(WORDS);
    }

    /// Writes the next record, whichever it is. False if there is no ring.
    pub(crate) fn push(&mut self, record: Record) -> bool {
        let Some(ring) = &self.ring else {
            return false;
        };
        ring.push(record);
        self.look();
        true
    }

    /// Finds where the ring goes on. The last record of either half is for [`push`](Self::push).
    fn look(&mut self) {
        let Some(ring) = &self.ring else { return };
        let number = ring.word(0).load(Ordering::Relaxed);
        self.head = ring.word(0);
        self.at = ring.word(ring.slot(number));
        self.stop = ring.word(ring.slot(number | ring.half));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn what_has_room_is_read_once_and_in_order() {
        let ring = Ring::new(8, None);
        assert!(ring.read(0).records.is_empty());
        for number in 0..7 {
            ring.push([number; 4]);
        }
        let found = ring.read(0);
        assert_eq!(found.lost, 0);
        assert_eq!(found.next, 7);
        let times: Vec<u64> = found.records.iter().map(|record| record[0]).collect();
        assert_eq!(times, [0, 1, 2, 3, 4, 5, 6]);
        ring.push([7; 4]);
        let found = ring.read(found.next);
        assert_eq!((found.records, found.lost), (vec![[7; 4]], 0));
    }

    #[test]
    fn a_record_that_wakes_the_reader_is_none_to_put_at_once() {
        let ring = Arc::new(Ring::new(8, None));
        let mut writer = Writer::new(Arc::clone(&ring));
        let mut refused = Vec::new();
        for number in 0..20 {
            if writer.is_ready() {
                // SAFETY: it is ready.
                unsafe { writer.put([number; 4]) };
            } else {
                refused.push(number);
                assert!(writer.push([number; 4]));
            }
            let found = ring.read(number);
            assert_eq!((found.records, found.lost), (vec![[number; 4]], 0));
        }
        assert_eq!(refused, [3, 7, 11, 15, 19]);
    }

    #[test]
    fn a_writer_goes_on_where_its_ring_is() {
        let ring = Arc::new(Ring::new(8, None));
        for number in 0..5 {
            ring.push([number; 4]);
        }
        let mut writer = Writer::new(Arc::clone(&ring));
        for number in 5..7 {
            assert!(writer.is_ready());
            // SAFETY: it is ready.
            unsafe { writer.put([number; 4]) };
        }
        assert!(!writer.is_ready());
        let times: Vec<u64> = ring.read(0).records.iter().map(|it| it[0]).collect();
        assert_eq!(times, [0, 1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn a_writer_without_a_ring_is_never_ready() {
        let mut writer = Writer::NONE;
        assert!(!writer.is_ready());
        assert!(!writer.push([1; 4]));
        // Nor one of a ring of which every record wakes the reader.
        let mut writer = Writer::new(Arc::new(Ring::new(2, None)));
        for number in 0..5 {
            assert!(!writer.is_ready());
            assert!(writer.push([number; 4]));
        }
    }

    #[test]
    fn what_had_no_room_is_counted() {
        let ring = Ring::new(8, None);
        for number in 0..20 {
            ring.push([number; 4]);
        }
        let found = ring.read(2);
        assert_eq!(found.records.len() as u64 + found.lost, 18);
        assert_eq!(found.records.last(), Some(&[19; 4]));
        assert_eq!(found.records.len(), 7);
    }

    #[test]
    fn a_reader_that_is_overtaken_reads_no_torn_record() {
        let ring = Ring::new(16, None);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..200_000 {
                    ring.push([number; 4]);
                }
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
