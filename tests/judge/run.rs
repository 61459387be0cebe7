//! Runs programs, shrinks what fails, and prints it.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use cualloc::allocator::{Allocator, Config};
use cualloc::driver::Stream;
use cualloc::driver::sys::*;
use cualloc::sim::{SimConfig, Simulator};

use super::common::shrink::{Failure, guarded, shrink};
use super::graphs;
use super::profiles::PROFILES;
use super::program::{Profile, Setup, Step, generate};
use super::table::Checker;
use super::threads;
use super::world::{Done, World};

/// Programs in all, unless the environment asks for more.
const PROGRAMS: u64 = 1700;

fn text(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn setting(name: &str, default: u64) -> u64 {
    text(name).map_or(default, |value| {
        let value = value.replace('_', "");
        let parsed = match value.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16),
            None => value.parse(),
        };
        parsed.unwrap_or_else(|_| panic!("{name}={value} is no number"))
    })
}

/// Whether a feature of programs is switched off.
fn without(feature: &str) -> bool {
    let list = text("CUALLOC_JUDGE_WITHOUT").unwrap_or_default();
    list.split(',').any(|name| name == feature)
}

/// Counts the blocks of which the library says that it gives them up, for each thread.
struct Announced;

thread_local! {
    static GIVEN_UP: Cell<u64> = const { Cell::new(0) };
}

impl log::Log for Announced {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        assert_eq!(cualloc::sim::locks_held(), 0, "{}", record.args());
        let text = record.args().to_string();
        if text.contains("is leaked") || text.contains("are never freed") {
            let _ = GIVEN_UP.try_with(|count| count.set(count.get() + 1));
        }
    }

    fn flush(&self) {}
}

/// Blocks that were given up in this thread's program.
pub fn given_up() -> u64 {
    GIVEN_UP.get()
}

/// What many programs did.
#[derive(Default)]
pub struct Sums {
    pub steps: AtomicU64,
    pub calls: AtomicU64,
    failed: AtomicU64,
    allocations: AtomicU64,
}

impl Sums {
    /// What one program's judge has counted.
    pub fn add(&self, checker: &Checker) {
        let add = |sum: &AtomicU64, of: &AtomicU64| {
            sum.fetch_add(of.load(Ordering::Relaxed), Ordering::Relaxed);
        };
        add(&self.calls, &checker.calls);
        add(&self.failed, &checker.failed);
        self.allocations
            .fetch_add(checker.tracker().blocks, Ordering::Relaxed);
    }
}

fn attempt(setup: &Setup, steps: &[Step], sums: &Sums) -> Result<(), Failure> {
    let mut at = 0;
    GIVEN_UP.set(0);
    let result = guarded(|| {
        let mut world = World::new(setup)?;
        world.checker.fail(setup.fault);
        let checker = world.checker.clone();
        let mut run = || -> Done {
            for step in steps {
                world.step(*step)?;
                at += 1;
            }
            Ok(())
        };
        let stepped = run();
        let ended = stepped.and_then(|()| world.end());
        sums.steps.fetch_add(at as u64, Ordering::Relaxed);
        sums.add(&checker);
        ended
    });
    leave(&result);
    result.map_err(|what| Failure { step: at, what })
}

/// A program ends. What one that failed leaves behind, such as an allocator that could not be closed, is let go
/// by the next allocator that is made: before the next program, and while its calls still have this judge.
fn leave(result: &Done) {
    if result.is_err() {
        let checker = super::table::checker();
        checker.fail(None);
        let made = || -> Result<(), Box<dyn std::error::Error>> {
            let sim = Simulator::new(SimConfig::default())?;
            let driver = sim.driver()?;
            let context = driver.context(0)?;
            drop(Allocator::with_config(&context, Config::new())?);
            Ok(())
        };
        let _ = made();
    }
    Checker::leave();
}

/// Runs one program; what it says if it fails.
fn judge(profile: &Profile, number: u64, sums: &Sums) -> Option<String> {
    let (setup, steps) = generate(profile, number, &without);
    let head = format!("profile {}, program {number:#x}", profile.name);
    if profile.name == "threads" {
        GIVEN_UP.set(0);
        let result = guarded(|| threads::attempt(&setup, profile.steps, &without, &sums.calls));
        leave(&result);
        return result
            .err()
            .map(|what| format!("{head}: {}: {what}", threads::describe(&setup)));
    }
    if profile.graphs {
        GIVEN_UP.set(0);
        let result = guarded(|| graphs::attempt(&setup, profile.steps, sums));
        leave(&result);
        return result.err().map(|what| format!("{head}: {what}"));
    }
    let failure = attempt(&setup, &steps, sums).err()?;
    let first = format!("{head}: step {}: {}", failure.step, failure.what);
    if text("CUALLOC_JUDGE_KEEP_GOING").is_some() {
        return Some(first);
    }
    let unseen = Sums::default();
    let again = |steps: &[Step]| attempt(&setup, steps, &unseen);
    let (small, failure) = shrink(&steps, failure, again, |_| Vec::new());
    let lines: Vec<String> = small.iter().map(|step| format!("    {step:?},")).collect();
    Some(format!(
        "{first}\n{setup:#?}\nshrunk to {} steps:\n{}\nstep {}: {}",
        small.len(),
        lines.join("\n"),
        failure.step,
        failure.what
    ))
}

/// Makes the process watchful, as a capture does.
fn become_watchful() -> Result<(), Box<dyn std::error::Error>> {
    let sim = Simulator::new(SimConfig::default())?;
    let driver = sim.driver()?;
    let context = driver.context(0)?;
    let stream = Stream::new(&context)?;
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
    stream.end_capture()?;
    Ok(())
}

/// Whether a program is judged in a process that watches for captures: it captures, or meets answers that are
/// about captures. One such program makes the process watchful for good.
fn watches(profile: &Profile, number: u64) -> bool {
    let (setup, _) = generate(profile, number, &without);
    let code = setup.fault.map(|fault| fault.code);
    text("CUALLOC_JUDGE_WATCHFUL").is_some()
        || profile.captures
        || code == Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
}

/// The programs of a run.
fn programs(seed: u64, count: u64) -> Vec<(&'static Profile, u64)> {
    let only = text("CUALLOC_JUDGE_PROFILE");
    let wanted = |profile: &&Profile| only.as_ref().is_none_or(|name| name == profile.name);
    let chosen: Vec<&Profile> = PROFILES.iter().filter(wanted).collect();
    assert!(!chosen.is_empty(), "no profile is named {only:?}");
    let total: u64 = chosen.iter().map(|p| p.share).sum();
    let mut list = Vec::new();
    for profile in chosen {
        let part = (count * profile.share).div_ceil(total);
        list.extend((0..part).map(|n| (profile, seed << 32 | n)));
    }
    if let Some(share) = text("CUALLOC_JUDGE_SHARE") {
        let (at, of) = share.split_once('/').expect("one share of some");
        let (at, of): (usize, usize) = (at.parse().unwrap(), of.parse().unwrap());
        let mine = list.into_iter().enumerate().filter(|(n, _)| n % of == at);
        return mine.map(|(_, program)| program).collect();
    }
    list
}

/// Runs the programs in several processes: allocators without handles, and that something was captured, are
/// matters of a whole process.
fn run_unlocked(processes: u64) {
    let itself = std::env::current_exe().expect("a program");
    let begin = |at: u64| {
        std::process::Command::new(&itself)
            .args([
                "random_programs_are_judged_by_the_calls_alone",
                "--nocapture",
            ])
            .env("CUALLOC_JUDGE_SHARE", format!("{at}/{processes}"))
            .spawn()
            .expect("a process")
    };
    let all: Vec<_> = (0..processes).map(begin).collect();
    let failed = all.into_iter().map(|mut one| one.wait().expect("its end"));
    let failed = failed.filter(|status| !status.success()).count();
    assert_eq!(failed, 0, "processes with programs that fail");
}

fn run(count: u64) {
    let seed = setting("CUALLOC_JUDGE_SEED", 1);
    let keep_going = text("CUALLOC_JUDGE_KEEP_GOING").is_some();
    let list = match text("CUALLOC_JUDGE_PROGRAM") {
        Some(_) => {
            let number = setting("CUALLOC_JUDGE_PROGRAM", 0);
            let mut one = programs(seed, 1);
            one.truncate(1);
            one[0].1 = number;
            one
        }
        None => programs(seed, count),
    };
    static ANNOUNCED: Announced = Announced;
    if log::set_logger(&ANNOUNCED).is_ok() {
        log::set_max_level(log::LevelFilter::Warn);
    }
    let (sums, mut failures) = (Sums::default(), Vec::new());
    let started = Instant::now();
    // Those of a watchful process begin when all others are done, so that each meets what it meets alone.
    let (watchful, quiet): (Vec<_>, Vec<_>) =
        list.iter().partition(|(p, number)| watches(p, *number));
    for part in [&quiet, &watchful] {
        if std::ptr::eq(part, &watchful) && !part.is_empty() {
            become_watchful().expect("a capture");
        }
        for (profile, number) in part {
            if !keep_going && !failures.is_empty() {
                break;
            }
            if let Some(failure) = judge(profile, *number, &sums) {
                if keep_going {
                    eprintln!("{failure}");
                }
                failures.push((profile.name, failure));
            }
        }
    }
    let took = started.elapsed().as_secs_f64();
    let of = |sum: &AtomicU64| sum.load(Ordering::Relaxed);
    eprintln!(
        "{} programs judged in {took:.1} s ({:.0} a second): {} steps, {} blocks, {} calls of the driver, {} \
         of them made to fail",
        list.len(),
        list.len() as f64 / took,
        of(&sums.steps),
        of(&sums.allocations),
        of(&sums.calls),
        of(&sums.failed)
    );
    for profile in PROFILES {
        let count = failures
            .iter()
            .filter(|(name, _)| *name == profile.name)
            .count();
        if count > 0 {
            eprintln!("{count} programs of {} fail", profile.name);
        }
    }
    if let Some((_, first)) = failures.first() {
        panic!("{first}");
    }
}

/// Every profile. `CUALLOC_JUDGE_*` makes it longer, or picks programs.
#[test]
fn random_programs_are_judged_by_the_calls_alone() {
    let processes = setting("CUALLOC_JUDGE_PROCESSES", 1).clamp(1, 256);
    if processes > 1 && text("CUALLOC_JUDGE_SHARE").is_none() {
        return run_unlocked(processes);
    }
    run(setting("CUALLOC_JUDGE_PROGRAMS", PROGRAMS));
}
