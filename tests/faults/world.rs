//! The world in which a fault happens, and what holds in it at any time.

use cualloc::allocator::{BlockInfo, BlockState, SegmentInfo};
use cualloc::sim::Leaks;

use crate::common::prelude::*;
use crate::outside;

pub const MIB: usize = 1 << 20;

pub struct World {
    // Dropped in this order.
    pub blocks: Vec<Option<Block>>,
    pub streams: Vec<Stream>,
    pub alloc: Allocator,
    pub context: Context,
    pub driver: Driver,
    pub sim: Simulator,
    /// Live blocks whose contents are known: address, bytes, value of each byte.
    pub known: Vec<(u64, u64, u8)>,
    /// Markers recorded before the act.
    pub records_before: u64,
    /// Objects that the fault keeps the allocator from destroying, at most.
    lost: Leaks,
    /// Bytes of such memory.
    lost_bytes: u64,
}

pub type Act = fn(&mut World) -> Result<(), Error>;

/// A path through the allocator.
pub struct Scenario {
    pub name: &'static str,
    pub policies: &'static [Policy],
    pub memory: u64,
    pub limit: Option<u64>,
    pub mode: Mode,
    /// The device is tested before the first view.
    pub self_test: bool,
    /// There are views at all.
    pub views: bool,
    pub prepare: fn(&mut World),
    pub act: Act,
    /// The act runs out of memory by itself.
    pub hopeless: bool,
    /// The act is one transaction: if the driver's refusal of one call fails it, nothing at all has
    /// changed.
    pub atomic: bool,
    /// The effect of the act if nothing failed.
    pub proof: fn(&World) -> bool,
}

pub const BOTH: &[Policy] = &[Policy::Packed, Policy::Classic];
pub const PACKED: &[Policy] = &[Policy::Packed];
pub const CLASSIC: &[Policy] = &[Policy::Classic];

pub const PLAIN: Scenario = Scenario {
    name: "",
    policies: BOTH,
    memory: 8 << 30,
    limit: None,
    mode: Mode::Manual,
    self_test: true,
    views: true,
    prepare: |_| {},
    act: |_| Ok(()),
    hopeless: false,
    atomic: false,
    proof: |_| true,
};

impl Scenario {
    pub const fn of(name: &'static str, act: Act) -> Scenario {
        Scenario { name, act, ..PLAIN }
    }

    /// The steps before the act.
    pub fn after(self, prepare: fn(&mut World)) -> Scenario {
        Scenario { prepare, ..self }
    }

    pub fn policies(self, policies: &'static [Policy]) -> Scenario {
        Scenario { policies, ..self }
    }

    pub fn memory(self, memory: u64) -> Scenario {
        Scenario { memory, ..self }
    }

    pub fn limit(self, bytes: u64) -> Scenario {
        let limit = Some(bytes);
        Scenario { limit, ..self }
    }

    pub fn without_self_test(mut self) -> Scenario {
        self.self_test = false;
        self
    }

    pub fn without_views(mut self) -> Scenario {
        self.views = false;
        self
    }

    pub fn atomic(mut self) -> Scenario {
        self.atomic = true;
        self
    }

    pub fn hopeless(mut self) -> Scenario {
        self.hopeless = true;
        self
    }

    pub fn proof(self, proof: fn(&World) -> bool) -> Scenario {
        Scenario { proof, ..self }
    }
}

impl World {
    pub fn new(scenario: &Scenario, policy: Policy) -> World {
        let mut config = SimConfig::with_devices(2, scenario.memory);
        config.mode = scenario.mode;
        let sim = Simulator::new(config).unwrap();
        outside::install(&sim);
        let driver = sim.driver().unwrap();
        let context = driver.context(0).unwrap();
        let config = Config::new()
            .policy(policy)
            .headroom(0)
            .limit(scenario.limit)
            .self_test(scenario.self_test)
            .views(scenario.views);
        let alloc = Allocator::with_config(&context, config).unwrap();
        let mut world = World {
            blocks: Vec::new(),
            streams: Vec::new(),
            alloc,
            context,
            driver,
            sim,
            known: Vec::new(),
            records_before: 0,
            lost: Leaks::default(),
            lost_bytes: 0,
        };
        world.stream();
        (scenario.prepare)(&mut world);
        world.records_before = world.driver.calls().get("cuEventRecord");
        world
    }

    pub fn stream(&mut self) {
        self.streams.push(Stream::new(&self.context).unwrap());
    }

    pub fn take(&mut self, bytes: usize, stream: usize) -> Result<(), Error> {
        let block = self.alloc.allocate(bytes, &self.streams[stream])?;
        self.blocks.push(Some(block));
        Ok(())
    }

    /// Allocates and submits work that uses the block.
    pub fn put(&mut self, bytes: usize, stream: usize) {
        self.take(bytes, stream).unwrap();
        self.work(self.blocks.len() - 1, stream);
    }

    /// A stream uses a block from now on.
    pub fn record(&self, block: usize, stream: usize) {
        let block = self.blocks[block].as_ref().unwrap();
        block.record_stream(&self.streams[stream]).unwrap();
    }

    pub fn work(&self, block: usize, stream: usize) {
        let block = self.blocks[block].as_ref().unwrap();
        let entered = self.context.enter().unwrap();
        let stream = self.streams[stream].raw();
        // SAFETY: the block and the stream are alive.
        unsafe { entered.memset_d8(block.ptr(), value(block), block.requested(), stream) }.unwrap();
    }

    /// Completes all work. The contents of what is live now are known from here on.
    pub fn settle(&mut self) {
        self.sim.complete_all();
        self.alloc.synchronize().unwrap();
        let known = |b: &Block| (b.ptr(), b.requested() as u64, value(b));
        self.known = self.blocks.iter().flatten().map(known).collect();
    }

    /// Written contents are still there.
    fn contents(&self, at: &str) {
        let live = |ptr: u64| self.blocks.iter().flatten().any(|b| b.ptr() == ptr);
        for (ptr, bytes, value) in self.known.iter().copied().filter(|k| live(k.0)) {
            let samples = (0..bytes).step_by(MIB / 2).chain([bytes - 8]);
            for offset in samples {
                let found = self.sim.read_memory(ptr + offset, 8);
                assert_eq!(found, Some(vec![value; 8]), "{at}: {ptr:#x}+{offset:#x}");
            }
        }
    }

    /// Everything about the memory that a failed transaction must leave.
    pub fn picture(&self) -> (Vec<SegmentInfo>, [u64; 3]) {
        let leaks = self.sim.leaks();
        let held = [leaks.mappings as u64, leaks.handles as u64, leaks.bytes];
        (self.alloc.snapshot(), held)
    }

    pub fn free(&mut self, block: usize) -> Result<(), Error> {
        let Some(held) = self.blocks[block].take() else {
            return Ok(());
        };
        held.free().map_err(|refused| {
            self.blocks[block] = Some(*refused.value);
            refused.error
        })
    }

    /// Dropped blocks that could not be freed are freed by the next call that can.
    pub fn freed_late(&self) -> Result<(), Error> {
        if self.alloc.stats().all.allocations.current > self.held().0 {
            self.sim.clear_failures();
            self.alloc.trim(u64::MAX)?;
        }
        Ok(())
    }

    /// Live blocks and their bytes.
    pub fn held(&self) -> (u64, u64) {
        let held = self.blocks.iter().flatten();
        held.fold((0, 0), |(n, bytes), b| {
            (n + 1, bytes + b.requested() as u64)
        })
    }

    /// Free large memory that streams may still use which have work left: from where, to where, the
    /// stream, and how much of its work is done.
    pub fn tags(&self) -> Vec<(u64, u64, u64, u64)> {
        let mut tags = Vec::new();
        let free = self.alloc.snapshot().into_iter().flat_map(|s| s.blocks);
        for block in free.filter(is_free) {
            for stream in &block.pending {
                let progress = self.sim.progress(*stream);
                if let Some(done) = progress.filter(|p| p.reached < p.submitted) {
                    let end = block.address + block.size;
                    tags.push((block.address, end, *stream, done.reached));
                }
            }
        }
        tags
    }

    /// D1: a step that failed leaves to memory the uses that it had, as long as they go on.
    pub fn keeps_tags(&self, before: &[(u64, u64, u64, u64)], at: &str) {
        let free = self.alloc.snapshot().into_iter().flat_map(|s| s.blocks);
        for block in free.filter(is_free) {
            let end = block.address + block.size;
            for (from, to, stream, reached) in before {
                let goes_on = self.sim.progress(*stream);
                if *from < end
                    && block.address < *to
                    && goes_on.is_some_and(|now| now.reached == *reached)
                {
                    assert!(
                        block.pending.contains(stream),
                        "{at}: {from:#x} to {to:#x} is not stream {stream}'s any more: {block:?}"
                    );
                }
            }
        }
    }

    /// Notes what calls left behind that have failed.
    pub fn lose(&mut self, hit: &[&str], executed: bool) {
        hit.iter()
            .for_each(|call| lost::count(&mut self.lost, call, executed));
        let enters = [
            "cuCtxSetCurrent",
            "cuCtxGetCurrent",
            "cuThreadExchangeStreamCaptureMode",
        ];
        if hit.iter().any(|call| enters.contains(call)) {
            // Objects to be destroyed there are deferred by the context.
            (self.lost.events, self.lost.streams) = (usize::MAX, usize::MAX);
        }
        if self.lost.handles + self.lost.allocations > 0 {
            let reserved = self.alloc.stats().all.reserved.current;
            self.lost_bytes = self.sim.memory_in_use(0) - reserved;
        }
    }

    /// Whether memory is lost.
    pub fn has_lost(&self) -> bool {
        self.lost_bytes > 0
    }

    /// Mappings, handles and bytes, as far as no fault accounts for them.
    pub fn explained(&self, [mappings, handles, bytes]: [u64; 3]) -> [u64; 3] {
        match self.lost.handles {
            0 => [mappings, handles, bytes],
            _ => [mappings, 0, 0],
        }
    }

    /// Invariants after every call, failed or not.
    pub fn judge(&self, at: &str) {
        self.alloc.check().unwrap_or_else(|e| panic!("{at}: {e}"));
        let all = self.alloc.stats().all;
        let figures = (all.allocations.current, all.requested.current);
        assert_eq!(
            self.held(),
            figures,
            "{at}: live blocks and requested bytes"
        );
        assert_eq!(
            self.sim.memory_in_use(0),
            all.reserved.current + self.lost_bytes,
            "{at}: reserved bytes"
        );
        self.contents(at);
        let reports = self.sim.reports();
        assert!(reports.is_empty(), "{at}: {}", reports[0]);
    }

    /// Frees everything, closes, and finds nothing left behind.
    pub fn end(mut self, at: &str) {
        self.blocks.clear();
        self.judge(&format!("{at}, all freed"));
        match self.alloc.close() {
            Ok(()) | Err(Error::Closed) => {}
            Err(error) => panic!("{at}: close: {error:?}"),
        }
        self.judge(&format!("{at}, closed"));
        // The last is dropped first: the simulator goes after all that uses it.
        let World {
            sim,
            driver,
            context,
            alloc,
            streams,
            blocks,
            lost,
            ..
        } = self;
        sim.complete_all();
        drop((blocks, streams, alloc, context, driver));
        let leaks = lost::unexplained(sim.leaks(), &lost);
        assert!(leaks.is_empty(), "{at}: {leaks:?}");
    }
}

/// An act that closes the allocator, again if a fault was met.
pub fn close(w: &mut World) -> Result<(), Error> {
    match w.alloc.close() {
        Err(Error::Closed) => Ok(()),
        result => result,
    }
}

fn is_free(block: &BlockInfo) -> bool {
    !block.small && matches!(block.state, BlockState::Free | BlockState::Pending)
}

/// The contents written into a block: a separate value for each place.
fn value(block: &Block) -> u8 {
    (block.ptr() >> 19) as u8 | 1
}
