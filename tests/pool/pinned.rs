//! The pinned host pool.

use cualloc::driver::sys::CUresult;
use cualloc::error::InvalidArgument;
use cualloc::pool::{PinnedConfig, PinnedPool};
use cualloc::sim::FailPlan;
use cualloc::{DeviceBuffer, Error, PinnedBuffer, Policy};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::common::{KIB, MIB, Rig, assert_matches, only};

const SMALL: PinnedConfig = PinnedConfig::new()
    .initial(2)
    .maximum(3)
    .buffer_bytes(64 * KIB);

/// A buffer of bytes that are not written.
fn bytes(pool: &PinnedPool, len: usize) -> Result<PinnedBuffer<MaybeUninit<u8>>, Error> {
    pool.acquire(len)
}

fn with_pool(config: PinnedConfig, test: impl Fn(&Rig, &PinnedPool)) {
    only(Policy::Packed, |rig| {
        let pool = PinnedPool::new(&rig.context, config).unwrap();
        test(rig, &pool);
        drop(pool);
        if let Some(sim) = rig.maybe_sim() {
            assert_eq!(sim.leaks().host, 0);
        }
    });
}

/// Blocks that are back before the work that uses them is over.
fn in_flight(pool: &PinnedPool) -> u64 {
    pool.usage().pending / (64 << 10)
}

fn on_device(rig: &Rig) -> DeviceBuffer<u8> {
    let buffer = DeviceBuffer::filled(&rig.allocator(), 64 * KIB, 0x5a, &rig.stream()).unwrap();
    buffer.stream().unwrap().synchronize().unwrap();
    buffer
}

/// S4.6, S4.25
#[test]
fn s4_6_s4_25_initial_buffers_are_there() {
    with_pool(PinnedConfig::default(), |_, pool| {
        let stats = pool.usage();
        assert_eq!((stats.cached_blocks, stats.blocks.current), (4, 0));
        assert_eq!(stats.reserved.current, 16 << 20);
        pool.warm_up(6).unwrap();
        assert_eq!(pool.usage().cached_blocks, 6);
        assert_eq!(pool.trim((8 << 20) - 1), 5 * (4 << 20));
        let kept = bytes(pool, 4 << 20).unwrap();
        let most: Vec<_> = (1..32).map(|_| bytes(pool, 1).unwrap()).collect();
        assert_matches!(bytes(pool, 1), Err(Error::Exhausted { maximum: 32, .. }));
        assert_eq!(bytes(pool, (4 << 20) + 1).unwrap().len(), (4 << 20) + 1);
        drop((kept, most));
        assert_eq!(pool.trim(4 << 20), 31 * (4 << 20));
        assert_eq!(pool.usage().reserved.current, 4 << 20);
    });
    only(Policy::Packed, |rig| {
        for wrong in [SMALL.initial(4), SMALL.buffer_bytes(0)] {
            assert!(PinnedPool::new(&rig.context, wrong).is_err());
        }
    });
}

/// While another call examines a returned block, a request waits for it instead of reporting that there is none.
#[test]
fn a_block_that_is_looked_at_is_waited_for() {
    with_pool(SMALL.initial(1).maximum(1), |rig, pool| {
        let Some(sim) = rig.maybe_sim() else { return };
        let stream = rig.stream();
        let mut buffer = bytes(pool, 100).unwrap();
        buffer.record_use(&stream).unwrap();
        let hold = rig.busy(&stream);
        drop(buffer);
        hold.release();
        stream.synchronize().unwrap();
        let (other, once) = (pool.clone(), AtomicBool::new(false));
        let taken: Arc<Mutex<Option<JoinHandle<bool>>>> = Arc::default();
        let asked = Arc::clone(&taken);
        sim.before(move |moment| {
            if moment.call == "cuEventQuery" && !once.swap(true, Ordering::SeqCst) {
                let (pool, (done, is_done)) = (other.clone(), mpsc::channel());
                let take = move || {
                    let taken = bytes(&pool, 1).is_ok();
                    let _ = done.send(());
                    taken
                };
                *asked.lock().unwrap() = Some(std::thread::spawn(take));
                // It comes to no end meanwhile, unless it is wrong.
                assert!(is_done.recv_timeout(Duration::from_millis(300)).is_err());
            }
        });
        assert!(pool.usage().reserved.current > 0);
        sim.clear_hooks();
        let taken = taken.lock().unwrap().take().expect("the block was asked");
        assert!(taken.join().unwrap(), "there is none");
    });
}

/// S4.7
#[test]
fn s4_7_buffers_are_minted_up_to_the_maximum() {
    with_pool(SMALL, |rig, pool| {
        let leases: Vec<_> = (0..3).map(|_| bytes(pool, 100).unwrap()).collect();
        assert_matches!(
            bytes(pool, 100),
            Err(Error::Exhausted {
                what: "buffers",
                maximum: 3
            })
        );
        assert_eq!(pool.usage().reserved.current, (3 * 64) << 10);
        let large = bytes(pool, 65 * KIB).unwrap();
        assert_eq!(large.len(), 65 * KIB);
        assert_eq!(pool.usage().blocks.current, 4);
        let before = rig.maybe_sim().map(|sim| sim.leaks().host);
        drop(large);
        if let Some(sim) = rig.maybe_sim() {
            assert_eq!(Some(sim.leaks().host + 1), before, "freed on return");
        }
        assert_eq!(pool.usage().reserved.current, (3 * 64) << 10);
        drop(leases);
        let strict = PinnedPool::new(&rig.context, SMALL.oversize(false)).unwrap();
        assert_matches!(
            bytes(&strict, 64 * KIB + 1),
            Err(Error::Invalid(InvalidArgument::TooSmall { .. }))
        );
    });
}

/// S4.8
#[test]
fn s4_8_lengths_are_checked() {
    with_pool(SMALL.oversize(false), |_, pool| {
        let buffer = pool.acquire::<u64>(1000).unwrap();
        assert_eq!((buffer.len(), buffer.is_empty()), (1000, false));
        drop(buffer);
        let typed = |len| pool.acquire::<u64>(len);
        assert_matches!(
            typed(usize::MAX / 4),
            Err(Error::Invalid(InvalidArgument::TooLarge { .. }))
        );
        assert_matches!(
            typed(8193),
            Err(Error::Invalid(InvalidArgument::TooSmall { .. }))
        );
        assert!(typed(8192).is_ok());
        assert_eq!(pool.usage().blocks.current, 0);
    });
}

/// S4.9, S4.26
#[test]
fn s4_9_s4_26_the_last_returned_comes_first_from_any_thread() {
    with_pool(SMALL, |rig, pool| {
        let (first, second) = (bytes(pool, 1).unwrap(), bytes(pool, 1).unwrap());
        let (at_first, at_second) = (first.as_ptr() as usize, second.as_ptr() as usize);
        assert_eq!(pool.usage().blocks.current, 2);
        let before = rig.driver.calls();
        std::thread::scope(|scope| {
            scope.spawn(move || drop(second)).join().unwrap();
        });
        drop(first);
        assert_eq!(pool.usage().cached_blocks, 2);
        let next = bytes(pool, 1).unwrap();
        assert_eq!(next.as_ptr() as usize, at_first);
        let last = bytes(pool, 1).unwrap();
        assert_eq!(last.as_ptr() as usize, at_second);
        assert_eq!(rig.driver.calls().since(&before).total(), 0);
    });
}

/// S4.10, S4.11, S4.24
#[test]
fn s4_10_s4_11_s4_24_a_restart_leaves_the_old_behind() {
    with_pool(SMALL, |rig, pool| {
        let old = pool.acquire::<u8>(4).unwrap().write(&[1, 2, 3, 4]).unwrap();
        assert_eq!(old.generation(), 1);
        assert_eq!(pool.restart(), 2);
        let stats = pool.usage();
        assert_eq!((stats.blocks.current, stats.reserved.current), (0, 0));
        assert_eq!(pool.generation(), 2);
        let new = bytes(pool, 1).unwrap();
        let before = pool.usage();
        let stream = rig.stream();
        let mut target = on_device(rig);
        let mut target = target.slice_mut(..4).unwrap();
        let refused = target.upload(old, &stream).unwrap_err();
        assert!(
            matches!(
                refused.error,
                Error::Stale {
                    have: 1,
                    current: 2
                }
            ),
            "{refused:?}"
        );
        // What the host wrote is still its own.
        let old = *refused.value;
        assert_eq!(old[..], [1, 2, 3, 4]);
        let held = rig.maybe_sim().map(|sim| sim.leaks().host);
        drop(old);
        assert_eq!(pool.usage(), before);
        if let Some(sim) = rig.maybe_sim() {
            assert_eq!(Some(sim.leaks().host + 1), held, "freed on return");
        }
        drop(new);
        assert_eq!(
            (pool.usage().cached_blocks, pool.usage().blocks.current),
            (1, 0)
        );
    });
}

/// S4.19, S4.21
#[test]
fn s4_19_s4_21_a_failed_mint_changes_nothing() {
    with_pool(SMALL, |rig, pool| {
        let Some(sim) = rig.sim() else { return };
        let _leases = [bytes(pool, 1).unwrap(), bytes(pool, 1).unwrap()];
        let before = pool.usage();
        let code = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        // A failed mint does not count against the maximum.
        for bytes in [1, 1, MIB] {
            sim.fail(FailPlan::call("cuMemHostAlloc", code).unwrap());
            assert_eq!(self::bytes(pool, bytes).unwrap_err().code(), code);
            assert_eq!(pool.usage(), before);
        }
        drop(bytes(pool, 1).unwrap());
        assert_eq!(pool.usage().reserved.current, (3 * 64) << 10);
    });
}

/// S4.22
#[test]
fn s4_22_only_written_bytes_are_visible() {
    with_pool(SMALL, |rig, pool| {
        let buffer = pool.acquire::<u32>(1000).unwrap();
        let refused = buffer.write(&[0; 999]).unwrap_err();
        assert_matches!(
            refused.error,
            Error::Invalid(InvalidArgument::Length {
                expected: 1000,
                found: 999
            })
        );
        let mut buffer = refused.value.write(&[1; 1000]).unwrap();
        buffer[1] = 7;
        assert_eq!((buffer[0], buffer[1], buffer[999]), (1, 7, 1));
        let mut buffer = buffer.into_uninit();
        for place in &mut buffer[..] {
            place.write(9);
        }
        // SAFETY: all of them were written just now.
        assert_eq!(unsafe { buffer.assume_init() }[..], [9; 1000]);
        // A copy's elements are there when it is over, and only then.
        let (source, stream) = (on_device(rig), rig.stream());
        let hold = rig.busy(&stream);
        let part = source.slice(..100).unwrap();
        let copy = part.download(pool.acquire(100).unwrap(), &stream).unwrap();
        if rig.maybe_sim().is_some() {
            assert!(!copy.is_complete().unwrap());
        }
        hold.release();
        assert_eq!(copy.wait().unwrap()[..], [0x5a; 100]);
    });
}

/// S4.23
#[test]
fn s4_23_copies_in_flight_keep_their_buffer() {
    with_pool(SMALL, |rig, pool| {
        let (mut target, stream) = (on_device(rig), rig.stream());
        let buffer = bytes(pool, 1000).unwrap().write(&[3; 1000]).unwrap();
        let address = buffer.as_ptr() as usize;
        let hold = rig.busy(&stream);
        let mut part = target.slice_mut(..1000).unwrap();
        drop(part.upload(buffer, &stream).unwrap());
        if rig.maybe_sim().is_some() {
            assert_eq!((in_flight(pool), pool.usage().cached_blocks), (1, 1));
            let others = [bytes(pool, 1).unwrap(), bytes(pool, 1).unwrap()];
            assert!(others.iter().all(|o| o.as_ptr() as usize != address));
            assert!(bytes(pool, 1).is_err(), "the third is in flight");
            drop(others);
        }
        hold.release();
        stream.synchronize().unwrap();
        let stats = pool.usage();
        assert_eq!(stats.pending, 0);
        let mut found = Vec::new();
        for _ in 0..stats.cached_blocks {
            found.push(bytes(pool, 1).unwrap());
        }
        assert!(found.iter().any(|o| o.as_ptr() as usize == address));
        assert_eq!(target.slice(..1000).unwrap().to_vec().unwrap(), [3; 1000]);
    });
}

/// S4.23: foreign copies are recorded.
#[test]
fn s4_23_foreign_copies_are_recorded() {
    with_pool(SMALL, |rig, pool| {
        let stream = rig.stream();
        let mut target = on_device(rig);
        let buffer = bytes(pool, 64 * KIB).unwrap();
        let mut buffer = buffer.write(&[1; 64 * KIB]).unwrap();
        let hold = rig.busy(&stream);
        buffer.record_use(&stream).unwrap();
        if rig.maybe_sim().is_some() {
            // Nothing of ours comes between.
            let refused = target.upload(buffer, &stream).unwrap_err();
            assert!(matches!(refused.error, Error::InFlight), "{refused:?}");
            let refused = refused.value.into_uninit().write(&[1; 64 * KIB]);
            let refused = refused.unwrap_err();
            assert!(matches!(refused.error, Error::InFlight), "{refused:?}");
            drop(refused);
        } else {
            drop(buffer);
        }
        if rig.maybe_sim().is_some() {
            assert_eq!(in_flight(pool), 1);
        }
        hold.release();
        stream.synchronize().unwrap();
        assert_eq!((in_flight(pool), pool.usage().cached_blocks), (0, 2));
        // Steady use creates no further events.
        let events = rig.calls("cuEventCreate");
        for _ in 0..10 {
            let mut buffer = bytes(pool, 1000).unwrap();
            buffer.record_use(&stream).unwrap();
            stream.synchronize().unwrap();
        }
        assert_eq!(rig.calls("cuEventCreate"), events);
    });
}

/// R62
#[test]
fn r62_an_oversize_buffer_costs_its_requested_bytes() {
    with_pool(SMALL, |_, pool| {
        let before = pool.usage().reserved.current;
        let lease = bytes(pool, 33 * MIB).unwrap();
        assert_eq!(pool.usage().reserved.current - before, (33 * MIB) as u64);
        drop(lease);
        assert_eq!(pool.usage().reserved.current, before);
    });
}

/// R2: a question after a copy that is refused says nothing about the copy, and is asked again.
#[test]
fn r2_a_refused_query_loses_no_buffer() {
    with_pool(SMALL, |rig, pool| {
        let Some(sim) = rig.sim() else { return };
        let (mut target, stream) = (on_device(rig), rig.stream());
        let code = CUresult::CUDA_ERROR_NOT_PERMITTED;
        let refuse = || sim.fail(FailPlan::call("cuEventQuery", code).unwrap());
        let buffer = bytes(pool, 64 * KIB)
            .unwrap()
            .write(&[1; 64 * KIB])
            .unwrap();
        let copy = target.upload(buffer, &stream).unwrap();
        refuse();
        assert_eq!(copy.is_complete().unwrap_err().code(), code);
        let buffer = copy.wait().unwrap();
        drop(target.upload(buffer, &stream).unwrap());
        refuse();
        let stats = pool.usage();
        assert_eq!((stats.pending, stats.cached_blocks), (64 << 10, 1));
        let stats = pool.usage();
        assert_eq!((stats.pending, stats.cached_blocks), (0, 2));
    });
}
