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
    /// A request found no memory.
    OutOfMemory = 6,
    /// A block was live already when the recording began.
    Held = 7,
    /// A slot stands for a stream from here on: its handle are the bytes.
    Stream = 8,
    /// An allocator: the device are the bytes.
    Source = 9,
    /// The stack of the allocation before at the address was taken: its context is the stack.
    Sample = 10,
}

/// Of [`Kind::Map`] and [`Kind::Unmap`], in the place of the stream: the memory is of the small pool.
pub(crate) const SMALL: u32 = 1;
/// As [`SMALL`]: the memory is a handle mapped into an arena.
pub(crate) const MAPPED: u32 = 2;

/// What there is to record.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Event {
    pub kind: Kind,
    /// The first byte, a multiple of 512; 0 if it is about no memory.
    pub at: u64,
    /// Bytes as asked for.
    pub bytes: u64,
    /// The slot of the stream.
    pub stream: u32,
    /// The number of the allocator.
    pub allocator: u64,
}

/// Four words: the time in ticks; the address, with the kind in its low bits; 48 bits of bytes below 16 of the
/// stream; the context below 16 bits of the allocator and 16 unused ones.
pub(crate) type Record = [u64; 4];

const KIND_MASK: u64 = 511;
const BYTES_BITS: u32 = 48;
const BYTES_MASK: u64 = (1 << BYTES_BITS) - 1;
const SHORT: u32 = u16::MAX as u32;

/// The slot of streams that have none: those of graph pools, which are told of before each block of theirs.
pub(crate) const OTHERS: u32 = SHORT;

/// What all records about one stream of an allocator have: the bits of both in the last two words.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Whose([u64; 2]);

impl Whose {
    pub(crate) const NOBODY: Whose = Whose([0; 2]);

    /// A number that does not fit is the largest that does.
    #[inline(always)]
    pub(crate) fn new(stream: u32, allocator: u64) -> Whose {
        let stream = u64::from(stream.min(SHORT));
        let allocator = allocator & u64::from(SHORT);
        Whose([stream << BYTES_BITS, allocator << 32])
    }

    /// The record of what happened at an address, a multiple of 512, with so many bytes, at a time in a context.
    #[inline(always)]
    pub(crate) fn record(
        self,
        (kind, at, bytes): (Kind, u64, u64),
        (ticks, context): (u64, u32),
    ) -> Record {
        debug_assert!(at & KIND_MASK == 0, "a block is not in its place");
        let [stream, allocator] = self.0;
        [
            ticks,
            at | kind as u64,
            bytes.min(BYTES_MASK) | stream,
            u64::from(context) | allocator,
        ]
    }
}

impl Event {
    /// The event as a record; a number that does not fit is the largest that does.
    #[inline(always)]
    pub(crate) fn at_time(&self, ticks: u64, context: u32) -> Record {
        let whose = Whose::new(self.stream, self.allocator);
        let at = self.at & !KIND_MASK;
        whose.record((self.kind, at, self.bytes), (ticks, context))
    }
}

/// The parts of a record: kind, address, bytes, stream, context, allocator.
pub(crate) fn parts(record: &Record) -> (u64, u64, u64, u16, u32, u16) {
    let [_, place, size, who] = *record;
    (
        place & KIND_MASK,
        place & !KIND_MASK,
        size & BYTES_MASK,
        (size >> BYTES_BITS) as u16,
        who as u32,
        (who >> 32) as u16,
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
        assert_eq!((bytes, stream), ((1 << 48) - 1, u16::MAX));
        assert_eq!((context, allocator), (0, u16::MAX));
    }
}
