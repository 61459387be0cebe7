//! Host memory for the contents of suspended memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, Builder};

use crate::allocator::suspend::contents::Contents;
use crate::driver::{Context, DriverError, Entered, HostAllocation, process};
use crate::error::Error;
use crate::locks::held::Mutex;

/// Maximum size of a part of page-locked memory, so that the parts can be reused for another total.
const PART: u64 = 64 << 20;
/// A part is a multiple of this many bytes.
const STEP: u64 = 64 << 10;
/// Maximum number of threads that lock pages.
const THREADS: usize = 8;

/// State of suspensions outside the heap.
#[derive(Debug)]
pub(crate) struct Suspender {
    /// Page-locked memory kept for the next suspension.
    spare: Mutex<Vec<HostAllocation>>,
    /// Maximum number of bytes of it.
    most: u64,
}

impl Suspender {
    pub(crate) fn new(most: Option<u64>) -> Suspender {
        Suspender {
            spare: Mutex::default(),
            most: most.unwrap_or(u64::MAX),
        }
    }

    pub(crate) fn take_spare(&self) -> Vec<HostAllocation> {
        std::mem::take(&mut *process::lock(&self.spare))
    }

    /// Keeps page-locked memory for the next suspension, as much as is allowed.
    pub(crate) fn keep_spare(&self, mut parts: Vec<HostAllocation>) {
        let mut spare = process::lock(&self.spare);
        let mut held: u64 = spare.iter().map(|part| part.bytes() as u64).sum();
        while let Some(part) = parts.pop_if(|part| held + part.bytes() as u64 <= self.most) {
            held += part.bytes() as u64;
            spare.push(part);
        }
        drop(spare);
        // The rest is freed without the lock.
        drop(parts);
    }

    /// Frees the page-locked memory that is kept for the next suspension.
    pub(crate) fn drop_spare(&self) {
        drop(self.take_spare());
    }
}

/// Host memory for contents.
#[derive(Debug, Default)]
pub(crate) enum HostCopy {
    #[default]
    None,
    /// Consecutive parts.
    Pinned(Vec<HostAllocation>),
    Plain(Vec<u8>),
}

impl HostCopy {
    /// Allocates memory for a number of bytes; page-locked parts come from `spare`, as far as there are any. Calls
    /// `added` after each part: address and bytes. After an error the parts so far stay.
    pub(crate) fn fill(
        &mut self,
        entered: &Entered<'_>,
        contents: Contents,
        bytes: u64,
        spare: &mut Vec<HostAllocation>,
        mut added: impl FnMut(*mut u8, u64) -> Result<(), DriverError>,
    ) -> Result<(), Error> {
        match contents {
            _ if bytes == 0 => Ok(()),
            Contents::Drop => Ok(()),
            Contents::Host => {
                let mut plain = Vec::new();
                let lacking = |_| Error::HostMemory {
                    bytes: bytes as usize,
                };
                plain.try_reserve_exact(bytes as usize).map_err(lacking)?;
                plain.resize(bytes as usize, 0);
                let at = plain.as_mut_ptr();
                *self = HostCopy::Plain(plain);
                Ok(added(at, bytes)?)
            }
            Contents::Pinned => {
                let mut parts = Vec::new();
                let mut left = bytes;
                let mut add = |part: HostAllocation| {
                    let (at, room) = (part.ptr().as_ptr().cast(), part.bytes() as u64);
                    parts.push(part);
                    left = left.saturating_sub(room);
                    added(at, room)?;
                    Ok::<u64, DriverError>(left)
                };
                let mut missing = bytes;
                let mut done = Ok(());
                while missing > 0
                    && done.is_ok()
                    && let Some(part) = spare.pop()
                {
                    done = add(part).map(|left| missing = left);
                }
                if done.is_ok() {
                    done = lock_parts(entered.context(), missing, |part| add(part).map(drop));
                }
                *self = HostCopy::Pinned(parts);
                Ok(done?)
            }
        }
    }

    /// Returns its page-locked parts for reuse.
    pub(crate) fn into_spare(self) -> Vec<HostAllocation> {
        match self {
            HostCopy::Pinned(parts) => parts,
            HostCopy::None | HostCopy::Plain(_) => Vec::new(),
        }
    }

    /// Prevents it from ever being freed, because a copy may still be running.
    pub(crate) fn leak(&mut self) {
        std::mem::forget(std::mem::take(self));
    }

    /// [`pieces`](Self::pieces), restricted to memory that is present: `homes`, sorted.
    pub(crate) fn pieces_in(
        &mut self,
        ranges: &[(u64, u64)],
        homes: &[(u64, u64)],
    ) -> Vec<(u64, *mut u8, u64)> {
        let pieces = self.pieces(ranges).into_iter();
        let inside = pieces.flat_map(|(at, host, bytes)| {
            let first = homes.partition_point(|(home, room)| home + room <= at);
            let homes = homes[first..].iter();
            let homes = homes.take_while(move |(home, _)| *home < at + bytes);
            homes.map(move |(home, room)| {
                let (from, to) = (at.max(*home), (at + bytes).min(home + room));
                (from, host.wrapping_add((from - at) as usize), to - from)
            })
        });
        inside.collect()
    }

    /// Returns the host location of the bytes of these ranges: device address, host address and bytes of each piece.
    pub(crate) fn pieces(&mut self, ranges: &[(u64, u64)]) -> Vec<(u64, *mut u8, u64)> {
        let parts: Vec<(*mut u8, u64)> = match self {
            HostCopy::None => Vec::new(),
            HostCopy::Plain(plain) => vec![(plain.as_mut_ptr(), plain.len() as u64)],
            HostCopy::Pinned(parts) => {
                let parts = parts.iter();
                parts
                    .map(|part| (part.ptr().as_ptr().cast(), part.bytes() as u64))
                    .collect()
            }
        };
        let mut placed = Placement::new(ranges);
        let pieces = parts.into_iter();
        pieces
            .flat_map(|(host, room)| placed.place(host, room))
            .collect()
    }
}

/// Places the bytes of ranges in consecutive parts of host memory.
pub(crate) struct Placement<'a> {
    ranges: &'a [(u64, u64)],
    /// Bytes of the first range that have been placed.
    placed: u64,
}

impl Placement<'_> {
    pub(crate) fn new(ranges: &[(u64, u64)]) -> Placement<'_> {
        Placement { ranges, placed: 0 }
    }

    /// Returns what the next part of this many bytes holds: device address, host address and bytes of each piece.
    pub(crate) fn place(&mut self, host: *mut u8, room: u64) -> Vec<(u64, *mut u8, u64)> {
        let (mut pieces, mut used) = (Vec::new(), 0);
        while let Some((address, bytes)) = self.ranges.first()
            && used < room
        {
            let piece = (bytes - self.placed).min(room - used);
            let at = host.wrapping_add(used as usize);
            pieces.push((address + self.placed, at, piece));
            used += piece;
            self.placed += piece;
            if self.placed == *bytes {
                (self.ranges, self.placed) = (&self.ranges[1..], 0);
            }
        }
        pieces
    }
}

/// Locks pages for a number of bytes by several threads, which end before the call returns. Passes on each part, also
/// after an error, of which the first is returned.
fn lock_parts(
    context: &Context,
    bytes: u64,
    mut each: impl FnMut(HostAllocation) -> Result<(), DriverError>,
) -> Result<(), DriverError> {
    let parts = bytes.div_ceil(PART);
    let next = AtomicU64::new(0);
    let lock = &|made: Sender<Result<HostAllocation, DriverError>>| {
        let entered = match context.enter() {
            Ok(entered) => entered,
            Err(error) => return drop(made.send(Err(error))),
        };
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed) * PART;
            if at >= bytes {
                return;
            }
            let part = (bytes - at).min(PART).next_multiple_of(STEP);
            let part = entered.lock_pages(part as usize);
            let failed = part.is_err();
            if made.send(part).is_err() || failed {
                return next.store(parts, Ordering::Relaxed);
            }
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let threads = threads.min(THREADS).min(parts as usize);
    thread::scope(|scope| {
        let (made, parts) = channel();
        let mut started = 0;
        for _ in 1..threads {
            let made = made.clone();
            // Without a further thread the others do its work.
            started += usize::from(
                Builder::new()
                    .spawn_scoped(scope, move || lock(made))
                    .is_ok(),
            );
        }
        if started == 0 {
            lock(made);
        } else {
            drop(made);
        }
        let mut done = Ok(());
        for part in parts {
            done = done.and(part.and_then(&mut each));
        }
        done
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_lie_behind_each_other_on_the_host() {
        let mut copy = HostCopy::Plain(vec![0; 10]);
        let pieces = copy.pieces(&[(100, 4), (200, 6)]);
        let base = pieces[0].1;
        assert_eq!(pieces, [(100, base, 4), (200, base.wrapping_add(4), 6)]);
        assert!(HostCopy::None.pieces(&[]).is_empty());
        // The end of the first range and the start of the second are no longer present.
        let inside = copy.pieces_in(&[(100, 4), (200, 6)], &[(98, 4), (202, 1), (204, 9)]);
        let at = |offset| base.wrapping_add(offset);
        assert_eq!(inside, [(100, base, 2), (202, at(6), 1), (204, at(8), 2)]);
    }
}
