//! An out-of-memory error as text.

use std::fmt::{self, Write};

use crate::error::cause::Cause;
use crate::error::kinds::Count;
use crate::error::memory::{AtLeast, Bytes, HeldBy, Holder, OutOfMemory, StreamBytes};

/// Maximum number of characters of a name in the text: the end of a stack, which is its innermost function.
const NAME_SHOWN: usize = 160;

impl HeldBy {
    /// `tag`, `context` or `size`.
    pub fn kind(&self) -> &'static str {
        match self {
            HeldBy::Tag(_) => "tag",
            HeldBy::Context(_) => "context",
            HeldBy::Size { .. } => "size",
        }
    }
}

impl fmt::Display for HeldBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HeldBy::Tag(name) | HeldBy::Context(name) => {
                let hidden = name.chars().count().saturating_sub(NAME_SHOWN);
                write!(f, "{} {}", self.kind(), if hidden > 0 { "…" } else { "" })?;
                let printable = |c: char| if c.is_control() { ' ' } else { c };
                let shown = name.chars().skip(hidden).map(printable);
                shown.into_iter().try_for_each(|c| f.write_char(c))
            }
            HeldBy::Size {
                least,
                below,
                stream,
            } => write!(
                f,
                "blocks of {} to {} on stream {stream}",
                Bytes(*least),
                Bytes(*below)
            ),
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bytes, blocks) = (Bytes(self.bytes), Count(self.blocks, "block"));
        write!(f, "{bytes} in {blocks}: {}", self.by)
    }
}

/// The bound of the allocator, with its name in texts.
pub(super) struct Bound {
    pub bytes: u64,
    pub name: &'static str,
}

impl OutOfMemory {
    /// The bound that the first line names.
    pub(super) fn named_bound(&self) -> Option<Bound> {
        let bound = |bytes: u64, name| Some(Bound { bytes, name });
        let device = |free: u64| self.held().saturating_add(free);
        match (self.cause(), self.limit, self.available()) {
            (Cause::Device, ..) => bound(self.driver_total?, "device"),
            (Cause::Others, _, Some(free)) => bound(device(free), "what others leave"),
            (Cause::Limit, Some(limit), _) => bound(limit, "limit"),
            (_, Some(limit), Some(free)) if device(free) < limit => bound(device(free), "device"),
            (_, Some(limit), _) => bound(limit, "limit"),
            (_, None, Some(free)) => bound(device(free), "device"),
            (_, None, None) => None,
        }
    }

    /// Returns the first line of every text: the requested bytes, the live bytes, the bound, and the missing bytes.
    fn headline(&self) -> String {
        let (device, cause) = (self.device, self.cause().name());
        let (requested, live) = (Bytes(self.requested), Bytes(self.live()));
        let bound = self.named_bound().map_or(String::new(), |bound| {
            format!(", bound {} ({})", Bytes(bound.bytes), bound.name)
        });
        let missing = AtLeast(self.missing());
        format!(
            "out of memory on device {device} ({cause}): requested {requested}, live {live}{bound}, missing {missing}"
        )
    }

    /// Returns advice, in a sentence or two, on how to make the request succeed.
    pub fn advice(&self) -> String {
        let missing = self.missing();
        match self.cause() {
            Cause::Limit => {
                let raise = self.raise(missing);
                let advice = format!("{raise}, or free as much of what is live.");
                match self.lacking_on_device() {
                    0 => advice,
                    more => format!("{advice} {}", self.others_advice(more)),
                }
            }
            Cause::Others => self.others_advice(missing),
            Cause::Device => format!(
                "Free {} of what is live, request less, or use a device with more memory.{}",
                AtLeast(missing),
                self.headroom_advice()
            ),
            Cause::Refused => self.refused_advice(),
            Cause::Pending => {
                let streams = self.pending.iter().map(|stream| stream.stream_id);
                let streams: Vec<String> = streams.map(|id| id.to_string()).collect();
                format!(
                    "Wait until the work on streams {} that may access freed memory is complete: end captures that are \
                     under way, call Allocator::synchronize, and request again.",
                    streams.join(", ")
                )
            }
            Cause::Pools => self.pools_advice(),
            Cause::Fragmented => {
                let switch = match (self.mapped, self.views) {
                    (false, _) => "Use policy=packed, which joins scattered memory. ",
                    (true, false) => "Allow views (tune.views=on), which join scattered memory. ",
                    (true, true) => "",
                };
                let blocks = self.bounding_blocks();
                let blocks = match blocks.is_empty() {
                    true => "Free blocks that lie between free memory".to_owned(),
                    false => format!("Free the blocks between the holes ({blocks})"),
                };
                match self.lacking_below_limit() {
                    0 => format!("{switch}{blocks}."),
                    more => format!("{switch}{blocks}. Or: {}.", self.raise(more)),
                }
            }
        }
    }

    /// Advises how to raise the limit by this number of bytes.
    fn raise(&self, bytes: u64) -> String {
        let raised = self.limit.unwrap_or_default().saturating_add(bytes);
        format!(
            "Raise the limit by {bytes} bytes ({}) to {raised} bytes, by Allocator::set_limit or limit= in the settings",
            AtLeast(bytes)
        )
    }

    /// Advises how other users of the device can free this number of bytes.
    fn others_advice(&self, lacking: u64) -> String {
        format!(
            "Others hold {} of the device, and {} more have to be free: end other processes, or have other allocators \
             of this one release what they cache (Allocator::empty_cache).{}",
            Bytes(self.others().unwrap_or(0)),
            AtLeast(lacking),
            self.headroom_advice(),
        )
    }

    /// Advises how to change the headroom, if the device has free memory that only the headroom keeps.
    fn headroom_advice(&self) -> String {
        match self.headroom {
            0 => String::new(),
            bytes => format!(
                " {} stay free for CUDA libraries (headroom= in the settings).",
                Bytes(bytes)
            ),
        }
    }

    fn refused_advice(&self) -> String {
        let free = self.driver_free.map_or(String::new(), |free| {
            format!(" although it reports {} free", Bytes(free))
        });
        if self.refused_addresses() {
            return "The driver refuses address space, not memory: lift the limit on the address space of the process \
                    (ulimit -v), or use policy=classic, which reserves none."
                .to_owned();
        }
        match self.driver {
            Some(error) => format!(
                "The driver refused memory ({}){free}: look for a limiter of this process (container, MPS, virtual \
                 GPU), or set limit= below what it allows.",
                error.call()
            ),
            None => "Request again: memory became free meanwhile.".to_owned(),
        }
    }

    fn pools_advice(&self) -> String {
        let pools = self.graph_pools.saturating_sub(self.in_graph_pools);
        let mut parts = Vec::new();
        if self.guarded > 0 {
            parts.push(format!(
                "Drop the guards that keep {} of freed memory.",
                Bytes(self.guarded)
            ));
        }
        if pools > 0 {
            parts.push(format!(
                "Release graph pools, or the graphs that use them: {} of their memory is in no live block.",
                Bytes(pools)
            ));
        }
        if self.suspended > 0 {
            parts.push(format!(
                "Resume {} of suspended memory and release it, since the limit counts it.",
                Bytes(self.suspended)
            ));
        }
        if self.shortage.coming > 0 {
            parts.push(format!(
                "Wait for the resume under way, which takes {}.",
                Bytes(self.shortage.coming)
            ));
        }
        parts.join(" ")
    }

    /// Lists some of the blocks next to the holes, and of those that pin memory.
    fn bounding_blocks(&self) -> String {
        let bounds = self.holes.iter().flat_map(|hole| [hole.before, hole.after]);
        let mut blocks: Vec<u64> = bounds.flatten().collect();
        blocks.extend(self.pinned.iter().map(|pinned| pinned.block));
        blocks.sort_unstable();
        blocks.dedup();
        let blocks = blocks.iter().take(4).map(|block| format!("{block:#x}"));
        blocks.collect::<Vec<_>>().join(", ")
    }

    /// Returns the live bytes that none of the listed holders has.
    pub(super) fn other_live(&self) -> u64 {
        let listed: u64 = self.holders.iter().map(|holder| holder.bytes).sum();
        self.live().saturating_sub(listed)
    }

    /// Returns the full report in lines: the headline, the advice, the holders of memory, its division, and the holes.
    pub fn report(&self) -> String {
        let mut text = self.headline();
        text.push('\n');
        let mut line = |name: &str, value: String| {
            let _ = writeln!(text, "  {name:<12} {value}");
        };
        line("cause", self.cause().name().to_owned());
        line("advice", self.advice());
        for holder in &self.holders {
            line("holder", holder.to_string());
        }
        if !self.holders.is_empty() && self.other_live() > 0 {
            line(
                "holder",
                format!("{}: all others", Bytes(self.other_live())),
            );
        }
        let limit = self.limit.map(|limit| format!(", limit {}", Bytes(limit)));
        let (held, limit) = (Bytes(self.held()), limit.unwrap_or_default());
        line("held", format!("{held}{limit}"));
        let (live, in_views) = (Bytes(self.live()), Bytes(self.in_views));
        line("live", format!("{live}, {in_views} of it in views"));
        let (free, run) = (Bytes(self.cached), Bytes(self.largest_run));
        line("free", format!("{free}, {run} at most in one run"));
        if self.guarded > 0 {
            let guarded = Bytes(self.guarded);
            line("guarded", format!("{guarded} of freed memory"));
        }
        if self.suspended > 0 {
            line("suspended", Bytes(self.suspended).to_string());
        }
        if self.graph_pools > 0 {
            let (held, live) = (Bytes(self.graph_pools), Bytes(self.in_graph_pools));
            let pools = format!("{held} of what is held, {live} of it live");
            line("graph pools", pools);
        }
        if self.ranges > 0 {
            let (held, leaving) = (Bytes(self.ranges), Bytes(self.ranges_leaving));
            let ranges = format!("{held} of what is held, {leaving} of it decommitted");
            line("ranges", ranges);
        }
        if let (Some(free), Some(total)) = (self.driver_free, self.driver_total) {
            let others = Bytes(self.others().unwrap_or(0));
            let (free, total) = (Bytes(free), Bytes(total));
            let headroom = match self.headroom {
                0 => String::new(),
                bytes => format!(", headroom {}", Bytes(bytes)),
            };
            let device = format!("{free} free of {total}, others hold {others}{headroom}");
            line("device", device);
        }
        if let Some(regime) = self.regime {
            line("memory", regime.to_owned());
        }
        if let Some(error) = self.driver {
            line("driver", error.to_string());
        }
        for StreamBytes {
            stream_id,
            bytes,
            unmarked,
        } in &self.pending
        {
            let (bytes, unmarked) = (Bytes(*bytes), Bytes(*unmarked));
            let waits =
                format!("{bytes} for stream {stream_id}, {unmarked} of it without a marker");
            line("pending", waits);
        }
        for pinned in &self.pinned {
            let (live, bytes) = (Bytes(pinned.live), Bytes(pinned.bytes));
            let (at, block) = (pinned.address, pinned.block);
            let pins =
                format!("{bytes} at {at:#x} by {live} live, from the block at {block:#x} on");
            line("pinned", pins);
        }
        for hole in &self.holes {
            let side = |block: Option<u64>| match block {
                Some(block) => format!("the block at {block:#x}"),
                None => "no large block".to_owned(),
            };
            let (before, after) = (side(hole.before), side(hole.after));
            let (at, bytes) = (hole.address, Bytes(hole.bytes));
            let between = format!("{bytes} at {at:#x}, between {before} and {after}");
            line("hole", between);
        }
        text
    }
}

/// The headline and the advice, in one line.
impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.headline())?;
        if let Some(error) = self.driver {
            write!(f, " ({error})")?;
        }
        write!(f, ". {}", self.advice())
    }
}
