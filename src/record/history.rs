//! The history of a snapshot: the part that can be replayed, and what is missing.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::kinds::Count;
use crate::error::memory::Bytes;
use crate::record::snapshot::{Act, Segment, Snapshot, State};
use crate::trace::{RowMaker, Trace, TraceError};

/// A block that existed before its trace begins.
struct Earlier {
    bytes: u64,
    stream: u64,
    context: u32,
}

fn bytes(bytes: u128) -> Bytes {
    Bytes(u64::try_from(bytes).unwrap_or(u64::MAX))
}

impl Snapshot {
    /// Returns the number of devices for which the snapshot has a trace or blocks; some traces may be empty.
    pub fn devices(&self) -> usize {
        let used = |segment: &&Segment| segment.blocks.iter().any(|b| b.state != State::Free);
        let devices = self
            .segments
            .iter()
            .filter(used)
            .map(|segment| segment.device);
        let last = devices.max().map_or(0, |last| last + 1);
        last.max(self.traces.len())
    }

    /// Returns, in sentences, what the snapshot lacks about a device: figures computed from it may be too small.
    pub fn gaps(&self, device: usize) -> Vec<String> {
        let mut gaps: Vec<String> = self.missing_history(device).into_iter().collect();
        let crooked = self.segments.iter().filter(|segment| {
            let blocks = segment.blocks.iter().map(|block| u128::from(block.size));
            segment.device == device && blocks.sum::<u128>() != u128::from(segment.size)
        });
        match crooked.count() {
            0 => {}
            crooked => gaps.push(format!(
                "{} of GPU {device} have another size than all their blocks together",
                Count(crooked as u64, "segment")
            )),
        }
        if self.gaps.unrequested > 0 {
            gaps.push(format!(
                "the requested size of {} is unknown; the rounded size counts",
                Count(self.gaps.unrequested, "block")
            ));
        }
        for (action, count) in &self.gaps.unknown {
            let times = Count(*count, "time");
            gaps.push(format!(
                "the history has the unknown action `{action}` {times}, which is ignored"
            ));
        }
        gaps
    }

    /// Returns why the peak of a device is unknown, if it is.
    fn missing_history(&self, device: usize) -> Option<String> {
        let history = || self.traces.get(device).into_iter().flatten();
        let earlier = self.earlier(device);
        let live = earlier.values().map(|block| u128::from(block.bytes)).sum();
        let blocks = format!("{} ({})", Count(earlier.len() as u64, "block"), bytes(live));
        if !history().any(|entry| entry.act.is_of_block()) {
            return Some(match earlier.len() {
                0 if history().any(|entry| entry.act == Act::Oom) => return None,
                0 => format!("GPU {device} has neither blocks nor a history in this snapshot"),
                _ => format!(
                    "the snapshot has no history of GPU {device}, only what was live at its end: {blocks}; the peak is \
                     unknown"
                ),
            });
        }
        // Memory that existed before is held at the end and was not mapped by the history.
        let mapped = history().filter_map(|entry| match entry.act {
            Act::SegmentAlloc | Act::SegmentMap => Some(i128::from(entry.size)),
            Act::SegmentFree | Act::SegmentUnmap => Some(-i128::from(entry.size)),
            _ => None,
        });
        let segments = self
            .segments
            .iter()
            .filter(|segment| segment.device == device);
        let held: i128 = segments.map(|segment| i128::from(segment.size)).sum();
        let older = match earlier.len() {
            // Programs that do not write entries for segments provide no information about them.
            0 if mapped.clone().next().is_none() || held <= mapped.clone().sum() => return None,
            0 => format!(
                "{} of segments",
                bytes((held - mapped.sum::<i128>()).unsigned_abs())
            ),
            _ => blocks,
        };
        Some(format!(
            "the history of GPU {device} lacks the allocation of {older}: it begins late, or its beginning was \
             overwritten; an earlier peak is unknown"
        ))
    }
    /// Returns the blocks of a device that were live before its trace begins, by address: those that the trace frees
    /// without an allocation, and those that are live at the end without an entry in the trace.
    fn earlier(&self, device: usize) -> BTreeMap<u64, Earlier> {
        let mut earlier = BTreeMap::new();
        let mut known = BTreeSet::new();
        for entry in self.traces.get(device).into_iter().flatten() {
            let frees = match entry.act {
                Act::Alloc => false,
                Act::Free | Act::FreeRequested | Act::FreeCompleted => true,
                _ => continue,
            };
            if known.insert(entry.address) && frees {
                let block = Earlier {
                    bytes: entry.size,
                    stream: entry.stream,
                    context: entry.context,
                };
                earlier.insert(entry.address, block);
            }
        }
        let segments = self.segments.iter().filter(|s| s.device == device);
        for (segment, block) in segments.flat_map(|s| s.blocks.iter().map(move |b| (s, b))) {
            if block.state != State::Free && known.insert(block.address) {
                let known = Earlier {
                    bytes: match block.requested {
                        0 => block.size,
                        bytes => bytes,
                    },
                    stream: segment.stream,
                    context: block.context,
                };
                earlier.insert(block.address, known);
            }
        }
        earlier.retain(|_, block| block.bytes > 0);
        earlier
    }

    /// Returns the trace of a device for replay. Blocks that existed before the history begins come first: those live
    /// at its end, and those with a free only. A completion directly after its free is omitted. Failed requests are
    /// rows of [`Op::Oom`](crate::trace::Op::Oom).
    ///
    /// # Errors
    /// [`TraceFault::LiveBytesOverflow`](crate::trace::TraceFault::LiveBytesOverflow): in an untrusted file the bytes
    /// may add up to any number.
    pub fn to_trace(&self, name: &str, device: usize) -> Result<Trace, TraceError> {
        let mut rows = RowMaker::default();
        let mut streams: BTreeMap<u64, u32> = BTreeMap::new();
        // Blocks by address: live ones, and those whose completion is still to come.
        let (mut live, mut freed) = (BTreeMap::new(), BTreeMap::new());
        let mut stream_of = |handle| {
            // Each block comes from a segment or an entry, and 2^32 of them do not fit into memory.
            let known = streams.len() as u32;
            *streams.entry(handle).or_insert(known)
        };
        for (at, block) in self.earlier(device) {
            let stream = stream_of(block.stream);
            live.insert(at, rows.allocate(stream, block.bytes, block.context));
        }
        for entry in self.traces.get(device).into_iter().flatten() {
            let at = entry.address;
            match entry.act {
                Act::Alloc if entry.size > 0 => {
                    let stream = stream_of(entry.stream);
                    rows.free(live.remove(&at));
                    freed.remove(&at);
                    live.insert(at, rows.allocate(stream, entry.size, entry.context));
                }
                Act::FreeRequested | Act::Free => {
                    let block = live.remove(&at);
                    rows.free(block);
                    if let Some(block) = block.filter(|_| entry.act == Act::FreeRequested) {
                        freed.insert(at, block);
                    }
                }
                Act::FreeCompleted => match freed.remove(&at) {
                    Some(block) => rows.complete(block),
                    None => rows.free(live.remove(&at)),
                },
                Act::Oom if entry.size > 0 => rows.fail(stream_of(entry.stream), entry.size),
                _ => {}
            }
        }
        rows.trace(name, |number| self.context(number).map(str::to_owned))
    }
}
