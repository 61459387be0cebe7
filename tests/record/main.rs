//! Recordings: what is recorded, how it is read back, and what becomes of it.

#[cfg(feature = "sim")]
mod causes;
#[path = "../common/mod.rs"]
mod common;
#[cfg(feature = "sim")]
mod device;
#[cfg(feature = "sim")]
mod failed;
#[cfg(feature = "sim")]
mod foreign;
#[cfg(all(feature = "sim", target_os = "linux"))]
mod forks;
#[cfg(feature = "sim")]
mod formats;
#[cfg(feature = "sim")]
mod graphs;
#[cfg(feature = "sim")]
mod holders;
#[cfg(feature = "sim")]
mod pickler;
#[cfg(feature = "sim")]
mod readers;
#[cfg(feature = "sim")]
#[path = "../common/recorded.rs"]
mod recorded;
#[cfg(feature = "sim")]
mod recorder;
#[cfg(feature = "sim")]
mod rings;
#[cfg(feature = "sim")]
mod shares;
mod snapshots;
#[cfg(feature = "sim")]
mod stacks;

#[cfg(feature = "sim")]
mod scene {
    use cualloc::allocator::{Allocator, Config};
    use cualloc::driver::{Context, Stream};
    use cualloc::record::{Recorder, Target};
    use cualloc::sim::{SimConfig, Simulator};
    use std::sync::{Mutex, MutexGuard, PoisonError};

    pub const MIB: usize = 1 << 20;

    /// One test at a time: there is one recording in a process, of all allocators.
    pub fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A simulated device with an allocator.
    pub struct Scene {
        pub allocator: Allocator,
        pub context: Context,
        pub simulator: Simulator,
    }

    impl Scene {
        pub fn new(settings: &str) -> Scene {
            Scene::on(SimConfig::default(), settings)
        }

        pub fn on(device: SimConfig, settings: &str) -> Scene {
            Scene::on_device(device, 0, settings)
        }

        pub fn on_device(device: SimConfig, ordinal: usize, settings: &str) -> Scene {
            let simulator = Simulator::new(device).unwrap();
            let context = simulator.driver().unwrap().context(ordinal).unwrap();
            let mut config: Config = settings.parse().unwrap();
            // Tests name what fills a device exactly.
            config.headroom.get_or_insert(0);
            let allocator = Allocator::with_config(&context, config).unwrap();
            Scene {
                simulator,
                context,
                allocator,
            }
        }

        pub fn stream(&self) -> Stream {
            Stream::new(&self.context).unwrap()
        }
    }

    pub fn memory() -> Recorder {
        Recorder::start(Target::Memory).unwrap()
    }
}
