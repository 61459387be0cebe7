//! Who holds memory, and who asks for it, by context: as pprof has it, and as collapsed stacks.

use std::collections::{BTreeMap, HashMap};

use crate::record::protobuf::Message;
use crate::record::recording::{Action, Recording};

/// The context of what has none.
const NAMELESS: &str = "untagged";
/// The stack of what was live when the recording began.
const HELD: &str = "held";

/// Figures of one context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Share {
    /// Blocks that were handed out while the recording ran, and those that were live when it began.
    pub allocations: u64,
    /// Bytes of them, as they were asked for.
    pub allocated: u64,
    /// Blocks that are live at the end.
    pub live: u64,
    /// Bytes of them, as they were asked for.
    pub live_bytes: u64,
}

/// What a recording comes to by its contexts. The parts of a context's name between semicolons are a stack,
/// outermost first.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Profile {
    shares: BTreeMap<String, Share>,
    start: u64,
}

impl Profile {
    /// The profile at the end of a recording.
    pub fn of(recording: &Recording) -> Profile {
        let mut shares: BTreeMap<u32, Share> = BTreeMap::new();
        let mut live: HashMap<(u16, u64), (u32, u64)> = HashMap::new();
        for event in recording.events() {
            let place = (event.allocator, event.address);
            let gone = match event.action {
                Action::Held if live.contains_key(&place) => None,
                Action::Held | Action::Allocate => {
                    let share = shares.entry(event.context).or_default();
                    share.allocations += 1;
                    share.allocated = share.allocated.saturating_add(event.bytes);
                    share.live += 1;
                    share.live_bytes = share.live_bytes.saturating_add(event.bytes);
                    live.insert(place, (event.context, event.bytes))
                }
                Action::Free => live.remove(&place),
                _ => None,
            };
            if let Some((context, bytes)) = gone {
                let share = shares.entry(context).or_default();
                share.live = share.live.saturating_sub(1);
                share.live_bytes = share.live_bytes.saturating_sub(bytes);
            }
        }
        let mut named: BTreeMap<String, Share> = BTreeMap::new();
        for (context, share) in shares {
            let name = recording.context(context).filter(|name| !name.is_empty());
            let sum = named
                .entry(name.unwrap_or(NAMELESS).to_owned())
                .or_default();
            sum.allocations += share.allocations;
            sum.allocated = sum.allocated.saturating_add(share.allocated);
            sum.live += share.live;
            sum.live_bytes = sum.live_bytes.saturating_add(share.live_bytes);
        }
        Profile {
            shares: named,
            start: recording.start(),
        }
    }

    /// What a recording comes to by the stacks that were [sampled](crate::record::Recorder::start_with_stacks), each
    /// standing for all that was not: figures are estimates, whose expectation is what [`of`](Self::of) adds up to.
    /// What was live when the recording began has no stack and is called "held"; it is counted as it is. Without
    /// stacks this is all that there is.
    pub fn of_stacks(recording: &Recording) -> Profile {
        let mean = recording.sampling().max(1) as f64;
        let mut shares: BTreeMap<&str, [f64; 4]> = BTreeMap::new();
        let mut live: HashMap<(u16, u64), (&str, f64, u64)> = HashMap::new();
        for event in recording.events() {
            let place = (event.allocator, event.address);
            let (name, weight) = match event.action {
                Action::Held if live.contains_key(&place) => continue,
                Action::Held => (HELD, 1.0),
                Action::Sample => {
                    let name = recording.context(event.context).unwrap_or_default();
                    let name = if name.is_empty() { NAMELESS } else { name };
                    (name, -1.0 / (-(event.bytes as f64) / mean).exp_m1())
                }
                _ => ("", 0.0),
            };
            let is_over = matches!(event.action, Action::Allocate | Action::Free) || weight > 0.0;
            if is_over && let Some((name, weight, bytes)) = live.remove(&place) {
                let share = shares.entry(name).or_default();
                share[2] -= weight;
                share[3] -= weight * bytes as f64;
            }
            // The chance of a block of no bytes is none.
            if weight > 0.0 && weight.is_finite() {
                let (share, bytes) = (shares.entry(name).or_default(), event.bytes as f64);
                for (sum, of) in share.iter_mut().zip([1.0, bytes, 1.0, bytes]) {
                    *sum += weight * of;
                }
                live.insert(place, (name, weight, event.bytes));
            }
        }
        let rounded = |(name, share): (&str, [f64; 4])| {
            // Numbers below 0, which rounding leaves, are 0.
            let [allocations, allocated, live, live_bytes] = share.map(|sum| sum.round() as u64);
            let share = Share {
                allocations,
                allocated,
                live,
                live_bytes,
            };
            (name.to_owned(), share)
        };
        Profile {
            shares: shares.into_iter().map(rounded).collect(),
            start: recording.start(),
        }
    }

    /// The figures of each context, by name. What has no context is called "untagged".
    pub fn shares(&self) -> impl Iterator<Item = (&str, &Share)> {
        self.shares
            .iter()
            .map(|(name, share)| (name.as_str(), share))
    }

    /// Live bytes as collapsed stacks: a line `outer;inner bytes` for each context that holds any, for the tools that
    /// draw flame graphs.
    pub fn to_collapsed(&self) -> String {
        let mut text = String::new();
        for (name, share) in self.shares().filter(|(_, share)| share.live_bytes > 0) {
            let clean = name.replace(char::is_control, " ");
            text.push_str(&format!("{clean} {}\n", share.live_bytes));
        }
        text
    }

    /// The profile in pprof's format, not compressed: `alloc_objects`, `alloc_space`, `inuse_objects` and
    /// `inuse_space` of each context.
    pub fn to_pprof(&self) -> Vec<u8> {
        let mut texts = Texts::default();
        texts.number("");
        let mut profile = Message::default();
        let kinds = [
            ("alloc_objects", "count"),
            ("alloc_space", "bytes"),
            ("inuse_objects", "count"),
            ("inuse_space", "bytes"),
        ];
        for (kind, unit) in kinds {
            let mut value = Message::default();
            value.number(1, texts.number(kind));
            value.number(2, texts.number(unit));
            profile.message(1, &value);
        }
        // Functions and locations have the same numbers, from 1.
        let mut functions = Texts::default();
        for (name, share) in self.shares() {
            let stack: Vec<u64> = name
                .rsplit(';')
                .map(|part| functions.number(part) + 1)
                .collect();
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
        for (at, name) in functions.texts.iter().enumerate() {
            let (id, name) = (at as u64 + 1, texts.number(name));
            let (mut location, mut line, mut function) = Default::default();
            let parts: (&mut Message, &mut Message, &mut Message) =
                (&mut location, &mut line, &mut function);
            parts.1.number(1, id);
            parts.0.number(1, id);
            parts.0.message(4, parts.1);
            profile.message(4, parts.0);
            parts.2.number(1, id);
            parts.2.number(2, name);
            profile.message(5, parts.2);
        }
        let shown = texts.number("inuse_space");
        for text in &texts.texts {
            profile.bytes(6, text.as_bytes());
        }
        profile.number(9, self.start);
        profile.number(14, shown);
        profile.end()
    }
}

/// Texts by their numbers, from 0.
#[derive(Default)]
struct Texts {
    texts: Vec<String>,
    numbers: HashMap<String, u64>,
}

impl Texts {
    fn number(&mut self, text: &str) -> u64 {
        if let Some(number) = self.numbers.get(text) {
            return *number;
        }
        let number = self.texts.len() as u64;
        self.texts.push(text.to_owned());
        self.numbers.insert(text.to_owned(), number);
        number
    }
}
