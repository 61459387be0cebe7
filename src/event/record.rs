//! The format of a record: four words.

/// The kind of an event. The numbers are those of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// A block was allocated.
    Allocate = 1,
    /// A block was freed.
    Free = 2,
    /// Another stream was recorded on a block.
    Use = 3,
    /// Memory was obtained from the driver.
    Map = 4,
    /// Memory was returned to the driver.
    Unmap = 5,
    /// A request failed for lack of memory; the address field holds the free bytes of the device.
    OutOfMemory = 6,
    /// A block was already live when the recording began.
    Held = 7,
    /// From here on a slot means the stream whose handle is in the bytes field.
    Stream = 8,
    /// An allocator, whose device is in the bytes field.
    Source = 9,
    /// The stack of the preceding allocation at the address, in the context field.
    Sample = 10,
    /// The new limit of the allocator in the bytes field, or [`NO_LIMIT`].
    Limit = 11,
    /// The size of the memory of the allocator's device, in the bytes field.
    DeviceMemory = 12,
    /// Why the request of the next record failed: the missing bytes are in the address field, the number of the cause
    /// in the bytes field.
    Cause = 13,
    /// The new memory regime of the allocator: its number is in the bytes field.
    Regime = 14,
}

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

/// The bytes field of [`Kind::Limit`] without a limit.
pub(crate) const NO_LIMIT: u64 = u64::MAX;

/// The stream field of [`Kind::Map`] and [`Kind::Unmap`]: the memory belongs to the small pool.
pub(crate) const SMALL: u32 = 1;
/// Like [`SMALL`]: the memory is a handle mapped into an arena.
pub(crate) const MAPPED: u32 = 2;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Event {
    pub kind: Kind,
    /// An address or an amount of bytes, a multiple of 512; 0 if the event has neither.
    pub at: u64,
    /// Requested bytes.
    pub bytes: u64,
    /// The slot of the stream.
    pub stream: u32,
    /// The number of the allocator.
    pub allocator: u64,
}

/// Four words: the time in ticks; the address, with the kind in its low bits; the bytes; and [`StreamLap`] with the
/// context.
pub(crate) type Record = [u64; 4];

const KIND_MASK: u64 = 511;
const SHORT: u32 = u16::MAX as u32;
/// The bit positions, in the last word, of the stream's slot, the allocator's number and the lap, with 16 bits each;
/// the lowest bits are the context.
const STREAM: u32 = 16;
const ALLOCATOR: u32 = 32;
const LAP: u32 = 48;

/// The slot in records of all streams without a slot number, whose handle is recorded before each of their events:
/// streams of graph pools without a slot, and streams whose slot does not fit into 16 bits.
pub(crate) const UNNUMBERED: u16 = u16::MAX;
/// Stands for a stream without a slot before slots are shortened to 16 bits.
pub(crate) const OTHERS: u32 = u32::MAX;

/// Whether a slot has a number in records; otherwise the stream's handle is recorded with each event.
#[inline]
pub(crate) fn has_number(slot: u32) -> bool {
    slot < u32::from(UNNUMBERED)
}

pub(crate) const MOST_CONTEXTS: u32 = SHORT;

/// Returns the context with a number; none for an impossible number.
#[inline(always)]
pub(crate) fn or_none(context: u32) -> u32 {
    if context > MOST_CONTEXTS { 0 } else { context }
}

/// The part that all records of one stream in one lap of a ring have in common: the last word without the context.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StreamLap(u64);

impl StreamLap {
    pub(crate) const NONE: StreamLap = StreamLap(0);

    /// Creates it for a stream; one whose slot does not fit is [`UNNUMBERED`].
    #[inline(always)]
    pub(crate) fn new(stream: u32, allocator: u64) -> StreamLap {
        let stream = u64::from(stream.min(SHORT));
        let allocator = allocator & u64::from(SHORT);
        StreamLap(stream << STREAM | allocator << ALLOCATOR)
    }

    /// Whether the stream is identified by a recorded handle.
    #[inline]
    pub(crate) fn is_unnumbered(self) -> bool {
        (self.0 >> STREAM) as u16 == UNNUMBERED
    }

    pub(crate) fn in_lap(self, lap: u16) -> StreamLap {
        StreamLap(in_lap(self.0, lap))
    }

    pub(crate) fn lap(self) -> u16 {
        lap_of(self.0)
    }

    /// Builds the record of an event at an address, a multiple of 512, with a size, at a time and in a context.
    #[inline(always)]
    pub(crate) fn record(
        self,
        (kind, at, bytes): (Kind, u64, u64),
        (ticks, context): (u64, u32),
    ) -> Record {
        debug_assert!(at & KIND_MASK == 0, "a block is not in its place");
        debug_assert!(context <= MOST_CONTEXTS, "there is no such context");
        // The operands have no bit in common, so they can be added: processors do that without a copy.
        [ticks, at + kind as u64, bytes, self.0 + u64::from(context)]
    }
}

fn in_lap(word: u64, lap: u16) -> u64 {
    word & ((1 << LAP) - 1) | u64::from(lap) << LAP
}

impl Event {
    /// Converts the event to a record; a stream whose slot does not fit is [`UNNUMBERED`].
    #[inline(always)]
    pub(crate) fn at_time(&self, ticks: u64, context: u32) -> Record {
        let whose = StreamLap::new(self.stream, self.allocator);
        let at = self.at & !KIND_MASK;
        whose.record((self.kind, at, self.bytes), (ticks, or_none(context)))
    }
}

/// Returns the record that precedes one of an [`UNNUMBERED`] stream and contains its handle.
pub(crate) fn handle_of([ticks, _, _, whose]: Record, handle: u64) -> Record {
    let context = u64::from(SHORT);
    [ticks, Kind::Stream as u64, handle, whose & !context]
}

pub(crate) fn with_lap([ticks, place, bytes, whose]: Record, lap: u16) -> Record {
    [ticks, place, bytes, in_lap(whose, lap)]
}

pub(crate) fn lap_of(whose: u64) -> u16 {
    (whose >> LAP) as u16
}

/// Returns the lap of a record, given its number, from 1, and the size of the ring, a power of two. Places never
/// written belong to no lap.
pub(crate) fn lap(number: u64, capacity: u64) -> u16 {
    (number >> capacity.trailing_zeros()).wrapping_add(1) as u16
}

/// Whether a record's last word belongs to a lap, or to a later one.
pub(crate) fn is_of(whose: u64, lap: u16) -> bool {
    lap_of(whose).wrapping_sub(lap) as i16 >= 0
}

/// Splits a record: kind, address, bytes, stream, context, allocator.
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
    fn numbers_that_do_not_fit_affect_no_others() {
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
    fn a_lap_changes_no_other_field() {
        let whose = StreamLap::new(7, 3).in_lap(9).in_lap(u16::MAX);
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
