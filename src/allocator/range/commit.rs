//! The driver calls of a commit, made without the heap's lock.

use crate::allocator::physical::GrowthFailure;
use crate::allocator::physical::commit::{PhysicalConfig, map_with, release_mapped};
use crate::allocator::range::plan::{Fate, Source, Work};
use crate::driver::{DriverError, Entered};

/// Maps a handle at each cell, or undoes everything if a call fails. Returns the handles of each run. Handles that left
/// their places are released to the driver on a failure.
pub(crate) fn make(
    maker: &PhysicalConfig<'_>,
    work: &mut Work,
) -> Result<Vec<Vec<u64>>, Vec<GrowthFailure>> {
    let mut made: Vec<Vec<u64>> = Vec::with_capacity(work.runs.len());
    for run in &work.runs {
        let (sources, used) = (&mut work.sources, &mut work.used);
        let mapped = map_with(maker, run, |entered, bytes| {
            let source = sources.pop_front().unwrap_or(Source::Create);
            let taken = take(maker, entered, &source, bytes);
            let fate = match taken {
                Ok(_) => Fate::Left,
                Err(_) => Fate::Doubtful,
            };
            used.push((source, fate));
            taken
        });
        match mapped {
            Ok(handles) => made.push(handles),
            Err(failure) => {
                let error = failure.error;
                let earlier = work.runs.iter().zip(&made);
                let undone =
                    earlier.map(|(run, handles)| release_mapped(maker, run, handles, error));
                return Err(std::iter::once(failure).chain(undone).collect());
            }
        }
    }
    Ok(made)
}

fn take(
    maker: &PhysicalConfig<'_>,
    entered: &Entered<'_>,
    source: &Source,
    bytes: u64,
) -> Result<u64, DriverError> {
    let (address, handle) = match source {
        Source::Create => return entered.mem_create(bytes as usize, maker.properties),
        Source::Leaving(_, cell) => (cell.address, cell.handle),
        // Only mapped handles are planned.
        Source::Arena(release) => (release.addr, release.handle.unwrap_or_default()),
    };
    // SAFETY: this is one whole mapping of the allocator, claimed for this commit, and the host observed the completion
    // of every use of it.
    unsafe { entered.mem_unmap(address, bytes as usize) }?;
    Ok(handle)
}
