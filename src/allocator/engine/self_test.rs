//! Self-test of views: a write through one mapping must be visible through another. It runs before the first view.
//!
//! CUDA promises this once the writing operation has completed. The test does what a program does with a block whose
//! memory was mapped at another address before: it reads through one mapping, writes through the other, and then reads
//! again through the first, in stream order.

pub(super) mod work;

use crate::allocator::engine::contexts;
use crate::allocator::engine::device;
use crate::allocator::engine::release;
use crate::allocator::plan::{self, stitch};
use crate::error::Error;
use std::sync::atomic::Ordering;

use crate::driver::{DriverError, Stream, StreamKind, WORD_KERNELS};

use crate::allocator::engine::Engine;
use crate::allocator::engine::self_test::work::{Finished, Rounds, Unfinished, Work};
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::report::SelfTest;
use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE};
use crate::allocator::stream::slot::Holder;
use crate::allocator::view::commit;
use crate::sync::capture::is_of_capture;

/// Number of attempts to wait for the test's own work before its memory is abandoned.
const WAITS: usize = 4;

/// Adopts the result of an earlier allocator of the process, if it applies here.
pub(crate) fn recall(engine: &Engine) {
    if !engine.views.enabled {
        return;
    }
    if !engine.views.required {
        engine.lock().views.self_test = SelfTest::Off;
    } else if let Some(good) = engine.driver().aliasing(engine.device.ordinal()) {
        set_result(engine, good);
    }
}

fn set_result(engine: &Engine, good: bool) {
    engine.views.failed.store(!good, Ordering::Relaxed);
    engine.lock().views.self_test = if good {
        SelfTest::Passed
    } else {
        SelfTest::Failed
    };
}

/// Tests the device unless it was already tested or the settings forbid it, and returns the result so far.
pub(crate) fn run(engine: &Engine) -> Result<SelfTest, Error> {
    engine.usable()?;
    if engine.views.enabled && engine.lock().views.self_test == SelfTest::NotRun {
        drop(engine.open()?);
        reserve(engine)?;
        verdict(engine, true)?;
    }
    Ok(engine.lock().views.self_test)
}

/// Whether all known streams are known to be idle. Streams that may be captured at any time are not queried,
/// because the query would invalidate the capture.
fn are_streams_idle(engine: &Engine) -> Result<bool, Error> {
    if engine.may_capture() {
        return Ok(false);
    }
    let holders: Vec<Holder> = {
        let heap = engine.lock();
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
                    idle => idle.map_err(|e| engine.error_in(stream.context(), e))?,
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
pub(crate) fn may_stitch(engine: &Engine) -> Result<bool, Error> {
    match verdict(engine, false) {
        Ok(usable) => Ok(usable),
        // No memory for the test; growth may still succeed.
        Err(Error::Driver(error)) if error.is_out_of_memory() => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether a stitch may continue. Tests the device if it has not been tested, which takes a few milliseconds once
/// per device and process. Without memory for the test the stitch continues untested, and the next one tries again;
/// while a stream is capturing, nothing is stitched.
fn verdict(engine: &Engine, asked: bool) -> Result<bool, Error> {
    if !engine.views.required {
        return Ok(true);
    }
    let known = engine.lock().views.self_test;
    if known != SelfTest::NotRun {
        return Ok(known != SelfTest::Failed);
    }
    match contexts::refuse_captures(engine, std::slice::from_ref(&engine.context), false) {
        Ok(()) => {}
        Err(Error::Capturing { .. }) => return Ok(false),
        Err(error) => return Err(error),
    }
    if !finish(engine, false)?.is_over {
        return Ok(false);
    }
    let with_kernels = asked || are_streams_idle(engine)?;
    let Some(good) = test(engine, with_kernels)? else {
        return Ok(true);
    };
    engine.driver().set_aliasing(engine.device.ordinal(), good);
    if !good {
        log::warn!(
            "device {} does not keep memory coherent between two mappings: views are disabled",
            engine.device.ordinal()
        );
    }
    set_result(engine, good);
    Ok(good)
}

/// Provides addresses for the test's memory.
fn reserve(engine: &Engine) -> Result<(), Error> {
    for space in [SpaceId::Large, SpaceId::Views] {
        if !engine.lock().extents.has_addresses(space) {
            device::reserve_span(engine, space, PHYSICAL_GRANULE)?;
        }
    }
    Ok(())
}

/// Runs the test on its own memory. `None` if there is no memory for it.
fn test(engine: &Engine, with_kernels: bool) -> Result<Option<bool>, Error> {
    let want = Want {
        space: SpaceId::Large,
        // The memory belongs to no stream before and after.
        stream: 0,
        granules: (PHYSICAL_GRANULE / GRANULE) as u32,
        align: 1,
        requested: PHYSICAL_GRANULE,
        single: true,
        whole: false,
        views: true,
    };
    reserve(engine)?;
    let Some(stitch) = stitch::plan_test(&mut engine.lock(), &want) else {
        return Ok(None);
    };
    let sides = [stitch.fresh.as_ref().map_or(0, |f| f.addr), stitch.site.at];
    let maker = engine.maker();
    match commit::map(&maker, &stitch) {
        Ok(handles) => {
            let block = {
                let mut heap = engine.lock();
                stitch::commit(&mut heap, &want, stitch, &handles)
            };
            drop(maker);
            let result = test_both_mappings(engine, sides, with_kernels);
            match result {
                Ok(done) => {
                    end(engine, block, sides)?;
                    done.map(Some).map_err(|e| engine.error(e))
                }
                // Its work may still be running.
                Err((error, work)) => {
                    let memory = Some((block, sides));
                    let unfinished = Unfinished { work, memory };
                    engine.views.unfinished.lock().push(unfinished);
                    Err(engine.error(error))
                }
            }
        }
        Err(failed) => {
            let mut heap = engine.lock();
            let error = stitch::revert_failed(&mut heap, &want, stitch, failed);
            drop(heap);
            if error.is_out_of_memory() {
                return Ok(None);
            }
            Err(engine.error(error))
        }
    }
}

/// Runs the test on its own stream. The outer error means that the work could not be waited for.
fn test_both_mappings(
    engine: &Engine,
    sides: [u64; 2],
    with_kernels: bool,
) -> Result<Result<bool, DriverError>, (DriverError, Work)> {
    // High priority puts the test before the work that keeps the device busy.
    let stream = match Stream::with_priority(&engine.context, i32::MIN) {
        Ok(stream) => stream,
        Err(error) => return Ok(Err(error)),
    };
    let entered = match engine.context.enter() {
        Ok(entered) => entered,
        Err(error) => return Ok(Err(error)),
    };
    // Loading may wait for all work of the context, which in turn may wait for this thread. A device that cannot load
    // the kernels is tested without them.
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
    let rounds = Rounds {
        entered: &entered,
        stream: stream.raw(),
        sides,
        kernels: kernels.as_ref(),
    };
    let result = rounds.run();
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
pub(crate) fn finish(engine: &Engine, wait: bool) -> Result<Finished, Error> {
    let unfinished = std::mem::take(&mut *engine.views.unfinished.lock());
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
                    end(engine, block, sides)
                }
                Ok(false) => Ok(0),
                Err(error) if wait || error.is_fatal() => Err(engine.error(error)),
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
        engine.views.unfinished.lock().append(&mut left);
    }
    failed.map_or(Ok(finished), Err)
}

/// Unmaps and releases the memory of a test whose work is complete.
fn end(engine: &Engine, block: u32, sides: [u64; 2]) -> Result<u64, Error> {
    let release = stitch::end_test(&mut engine.lock(), block, sides[0]);
    let evicted = release::evict(engine, &[sides[1]]);
    let Some(release) = release else {
        return evicted.map(|()| 0);
    };
    if let Err(error) = evicted {
        // It is still mapped in the view: free memory, with an idle view over it.
        plan::release::revert(&mut engine.lock(), release);
        return Err(error);
    }
    release::release(engine, vec![release])
}
