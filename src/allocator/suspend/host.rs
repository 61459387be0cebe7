//! Host memory for the contents of suspended memory.

use crate::allocator::suspend::contents::Contents;
use crate::driver::{Entered, HostAllocation, HostMemory, process};
use crate::error::Error;
use crate::locks::held::Mutex;

/// Maximum size of a part of page-locked memory, so that the parts can be reused for another total.
const PART: u64 = 64 << 20;
/// A part is a multiple of this many bytes.
const STEP: u64 = 64 << 10;

/// State of suspensions outside the heap.
#[derive(Debug, Default)]
pub(crate) struct Suspender {
    /// Page-locked memory kept for the next suspension.
    pub(crate) spare: Mutex<Vec<HostAllocation>>,
}

impl Suspender {
    /// Frees the page-locked memory that is kept for the next suspension.
    pub(crate) fn drop_spare(&self) {
        let spare = std::mem::take(&mut *process::lock(&self.spare));
        drop(spare);
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
    /// Allocates memory for a number of bytes; page-locked parts come from `spare`, as far as there are any.
    pub(crate) fn new(
        entered: &Entered<'_>,
        contents: Contents,
        bytes: u64,
        spare: &mut Vec<HostAllocation>,
    ) -> Result<HostCopy, Error> {
        match contents {
            _ if bytes == 0 => Ok(HostCopy::None),
            Contents::Drop => Ok(HostCopy::None),
            Contents::Host => {
                let mut plain = Vec::new();
                let lacking = |_| Error::HostMemory {
                    bytes: bytes as usize,
                };
                plain.try_reserve_exact(bytes as usize).map_err(lacking)?;
                plain.resize(bytes as usize, 0);
                Ok(HostCopy::Plain(plain))
            }
            Contents::Pinned => {
                let (mut parts, mut left) = (Vec::new(), bytes);
                while left > 0 {
                    let part = match spare.pop() {
                        Some(part) => part,
                        None => {
                            let bytes = left.min(PART).next_multiple_of(STEP) as usize;
                            match entered.host_allocation(bytes, HostMemory::default()) {
                                Ok(part) => part,
                                Err(error) => {
                                    spare.append(&mut parts);
                                    return Err(error.into());
                                }
                            }
                        }
                    };
                    left = left.saturating_sub(part.bytes() as u64);
                    parts.push(part);
                }
                Ok(HostCopy::Pinned(parts))
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
        let mut parts: Vec<(*mut u8, u64)> = match self {
            HostCopy::None => Vec::new(),
            HostCopy::Plain(plain) => vec![(plain.as_mut_ptr(), plain.len() as u64)],
            HostCopy::Pinned(parts) => {
                let parts = parts.iter();
                parts
                    .map(|part| (part.ptr().as_ptr().cast(), part.bytes() as u64))
                    .collect()
            }
        };
        parts.reverse();
        let mut pieces = Vec::with_capacity(ranges.len() + parts.len());
        for (address, bytes) in ranges {
            let (mut at, mut left) = (*address, *bytes);
            while left > 0
                && let Some((host, room)) = parts.pop()
            {
                let bytes = left.min(room);
                pieces.push((at, host, bytes));
                (at, left) = (at + bytes, left - bytes);
                if room > bytes {
                    parts.push((host.wrapping_add(bytes as usize), room - bytes));
                }
            }
        }
        pieces
    }
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
