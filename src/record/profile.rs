//! Memory by context at an instant of a recording, in pprof's format and as collapsed stacks.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::Duration;

use crate::error::memory::Bytes;
use crate::record::protobuf::Message;
use crate::record::recording::{Action, Event, Recording};
use crate::trace::Names;

/// The name for blocks without a context.
const NAMELESS: &str = "untagged";
/// The stack of blocks that were live when the recording began.
const HELD: &str = "held";

/// Statistics of one context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Share {
    /// Blocks allocated during the recording, and those that were live when it began.
    pub allocations: u64,
    /// Their requested bytes.
    pub allocated: u64,
    /// Blocks that are live at the [moment](Profile::moment) of the profile.
    pub live: u64,
    /// Their requested bytes.
    pub live_bytes: u64,
}

/// The instant that a profile describes: the last request that failed for lack of memory, or otherwise the peak of live
/// memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Moment {
    /// Nanoseconds since the recording began.
    pub time: u64,
    /// Requested bytes of live blocks.
    pub live: u64,
    /// Bytes of the failed request; none at the peak.
    pub failed: Option<u64>,
}

impl Moment {
    /// Returns the moment of a recording, and the index of its event. None if nothing was allocated.
    fn of(recording: &Recording) -> Option<(usize, Moment)> {
        let mut blocks: HashMap<(u16, u64), u64> = HashMap::new();
        let mut live = 0u64;
        let (mut peak, mut failure) = (None::<(usize, Moment)>, None);
        for (index, event) in recording.events().iter().enumerate() {
            let place = (event.allocator, event.address);
            let moment = |live, failed| {
                let time = event.time;
                Some((index, Moment { time, live, failed }))
            };
            match event.action {
                Action::Held if blocks.contains_key(&place) => {}
                Action::Held | Action::Allocate => {
                    let lost = blocks.insert(place, event.bytes).unwrap_or(0);
                    live = live.saturating_sub(lost).saturating_add(event.bytes);
                    if live > peak.map_or(0, |(_, peak)| peak.live) {
                        peak = moment(live, None);
                    }
                }
                Action::Free => live = live.saturating_sub(blocks.remove(&place).unwrap_or(0)),
                Action::OutOfMemory { .. } => failure = moment(live, Some(event.bytes)),
                _ => {}
            }
        }
        failure.or(peak)
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.failed {
            Some(bytes) => write!(f, "when a request of {} ran out of memory", Bytes(bytes))?,
            None => f.write_str("at the peak")?,
        }
        let seconds = Duration::from_nanos(self.time).as_secs_f64();
        let live = Bytes(self.live);
        write!(
            f,
            ", {seconds:.3} s after the recording began, with {live} live"
        )
    }
}

/// A profile of a recording by contexts. The parts of a context's name between semicolons are a stack, outermost first.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Profile {
    shares: BTreeMap<String, Share>,
    start: u64,
    moment: Option<Moment>,
}

/// A block while it is live.
struct Block {
    /// The index of its allocation.
    born: usize,
    bytes: u64,
    /// None for blocks that were live when the recording began.
    context: Option<u32>,
    /// The number of blocks it stands for.
    weight: f64,
}

/// Sums by context: blocks and bytes in total, and of those live at the moment.
#[derive(Default)]
struct Sums {
    by_context: BTreeMap<Option<u32>, [f64; 4]>,
    moment: usize,
}

impl Sums {
    fn add(&mut self, block: &Block, first: usize) {
        if block.weight == 0.0 {
            return;
        }
        let sums = self.by_context.entry(block.context).or_default();
        sums[first] += block.weight;
        sums[first + 1] += block.weight * block.bytes as f64;
    }

    fn begin(&mut self, block: &Block) {
        self.add(block, 0);
    }

    /// Whether the block is live until the event with this index.
    fn end(&mut self, block: Option<Block>, until: usize) {
        if let Some(block) = block
            && (block.born..until).contains(&self.moment)
        {
            self.add(&block, 2);
        }
    }
}

impl Profile {
    /// Returns the profile of a recording at its last request that ran out of memory, or otherwise at its peak.
    pub fn of(recording: &Recording) -> Profile {
        Profile::new(recording, |event| match event.action {
            Action::Held | Action::Allocate => (Some(event.context), 1.0),
            _ => (None, 0.0),
        })
    }

    /// Like [`of`](Self::of), by [sampled](crate::record::Recorder::start_with_stacks) stacks. Each sample also stands
    /// for allocations that were not sampled: the figures are estimates whose expected value is the sum computed by
    /// [`of`](Self::of). Blocks that were live when the recording began have no stack; they are counted exactly, as
    /// "held". Without stacks they are the only entry.
    pub fn of_stacks(recording: &Recording) -> Profile {
        let mean = recording.sampling().max(1) as f64;
        Profile::new(recording, |event| match event.action {
            Action::Held => (None, 1.0),
            Action::Sample => {
                let weight = -1.0 / (-(event.bytes as f64) / mean).exp_m1();
                // Blocks of 0 bytes are never sampled.
                let weight = if weight.is_finite() { weight } else { 0.0 };
                (Some(event.context), weight)
            }
            _ => (None, 0.0),
        })
    }

    /// `weigh` returns for an event the context that a block is counted in, and its weight.
    fn new(recording: &Recording, weigh: impl Fn(&Event) -> (Option<u32>, f64)) -> Profile {
        let moment = Moment::of(recording);
        let mut sums = Sums {
            moment: moment.map_or(0, |(index, _)| index),
            ..Sums::default()
        };
        let mut live: HashMap<(u16, u64), Block> = HashMap::new();
        for (index, event) in recording.events().iter().enumerate() {
            let place = (event.allocator, event.address);
            let (context, weight) = weigh(event);
            let mut block = Block {
                born: index,
                bytes: event.bytes,
                context,
                weight,
            };
            match event.action {
                Action::Held if live.contains_key(&place) => {}
                Action::Held | Action::Allocate => {
                    sums.begin(&block);
                    sums.end(live.insert(place, block), index);
                }
                // The record of a stack comes after that of its allocation.
                Action::Sample if weight > 0.0 => {
                    sums.begin(&block);
                    block.born = live.get(&place).map_or(index, |known| known.born);
                    live.insert(place, block);
                }
                Action::Free => sums.end(live.remove(&place), index),
                _ => {}
            }
        }
        for block in live.into_values() {
            sums.end(Some(block), usize::MAX);
        }
        let mut shares: BTreeMap<String, Share> = BTreeMap::new();
        for (context, figures) in sums.by_context {
            let name = match context {
                None => HELD,
                Some(context) => recording.context(context).unwrap_or_default(),
            };
            let name = if name.is_empty() { NAMELESS } else { name };
            let [allocations, allocated, live, live_bytes] = figures.map(|sum| sum.round() as u64);
            let share = shares.entry(name.to_owned()).or_default();
            share.allocations = share.allocations.saturating_add(allocations);
            share.allocated = share.allocated.saturating_add(allocated);
            share.live = share.live.saturating_add(live);
            share.live_bytes = share.live_bytes.saturating_add(live_bytes);
        }
        Profile {
            shares,
            start: recording.start(),
            moment: moment.map(|(_, moment)| moment),
        }
    }

    /// Returns the instant that the profile shows. None if nothing was allocated.
    pub fn moment(&self) -> Option<Moment> {
        self.moment
    }

    /// Returns the statistics of each context, by name. Blocks without a context are called "untagged".
    pub fn shares(&self) -> impl Iterator<Item = (&str, &Share)> {
        self.shares
            .iter()
            .map(|(name, share)| (name.as_str(), share))
    }

    /// Formats live bytes as collapsed stacks: a line `outer;inner bytes` for each context that holds any, for tools
    /// that draw flame graphs. Empty if nothing is live at the [moment](Self::moment), or no live block was sampled.
    pub fn to_collapsed(&self) -> String {
        let mut text = String::new();
        for (name, share) in self.shares().filter(|(_, share)| share.live_bytes > 0) {
            let clean = name.replace(char::is_control, " ");
            text.push_str(&format!("{clean} {}\n", share.live_bytes));
        }
        text
    }

    /// Encodes the profile in pprof's format, uncompressed: `alloc_objects`, `alloc_space`, `inuse_objects` and
    /// `inuse_space` of each context.
    pub fn to_pprof(&self) -> Vec<u8> {
        // The format requires an empty text with number 0.
        let (mut texts, mut functions) = (Names::default(), Names::default());
        let mut text = |name: &str| match name {
            "" => 0,
            name => texts.number(name).into(),
        };
        let mut profile = Message::default();
        let kinds = [
            ("alloc_objects", "count"),
            ("alloc_space", "bytes"),
            ("inuse_objects", "count"),
            ("inuse_space", "bytes"),
        ];
        for (kind, unit) in kinds {
            let mut value = Message::default();
            value.number(1, text(kind));
            value.number(2, text(unit));
            profile.message(1, &value);
        }
        // Functions and locations have the same numbers.
        for (name, share) in self.shares() {
            let parts = name.rsplit(';');
            let stack: Vec<u64> = parts.map(|part| functions.number(part).into()).collect();
            let mut sample = Message::default();
            sample.packed(1, &stack);
            let values = [
                share.allocations,
                share.allocated,
                share.live,
                share.live_bytes,
            ];
            sample.packed(2, &values);
            profile.message(2, &sample);
        }
        for (id, name) in (1..).zip(functions.iter()) {
            let [mut location, mut line, mut function] = [(); 3].map(|()| Message::default());
            line.number(1, id);
            location.number(1, id);
            location.message(4, &line);
            profile.message(4, &location);
            function.number(1, id);
            function.number(2, text(name));
            profile.message(5, &function);
        }
        let shown = text("inuse_space");
        for text in [""].into_iter().chain(texts.iter()) {
            profile.bytes(6, text.as_bytes());
        }
        profile.number(9, self.start);
        profile.number(14, shown);
        profile.end()
    }
}
