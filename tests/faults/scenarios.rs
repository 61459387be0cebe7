//! Paths through the allocator.

use cualloc::Error;
use cualloc::allocator::Request;
use cualloc::driver::{Context, Stream};
use cualloc::error::StreamMisuse;

use crate::world::{CLASSIC, MIB, PACKED, PLAIN, Scenario, World};

/// A hole between live blocks.
fn hole(w: &mut World) {
    (0..3).for_each(|_| w.put(12 * MIB, 0));
    w.free(1).unwrap();
    w.alloc.synchronize().unwrap();
    w.alloc.trim(0).unwrap();
}

/// Two streams; memory of the second between live blocks, its work unfinished.
fn pending_elsewhere(w: &mut World) {
    w.stream();
    for stream in [0, 1, 0, 1, 0] {
        w.put(10 * MIB, stream);
    }
    w.free(1).unwrap();
    w.free(3).unwrap();
}

pub fn scenarios() -> Vec<Scenario> {
    vec![
        Scenario {
            name: "first small",
            act: |w| w.take(100, 0),
            ..PLAIN
        },
        Scenario {
            name: "first large",
            act: |w| w.take(12 * MIB, 0),
            ..PLAIN
        },
        Scenario {
            name: "first aligned",
            act: |w| {
                let block = w
                    .alloc
                    .allocate_with(Request::new(5000).align(2 * MIB), &w.streams[0])?;
                w.blocks.push(Some(block));
                Ok(())
            },
            ..PLAIN
        },
        Scenario {
            name: "growth behind free memory",
            policies: PACKED,
            atomic: true,
            prepare: |w| {
                w.put(3 * MIB, 0);
                w.put(3 * MIB, 0);
                w.free(1).unwrap();
            },
            act: |w| w.take(11 * MIB, 0),
            ..PLAIN
        },
        Scenario {
            name: "growth into a hole",
            policies: PACKED,
            atomic: true,
            prepare: hole,
            act: |w| w.take(12 * MIB, 0),
            ..PLAIN
        },
        Scenario {
            name: "reservation of another span",
            policies: PACKED,
            memory: 64 << 20,
            prepare: |w| {
                w.put(30 * MIB, 0);
                w.put(30 * MIB, 0);
                w.free(0).unwrap();
                w.alloc.synchronize().unwrap();
                w.alloc.trim(0).unwrap();
            },
            act: |w| w.take(33 * MIB, 0),
            ..PLAIN
        },
        Scenario {
            name: "wait across streams",
            limit: Some(32 << 20),
            prepare: |w| {
                w.stream();
                w.put(30 * MIB, 1);
                w.free(0).unwrap();
            },
            act: |w| w.take(30 * MIB, 0),
            ..PLAIN
        },
        Scenario {
            name: "growth behind memory that needs a wait",
            policies: PACKED,
            limit: Some(32 << 20),
            // The test of the device, a hundred calls, is failed in a test of its own.
            self_test: false,
            prepare: |w| {
                w.stream();
                w.put(20 * MIB, 1);
                w.free(0).unwrap();
            },
            act: |w| w.take(30 * MIB, 0),
            ..PLAIN
        },
        Scenario {
            name: "aligned growth behind memory that needs a wait",
            policies: PACKED,
            limit: Some(32 << 20),
            views: false,
            prepare: |w| {
                w.stream();
                w.put(100 << 10, 1);
                w.put((16 << 20) - (100 << 10), 1);
                w.take(100, 0).unwrap();
                w.free(1).unwrap();
            },
            act: |w| {
                let block = w
                    .alloc
                    .allocate_with(Request::new(24 * MIB).align(2 * MIB), &w.streams[0])?;
                w.blocks.push(Some(block));
                Ok(())
            },
            proof: |w| {
                let stats = w.alloc.stats();
                (stats.reclaim.grown_hard, stats.stream_waits) == (1, 1)
            },
            ..PLAIN
        },
        Scenario {
            name: "memory that nobody asked for",
            prepare: |w| {
                w.stream();
                w.put(10 * MIB, 0);
                w.take(100, 1).unwrap();
                // More batches than get their markers at once.
                for at in 0..600 {
                    let bytes = (1 + at % 3) * MIB;
                    drop(w.alloc.allocate(bytes, &w.streams[0]).unwrap());
                }
                w.sim.complete_all();
                w.free(0).unwrap();
            },
            act: |w| w.take(10 * MIB, 1),
            ..PLAIN
        },
        Scenario {
            name: "poll with finished work",
            prepare: |w| {
                pending_elsewhere(w);
                w.sim.complete_all();
            },
            act: |w| w.take(10 * MIB, 0),
            ..PLAIN
        },
        Scenario {
            name: "host wait under a limit",
            limit: Some(50 << 20),
            prepare: pending_elsewhere,
            act: |w| w.take(20 * MIB, 0),
            ..PLAIN
        },
        Scenario {
            name: "release under a limit",
            limit: Some(50 << 20),
            prepare: |w| {
                pending_elsewhere(w);
                w.sim.complete_all();
                w.alloc.synchronize().unwrap();
            },
            act: |w| w.take(20 * MIB, 0),
            ..PLAIN
        },
        Scenario {
            name: "release for a full device",
            memory: 50 << 20,
            prepare: pending_elsewhere,
            act: |w| w.take(20 * MIB, 0),
            ..PLAIN
        },
        Scenario {
            name: "no memory left",
            memory: 64 << 20,
            prepare: |w| w.put(40 * MIB, 0),
            act: |w| w.take(40 * MIB, 0),
            hopeless: true,
            ..PLAIN
        },
        Scenario {
            name: "no memory below the limit",
            limit: Some(40 << 20),
            prepare: |w| {
                w.stream();
                w.put(20 * MIB, 0);
                w.put(20 * MIB, 1);
                w.free(1).unwrap();
            },
            act: |w| w.take(40 * MIB, 0),
            hopeless: true,
            ..PLAIN
        },
        Scenario {
            name: "hooks, then the whole context",
            limit: Some(20 << 20),
            prepare: |w| {
                w.put(16 * MIB, 0);
                w.free(0).unwrap();
                w.stream();
                w.alloc
                    .add_relief_hook(cualloc::allocator::ReliefHook::new("none", |_| 0));
            },
            act: |w| {
                // SAFETY: the stream outlives the allocator's use of it.
                let ptr = unsafe { w.alloc.allocate_raw(12 * MIB, w.streams[1].raw()) }?;
                // SAFETY: just allocated; nobody uses it.
                unsafe { w.alloc.free_raw(ptr) }.ok();
                if w.alloc.owns(ptr) {
                    w.sim.clear_failures();
                    // SAFETY: as above; the fault kept it from being freed.
                    unsafe { w.alloc.free_raw(ptr) }?;
                }
                Ok(())
            },
            ..PLAIN
        },
        Scenario {
            name: "record a use",
            prepare: |w| {
                w.stream();
                w.put(MIB, 0);
            },
            act: |w| w.blocks[0].as_ref().unwrap().record_use(&w.streams[1]),
            ..PLAIN
        },
        Scenario {
            name: "record a stream",
            prepare: |w| {
                w.stream();
                w.put(MIB, 0);
            },
            act: |w| w.blocks[0].as_ref().unwrap().record_stream(&w.streams[1]),
            ..PLAIN
        },
        Scenario {
            name: "record a stream of another device",
            prepare: |w| {
                let device = w.driver.device(1).unwrap();
                let other = Context::primary(&device).unwrap();
                w.streams.push(Stream::new(&other).unwrap());
                w.put(MIB, 0);
            },
            act: |w| {
                w.blocks[0].as_ref().unwrap().record_use(&w.streams[1])?;
                w.free(0)
            },
            ..PLAIN
        },
        Scenario {
            name: "free with markers",
            prepare: |w| {
                w.stream();
                w.put(4 * MIB, 0);
                w.blocks[0]
                    .as_ref()
                    .unwrap()
                    .record_stream(&w.streams[1])
                    .unwrap();
                w.take(100, 1).unwrap();
            },
            act: |w| w.free(0),
            ..PLAIN
        },
        Scenario {
            name: "drop with markers",
            prepare: |w| {
                w.stream();
                w.put(4 * MIB, 0);
                w.take(100, 1).unwrap();
            },
            act: |w| {
                w.blocks[0] = None;
                w.freed_late()
            },
            ..PLAIN
        },
        Scenario {
            name: "trim with finished work",
            prepare: |w| {
                pending_elsewhere(w);
                w.put(100, 0);
                w.put(100, 1);
                w.free(5).unwrap();
                w.free(6).unwrap();
                w.sim.complete_all();
            },
            act: |w| w.alloc.trim(20 << 20).map(drop),
            ..PLAIN
        },
        Scenario {
            name: "empty the cache with unfinished work",
            prepare: pending_elsewhere,
            act: |w| w.alloc.empty_cache().map(drop),
            ..PLAIN
        },
        Scenario {
            name: "empty the cache of all",
            prepare: |w| {
                pending_elsewhere(w);
                w.blocks.clear();
                w.alloc.synchronize().unwrap();
            },
            act: |w| w.alloc.empty_cache().map(drop),
            ..PLAIN
        },
        Scenario {
            name: "retire",
            prepare: |w| {
                pending_elsewhere(w);
                w.put(100, 1);
                w.put(100, 1);
                w.free(5).unwrap();
            },
            act: |w| match w.alloc.retire(&w.streams[1]) {
                Err(Error::Stream(StreamMisuse::Unknown { .. })) => Ok(()),
                result => result,
            },
            ..PLAIN
        },
        Scenario {
            name: "a new stream while another one was left",
            prepare: |w| {
                pending_elsewhere(w);
                w.streams.pop();
                w.stream();
            },
            act: |w| w.take(100, 1),
            ..PLAIN
        },
        Scenario {
            name: "reserve",
            act: |w| {
                w.alloc.reserve(12 * MIB, &w.streams[0])?;
                w.freed_late()
            },
            ..PLAIN
        },
        Scenario {
            name: "mark",
            prepare: pending_elsewhere,
            // SAFETY: a live stream.
            act: |w| unsafe { w.alloc.mark_raw(w.streams[0].raw()) },
            ..PLAIN
        },
        Scenario {
            name: "synchronise",
            prepare: pending_elsewhere,
            act: |w| w.alloc.synchronize(),
            ..PLAIN
        },
        Scenario {
            name: "default streams",
            act: |w| {
                let stream = Stream::per_thread(&w.context);
                let block = w.alloc.allocate(3 * MIB, &stream)?;
                w.blocks.push(Some(block));
                // SAFETY: the handle of the legacy default stream is always valid.
                let ptr = unsafe { w.alloc.allocate_raw(100, std::ptr::null_mut()) };
                w.sim.clear_failures();
                // SAFETY: just allocated; nobody uses it.
                ptr.and_then(|ptr| unsafe { w.alloc.free_raw(ptr) })
            },
            ..PLAIN
        },
        Scenario {
            name: "close",
            prepare: |w| {
                pending_elsewhere(w);
                w.put(100, 0);
                w.blocks.clear();
            },
            act: |w| match w.alloc.close() {
                Err(Error::Closed) => Ok(()),
                result => result,
            },
            ..PLAIN
        },
        Scenario {
            name: "close after raw streams",
            prepare: |w| {
                // SAFETY: the stream outlives the allocator's use of it.
                let ptr = unsafe { w.alloc.allocate_raw(100, w.streams[0].raw()) }.unwrap();
                // SAFETY: just allocated; nobody uses it.
                unsafe { w.alloc.free_raw(ptr) }.unwrap();
            },
            act: |w| match w.alloc.close() {
                Err(Error::Closed) => Ok(()),
                result => result,
            },
            ..PLAIN
        },
        Scenario {
            name: "a segment freed and made again",
            policies: CLASSIC,
            limit: Some(24 << 20),
            prepare: |w| {
                w.put(12 * MIB, 0);
                w.free(0).unwrap();
            },
            act: |w| w.take(14 * MIB, 0),
            ..PLAIN
        },
    ]
}
