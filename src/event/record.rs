//! What one record says, in four words.

/// What happened. The numbers are those of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// A block was handed out.
    Allocate = 1,
    /// A block was given up.
    Free = 2,
    /// Another stream was recorded on a block.
    Use = 3,
    /// Memory was taken from the driver.
    Map = 4,
    /// Memory went back to the driver.
    Unmap = 5,
    /// A request found no memory: at the bytes that the device had free.
    OutOfMemory = 6,
    /// A block was live already when the recording began.
    Held = 7,
    /// A slot stands for a stream from here on: its handle are the bytes.
    Stream = 8,
    /// An allocator: the device are the bytes.
    Source = 9,
    /// The stack of the allocation before at the address was taken: its context is the stack.
    Sample = 10,
    /// The limit of the allocator from here on: the bytes, or [`NO_LIMIT`].
    Limit = 11,
    /// The memory of the allocator's device: the bytes.
    DeviceMemory = 12,
    /// Why the request failed that the next record is about: at the bytes that were missing, with the number of the
    /// cause in place of the bytes.
    Cause = 13,
    /// The memory regime of the allocator from here on: its number in place of the bytes.
    Regime = 14,
}

/// All kinds.
pub(crate) const KINDS: [Kind; 14] = [
    Kind::Allocate,
    Kind::Free,
    Kind::Use,
    Kind::Map,
    Kind::Unmap,
    Kind::OutOfMemory,
    Kind::Held,
    Kind::Stream,
    Kind::Source,
    Kind::Sample,
    Kind::Limit,
    Kind::DeviceMemory,
    Kind::Cause,
    Kind::Regime,
];

/// Of [`Kind::Limit`], in the place of the bytes.
pub(crate) const NO_LIMIT: u64 = u64::MAX;

/// Of [`Kind::Map`] and [`Kind::Unmap`], in the place of the stream: the memory is of the small pool.
pub(crate) const SMALL: u32 = 1;
/// As [`SMALL`]: the memory is a handle mapped into an arena.
pub(crate) const MAPPED: u32 = 2;

/// What there is to record.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Event {
    pub kind: Kind,
    /// The first byte, or an amount of bytes, a multiple of 512; 0 if it is about neither.
    pub at: u64,
    /// Bytes as asked for.
    pub bytes: u64,
    /// The slot of the stream.
    pub stream: u32,
    /// The number of the allocator.
    pub allocator: u64,
}

/// Four words: the time in ticks; the address, with the kind in its low bits; the bytes; and [`Whose`] with the context.
pub(crate) type Record = [u64; 4];

const KIND_MASK: u64 = 511;
const SHORT: u32 = u16::MAX as u32;
/// Where the last word has the slot of the stream, the number of the allocator and the lap, with 16 bits each; below them
/// is the context.
const STREAM: u32 = 16;
const ALLOCATOR: u32 = 32;
const LAP: u32 = 48;

/// The slot in a record of all streams that have no number there, who are told of by their handle before each event of
/// theirs: those of graph pools that have no slot, and those whose slot has more than 16 bits.
pub(crate) const UNNUMBERED: u16 = u16::MAX;
/// Stands for a stream without a slot where slots are not shortened yet.
pub(crate) const OTHERS: u32 = u32::MAX;

/// Whether a slot has a number in records; else its stream is told of with each event.
#[inline]
pub(crate) fn has_number(slot: u32) -> bool {
    slot < u32::from(UNNUMBERED)
}

/// The largest number of a context.
pub(crate) const MOST_CONTEXTS: u32 = SHORT;

/// The context with a number; none if it can have no such number.
#[inline(always)]
pub(crate) fn or_none(context: u32) -> u32 {
    if context > MOST_CONTEXTS { 0 } else { context }
}

/// What all records about one stream of an allocator have that lie in one lap of a ring: the last word, without the
/// context.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Whose(u64);

impl Whose {
    pub(crate) const NOBODY: Whose = Whose(0);

    /// A stream whose slot does not fit is [`UNNUMBERED`].
    #[inline(always)]
    pub(crate) fn new(stream: u32, allocator: u64) -> Whose {
        let stream = u64::from(stream.min(SHORT));
        let allocator = allocator & u64::from(SHORT);
        Whose(stream << STREAM | allocator << ALLOCATOR)
    }

    /// Whether it is of a stream that is told of by its handle.
    #[inline]
    pub(crate) fn is_unnumbered(self) -> bool {
        (self.0 >> STREAM) as u16 == UNNUMBERED
    }

    /// The same in a lap.
    pub(crate) fn in_lap(self, lap: u16) -> Whose {
        Whose(in_lap(self.0, lap))
    }

    pub(crate) fn lap(self) -> u16 {
        lap_of(self.0)
    }

    /// The record of what happened at an address, a multiple of 512, with so many bytes, at a time in a context.
    #[inline(always)]
    pub(crate) fn record(
        self,
        (kind, at, bytes): (Kind, u64, u64),
        (ticks, context): (u64, u32),
    ) -> Record {
        debug_assert!(at & KIND_MASK == 0, "a block is not in its place");
        debug_assert!(context <= MOST_CONTEXTS, "there is no such context");
        // Sums of what has no bit in common: processors add without a copy.
        [ticks, at + kind as u64, bytes, self.0 + u64::from(context)]
    }
}

/// The last word of a record in a lap.
fn in_lap(word: u64, lap: u16) -> u64 {
    word & ((1 << LAP) - 1) | u64::from(lap) << LAP
}

impl Event {
    /// The event as a record; a stream whose slot does not fit is [`UNNUMBERED`].
    #[inline(always)]
    pub(crate) fn at_time(&self, ticks: u64, context: u32) -> Record {
        let whose = Whose::new(self.stream, self.allocator);
        let at = self.at & !KIND_MASK;
        whose.record((self.kind, at, self.bytes), (ticks, or_none(context)))
    }
}

/// What tells of the stream of a record that is [`UNNUMBERED`], before it: its handle.
pub(crate) fn handle_of([ticks, _, _, whose]: Record, handle: u64) -> Record {
    let context = u64::from(SHORT);
    [ticks, Kind::Stream as u64, handle, whose & !context]
}

/// The record in a lap.
pub(crate) fn with_lap([ticks, place, bytes, whose]: Record, lap: u16) -> Record {
    [ticks, place, bytes, in_lap(whose, lap)]
}

/// The lap that a record's last word says.
pub(crate) fn lap_of(whose: u64) -> u16 {
    (whose >> LAP) as u16
}

/// The lap of a record by its number, from 1, in a ring of so many, a power of two: places that were never written to are
/// of none that is.
pub(crate) fn lap(number: u64, capacity: u64) -> u16 {
    (number >> capacity.trailing_zeros()).wrapping_add(1) as u16
}

/// Whether a record's last word says that it is of a lap, or of a later one.
pub(crate) fn is_of(whose: u64, lap: u16) -> bool {
    lap_of(whose).wrapping_sub(lap) as i16 >= 0
}

/// The parts of a record: kind, address, bytes, stream, context, allocator.
pub(crate) fn parts(record: &Record) -> (u64, u64, u64, u16, u32, u16) {
    let [_, place, bytes, whose] = *record;
    (
        place & KIND_MASK,
        place & !KIND_MASK,
        bytes,
        (whose >> STREAM) as u16,
        u32::from(whose as u16),
        (whose >> ALLOCATOR) as u16,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_gives_back_what_went_in() {
        let event = Event {
            kind: Kind::Free,
            at: 0x7f00_1234_5600,
            bytes: 12_345,
            stream: 7,
            allocator: 3,
        };
        let record = event.at_time(99, 42);
        assert_eq!(record[0], 99);
        assert_eq!(parts(&record), (2, 0x7f00_1234_5600, 12_345, 7, 42, 3));
    }

    #[test]
    fn numbers_that_do_not_fit_spoil_no_others() {
        let event = Event {
            kind: Kind::Allocate,
            at: u64::MAX,
            bytes: u64::MAX,
            stream: u32::MAX,
            allocator: u64::MAX,
        };
        let (kind, at, bytes, stream, context, allocator) = parts(&event.at_time(0, 0));
        assert_eq!((kind, at), (1, !511));
        assert_eq!((bytes, stream), (u64::MAX, u16::MAX));
        assert_eq!((context, allocator), (0, u16::MAX));
    }

    #[test]
    fn a_lap_spoils_nothing_else() {
        let whose = Whose::new(7, 3).in_lap(9).in_lap(u16::MAX);
        let record = whose.record((Kind::Use, 512, 1), (5, 42));
        assert_eq!(lap_of(record[3]), u16::MAX);
        assert_eq!(lap_of(with_lap(record, 8)[3]), 8);
        for record in [record, with_lap(record, 8), with_lap(record, 0)] {
            assert_eq!(parts(&record), (3, 512, 1, 7, 42, 3));
        }
    }

    #[test]
    fn laps_begin_anew_after_the_last() {
        assert_eq!([0, 7, 8].map(|number| lap(number, 8)), [1, 1, 2]);
        let last = lap((1 << 19) - 9, 8);
        assert_eq!((last, lap((1 << 19) - 8, 8)), (u16::MAX, 0));
        let of = |own, lap| is_of(in_lap(u64::MAX, own), lap);
        assert!(of(last, last) && of(0, last) && of(2, 1));
        assert!(!of(last, 0) && !of(0, 1) && !of(1, 2));
    }
}
