//! Recordings: what is recorded, how it is read back, and what becomes of it.
#![cfg(feature = "sim")]

mod causes;
#[path = "../common/mod.rs"]
mod common;
mod failed;
mod foreign;
#[cfg(target_os = "linux")]
mod forks;
mod formats;
mod graphs;
mod holders;
mod pickler;
mod readers;
#[path = "../common/recorded.rs"]
mod recorded;
mod recorder;
mod rings;
mod shares;
mod snapshots;
mod stacks;
mod tutorial;

mod scene {
    use cualloc::allocator::{Allocator, Block, Config};
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

        /// A block that there must be.
        pub fn block(&self, bytes: usize, stream: &Stream) -> Block {
            self.allocator.allocate(bytes, stream).unwrap()
        }

        /// Memory of the device that another allocator holds.
        pub fn others(&self, bytes: usize) -> (Allocator, Block) {
            let other = Allocator::with_config(&self.context, Config::new()).unwrap();
            let stream = other.create_stream().unwrap();
            let block = other.allocate(bytes, &stream).unwrap();
            (other, block)
        }
    }

    /// A scene with these settings and a stream of it, for a test that runs alone.
    pub fn scene(settings: &str) -> (MutexGuard<'static, ()>, Scene, Stream) {
        let alone = alone();
        let scene = Scene::new(settings);
        let stream = scene.stream();
        (alone, scene, stream)
    }

    /// The rows of a trace as one text.
    pub fn rows(trace: &cualloc::trace::Trace) -> String {
        let rows: Vec<String> = trace.rows().iter().map(ToString::to_string).collect();
        rows.join(" ")
    }

    pub fn memory() -> Recorder {
        Recorder::start(Target::Memory).unwrap()
    }
}
