//! Lives of small buffers of the typed pool: their streams, their threads, their devices.

use std::any::TypeId;
use std::sync::mpsc;

use cualloc::driver::Stream;
use cualloc::pool::TypedPool;
use cualloc::resource::MemoryResource;
use cualloc::{DeviceBuffer, Policy, Request};

use crate::common::{Rig, each, only};
use crate::fill;
use crate::typed::counts;

fn pool_of(rig: &Rig) -> TypedPool {
    TypedPool::new(&rig.allocator())
}

/// S2.10: buffers outlive their pool's last handle; with the last of them everything goes.
#[test]
fn s2_10_the_last_buffer_ends_its_pool() {
    each(|rig| {
        let stream = rig.stream();
        let pool = pool_of(rig);
        drop(DeviceBuffer::<u8>::uninit(&pool, 1000, &stream).unwrap());
        let small: Vec<_> = (0..3)
            .map(|_| DeviceBuffer::<u8>::uninit(&pool, 1000, &stream).unwrap())
            .collect();
        let large = DeviceBuffer::<u8>::uninit(&pool, 1 << 20, &stream).unwrap();
        let allocator = pool.allocator().clone();
        drop(pool);
        for buffer in small {
            fill(&rig.context, buffer.as_device_ptr(), 1000, &stream);
            assert_eq!(buffer.stream().unwrap().id().unwrap(), stream.id().unwrap());
            drop(buffer);
        }
        assert!(rig.driver_held().is_none_or(|held| held > 0));
        assert_eq!(allocator.stats().all.allocations.current, 1);
        drop(allocator);
        fill(&rig.context, large.as_device_ptr(), 1 << 20, &stream);
        drop(large);
        assert!(rig.driver_held().is_none_or(|held| held == 0));
        assert_eq!(stream.holders(), 1, "no other holder is left");
    });
}

/// S2.10: the stream of a buffer lives as long, also if only the buffer holds it, and no longer.
#[test]
fn s2_10_streams_live_as_long_as_their_buffers() {
    only(Policy::Packed, |rig| {
        let pool = pool_of(rig);
        for _ in 0..20 {
            let stream = rig.stream();
            drop(DeviceBuffer::<u32>::uninit(&pool, 256, &stream).unwrap());
            assert_eq!(stream.holders(), 2, "the allocator's");
            let mut buffer = DeviceBuffer::<u32>::uninit(&pool, 256, &stream).unwrap();
            assert_eq!(stream.holders(), 3);
            drop(stream);
            let home = buffer.stream().unwrap().clone();
            buffer.as_mut_slice().set_zero(&home).unwrap();
            // SAFETY: zeroed above, on its own stream.
            let values = unsafe { buffer.assume_init() }.to_vec().unwrap();
            assert_eq!(values, vec![0; 256]);
            assert_eq!(home.holders(), 2);
        }
    });
}

/// S2.10: two objects may stand for one stream, and one of them may go while its buffers live.
#[test]
fn s2_10_buffers_keep_their_stream_alive() {
    each(|rig| {
        let (pool, owned) = (pool_of(rig), rig.stream());
        drop(DeviceBuffer::<u32>::uninit(&pool, 256, &owned).unwrap());
        for _ in 0..3 {
            // SAFETY: the stream is alive until the end of the test.
            let borrowed = unsafe { Stream::from_raw(&rig.context, owned.raw()) }.unwrap();
            let mut buffer = DeviceBuffer::<u32>::uninit(&pool, 256, &borrowed).unwrap();
            assert_eq!(borrowed.holders(), 2);
            drop(borrowed);
            let home = buffer.stream().unwrap().clone();
            assert_eq!((home.holders(), home.raw()), (2, owned.raw()));
            buffer.as_mut_slice().set_zero(&home).unwrap();
            drop(buffer);
            assert_eq!(home.holders(), 1);
            drop(DeviceBuffer::<u32>::uninit(&pool, 256, &owned).unwrap());
        }
        let legacy = [0; 2].map(|_| Stream::legacy(&rig.context));
        for stream in &legacy {
            for _ in 0..2 {
                drop(DeviceBuffer::<u32>::uninit(&pool, 256, stream).unwrap());
            }
        }
        drop(pool);
        assert_eq!(legacy.map(|stream| stream.holders()), [1, 1]);
    });
}

/// S2.7: what was given to a retired stream through a buffer comes before the memory's next user.
#[test]
fn s2_7_buffers_of_a_retired_stream_wait_for_its_work() {
    each(|rig| {
        let (pool, [home, other]) = (pool_of(rig), rig.streams());
        let allocator = pool.allocator();
        drop(DeviceBuffer::<u8>::uninit(&pool, 4096, &home).unwrap());
        let mut buffer = DeviceBuffer::<u8>::uninit(&pool, 4096, &home).unwrap();
        let address = buffer.as_device_ptr();
        allocator.retire(&home).unwrap();
        rig.settle(&home);
        let hold = rig.hold(&home);
        buffer.as_mut_slice().set_zero(&home).unwrap();
        drop(buffer);
        let taken: Vec<_> = (0..200)
            .map(|_| DeviceBuffer::<u8>::uninit(&pool, 4096, &other).unwrap())
            .collect();
        for buffer in &taken {
            assert_ne!(buffer.as_device_ptr(), address, "still being zeroed");
            fill(&rig.context, buffer.as_device_ptr(), 4096, &other);
        }
        hold.release();
    });
}

/// S2.8: counts of all threads together, wherever buffers were taken and returned.
#[test]
fn s2_8_s2_13_threads_count_exactly_and_name_each_others_buffers() {
    each(|rig| {
        const THREADS: u64 = 4;
        const ROUNDS: u64 = 200;
        let pool = pool_of(rig);
        let stream = rig.stream();
        drop(DeviceBuffer::<f32>::uninit(&pool, 300, &stream).unwrap());
        pool.reset_accumulated_stats();
        let (send, receive) = mpsc::channel();
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                let (pool, stream, send) = (pool.clone(), stream.clone(), send.clone());
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let buffer = DeviceBuffer::<f32>::uninit(&pool, 300, &stream).unwrap();
                        // Half of them are returned by another thread.
                        if round % 2 == 0 {
                            send.send(buffer).unwrap();
                        }
                    }
                });
            }
            drop(send);
            receive.iter().for_each(drop);
        });
        let stats = counts(&pool);
        assert_eq!(stats.0 + stats.1, THREADS * ROUNDS);
        assert_eq!(stats.2, THREADS * ROUNDS);
        let live: Vec<_> = (0..5)
            .map(|_| DeviceBuffer::<f32>::uninit(&pool, 300, &stream).unwrap())
            .collect();
        let large = DeviceBuffer::<f32>::uninit(&pool, 1 << 20, &stream).unwrap();
        let element = TypeId::of::<f32>();
        let count = |len| pool.record_use_of_type(len, element, &stream).unwrap();
        assert_eq!(
            [count(300), count(512), count(1 << 20), count(1)],
            [5, 5, 1, 0]
        );
        drop((live, large));
        assert_eq!([count(300), count(1 << 20)], [0, 0]);
        pool.allocator().check().unwrap();
        pool.reset_accumulated_stats();
        assert_eq!(counts(&pool), (0, 0, 0));
    });
}

/// S2.2: buffers and blocks of the resource share what came back, small ones too.
#[test]
fn s2_2_small_blocks_and_buffers_share_returned_memory() {
    use cualloc::resource::MemoryResource;
    each(|rig| {
        let (pool, stream) = (pool_of(rig), rig.stream());
        let [a, b] = [0; 2].map(|_| pool.allocate_block(&Request::new(12_288), &stream).unwrap());
        let [first, second] = [a.ptr(), b.ptr()];
        let buffer = DeviceBuffer::<u8>::uninit(&pool, 12_288, &stream).unwrap();
        let third = buffer.as_device_ptr();
        pool.deallocate_block(b).unwrap();
        drop(buffer);
        pool.deallocate_block(a).unwrap();
        let taken = [0; 3].map(|_| pool.take::<u32>(3072, &stream).unwrap().expect("a hit"));
        assert_eq!(
            taken.each_ref().map(|b| b.as_device_ptr()),
            [first, third, second]
        );
        assert_eq!(counts(&pool).2, 3);
    });
}
