//! What the benchmarks share: an allocator on the simulator, and short measurements.

use std::time::Duration;

use criterion::Criterion;
use cualloc::driver::Stream;
use cualloc::sim::{Mode, SimConfig, Simulator};
use cualloc::{Allocator, Config};

#[path = "../../cli/src/bench/source.rs"]
pub mod source;
#[path = "../../cli/src/bench/workload.rs"]
pub mod workload;

pub const KIB: usize = 1 << 10;

/// A simulated device that completes work at once, and an allocator on it.
pub struct Rig {
    pub allocator: Allocator,
    pub stream: Stream,
    _simulator: Simulator,
}

impl Rig {
    pub fn new() -> Rig {
        let config = SimConfig {
            mode: Mode::Instant,
            ..SimConfig::with_devices(1, 80 << 30)
        };
        let simulator = Simulator::new(config).unwrap();
        let driver = simulator.driver().unwrap();
        let context = driver.context(0).unwrap();
        let allocator = Allocator::with_config(&context, Config::new()).unwrap();
        let stream = allocator.create_stream().unwrap();
        Rig {
            allocator,
            stream,
            _simulator: simulator,
        }
    }
}

/// Short enough for all benchmarks to end within a minute.
pub fn quick() -> Criterion {
    Criterion::default()
        .sample_size(20)
        .nresamples(2_000)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(300))
        .without_plots()
}
