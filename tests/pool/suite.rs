//! What every pool must do, over each of them.

use cualloc::Config;
use cualloc::driver::Stream;
use cualloc::pool::{
    DevicePool, NativeConfig, NativePool, PoolBlock, PoolError, ThresholdPool, WorkspaceConfig,
    WorkspacePool, WorkspaceSizing,
};

use crate::common::{MIB, Rig, each};
use crate::fill;

const LIMIT: usize = 256 * MIB;

/// Every pool over one driver, bounded to [`LIMIT`].
fn pools(rig: &Rig) -> Vec<(&'static str, Box<dyn DevicePool>)> {
    let limited = || rig.limited(LIMIT);
    let workspaces = |sizing| {
        let config = WorkspaceConfig { sizing, cap: 4 };
        Box::new(WorkspacePool::new(&limited(), config))
    };
    let config = Config::new().policy(rig.policy).limit(Some(LIMIT as u64));
    let own = ThresholdPool::on_driver(&rig.driver, 0, config).unwrap();
    let native = NativeConfig::default().max_bytes(LIMIT as u64);
    vec![
        ("allocator", Box::new(limited())),
        ("threshold", Box::new(own)),
        ("threshold over", Box::new(ThresholdPool::over(&limited()))),
        ("workspaces", workspaces(WorkspaceSizing::Classes)),
        ("exact workspaces", workspaces(WorkspaceSizing::Exact)),
        (
            "native",
            Box::new(NativePool::with_context(&rig.context, native).unwrap()),
        ),
    ]
}

fn over_all(test: impl Fn(&Rig, &dyn DevicePool)) {
    each(|rig| {
        for (name, pool) in pools(rig) {
            eprintln!("pool {name}");
            test(rig, &*pool);
            rig.assert_clean();
        }
        if let Some(held) = rig.driver_held() {
            rig.context.enter().unwrap().synchronize().unwrap();
            assert!(held == 0 || rig.driver_held() == Some(0));
        }
    });
}

#[test]
fn basic() {
    over_all(|rig, pool| {
        let stream = rig.stream();
        assert!(matches!(
            pool.allocate(0, &stream),
            Err(PoolError::InvalidSize { requested: 0 })
        ));
        let block = pool.allocate(1000, &stream).unwrap();
        assert_eq!(block.requested(), 1000);
        assert!(block.size() >= 1000 && block.ptr() != 0);
        fill(&rig.context, block.ptr(), 1000, &stream);
        let usage = pool.usage().unwrap();
        assert!(usage.used.current >= 1000 && usage.reserved.current >= usage.used.current);
        block.free().unwrap();
        // Dropping is as good.
        drop(pool.allocate(1 << 20, &stream).unwrap());
        stream.synchronize().unwrap();
        pool.trim(0).unwrap();
        let usage = pool.usage().unwrap();
        assert_eq!(usage.used.current, 0, "{usage:?}");
        assert!(usage.used.peak >= 1000);
        pool.reset_peaks().unwrap();
        assert_eq!(pool.usage().unwrap().used.peak, 0);
        assert!(pool.allocate(usize::MAX - 10, &stream).is_err());
    });
}

#[test]
fn mixed_sizes_never_overlap() {
    over_all(|rig, pool| {
        let stream = rig.stream();
        let mut seed = 7u64;
        let mut next = |below: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
            (seed >> 33) % below
        };
        let mut live: Vec<PoolBlock> = Vec::new();
        for _ in 0..400 {
            if next(5) < 3 && live.len() < 40 {
                let bits = 4 + next(17);
                let bytes = 1 + next(1 << bits) as usize;
                let block = pool.allocate(bytes, &stream).unwrap();
                fill(&rig.context, block.ptr(), bytes, &stream);
                live.push(block);
            } else if !live.is_empty() {
                let at = next(live.len() as u64) as usize;
                live.swap_remove(at);
            }
            let mut ranges: Vec<_> = live.iter().map(|b| (b.ptr(), b.size())).collect();
            ranges.sort_unstable();
            for pair in ranges.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0);
            }
        }
    });
}

/// S3.7, S3.32
#[test]
fn s3_7_s3_32_threads_share_a_pool() {
    over_all(|rig, pool| {
        let context = &rig.context;
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let stream = Stream::new(context).unwrap();
                    for round in 0..50usize {
                        let block = pool.allocate(512 + round * 100, &stream).unwrap();
                        fill(context, block.ptr(), 512, &stream);
                        drop(block);
                        if round % 10 == 0 {
                            pool.trim(0).unwrap();
                        }
                    }
                    stream.synchronize().unwrap();
                });
            }
        });
        pool.trim(0).unwrap();
        assert_eq!(pool.usage().unwrap().used.current, 0);
    });
}

/// S4.17
#[test]
fn s4_17_out_of_memory_is_its_own_error_and_harmless() {
    over_all(|rig, pool| {
        let stream = rig.stream();
        let mut live = Vec::new();
        let error = loop {
            match pool.allocate(48 * MIB, &stream) {
                Ok(block) => live.push(block),
                Err(error) => break error,
            }
            assert!(live.len() < 32, "the limit holds");
        };
        assert!(error.is_out_of_memory(), "{error:?}");
        assert!(!live.is_empty());
        let used = pool.usage().unwrap().used.current;
        assert!(pool.allocate(48 * MIB, &stream).is_err());
        assert_eq!(pool.usage().unwrap().used.current, used);
        live.clear();
        stream.synchronize().unwrap();
        // All of it can be had in one piece again, as in many.
        drop(pool.allocate(96 * MIB, &stream).unwrap());
    });
}

/// S3.25
#[test]
fn s3_25_other_streams_do_not_get_memory_in_use() {
    over_all(|rig, pool| {
        let [a, b] = rig.streams();
        for round in 0..4 {
            let block = pool.allocate(3 * MIB, &a).unwrap();
            let hold = rig.hold(&a);
            fill(&rig.context, block.ptr(), 3 * MIB, &a);
            drop(block);
            let other = pool.allocate(3 * MIB, &b).unwrap();
            // Were it the same memory without a wait, the simulator would report a race.
            fill(&rig.context, other.ptr(), 3 * MIB, &b);
            if round % 2 == 0 {
                drop(other);
                hold.release();
            } else {
                hold.release();
                drop(other);
            }
            a.synchronize().unwrap();
            b.synchronize().unwrap();
        }
    });
}

#[test]
fn recorded_uses_come_before_reuse() {
    over_all(|rig, pool| {
        let [a, b] = rig.streams();
        for until_free in [true, false] {
            let block = pool.allocate(MIB, &a).unwrap();
            fill(&rig.context, block.ptr(), MIB, &a);
            a.synchronize().unwrap();
            let hold = rig.busy(&b);
            fill(&rig.context, block.ptr(), MIB, &b);
            if until_free {
                block.record_stream(&b).unwrap();
            } else {
                block.record_use(&b).unwrap();
            }
            block.free().unwrap();
            let again = pool.allocate(MIB, &a).unwrap();
            fill(&rig.context, again.ptr(), MIB, &a);
            drop(again);
            hold.release();
            a.synchronize().unwrap();
            b.synchronize().unwrap();
        }
    });
}
