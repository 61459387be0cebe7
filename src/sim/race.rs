//! The last accesses to physical bytes: the data of the race detector.

use super::clocks::Clock;
use std::collections::BTreeMap;

/// An operation, as reports describe it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) queue: u32,
    pub(super) label: u32,
    pub(super) seq: u64,
    /// The operation that a report names: by its sequence number in the stream, or its position in the graph.
    pub(super) position: u64,
    /// The node of a launched graph; 0 for other work.
    pub(super) node: u64,
    pub(super) kind: &'static str,
    pub(super) stream: u64,
    pub(super) address: u64,
    pub(super) bytes: u64,
}

/// How an operation touches bytes. Atomic additions do not race with each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Access {
    Read,
    Write,
    Atomic,
}

#[derive(Clone, Default, Debug)]
struct Record {
    writer: Option<Entry>,
    /// Readers and atomic users since the last write, at most one of each kind per queue.
    users: Vec<(Entry, Access)>,
}

impl Record {
    fn conflict(&self, entry: &Entry, access: Access, clock: &Clock) -> Option<Entry> {
        let unordered = |earlier: &Entry| {
            earlier.queue != entry.queue && !clock.covers(earlier.queue, earlier.seq)
        };
        if let Some(writer) = self.writer.filter(unordered) {
            return Some(writer);
        }
        self.users
            .iter()
            .find(|(user, how)| (access == Access::Write || *how != access) && unordered(user))
            .map(|(user, _)| *user)
    }

    fn note(&mut self, entry: &Entry, access: Access) {
        if access == Access::Write {
            self.writer = Some(*entry);
            self.users.clear();
            return;
        }
        let same = |(user, how): &&mut (Entry, Access)| user.queue == entry.queue && *how == access;
        match self.users.iter_mut().find(same) {
            Some(user) => user.0 = *entry,
            None => self.users.push((*entry, access)),
        }
    }
}

/// The accesses to one physical allocation that later ones may still race with.
#[derive(Default, Debug)]
pub(super) struct History {
    map: BTreeMap<u64, (u64, Record)>,
}

impl History {
    /// How many intervals are kept.
    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    fn split(&mut self, at: u64) {
        let Some((&start, &(end, _))) = self.map.range(..at).next_back() else {
            return;
        };
        if end <= at {
            return;
        }
        if let Some(entry) = self.map.get_mut(&start) {
            entry.0 = at;
            let record = entry.1.clone();
            self.map.insert(at, (end, record));
        }
    }

    /// Notes an access to `start..start + len` and returns an earlier one that it races with.
    pub(super) fn access(
        &mut self,
        start: u64,
        len: u64,
        entry: &Entry,
        access: Access,
        clock: &Clock,
    ) -> Option<Entry> {
        if len == 0 {
            return None;
        }
        let end = start + len;
        if let Some((stop, record)) = self.map.get_mut(&start)
            && *stop == end
        {
            let conflict = record.conflict(entry, access, clock);
            record.note(entry, access);
            return conflict;
        }
        self.split(start);
        self.split(end);
        let mut conflict = None;
        if access == Access::Write {
            while let Some((&key, _)) = self.map.range(start..end).next() {
                let removed = self.map.remove(&key);
                conflict = conflict.or_else(|| {
                    removed.and_then(|(_, record)| record.conflict(entry, access, clock))
                });
            }
            let record = Record {
                writer: Some(*entry),
                users: Vec::new(),
            };
            self.map.insert(start, (end, record));
            return conflict;
        }
        let mut at = start;
        let mut gaps = Vec::new();
        for (&key, (stop, record)) in self.map.range_mut(start..end) {
            if key > at {
                gaps.push((at, key));
            }
            conflict = conflict.or_else(|| record.conflict(entry, access, clock));
            record.note(entry, access);
            at = *stop;
        }
        if at < end {
            gaps.push((at, end));
        }
        for (from, to) in gaps {
            let record = Record {
                writer: None,
                users: vec![(*entry, access)],
            };
            self.map.insert(from, (to, record));
        }
        conflict
    }

    /// Forgets accesses that precede everything that can still be submitted or complete.
    pub(super) fn prune(&mut self, floor: &Clock) {
        self.map.retain(|_, (_, record)| {
            record.writer = record
                .writer
                .filter(|writer| !floor.covers(writer.queue, writer.seq));
            record
                .users
                .retain(|(user, _)| !floor.covers(user.queue, user.seq));
            record.writer.is_some() || !record.users.is_empty()
        });
    }
}
