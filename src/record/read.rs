//! The reader of recordings. Files may be malicious: every number is checked against the actual contents.

use std::collections::{BTreeMap, HashMap};

use crate::allocator::Regime;
use crate::error::Cause;
use crate::event::Kind;
use crate::event::file;
use crate::event::file::UNIT;
use crate::event::names::LONGEST;
use crate::event::record::{self, KINDS, MAPPED, NO_LIMIT, SMALL, UNNUMBERED};
use crate::record::recording::{Action, Event, RecordedStream, Recording};

/// The maximum size in an event: more than any device has, and small enough for sums.
const MOST_BYTES: u64 = (1 << 48) - 1;
/// The maximum number of records read, whatever the caller allows: so streams have 32-bit numbers.
const MOST_RECORDS: u64 = u32::MAX as u64;
const MOST_NAMES: usize = 1 << 20;

/// Why a recording cannot be read.
#[allow(missing_docs, reason = "messages name their fields")]
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The file does not begin like a recording.
    #[error("expected a recording of cualloc, found another file")]
    NotARecording,
    /// The file was written by an incompatible version of this crate.
    #[error(
        "expected a recording of version {}, found version {found}",
        file::VERSION
    )]
    Version { found: u32 },
    /// The file has more events than the caller allows.
    #[error("the recording has more than {limit} events")]
    TooManyEvents { limit: u64 },
    /// The file contains an invalid value.
    #[error("byte {at}: {what}")]
    Damaged { at: usize, what: &'static str },
}

struct Bytes<'a> {
    all: &'a [u8],
    at: usize,
}

impl<'a> Bytes<'a> {
    fn left(&self) -> usize {
        self.all.len() - self.at
    }

    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let end = self.at.checked_add(bytes)?;
        let taken = self.all.get(self.at..end)?;
        self.at = end;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

/// A record with its sort key: its ring, and its position in there.
struct Raw {
    record: record::Record,
    ring: u32,
    number: u64,
}

#[derive(Default)]
struct Parts {
    records: Vec<Raw>,
    contexts: BTreeMap<u32, String>,
    lost: u64,
    complete: bool,
}

impl Parts {
    fn add(&mut self, ring: u32, records: &[u8], limit: u64) -> Result<(), ReadError> {
        let count = records.len() / file::RECORD;
        if self.records.len() as u64 + count as u64 > limit {
            return Err(ReadError::TooManyEvents { limit });
        }
        self.records.reserve(count);
        for record in records.chunks_exact(file::RECORD) {
            let number = self.records.len() as u64;
            let mut words = record.chunks_exact(8).map(|word| {
                let word: [u8; 8] = word.try_into().unwrap_or_default();
                u64::from_le_bytes(word)
            });
            let record = std::array::from_fn(|_| words.next().unwrap_or(0));
            self.records.push(Raw {
                record,
                ring,
                number,
            });
        }
        Ok(())
    }

    fn name(&mut self, number: u32, name: &[u8]) {
        if self.contexts.len() < MOST_NAMES {
            let name = String::from_utf8_lossy(name).into_owned();
            self.contexts.insert(number, name);
        }
    }
}

impl Recording {
    /// The maximum number of events that [`read`](Self::read) accepts: 2^26. They need 6 GiB of memory while they are
    /// read.
    pub const MOST_EVENTS: u64 = 1 << 26;

    /// Reads a recording of either form from its bytes. A truncated file is read up to where it ends.
    ///
    /// # Errors
    /// The fault of the file and its position.
    pub fn read(bytes: &[u8]) -> Result<Recording, ReadError> {
        read(bytes, Self::MOST_EVENTS)
    }

    /// Like [`read`](Self::read), for at most `limit` events. Fails like [`read`](Self::read).
    pub fn read_at_most(bytes: &[u8], events: u64) -> Result<Recording, ReadError> {
        read(bytes, events)
    }
}

fn read(bytes: &[u8], limit: u64) -> Result<Recording, ReadError> {
    let limit = limit.min(MOST_RECORDS);
    let mut from = Bytes { all: bytes, at: 0 };
    if from.take(8) != Some(&file::MAGIC) {
        return Err(ReadError::NotARecording);
    }
    let short = ReadError::Damaged {
        at: bytes.len(),
        what: "the header is cut off",
    };
    let mut header = Bytes {
        all: bytes.get(..file::HEADER).ok_or(short.clone())?,
        at: from.at,
    };
    let mut u32 = || header.u32().ok_or(short.clone());
    let (version, form) = (u32()?, u32()?);
    if version != file::VERSION {
        return Err(ReadError::Version { found: version });
    }
    let mut u64 = || header.u64().ok_or(short.clone());
    let (per_second, first, start) = (u64()?, u64()?, u64()?);
    let mut u32 = || header.u32().ok_or(short.clone());
    let sizes = [u32()?, u32()?, u32()?];
    let sampling = u64::from(u32()?) * UNIT;
    if per_second == 0 {
        return Err(ReadError::Damaged {
            at: 16,
            what: "a second has no ticks",
        });
    }
    from.at = file::HEADER;
    let parts = match form {
        file::CHUNKS => chunks(from, limit)?,
        file::RINGS => {
            header.at = file::MISSED;
            let missed = header.u64().unwrap_or(0);
            let mut parts = rings(from, sizes, limit)?;
            parts.lost = parts.lost.saturating_add(missed);
            parts
        }
        _ => {
            return Err(ReadError::Damaged {
                at: 12,
                what: "unknown form",
            });
        }
    };
    let mut recording = merge(parts, (per_second, first, start));
    recording.sampling = sampling;
    Ok(recording)
}

/// Reads a file written by the writer thread. It may be truncated anywhere.
fn chunks(mut from: Bytes<'_>, limit: u64) -> Result<Parts, ReadError> {
    let mut parts = Parts::default();
    while from.left() >= file::CHUNK_HEADER && !parts.complete {
        let at = from.at;
        let damaged = |what| ReadError::Damaged { at, what };
        let header = (from.u32(), from.u32(), from.u64());
        let (Some(kind), Some(number), Some(bytes)) = header else {
            break;
        };
        let bytes = usize::try_from(bytes).map_err(|_| damaged("a chunk is too long"))?;
        let payload = match from.take(bytes) {
            Some(payload) => payload,
            // The last record was not written completely.
            None => from.take(from.left()).unwrap_or_default(),
        };
        let mut payload = Bytes {
            all: payload,
            at: 0,
        };
        match kind {
            file::RECORDS => {
                if let Some(lost) = payload.u64() {
                    parts.lost = parts.lost.saturating_add(lost);
                    parts.add(number, &payload.all[payload.at..], limit)?;
                }
            }
            file::NAME if bytes > LONGEST => return Err(damaged("a name is too long")),
            file::NAME => parts.name(number, payload.all),
            file::END => parts.complete = true,
            _ => return Err(damaged("unknown chunk")),
        }
    }
    Ok(parts)
}

/// Reads a file of rings. It was created with its full length.
fn rings(
    mut from: Bytes<'_>,
    [rings, capacity, names]: [u32; 3],
    limit: u64,
) -> Result<Parts, ReadError> {
    let damaged = |at, what| ReadError::Damaged { at, what };
    if !capacity.is_power_of_two() {
        return Err(damaged(44, "a ring has no power of two of records"));
    }
    let mut parts = Parts {
        complete: true,
        ..Parts::default()
    };
    let at = from.at;
    let mut names = Bytes {
        all: from
            .take(names as usize)
            .ok_or(damaged(at, "the names are cut off"))?,
        at: 0,
    };
    while let (Some(number), Some(bytes)) = (names.u32(), names.u32()) {
        if number == 0 {
            break;
        }
        if bytes as usize > LONGEST {
            return Err(damaged(at + names.at, "a name is too long"));
        }
        let Some(name) = names.take(bytes as usize) else {
            return Err(damaged(at + names.at, "a name is cut off"));
        };
        parts.name(number, name);
    }
    let capacity = u64::from(capacity);
    for ring in 0..rings {
        let at = from.at;
        let ring_bytes = capacity
            .checked_mul(file::RECORD as u64)
            .and_then(|bytes| usize::try_from(bytes).ok());
        let header = from.take(file::RING_HEADER);
        let records = ring_bytes.and_then(|bytes| from.take(bytes));
        let (Some(header), Some(records)) = (header, records) else {
            return Err(damaged(at, "a ring is cut off"));
        };
        let mut header = Bytes { all: header, at: 0 };
        let written = written_in(records, header.u64().unwrap_or(0), capacity);
        // The oldest record may be partly overwritten by one that was not counted yet.
        let first = written.saturating_sub(capacity - 1);
        parts.lost = parts.lost.saturating_add(first);
        for number in first..written {
            let at = (number % capacity) as usize * file::RECORD;
            if let Some(record) = records.get(at..at + file::RECORD) {
                parts.add(ring, record, limit)?;
            }
        }
    }
    Ok(parts)
}

/// Returns how many records of a ring are valid, given the number known to be written: following records count if they
/// belong to the same lap.
fn written_in(records: &[u8], known: u64, capacity: u64) -> u64 {
    let end = known.saturating_add(capacity);
    let is_written = |number: &u64| {
        let at = (number % capacity + 1) as usize * file::RECORD;
        let whose = records
            .get(at - 8..at)
            .and_then(|word| word.try_into().ok());
        let whose = u64::from_le_bytes(whose.unwrap_or_default());
        record::is_of(whose, record::lap(*number, capacity))
    };
    (known..end)
        .find(|number| !is_written(number))
        .unwrap_or(end)
}

/// Makes the times of each ring's records, which are in writing order, non-decreasing: a processor may read its counter
/// slightly early. Blocks that existed at the start were recorded later, and stay at the start.
fn sort_records(records: &mut [Raw], first: u64) {
    let mut latest: HashMap<u32, u64> = HashMap::new();
    for raw in records {
        let time = &mut raw.record[0];
        if *time > first {
            let latest = latest.entry(raw.ring).or_insert(0);
            *latest = (*latest).max(*time);
            *time = *latest;
        }
    }
}

/// Sorts records and converts them to events.
fn merge(mut parts: Parts, (per_second, first, start): (u64, u64, u64)) -> Recording {
    sort_records(&mut parts.records, first);
    parts
        .records
        .sort_unstable_by_key(|raw| (raw.record[0], raw.ring, raw.number));
    let mut recording = Recording {
        start,
        lost: parts.lost,
        complete: parts.complete,
        contexts: parts.contexts,
        ..Recording::default()
    };
    let mut slots = Slots::default();
    let mut causes: HashMap<(u32, u16), (Option<Cause>, u64)> = HashMap::new();
    for raw in &parts.records {
        let (number, address, bytes, slot, context, allocator) = record::parts(&raw.record);
        // From a later version, or invalid.
        let Some(kind) = KINDS.into_iter().find(|kind| *kind as u64 == number) else {
            continue;
        };
        let ticks = raw.record[0].saturating_sub(first);
        let time = u128::from(ticks) * 1_000_000_000 / u128::from(per_second);
        let pool = u32::from(slot);
        let (small, mapped) = (pool & SMALL != 0, pool & MAPPED != 0);
        let mut address = address;
        let (action, of_stream) = match kind {
            Kind::Allocate => (Action::Allocate, true),
            Kind::Free => (Action::Free, true),
            Kind::Use => (Action::Use, true),
            Kind::Held => (Action::Held, true),
            Kind::Sample => (Action::Sample, true),
            Kind::Map => (Action::Map { small, mapped }, false),
            Kind::Unmap => (Action::Unmap { small, mapped }, false),
            Kind::OutOfMemory => {
                let (cause, missing) = causes.remove(&(raw.ring, allocator)).unzip();
                let device_free = cause.map(|_| address);
                address = 0;
                let refused = Action::OutOfMemory {
                    cause: cause.flatten(),
                    missing,
                    device_free,
                };
                (refused, true)
            }
            Kind::Limit => {
                let limit = Some(bytes).filter(|bytes| *bytes != NO_LIMIT);
                (Action::Limit(limit), false)
            }
            Kind::Regime => match Regime::from_number(bytes) {
                Some(regime) => (Action::Regime(regime), false),
                None => continue,
            },
            Kind::Cause => {
                let cause = Cause::from_number(bytes);
                causes.insert((raw.ring, allocator), (cause, address));
                continue;
            }
            Kind::Source => {
                recording.devices.insert(allocator, bytes as usize);
                continue;
            }
            Kind::DeviceMemory => {
                recording.memory.insert(allocator, bytes);
                continue;
            }
            Kind::Stream => {
                slots.begin(&mut recording.streams, (allocator, slot), bytes);
                continue;
            }
        };
        let stream = match of_stream {
            true => slots.stream(&mut recording.streams, (allocator, slot)),
            false => 0,
        };
        recording.devices.entry(allocator).or_insert(0);
        recording.events.push(Event {
            action,
            time: u64::try_from(time).unwrap_or(u64::MAX),
            address,
            bytes: match action {
                Action::Limit(_) | Action::Regime(_) => 0,
                _ => bytes.min(MOST_BYTES),
            },
            stream,
            context,
            allocator,
        });
    }
    if recording.lost > 0 {
        recording.events = with_lost_frees(recording.events);
    }
    recording
}

/// Adds the frees that must be among lost events: one before each block that overlaps a live one.
fn with_lost_frees(events: Vec<Event>) -> Vec<Event> {
    let mut live: BTreeMap<(u16, u64), Event> = BTreeMap::new();
    let mut whole = Vec::with_capacity(events.len());
    for event in events {
        let place = (event.allocator, event.address);
        match event.action {
            Action::Allocate => {
                let end = event.address.saturating_add(event.bytes.max(1));
                let from = (event.allocator, 0);
                let below = (event.allocator, end);
                while let Some((at, block)) = live.range(from..below).next_back() {
                    let (at, block) = (*at, *block);
                    if block.address.saturating_add(block.bytes) <= event.address {
                        break;
                    }
                    live.remove(&at);
                    whole.push(Event {
                        action: Action::Free,
                        time: event.time,
                        context: 0,
                        ..block
                    });
                }
                live.insert(place, event);
            }
            Action::Held => drop(live.entry(place).or_insert(event)),
            Action::Free => drop(live.remove(&place)),
            _ => {}
        }
        whole.push(event);
    }
    whole
}

#[derive(Default)]
struct Slots {
    known: HashMap<(u16, u16), (u32, bool)>,
    /// Streams without a number in records, by allocator and handle.
    others: HashMap<(u16, u64), u32>,
}

impl Slots {
    /// Assigns a stream with this handle to a slot from here on.
    fn begin(&mut self, streams: &mut Vec<RecordedStream>, slot: (u16, u16), handle: u64) {
        if slot.1 == UNNUMBERED {
            let number = self.others.entry((slot.0, handle));
            let number = *number.or_insert_with(|| add(streams, slot.0, handle));
            self.known.insert(slot, (number, true));
            return;
        }
        if let Some((number, known_handle)) = self.known.get_mut(&slot) {
            let stream = &mut streams[*number as usize];
            // The same stream was recorded again, or was used before its record.
            if stream.handle == handle || !*known_handle {
                (stream.handle, *known_handle) = (handle, true);
                return;
            }
        }
        let number = add(streams, slot.0, handle);
        self.known.insert(slot, (number, true));
    }

    fn stream(&mut self, streams: &mut Vec<RecordedStream>, slot: (u16, u16)) -> u32 {
        let known = self.known.entry(slot);
        known
            .or_insert_with(|| (add(streams, slot.0, u64::from(slot.1)), false))
            .0
    }
}

/// Adds a stream. There are at most as many streams as records, whose [number](MOST_RECORDS) is bounded.
fn add(streams: &mut Vec<RecordedStream>, allocator: u16, handle: u64) -> u32 {
    streams.push(RecordedStream { allocator, handle });
    (streams.len() - 1) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_keeps_its_order_and_the_start_its_time() {
        let raw = |(number, (ring, time)): (usize, (u32, u64))| Raw {
            record: [time, 0, 0, 0],
            ring,
            number: number as u64,
        };
        let rings = [(0, 20), (1, 15), (0, 18), (0, 10), (1, 16), (0, 21)];
        let mut records: Vec<Raw> = rings.into_iter().enumerate().map(raw).collect();
        sort_records(&mut records, 10);
        let times: Vec<u64> = records.iter().map(|raw| raw.record[0]).collect();
        assert_eq!(times, [20, 15, 20, 10, 16, 21]);
    }

    /// Builds a file of one ring of four records, with a head and the times and laps of its records.
    fn ring(head: u64, records: [(u64, u64); 4]) -> Vec<u8> {
        let mut bytes = file::MAGIC.to_vec();
        bytes.extend(file::VERSION.to_le_bytes());
        bytes.extend(file::RINGS.to_le_bytes());
        bytes.extend(
            [1_000_000_000u64, 0, 0]
                .iter()
                .flat_map(|it| it.to_le_bytes()),
        );
        bytes.extend([1u32, 4, 0, 0].iter().flat_map(|it| it.to_le_bytes()));
        bytes.resize(file::HEADER, 0);
        bytes.extend(head.to_le_bytes());
        bytes.resize(file::HEADER + file::RING_HEADER, 0);
        for (time, lap) in records {
            let words = [time, 512 | Kind::Free as u64, 1, lap << 48];
            bytes.extend(words.iter().flat_map(|it| it.to_le_bytes()));
        }
        bytes
    }

    fn times(bytes: &[u8]) -> (Vec<u64>, u64) {
        let recording = Recording::read(bytes).unwrap();
        let times = recording.events().iter().map(|event| event.time);
        (times.collect(), recording.lost())
    }

    #[test]
    fn records_of_a_ring_are_counted_by_their_laps() {
        let second = [(5, 2), (6, 2), (3, 1), (4, 1)];
        // The third record may be partly overwritten.
        assert_eq!(times(&ring(4, second)), (vec![4, 5, 6], 3));
        assert_eq!(times(&ring(6, second)), (vec![4, 5, 6], 3));
        let first = [(1, 1), (2, 1), (3, 1), (0, 0)];
        assert_eq!(times(&ring(0, first)), (vec![1, 2, 3], 0));
        assert_eq!(times(&ring(0, [(0, 0); 4])), (vec![], 0));
        // Invalid input terminates.
        assert_eq!(times(&ring(u64::MAX, second)).0.len(), 3);
        assert_eq!(times(&ring(0, [(1, 9); 4])).0.len(), 3);
    }
}
