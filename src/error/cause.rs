//! Why memory ran out, what helps, and the whole picture in lines and as JSON.

use std::fmt::Write;

use crate::driver::DriverError;
use crate::error::memory::{Bytes, OutOfMemory};

/// Which of the ways to run out of memory it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// What is live and the request do not fit into the allocator's limit.
    Limit,
    /// What is live and the request would fit into the device, but others hold too much of it: other processes, other
    /// allocators, or the program itself.
    Others,
    /// There is enough free memory, but in pieces that are too small, between live blocks.
    Fragmented,
    /// There is enough free memory, but work that was not seen to end may still use it.
    Pending,
    /// There is enough freed memory, but guards or graphs keep it.
    Guarded,
    /// What is live and the request are more than the device has.
    Device,
    /// There is enough memory, and the driver refuses the address space to map it at.
    Refused,
}

impl Cause {
    /// One word for people and machines.
    pub fn name(self) -> &'static str {
        match self {
            Cause::Limit => "limit",
            Cause::Others => "others",
            Cause::Fragmented => "fragmented",
            Cause::Pending => "pending",
            Cause::Guarded => "guarded",
            Cause::Device => "device",
            Cause::Refused => "refused",
        }
    }
}

impl OutOfMemory {
    /// Bytes that wait for streams.
    fn waiting(&self) -> u64 {
        let waiting = self.pending.iter().map(|stream| stream.bytes);
        // Memory that waits for several streams is told of for each.
        waiting.sum::<u64>().min(self.cached)
    }

    /// Bytes that the device has left for the allocator.
    fn device_bound(&self) -> Option<u64> {
        let free = self.driver_free?;
        Some(self.reserved.saturating_add(free))
    }

    /// Bytes that the allocator could hold at most: of its limit, or of what the device has left for it.
    fn bound(&self) -> u64 {
        let limit = self
            .limit
            .map(|limit| limit.saturating_sub(self.graph_pools));
        let bounds = limit.into_iter().chain(self.device_bound());
        bounds.min().unwrap_or(self.reserved)
    }

    /// The driver's refusal of address space, if the request failed for that.
    fn refused_addresses(&self) -> Option<DriverError> {
        self.driver
            .filter(|error| error.call() == "cuMemAddressReserve")
    }

    /// Which way to run out of memory it was.
    pub fn cause(&self) -> Cause {
        let need = self.allocated.saturating_add(self.requested);
        if need <= self.bound() {
            let fits = |kept: u64| need.saturating_add(kept) <= self.bound();
            return match (self.guarded > 0, self.waiting() > 0) {
                (true, _) if !fits(self.guarded) => Cause::Guarded,
                (_, true) if !fits(self.guarded.saturating_add(self.waiting())) => Cause::Pending,
                _ if self.refused_addresses().is_some() => Cause::Refused,
                _ => Cause::Fragmented,
            };
        }
        let need = need.saturating_add(self.graph_pools);
        let total = self.driver_total.unwrap_or(u64::MAX);
        let fits_device = need <= total;
        let fits_limit = self.limit.is_none_or(|limit| need <= limit);
        match (fits_device, fits_limit) {
            (false, _) => Cause::Device,
            (true, false) => Cause::Limit,
            (true, true) => Cause::Others,
        }
    }

    /// What makes the request succeed if it is done, in a sentence or two.
    pub fn advice(&self) -> String {
        let need = self.allocated.saturating_add(self.requested);
        match self.cause() {
            Cause::Limit => {
                let need = need.saturating_add(self.graph_pools);
                let raise = format!(
                    "Raise the limit to at least {need} bytes ({}), by Allocator::set_limit or limit= in the settings, \
                     or free {} of what is live.",
                    Bytes(need),
                    Bytes(need.saturating_sub(self.limit.unwrap_or(need))),
                );
                let bound = self.device_bound();
                match bound.map(|bound| bound.saturating_add(self.graph_pools)) {
                    Some(bound) if bound < need => {
                        format!("{raise} {}", self.others_advice(need - bound))
                    }
                    _ => raise,
                }
            }
            Cause::Others => self.others_advice(need.saturating_sub(self.bound())),
            Cause::Fragmented => {
                let switch = match (self.mapped, self.views) {
                    (false, _) => "Use policy=packed, which joins scattered memory. ",
                    (true, false) => "Allow views (views=on), which join scattered memory. ",
                    (true, true) => "",
                };
                let blocks = self.bounding_blocks();
                match blocks.is_empty() {
                    true => format!("{switch}Free blocks that lie between free memory."),
                    false => format!("{switch}Free what stands between the holes: {blocks}."),
                }
            }
            Cause::Pending => {
                let streams = self
                    .pending
                    .iter()
                    .map(|stream| stream.stream_id.to_string());
                let streams = streams.collect::<Vec<_>>().join(", ");
                format!(
                    "Wait for the work that uses freed memory, on streams {streams}: end captures that are under way, \
                     then call Allocator::synchronize, and ask again."
                )
            }
            Cause::Guarded => format!(
                "Drop the guards and graphs that keep {} of freed memory.",
                Bytes(self.guarded),
            ),
            Cause::Refused => {
                "The driver refuses address space, not memory: lift the limit on the address space of the process \
                 (ulimit -v), or use policy=classic, which reserves none."
                    .to_owned()
            }
            Cause::Device => format!(
                "The device lacks {}: ask for less at once, free what is live, or take a device with more memory.",
                Bytes(
                    need.saturating_add(self.graph_pools)
                        .saturating_sub(self.driver_total.unwrap_or(need))
                ),
            ),
        }
    }

    /// What others on the device have to do until so many more bytes are free.
    fn others_advice(&self, lacking: u64) -> String {
        format!(
            "Others hold {} of the device: end other processes, or have other allocators of this one give back what \
             they cache (Allocator::empty_cache). {} more have to be free.",
            Bytes(self.others().unwrap_or(0)),
            Bytes(lacking),
        )
    }

    /// Bytes of the device that neither this allocator holds nor anybody has free: of other processes, of other
    /// allocators, and of the driver itself. None if the driver could not be asked.
    pub fn others(&self) -> Option<u64> {
        let (free, total) = (self.driver_free?, self.driver_total?);
        let ours = self.reserved.saturating_add(self.graph_pools);
        Some(total.saturating_sub(free).saturating_sub(ours))
    }

    /// The same where it is so much that it is worth a word: more than contexts and modules take.
    pub(crate) fn much_of_others(&self) -> Option<u64> {
        let total = self.driver_total?;
        self.others().filter(|others| *others > total / 16)
    }

    fn bounding_blocks(&self) -> String {
        let bounds = self.holes.iter().flat_map(|hole| [hole.before, hole.after]);
        let mut blocks: Vec<u64> = bounds.flatten().collect();
        blocks.extend(self.pinned.iter().map(|pinned| pinned.block));
        blocks.sort_unstable();
        blocks.dedup();
        let blocks = blocks.iter().take(4).map(|block| format!("{block:#x}"));
        blocks.collect::<Vec<_>>().join(", ")
    }

    /// The picture in lines: what was asked for, what is held, the holes and who bounds them, what waits for what, the
    /// cause, and what helps.
    pub fn report(&self) -> String {
        let mut text = String::new();
        let mut line = |name: &str, value: String| {
            let _ = writeln!(text, "  {name:<12} {value}");
        };
        line("asked for", Bytes(self.requested).to_string());
        let limit = self.limit.map(|limit| format!(", limit {}", Bytes(limit)));
        line(
            "held",
            format!("{}{}", Bytes(self.reserved), limit.unwrap_or_default()),
        );
        line(
            "live",
            format!(
                "{}, {} of it in views",
                Bytes(self.allocated),
                Bytes(self.in_views)
            ),
        );
        line(
            "free",
            format!(
                "{}, {} at most in one run",
                Bytes(self.cached),
                Bytes(self.largest_run)
            ),
        );
        if self.guarded > 0 {
            line(
                "guarded",
                format!("{} of freed memory", Bytes(self.guarded)),
            );
        }
        if let (Some(free), Some(total)) = (self.driver_free, self.driver_total) {
            let others = Bytes(self.others().unwrap_or(0));
            let (free, total) = (Bytes(free), Bytes(total));
            line(
                "device",
                format!("{free} free of {total}, others hold {others}"),
            );
        }
        if self.graph_pools > 0 {
            let held = format!("{} held by them", Bytes(self.graph_pools));
            line("graph pools", held);
        }
        for hole in &self.holes {
            let side = |block: Option<u64>| match block {
                Some(block) => format!("the block at {block:#x}"),
                None => "no large block".to_owned(),
            };
            let (before, after) = (side(hole.before), side(hole.after));
            let (at, bytes) = (hole.address, Bytes(hole.bytes));
            line(
                "hole",
                format!("{bytes} at {at:#x}, between {before} and {after}"),
            );
        }
        for pinned in &self.pinned {
            let (live, bytes) = (Bytes(pinned.live), Bytes(pinned.bytes));
            let (at, block) = (pinned.address, pinned.block);
            line(
                "pinned",
                format!("{bytes} at {at:#x} by {live} live, from the block at {block:#x} on"),
            );
        }
        for stream in &self.pending {
            let (bytes, unmarked) = (Bytes(stream.bytes), Bytes(stream.unmarked));
            let id = stream.stream_id;
            line(
                "waits",
                format!("{bytes} for stream {id}, {unmarked} of it without a marker"),
            );
        }
        line("cause", self.cause().name().to_owned());
        line("advice", self.advice());
        format!("out of memory on device {}\n{text}", self.device)
    }

    /// The picture as a JSON object: `schema` is `cualloc.out_of_memory.1`, amounts are bytes, what is not known is
    /// `null`.
    pub fn to_json(&self) -> String {
        let optional =
            |value: Option<u64>| value.map_or("null".to_owned(), |value| value.to_string());
        let list = |items: Vec<String>| format!("[{}]", items.join(","));
        let holes = self.holes.iter().map(|hole| {
            format!(
                r#"{{"address":{},"bytes":{},"before":{},"after":{}}}"#,
                hole.address,
                hole.bytes,
                optional(hole.before),
                optional(hole.after)
            )
        });
        let pinned = self.pinned.iter().map(|pinned| {
            format!(
                r#"{{"address":{},"bytes":{},"live":{},"block":{}}}"#,
                pinned.address, pinned.bytes, pinned.live, pinned.block
            )
        });
        let pending = self.pending.iter().map(|stream| {
            format!(
                r#"{{"stream":{},"bytes":{},"unmarked":{}}}"#,
                stream.stream_id, stream.bytes, stream.unmarked
            )
        });
        // The advice has neither quotes nor backslashes.
        format!(
            concat!(
                r#"{{"schema":"cualloc.out_of_memory.1","device":{},"requested":{},"limit":{},"reserved":{},"#,
                r#""allocated":{},"cached":{},"largest_free":{},"largest_run":{},"in_views":{},"guarded":{},"#,
                r#""graph_pools":{},"driver_free":{},"driver_total":{},"holes":{},"pinned":{},"pending":{},"cause":"{}","advice":"{}"}}"#
            ),
            self.device,
            self.requested,
            optional(self.limit),
            self.reserved,
            self.allocated,
            self.cached,
            self.largest_free,
            self.largest_run,
            self.in_views,
            self.guarded,
            self.graph_pools,
            optional(self.driver_free),
            optional(self.driver_total),
            list(holes.collect()),
            list(pinned.collect()),
            list(pending.collect()),
            self.cause().name(),
            self.advice(),
        )
    }
}
