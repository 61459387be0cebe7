//! Effects of operations at the moment they complete: bytes, access rights, races.

use super::contents::{Content, mismatches};
use super::objects::Callback;
use super::race::Access;
use super::reports::Report;
use super::state::State;
use super::work::{Op, Work};
use std::sync::Arc;

/// A stretch of physical memory that part of an operation's range shows.
struct Piece {
    alloc: u32,
    /// Offset in the allocation.
    at: u64,
    /// Offset in the operation's range.
    offset: u64,
    bytes: u64,
}

impl Op {
    /// The device ranges that the operation touches; unused places are empty ranges.
    pub(super) fn ranges(&self) -> [(u64, u64); 2] {
        match self.work {
            Work::Turn { address, bytes, .. } | Work::Fill { address, bytes, .. } => {
                [(address, bytes), (0, 0)]
            }
            Work::Copy {
                target,
                source,
                bytes,
                ..
            } => [(target, bytes), (source, bytes)],
            Work::Upload { target, bytes, .. } => [(target, bytes), (0, 0)],
            Work::Download { source, bytes, .. } => [(source, bytes), (0, 0)],
            Work::Check {
                address,
                words,
                bad,
                ..
            } => [(address, words * 4), (bad, 4)],
            Work::Record
            | Work::Wait { .. }
            | Work::HostCopy { .. }
            | Work::Spin
            | Work::Launched { .. }
            | Work::Callback { .. } => [(0, 0); 2],
        }
    }
}

impl State {
    /// Completes an operation.
    pub(super) fn execute(&mut self, queue: u32, op: &Op) {
        if let Work::Launched { exec } = op.work {
            return self.launch_done(exec);
        }
        let ctx = &self.ctxs[self.queues[queue as usize].ctx];
        let own = ctx.device;
        if ctx.lost.is_some() && self.config.sticky_errors {
            return;
        }
        match &op.work {
            Work::Record | Work::Wait { .. } | Work::Spin | Work::Launched { .. } => {}
            Work::Turn {
                address,
                bytes,
                device,
            } => self.store(queue, op, *device, *address, *bytes, &[(*bytes, None)]),
            Work::Fill {
                address,
                bytes,
                content,
            } => {
                self.store(
                    queue,
                    op,
                    own,
                    *address,
                    *bytes,
                    &[(*bytes, Some(content.clone()))],
                );
            }
            Work::Copy {
                target,
                source,
                bytes,
                devices,
            } => {
                let data = self.load(queue, op, devices.1, *source, *bytes);
                self.store(queue, op, devices.0, *target, *bytes, &data);
            }
            Work::Upload {
                target,
                source,
                bytes,
            } => {
                if !self.host_lives(queue, op, *source, *bytes, Access::Read) {
                    return;
                }
                let data = Content::Raw(Arc::from(source.read(0, *bytes)), 0);
                self.store(queue, op, own, *target, *bytes, &[(*bytes, Some(data))]);
            }
            Work::Download {
                target,
                source,
                bytes,
            } => {
                if !self.host_lives(queue, op, *target, *bytes, Access::Write) {
                    return;
                }
                let mut at = 0;
                for (len, content) in self.load(queue, op, own, *source, *bytes) {
                    self.undefined(queue, op, source + at, len, content.is_none());
                    let bytes = match &content {
                        Some(content) => content.bytes(len as usize),
                        None => vec![0xdb; len as usize],
                    };
                    target.write(at, &bytes);
                    at += len;
                }
            }
            Work::HostCopy {
                target,
                source,
                bytes,
            } => {
                if !self.host_lives(queue, op, *source, *bytes, Access::Read)
                    || !self.host_lives(queue, op, *target, *bytes, Access::Write)
                {
                    return;
                }
                target.write(0, &source.read(0, *bytes));
            }
            Work::Check {
                address,
                words,
                seed,
                bad,
            } => {
                self.count_mismatches(queue, op, (*address, *words, *seed), *bad);
            }
            Work::Callback { function, data } => {
                self.defer(Callback {
                    function: *function,
                    data: *data,
                    alone: false,
                    late: false,
                });
                // The host observes that everything before it is complete.
                self.see(queue, op.seq - 1, &op.clock);
            }
        }
        if self.history_entries > self.history_limit {
            self.prune_history();
        }
    }

    fn prune_history(&mut self) {
        let floor = self.floor();
        let mut left = 0;
        let device = self.allocs.iter_mut().flatten();
        let device = device.map(|alloc| &mut alloc.history);
        let host = self.host_blocks.values_mut();
        for history in device.chain(host.map(|block| &mut block.history)) {
            history.prune(&floor);
            left += history.len() as u64;
        }
        self.history_entries = left;
        self.history_limit = (left * 2).max(1 << 14);
    }

    fn count_mismatches(
        &mut self,
        queue: u32,
        op: &Op,
        (address, words, seed): (u64, u64, u32),
        bad: u64,
    ) {
        let own = self.ctxs[self.queues[queue as usize].ctx].device;
        let mut wrong = 0u64;
        let mut at = 0;
        let mut broken = Vec::new();
        for (len, content) in self.load(queue, op, own, address, words * 4) {
            self.undefined(queue, op, address + at, len, content.is_none());
            // Words that lie across a border are compared byte by byte.
            let head = (at.next_multiple_of(4) - at).min(len);
            let tail = (len - head) % 4;
            let middle = len - head - tail;
            for (from, size) in [(0, head), (len - tail, tail)] {
                if size > 0 {
                    let part = content.as_ref().map(|content| content.skip(from));
                    broken.push((at + from, size, part));
                }
            }
            let expected = seed.wrapping_add(((at + head) / 4) as u32);
            wrong += match &content {
                Some(content) if middle > 0 => {
                    mismatches(&content.skip(head), middle / 4, expected)
                }
                _ => middle / 4,
            };
            at += len;
        }
        wrong += broken_words(seed, &broken);
        let old = self.load_word(queue, op, own, bad);
        let new = old.wrapping_add(wrong as u32);
        let content = Content::Words {
            first: new,
            step: 0,
            phase: 0,
        };
        for piece in self.pieces(queue, op, own, bad, 4, Access::Atomic) {
            if let Some(alloc) = &mut self.allocs[piece.alloc as usize] {
                alloc
                    .contents
                    .write(piece.at, piece.bytes, content.skip(piece.offset));
            }
        }
    }

    fn load_word(&mut self, queue: u32, op: &Op, device: usize, address: u64) -> u32 {
        let mut bytes = [0; 4];
        for piece in self.pieces(queue, op, device, address, 4, Access::Atomic) {
            if let Some(alloc) = &self.allocs[piece.alloc as usize] {
                alloc
                    .contents
                    .read(piece.at, piece.bytes, |offset, len, content| {
                        for index in 0..len {
                            let byte = content.as_ref().map_or(0, |content| content.byte(index));
                            if let Some(place) =
                                bytes.get_mut((piece.offset + offset + index) as usize)
                            {
                                *place = byte;
                            }
                        }
                    });
            }
        }
        u32::from_le_bytes(bytes)
    }

    fn undefined(&mut self, queue: u32, op: &Op, address: u64, bytes: u64, is: bool) {
        if is && self.config.strict_undefined {
            let site = self.site(&self.entry(queue, op, address, bytes));
            self.report(Report::Undefined { site });
        }
    }

    /// Reads a range as consecutive stretches.
    fn load(
        &mut self,
        queue: u32,
        op: &Op,
        device: usize,
        address: u64,
        bytes: u64,
    ) -> Vec<(u64, Option<Content>)> {
        let mut data = Vec::new();
        let mut end = 0;
        for piece in self.pieces(queue, op, device, address, bytes, Access::Read) {
            if piece.offset > end {
                data.push((piece.offset - end, None));
            }
            if let Some(alloc) = &self.allocs[piece.alloc as usize] {
                alloc
                    .contents
                    .read(piece.at, piece.bytes, |_, len, content| {
                        data.push((len, content));
                    });
            }
            end = piece.offset + piece.bytes;
        }
        if end < bytes {
            data.push((bytes - end, None));
        }
        data
    }

    /// Writes consecutive stretches to a range.
    fn store(
        &mut self,
        queue: u32,
        op: &Op,
        device: usize,
        address: u64,
        bytes: u64,
        data: &[(u64, Option<Content>)],
    ) {
        let pieces = self.pieces(queue, op, device, address, bytes, Access::Write);
        let mut from = 0;
        let mut first = 0;
        for piece in pieces {
            let Some(alloc) = &mut self.allocs[piece.alloc as usize] else {
                continue;
            };
            let end = piece.offset + piece.bytes;
            // Stretches and pieces both come in order.
            while first < data.len() && from + data[first].0 <= piece.offset {
                from += data[first].0;
                first += 1;
            }
            let mut start = from;
            for (len, content) in &data[first..] {
                if start >= end {
                    break;
                }
                let low = start.max(piece.offset);
                let high = (start + len).min(end);
                let at = piece.at + low - piece.offset;
                match content {
                    Some(content) => {
                        alloc
                            .contents
                            .write(at, high - low, content.skip(low - start));
                    }
                    None => alloc.contents.clear(at, high - low),
                }
                start += len;
            }
        }
    }

    /// The physical memory behind a range, through the mappings now in force. Checks access rights
    /// and races, and notes the use.
    fn pieces(
        &mut self,
        queue: u32,
        op: &Op,
        device: usize,
        address: u64,
        bytes: u64,
        access: Access,
    ) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let end = address.saturating_add(bytes);
        let mut at = address;
        let mut troubles = Vec::new();
        let first = self
            .mappings
            .range(..=address)
            .next_back()
            .map_or(address, |(&key, _)| key);
        let base = self.entry(queue, op, address, bytes);
        for (&start, mapping) in self.mappings.range_mut(first..end) {
            let stop = (start + mapping.bytes).min(end);
            if stop <= at {
                continue;
            }
            if start > at {
                troubles.push((at, start - at, None));
                at = start;
            }
            let rights = if access == Access::Read {
                mapping.readers
            } else {
                mapping.writers
            };
            let entry = super::race::Entry {
                address: at,
                bytes: stop - at,
                ..base
            };
            if rights & (1 << device) == 0 {
                troubles.push((at, stop - at, Some(device)));
            } else {
                pieces.push(Piece {
                    alloc: mapping.alloc,
                    at: at - start,
                    offset: at - address,
                    bytes: stop - at,
                });
            }
            match mapping.uses.iter_mut().find(|entry| entry.queue == queue) {
                Some(known) => *known = entry,
                None => mapping.uses.push(entry),
            }
            at = stop;
        }
        if at < end {
            troubles.push((at, end - at, None));
        }
        if self.config.races {
            self.find_races(&base, op, &pieces, access);
        }
        if !troubles.is_empty() {
            self.fault(queue);
        }
        for (address, bytes, refused) in troubles {
            let site = self.site(&super::race::Entry {
                address,
                bytes,
                ..base
            });
            self.report(match refused {
                Some(device) => Report::Unauthorised { site, device },
                None => Report::Unmapped { site },
            });
        }
        pieces
    }

    fn find_races(&mut self, base: &super::race::Entry, op: &Op, pieces: &[Piece], access: Access) {
        let mut earlier = None;
        for piece in pieces {
            let Some(alloc) = &mut self.allocs[piece.alloc as usize] else {
                continue;
            };
            let before = alloc.history.len() as u64;
            let address = base.address + piece.offset;
            let entry = super::race::Entry {
                address,
                bytes: piece.bytes,
                ..*base
            };
            let conflict = alloc
                .history
                .access(piece.at, piece.bytes, &entry, access, &op.clock);
            let after = alloc.history.len() as u64;
            self.history_entries = (self.history_entries + after).saturating_sub(before);
            earlier = earlier.or(conflict.map(|other| (other, entry)));
        }
        if let Some((first, second)) = earlier {
            let report = Report::Race {
                first: self.site(&first),
                second: self.site(&second),
            };
            self.report(report);
        }
    }
}

/// Counts differing words in stretches whose borders lie inside words.
fn broken_words(seed: u32, stretches: &[(u64, u64, Option<Content>)]) -> u64 {
    let mut wrong = std::collections::BTreeSet::new();
    for (at, len, content) in stretches {
        for index in 0..*len {
            let place = at + index;
            let expected =
                seed.wrapping_add((place / 4) as u32).to_le_bytes()[(place % 4) as usize];
            let found = content.as_ref().map(|content| content.byte(index));
            if found != Some(expected) {
                wrong.insert(place / 4);
            }
        }
    }
    wrong.len() as u64
}
