//! An allocator's figures as text: for machines, and for people.

use std::fmt::Write;

use crate::allocator::{Allocator, Counter, PoolStats, Regime, Stats};
use crate::error::memory::Bytes;

/// Samples of one figure: labels, and the value.
type Samples = Vec<(String, String)>;
/// A row of the summary: its name, the figure, and whether that is bytes.
type Row = (&'static str, fn(&PoolStats) -> Counter, bool);

/// A figure of OpenMetrics: its name, what kind of figure it is, what it says, and its values with their labels.
struct Family {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    samples: Samples,
}

/// The figures of allocators in the text format of OpenMetrics, for whoever serves them to Prometheus. All of one
/// allocator are of one instant but `cualloc_driver_calls_total`, which is of a later one and counts the calls of
/// everything that uses the same driver. Labels are the device and the allocator's number. Amounts are bytes where the
/// name says so, else numbers.
///
/// The text is a whole answer: the format has each name once and one end, so what has several allocators asks for all of
/// them in one call.
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
    let mut families: Vec<Family> = Vec::new();
    for allocator in allocators {
        for mut family in families_of(allocator) {
            match families.iter_mut().find(|known| known.name == family.name) {
                Some(known) => known.samples.append(&mut family.samples),
                None => families.push(family),
            }
        }
    }
    let mut text = String::new();
    for Family {
        name,
        kind,
        help,
        samples,
    } in &families
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

/// The figures of one allocator.
fn families_of(allocator: &Allocator) -> Vec<Family> {
    let stats = allocator.stats();
    let device = allocator.context().device().ordinal();
    let labels = format!("device=\"{device}\",allocator=\"{}\"", allocator.id());
    let mut families = Vec::new();
    let mut add = |name, kind, help, samples: &[(String, String)]| {
        let samples = samples.iter();
        let samples = samples.map(|(more, value)| (format!("{labels}{more}"), value.clone()));
        families.push(Family {
            name,
            kind,
            help,
            samples: samples.collect(),
        });
    };
    let pools = [("small", &stats.small), ("large", &stats.large)];
    let by_pool = |of: fn(&PoolStats) -> u64| -> Samples {
        let sample = |(name, pool)| (format!(",pool=\"{name}\""), of(pool).to_string());
        pools.into_iter().map(sample).collect()
    };
    let one = |value: u64| vec![(String::new(), value.to_string())];
    let gauges: [(&'static str, &'static str, Samples); 13] = [
        (
            "allocated_bytes",
            "Bytes of live blocks, after rounding.",
            by_pool(|p| p.allocated.current),
        ),
        (
            "requested_bytes",
            "Bytes of live blocks as they were asked for.",
            by_pool(|p| p.requested.current),
        ),
        (
            "active_bytes",
            "Bytes of live blocks and of freed ones in use.",
            by_pool(|p| p.active.current),
        ),
        (
            "reserved_bytes",
            "Bytes held from the driver.",
            by_pool(|p| p.reserved.current),
        ),
        ("blocks", "Live blocks.", by_pool(|p| p.allocations.current)),
        (
            "allocated_peak_bytes",
            "Most bytes of live blocks at once.",
            one(stats.all.allocated.peak),
        ),
        (
            "reserved_peak_bytes",
            "Most bytes held from the driver at once.",
            one(stats.all.reserved.peak),
        ),
        ("free_bytes", "Bytes of free memory.", one(stats.free)),
        (
            "largest_free_bytes",
            "Bytes of the largest free piece.",
            one(stats.largest_free),
        ),
        (
            "limit_bytes",
            "The limit on bytes held, if there is one.",
            stats.limit.map(one).unwrap_or_default(),
        ),
        (
            "headroom_bytes",
            "Bytes of the device that growth leaves free.",
            one(stats.headroom),
        ),
        (
            "memory_scarce",
            "1 while memory is scarce, 0 while it is plentiful.",
            one(u64::from(stats.packing.regime != Regime::Plentiful)),
        ),
        ("streams", "Streams known.", one(stats.streams)),
    ];
    for (name, help, samples) in gauges.iter().filter(|(_, _, samples)| !samples.is_empty()) {
        add(name, "gauge", help, samples);
    }
    let free = stats.free.max(1) as f64;
    let ratio = 1.0 - stats.largest_free as f64 / free;
    let ratio = if stats.free == 0 { 0.0 } else { ratio };
    let ratio = [(String::new(), format!("{ratio:.6}"))];
    add(
        "fragmentation_ratio",
        "gauge",
        "Share of free memory outside its largest piece.",
        &ratio,
    );
    let reclaim = &stats.reclaim;
    let counters = [
        (
            "allocations",
            "Blocks handed out.",
            stats.all.allocations.total_allocated,
        ),
        (
            "frees",
            "Blocks taken back.",
            stats.all.allocations.total_freed,
        ),
        ("waits", "Waits queued on streams.", stats.stream_waits),
        (
            "host_waits",
            "Waits of the host.",
            reclaim.host_waits + reclaim.synchronised,
        ),
        (
            "stitches",
            "Stitches of scattered memory.",
            reclaim.stitched,
        ),
        (
            "growths",
            "Times that memory was added.",
            reclaim.grown + reclaim.grown_hard,
        ),
        (
            "releases",
            "Times that memory went back to make room.",
            reclaim.released,
        ),
        (
            "out_of_memory",
            "Requests that found no memory.",
            stats.ooms,
        ),
    ];
    for (name, help, value) in counters {
        add(name, "counter", help, &one(value));
    }
    let calls = allocator.driver_calls();
    let calls: Samples = calls
        .iter()
        .map(|(name, count)| (format!(",call=\"{name}\""), count.to_string()))
        .collect();
    add("driver_calls", "counter", "Calls of the driver.", &calls);
    families
}

/// A table of figures for people, in the manner of `torch.cuda.memory_summary`. Peaks that are upper bounds are those
/// that [`PoolStats`] names.
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
