//! Measures suspending and resuming memory, beside the bare driver calls for as many handles.
//!
//! ```text
//! cargo run --release --example suspend --features sim -- [--sim] [--peer N] [--others N] [GIB [HANDLE_MIB [KEPT_GIB [ROUNDS]]]]
//! ```
//!
//! By default: 20 GiB in handles of 32 MiB without contents, then 8 GiB kept in page-locked memory, 5 rounds each, on
//! device 0. With `--sim`, and without a driver, it runs on the simulator (1 GiB once by default), whose times are
//! those of its own work. With `--peer` another device has access, too. Times are medians, in milliseconds. With
//! `--others` a number of rounds follows in which another process takes all free memory between a suspension and its
//! resume: contents are compared, and a resume that lacks memory reports how much is missing.

use std::error::Error;
use std::time::Instant;

use cualloc::allocator::{Allocator, Config, Contents, Keep, Policy, Scope, Select};
use cualloc::driver::{Context, Device, Driver, HostMemory, MemoryProperties, Stream};
use cualloc::sim::{SimConfig, Simulator};

const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// The sizes to measure.
struct Plan {
    bytes: usize,
    handle: usize,
    kept: usize,
    rounds: usize,
    peer: Option<usize>,
    others: usize,
}

/// Has a process of this program take the memory that is free, and no more.
const TAKE: &str = "--take";

/// Times of one kind.
#[derive(Default)]
struct Times(Vec<f64>);

impl Times {
    fn of<T, E>(&mut self, run: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let begun = Instant::now();
        let done = run();
        self.0.push(begun.elapsed().as_secs_f64() * 1e3);
        done
    }

    fn median(&self) -> f64 {
        let mut times = self.0.clone();
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).copied().unwrap_or(0.0)
    }
}

fn main() -> Outcome {
    let (mut numbers, mut simulated, mut peer) = (Vec::new(), false, None);
    let (mut others, mut takes) = (0, false);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--sim" => simulated = true,
            TAKE => takes = true,
            "--others" => others = words.next().map_or(Ok(0), |word| word.parse())?,
            "--peer" => peer = words.next().map(|word| word.parse()).transpose()?,
            number => numbers.push(number.parse::<usize>()?),
        }
    }
    // Without a driver it runs all the same, to be seen.
    let simulated = simulated || Driver::load().is_err();
    let (all, keep, rounds) = if simulated { (1, 0, 1) } else { (20, 8, 5) };
    let number = |at: usize, default: usize| numbers.get(at).copied().unwrap_or(default);
    let plan = Plan {
        bytes: number(0, all) * GIB,
        handle: number(1, 32) * MIB,
        kept: number(2, keep) * GIB,
        rounds: number(3, rounds).max(1),
        peer,
        others,
    };
    let simulator = match simulated {
        true => Some(Simulator::new(SimConfig::with_devices(2, 80 << 30))?),
        false => None,
    };
    let driver = match &simulator {
        Some(simulator) => simulator.driver()?,
        None => Driver::load()?.clone(),
    };
    let context = Context::primary(&driver.device(0)?)?;
    if takes {
        return take(&context);
    }
    bare(&context, &plan)?;
    dropped(&context, &plan)?;
    if plan.kept > 0 {
        kept(&context, &plan)?;
    }
    if plan.others > 0 {
        others_between(&context, &plan, simulated)?;
    }
    Ok(())
}

/// Takes the memory that is free, but for what the driver needs itself, and writes it.
fn take(context: &Context) -> Outcome {
    let allocator = Allocator::with_config(context, Config::new().policy(Policy::Packed))?;
    let stream = allocator.create_stream()?;
    let bytes = (context.mem_info()?.free as usize).saturating_sub(GIB) / MIB * MIB;
    let block = allocator.allocate(bytes, &stream)?;
    // SAFETY: the block is live, and of this size.
    unsafe { stream.memset(block.ptr(), 0xee, bytes) }?;
    stream.synchronize()?;
    drop(block);
    Ok(allocator.close()?)
}

/// Another process has the memory between; in the end this one has it, and the resume is refused until it has not.
fn others_between(context: &Context, plan: &Plan, simulated: bool) -> Outcome {
    let allocator = allocator(context, plan)?;
    let stream = allocator.create_stream()?;
    let bytes = plan.kept.clamp(64 * MIB, GIB);
    let kept = allocator.allocate(bytes, &stream)?;
    // A cache, whose contents are not needed again.
    let pool = allocator.graph_pool_for("cache")?;
    let scope = pool.enter(Scope::Thread)?;
    let lost = allocator.allocate(plan.bytes, &stream)?;
    scope.leave()?;
    let keep = Keep::from(Contents::Pinned).tag("cache", Contents::Drop);
    // SAFETY: the block is live, and of this size.
    unsafe { stream.memset(kept.ptr(), 0x5a, bytes) }?;
    let (mut up, mut down) = (Times::default(), Times::default());
    for _ in 0..plan.others {
        // SAFETY: no work uses the memory.
        down.of(|| unsafe { allocator.suspend(Select::Allocator, keep.clone()) })?;
        let mut other = std::process::Command::new(std::env::current_exe()?);
        other.arg(TAKE).args(simulated.then_some("--sim"));
        assert!(other.status()?.success(), "the other process got no memory");
        up.of(|| allocator.resume(Select::Allocator))?;
        compare(context, &stream, kept.ptr(), bytes)?;
    }
    println!(
        "{} rounds with another process between: down {:.1} ms, up {:.1} ms, contents equal",
        plan.others,
        down.median(),
        up.median()
    );
    // SAFETY: no work uses the memory.
    let done = unsafe { allocator.suspend(Select::Allocator, keep) }?;
    let second = Allocator::with_config(context, Config::new().policy(Policy::Packed))?;
    let room = context.mem_info()?.free as usize;
    let most = room.saturating_sub(done.bytes as usize / 2) / MIB * MIB;
    let taken = second.allocate(most, &stream)?;
    match allocator.resume(Select::Allocator) {
        Err(cualloc::Error::OutOfMemory(why)) => {
            println!("without memory: {} MiB lack", why.requested >> 20);
            assert!(why.requested > 0 && why.requested <= done.bytes);
        }
        other => return Err(format!("a resume without memory: {other:?}").into()),
    }
    drop(taken);
    stream.synchronize()?;
    second.close()?;
    allocator.resume(Select::Allocator)?;
    compare(context, &stream, kept.ptr(), bytes)?;
    drop((kept, lost, pool));
    Ok(allocator.close()?)
}

/// Checks that kept contents are unchanged.
fn compare(context: &Context, stream: &Stream, at: u64, bytes: usize) -> Outcome {
    let mut read = vec![0u8; 64 * MIB];
    let entered = context.enter()?;
    for start in (0..bytes).step_by(read.len()) {
        let part = read.len().min(bytes - start);
        let (to, from) = (read.as_mut_ptr().cast(), at + start as u64);
        // SAFETY: the buffer is as large and is kept until the stream was waited for.
        unsafe { entered.copy_device_to_host(to, from, part, stream.raw()) }?;
        stream.synchronize()?;
        assert!(
            read[..part].iter().all(|byte| *byte == 0x5a),
            "contents changed"
        );
    }
    Ok(())
}

fn devices(context: &Context, plan: &Plan) -> Outcome<Vec<Device>> {
    let mut devices = vec![context.device().clone()];
    if let Some(peer) = plan.peer {
        devices.push(context.driver().device(peer)?);
    }
    Ok(devices)
}

/// The calls of the driver alone: create, map and access; unmap and release.
fn bare(context: &Context, plan: &Plan) -> Outcome {
    let entered = context.enter()?;
    let properties = MemoryProperties::for_device(context.device())?;
    let access = devices(context, plan)?;
    let count = plan.bytes / plan.handle;
    let base = entered.address_reserve(count * plan.handle, 0, 0)?;
    let at = |n: usize| base + (n * plan.handle) as u64;
    let (mut up, mut down) = (Times::default(), Times::default());
    for _ in 0..plan.rounds {
        let handles = up.of(|| -> Outcome<Vec<u64>> {
            let mut handles = Vec::with_capacity(count);
            for _ in 0..count {
                handles.push(entered.mem_create(plan.handle, &properties)?);
            }
            for (n, handle) in handles.iter().enumerate() {
                // SAFETY: reserved for this handle alone.
                unsafe { entered.mem_map(at(n), plan.handle, *handle) }?;
            }
            // SAFETY: mapped just now.
            unsafe { entered.set_access(base, count * plan.handle, &access) }?;
            Ok(handles)
        })?;
        down.of(|| -> Outcome {
            for n in 0..count {
                // SAFETY: no work uses it.
                unsafe { entered.mem_unmap(at(n), plan.handle) }?;
            }
            for handle in handles {
                // SAFETY: mapped nowhere any more.
                unsafe { entered.mem_release(handle) }?;
            }
            Ok(())
        })?;
    }
    // SAFETY: nothing is mapped there.
    unsafe { entered.address_free(base, count * plan.handle) }?;
    let (down, up) = (down.median(), up.median());
    println!("bare calls, {count} handles: down {down:.1} ms, up {up:.1} ms");
    Ok(())
}

fn allocator(context: &Context, plan: &Plan) -> Outcome<Allocator> {
    let config = Config::new().policy(Policy::Packed);
    let config = config.handle(plan.handle as u64).peers(plan.peer);
    Ok(Allocator::with_config(context, config)?)
}

/// Contents are lost.
fn dropped(context: &Context, plan: &Plan) -> Outcome {
    let allocator = allocator(context, plan)?;
    let stream = allocator.create_stream()?;
    let block = allocator.allocate(plan.bytes, &stream)?;
    let (mut up, mut down) = (Times::default(), Times::default());
    let mut handles = 0;
    for _ in 0..plan.rounds {
        let before = context.mem_info()?.free;
        // SAFETY: no work uses the memory.
        let done = down.of(|| unsafe { allocator.suspend(Select::Allocator, Contents::Drop) })?;
        handles = done.handles;
        assert!(context.mem_info()?.free >= before + done.bytes);
        up.of(|| allocator.resume(Select::Allocator))?;
    }
    let (down, up) = (down.median(), up.median());
    println!("suspended, {handles} handles: down {down:.1} ms, up {up:.1} ms");
    drop(block);
    Ok(allocator.close()?)
}

/// Contents are kept, and compared; beside what one copy of page-locked memory takes.
fn kept(context: &Context, plan: &Plan) -> Outcome {
    let allocator = allocator(context, plan)?;
    let stream = allocator.create_stream()?;
    let block = allocator.allocate(plan.kept, &stream)?;
    // SAFETY: the block is live, and of this size.
    unsafe { stream.memset(block.ptr(), 0x5a, plan.kept) }?;
    let rate = |ms: f64, bytes: usize| bytes as f64 / 1e6 / ms;
    let (out, back) = copies(
        context,
        &stream,
        block.ptr(),
        plan.kept.min(GIB),
        plan.rounds,
    )?;
    let bytes = plan.kept.min(GIB);
    println!(
        "copies of {} MiB: out {:.1} GB/s, back {:.1} GB/s",
        bytes / MIB,
        rate(out, bytes),
        rate(back, bytes)
    );
    for round in 0..=plan.rounds {
        let (mut up, mut down) = (Times::default(), Times::default());
        // SAFETY: no work uses the memory.
        down.of(|| unsafe { allocator.suspend(Select::Allocator, Contents::Pinned) })?;
        up.of(|| allocator.resume(Select::Allocator))?;
        let (down, up) = (down.median(), up.median());
        let what = match round {
            0 => "kept, with page-locking",
            _ => "kept",
        };
        println!(
            "{what}: down {down:.1} ms ({:.1} GB/s), up {up:.1} ms ({:.1} GB/s)",
            rate(down, plan.kept),
            rate(up, plan.kept)
        );
    }
    compare(context, &stream, block.ptr(), plan.kept)?;
    drop(block);
    Ok(allocator.close()?)
}

/// Milliseconds that a copy to page-locked memory takes, and one back.
fn copies(
    context: &Context,
    stream: &Stream,
    device: u64,
    bytes: usize,
    rounds: usize,
) -> Outcome<(f64, f64)> {
    let entered = context.enter()?;
    let host = entered.host_allocation(bytes, HostMemory::default())?;
    let (mut out, mut back) = (Times::default(), Times::default());
    for _ in 0..rounds {
        out.of(|| -> Outcome {
            // SAFETY: both have as many bytes, and the copy is waited for.
            unsafe {
                entered.copy_device_to_host(host.ptr().as_ptr(), device, bytes, stream.raw())
            }?;
            Ok(stream.synchronize()?)
        })?;
        back.of(|| -> Outcome {
            // SAFETY: both have as many bytes, and the copy is waited for.
            unsafe {
                entered.copy_host_to_device(device, host.ptr().as_ptr(), bytes, stream.raw())
            }?;
            Ok(stream.synchronize()?)
        })?;
    }
    Ok((out.median(), back.median()))
}
