//! Automatic release of idle memory, by a clock that the tests advance.

use crate::common::prelude::*;
use std::time::Duration;

use cualloc::resource::Clock;

const MIB: usize = 1 << 20;
const SECOND: Duration = Duration::from_secs(1);

struct Scene {
    simulator: Simulator,
    allocator: Allocator,
    stream: Stream,
    clock: Clock,
}

impl Scene {
    fn new(settings: &str) -> Scene {
        let simulator = Simulator::new(SimConfig::default()).unwrap();
        let context = simulator.driver().unwrap().context(0).unwrap();
        let config: Config = settings.parse().unwrap();
        let allocator = Allocator::with_config(&context, config).unwrap();
        let clock = Clock::manual();
        allocator.set_clock(clock.clone());
        let stream = Stream::new(&context).unwrap();
        Scene {
            simulator,
            allocator,
            stream,
            clock,
        }
    }

    fn held(&self) -> u64 {
        self.allocator.stats().all.reserved.current
    }

    /// Allocates this number of blocks of 20 MiB, then frees all of them.
    fn peak(&self, blocks: usize) {
        let of = |_| self.allocator.allocate(20 * MIB, &self.stream).unwrap();
        let live: Vec<_> = (0..blocks).map(of).collect();
        live.into_iter().for_each(|block| block.free().unwrap());
        self.stream.synchronize().unwrap();
    }
}

fn mib(count: usize) -> u64 {
    (count * MIB) as u64
}

#[test]
fn memory_that_was_idle_for_long_is_released() {
    for policy in ["packed", "classic"] {
        let scene = Scene::new(&format!("policy={policy},decay=10s"));
        scene.peak(10);
        assert!(scene.held() >= mib(200));
        // The first look sees that it is idle, and the second that it still is.
        scene.clock.advance(9 * SECOND);
        assert_eq!(scene.allocator.decay().unwrap(), 0);
        scene.clock.advance(SECOND);
        assert_eq!(
            scene.allocator.decay().unwrap(),
            0,
            "idle for less than ten seconds"
        );
        let held = scene.held();
        scene.clock.advance(9 * SECOND);
        assert_eq!(scene.allocator.decay().unwrap(), 0, "it is not time");
        scene.clock.advance(SECOND);
        assert_eq!(scene.allocator.decay().unwrap(), held, "{policy}");
        assert_eq!(scene.held(), 0);
        scene.allocator.check().unwrap();
        assert_eq!(scene.simulator.reports(), []);
    }
}

#[test]
fn memory_that_is_used_stays_and_calls_see_what_is_due() {
    for policy in ["packed", "classic"] {
        let scene = Scene::new(&format!("policy={policy},decay=10s"));
        scene.peak(10);
        let held = scene.held();
        let allocator = &scene.allocator;
        for bytes in [50 * MIB, 40 * MIB] {
            scene.clock.advance(10 * SECOND);
            // A free that comes to the heap; its own memory was used a moment ago.
            let block = allocator.allocate(bytes, &scene.stream).unwrap();
            block.free().unwrap();
        }
        assert!(scene.held() < held, "{policy}: {held} bytes are held still");
        assert!(scene.held() >= mib(40), "{policy}: the newest goes, too");
        let live = allocator.allocate(30 * MIB, &scene.stream).unwrap();
        for _ in 0..3 {
            scene.clock.advance(10 * SECOND);
            allocator.decay().unwrap();
        }
        assert!(scene.held() >= mib(30));
        assert!(
            scene.held() < mib(60),
            "what is idle beside a live block stays"
        );
        drop(live);
        assert_eq!(scene.simulator.reports(), []);
    }
}

#[test]
fn a_share_of_the_peak_is_kept() {
    let scene = Scene::new("policy=packed,decay=1s,keep=25%");
    scene.peak(10);
    for _ in 0..5 {
        scene.clock.advance(SECOND);
        scene.allocator.decay().unwrap();
    }
    let held = scene.held();
    assert!(
        held >= mib(50) && held < mib(90),
        "{held} bytes are kept of {}",
        mib(200)
    );
}

#[test]
fn without_the_setting_memory_stays() {
    let scene = Scene::new("policy=packed");
    scene.peak(10);
    let held = scene.held();
    for _ in 0..5 {
        scene.clock.advance(1000 * SECOND);
        assert_eq!(scene.allocator.decay().unwrap(), 0);
        scene.peak(1);
    }
    assert_eq!(scene.held(), held);
}
