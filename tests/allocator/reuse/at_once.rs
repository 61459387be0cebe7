//! Requests that find ready memory while several streams are known take it in one step, with the same result as step by
//! step.

use crate::common::prelude::*;
use crate::common::rng::Rng;
use cualloc::allocator::ReclaimStats;

/// The outcome of the program of a seed: the place of each block, how requests were served, and the driver calls by
/// name. Requests have no constraints, or constraints without effect: the latter are served step by step.
fn outcome(
    seed: u64,
    wishing: bool,
    mode: Mode,
    limit: Option<u64>,
) -> (Vec<u64>, ReclaimStats, Vec<u64>) {
    let rig = Rig::new(Policy::Packed, SimConfig::with_devices(1, 8 << 30));
    let sim = rig.maybe_sim().unwrap();
    let allocator = rig.allocator_with(Config::new().views(false).limit(limit));
    let streams = rig.streams::<3>();
    sim.set_mode(mode);
    let mut random = Rng::new(seed);
    let (mut live, mut addresses) = (Vec::new(), Vec::new());
    for step in 0..9000 {
        // Two streams are silent for some time, so that they rest and come back.
        let several = step / 3000 != 1;
        let stream = &streams[if several { random.index(3) } else { 0 }];
        match random.index(8) {
            0 => {
                let idle = streams[random.index(3)].id().unwrap();
                sim.complete_stream(idle, 1 + random.index(40));
            }
            1..4 if live.len() > 8 => drop(live.swap_remove(random.index(live.len()))),
            4 if !live.is_empty() => {
                let block: &cualloc::Block = &live[random.index(live.len())];
                block.record_stream(stream).unwrap();
            }
            _ if live.len() < 40 => {
                let request = Request::new(65 * KIB + random.index(6 * MIB)).views(!wishing);
                match allocator.allocate_with(request, stream) {
                    Ok(block) => {
                        addresses.push(block.ptr());
                        live.push(block);
                    }
                    Err(Error::OutOfMemory(_)) => addresses.push(0),
                    Err(error) => panic!("{error}"),
                }
            }
            _ => drop(live.swap_remove(random.index(live.len()))),
        }
    }
    allocator.check().unwrap();
    let names = [
        "cuEventRecord",
        "cuEventQuery",
        "cuStreamWaitEvent",
        "cuStreamQuery",
        "cuMemMap",
    ];
    let calls = names.map(|name| rig.calls(name)).to_vec();
    let served = allocator.stats().reclaim;
    drop(live);
    for stream in &streams {
        sim.complete_stream(stream.id().unwrap(), usize::MAX);
    }
    sim.set_mode(Mode::Instant);
    rig.close(&allocator);
    rig.assert_clean();
    (addresses, served, calls)
}

#[test]
fn one_call_finds_what_single_steps_find() {
    if on_cuda() {
        return eprintln!("SKIPPED on cuda: needs the simulator");
    }
    for seed in 1..9 {
        for (mode, limit) in [
            (Mode::Manual, None),
            (Mode::Manual, Some(160 << 20)),
            (Mode::Instant, None),
        ] {
            let [plain, wishing] = [false, true].map(|wishing| outcome(seed, wishing, mode, limit));
            assert!(plain.0.len() > 1000, "{} blocks", plain.0.len());
            assert_eq!(plain, wishing, "seed {seed}, {mode:?}, limit {limit:?}");
        }
    }
}
