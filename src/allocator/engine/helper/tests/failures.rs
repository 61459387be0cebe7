//! Calls of the thread that fail.

use std::sync::Arc;

use super::{MIB, ask, grow, is_ahead, made, rig};
use crate::allocator::carried::Outcome;
use crate::driver::sys;
use crate::sim::FailPlan;

/// Every call of the thread fails in turn, alone and together with the next one.
#[test]
fn failures_are_nobodys_and_lose_nothing() -> Outcome {
    let play = |plan: Option<FailPlan>| -> Result<_, Box<dyn std::error::Error>> {
        let rig = rig()?;
        let [stream] = rig.streams()?;
        let failing = Arc::new(std::sync::Mutex::new(Vec::new()));
        let seen = Arc::clone(&failing);
        rig.sim.before(move |moment| {
            if is_ahead() {
                let mut seen = seen.lock().unwrap_or_else(|held| held.into_inner());
                seen.push(moment.call);
            }
        });
        // The request is through before the thread begins.
        let hold = rig.allocator.engine().stop_ahead();
        let block = rig.allocator.allocate(20 * MIB, &stream)?;
        drop(hold);
        if let Some(plan) = plan {
            rig.sim.fail(plan);
        }
        ask(rig.allocator.engine(), block.ptr() + (20 << 20), 16 << 20);
        rig.allocator.await_ahead();
        rig.sim.clear_failures();
        let calls = failing.lock().map_err(|_| "poisoned")?.clone();
        rig.allocator.check()?;
        let held = rig.allocator.stats().all.reserved.current;
        assert_eq!(held, rig.sim.memory_in_use(0));
        assert_eq!(rig.allocator.engine().lock().held(), held);
        assert_eq!(rig.allocator.engine().lock().ahead.under_way, 0);
        let bytes = made(&rig.allocator).bytes;
        drop(grow(&rig.allocator, 30, &stream)?);
        drop(block);
        rig.sim.clear_hooks();
        rig.end()?;
        Ok((calls, bytes))
    };
    let (calls, all) = play(None)?;
    assert_eq!(all, 16 << 20);
    let mut names = calls.clone();
    names.sort_unstable();
    names.dedup();
    assert!(names.contains(&"cuMemCreate") && names.contains(&"cuMemSetAccess"));
    let codes = [
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        sys::CUresult::CUDA_ERROR_INVALID_VALUE,
    ];
    for code in codes {
        for name in &names {
            let count = calls.iter().filter(|call| *call == name).count() as u64;
            for nth in 1..=count {
                let plan = FailPlan::call(name, code)?.nth(nth);
                let (_, bytes) =
                    play(Some(plan)).map_err(|error| format!("{name} {nth}: {error}"))?;
                assert!(bytes < all || !name.starts_with("cuMem"), "{name} {nth}");
            }
        }
        // Of two in a row the second may be one that undoes what the first left.
        for nth in 1..=calls.len() as u64 {
            for times in 2..=4 {
                play(Some(FailPlan::any(code).nth(nth).times(times)))
                    .map_err(|error| format!("{times} from {nth} on: {error}"))?;
            }
        }
    }
    Ok(())
}
