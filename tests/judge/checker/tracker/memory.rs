//! Physical memory, and where it is mapped.

use cualloc::driver::sys::*;

use super::{Handle, Mapping, SPAN, Tracker, covers};

impl Tracker {
    pub(super) fn memory(&mut self) -> u64 {
        self.memories += 1;
        self.memories * SPAN
    }

    /// Where addresses lie: start, end, first physical byte of each part. What is not mapped is left out.
    pub(super) fn parts(&self, start: u64, end: u64) -> Vec<(u64, u64, u64)> {
        let first = self.mappings.range(..=start).next_back();
        let first = first.map_or(start, |(&at, _)| at);
        let mut parts = Vec::new();
        for (&at, mapping) in self.mappings.range(first..end) {
            let (from, to) = (start.max(at), end.min(mapping.end));
            if from < to {
                parts.push((from, to, mapping.physical + (from - at)));
            }
        }
        parts
    }

    fn insert(&mut self, start: u64, bytes: u64, physical: u64, plain: bool) {
        let mapping = Mapping {
            end: start + bytes,
            physical,
            accessible: plain,
            plain,
            view: self.mappings.values().any(|m| m.physical == physical),
        };
        self.layout += 1;
        self.mappings.insert(start, mapping);
    }

    pub fn segment(&mut self, start: u64, bytes: u64) {
        let physical = self.memory();
        self.insert(start, bytes, physical, true);
    }

    pub fn segment_freed(&mut self, start: u64) {
        match self.mappings.get(&start).map(|m| (m.end, m.plain)) {
            Some((end, true)) => self.unmapped("cuMemFree", start, end - start),
            Some((_, false)) => self.found(format!("cuMemFree of {start:#x}, which is mapped")),
            None => {}
        }
    }

    pub fn handle(&mut self, handle: CUmemGenericAllocationHandle) {
        let physical = self.memory();
        self.handles.insert(
            handle,
            Handle {
                physical,
                references: 1,
            },
        );
    }

    pub fn handle_retained(&mut self, handle: CUmemGenericAllocationHandle) {
        if let Some(known) = self.handles.get_mut(&handle) {
            known.references += 1;
        }
    }

    pub fn handle_released(&mut self, handle: CUmemGenericAllocationHandle) {
        let Some(known) = self.handles.get_mut(&handle) else {
            return;
        };
        known.references -= 1;
        let physical = known.physical;
        if known.references > 0 {
            return;
        }
        self.handles.remove(&handle);
        self.perhaps_gone(physical);
    }

    /// Physical memory goes with its last handle and mapping. What no pool had may move into one once nothing is
    /// mapped to it.
    fn perhaps_gone(&mut self, physical: u64) {
        let base = physical / SPAN * SPAN;
        let held = self.handles.values().any(|h| h.physical == base);
        let shown = |m: &Mapping| m.physical / SPAN * SPAN == base;
        if self.mappings.values().any(shown) {
            return;
        }
        if held {
            if self.owners.get(&base) == Some(&None) {
                self.owners.remove(&base);
            }
            return;
        }
        let (from, to) = (base, base + SPAN);
        if let Some((_, (_, address))) = self.occupied.range(from..to).next() {
            self.found(format!(
                "memory of the live block {address:#x} is given back"
            ));
        }
        self.used.forget(from, to);
        self.launched.forget(from, to);
        self.owners.remove(&base);
    }

    pub fn mapped(
        &mut self,
        start: u64,
        bytes: u64,
        handle: CUmemGenericAllocationHandle,
        offset: u64,
    ) {
        if let Some(physical) = self.handles.get(&handle).map(|h| h.physical) {
            self.insert(start, bytes, physical + offset, false);
        }
    }

    /// Whether addresses are mapped as a whole, and may be used.
    pub(super) fn is_there(&self, start: u64, end: u64) -> bool {
        let parts = self.parts(start, end);
        let mapped: u64 = parts.iter().map(|(from, to, _)| to - from).sum();
        mapped == end - start && parts.iter().all(|(from, _, _)| self.is_open(*from))
    }

    /// Whether a mapped address may be used.
    pub(super) fn is_open(&self, at: u64) -> bool {
        let mapping = self.mappings.range(..=at).next_back();
        mapping.is_some_and(|(_, mapping)| mapping.accessible)
    }

    pub fn accessible(&mut self, start: u64, bytes: u64) {
        for (_, mapping) in self.mappings.range_mut(start..start + bytes) {
            mapping.accessible = true;
        }
    }

    /// Addresses lose their memory: no work may use them any more.
    pub fn unmapped(&mut self, call: &str, start: u64, bytes: u64) {
        let end = start + bytes;
        if let Some((s, e)) = self.live_around(start, end)
            && !self.is_asleep(s)
        {
            self.found(format!(
                "{call} of {start:#x}..{end:#x} under the live block {s:#x}..{e:#x}"
            ));
        }
        self.judge_claims(call, start, end);
        let guarded = self.guards.iter();
        let guarded = guarded.map(|(s, block)| (*s, block.end));
        if let Some((s, e)) = guarded.clone().find(|(s, e)| *s < end && start < *e) {
            self.found(format!(
                "{call} of {start:#x}..{end:#x} under the guard {s:#x}..{e:#x}"
            ));
        }
        let seen = &self.seen;
        let done = |used| covers(seen, used);
        let by_work = self.used_at.find(start, end, done, done);
        let by_launch = self.launched_at.find(start, end, done, done);
        let by_work = by_work.filter(|_| !(call == "cuMemFree" && self.frees_may_wait));
        for (used, by) in [(by_work, "stream"), (by_launch, "a launch on stream")] {
            let Some((at, used)) = used else { continue };
            self.found(format!(
                "{call} of {start:#x}..{end:#x}: {by} {} may use {at:#x} until {}, which the host has not seen",
                used.0, used.1
            ));
        }
        self.used_at.forget(start, end);
        self.launched_at.forget(start, end);
        self.layout += 1;
        let gone: Vec<u64> = self.mappings.range(start..end).map(|(&at, _)| at).collect();
        for at in gone {
            if let Some(mapping) = self.mappings.remove(&at) {
                self.views_unmapped += u64::from(mapping.view);
                self.perhaps_gone(mapping.physical);
            }
        }
    }

    pub fn addresses_freed(&mut self, start: u64, bytes: u64) {
        let end = start + bytes;
        if let Some((s, e)) = self.live_around(start, end) {
            self.found(format!(
                "cuMemAddressFree of {start:#x}..{end:#x} under the live block {s:#x}..{e:#x}"
            ));
        }
        self.judge_claims("cuMemAddressFree", start, end);
        if let Some((at, _)) = self.mappings.range(start..end).next() {
            let at = *at;
            self.found(format!(
                "cuMemAddressFree of {start:#x}..{end:#x}, which is mapped at {at:#x}"
            ));
        }
    }
}
