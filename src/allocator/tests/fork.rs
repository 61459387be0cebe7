//! Forked children: a child finds locks that a thread of its parent held, and no call waits for them.

use crate::DeviceBuffer;
use crate::allocator::{Allocator, Config, Policy, ReliefHook};
use crate::driver::Stream;
use crate::driver::process::child_output;
use crate::error::Error;
use crate::sim::{SimConfig, Simulator};

type Test = Result<(), Box<dyn std::error::Error>>;

/// Whether the calls without an error answer like those of an allocator without memory.
fn answers_as_empty(a: &Allocator, ptr: u64) -> bool {
    a.set_limit(Some(1));
    a.reset_peaks();
    a.stats() == Default::default()
        && a.stats_and_snapshot() == Default::default()
        && a.snapshot().is_empty()
        && a.fragmentation() == Default::default()
        && a.cached() == 0
        && a.limit().is_none()
        && !a.owns(ptr)
        && a.block_of(ptr).is_none()
        && a.usable_size(ptr).is_none()
        && a.check().is_err()
        && !format!("{a:?}").is_empty()
        && matches!(a.test_views(), Err(Error::ForkedChild))
}

#[test]
fn d9_nothing_waits_for_the_heap_in_a_forked_child() -> Test {
    let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
    let driver = sim.driver()?;
    let context = driver.context(0)?;
    for policy in [Policy::Packed, Policy::Classic] {
        let a = Allocator::with_config(&context, Config::new().policy(policy))?;
        let stream = Stream::new(&context)?;
        let wide = a.allocate(3 << 20, &stream)?;
        let small = a.allocate(100, &stream)?;
        let guard = a.guard(wide.ptr(), 512)?;
        let buffer = DeviceBuffer::<u8>::zeroed(&a, 1000, &stream)?;
        // The stream's cache could serve the next request below the peak.
        drop(a.allocate(2000, &stream)?);
        let (of_wide, of_small) = (wide.size(), small.size());
        let locked = a.clone();
        let mut ours = Some((a, wide, small, guard, buffer));
        let heap = locked.engine().lock();
        let told = child_output(|| {
            let Some((a, wide, small, guard, buffer)) = ours.take() else {
                return false;
            };
            let sizes = (wide.size(), small.size()) == (of_wide, of_small);
            let text = format!("{wide:?} {small:?} {guard:?} {buffer:?}");
            let known = answers_as_empty(&a, wide.ptr()) && answers_as_empty(&a, small.ptr());
            let refused = matches!(a.trim(0), Err(Error::ForkedChild))
                && matches!(a.empty_cache(), Err(Error::ForkedChild))
                && a.allocate(100, &stream).is_err()
                && a.allocate(1 << 20, &stream).is_err()
                && a.guard(wide.ptr(), 1).is_err()
                && wide.record_use(&stream).is_err()
                && a.close().is_err();
            let kept = buffer.into_block();
            let freed = small.free();
            let ends = kept.is_err() && freed.is_err();
            drop((kept, freed, wide, guard, a));
            sizes && known && refused && ends && !text.is_empty()
        });
        drop(heap);
        assert!(told, "{policy:?}");
        drop(ours);
        locked.close()?;
    }
    Ok(())
}

#[test]
fn d9_nothing_waits_for_hooks_in_a_forked_child() -> Test {
    let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
    let driver = sim.driver()?;
    let context = driver.context(0)?;
    let a = Allocator::with_config(&context, Config::new())?;
    let told = a.engine().hooks.while_locked(|| {
        child_output(|| {
            !a.add_relief_hook(ReliefHook::new("new", |_| 0)) && !a.remove_relief_hook("new")
        })
    });
    assert!(told);
    Ok(())
}
