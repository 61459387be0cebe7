//! Paths through the allocator.

use cualloc::error::StreamMisuse;

use crate::common::prelude::*;
use crate::world::{CLASSIC, MIB, PACKED, Scenario, World, close};

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
        Scenario::of("first small", |w| w.take(100, 0)),
        Scenario::of("first large", |w| w.take(12 * MIB, 0)),
        Scenario::of("first aligned", |w| {
            let block = w
                .alloc
                .allocate_with(Request::new(5000).align(2 * MIB), &w.streams[0])?;
            w.blocks.push(Some(block));
            Ok(())
        }),
        Scenario::of("growth behind free memory", |w| w.take(11 * MIB, 0))
            .policies(PACKED)
            .after(|w| {
                w.put(3 * MIB, 0);
                w.put(3 * MIB, 0);
                w.free(1).unwrap();
            })
            .atomic(),
        Scenario::of("growth into a hole", |w| w.take(12 * MIB, 0))
            .policies(PACKED)
            .after(hole)
            .atomic(),
        Scenario::of("reservation of another span", |w| w.take(33 * MIB, 0))
            .policies(PACKED)
            .memory(64 << 20)
            .after(|w| {
                w.put(30 * MIB, 0);
                w.put(30 * MIB, 0);
                w.free(0).unwrap();
                w.alloc.synchronize().unwrap();
                w.alloc.trim(0).unwrap();
            }),
        Scenario::of("wait across streams", |w| w.take(30 * MIB, 0))
            .limit(32 << 20)
            .after(|w| {
                w.stream();
                w.put(30 * MIB, 1);
                w.free(0).unwrap();
            }),
        Scenario::of("growth behind memory that needs a wait", |w| {
            w.take(30 * MIB, 0)
        })
        .policies(PACKED)
        .limit(32 << 20)
        // The test of the device, a hundred calls, is failed in a test of its own.
        .without_self_test()
        .after(|w| {
            w.stream();
            w.put(20 * MIB, 1);
            w.free(0).unwrap();
        }),
        Scenario::of("aligned growth behind memory that needs a wait", |w| {
            let block = w
                .alloc
                .allocate_with(Request::new(24 * MIB).align(2 * MIB), &w.streams[0])?;
            w.blocks.push(Some(block));
            Ok(())
        })
        .policies(PACKED)
        .limit(32 << 20)
        .without_views()
        .after(|w| {
            w.stream();
            w.put(100 << 10, 1);
            w.put((16 << 20) - (100 << 10), 1);
            w.take(100, 0).unwrap();
            w.free(1).unwrap();
        })
        .proof(|w| {
            let stats = w.alloc.stats();
            (stats.reclaim.grown_hard, stats.stream_waits) == (1, 1)
        }),
        Scenario::of("memory that no request waits for", |w| w.take(10 * MIB, 1)).after(|w| {
            w.stream();
            w.put(10 * MIB, 0);
            w.take(100, 1).unwrap();
            // More batches than get their markers in one call.
            for at in 0..600 {
                let bytes = (1 + at % 3) * MIB;
                drop(w.alloc.allocate(bytes, &w.streams[0]).unwrap());
            }
            w.sim.complete_all();
            w.free(0).unwrap();
        }),
        Scenario::of("poll with finished work", |w| w.take(10 * MIB, 0)).after(|w| {
            pending_elsewhere(w);
            w.sim.complete_all();
        }),
        Scenario::of("host wait under a limit", |w| w.take(20 * MIB, 0))
            .limit(50 << 20)
            .after(pending_elsewhere),
        Scenario::of("release under a limit", |w| w.take(20 * MIB, 0))
            .limit(50 << 20)
            .after(|w| {
                pending_elsewhere(w);
                w.sim.complete_all();
                w.alloc.synchronize().unwrap();
            }),
        Scenario::of("release for a full device", |w| w.take(20 * MIB, 0))
            .memory(50 << 20)
            .after(pending_elsewhere),
        Scenario::of("no memory left", |w| w.take(40 * MIB, 0))
            .memory(64 << 20)
            .after(|w| w.put(40 * MIB, 0))
            .hopeless(),
        Scenario::of("no memory below the limit", |w| w.take(40 * MIB, 0))
            .limit(40 << 20)
            .after(|w| {
                w.stream();
                w.put(20 * MIB, 0);
                w.put(20 * MIB, 1);
                w.free(1).unwrap();
            })
            .hopeless(),
        Scenario::of("hooks, then the whole context", |w| {
            let ptr = w.alloc.raw_allocate(12 * MIB, w.streams[1].raw())?;
            w.alloc.raw_free(ptr).ok();
            if w.alloc.owns(ptr) {
                w.sim.clear_failures();
                w.alloc.raw_free(ptr)?;
            }
            Ok(())
        })
        .limit(20 << 20)
        .after(|w| {
            w.put(16 * MIB, 0);
            w.free(0).unwrap();
            w.stream();
            w.alloc
                .add_relief_hook(cualloc::allocator::ReliefHook::new("none", |_| 0));
        }),
        Scenario::of("record a use", |w| {
            w.blocks[0].as_ref().unwrap().record_use(&w.streams[1])
        })
        .after(|w| {
            w.stream();
            w.put(MIB, 0);
        }),
        Scenario::of("record a stream", |w| {
            w.blocks[0].as_ref().unwrap().record_stream(&w.streams[1])
        })
        .after(|w| {
            w.stream();
            w.put(MIB, 0);
        }),
        Scenario::of("record a stream of another device", |w| {
            w.blocks[0].as_ref().unwrap().record_use(&w.streams[1])?;
            w.free(0)
        })
        .after(|w| {
            let device = w.driver.device(1).unwrap();
            let other = Context::primary(&device).unwrap();
            w.streams.push(Stream::new(&other).unwrap());
            w.put(MIB, 0);
        }),
        Scenario::of("free with markers", |w| w.free(0)).after(|w| {
            w.stream();
            w.put(4 * MIB, 0);
            w.record(0, 1);
            w.take(100, 1).unwrap();
        }),
        Scenario::of("drop with markers", |w| {
            w.blocks[0] = None;
            w.freed_late()
        })
        .after(|w| {
            w.stream();
            w.put(4 * MIB, 0);
            w.take(100, 1).unwrap();
        }),
        Scenario::of("trim with finished work", |w| {
            w.alloc.trim(20 << 20).map(drop)
        })
        .after(|w| {
            pending_elsewhere(w);
            w.put(100, 0);
            w.put(100, 1);
            w.free(5).unwrap();
            w.free(6).unwrap();
            w.sim.complete_all();
        }),
        Scenario::of("empty the cache with unfinished work", |w| {
            w.alloc.empty_cache().map(drop)
        })
        .after(pending_elsewhere),
        Scenario::of("empty the cache of all", |w| {
            w.alloc.empty_cache().map(drop)
        })
        .after(|w| {
            pending_elsewhere(w);
            w.blocks.clear();
            w.alloc.synchronize().unwrap();
        }),
        Scenario::of("retire", |w| match w.alloc.retire(&w.streams[1]) {
            Err(Error::Stream(StreamMisuse::Unknown { .. })) => Ok(()),
            result => result,
        })
        .after(|w| {
            pending_elsewhere(w);
            w.put(100, 1);
            w.put(100, 1);
            w.free(5).unwrap();
        }),
        Scenario::of("a new stream while another one was left", |w| {
            w.take(100, 1)
        })
        .after(|w| {
            pending_elsewhere(w);
            w.streams.pop();
            w.stream();
        }),
        Scenario::of("reserve", |w| {
            w.alloc.reserve(12 * MIB, &w.streams[0])?;
            w.freed_late()
        }),
        Scenario::of("mark", |w| w.alloc.raw_mark(w.streams[0].raw())).after(pending_elsewhere),
        Scenario::of("synchronise", |w| w.alloc.synchronize()).after(pending_elsewhere),
        Scenario::of("default streams", |w| {
            let stream = Stream::per_thread(&w.context);
            let block = w.alloc.allocate(3 * MIB, &stream)?;
            w.blocks.push(Some(block));
            let ptr = w.alloc.raw_allocate(100, std::ptr::null_mut());
            w.sim.clear_failures();
            ptr.and_then(|ptr| w.alloc.raw_free(ptr))
        }),
        Scenario::of("close", close).after(|w| {
            pending_elsewhere(w);
            w.put(100, 0);
            w.blocks.clear();
        }),
        Scenario::of("close after raw streams", close).after(|w| {
            let ptr = w.alloc.raw_allocate(100, w.streams[0].raw()).unwrap();
            w.alloc.raw_free(ptr).unwrap();
        }),
        Scenario::of("a segment freed and made again", |w| w.take(14 * MIB, 0))
            .policies(CLASSIC)
            .limit(24 << 20)
            .after(|w| {
                w.put(12 * MIB, 0);
                w.free(0).unwrap();
            }),
    ]
}
