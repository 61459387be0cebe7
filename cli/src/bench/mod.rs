//! `cualloc bench`: what an operation costs, and what is left of it with many threads.

mod measure;
mod source;
mod workload;

use crate::machine::Machine;
use crate::options::{BenchOptions, GlobalOptions, PlacementOptions, Work};
use crate::output::{self, Output, SCHEMA};
use crate::settings::Settings;
use crate::{Failure, Outcome, text};
use clap::ValueEnum;
use cualloc::driver::{Context, Stream};
use cualloc::record::{Recorder, Target};
use cualloc::{Allocator, Policy};
use measure::{Scale, churn, crossing, pair, ranges, threads};
use serde_json::json;
use source::{Handles, Malloc, Pointers, Stack, typed, workspaces};
use std::io;
use workload::{Churn, Source};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const PAIRS: [usize; 6] = [512, 4 * KIB, 64 * KIB, MIB, 4 * MIB, 64 * MIB];
const THREADS: [usize; 5] = [1, 2, 4, 8, 16];
/// Each thread may have a pair of its own.
const STREAMS: usize = 64;

const CROSSED: [(&str, &str); 3] = [
    ("cross-stream free", "ns"),
    ("cross-stream pair", "ns"),
    ("cross-stream driver", "calls"),
];

/// The name of the allocator by handle, and by pointer.
const OURS: &str = "cualloc";
const RAW: &str = "cualloc_raw";
const HOST: &str = "malloc";

pub fn run(global: &GlobalOptions, options: &BenchOptions, output: &mut Output) -> Outcome {
    let settings = Settings::read(&PlacementOptions {
        policy: options.policy,
        no_views: false,
    })?;
    let machine = Machine::choose(global, output)?;
    let stage = machine.context(0)?;
    settings.announce(output);
    if matches!(machine, Machine::Simulated { .. }) {
        output.note(
            "the simulated driver has one lock and answers slower than a real one: figures of \
             threads, of pointers and of other streams say little here",
        );
    }
    let mut bench = Bench {
        context: stage.context(),
        settings: &settings,
        scale: match options.quick {
            true => Scale::QUICK,
            false => Scale::FULL,
        },
        device: machine.name(),
        policy: "-",
        output,
        well: true,
    };
    for work in Work::value_variants() {
        if options.only.is_empty() || options.only.contains(work) {
            bench.work(*work)?;
        }
    }
    Ok(bench.well)
}

struct Bench<'a> {
    context: &'a Context,
    settings: &'a Settings,
    scale: Scale,
    device: &'static str,
    policy: &'static str,
    output: &'a mut Output,
    well: bool,
}

/// An allocator with its streams. The streams outlive what is measured on them.
struct Rig {
    allocator: Allocator,
    streams: Vec<Stream>,
}

impl Rig {
    fn handles(&self) -> Handles<'_> {
        let (allocator, streams) = (&self.allocator, &self.streams);
        Handles { allocator, streams }
    }

    fn pointers(&self) -> Pointers<'_> {
        let (allocator, streams) = (&self.allocator, &self.streams);
        Pointers { allocator, streams }
    }
}

/// A figure of one source under one work, in the form that harnesses of other allocators write, too.
fn line(work: &str, name: &str, case: &str, value: f64, unit: &str) -> String {
    let digits = match unit {
        "Mops/s" => 2,
        "calls" => 4,
        _ => 1,
    };
    format!("{work} {name} {case}: {value:.digits$} {unit}")
}

type Figure = Result<f64, workload::Failure>;

impl Bench<'_> {
    /// Every work has an allocator of its own, so that none meets the memory of another.
    fn work(&mut self, work: Work) -> Result<(), Failure> {
        let rig = match self.rig() {
            Ok(rig) => rig,
            Err(error) => {
                let why = format!("the allocator cannot be made: {}", text::chain(&*error));
                let value = work.to_possible_value();
                let name = value.as_ref().map_or("", |value| value.get_name());
                return Ok(self.figure(name, OURS, "", "", Err(why.into()))?);
            }
        };
        self.policy = rig.allocator.policy().name();
        match work {
            Work::Pair => self.pairs(&rig)?,
            Work::Raw => {
                for bytes in PAIRS {
                    self.pair("pair", RAW, &rig.pointers(), bytes)?;
                }
            }
            Work::Churn => self.churns(&rig)?,
            Work::Threads => self.small_threads(&rig)?,
            Work::LargeThreads => {
                let churn = |thread, operations| Churn::of_thread_sized(thread, operations, MIB);
                let work = ("threads own-stream-1MiB", OURS);
                self.threads(work, &rig.handles(), |thread| thread, churn)?;
            }
            Work::Cross => self.crossings(&rig)?,
            Work::FreeBlocks => self.free_blocks()?,
            Work::FrontEnds => self.front_ends(&rig)?,
            Work::Ranges => self.ranges(&rig)?,
        }
        if let Err(error) = rig.allocator.close() {
            let why = text::chain(&error);
            output::error(&format!("the allocator cannot be closed: {why}"));
            self.well = false;
        }
        Ok(())
    }

    fn rig(&self) -> Result<Rig, workload::Failure> {
        let config = self.settings.config().clone();
        let allocator = Allocator::with_config(self.context, config)?;
        let streams = (0..STREAMS).map(|_| Stream::new(self.context));
        Ok(Rig {
            streams: streams.collect::<Result<_, _>>()?,
            allocator,
        })
    }

    /// Writes a figure, or on stderr why there is none.
    fn figure(
        &mut self,
        work: &str,
        name: &str,
        case: impl Into<String>,
        unit: &str,
        figure: Figure,
    ) -> io::Result<()> {
        let (case, error) = (case.into(), figure.as_ref().err());
        let error = error.map(|error| text::chain(&**error));
        if let Some(why) = &error {
            output::error(&format!("{work} {name} {case}: {why}"));
            self.well = false;
        }
        if self.output.json {
            self.output.json(&json!({
                "schema": SCHEMA,
                "work": work,
                "name": name,
                "case": case,
                "value": figure.ok(),
                "unit": unit,
                "device": self.device,
                "policy": if name == HOST { "-" } else { self.policy },
                "error": error,
            }))
        } else if let Ok(value) = figure {
            self.output.line(&line(work, name, &case, value, unit))
        } else {
            Ok(())
        }
    }

    fn pair<S: Source>(
        &mut self,
        work: &str,
        name: &str,
        source: &S,
        bytes: usize,
    ) -> io::Result<()> {
        let figure = pair(source, bytes, &self.scale);
        self.figure(work, name, format!("{bytes} B"), "ns", figure)
    }

    /// Of the sizes of all harnesses, and of 1 GiB, which is a load on a default configuration that
    /// does not keep memory.
    fn pairs(&mut self, rig: &Rig) -> io::Result<()> {
        for bytes in PAIRS.into_iter().chain([1024 * MIB]) {
            self.pair("pair", OURS, &rig.handles(), bytes)?;
        }
        for bytes in PAIRS {
            self.pair("pair", HOST, &Malloc, bytes)?;
        }
        // What a recording to rings in memory adds. Where another one runs there is no figure.
        let (handles, bytes) = (rig.handles(), 4 * KIB);
        let figure = match Recorder::start(Target::Memory) {
            Ok(_recorder) => pair(&handles, bytes, &self.scale),
            Err(error) => Err(error.into()),
        };
        self.figure("pair recorded", OURS, format!("{bytes} B"), "ns", figure)
    }

    fn churns(&mut self, rig: &Rig) -> io::Result<()> {
        let divisor = self.scale.divisor;
        let small = Churn::log_uniform(4096, 400_000 / divisor, 1, 512, 64 * KIB);
        self.churn("churn small", "4096 slots 512B-64KiB", rig, &small)?;
        let wide = Churn::log_uniform(2048, 200_000 / divisor, 2, 512, 32 * MIB);
        self.churn("churn wide", "2048 slots 512B-32MiB", rig, &wide)
    }

    fn churn(&mut self, work: &str, case: &str, rig: &Rig, churned: &Churn) -> io::Result<()> {
        let (handles, pointers) = (rig.handles(), rig.pointers());
        for (name, figure) in [
            (OURS, churn(&handles, churned, &self.scale)),
            (RAW, churn(&pointers, churned, &self.scale)),
            (HOST, churn(&Malloc, churned, &self.scale)),
        ] {
            self.figure(work, name, case, "ns/op", figure)?;
        }
        Ok(())
    }

    /// Figures of each number of threads, of which each has the stream that `stream` says.
    fn threads<S: Source>(
        &mut self,
        (work, name): (&str, &str),
        source: &S,
        stream: impl Fn(usize) -> usize + Sync,
        churn: impl Fn(usize, usize) -> Churn + Sync,
    ) -> io::Result<()> {
        for count in THREADS {
            let figure = threads(source, count, &stream, &churn, &self.scale);
            self.figure(work, name, format!("T={count}"), "Mops/s", figure)?;
        }
        Ok(())
    }

    fn small_threads(&mut self, rig: &Rig) -> io::Result<()> {
        let (handles, own, churn) = (rig.handles(), |thread| thread, Churn::of_thread);
        self.threads(("threads own-stream", OURS), &handles, own, churn)?;
        self.threads(("threads one-stream", OURS), &handles, |_| 0, churn)?;
        self.threads(("threads own-stream", HOST), &Malloc, own, churn)
    }

    fn crossings(&mut self, rig: &Rig) -> io::Result<()> {
        for count in [1, 16] {
            let case = format!("T={count}");
            let figures = match crossing(&rig.handles(), count, &self.scale) {
                Ok(figures) => figures,
                Err(error) => return self.figure("cross-stream", OURS, case, "", Err(error)),
            };
            for ((work, unit), value) in CROSSED.into_iter().zip(figures) {
                self.figure(work, OURS, case.as_str(), unit, Ok(value))?;
            }
        }
        Ok(())
    }

    /// A small pair beside small free blocks, a large one beside large ones. None of them has a free
    /// neighbour.
    fn free_blocks(&mut self) -> Result<(), Failure> {
        for (bytes, low, high) in [(20 * KIB, 512, 64 * KIB), (MIB, 128 * KIB, 256 * KIB)] {
            let mut count = 10;
            while count <= 100_000 / self.scale.divisor {
                let figure = self.beside_free_blocks(bytes, low, high, count);
                let case = format!("{bytes} B N={count}");
                self.figure("free-blocks", OURS, case, "ns", figure)?;
                count *= 10;
            }
        }
        Ok(())
    }

    fn beside_free_blocks(&self, bytes: usize, low: usize, high: usize, count: usize) -> Figure {
        let rig = self.rig()?;
        let handles = rig.handles();
        let stream = handles.stream(0);
        let mut kept = Vec::with_capacity(2 * count);
        for size in workload::log_uniform_sizes(2 * count, 3, low, high) {
            kept.push(Some(handles.allocate(size, &stream)?));
        }
        kept.iter_mut().step_by(2).for_each(|block| *block = None);
        let figure = pair(&handles, bytes, &self.scale)?;
        kept.clear();
        rig.allocator.close()?;
        Ok(figure)
    }

    fn front_ends(&mut self, rig: &Rig) -> io::Result<()> {
        let (allocator, streams, bytes) = (&rig.allocator, &rig.streams, 4 * KIB);
        self.pair("pair stack", OURS, &Stack::new(allocator, streams), bytes)?;
        let workspaces = workspaces(allocator, streams);
        self.pair("pair workspace", OURS, &workspaces, bytes)?;
        self.pair("pair typed-pool", OURS, &typed(allocator, streams), bytes)
    }

    fn ranges(&mut self, rig: &Rig) -> io::Result<()> {
        if rig.allocator.policy() == Policy::Classic {
            self.output.note("the classic policy has no ranges");
            return Ok(());
        }
        let figures = match ranges(&rig.allocator, &rig.streams, &self.scale) {
            Ok(figures) => figures,
            Err(error) => return self.figure("range", OURS, "1 GiB", "", Err(error)),
        };
        for (work, mut times) in figures {
            times.sort_by(f64::total_cmp);
            for (case, of_100) in [("50%", 50), ("99%", 99)] {
                let rank = (times.len() * of_100).div_ceil(100);
                let value = times.get(rank.saturating_sub(1)).copied();
                let figure = value.ok_or_else(|| "no round was measured".into());
                self.figure(&format!("range {work}"), OURS, case, "us", figure)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
