//! An allocator's statistics as text: for monitoring, and for people.

use std::fmt::Write;

use crate::allocator::{Allocator, Counter, PoolStats, Regime, Stats};
use crate::error::memory::Bytes;

/// A row of the summary: its name, its figure, and whether that is in bytes.
type Row = (&'static str, fn(&PoolStats) -> Counter, bool);

/// A metric of OpenMetrics: its name, type, help text, and samples with labels.
struct Family {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    samples: Vec<(String, String)>,
}

/// The figures of allocators, each with the samples of all of them.
#[derive(Default)]
struct Families {
    all: Vec<Family>,
    /// Labels of the allocator whose metrics are added.
    labels: String,
}

impl Families {
    /// Adds the samples of a metric, each with further labels.
    fn add<V: ToString>(
        &mut self,
        (kind, name): (&'static str, &'static str),
        help: &'static str,
        values: impl IntoIterator<Item = (String, V)>,
    ) {
        let labels = &self.labels;
        let samples = values.into_iter();
        let samples = samples.map(|(more, value)| (format!("{labels}{more}"), value.to_string()));
        match self.all.iter_mut().find(|known| known.name == name) {
            Some(known) => known.samples.extend(samples),
            None => self.all.push(Family {
                name,
                kind,
                help,
                samples: samples.collect(),
            }),
        }
    }

    fn gauge(&mut self, name: &'static str, help: &'static str, value: impl ToString) {
        self.add(("gauge", name), help, [(String::new(), value)]);
    }

    fn counter(&mut self, name: &'static str, help: &'static str, value: u64) {
        self.add(("counter", name), help, [(String::new(), value)]);
    }

    fn pools(
        &mut self,
        name: &'static str,
        help: &'static str,
        stats: &Stats,
        of: fn(&PoolStats) -> Counter,
    ) {
        let pools = [("small", &stats.small), ("large", &stats.large)];
        let values = pools.map(|(name, pool)| (format!(",pool=\"{name}\""), of(pool).current));
        self.add(("gauge", name), help, values);
    }

    fn read(&mut self, allocator: &Allocator) {
        let stats = &allocator.stats();
        let device = allocator.context().device().ordinal();
        self.labels = format!("device=\"{device}\",allocator=\"{}\"", allocator.id());
        let help = "Bytes of live blocks, after rounding.";
        self.pools("allocated_bytes", help, stats, |p| p.allocated);
        let help = "Bytes of live blocks as they were asked for.";
        self.pools("requested_bytes", help, stats, |p| p.requested);
        let help = "Bytes of live blocks and of freed ones in use.";
        self.pools("active_bytes", help, stats, |p| p.active);
        let help = "Bytes held from the driver.";
        self.pools("reserved_bytes", help, stats, |p| p.reserved);
        self.pools("blocks", "Live blocks.", stats, |p| p.allocations);
        let (allocated, reserved) = (stats.all.allocated.peak, stats.all.reserved.peak);
        let help = "Peak of bytes in live blocks.";
        self.gauge("allocated_peak_bytes", help, allocated);
        let help = "Peak of bytes reserved from the driver.";
        self.gauge("reserved_peak_bytes", help, reserved);
        self.gauge("free_bytes", "Bytes of free memory.", stats.free);
        let help = "Bytes of the largest free piece.";
        self.gauge("largest_free_bytes", help, stats.largest_free);
        if let Some(limit) = stats.limit {
            let help = "The limit on bytes held, if there is one.";
            self.gauge("limit_bytes", help, limit);
        }
        let help = "Bytes of the device that growth leaves free.";
        self.gauge("headroom_bytes", help, stats.headroom);
        let help = "1 while memory is scarce, 0 while it is plentiful.";
        let scarce = stats.packing.regime != Regime::Plentiful;
        self.gauge("memory_scarce", help, u64::from(scarce));
        self.gauge("streams", "Streams known.", stats.streams);
        let ratio = match stats.free {
            0 => 0.0,
            free => 1.0 - stats.largest_free as f64 / free as f64,
        };
        let help = "Share of free memory outside its largest piece.";
        self.gauge("fragmentation_ratio", help, format!("{ratio:.6}"));
        let (reclaim, blocks) = (&stats.reclaim, &stats.all.allocations);
        self.counter("allocations", "Blocks handed out.", blocks.total_allocated);
        self.counter("frees", "Blocks taken back.", blocks.total_freed);
        self.counter("waits", "Waits queued on streams.", stats.stream_waits);
        let waits = reclaim.host_waits + reclaim.synchronised;
        self.counter("host_waits", "Waits of the host.", waits);
        let help = "Stitches of scattered memory.";
        self.counter("stitches", help, reclaim.stitched);
        let growths = reclaim.grown + reclaim.grown_hard;
        self.counter("growths", "Times that memory was added.", growths);
        let help = "Times that memory went back to make room.";
        self.counter("releases", help, reclaim.released);
        self.counter(
            "out_of_memory",
            "Requests that found no memory.",
            stats.ooms,
        );
        let calls = allocator.driver_calls();
        let calls = calls
            .iter()
            .map(|(name, count)| (format!(",call=\"{name}\""), count));
        self.add(("counter", "driver_calls"), "Calls of the driver.", calls);
    }
}

/// Formats the statistics of allocators as OpenMetrics text, for Prometheus. The samples of one allocator are a
/// consistent snapshot, except `cualloc_driver_calls_total`, which is read later and counts the calls of all users of
/// the same driver. The labels are the device and the allocator's number. Names state where amounts are bytes;
/// otherwise they are counts.
///
/// The text is a complete response: the format allows each name and the end marker only once, so a program with several
/// allocators passes all of them in one call.
///
/// ```
/// # use cualloc::{sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let context = sim.driver()?.context(0)?;
/// let allocators = [
///     Allocator::with_config(&context, Config::new())?,
///     Allocator::with_config(&context, Config::new())?,
/// ];
/// let text = cualloc::record::metrics(&allocators);
/// assert_eq!(text.matches("# TYPE cualloc_streams ").count(), 1);
/// assert_eq!(text.matches("\ncualloc_streams{").count(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn metrics<'a>(allocators: impl IntoIterator<Item = &'a Allocator>) -> String {
    let mut families = Families::default();
    allocators.into_iter().for_each(|it| families.read(it));
    let mut text = String::new();
    for Family {
        name,
        kind,
        help,
        samples,
    } in &families.all
    {
        let _ = writeln!(text, "# TYPE cualloc_{name} {kind}");
        if name.ends_with("_bytes") {
            let _ = writeln!(text, "# UNIT cualloc_{name} bytes");
        }
        let _ = writeln!(text, "# HELP cualloc_{name} {help}");
        let end = if *kind == "counter" { "_total" } else { "" };
        for (labels, value) in samples {
            let _ = writeln!(text, "cualloc_{name}{end}{{{labels}}} {value}");
        }
    }
    text.push_str("# EOF\n");
    text
}

/// Formats a table of statistics for people, similar to `torch.cuda.memory_summary`. [`PoolStats`] documents which
/// peaks are upper bounds.
pub fn summary(device: usize, stats: &Stats) -> String {
    let mut text = String::new();
    let line = "-".repeat(76);
    let _ = writeln!(text, "Memory of device {device}");
    let _ = writeln!(text, "{line}");
    let heads = ["", "now", "peak", "total added", "total gone"];
    let [name, now, peak, added, gone] = heads;
    let _ = writeln!(text, "{name:<24}{now:>13}{peak:>13}{added:>13}{gone:>13}");
    let rows: [Row; 6] = [
        ("Allocated memory", |p| p.allocated, true),
        ("Requested memory", |p| p.requested, true),
        ("Active memory", |p| p.active, true),
        ("Reserved memory", |p| p.reserved, true),
        ("Blocks", |p| p.allocations, false),
        ("Segments and handles", |p| p.segments, false),
    ];
    for (name, of, bytes) in rows {
        let pools = [
            (name, &stats.all),
            ("  large pool", &stats.large),
            ("  small pool", &stats.small),
        ];
        for (name, pool) in pools {
            let counter = of(pool);
            let figures = [
                counter.current,
                counter.peak,
                counter.total_allocated,
                counter.total_freed,
            ];
            let _ = write!(text, "{name:<24}");
            for figure in figures {
                let figure = if bytes {
                    Bytes(figure).to_string()
                } else {
                    figure.to_string()
                };
                let _ = write!(text, "{figure:>13}");
            }
            let _ = writeln!(text);
        }
    }
    let _ = writeln!(text, "{line}");
    let limit = stats
        .limit
        .map_or("none".to_owned(), |limit| Bytes(limit).to_string());
    let rows = [
        ("Cached memory", Bytes(stats.cached()).to_string()),
        ("Largest free piece", Bytes(stats.largest_free).to_string()),
        (
            "Memory in views",
            Bytes(stats.packing.view_live).to_string(),
        ),
        ("Limit", limit),
        ("Headroom", Bytes(stats.headroom).to_string()),
        ("Memory is", stats.packing.regime.name().to_owned()),
        ("Requests served at hand", stats.hits.to_string()),
        ("Requests that missed", stats.misses.to_string()),
        ("Out of memory", stats.ooms.to_string()),
    ];
    for (name, figure) in rows {
        let _ = writeln!(text, "{name:<24}{figure:>13}");
    }
    text
}
