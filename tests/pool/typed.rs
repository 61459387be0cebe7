//! The typed pool.

use std::any::TypeId;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cualloc::driver::{Context, Driver, Stream, sys};
use cualloc::error::InvalidArgument;
use cualloc::pool::TypedPool;
use cualloc::resource::{MemoryResource, PerDevice};
use cualloc::sim::{SimConfig, Simulator};
use cualloc::{Allocator, Config, DeviceBuffer, Error, Policy};

use crate::common::{GIB, MIB, Rig, assert_matches, each, itself, only, only_on, wait_until};
use crate::fill;

fn pool_of(rig: &Rig) -> TypedPool {
    TypedPool::new(&rig.allocator())
}

/// Hits, misses and returns.
pub fn counts(pool: &TypedPool) -> (u64, u64, u64) {
    let usage = pool.usage().unwrap();
    assert_eq!(usage.requests, usage.hits + usage.misses);
    (usage.hits, usage.misses, usage.blocks.total_freed)
}

fn cached(pool: &TypedPool) -> u64 {
    pool.usage().unwrap().cached_bytes()
}

/// S2.1
#[test]
fn s2_1_lengths_are_rounded() {
    for (len, rounded) in [
        (0, 0),
        (1, 256),
        (255, 256),
        (256, 256),
        (257, 512),
        (usize::MAX, usize::MAX),
        (usize::MAX - 255, usize::MAX - 255),
        (usize::MAX - 254, usize::MAX),
    ] {
        assert_eq!(TypedPool::round_len(len), rounded, "{len}");
    }
}

/// S2.2
#[test]
fn s2_2_the_last_returned_comes_first() {
    each(|rig| {
        let (pool, stream) = (pool_of(rig), rig.stream());
        // The second are more together than a stream cache keeps as they are.
        for len in [1000, 8000, 300_000, 5_000_000] {
            let buffers: Vec<_> = (0..10)
                .map(|_| DeviceBuffer::<f32>::uninit(&pool, len, &stream).unwrap())
                .collect();
            // Neighbours, so that the free memory is one piece in the end.
            let mut addresses: Vec<_> = buffers.iter().map(|b| b.as_device_ptr()).collect();
            let mut order: Vec<_> = buffers.into_iter().collect();
            order.swap(0, 2);
            addresses.swap(0, 2);
            for buffer in order {
                drop(buffer);
            }
            let mut taken = Vec::new();
            for _ in 0..10 {
                // Rounded to the same length.
                let found = pool
                    .take::<f32>(TypedPool::round_len(len), &stream)
                    .unwrap();
                taken.push(found.expect("a hit"));
            }
            let got: Vec<_> = taken.iter().map(|b| b.as_device_ptr()).collect();
            addresses.reverse();
            assert_eq!(got, addresses, "len {len}");
        }
        pool.allocator().check().unwrap();
    });
}

/// S2.2
#[test]
fn s2_2_blocks_freed_by_others_are_not_preferred() {
    each(|rig| {
        let (pool, stream) = (pool_of(rig), rig.stream());
        for len in [1000, 300_000] {
            let buffer = DeviceBuffer::<u8>::uninit(&pool, len, &stream).unwrap();
            let address = buffer.as_device_ptr();
            let allocator = pool.allocator();
            let bytes = TypedPool::round_len(len);
            let block = allocator.allocate(bytes, &stream).unwrap();
            drop(buffer);
            drop(block);
            let again = pool.take::<u8>(len, &stream).unwrap();
            let again = again.expect("a hit");
            assert_eq!(again.as_device_ptr(), address, "len {len}");
        }
    });
}

/// S2.3, S2.4, S2.12
#[test]
fn s2_3_s2_4_s2_12_hits_and_misses_are_plain() {
    each(|rig| {
        let (pool, stream) = (pool_of(rig), rig.stream());
        for misses in 1..=5 {
            assert!(pool.take::<u8>(1000, &stream).unwrap().is_none());
            assert_eq!(counts(&pool).1, misses);
        }
        drop(DeviceBuffer::<u8>::uninit(&pool, 1000, &stream).unwrap());
        assert_eq!(counts(&pool), (0, 6, 1));
        let before = rig.driver.calls();
        drop(pool.take::<u8>(1000, &stream).unwrap().expect("a hit"));
        drop(DeviceBuffer::<u8>::uninit(&pool, 1000, &stream).unwrap());
        assert_eq!(rig.driver.calls().since(&before).total(), 0);
        assert_eq!(counts(&pool), (2, 6, 3));
        pool.reset_accumulated_stats();
        assert_eq!(counts(&pool), (0, 0, 0));
    });
}

/// S2.5, S2.14
#[test]
fn s2_5_s2_14_a_take_never_crosses_to_a_stream_that_would_have_to_wait() {
    each(|rig| {
        let (pool, [a, b]) = (pool_of(rig), rig.streams());
        for bytes in [4096, 8 * MIB] {
            let buffer = DeviceBuffer::<u8>::uninit(&pool, bytes, &b).unwrap();
            let address = buffer.as_device_ptr();
            let hold = rig.busy(&b);
            fill(&rig.context, address, bytes, &b);
            drop(buffer);
            // Handles and segments may be larger than what B has of them.
            let other = pool.take::<u8>(bytes, &a).unwrap();
            let whole = rig.packed() && bytes > MIB;
            assert!(other.is_none() || !whole, "a miss while B works");
            if let Some(other) = &other {
                assert_ne!(other.as_device_ptr(), address);
                fill(&rig.context, other.as_device_ptr(), bytes, &a);
            }
            // B's entry is still there.
            let again = pool.take::<u8>(bytes, &b).unwrap().expect("a hit");
            assert_eq!(again.as_device_ptr(), address);
            drop(other);
            hold.release();
            drop(again);
            a.synchronize().unwrap();
            b.synchronize().unwrap();
            // With nothing left to wait for any stream may have it.
            pool.allocator().synchronize().unwrap();
            assert!(pool.take::<u8>(bytes, &a).unwrap().is_some());
        }
    });
}

/// S2.6: the stream that is named gets the memory, after the work that it was given before.
#[test]
fn s2_6_a_return_may_name_the_next_stream() {
    each(|rig| {
        let [a, b] = rig.streams();
        let legacy = Stream::legacy(&rig.context);
        for (target, next) in [(Some(&b), &b), (None, &legacy)] {
            let pool = pool_of(rig);
            let mut buffers: Vec<_> = (0..4)
                .map(|_| Some(DeviceBuffer::<u8>::uninit(&pool, 8 * MIB, &a).unwrap()))
                .collect();
            let mut put = |at: usize| {
                let buffer = buffers[at].take().unwrap();
                let address = buffer.as_device_ptr();
                fill(&rig.context, address, 8 * MIB, &a);
                pool.put(buffer, target).unwrap();
                address
            };
            let mut returned = [put(1), put(3), put(2), put(0)];
            a.synchronize().unwrap();
            next.synchronize().unwrap();
            returned.sort_unstable();
            for _ in returned {
                let again = pool.take::<u8>(8 * MIB, next).unwrap().expect("a hit");
                let address = again.as_device_ptr();
                assert!(returned.binary_search(&address).is_ok());
                fill(&rig.context, address, 8 * MIB, next);
                std::mem::forget(again);
            }
            assert_eq!(counts(&pool).2, 4);
        }
        let pool = pool_of(rig);
        for bytes in [4096, 8 * MIB] {
            let buffer = DeviceBuffer::<u8>::uninit(&pool, bytes, &a).unwrap();
            let address = buffer.as_device_ptr();
            let hold = rig.busy(&b);
            pool.put(buffer, Some(&b)).unwrap();
            let other = DeviceBuffer::<u8>::uninit(&pool, bytes, &a).unwrap();
            assert_ne!(other.as_device_ptr(), address, "B is not done");
            hold.release();
        }
    });
}

/// S2.7, S2.13
#[test]
fn s2_7_s2_13_recorded_uses_end_with_the_stream() {
    each(|rig| {
        let (pool, [a, b]) = (pool_of(rig), rig.streams());
        for how in 0..3 {
            let buffer = DeviceBuffer::<f32>::uninit(&pool, 1000, &a).unwrap();
            let other = DeviceBuffer::<f32>::uninit(&pool, 5000, &a).unwrap();
            let address = buffer.as_device_ptr();
            fill(&rig.context, address, 4000, &a);
            a.synchronize().unwrap();
            let hold = rig.busy(&b);
            fill(&rig.context, address, 4000, &b);
            match how {
                0 => buffer.record_use(&b).unwrap(),
                1 => assert_eq!(pool.record_use_of::<f32>(1000, &b).unwrap(), 1),
                _ => {
                    let element = TypeId::of::<f32>();
                    assert_eq!(pool.record_use_of_type(1000, element, &b).unwrap(), 1);
                    assert_eq!(pool.record_use_of::<u32>(1000, &b).unwrap(), 0);
                }
            }
            drop(buffer);
            let found = pool.take::<f32>(1000, &a).unwrap();
            if let Some(found) = &found {
                assert_ne!(found.as_device_ptr(), address, "B is not done");
                fill(&rig.context, found.as_device_ptr(), 4000, &a);
            }
            hold.release();
            b.synchronize().unwrap();
            pool.allocator().synchronize().unwrap();
            let again = pool.take::<f32>(1000, &a).unwrap().expect("a hit");
            assert_eq!(again.as_device_ptr(), address);
            drop((again, other, found));
        }
    });
}

/// Pools of a driver's devices, each made when it is asked for.
fn pools_of(driver: &Driver) -> PerDevice<TypedPool> {
    let driver = driver.clone();
    PerDevice::new(move |ordinal| {
        let context = driver.context(ordinal)?;
        let allocator = Allocator::with_config(&context, Config::new())?;
        Ok(TypedPool::new(&allocator))
    })
}

/// S2.8, S2.9
#[test]
fn s2_8_s2_9_devices_are_counted_and_emptied_apart() {
    two_devices(|driver| {
        let pools = pools_of(driver);
        assert!(pools.all().is_empty());
        let both = [0, 1].map(|ordinal| pools.get(ordinal).unwrap());
        let streams = [0, 1].map(|ordinal| {
            let device = driver.device(ordinal).unwrap();
            Stream::new(&Context::primary(&device).unwrap()).unwrap()
        });
        for (pool, stream) in both.iter().zip(&streams) {
            drop(DeviceBuffer::<u8>::uninit(pool, 4 * MIB, stream).unwrap());
            stream.synchronize().unwrap();
        }
        let held = [cached(&both[0]), cached(&both[1])];
        assert!(held.iter().all(|bytes| *bytes >= 4 << 20));
        both[0].trim(0).unwrap();
        assert_eq!([cached(&both[0]), cached(&both[1])], [0, held[1]]);
        assert_eq!(both.each_ref().map(|pool| counts(pool).2), [1, 1]);
        let wrong = both[0].take::<u8>(4 * MIB, &streams[1]);
        assert_matches!(wrong, Err(Error::WrongDevice { .. }));
        assert!(both[1].take::<u8>(4 * MIB, &streams[1]).unwrap().is_some());
        let all = pools.all();
        assert_eq!(
            all.iter().map(|(ordinal, _)| *ordinal).collect::<Vec<_>>(),
            [0, 1]
        );
        let released = all.iter().map(|(_, pool)| pool.trim(0).unwrap().released);
        assert_eq!(released.sum::<u64>(), held[1]);
    });
}

fn two_devices(test: impl Fn(&Driver)) {
    if crate::common::on_cuda() {
        let driver = Driver::load().unwrap();
        if driver.device_count().unwrap() < 2 {
            eprintln!("SKIPPED: needs two devices");
            return;
        }
        return test(&driver);
    }
    let sim = Simulator::new(SimConfig::with_devices(2, 4 << 30)).unwrap();
    test(&sim.driver().unwrap());
    assert!(sim.reports().is_empty());
}

/// S2.15, S2.16: emptying one device leaves the heap of the other, and figures are by device.
#[test]
fn s2_15_s2_16_cached_bytes_are_by_device() {
    two_devices(|driver| {
        let pools = pools_of(driver);
        let both = [0, 1].map(|ordinal| pools.get(ordinal).unwrap());
        let stream = both[1].allocator().create_stream().unwrap();
        drop(DeviceBuffer::<u8>::uninit(&both[1], 4 * MIB, &stream).unwrap());
        let held = cached(&both[1]);
        assert_eq!(held, both[1].allocator().stats().cached());
        assert_eq!((cached(&both[0]), held > 0), (0, true));
        both[0].trim(0).unwrap();
        assert_eq!(cached(&both[1]), held);
        assert!(pools.get(2).is_err());
    });
}

/// S2.10, S2.11
#[test]
fn s2_10_s2_11_buffers_return_by_themselves() {
    each(|rig| {
        let stream = rig.stream();
        let buffer = {
            let pool = pool_of(rig);
            DeviceBuffer::<u32>::zeroed(&pool, 10, &stream).unwrap()
            // The pool's last handle goes; the buffer still knows where it belongs.
        };
        assert_eq!(buffer.to_vec().unwrap(), vec![0; 10]);
        drop(buffer);
        assert!(std::ptr::eq(TypedPool::global(), TypedPool::global()));
        let allocator = rig.allocator();
        let shared = TypedPool::new(&allocator);
        drop(DeviceBuffer::<u8>::uninit(&shared, MIB, &stream).unwrap());
        assert_eq!(allocator.stats().all.allocations.total_freed, 1);
        assert_eq!(counts(&shared).2, 1);
        rig.close(&allocator);
    });
}

/// S2.11: settings of the process that are invalid are reported, not left out.
#[test]
fn s2_11_the_pool_of_the_process_reports_invalid_settings() {
    const NAME: &str = "typed::s2_11_the_pool_of_the_process_reports_invalid_settings";
    if std::env::var_os("CUALLOC_CONFIG").is_some_and(|set| set == "policy=none") {
        for _ in 0..2 {
            let error = TypedPool::global().get(0).unwrap_err();
            assert_matches!(error, Error::InvalidConfig(_));
        }
        return;
    }
    // In a process of its own, which alone has these settings.
    let mut child = itself(NAME);
    let done = child.env("CUALLOC_CONFIG", "policy=none").output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
}

static GATE: (Mutex<u8>, Condvar) = (Mutex::new(0), Condvar::new());
static RELEASE: AtomicUsize = AtomicUsize::new(0);
static GUARDED: AtomicBool = AtomicBool::new(false);

/// Holds up the first release from the moment on that the gate is guarded, until it is opened.
unsafe extern "C" fn slow_release(handle: u64) -> sys::CUresult {
    let mut phase = GATE.0.lock().unwrap_or_else(PoisonError::into_inner);
    if *phase == 0 && GUARDED.load(Ordering::Acquire) {
        *phase = 1;
        // A thread that the release blocks cannot open the gate; the wait ends nevertheless.
        let end = Instant::now() + Duration::from_secs(20);
        while *phase < 2 && Instant::now() < end {
            let waited = GATE.1.wait_timeout(phase, Duration::from_secs(20));
            phase = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        if *phase < 2 {
            *phase = 3;
        }
    }
    drop(phase);
    let address = RELEASE.load(Ordering::Acquire);
    // SAFETY: the address of the simulator's function of this type, stored before the driver was made.
    let release: unsafe extern "C" fn(u64) -> sys::CUresult =
        unsafe { std::mem::transmute(address) };
    // SAFETY: passed on.
    unsafe { release(handle) }
}

/// S2.17
#[test]
fn s2_17_a_release_does_not_hold_up_hits() {
    if crate::common::on_cuda() {
        eprintln!("SKIPPED on cuda: needs the simulator");
        return;
    }
    let sim = Simulator::new(SimConfig::with_devices(1, 8 << 30)).unwrap();
    let mut table = sim.functions();
    RELEASE.store(table.cuMemRelease.unwrap() as usize, Ordering::Release);
    table.cuMemRelease = Some(slow_release);
    // SAFETY: the simulator's functions and one with the same contract.
    let driver = unsafe { Driver::from_functions(table) }.unwrap();
    let pool = pools_of(&driver).get(0).unwrap();
    let context = driver.context(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    drop(DeviceBuffer::<u8>::uninit(&pool, GIB, &stream).unwrap());
    let keep = DeviceBuffer::<u8>::uninit(&pool, 4096, &stream).unwrap();
    drop(DeviceBuffer::<u8>::uninit(&pool, 4096, &stream).unwrap());
    stream.synchronize().unwrap();
    GUARDED.store(true, Ordering::Release);
    std::thread::scope(|scope| {
        let release = scope.spawn(|| pool.trim(0).unwrap());
        wait_until("a release is under way", || *GATE.0.lock().unwrap() > 0);
        // The release is under way and cannot end.
        let hit = pool.take::<u8>(4096, &stream).unwrap();
        assert!(hit.is_some());
        let before = std::mem::replace(&mut *GATE.0.lock().unwrap(), 2);
        GATE.1.notify_all();
        assert_eq!(before, 1, "the hit was held up by the release");
        assert!(release.join().unwrap().released > 0);
    });
    drop(keep);
}

/// S2.18, S2.22
#[test]
fn s2_18_s2_22_types_and_lengths_share_memory() {
    each(|rig| {
        let (pool, stream) = (pool_of(rig), rig.stream());
        // Larger than what stream caches keep as it is.
        let buffer = DeviceBuffer::<f32>::uninit(&pool, 1024 * 256, &stream).unwrap();
        let address = buffer.as_device_ptr();
        drop(buffer);
        let bytes = pool
            .take::<u8>(4096 * 256, &stream)
            .unwrap()
            .expect("a hit");
        assert_eq!(bytes.as_device_ptr(), address);
        drop(bytes);
        let before = rig.memory_calls();
        let first = pool
            .take::<f32>(512 * 256, &stream)
            .unwrap()
            .expect("carved");
        let second = pool
            .take::<f32>(512 * 256, &stream)
            .unwrap()
            .expect("carved");
        assert_eq!(rig.memory_calls(), before);
        let mut both = [first.as_device_ptr(), second.as_device_ptr()];
        both.sort_unstable();
        assert_eq!(both, [address, address + 2048 * 256]);
    });
}

/// S2.19
#[test]
fn s2_19_the_cap_is_honoured() {
    each(|rig| {
        let (pool, stream) = (pool_of(rig), rig.stream());
        drop(DeviceBuffer::<u8>::uninit(&pool, 256 * MIB, &stream).unwrap());
        stream.synchronize().unwrap();
        pool.allocator().synchronize().unwrap();
        pool.set_cap(Some(64 << 20)).unwrap();
        assert!(cached(&pool) <= 64 << 20);
        for _ in 0..4 {
            drop(DeviceBuffer::<u8>::uninit(&pool, 256 * MIB, &stream).unwrap());
            pool.allocator().synchronize().unwrap();
            // No request follows.
            drop(DeviceBuffer::<u8>::uninit(&pool, 1, &stream).unwrap());
            assert!(cached(&pool) <= 64 << 20);
        }
        pool.set_cap(Some(0)).unwrap();
        assert_eq!(cached(&pool), 0);
        pool.set_cap(None).unwrap();
        drop(DeviceBuffer::<u8>::uninit(&pool, 256 * MIB, &stream).unwrap());
        assert!(cached(&pool) >= 256 << 20);
    });
}

/// S2.19: a request that runs out of memory gets memory that the pool only caches.
#[test]
fn s2_19_a_shortage_elsewhere_drains_the_cache() {
    if crate::common::on_cuda() {
        eprintln!("SKIPPED on cuda: needs a small device");
        return;
    }
    for policy in [Policy::Packed, Policy::Classic] {
        only_on(policy, SimConfig::with_devices(1, 1 << 30), |rig| {
            let (pool, stream) = (pool_of(rig), rig.stream());
            drop(DeviceBuffer::<u8>::uninit(&pool, 700 * MIB, &stream).unwrap());
            pool.allocator().synchronize().unwrap();
            let other = rig.allocator();
            assert!(other.allocate(700 * MIB, &stream).is_err());
            let keeper = pool.clone();
            let relief = move |missing| {
                let keep = cached(&keeper).saturating_sub(missing);
                keeper.trim(keep).map_or(0, |done| done.released)
            };
            other.add_relief_hook(cualloc::allocator::ReliefHook::new("typed pool", relief));
            drop(other.allocate(700 * MIB, &stream).unwrap());
            // And who uses the same allocator needs no hook.
            let shared = TypedPool::new(&other);
            drop(DeviceBuffer::<u8>::uninit(&shared, 700 * MIB, &stream).unwrap());
            drop(DeviceBuffer::<u64>::uninit(&shared, 80 * MIB, &stream).unwrap());
        });
    }
}

/// S2.20, S0.1
#[test]
fn s2_20_s0_1_overflow_is_an_error_and_nothing_is_a_buffer() {
    only(Policy::Packed, |rig| {
        let (pool, stream) = (pool_of(rig), rig.stream());
        for len in [usize::MAX, usize::MAX / 8 + 1, usize::MAX / 16] {
            let error = DeviceBuffer::<u64>::uninit(&pool, len, &stream).unwrap_err();
            assert_matches!(error, Error::Invalid(InvalidArgument::TooLarge { .. }));
            assert!(pool.take::<u64>(len, &stream).is_err());
        }
        let before = rig.driver.calls();
        let empty = DeviceBuffer::<u64>::uninit(&pool, 0, &stream).unwrap();
        assert!(empty.is_empty() && pool.take::<u64>(0, &stream).unwrap().is_some());
        drop(empty);
        assert_eq!(rig.driver.calls().since(&before).total(), 0);
        assert_eq!(counts(&pool), (0, 0, 0));
    });
}

/// S2.21
#[test]
fn s2_21_a_panic_does_not_make_the_pool_miss() {
    each(|rig| {
        let (pool, stream) = (pool_of(rig), rig.stream());
        let allocator = pool.allocator();
        drop(DeviceBuffer::<u8>::uninit(&pool, MIB, &stream).unwrap());
        allocator.set_limit(Some(allocator.stats().all.reserved.current));
        allocator.add_relief_hook(cualloc::allocator::ReliefHook::new("panics", |_| {
            panic!("on purpose")
        }));
        let asked = DeviceBuffer::<u8>::uninit(&pool, GIB, &stream).map(drop);
        assert!(asked.is_err_and(|error| error.is_out_of_memory()));
        assert_eq!(allocator.stats().reclaim.hooks, 1);
        let returns = counts(&pool).2;
        drop(pool.take::<u8>(MIB, &stream).unwrap().expect("a hit"));
        assert_eq!(counts(&pool).2, returns + 1);
        // Nor does it forget what came back last.
        allocator.remove_relief_hook("panics");
        allocator.set_limit(None);
        let buffers: Vec<_> = (0..3)
            .map(|_| DeviceBuffer::<u8>::uninit(&pool, MIB, &stream).unwrap())
            .collect();
        let last = buffers[2].as_device_ptr();
        buffers.into_iter().for_each(drop);
        let again = pool.take::<u8>(MIB, &stream).unwrap().expect("a hit");
        assert_eq!(again.as_device_ptr(), last);
    });
}
