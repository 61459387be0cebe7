//! The pinned host pool.

use cualloc::driver::sys::CUresult;
use cualloc::error::InvalidArgument;
use cualloc::pool::{PinnedConfig, PinnedPool, PinnedStats};
use cualloc::sim::FailPlan;
use cualloc::{Block, Error, Policy};

use crate::common::{KIB, MIB, Rig, only};

const SMALL: PinnedConfig = PinnedConfig {
    initial: 2,
    maximum: 3,
    buffer_bytes: 64 * KIB,
    oversize: true,
};

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

fn device_block(rig: &Rig) -> Block {
    let allocator = rig.allocator();
    let stream = rig.stream();
    let block = allocator.allocate(64 * KIB, &stream).unwrap();
    crate::fill(&rig.context, block.ptr(), 64 * KIB, &stream);
    stream.synchronize().unwrap();
    block
}

/// S4.6, S4.25
#[test]
fn s4_6_s4_25_initial_buffers_are_there() {
    let config = PinnedConfig::default();
    assert_eq!((config.initial, config.maximum), (4, 32));
    assert_eq!((config.buffer_bytes, config.oversize), (4 << 20, true));
    with_pool(config, |_, pool| {
        let stats = pool.stats();
        assert_eq!((stats.free, stats.in_use, stats.total), (4, 0, 4));
        assert_eq!(stats.bytes, 16 << 20);
        pool.warm_up(6).unwrap();
        assert_eq!(pool.stats().free, 6);
        assert_eq!(pool.trim(1), 5);
        assert_eq!(pool.stats().bytes, 4 << 20);
    });
    only(Policy::Packed, |rig| {
        let wrong = PinnedConfig {
            initial: 4,
            ..SMALL
        };
        assert!(PinnedPool::new(&rig.context, wrong).is_err());
        let empty = PinnedConfig {
            buffer_bytes: 0,
            ..SMALL
        };
        assert!(PinnedPool::new(&rig.context, empty).is_err());
    });
}

/// S4.7
#[test]
fn s4_7_buffers_are_minted_up_to_the_maximum() {
    with_pool(SMALL, |rig, pool| {
        let leases: Vec<_> = (0..3).map(|_| pool.acquire(100).unwrap()).collect();
        assert!(matches!(
            pool.acquire(100),
            Err(Error::Exhausted {
                what: "buffers",
                maximum: 3
            })
        ));
        assert_eq!(pool.stats().total, 3);
        let large = pool.acquire(65 * KIB).unwrap();
        assert!(large.capacity() >= 65 * KIB);
        assert_eq!(pool.stats().in_use, 4);
        let before = rig.maybe_sim().map(|sim| sim.leaks().host);
        drop(large);
        if let Some(sim) = rig.maybe_sim() {
            assert_eq!(Some(sim.leaks().host + 1), before, "freed on return");
        }
        assert_eq!(pool.stats().total, 3);
        drop(leases);
        let strict = PinnedConfig {
            oversize: false,
            ..SMALL
        };
        let strict = PinnedPool::new(&rig.context, strict).unwrap();
        assert!(matches!(
            strict.acquire(64 * KIB + 1),
            Err(Error::Invalid(InvalidArgument::TooSmall { .. }))
        ));
    });
}

/// S4.8
#[test]
fn s4_8_typed_leases_are_checked() {
    with_pool(SMALL, |_, pool| {
        let lease = pool.acquire(8000).unwrap().typed::<u64>(1000).unwrap();
        assert_eq!((lease.len(), lease.is_empty()), (1000, false));
        drop(lease);
        let typed = |len| pool.acquire(8000).unwrap().typed::<u64>(len);
        assert!(matches!(
            typed(usize::MAX / 4),
            Err(Error::Invalid(InvalidArgument::TooLarge { .. }))
        ));
        assert!(matches!(
            typed(8193),
            Err(Error::Invalid(InvalidArgument::TooSmall { .. }))
        ));
        assert!(typed(8192).is_ok());
        assert_eq!(pool.stats().in_use, 0);
    });
}

/// S4.9, S4.26
#[test]
fn s4_9_s4_26_the_last_returned_comes_first_from_any_thread() {
    with_pool(SMALL, |rig, pool| {
        let (first, second) = (pool.acquire(1).unwrap(), pool.acquire(1).unwrap());
        let (at_first, at_second) = (first.as_ptr() as usize, second.as_ptr() as usize);
        assert_eq!(pool.stats().in_use, 2);
        let before = rig.driver.calls();
        std::thread::scope(|scope| {
            scope.spawn(move || drop(second)).join().unwrap();
        });
        drop(first);
        assert_eq!(pool.stats().free, 2);
        let next = pool.acquire(1).unwrap();
        assert_eq!(next.as_ptr() as usize, at_first);
        let last = pool.acquire(1).unwrap();
        assert_eq!(last.as_ptr() as usize, at_second);
        assert_eq!(rig.driver.calls().since(&before).total(), 0);
    });
}

/// S4.10, S4.11, S4.24
#[test]
fn s4_10_s4_11_s4_24_a_restart_leaves_the_old_behind() {
    with_pool(SMALL, |rig, pool| {
        let mut old = pool.acquire(16).unwrap().typed::<u32>(4).unwrap();
        old.write(&[1, 2, 3, 4]).unwrap();
        assert_eq!(old.generation(), 1);
        assert_eq!(pool.restart(), 2);
        let empty = PinnedStats::default();
        let stats = pool.stats();
        assert_eq!(
            (stats.in_use, stats.total, stats.bytes),
            (0, 0, empty.bytes)
        );
        assert_eq!((stats.stale, stats.generation), (1, 2));
        let new = pool.acquire(1).unwrap();
        let before = pool.stats();
        let (block, stream) = (device_block(rig), rig.stream());
        // SAFETY: the block is live and large enough.
        let refused = unsafe { old.upload(block.ptr(), &stream) };
        assert!(
            matches!(
                refused,
                Err(Error::Stale {
                    have: 1,
                    current: 2
                })
            ),
            "{refused:?}"
        );
        // What the host wrote is still its own.
        assert_eq!(old.initialised().unwrap(), [1, 2, 3, 4]);
        drop(old);
        let after = pool.stats();
        assert_eq!((before.stale, after.stale), (1, 0));
        let figures = |s: PinnedStats| (s.in_use, s.free, s.in_flight, s.total, s.bytes);
        assert_eq!(figures(after), figures(before));
        drop(new);
        assert_eq!((pool.stats().free, pool.stats().in_use), (1, 0));
    });
}

/// S4.19, S4.21
#[test]
fn s4_19_s4_21_a_failed_mint_changes_nothing() {
    with_pool(SMALL, |rig, pool| {
        let Some(sim) = rig.sim() else { return };
        let _leases = [pool.acquire(1).unwrap(), pool.acquire(1).unwrap()];
        let before = pool.stats();
        let code = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        for bytes in [1, MIB] {
            sim.fail(FailPlan::call("cuMemHostAlloc", code).unwrap());
            assert_eq!(pool.acquire(bytes).unwrap_err().code(), code);
            assert_eq!(pool.stats(), before);
        }
        drop(pool.acquire(1).unwrap());
        assert_eq!(pool.stats().total, 3);
    });
}

/// S4.22
#[test]
fn s4_22_only_what_was_written_is_seen() {
    with_pool(SMALL, |rig, pool| {
        let mut lease = pool.acquire(4000).unwrap().typed::<u32>(1000).unwrap();
        assert!(lease.initialised().unwrap().is_empty());
        lease.write(&[1, 2, 3]).unwrap();
        lease.initialised_mut().unwrap()[1] = 7;
        assert_eq!(lease.initialised().unwrap(), [1, 7, 3]);
        for place in lease.uninit_mut().unwrap() {
            place.write(9);
        }
        assert!(lease.initialised().unwrap().is_empty());
        // SAFETY: all of them were written just now.
        unsafe { lease.assume_init(1000) }.unwrap();
        assert_eq!(lease.initialised().unwrap(), [9; 1000]);
        // SAFETY: refused.
        assert!(unsafe { lease.assume_init(1001) }.is_err());
        assert!(lease.write(&[0; 1001]).is_err());
        drop(lease);
        // The next user does not see what the last one wrote.
        let mut next = pool.acquire(4000).unwrap();
        assert!(next.initialised().unwrap().is_empty());
        drop(next);
        // A copy's elements are there when it is over, and only then.
        let (block, stream) = (device_block(rig), rig.stream());
        let mut lease = pool.acquire(4000).unwrap().typed::<u8>(1000).unwrap();
        let hold = rig.busy(&stream);
        // SAFETY: the block is live, large enough and initialised.
        unsafe { lease.download(block.ptr(), 100, &stream) }.unwrap();
        if rig.maybe_sim().is_some() {
            assert!(matches!(lease.initialised(), Err(Error::InFlight)));
            assert!(matches!(lease.write(&[1]), Err(Error::InFlight)));
            assert!(!lease.is_complete().unwrap());
        }
        hold.release();
        lease.wait().unwrap();
        assert_eq!(lease.initialised().unwrap(), [0x5a; 100]);
    });
}

/// S4.23
#[test]
fn s4_23_copies_in_flight_keep_their_buffer() {
    with_pool(SMALL, |rig, pool| {
        let (block, stream) = (device_block(rig), rig.stream());
        let mut lease = pool.acquire(1000).unwrap();
        lease.write(&[3; 1000]).unwrap();
        let address = lease.as_ptr() as usize;
        let hold = rig.busy(&stream);
        // SAFETY: the block is live and large enough.
        unsafe { lease.upload(block.ptr(), &stream) }.unwrap();
        // Reading beside the device is no harm, writing would be.
        assert_eq!(lease.initialised().unwrap().len(), 1000);
        if rig.maybe_sim().is_some() {
            assert!(matches!(lease.initialised_mut(), Err(Error::InFlight)));
        }
        drop(lease);
        if rig.maybe_sim().is_some() {
            assert_eq!((pool.stats().in_flight, pool.stats().free), (1, 1));
            let others = [pool.acquire(1).unwrap(), pool.acquire(1).unwrap()];
            assert!(others.iter().all(|o| o.as_ptr() as usize != address));
            assert!(pool.acquire(1).is_err(), "the third is in flight");
            drop(others);
        }
        hold.release();
        stream.synchronize().unwrap();
        let stats = pool.stats();
        assert_eq!(stats.in_flight, 0);
        let mut found = Vec::new();
        for _ in 0..stats.free {
            found.push(pool.acquire(1).unwrap());
        }
        assert!(found.iter().any(|o| o.as_ptr() as usize == address));
        let words = rig.mismatches(block.ptr(), 1000, 0x0303_0303, &stream);
        assert_eq!(words, 0);
    });
}

/// S4.23: foreign copies are recorded.
#[test]
fn s4_23_foreign_copies_are_recorded() {
    with_pool(SMALL, |rig, pool| {
        let stream = rig.stream();
        let mut lease = pool.acquire(1000).unwrap();
        let hold = rig.busy(&stream);
        lease.record_use(&stream).unwrap();
        drop(lease);
        if rig.maybe_sim().is_some() {
            assert_eq!(pool.stats().in_flight, 1);
        }
        hold.release();
        stream.synchronize().unwrap();
        assert_eq!((pool.stats().in_flight, pool.stats().free), (0, 2));
        // Steady use makes no more events.
        let events = rig.calls("cuEventCreate");
        for _ in 0..10 {
            let mut lease = pool.acquire(1000).unwrap();
            lease.record_use(&stream).unwrap();
            stream.synchronize().unwrap();
        }
        assert_eq!(rig.calls("cuEventCreate"), events);
    });
}

/// R62
#[test]
fn r62_an_oversize_buffer_costs_what_was_asked() {
    with_pool(SMALL, |_, pool| {
        let before = pool.stats().bytes;
        let lease = pool.acquire(33 * MIB).unwrap();
        assert_eq!(pool.stats().bytes - before, (33 * MIB) as u64);
        drop(lease);
        assert_eq!(pool.stats().bytes, before);
    });
}
/// R2: a question after a copy that is refused says nothing about the copy, and is asked again.
#[test]
fn r2_a_refused_question_loses_no_buffer() {
    with_pool(SMALL, |rig, pool| {
        let Some(sim) = rig.sim() else { return };
        let stream = rig.stream();
        let allocator = rig.allocator();
        let block = allocator.allocate(4096, &stream).unwrap();
        let code = CUresult::CUDA_ERROR_NOT_PERMITTED;
        let refuse = || sim.fail(FailPlan::call("cuEventQuery", code).unwrap());
        let mut lease = pool.acquire(4096).unwrap();
        lease.write(&[1; 4096]).unwrap();
        // SAFETY: the block has as many bytes, and goes in the order of the stream.
        unsafe { lease.upload(block.ptr(), &stream) }.unwrap();
        refuse();
        assert_eq!(lease.is_complete().unwrap_err().code(), code);
        lease.wait().unwrap();
        lease.write(&[2; 4096]).unwrap();
        // SAFETY: as above.
        unsafe { lease.upload(block.ptr(), &stream) }.unwrap();
        refuse();
        drop(lease);
        let stats = pool.stats();
        assert_eq!((stats.in_use, stats.in_flight, stats.stale), (0, 0, 0));
        drop(block);
        allocator.close().unwrap();
    });
}
