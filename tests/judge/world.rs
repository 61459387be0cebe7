//! What a program has, and its steps on streams.

mod streams;

use std::cell::Cell;
use std::collections::HashSet;
use std::ffi::c_uint;
use std::sync::{Arc, Mutex};

use cualloc::Error;
use cualloc::allocator::{Allocator, Block, Config, Profile, RangeGuard};
use cualloc::driver::sys::*;
use cualloc::driver::{Context, Driver, Stream};
use cualloc::sim::{Mode, SimConfig, SimDevice, Simulator};

use super::captures::Helper;
use super::layers::{Layered, Layers};
use super::program::{Act, Setup, Step};
use super::rng::Rng;
use super::table::{self, Checker, own};

/// A stream of the program.
pub struct Lane {
    /// None for a handle that only the program knows.
    pub stream: Option<Stream>,
    pub raw: usize,
    pub place: usize,
    pub special: bool,
    /// Turned at each retirement: blocks from before it must not be used on it any more.
    pub epoch: u32,
    /// The program may still use it.
    pub alive: bool,
    /// Who captures on it.
    pub capturing: Option<Who>,
    /// Its capture could not be saved from the allocator's questions.
    pub doomed: bool,
    /// Allocators that were told of it by its handle, and as a `Stream`.
    pub raw_in: HashSet<usize>,
    pub owned_in: HashSet<usize>,
    /// Allocators that surely keep it.
    pub kept_in: HashSet<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Who {
    Main,
    Helper,
}

pub enum Kind {
    Block(Block),
    Raw,
    Layered(Layered),
}

/// A live block.
pub struct Held {
    pub slot: usize,
    /// Its allocator has no handle any more.
    pub orphan: bool,
    pub ptr: u64,
    pub bytes: u64,
    pub home: usize,
    pub epoch: u32,
    /// The stream that used it last.
    pub last: usize,
    /// Streams that were recorded on it.
    pub recorded: Vec<usize>,
    /// A stream that used it, which could neither be recorded nor waited for.
    pub due: Option<usize>,
    pub kind: Kind,
}

pub struct Slot {
    pub allocator: Allocator,
    pub place: usize,
    pub layers: Layers,
    pub hooked: bool,
}

pub struct Place {
    pub context: Context,
    pub raw: usize,
    pub device: usize,
    /// Ours to destroy.
    pub foreign: bool,
    pub alive: bool,
}

pub type Stash = Arc<Mutex<Vec<Held>>>;

pub struct World {
    pub setup: Setup,
    pub sim: Simulator,
    pub driver: Driver,
    pub checker: Arc<Checker>,
    pub places: Vec<Place>,
    pub slots: Vec<Slot>,
    pub lanes: Vec<Lane>,
    pub held: Vec<Held>,
    pub guards: Vec<(usize, u64, RangeGuard)>,
    pub stash: Stash,
    pub helper: Option<Helper>,
    /// A capture was begun at all, or may be.
    pub captured: bool,
    /// By an interlude, on this lane.
    pub begun: Arc<Mutex<Option<usize>>>,
    /// The captures that began inside a call of this step.
    pub fresh: Vec<usize>,
    /// An allocator lost its last handle: the new one in its place does not know the streams of its blocks.
    pub abandoned: bool,
    pub current: Option<usize>,
    pub violation: Cell<Option<String>>,
}

/// Bytes of memory of each device.
pub const MEMORY: u64 = 4 << 30;

pub type Done = Result<(), String>;

impl World {
    pub fn new(setup: &Setup) -> Result<World, String> {
        let device = SimDevice {
            memory: MEMORY,
            ..SimDevice::default()
        };
        let config = SimConfig {
            devices: vec![device; setup.devices],
            mode: setup.lag.map_or(Mode::Manual, Mode::Lag),
            broken_aliasing: setup.broken_aliasing,
            ..SimConfig::default()
        };
        let sim = Simulator::new(config).map_err(|e| e.to_string())?;
        let checker = Checker::new(sim.functions(), setup.seed);
        checker.tracker().frees_may_wait = setup.frees_may_wait;
        checker.enter();
        // SAFETY: the simulator's functions, behind ones of the same types.
        let driver = unsafe { Driver::from_functions(table::install(sim.functions())) }
            .map_err(|e| e.to_string())?;
        let mut world = World {
            setup: setup.clone(),
            sim,
            driver,
            checker,
            places: Vec::new(),
            slots: Vec::new(),
            lanes: Vec::new(),
            held: Vec::new(),
            guards: Vec::new(),
            stash: Stash::default(),
            helper: None,
            captured: false,
            begun: Arc::default(),
            fresh: Vec::new(),
            abandoned: false,
            current: None,
            violation: Cell::new(None),
        };
        world.furnish().map_err(|e| format!("at the start: {e}"))?;
        Ok(world)
    }

    fn furnish(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        for ordinal in 0..self.setup.devices {
            let context = self.driver.context(ordinal)?;
            self.add_place(context, ordinal, false);
        }
        if self.setup.contexts {
            self.add_context(0)?;
        }
        for index in 0..self.setup.allocators {
            let place = index % self.setup.devices;
            self.add_slot(place)?;
        }
        self.become_current(0);
        for index in 0..self.setup.streams {
            let place = index % self.places.len();
            if self.places[place].foreign {
                self.add_raw(place, 1);
                continue;
            }
            let stream = Stream::new(&self.places[place].context)?;
            self.add_stream(stream, place, false);
        }
        if self.setup.specials {
            for place in 0..self.setup.devices {
                for raw in 0..3 {
                    self.add_lane(None, raw, place, true);
                }
                let context = self.places[place].context.clone();
                let stream = Stream::legacy(&context);
                self.add_stream(stream, place, true);
            }
        }
        Ok(())
    }

    fn add_place(&mut self, context: Context, device: usize, foreign: bool) {
        self.places.push(Place {
            raw: context.raw() as usize,
            context,
            device,
            foreign,
            alive: true,
        });
    }

    /// A context of other code on a device.
    pub fn add_context(&mut self, device: usize) -> Result<(), Box<dyn std::error::Error>> {
        let raw = self.sim.create_context(device).ok_or("no such device")?;
        // SAFETY: live until `LeaveContext`, after which nothing made of it is used.
        let context = unsafe { Context::from_raw(&self.driver, raw) }?;
        self.add_place(context, device, true);
        Ok(())
    }

    pub fn config(&self) -> Config {
        let setup = &self.setup;
        let mut config = Config::new()
            .policy(setup.policy)
            .limit(setup.limit)
            .waits(setup.waits)
            .views(setup.views)
            .capture_checks(setup.capture_checks);
        if setup.dense {
            config = config.profile(Profile::Dense);
        }
        if let Some(handle) = setup.handle {
            config = config.handle(handle);
        }
        config
    }

    fn add_slot(&mut self, place: usize) -> Result<(), Error> {
        let allocator = Allocator::with_config(&self.places[place].context, self.config())?;
        self.slots.push(Slot {
            allocator,
            place,
            layers: Layers::default(),
            hooked: false,
        });
        Ok(())
    }

    pub fn add_stream(&mut self, stream: Stream, place: usize, special: bool) {
        let raw = stream.raw() as usize;
        self.add_lane(Some(stream), raw, place, special);
    }

    pub fn add_lane(&mut self, stream: Option<Stream>, raw: usize, place: usize, special: bool) {
        self.lanes.push(Lane {
            stream,
            raw,
            place,
            special,
            epoch: 0,
            alive: true,
            capturing: None,
            doomed: false,
            raw_in: HashSet::new(),
            owned_in: HashSet::new(),
            kept_in: HashSet::new(),
        });
    }

    /// Nothing was made to fail, and nothing captures: no call has a reason to fail.
    pub fn calm(&self) -> bool {
        !self.checker.is_failing() && !self.captured
    }

    // ---- own calls -------------------------------------------------------------------------

    pub fn become_current(&self, place: usize) {
        let raw = self.places[place].raw;
        // SAFETY: a context that is alive.
        let _ = own(|f| unsafe { f.cuCtxSetCurrent.unwrap()(raw as CUcontext) });
    }

    /// The context that the program has current while it calls the allocator of a slot.
    pub fn before_call(&self, slot: usize, lane: usize) {
        let place = match self.current {
            Some(place) if !self.lanes[lane].special && self.places[place].alive => place,
            _ => self.slots[slot].place,
        };
        self.become_current(place);
    }

    /// Submits work to a stream. The driver may refuse it.
    pub fn work_on(&self, lane: usize, ptr: u64, bytes: u64, how: u64) -> bool {
        self.become_current(self.lanes[lane].place);
        let stream = self.lanes[lane].raw as CUstream;
        own(|f| {
            // SAFETY: memory and stream are live.
            let code = unsafe {
                match how % 3 {
                    0 if bytes >= 4 && ptr.is_multiple_of(4) => {
                        f.cuMemsetD32Async.unwrap()(ptr, how as c_uint, bytes as usize / 4, stream)
                    }
                    1 if bytes >= 512 => {
                        let half = bytes as usize / 2;
                        let source = ptr + half as u64;
                        f.cuMemcpyDtoDAsync_v2.unwrap()(ptr, source, half, stream)
                    }
                    _ => f.cuMemsetD8Async.unwrap()(ptr, how as u8, bytes as usize, stream),
                }
            };
            code == CUresult::CUDA_SUCCESS
        })
    }

    /// Orders later work of a stream after the work of another one.
    pub fn order(&self, from: usize, to: usize) -> bool {
        if from == to {
            return true;
        }
        if !self.usable(from) || !self.usable(to) {
            return false;
        }
        self.become_current(self.lanes[from].place);
        let (source, target) = (self.lanes[from].raw, self.lanes[to].raw);
        let mut event: CUevent = std::ptr::null_mut();
        own(|f| {
            let good = CUresult::CUDA_SUCCESS;
            // SAFETY: streams that are alive, and an event of ours.
            unsafe {
                if f.cuEventCreate.unwrap()(&mut event, 2) != good {
                    return false;
                }
                let recorded = f.cuEventRecord.unwrap()(event, source as CUstream) == good;
                self.become_current(self.lanes[to].place);
                let waits =
                    recorded && f.cuStreamWaitEvent.unwrap()(target as CUstream, event, 0) == good;
                let _ = f.cuEventDestroy_v2.unwrap()(event);
                waits
            }
        })
    }

    /// Waits for a stream.
    pub fn wait_for(&self, lane: usize) -> bool {
        self.become_current(self.lanes[lane].place);
        let raw = self.lanes[lane].raw;
        own(|f| {
            let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
            // SAFETY: a live stream; the mode is a local.
            unsafe {
                let _ = f.cuThreadExchangeStreamCaptureMode.unwrap()(&mut mode);
                let code = f.cuStreamSynchronize.unwrap()(raw as CUstream);
                let _ = f.cuThreadExchangeStreamCaptureMode.unwrap()(&mut mode);
                code == CUresult::CUDA_SUCCESS
            }
        })
    }

    /// Whether the program may give a stream work now.
    pub fn usable(&self, lane: usize) -> bool {
        let it = &self.lanes[lane];
        if !it.alive || it.capturing.is_some() || !self.places[it.place].alive {
            return false;
        }
        // The legacy stream is refused while a blocking one captures.
        let captures = |other: &Lane| other.capturing.is_some() && other.place == it.place;
        !(it.special && self.lanes.iter().any(captures))
    }

    /// A stream, of those that the program may use with an allocator.
    pub fn any_lane(&self, slot: usize, n: u32) -> Option<usize> {
        let place = &self.places[self.slots[slot].place];
        let fits = |lane: &Lane| {
            let own = &self.places[lane.place];
            let here = lane.place == self.slots[slot].place;
            lane.alive && own.alive && own.device == place.device && (here || !lane.special)
        };
        let lanes: Vec<usize> = (0..self.lanes.len())
            .filter(|&index| fits(&self.lanes[index]))
            .collect();
        (!lanes.is_empty()).then(|| lanes[n as usize % lanes.len()])
    }

    /// The judge's number of a stream.
    pub fn number(&self, slot: usize, lane: usize) -> usize {
        let it = &self.lanes[lane];
        let mut tracker = self.checker.tracker();
        match it.special {
            true => tracker.default_of(self.places[self.slots[slot].place].raw, it.raw == 2),
            false => tracker.number(it.raw as CUstream),
        }
    }

    // ---- steps -----------------------------------------------------------------------------

    pub fn step(&mut self, step: Step) -> Done {
        let (Step { act, a, b, c }, mut rng) = (step, step.rng());
        self.notice_begun();
        match act {
            Act::Work => self.work(a, &mut rng),
            Act::WorkElsewhere => self.work_elsewhere(a, b, &mut rng)?,
            Act::Complete => self.complete(a, &mut rng),
            Act::Observe => self.observe(a, &mut rng),
            Act::NewStream => self.new_stream(a, &mut rng),
            Act::Retire => self.retire(a as usize % self.lanes.len())?,
            Act::Leave => self.leave(a as usize % self.lanes.len())?,
            Act::Current => self.current = Some(a as usize % self.places.len()),
            Act::LeaveContext => self.leave_context()?,
            Act::BeginCapture => self.begin_capture(a, b),
            Act::EndCapture => self.end_capture(a)?,
            Act::CaptureInside => self.capture_inside(a, b, c),
            Act::OtherInside => self.act_inside(a, b, c),
            Act::Buffer
            | Act::BufferWork
            | Act::Column
            | Act::Pooled
            | Act::Lease
            | Act::Resource
            | Act::Native
            | Act::Exchange
            | Act::Share
            | Act::Drop => self.layer(step, &mut rng)?,
            _ => self.request(step, &mut rng)?,
        }
        self.spares_captures()?;
        match self
            .violation
            .take()
            .or_else(|| self.checker.tracker().take_violation())
        {
            Some(what) => Err(what),
            None => Ok(()),
        }
    }

    /// Work on a block's own stream.
    fn work(&mut self, a: u32, rng: &mut Rng) {
        if self.held.is_empty() {
            return;
        }
        let index = a as usize % self.held.len();
        let held = &self.held[index];
        let lane = held.home;
        if held.orphan
            || held.epoch != self.lanes[lane].epoch
            || !self.usable(lane)
            || matches!(&held.kind, Kind::Layered(it) if !it.free_for_all())
            || !self.order(held.last, lane)
        {
            return;
        }
        let (ptr, bytes) = part(held, rng);
        if self.work_on(lane, ptr, bytes, rng.next()) {
            self.held[index].last = lane;
        }
    }

    /// Work on another stream, which is recorded.
    fn work_elsewhere(&mut self, a: u32, b: u32, rng: &mut Rng) -> Done {
        if self.held.is_empty() {
            return Ok(());
        }
        let index = a as usize % self.held.len();
        let held = &self.held[index];
        if held.orphan || held.due.is_some() || matches!(held.kind, Kind::Layered(_)) {
            return Ok(());
        }
        let slot = held.slot;
        let Some(lane) = self.any_lane(slot, b) else {
            return Ok(());
        };
        let home = held.home;
        let unnamed = matches!(held.kind, Kind::Raw) && self.lanes[lane].stream.is_some();
        if unnamed && !self.setup.mixed {
            return Ok(());
        }
        if lane == home || !self.usable(lane) || !self.order(held.last, lane) {
            return Ok(());
        }
        let (ptr, bytes) = part(held, rng);
        let early = rng.chance(30);
        if early && self.record(index, lane, false, rng).is_err() {
            return Ok(());
        }
        if !self.work_on(lane, ptr, bytes, rng.next()) {
            return Ok(());
        }
        self.held[index].last = lane;
        if early {
            return Ok(());
        }
        let whole = rng.chance(50);
        if let Err(error) = self.record(index, lane, whole, rng) {
            if self.calm() {
                return Err(format!("a use could not be recorded: {error:?}"));
            }
            // It must not be used from here on, so it ends now.
            self.held[index].due = Some(lane);
            self.held[index].last = lane;
            self.is_over(index);
        }
        Ok(())
    }

    /// Waits for a use that could not be recorded. Until it is over the block must not be freed.
    pub fn is_over(&mut self, index: usize) -> bool {
        self.notice_begun();
        let Some(lane) = self.held[index].due else {
            return true;
        };
        let over = self.usable(lane) && self.wait_for(lane);
        if over {
            self.held[index].due = None;
        }
        over
    }

    fn record(
        &mut self,
        index: usize,
        lane: usize,
        past: bool,
        rng: &mut Rng,
    ) -> Result<(), Error> {
        let held = &self.held[index];
        self.before_call(held.slot, lane);
        let it = &self.lanes[lane];
        let raw = it.raw as CUstream;
        let allocator = &self.slots[held.slot].allocator;
        let (named, result) = match (&held.kind, &it.stream) {
            (Kind::Block(block), Some(stream)) if !self.setup.mixed || rng.chance(80) => {
                let result = match past {
                    true => block.record_use(stream),
                    false => block.record_stream(stream),
                };
                (false, result)
            }
            // SAFETY: block and stream are live, and the stream is until it was retired.
            _ => unsafe {
                let result = match past {
                    true => allocator.record_use_raw(held.ptr, raw),
                    false => allocator.record_stream_raw(held.ptr, raw),
                };
                (true, result)
            },
        };
        // Also where it was refused the stream may be known from now on.
        self.told(held.slot, lane, !named);
        result?;
        self.held[index].recorded.push(lane);
        Ok(())
    }

    fn complete(&mut self, a: u32, rng: &mut Rng) {
        if self.setup.lag.is_some() {
            self.sim.advance_row();
            return;
        }
        if a.is_multiple_of(16) {
            return self.sim.complete_all();
        }
        for _ in 0..1 + a % 4 {
            let ready = self.sim.ready_streams();
            if ready.is_empty() {
                return;
            }
            self.sim.complete_stream(rng.pick(&ready), 1 + rng.index(6));
        }
    }

    /// The program asks for a stream's work, or waits for it.
    fn observe(&mut self, a: u32, rng: &mut Rng) {
        let lane = a as usize % self.lanes.len();
        if self.usable(lane) && (rng.chance(50) || !self.captured) {
            self.wait_for(lane);
        }
    }
}

/// A part of a block.
pub fn part(held: &Held, rng: &mut Rng) -> (u64, u64) {
    if held.bytes < 1024 || rng.chance(60) {
        return (held.ptr, held.bytes);
    }
    let from = rng.below(held.bytes / 512) * 512;
    let bytes = 1 + rng.below(held.bytes - from);
    (held.ptr + from, bytes)
}
