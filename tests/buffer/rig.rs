//! Drivers, contexts and allocators to test buffers with.

use crate::common::prelude::*;
use cualloc::sim::Leaks;

pub const POLICIES: [Policy; 2] = [Policy::Classic, Policy::Packed];

/// Two streams of an allocator's context.
pub fn streams(alloc: &Allocator) -> [Stream; 2] {
    [(); 2].map(|()| alloc.create_stream().unwrap())
}

/// The driver under test with its devices, and the simulator if it is that.
pub struct Rig {
    pub driver: Driver,
    pub contexts: Vec<Context>,
    pub allocs: Vec<Allocator>,
    pub sim: Option<Simulator>,
}

impl Rig {
    /// None, with a note, if the real driver has fewer devices.
    pub fn with_devices(count: usize, policy: Policy) -> Option<Rig> {
        let (driver, sim) = driver_under_test(SimConfig::with_devices(count, 8 << 30));
        if driver.device_count().unwrap() < count {
            eprintln!("SKIPPED on cuda: needs {count} devices");
            return None;
        }
        let context = |n| driver.context(n).unwrap();
        let contexts: Vec<Context> = (0..count).map(context).collect();
        let make = |c: &Context| Allocator::with_config(c, Config::new().policy(policy)).unwrap();
        let allocs = contexts.iter().map(make).collect();
        Some(Rig {
            driver,
            contexts,
            allocs,
            sim,
        })
    }

    pub fn each(test: impl Fn(&Rig, &Allocator, &Stream)) {
        for policy in POLICIES {
            let rig = Rig::with_devices(1, policy).unwrap();
            let stream = rig.allocs[0].create_stream().unwrap();
            test(&rig, &rig.allocs[0], &stream);
            drop(stream);
            rig.finish();
        }
    }

    /// A rig of one device, once per policy; only on the simulator, with a note elsewhere.
    pub fn each_simulated(test: impl Fn(&Rig, &Simulator, &Allocator)) {
        Self::each_simulated_with(test, Self::nothing);
    }

    /// The same, for a test that leaks.
    pub fn each_simulated_with(test: impl Fn(&Rig, &Simulator, &Allocator), leaks: impl Fn(Leaks)) {
        if on_cuda() {
            eprintln!("SKIPPED on cuda: needs the simulator");
            return;
        }
        for policy in POLICIES {
            let rig = Rig::with_devices(1, policy).unwrap();
            test(&rig, rig.sim.as_ref().unwrap(), &rig.allocs[0]);
            rig.end(&leaks);
        }
    }

    /// Checks that everything is freed, and that the simulator has no reports.
    pub fn finish(self) {
        self.end(Self::nothing);
    }

    fn nothing(leaks: Leaks) {
        assert!(leaks.is_empty(), "{leaks:?}");
    }

    fn end(self, leaks: impl Fn(Leaks)) {
        for alloc in &self.allocs {
            alloc.check().unwrap();
            alloc.close().unwrap();
        }
        let Rig {
            driver,
            contexts,
            allocs,
            sim,
        } = self;
        drop((allocs, contexts, driver));
        if let Some(sim) = sim {
            assert_eq!(sim.reports(), []);
            leaks(sim.leaks());
        }
    }
}
