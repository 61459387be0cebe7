//! Stacks of some allocations, and what they tell of all.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::rng::Rng;
use crate::common::{Folder, assert_matches, wait_until};
use crate::scene::{MIB, Scene, alone};
use cualloc::Error;
use cualloc::allocator::{Allocator, Block};
use cualloc::driver::Stream;
use cualloc::record::{
    Action, Context, Profile, Recorder, Recording, Share, Snapshot, Target, set_stack_source,
};

const MEAN: u64 = 64 << 10;

std::thread_local! {
    static CURRENT: std::cell::Cell<Context> = const { std::cell::Cell::new(Context::NONE) };
}

/// Puts the thread in a context, which [`current`] gives as its stack. The context before.
fn enter(context: Context) -> Context {
    context.enter();
    CURRENT.replace(context)
}

fn current() -> Context {
    CURRENT.get()
}

#[inline(never)]
fn planted_cache(allocator: &Allocator, bytes: usize, stream: &Stream) -> Block {
    std::hint::black_box(allocator.allocate(bytes, stream).unwrap())
}

#[inline(never)]
fn planted_weights(allocator: &Allocator, bytes: usize, stream: &Stream) -> Block {
    std::hint::black_box(allocator.allocate(bytes, stream).unwrap())
}

/// The sum of the shares whose stack has a function.
fn share(profile: &Profile, function: &str) -> Share {
    let mut sum = Share::default();
    for (_, share) in profile.shares().filter(|(name, _)| name.contains(function)) {
        sum.allocations += share.allocations;
        sum.allocated += share.allocated;
        sum.live += share.live;
        sum.live_bytes += share.live_bytes;
    }
    sum
}

/// Whether not even a function of this program that is surely there has a name.
fn is_stripped() -> bool {
    let stack = std::backtrace::Backtrace::force_capture().to_string();
    !stack.contains("is_stripped")
}

fn within(part: f64, found: u64, exact: u64) -> bool {
    (found as f64 / exact as f64 - 1.0).abs() <= part
}

#[test]
fn estimates_are_within_a_twentieth_and_name_the_functions() {
    let _alone = alone();
    let scene = Scene::new("policy=packed");
    let (allocator, stream) = (&scene.allocator, scene.stream());
    let held = allocator.allocate(3 * MIB, &stream).unwrap();
    let folder = Folder::new("stacks");
    let file = folder.file("stacks.rec");
    let recorder = Recorder::start_with_stacks(Target::File(&file), MEAN).unwrap();
    let mut numbers = Rng::new(11);
    let (mut cache, mut weights) = (Vec::new(), Vec::new());
    let (mut asked, mut calls, mut frees) = (BTreeMap::new(), 0, 0);
    for round in 0..100_000u64 {
        let bytes = 1 + (1usize << (numbers.next() % 17)) + numbers.next() as usize % 3000;
        let (kept, block, name) = match round % 3 {
            0 => {
                let block = planted_weights(allocator, bytes, &stream);
                (&mut weights, block, "planted_weights")
            }
            _ => {
                let block = planted_cache(allocator, bytes, &stream);
                (&mut cache, block, "planted_cache")
            }
        };
        *asked.entry(name).or_insert(0) += bytes as u64;
        calls += 1;
        kept.push(block);
        if kept.len() > 4000 {
            let gone = numbers.next() as usize % kept.len();
            drop(kept.swap_remove(gone));
            frees += 1;
        }
        // Rings have room for what comes until the thread has written all of this.
        if round % 8_000 == 7_999 {
            wait_until("the records are in the file", || {
                std::fs::metadata(&file).unwrap().len() >= 32 * (calls + frees)
            });
        }
    }
    let live = |blocks: &[Block]| blocks.iter().map(|b| b.requested() as u64).sum::<u64>();
    recorder.finish().unwrap();
    let recording = Recording::read(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!((recording.sampling(), recording.lost()), (MEAN, 0));
    let profile = Profile::of_stacks(&recording);
    let named = profile
        .shares()
        .any(|(stack, _)| stack.contains("planted_"));
    if !named && is_stripped() {
        println!("SKIPPED: this program was stripped of its symbols, so functions have no names");
        return;
    }
    for (name, kept) in [("planted_cache", &cache), ("planted_weights", &weights)] {
        let found = share(&profile, name);
        let innermost = |stack: &str| stack.rsplit(';').next().map(str::to_owned);
        let stacks = profile.shares().filter(|(stack, _)| stack.contains(name));
        let others: Vec<String> = stacks
            .filter_map(|(stack, _)| innermost(stack))
            .filter(|function| !function.contains(name))
            .collect();
        assert!(others.is_empty(), "inside of {name}: {others:?}");
        let all = asked[name];
        assert!(
            within(0.05, found.allocated, all),
            "{name}: {found:?}, {all}"
        );
        // A part of them alone is seen, so the error is larger.
        let live = live(kept);
        assert!(
            within(0.15, found.live_bytes, live),
            "{name}: {found:?}, {live}"
        );
    }
    let whole = share(&profile, "");
    let exact = live(&cache) + live(&weights) + held.requested() as u64;
    assert!(within(0.05, whole.live_bytes, exact), "{whole:?}, {exact}");
    let samples = recording.events().iter();
    let samples = samples
        .filter(|event| event.action == Action::Sample)
        .count();
    let bytes: u64 = asked.values().sum();
    // A block of many times the mean is one sample, too.
    assert!(
        samples > 2_000 && (samples as u64) < bytes / MEAN,
        "{samples} of {calls}"
    );
    assert_eq!(share(&profile, "held").live_bytes, held.requested() as u64);
    // The same figures are in what other programs read.
    let collapsed = profile.to_collapsed();
    let sum = collapsed.lines().filter_map(|line| line.rsplit_once(' '));
    let sum: u64 = sum.map(|(_, bytes)| bytes.parse::<u64>().unwrap()).sum();
    assert_eq!(sum, whole.live_bytes);
    drop((cache, weights));
}

/// The live bytes of each context, at the moment of the profile.
fn live(profile: &Profile) -> BTreeMap<&str, u64> {
    let shares = profile
        .shares()
        .map(|(name, share)| (name, share.live_bytes));
    shares.filter(|(_, bytes)| *bytes > 0).collect()
}

/// Both profiles of a recording that has a stack for every block: the same sums by the context of the thread, and by a
/// stack that names it.
fn profiles(recording: &Recording) -> [Profile; 2] {
    [Profile::of(recording), Profile::of_stacks(recording)]
}

#[test]
fn sums_are_those_of_the_peak() {
    let _alone = alone();
    let scene = Scene::new("policy=packed");
    let (allocator, stream) = (&scene.allocator, scene.stream());
    let held = allocator.allocate(3 * MIB, &stream).unwrap();
    let [weights, step] = ["weights", "step"].map(Context::new);
    set_stack_source(Some(Arc::new(current)));
    let recorder = Recorder::start_with_stacks(Target::Memory, 1).unwrap();
    let nothing = recorder.read().unwrap();
    let within = |context: Context, bytes: usize| {
        let before = enter(context);
        let block = allocator.allocate(bytes, &stream).unwrap();
        enter(before);
        block
    };
    let kept = within(weights, 20 * MIB);
    for size in [1, 7, 5] {
        // The last of these is the peak of its round.
        let blocks: Vec<Block> = (0..3).map(|_| within(step, size * MIB)).collect();
        drop(blocks);
    }
    drop((kept, held));
    let late = within(step, MIB);
    let recording = recorder.read().unwrap();
    drop((recorder, late));
    set_stack_source(None);
    let mib = MIB as u64;
    for profile in profiles(&nothing) {
        let moment = profile.moment().unwrap();
        assert_eq!((moment.live, moment.failed), (3 * mib, None));
        assert!(profile.to_collapsed().ends_with(" 3145728\n"));
    }
    for (profile, held) in profiles(&recording).iter().zip(["untagged", "held"]) {
        let moment = profile.moment().unwrap();
        assert_eq!((moment.live, moment.failed), (44 * mib, None));
        assert!(
            moment.to_string().starts_with("at the peak, 0."),
            "{moment}"
        );
        assert!(
            moment.to_string().ends_with(" with 44.00 MiB live"),
            "{moment}"
        );
        let expected = [(held, 3 * mib), ("step", 21 * mib), ("weights", 20 * mib)];
        assert_eq!(live(profile), BTreeMap::from(expected));
        // All allocations count in the other figures, after the peak as well.
        let step = share(profile, "step");
        assert_eq!((step.allocations, step.allocated), (10, 40 * mib));
        assert_eq!(step.live, 3);
    }
}

#[test]
fn sums_are_those_of_the_last_request_without_memory() {
    let _alone = alone();
    let scene = Scene::new("limit=64MiB");
    let (allocator, stream) = (&scene.allocator, scene.stream());
    let [cache, step] = ["kv cache", "step"].map(Context::new);
    set_stack_source(Some(Arc::new(current)));
    let recorder = Recorder::start_with_stacks(Target::Memory, 1).unwrap();
    enter(step);
    let peak = allocator.allocate(60 * MIB, &stream).unwrap();
    let refused = |bytes: usize| {
        let refused = allocator.allocate(bytes, &stream);
        assert_matches!(refused, Err(Error::OutOfMemory(_)));
    };
    // Rows after a failure are not counted.
    refused(10 * MIB);
    drop(peak);
    let first = recorder.read().unwrap();
    enter(cache);
    let kept: Vec<Block> = (0..3)
        .map(|_| allocator.allocate(8 * MIB, &stream).unwrap())
        .collect();
    refused(50 * MIB);
    drop(kept);
    let second = recorder.read().unwrap();
    refused(70 * MIB);
    let later = allocator.allocate(62 * MIB, &stream).unwrap();
    let empty = recorder.read().unwrap();
    drop(later);
    enter(Context::NONE);
    set_stack_source(None);
    drop(recorder);
    let mib = MIB as u64;
    for (recording, context, bytes, requested) in [
        (&first, "step", 60, 10),
        (&second, "kv cache", 24, 50),
        (&empty, "", 0, 70),
    ] {
        for profile in profiles(recording) {
            let moment = profile.moment().unwrap();
            assert_eq!(moment.failed, Some(requested * mib));
            assert_eq!(moment.live, bytes * mib);
            let expected = [(context, bytes * mib)]
                .into_iter()
                .filter(|(_, bytes)| *bytes > 0);
            assert_eq!(live(&profile), expected.collect());
            let text = format!("when a request of {requested}.00 MiB ran out of memory, ");
            assert!(moment.to_string().starts_with(&text), "{moment}");
        }
    }
}

#[test]
fn a_recording_without_allocations_has_no_moment() {
    let _alone = alone();
    let recorder = Recorder::start_with_stacks(Target::Memory, 1).unwrap();
    let recording = recorder.read().unwrap();
    for profile in profiles(&recording) {
        assert_eq!(
            (profile.moment(), profile.to_collapsed().as_str()),
            (None, "")
        );
        assert_eq!(profile.shares().count(), 0);
    }
}

#[test]
fn a_source_reports_the_place_in_the_program() {
    let _alone = alone();
    let scene = Scene::new("policy=packed");
    let (allocator, stream) = (scene.allocator.clone(), scene.stream());
    let python = Context::new("train.py:7:step;model.py:3:forward");
    let asked = Arc::new(AtomicU64::new(0));
    let (count, inner, of) = (Arc::clone(&asked), allocator.clone(), stream.clone());
    set_stack_source(Some(Arc::new(move || {
        count.fetch_add(1, Ordering::Relaxed);
        // It is not asked about what it allocates itself.
        drop(inner.allocate(5 * MIB, &of).unwrap());
        python
    })));
    let recorder = Recorder::start_with_stacks(Target::Memory, 1).unwrap();
    // The sampling interval is one byte: each block is far more than the mean.
    let large = allocator.allocate(2 * MIB, &stream).unwrap();
    let small = allocator.allocate(40_000, &stream).unwrap();
    let again = allocator.allocate(40_000, &stream).unwrap();
    let request = cualloc::Request::new(50_000).align(4096);
    let wished = allocator.allocate_with(request, &stream).unwrap();
    // SAFETY: the stream is alive, and nothing runs on it.
    let raw = unsafe { allocator.allocate_raw(60_000, stream.raw()) }.unwrap();
    // SAFETY: the address was given just now.
    unsafe { allocator.free_raw(raw) }.unwrap();
    set_stack_source(None);
    let recording = recorder.read().unwrap();
    let profile = Profile::of_stacks(&recording);
    // In a snapshot the four blocks have it, and the five allocations twice: as a frame, and as what the program said.
    let snapshot = Snapshot::of(&recording);
    let found = snapshot.to_json().matches("model.py:3:forward").count();
    assert_eq!(found, 4 + 5 * 2);
    let folder = Folder::new("snapshot-of-stacks");
    let file = folder.file("snapshot.pickle");
    recorder.dump_snapshot(&file).unwrap();
    assert_eq!(std::fs::read(&file).unwrap(), snapshot.to_pickle());
    assert!(recorder.dump_snapshot(&folder.file("no/such")).is_err());
    drop(recorder);
    let found = share(&profile, "model.py:3:forward");
    // The peak is the allocation of the source itself while the last block is sampled.
    let sizes = [2 * MIB, 40_000, 40_000, 50_000, 60_000];
    assert_eq!(found.allocations, 5);
    assert_eq!(found.live, 5);
    assert_eq!(found.live_bytes, sizes.iter().sum::<usize>() as u64);
    assert_eq!(asked.load(Ordering::Relaxed), 5);
    // Without stacks the source is not called.
    let recorder = Recorder::start(Target::Memory).unwrap();
    drop(allocator.allocate(2 * MIB, &stream).unwrap());
    let recording = recorder.read().unwrap();
    assert_eq!(recording.sampling(), 0);
    assert!(
        recording
            .events()
            .iter()
            .all(|event| event.action != Action::Sample)
    );
    drop((recorder, large, small, again, wished));
}
