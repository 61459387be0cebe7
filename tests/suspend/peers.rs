//! Another device, with access to the memory: it has that again for every mapping that came back, at home and in views.

use std::sync::{Barrier, Mutex};
use std::thread;

use super::support::*;
use cualloc::driver::{Device, Function, KernelParam, Module};

/// The second device of a rig, whose kernels read the memory of the first.
struct Peer<'a> {
    rig: &'a Rig,
    devices: Vec<Device>,
    stream: Stream,
    check: Function,
    _module: Module,
    bad: u64,
}

impl<'a> Peer<'a> {
    /// None, with a word about it, where there is no such device.
    fn of(rig: &'a Rig) -> Option<Peer<'a>> {
        let count = rig.driver.device_count().unwrap();
        if count < 2 {
            eprintln!("SKIPPED: needs two devices");
            return None;
        }
        let devices: Vec<Device> = (0..count).map(|n| rig.driver.device(n).unwrap()).collect();
        if !devices[1].can_access_peer(&devices[0]).unwrap() {
            eprintln!("SKIPPED: the second device has no access to the first");
            return None;
        }
        let context = Context::primary(&devices[1]).unwrap();
        let module = rig.words_in(&context);
        let bad = context.enter().unwrap().mem_alloc(4).unwrap();
        Some(Peer {
            rig,
            devices,
            stream: Stream::new(&context).unwrap(),
            check: module.function(c"cualloc_check").unwrap(),
            _module: module,
            bad,
        })
    }

    /// The driver reports the access that the allocator was created with: the first two devices have access.
    fn assert_access(&self, at: u64) {
        let entered = self.rig.context.enter().unwrap();
        for (number, device) in self.devices.iter().enumerate() {
            let granted = entered.has_access(at, device).unwrap();
            assert_eq!(granted, number < 2, "device {number} at {at:#x}");
        }
    }

    /// A kernel of the second device finds what one of the first wrote, behind a stream.
    fn assert_reads(&self, fill: &Function, at: u64, bytes: usize, seed: u32, behind: &Stream) {
        let (words, wide) = (bytes as u64 / 4, ([64, 1, 1], [256, 1, 1]));
        let context = self.stream.context();
        let zero = 0u32;
        // SAFETY: the block is live, the counter is the test's, and all of it is waited for below.
        unsafe {
            fill.launch(behind, wide.0, wide.1, 0, &[&at, &words, &seed])
                .unwrap();
            self.stream.wait_for(behind).unwrap();
            let entered = context.enter().unwrap();
            entered
                .memset_d32(self.bad, zero, 1, self.stream.raw())
                .unwrap();
            drop(entered);
            let parameters: [&dyn KernelParam; 4] = [&at, &words, &seed, &self.bad];
            self.check
                .launch(&self.stream, wide.0, wide.1, 0, &parameters)
                .unwrap();
        }
        behind.wait_for(&self.stream).unwrap();
        let mut bad = [7u32];
        let entered = context.enter().unwrap();
        // SAFETY: the local is waited for.
        unsafe {
            entered.copy_device_to_host(bad.as_mut_ptr().cast(), self.bad, 4, self.stream.raw())
        }
        .unwrap();
        self.stream.synchronize().unwrap();
        assert_eq!(bad, [0], "words that the peer found otherwise at {at:#x}");
    }

    fn end(self) {
        let context = self.stream.context().clone();
        // SAFETY: all work was waited for.
        unsafe { context.enter().unwrap().mem_free(self.bad) }.unwrap();
    }
}

/// On a machine with several devices, and on the simulator with three, of which one has no access.
fn with_peer(test: impl Fn(&Rig, &Peer<'_>)) {
    only_on(Policy::Packed, SimConfig::with_devices(3, 8 << 30), |rig| {
        if let Some(peer) = Peer::of(rig) {
            test(rig, &peer);
            peer.end();
        }
    });
}

#[test]
fn peers_have_access_again() {
    with_peer(|rig, peer| {
        let world = World::new(rig, Config::new().peers([1]));
        let access = || {
            world
                .addresses()
                .iter()
                .for_each(|at| peer.assert_access(*at))
        };
        access();
        for _ in 0..3 {
            suspend(&world.allocator, Contents::Pinned);
            resume(&world.allocator);
            access();
            world.assert_intact(rig);
        }
    });
}

/// N2: kernels of the peer can read memory immediately after growth, a stitch, a suspension or a resume.
#[test]
fn a_peer_reads_the_last_mapping() {
    with_peer(|rig, peer| read_by_peer(rig, peer, Config::new().peers([1])));
}

/// The same if the peer is added to an allocator that holds memory, in views and in a graph pool too.
#[test]
fn a_peer_that_is_added_reads_all_memory() {
    with_peer(|rig, peer| {
        read_by_peer(rig, peer, Config::new());
        let allocator = rig.allocator_with(Config::new());
        assert!(allocator.add_peer(9).is_err());
        allocator.add_peer(0).unwrap();
    });
}

fn read_by_peer(rig: &Rig, peer: &Peer<'_>, config: Config) {
    let module = rig.words();
    let fill = module.function(c"cualloc_fill").unwrap();
    let world = World::new(rig, config);
    let (allocator, stream) = (&world.allocator, &world.stream);
    allocator.set_limit(None);
    let pool = allocator.graph_pool().unwrap();
    let scope = pool.enter(Scope::Thread).unwrap();
    let mut inside: Vec<Block> = allocator.allocate_blocks(5, 2 * MIB, stream);
    // Two handles that lie apart are one block in a view of the pool.
    drop((inside.remove(3), inside.remove(1)));
    stream.synchronize().unwrap();
    inside.push(allocator.allocate(4 * MIB, stream).unwrap());
    scope.leave().unwrap();
    // Adds the device unless it has access.
    allocator.add_peer(1).unwrap();
    let calls = rig.calls("cuMemSetAccess");
    allocator.add_peer(1).unwrap();
    assert_eq!(rig.calls("cuMemSetAccess"), calls);
    let mut grown = Vec::new();
    for round in 0..6 {
        let seed = 7919 * round;
        for block in world.blocks.iter().chain(&inside).chain(&grown) {
            peer.assert_access(block.ptr());
            let bytes = block.requested() / 4 * 4;
            peer.assert_reads(&fill, block.ptr(), bytes, seed, stream);
        }
        match round % 3 {
            0 => drop(suspend(allocator, Contents::Host)),
            1 => {
                try_suspend(allocator, Select::Pool(&pool), Contents::Drop).unwrap();
            }
            _ => {
                try_suspend(allocator, Select::Allocator, Contents::Pinned).unwrap();
            }
        }
        let _none = allocator.resume(Select::Allocator);
        grown.push(allocator.allocate(7 * MIB, stream).unwrap());
        if round % 2 == 1 {
            drop(grown.remove(0));
            allocator.trim(0).unwrap();
        }
    }
    drop((grown, inside, pool));
    rig.settle(stream);
}

/// Whatever grows while a peer is added is accessible once its request returns and the peer is added.
#[test]
fn a_peer_is_added_while_threads_grow_the_memory() {
    with_peer(|rig, peer| {
        for round in 0..20usize {
            let allocator = rig.allocator_with(Config::new());
            let start = Barrier::new(5);
            let blocks = Mutex::new(Vec::new());
            thread::scope(|scope| {
                for number in 0..3 {
                    let (allocator, start, blocks) = (&allocator, &start, &blocks);
                    scope.spawn(move || {
                        let stream = rig.stream();
                        start.wait();
                        for turn in 0..6 {
                            let bytes = (number + turn + 1) * 2 * MIB;
                            let block = allocator.allocate(bytes, &stream).unwrap();
                            blocks.lock().unwrap().push(block);
                        }
                    });
                }
                scope.spawn(|| {
                    start.wait();
                    (0..20).for_each(|_| drop(allocator.trim(0).unwrap()));
                });
                start.wait();
                (0..round * 40).for_each(|_| thread::yield_now());
                allocator.add_peer(1).unwrap();
                blocks
                    .lock()
                    .unwrap()
                    .iter()
                    .for_each(|block| peer.assert_access(block.ptr()));
            });
            for block in blocks.into_inner().unwrap() {
                peer.assert_access(block.ptr());
            }
        }
    });
}

/// Memory that is suspended or resumed meanwhile is accessible once it is back.
#[test]
fn a_peer_is_added_while_memory_is_suspended_and_resumed() {
    with_peer(|rig, peer| {
        for round in 0..20usize {
            let world = World::new(rig, Config::new());
            let start = Barrier::new(2);
            thread::scope(|scope| {
                scope.spawn(|| {
                    start.wait();
                    for _ in 0..3 {
                        suspend(&world.allocator, Contents::Drop);
                        resume(&world.allocator);
                    }
                });
                start.wait();
                (0..round * 40).for_each(|_| thread::yield_now());
                world.allocator.add_peer(1).unwrap();
            });
            world
                .addresses()
                .iter()
                .for_each(|at| peer.assert_access(*at));
        }
    });
}
