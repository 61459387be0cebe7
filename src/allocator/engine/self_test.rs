//! Self-test of views: a write through one mapping must be visible through another. It runs before the first view.
//!
//! CUDA promises this once the writing operation has completed. The test does what a program does with a block whose
//! memory was mapped at another address before: it reads through one mapping, writes through the other, and then reads
//! again through the first, in stream order.

use crate::allocator::plan::{release, stitch};
use crate::error::Error;
use std::sync::atomic::Ordering;

use crate::driver::{DriverError, Stream, StreamKind, WORD_KERNELS};

use crate::allocator::engine::Engine;
use crate::allocator::engine::bench::{Bench, Finished, Unfinished, Work};
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::report::SelfTest;
use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE};
use crate::allocator::stream::slot::Holder;
use crate::allocator::view::commit;
use crate::sync::capture::is_of_capture;

/// Number of attempts to wait for the test's own work before its memory is abandoned.
const WAITS: usize = 4;

impl Engine {
    /// Whether views may be used, as far as is known.
    pub(crate) fn views_allowed(&self) -> bool {
        self.views && !self.views_failed.load(Ordering::Relaxed)
    }

    /// Adopts the result of an earlier allocator of the process, if it applies here.
    pub(crate) fn recall_aliasing(&self) {
        if !self.views {
            return;
        }
        if !self.self_test {
            self.lock().views.self_test = SelfTest::Off;
        } else if let Some(good) = self.driver().aliasing(self.device.ordinal()) {
            self.aliasing_known(good);
        }
    }

    fn aliasing_known(&self, good: bool) {
        self.views_failed.store(!good, Ordering::Relaxed);
        self.lock().views.self_test = if good {
            SelfTest::Passed
        } else {
            SelfTest::Failed
        };
    }

    /// Tests the device unless it was already tested or the settings forbid it, and returns the result so far.
    pub(crate) fn test_views(&self) -> Result<SelfTest, Error> {
        self.usable()?;
        if self.views && self.lock().views.self_test == SelfTest::NotRun {
            drop(self.open()?);
            self.reserve_for_test()?;
            self.aliasing_verdict(true)?;
        }
        Ok(self.lock().views.self_test)
    }

    /// Whether all known streams are known to be idle. Streams that may be captured at any time are not queried,
    /// because the query would invalidate the capture.
    fn is_quiet(&self) -> Result<bool, Error> {
        if self.may_capture() {
            return Ok(false);
        }
        let holders: Vec<Holder> = {
            let heap = self.lock();
            let streams = || heap.streams.iter().map(|(_, slot)| slot);
            if streams().any(|slot| slot.distrusted.is_some()) {
                return Ok(false);
            }
            streams().map(|slot| slot.holder.clone()).collect()
        };
        for holder in holders {
            let idle = match holder {
                Holder::Kept(stream) if stream.kind() != StreamKind::PerThreadDefault => {
                    match stream.is_complete() {
                        // The stream has begun a capture since the check.
                        Err(error) if is_of_capture(error.code()) => false,
                        idle => idle.map_err(|e| self.error_in(stream.context(), e))?,
                    }
                }
                Holder::Retired => true,
                _ => false,
            };
            if !idle {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether a stitch may continue, or the error that prevents it.
    pub(crate) fn may_stitch(&self) -> Result<bool, Error> {
        match self.aliasing_verdict(false) {
            Ok(usable) => Ok(usable),
            // No memory for the test; growth may still succeed.
            Err(Error::Driver(error)) if error.is_out_of_memory() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether a stitch may continue. Tests the device if it has not been tested, which takes a few milliseconds once
    /// per device and process. Without memory for the test the stitch continues untested, and the next one tries again;
    /// while a stream is capturing, nothing is stitched.
    fn aliasing_verdict(&self, asked: bool) -> Result<bool, Error> {
        if !self.self_test {
            return Ok(true);
        }
        let known = self.lock().views.self_test;
        if known != SelfTest::NotRun {
            return Ok(known != SelfTest::Failed);
        }
        match self.refuse_captures(std::slice::from_ref(&self.context), false) {
            Ok(()) => {}
            Err(Error::Capturing { .. }) => return Ok(false),
            Err(error) => return Err(error),
        }
        if !self.finish_tests(false)?.is_over {
            return Ok(false);
        }
        let with_kernels = asked || self.is_quiet()?;
        let Some(good) = self.test_aliasing(with_kernels)? else {
            return Ok(true);
        };
        self.driver().set_aliasing(self.device.ordinal(), good);
        if !good {
            log::warn!(
                "device {} does not keep memory coherent between two mappings: views are disabled",
                self.device.ordinal()
            );
        }
        self.aliasing_known(good);
        Ok(good)
    }

    /// Provides addresses for the test's memory.
    fn reserve_for_test(&self) -> Result<(), Error> {
        for space in [SpaceId::Large, SpaceId::Views] {
            if !self.lock().extents.has_addresses(space) {
                self.reserve_span(space, PHYSICAL_GRANULE)?;
            }
        }
        Ok(())
    }

    /// Runs the test on its own memory. `None` if there is no memory for it.
    fn test_aliasing(&self, with_kernels: bool) -> Result<Option<bool>, Error> {
        let want = Want {
            space: SpaceId::Large,
            // The memory belongs to no stream before and after.
            stream: 0,
            granules: (PHYSICAL_GRANULE / GRANULE) as u32,
            align: 1,
            requested: PHYSICAL_GRANULE,
            single: true,
            views: true,
        };
        self.reserve_for_test()?;
        let Some(stitch) = stitch::plan_test(&mut self.lock(), &want) else {
            return Ok(None);
        };
        let sides = [stitch.fresh.as_ref().map_or(0, |f| f.addr), stitch.site.at];
        match commit::map(&self.maker(), &stitch) {
            Ok(handles) => {
                let block = {
                    let mut heap = self.lock();
                    stitch::commit(&mut heap, &want, stitch, &handles)
                };
                let result = self.try_both_sides(sides, with_kernels);
                match result {
                    Ok(done) => {
                        self.end_test(block, sides)?;
                        done.map(Some).map_err(|e| self.error(e))
                    }
                    // Its work may still be running.
                    Err((error, work)) => {
                        let memory = Some((block, sides));
                        let unfinished = Unfinished { work, memory };
                        self.unfinished.lock().push(unfinished);
                        Err(self.error(error))
                    }
                }
            }
            Err(failed) => {
                let mut heap = self.lock();
                let error = stitch::revert_failed(&mut heap, &want, stitch, failed);
                drop(heap);
                if error.is_out_of_memory() {
                    return Ok(None);
                }
                Err(self.error(error))
            }
        }
    }

    /// Runs the test on its own stream. The outer error means that the work could not be waited for.
    fn try_both_sides(
        &self,
        sides: [u64; 2],
        with_kernels: bool,
    ) -> Result<Result<bool, DriverError>, (DriverError, Work)> {
        // High priority puts the test before the work that keeps the device busy.
        let stream = match Stream::with_priority(&self.context, i32::MIN) {
            Ok(stream) => stream,
            Err(error) => return Ok(Err(error)),
        };
        let entered = match self.context.enter() {
            Ok(entered) => entered,
            Err(error) => return Ok(Err(error)),
        };
        // Loading may wait for everything that runs in the context, and ending that may be up to this thread. A device
        // that cannot load the kernels is tested without them.
        let load = || {
            let module = entered.load_module(WORD_KERNELS)?;
            Ok::<_, DriverError>((
                module.function(c"cualloc_fill")?,
                module.function(c"cualloc_check")?,
            ))
        };
        let kernels = match with_kernels.then(load) {
            Some(Ok(kernels)) => Some(kernels),
            Some(Err(error)) if error.is_fatal() => return Ok(Err(error)),
            _ => None,
        };
        let bench = Bench {
            entered: &entered,
            stream: stream.raw(),
            sides,
            kernels: kernels.as_ref(),
        };
        let result = bench.run();
        let mut done = stream.synchronize();
        for _ in 1..WAITS {
            match done {
                Err(error) if !error.is_fatal() => done = stream.synchronize(),
                _ => break,
            }
        }
        match done {
            Ok(()) => Ok(result),
            Err(error) => Err((error, Work { stream, kernels })),
        }
    }

    /// Releases the memory of tests that could not be waited for, if their work is complete; with `wait`, waits until
    /// it is and releases everything.
    pub(crate) fn finish_tests(&self, wait: bool) -> Result<Finished, Error> {
        let unfinished = std::mem::take(&mut *self.unfinished.lock());
        let (mut finished, mut failed) = (Finished::default(), None);
        let mut left = Vec::new();
        for mut test in unfinished {
            if let Some((block, sides)) = test.memory {
                let stream = &test.work.stream;
                let over = if wait {
                    stream.synchronize().map(|()| true)
                } else {
                    stream.is_complete()
                };
                let ended = match over {
                    Ok(true) => {
                        test.memory = None;
                        self.end_test(block, sides)
                    }
                    Ok(false) => Ok(0),
                    Err(error) if wait || error.is_fatal() => Err(self.error(error)),
                    Err(_) => Ok(0),
                };
                match ended {
                    Ok(released) => finished.released += released,
                    Err(error) => failed = failed.or(Some(error)),
                }
            }
            if test.memory.is_some() || (test.work.kernels.is_some() && !wait) {
                left.push(test);
            }
        }
        finished.is_over = left.iter().all(|test| test.memory.is_none());
        if !left.is_empty() {
            self.unfinished.lock().append(&mut left);
        }
        failed.map_or(Ok(finished), Err)
    }

    /// Unmaps and releases the memory of a test whose work is complete.
    fn end_test(&self, block: u32, sides: [u64; 2]) -> Result<u64, Error> {
        let release = stitch::end_test(&mut self.lock(), block, sides[0]);
        let evicted = self.evict(&[sides[1]]);
        let Some(release) = release else {
            return evicted.map(|()| 0);
        };
        if let Err(error) = evicted {
            // It is still mapped in the view: free memory, with an idle view over it.
            release::revert(&mut self.lock(), release);
            return Err(error);
        }
        self.release(vec![release])
    }
}
