//! The holders of memory in an out-of-memory error.

use crate::causes::refused;
use crate::common::capturing::{Capturing, MODE};
use crate::scene::{MIB, Scene, alone, memory, scene};
use cualloc::allocator::{Block, Request, Scope};
use cualloc::driver::Stream;
use cualloc::error::{HeldBy, Holder, OutOfMemory};
use cualloc::record::Context;

const KIB: usize = 1 << 10;

/// Name, bytes and blocks of each holder.
fn named(picture: &OutOfMemory) -> Vec<(String, u64, u64)> {
    let holders = picture.holders.iter();
    let all: Vec<_> = holders
        .map(
            |Holder {
                 by, bytes, blocks, ..
             }| (by.to_string(), *bytes, *blocks),
        )
        .collect();
    let report = picture.report();
    let (headline, rest) = report.split_once('\n').unwrap();
    assert!(headline.contains("requested") && headline.contains("missing"));
    // In the report, too, in this order and before everything else but the cause and the advice.
    let lines: Vec<&str> = rest.lines().map(str::trim).collect();
    for ((by, ..), line) in all.iter().zip(&lines[2..]) {
        assert!(
            line.starts_with("holder") && line.ends_with(by.trim()),
            "{report}"
        );
    }
    let last = rest.lines().last().unwrap().trim();
    assert!(
        picture.holes.is_empty() || last.starts_with("hole"),
        "{report}"
    );
    let json = picture.to_json();
    for (_, bytes, blocks) in &all {
        let figures = format!("\"bytes\":{bytes},\"blocks\":{blocks}}}");
        assert!(json.contains(&figures), "{json}");
    }
    all
}

fn blocks(scene: &Scene, stream: &Stream, bytes: usize, count: usize) -> Vec<Block> {
    let one = |_| scene.block(bytes, stream);
    (0..count).map(one).collect()
}

/// Three contexts, with blocks of all kinds: from stream caches, from large-block caches, from the heap and from views.
#[test]
fn contexts_of_a_recording() {
    let _alone = alone();
    for settings in ["policy=packed", "policy=classic"] {
        let scene = Scene::new(&format!("{settings},limit=512MiB"));
        let stream = scene.stream();
        let recorder = memory();
        let within = |name: &str, work: &mut dyn FnMut() -> Vec<Block>| {
            let before = Context::new(name).enter();
            let made = work();
            before.enter();
            made
        };
        let weights = within("model;weights", &mut || {
            let mut made = blocks(&scene, &stream, 3 * MIB, 8);
            made.extend(blocks(&scene, &stream, 6 * KIB, 100));
            made
        });
        let activations = within("step;activations", &mut || {
            // Freed and taken again: from a large-block cache.
            drop(blocks(&scene, &stream, 5 * MIB, 1));
            let mut made = blocks(&scene, &stream, 5 * MIB, 3);
            made.extend(blocks(&scene, &stream, 512, 7));
            made
        });
        let cache = within("step;\"kv\" cache\n", &mut || {
            blocks(&scene, &stream, 640 * KIB, 600)
        });
        // The address of an earlier block that belongs to another context now.
        drop(blocks(&scene, &stream, 20 * KIB, 40));
        let untold = blocks(&scene, &stream, 20 * KIB, 3);
        let picture = refused(&scene.allocator, 200 * MIB, &stream);
        let kib = |bytes: usize| (bytes * KIB) as u64;
        let expected = [
            ("context step;\"kv\" cache ", kib(640 * 600), 600),
            ("context model;weights", kib(3 * 1024 * 8 + 600), 108),
            ("context step;activations", kib(15 * 1024) + 7 * 512, 10),
        ];
        let found = named(&picture);
        let found: Vec<_> = found
            .iter()
            .map(|(by, b, n)| (by.as_str(), *b, *n))
            .collect();
        assert_eq!(found[..3], expected, "{settings}");
        assert_eq!((found[3].1, found[3].2), (kib(60), 3));
        assert!(
            found[3]
                .0
                .starts_with("blocks of 16.00 KiB to 32.00 KiB on stream")
        );
        let sum: u64 = picture.holders.iter().map(|holder| holder.bytes).sum();
        assert_eq!(sum, picture.live(), "{settings}");
        let json = picture.to_json();
        assert!(json.contains(r#"step;\"kv\" cache\u000a"#), "{json}");
        drop((weights, activations, cache, untold, recorder));
    }
}

/// Contexts end with their blocks, also where those are not seen: the next block there was allocated in none.
#[test]
fn a_context_is_of_one_life_of_a_block() {
    let (_alone, scene, stream) = scene("policy=packed,limit=64MiB");
    let recorder = memory();
    let before = Context::new("first").enter();
    let sizes = [700, 60 * KIB, 3 * MIB, 3 * MIB];
    let first: Vec<u64> = sizes
        .iter()
        .map(|bytes| blocks(&scene, &stream, *bytes, 1)[0].ptr())
        .collect();
    before.enter();
    drop(recorder);
    let again: Vec<Block> = sizes
        .iter()
        .flat_map(|bytes| blocks(&scene, &stream, *bytes, 1))
        .collect();
    assert!(again.iter().any(|block| first.contains(&block.ptr())));
    let picture = refused(&scene.allocator, 64 * MIB, &stream);
    let by_size = |holder: &Holder| matches!(holder.by, HeldBy::Size { .. });
    assert!(picture.holders.iter().all(by_size), "{}", picture.report());
}

#[test]
fn sizes_and_streams_without_a_recording() {
    let _alone = alone();
    let scene = Scene::new("policy=packed,limit=256MiB");
    let streams = [scene.stream(), scene.stream()];
    // No recording runs, so contexts say nothing.
    let before = Context::new("unseen").enter();
    let counts = [
        (5 * MIB, 10),
        (9 * MIB, 3),
        (100 * KIB, 40),
        (MIB, 6),
        (600, 50),
        (40 * KIB, 9),
    ];
    let mut live = Vec::new();
    for (at, (bytes, count)) in counts.into_iter().enumerate() {
        live.extend(blocks(&scene, &streams[at % 2], bytes, count));
    }
    before.enter();
    let picture = refused(&scene.allocator, 256 * MIB, &streams[0]);
    let found = named(&picture);
    let [a, b] = streams.each_ref().map(|stream| stream.id().unwrap());
    let expected = [
        (
            format!("blocks of 4.00 MiB to 8.00 MiB on stream {a}"),
            50 << 20,
            10,
        ),
        (
            format!("blocks of 8.00 MiB to 16.00 MiB on stream {b}"),
            27 << 20,
            3,
        ),
        (
            format!("blocks of 1.00 MiB to 2.00 MiB on stream {b}"),
            6 << 20,
            6,
        ),
        (
            format!("blocks of 64.00 KiB to 128.00 KiB on stream {a}"),
            4000 << 10,
            40,
        ),
        (
            format!("blocks of 32.00 KiB to 64.00 KiB on stream {b}"),
            360 << 10,
            9,
        ),
    ];
    assert_eq!(found, expected);
    let report = picture.report();
    assert!(report.contains("50.00 KiB: all others"), "{report}");
}

/// Tags are those of graph pools, and the labels of requests.
#[test]
fn tags_come_before_contexts() {
    let _alone = alone();
    let scene = Scene::new("policy=packed,limit=256MiB");
    let (allocator, stream) = (&scene.allocator, scene.stream());
    let recorder = memory();
    let before = Context::new("step").enter();
    let mut live = Vec::new();
    let mut pools = Vec::new();
    for (tag, mib) in [("cache", 60), ("weights", 90), ("workspace", 20)] {
        let pool = allocator.graph_pool_for(tag).unwrap();
        let scope = pool.enter(Scope::Thread).unwrap();
        for _ in 0..2 {
            live.push(allocator.allocate(mib / 2 * MIB, &stream).unwrap());
        }
        scope.leave().unwrap();
        pools.push(pool);
    }
    for (label, bytes, count) in [("labelled", 3 * MIB, 3), ("small", 30 * KIB, 5)] {
        for _ in 0..count {
            // The second time from a cache of free blocks.
            drop(
                allocator
                    .allocate_with(Request::new(bytes), &stream)
                    .unwrap(),
            );
            let request = Request::new(bytes).tag(label);
            live.push(allocator.allocate_with(request, &stream).unwrap());
        }
    }
    live.push(allocator.allocate(2 * MIB, &stream).unwrap());
    before.enter();
    let picture = refused(allocator, 256 * MIB, &stream);
    let found = named(&picture);
    let expected = [
        ("tag weights", 90 << 20, 2),
        ("tag cache", 60 << 20, 2),
        ("tag workspace", 20 << 20, 2),
        ("tag labelled", 9 << 20, 3),
        ("context step", 2 << 20, 1),
    ];
    let found: Vec<_> = found
        .iter()
        .map(|(by, b, n)| (by.as_str(), *b, *n))
        .collect();
    assert_eq!(found, expected);
    assert_eq!(picture.live(), (181 << 20) + ((5 * 30) << 10));
    drop((live, pools, recorder));
}

/// Blocks of captures are identified by the context of their capture.
#[test]
fn blocks_of_captures_have_contexts() {
    let (_alone, scene, stream) = scene("policy=packed,limit=64MiB");
    let recorder = memory();
    let pool = scene.allocator.graph_pool().unwrap();
    let scope = pool.enter(Scope::NextCapture).unwrap();
    let under_way = Capturing::begin(&stream, MODE);
    let before = Context::new("capture").enter();
    let kept = scene.block(30 * MIB, &stream);
    before.enter();
    let graph = under_way.end().unwrap();
    scope.leave().unwrap();
    let picture = refused(&scene.allocator, 64 * MIB, &stream);
    assert_eq!(
        named(&picture),
        [("context capture".to_owned(), 30 << 20, 1)]
    );
    drop((kept, graph, recorder));
}
