//! Programs of several threads: blocks change hands, streams are retired beside frees.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use cualloc::allocator::{Allocator, Block, Config, DebugModes, Request};
use cualloc::driver::sys::*;
use cualloc::driver::{Context, Driver, Stream};
use cualloc::error::StreamMisuse;
use cualloc::exchange::{DType, Tensor};
use cualloc::sim::{Mode, SimConfig, Simulator};
use cualloc::{DeviceBuffer, Error, Policy};

use super::end::after;
use super::program::{Setup, size};
use super::rng::Rng;
use super::table::{self, Checker, own};
use super::world::Done;

/// A block on its way to another thread, which may use it after the event.
struct Item {
    block: Block,
    event: usize,
}

struct Own {
    block: Block,
    lane: usize,
    epoch: u32,
}

enum Name {
    Owned(Stream),
    Raw(usize),
}

struct Lane {
    name: Name,
    epoch: u32,
}

impl Lane {
    fn raw(&self) -> CUstream {
        match &self.name {
            Name::Owned(stream) => stream.raw(),
            Name::Raw(raw) => *raw as CUstream,
        }
    }
}

struct Scene<'a> {
    sim: &'a Simulator,
    allocator: &'a Allocator,
    context: &'a Context,
    checker: &'a std::sync::Arc<Checker>,
    market: &'a Mutex<Vec<Item>>,
    commons: &'a [Stream],
    stop: &'a AtomicBool,
    beside: bool,
    faulty: bool,
    /// Any thread may close the allocator.
    closing: bool,
    trims: Trims,
}

/// Trims begun and ended so far: a close beside one may find memory in its hands.
#[derive(Default)]
struct Trims {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Trims {
    fn around(&self, trim: impl FnOnce()) {
        self.begun.fetch_add(1, Ordering::SeqCst);
        trim();
        self.ended.fetch_add(1, Ordering::SeqCst);
    }

    /// What `act` comes to, and whether a trim of another thread was under way meanwhile.
    fn beside<T>(&self, act: impl FnOnce() -> T) -> (T, bool) {
        let ended = self.ended.load(Ordering::SeqCst);
        let done = act();
        (done, self.begun.load(Ordering::SeqCst) > ended)
    }
}

pub fn attempt(
    setup: &Setup,
    steps: usize,
    without: &dyn Fn(&str) -> bool,
    calls: &AtomicU64,
) -> Done {
    let mut rng = Rng::new(setup.seed);
    let mut config = SimConfig::with_devices(1, 4 << 30);
    config.mode = match rng.chance(50) {
        true => Mode::Manual,
        false => Mode::Lag(1 + rng.below(20)),
    };
    let sim = Simulator::new(config).map_err(|e| e.to_string())?;
    let checker = Checker::new(sim.functions(), setup.seed);
    checker.tracker().frees_may_wait = setup.frees_may_wait;
    checker.enter();
    let limit = rng.chance(60).then(|| (12 + rng.below(60)) << 20);
    let mut wish = Config::new()
        .policy(setup.policy)
        .limit(limit)
        .views(setup.views);
    if rng.chance(25) && !without("debug") {
        let modes = DebugModes::new().guard(true).poison(rng.chance(50));
        wish = wish.debug(modes.quarantine(rng.pick(&[0, 1 << 20])));
    }
    let made = || -> Result<_, Box<dyn std::error::Error>> {
        // SAFETY: the simulator's functions, behind ones of the same types.
        let driver = unsafe { Driver::from_functions(table::install(sim.functions())) }?;
        let context = driver.context(0)?;
        let allocator = Allocator::with_config(&context, wish)?;
        let commons = [Stream::new(&context)?, Stream::new(&context)?];
        Ok((context, allocator, commons))
    };
    let (context, allocator, commons) = made().map_err(|e| e.to_string())?;
    let market = Mutex::new(Vec::new());
    let stop = AtomicBool::new(false);
    let faulty = rng.chance(25) && !without("thread-faults");
    if faulty {
        let name = rng.pick(&[
            "cuStreamWaitEvent",
            "cuEventRecord",
            "cuEventQuery",
            "cuMemCreate",
            "cuStreamSynchronize",
        ]);
        checker.fail(Some(table::Fault {
            name,
            permille: rng.pick(&[20, 100, 300]),
            code: CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            executed: !without("executed") && (without("refused") || rng.chance(50)),
        }));
    }
    let scene = Scene {
        sim: &sim,
        allocator: &allocator,
        context: &context,
        checker: &checker,
        market: &market,
        commons: &commons,
        stop: &stop,
        beside: rng.chance(50) && !without("retire-beside"),
        faulty,
        closing: rng.chance(30) && !without("close-beside"),
        trims: Trims::default(),
    };
    let threads = 2 + rng.index(3);
    let ends: Vec<Done> = std::thread::scope(|scope| {
        let run = |n: usize| {
            let scene = &scene;
            let seed = setup.seed ^ (n as u64) << 48;
            scope.spawn(move || {
                scene.checker.enter();
                let end = scene.play(Rng::new(seed), steps);
                if end.is_err() {
                    scene.stop.store(true, Ordering::Relaxed);
                }
                Checker::leave();
                end
            })
        };
        let all: Vec<_> = (0..threads).map(run).collect();
        let end = |thread: std::thread::ScopedJoinHandle<'_, Done>| {
            thread
                .join()
                .unwrap_or_else(|_| Err("a thread panicked".to_owned()))
        };
        all.into_iter().map(end).collect()
    });
    checker.fail(None);
    calls.fetch_add(checker.calls.load(Ordering::Relaxed), Ordering::Relaxed);
    for end in ends {
        end?;
    }
    let items = std::mem::take(&mut *market.lock().unwrap());
    for item in items {
        scene.free(item.block);
        scene.forget(item.event);
    }
    sim.complete_all();
    allocator.check().map_err(|e| e.to_string())?;
    for _ in 0..2 {
        let trimmed = allocator.trim(0);
        scene.said("trim", trimmed.map(drop))?;
        sim.complete_all();
    }
    scene.said("close", allocator.close())?;
    drop(allocator);
    drop((commons, context));
    checker.tracker().take_violation().map_or(Ok(()), Err)?;
    after(&sim, &checker)
}

/// Which policy a program of threads has, for what is printed.
pub fn describe(setup: &Setup) -> String {
    let policy = match setup.policy {
        Policy::Classic => "classic",
        _ => "packed",
    };
    format!("threads, {policy}, seed {:#x}", setup.seed)
}

impl Scene<'_> {
    /// Whether an answer is right that nothing but the end of the allocator may make a refusal.
    fn said(&self, what: &str, answer: Result<(), Error>) -> Done {
        match answer {
            Err(Error::Closed) if self.closing => Ok(()),
            answer => answer.map_err(|error| format!("{what}: {error:?}")),
        }
    }

    /// Closes the allocator, which must refuse that while a block is live, and may refuse it while a trim is releasing
    /// memory; the close at the end of the program must find that memory released.
    fn close(&self) -> Done {
        let (answer, beside_a_trim) = self.trims.beside(|| self.allocator.close());
        match answer {
            Err(Error::InUse { .. }) => Ok(()),
            Err(Error::StillHeld { .. }) if beside_a_trim => Ok(()),
            Err(_) if self.faulty => Ok(()),
            answer => self.said("close beside others", answer),
        }
    }

    fn current(&self) {
        let raw = self.context.raw();
        // SAFETY: a context that is alive.
        let _ = own(|f| unsafe { f.cuCtxSetCurrent.unwrap()(raw) });
    }

    fn free(&self, block: Block) {
        self.checker.tracker().freed(block.ptr());
        drop(block);
    }

    fn forget(&self, event: usize) {
        // SAFETY: ours.
        let _ = own(|f| unsafe { f.cuEventDestroy_v2.unwrap()(event as CUevent) });
    }

    fn work(&self, ptr: u64, bytes: usize, stream: CUstream) {
        // SAFETY: memory and stream are live.
        let _ = own(|f| unsafe { f.cuMemsetD8Async.unwrap()(ptr, 5, bytes, stream) });
    }

    fn violation(&self) -> Done {
        if self.stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.checker.tracker().take_violation().map_or(Ok(()), Err)
    }

    fn told(&self, ptr: u64, bytes: usize, stream: CUstream) {
        let mut tracker = self.checker.tracker();
        let number = tracker.number(stream);
        tracker.handed_out(ptr, bytes as u64, number);
    }

    fn lane(&self, rng: &mut Rng) -> Lane {
        let owned = rng.chance(40);
        let name = match Stream::new(self.context) {
            Ok(stream) if owned => Name::Owned(stream),
            _ => {
                self.current();
                let mut raw: CUstream = std::ptr::null_mut();
                // SAFETY: a context is current.
                let _ = own(|f| unsafe { f.cuStreamCreate.unwrap()(&mut raw, 1) });
                Name::Raw(raw as usize)
            }
        };
        Lane { name, epoch: 0 }
    }

    fn play(&self, mut rng: Rng, steps: usize) -> Done {
        self.current();
        let mut lanes = [self.lane(&mut rng), self.lane(&mut rng)];
        let mut mine: Vec<Own> = Vec::new();
        for _ in 0..steps {
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
            if self.closing && rng.below(100) == 0 {
                self.close()?;
            }
            let at = rng.index(lanes.len());
            match rng.below(100) {
                0..30 => self.allocate(&lanes, at, &mut mine, &mut rng)?,
                30..45 => {
                    if let Some(own) = mine.get(rng.index(mine.len()))
                        && own.epoch == lanes[own.lane].epoch
                    {
                        let (ptr, bytes) = (own.block.ptr(), own.block.requested());
                        self.work(ptr, bytes, lanes[own.lane].raw());
                    }
                }
                45..60 if !mine.is_empty() => {
                    let own = mine.swap_remove(rng.index(mine.len()));
                    self.free(own.block);
                }
                60..70 if !mine.is_empty() => {
                    let own = mine.swap_remove(rng.index(mine.len()));
                    match own.epoch == lanes[own.lane].epoch {
                        true => self.offer(own.block, lanes[own.lane].raw()),
                        false => self.free(own.block),
                    }
                }
                70..82 => self.take(&lanes[at], &mut rng)?,
                82..86 => {
                    self.retire(&mut lanes[at], &mut rng)?;
                }
                86..88 => {
                    let keep = rng.below(64 << 20);
                    self.trims.around(|| match keep % 2 {
                        0 => drop(self.allocator.trim(keep)),
                        _ => drop(self.allocator.empty_cache()),
                    });
                }
                88..92 => self.advance(&mut rng),
                92..94 => {
                    let bytes = 4 * (1 + rng.index(1 << 20));
                    self.layer(bytes, &mut rng)?;
                }
                94 => self.look(&mut rng)?,
                95..97 if self.beside => {
                    let stream = rng.pick(&[0, 1]);
                    let _ = self.allocator.retire(&self.commons[stream]);
                }
                _ => {
                    let bytes = 4 * (1 + rng.index(16 << 10));
                    self.layer(bytes, &mut rng)?;
                }
            }
            self.violation()?;
        }
        for own in mine {
            self.free(own.block);
        }
        if self.closing {
            self.close()?;
        }
        for lane in &mut lanes {
            self.quit(lane)?;
        }
        self.violation()
    }

    /// Calls that concern the whole heap.
    fn look(&self, rng: &mut Rng) -> Done {
        match rng.below(4) {
            0 => drop(self.allocator.snapshot()),
            // In a debug mode it reads memory.
            1 => match self.allocator.check() {
                Err(Error::Driver(_)) if self.faulty => {}
                checked => checked.map_err(|e| format!("the heap is wrong: {e}"))?,
            },
            2 => self.allocator.set_limit(rng.chance(30).then_some(48 << 20)),
            // A call that was made to fail, or a close by another thread, refuses it.
            _ => drop(self.allocator.synchronize()),
        }
        Ok(())
    }

    fn advance(&self, rng: &mut Rng) {
        self.sim.advance_row();
        let ready = self.sim.ready_streams();
        if !ready.is_empty() {
            self.sim.complete_stream(rng.pick(&ready), 1 + rng.index(8));
        }
    }

    fn allocate(&self, lanes: &[Lane], at: usize, mine: &mut Vec<Own>, rng: &mut Rng) -> Done {
        if mine.len() > 12 {
            return Ok(());
        }
        let bytes = size(rng.next() as u32, rng.next() as u32, 12 << 20);
        let alignment = 1 << rng.pick(&[0, 0, 16, 20, 21]);
        let raw = lanes[at].raw();
        let request = Request::new(bytes).align(alignment);
        let request = match rng.below(20) {
            0 => request.single_handle().views(rng.chance(50)),
            1 => request.cached_only(),
            _ => request,
        };
        let place = |stream: &Stream| self.allocator.allocate_with(request, stream);
        let made = match &lanes[at].name {
            Name::Owned(stream) => place(stream),
            // SAFETY: the stream is retired before it is destroyed.
            Name::Raw(_) => match unsafe { Stream::from_raw(self.context, raw) } {
                Ok(stream) => place(&stream),
                Err(_) => return Ok(()),
            },
        };
        match made {
            Ok(block) => {
                self.told(block.ptr(), bytes, raw);
                self.work(block.ptr(), bytes, raw);
                let epoch = lanes[at].epoch;
                mine.push(Own {
                    block,
                    lane: at,
                    epoch,
                });
                Ok(())
            }
            Err(Error::NotCached) => Ok(()),
            Err(error) if error.is_out_of_memory() || self.faulty => Ok(()),
            Err(Error::Closed) if self.closing => Ok(()),
            Err(error) => Err(format!("an allocation was refused: {error:?}")),
        }
    }

    /// Another thread may have the block, after what its stream was given so far.
    fn offer(&self, block: Block, raw: CUstream) {
        let mut event: CUevent = std::ptr::null_mut();
        self.current();
        let _ = own(|f| {
            // SAFETY: a live stream; the event is ours.
            unsafe {
                let _ = f.cuEventCreate.unwrap()(&mut event, 2);
                f.cuEventRecord.unwrap()(event, raw)
            }
        });
        self.market.lock().unwrap().push(Item {
            block,
            event: event as usize,
        });
    }

    fn take(&self, lane: &Lane, rng: &mut Rng) -> Done {
        let item = {
            let mut market = self.market.lock().unwrap();
            match market.is_empty() {
                true => return Ok(()),
                false => {
                    let at = rng.index(market.len());
                    market.swap_remove(at)
                }
            }
        };
        if rng.chance(60) {
            let raw = lane.raw();
            // SAFETY: live stream and event.
            let _ = own(|f| unsafe { f.cuStreamWaitEvent.unwrap()(raw, item.event as CUevent, 0) });
            self.work(item.block.ptr(), item.block.requested(), raw);
            let recorded = match &lane.name {
                Name::Owned(stream) if rng.chance(50) => item.block.record_stream(stream),
                Name::Owned(stream) => item.block.record_use(stream),
                // SAFETY: the stream is retired before it is destroyed.
                Name::Raw(_) => unsafe { self.allocator.record_use_raw(item.block.ptr(), raw) },
            };
            if let Err(error) = recorded {
                if !self.faulty {
                    return Err(format!("a use was not recorded: {error:?}"));
                }
                // SAFETY: live.
                let _ = own(|f| unsafe { f.cuStreamSynchronize.unwrap()(raw) });
            }
        }
        self.forget(item.event);
        self.free(item.block);
        Ok(())
    }

    /// A stream goes, while others may free blocks of it; another takes its place.
    fn retire(&self, lane: &mut Lane, rng: &mut Rng) -> Done {
        let epoch = lane.epoch + 1;
        let new = self.lane(rng);
        if self.quit(lane)? {
            *lane = Lane { epoch, ..new };
        } else {
            lane.epoch = epoch;
            let mut new = new;
            self.quit(&mut new)?;
        }
        Ok(())
    }

    fn quit(&self, lane: &mut Lane) -> Result<bool, String> {
        let Name::Raw(raw) = lane.name else {
            return Ok(true);
        };
        let raw = raw as CUstream;
        // SAFETY: a live stream.
        let mut result = unsafe { self.allocator.retire_raw(raw) };
        if self.faulty {
            for _ in 0..200 {
                if result.is_ok() {
                    break;
                }
                // SAFETY: as above.
                result = unsafe { self.allocator.retire_raw(raw) };
            }
        }
        match result {
            Ok(()) | Err(Error::Stream(StreamMisuse::Unknown { .. })) => {}
            // One that is closed uses no stream.
            Err(Error::Closed) if self.closing => {}
            Err(_) if self.faulty => return Ok(false),
            Err(error) => return Err(format!("a stream could not be retired: {error:?}")),
        }
        self.current();
        // SAFETY: ours, and retired.
        let _ = own(|f| unsafe { f.cuStreamDestroy_v2.unwrap()(raw) });
        Ok(true)
    }

    /// Something that lives for a moment on a stream which all threads share.
    fn layer(&self, bytes: usize, rng: &mut Rng) -> Done {
        let stream = &self.commons[rng.index(2)];
        if rng.chance(50) {
            let made = DeviceBuffer::<u32>::zeroed(self.allocator, bytes / 4, stream);
            if let Ok(mut buffer) = made {
                let ptr = buffer.as_device_ptr();
                self.told(ptr, bytes, stream.raw());
                let _ = buffer.fill(7, &self.commons[rng.index(2)]);
                self.checker.tracker().freed(ptr);
                drop(buffer);
            }
        } else if let Ok(column) = Tensor::zeroed(self.allocator, DType::F32, &[bytes / 4], stream)
        {
            let ptr = column.ptr();
            self.told(ptr, bytes, stream.raw());
            self.checker.tracker().freed(ptr);
            drop(column);
        }
        Ok(())
    }
}
