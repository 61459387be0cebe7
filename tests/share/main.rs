//! Blocks shared between processes. Both ends are in one process where that suffices.
#![cfg(all(feature = "sim", target_os = "linux"))]

#[path = "../common/mod.rs"]
mod common;
mod processes;

use crate::common::capturing::{Capturing, MODE};
use crate::common::prelude::*;
use cualloc::allocator::{Contents, Scope, Select};
use cualloc::error::ShareError;
use cualloc::share::{Export, Foreign, Import, SharedBlock, Token};

fn packed(test: impl Fn(&Rig)) {
    only(Policy::Packed, test);
}

/// Shares a block by its address.
fn token(allocator: &Allocator, ptr: u64) -> Token {
    let shared = SharedBlock::new(allocator, ptr, Foreign::Allow).unwrap();
    // As another process reads it.
    shared.token.to_string().parse().unwrap()
}

/// Closes an allocator once the exporter has ended the guards of dropped imports.
fn close(allocator: &Allocator) {
    allocator.check().unwrap();
    wait_until("all guards have ended", || match allocator.close() {
        Ok(()) => true,
        Err(Error::Guarded { .. }) => false,
        Err(error) => panic!("{error}"),
    });
}

fn is_freed(opened: Result<Import, Error>) {
    assert_matches!(opened, Err(Error::Share(ShareError::Freed)));
}

/// Writes a block here and reads it through an import, and the other way round.
fn exchanged(rig: &Rig, allocator: &Allocator, block: &Block, stream: &Stream) {
    let bytes = block.requested();
    rig.stamp(block.ptr(), bytes, 7, stream);
    stream.synchronize().unwrap();
    let import = Import::open(&rig.context, &token(allocator, block.ptr())).unwrap();
    assert!(import.bytes() >= bytes as u64 && import.ptr() != block.ptr());
    assert_eq!(rig.mismatches(import.ptr(), bytes, 7, stream), 0);
    rig.stamp(import.ptr(), bytes, 8, stream);
    stream.synchronize().unwrap();
    assert_eq!(rig.mismatches(block.ptr(), bytes, 8, stream), 0);
}

#[test]
fn blocks_of_one_and_of_several_handles_are_shared() {
    packed(|rig| {
        let (allocator, stream) = (rig.allocator(), rig.stream());
        let _before = allocator.allocate(3 * MIB + 512, &stream).unwrap();
        let blocks =
            [100, 70_000, 3 * MIB, 100 * MIB].map(|b| allocator.allocate(b, &stream).unwrap());
        for block in &blocks {
            exchanged(rig, &allocator, block, &stream);
        }
        drop((blocks, _before));
        close(&allocator);
    });
}

/// A block over scattered memory has the handles of its view, in that order.
#[test]
fn blocks_in_views_are_shared() {
    packed(|rig| {
        const PART: usize = 5 * MIB;
        let (allocator, stream) = (rig.limited(4 * PART), rig.stream());
        let mut blocks = [0; 4].map(|_| Some(allocator.allocate(PART, &stream).unwrap()));
        blocks[1] = None;
        blocks[3] = None;
        stream.synchronize().unwrap();
        let block = allocator.allocate(9 * MIB, &stream).unwrap();
        assert!(allocator.stats().packing.views > 0);
        exchanged(rig, &allocator, &block, &stream);
        drop((block, blocks));
        close(&allocator);
    });
}

#[test]
fn blocks_of_graph_pools_are_shared_and_keep_their_pool() {
    packed(|rig| {
        let (allocator, stream) = (rig.allocator(), rig.stream());
        let pool = allocator.graph_pool().unwrap();
        let scope = pool.enter(Scope::Thread).unwrap();
        let blocks = [100, 40 * MIB].map(|b| allocator.allocate(b, &stream).unwrap());
        for block in &blocks {
            exchanged(rig, &allocator, block, &stream);
        }
        let import = Import::open(&rig.context, &token(&allocator, blocks[1].ptr())).unwrap();
        // SAFETY: nothing uses the memory.
        let suspended = unsafe { allocator.suspend(Select::Pool(&pool), Contents::Drop) };
        assert_matches!(suspended, Err(Error::Guarded { .. }));
        let at = blocks[1].ptr();
        drop(blocks);
        stream.synchronize().unwrap();
        let other = allocator.allocate(40 * MIB, &stream).unwrap();
        assert!(other.ptr() + other.size() <= at || at + (40 * MIB as u64) <= other.ptr());
        drop((other, scope, pool));
        assert_matches!(allocator.close(), Err(Error::Guarded { guards: 1, .. }));
        drop(import);
        close(&allocator);
    });
}

#[test]
fn an_export_reports_and_refuses_foreign_bytes() {
    packed(|rig| {
        let (allocator, stream) = (rig.allocator(), rig.stream());
        let small = allocator.allocate(1000, &stream).unwrap();
        let shared = SharedBlock::new(&allocator, small.ptr() + 512, Foreign::Allow).unwrap();
        let handle = allocator.segments_of(small.ptr(), 1).unwrap()[0].handle_bytes;
        assert_eq!((shared.offset, shared.foreign_bytes), (512, handle - 1024));
        let refused = Export::new(small, Foreign::Refuse).unwrap_err();
        assert_matches!(refused.error, Error::Share(ShareError::ForeignBytes { bytes }) if bytes == handle - 1024);
        let small = *refused.value;
        let export = Export::new(small, Foreign::Allow).unwrap();
        assert_eq!(export.token(), &shared.token);
        assert_eq!(export.foreign_bytes(), shared.foreign_bytes);
        drop(export.into_block());
        close(&allocator);
    });
}

/// A block that asks for a whole handle exposes nothing, in new memory and in memory that is reused.
#[test]
fn blocks_in_whole_handles_expose_nothing() {
    packed(|rig| {
        for config in [Config::new(), "debug=guard".parse().unwrap()] {
            let (allocator, stream) = (rig.allocator_with(config), rig.stream());
            let _small = allocator.allocate(5 * MIB, &stream).unwrap();
            for _ in 0..2 {
                let blocks = [100, MIB, 2 * MIB, 5 * MIB, 70 * MIB].map(|bytes| {
                    let request = Request::new(bytes).whole_handle();
                    allocator.allocate_with(request, &stream).unwrap()
                });
                let filler = allocator.allocate(MIB, &stream).unwrap();
                for block in blocks {
                    let export = Export::new(block, Foreign::Refuse).unwrap();
                    assert_eq!(export.foreign_bytes(), 0);
                    assert_eq!(export.token().bytes() % (2 * MIB as u64), 0);
                }
                drop(filler);
                // The second round uses the handles of the first.
                assert!(allocator.stats().all.reserved.current <= 100 * MIB as u64);
            }
            // The largest handle is free, but larger than this block.
            let block = allocator.allocate_with(Request::new(20 * MIB).whole_handle(), &stream);
            drop(Export::new(block.unwrap(), Foreign::Refuse).unwrap());
            drop(_small);
            close(&allocator);
        }
    });
}

#[test]
fn only_live_blocks_of_this_allocator_are_shared() {
    each(|rig| {
        let (allocator, stream) = (rig.allocator(), rig.stream());
        let block = allocator.allocate(3 * MIB, &stream).unwrap();
        let ptr = block.ptr();
        let share = || SharedBlock::new(&allocator, ptr, Foreign::Allow);
        if !rig.packed() {
            assert_matches!(share(), Err(Error::NotSupported { .. }));
        }
        drop(block);
        assert_matches!(share(), Err(Error::NotLive { .. }));
        let foreign = SharedBlock::new(&allocator, 64, Foreign::Allow);
        assert_matches!(foreign, Err(Error::NotOurs { .. }));
        allocator.close().unwrap();
        assert_matches!(share(), Err(Error::Closed));
    });
}

/// The token of a block that was freed is refused, even if another block has its address.
#[test]
fn tokens_of_freed_blocks_are_refused() {
    packed(|rig| {
        for bytes in [512, 100 * KIB, 5 * MIB] {
            let (allocator, stream) = (rig.allocator(), rig.stream());
            let block = allocator.allocate(bytes, &stream).unwrap();
            let (old, at) = (token(&allocator, block.ptr()), block.ptr());
            assert_eq!(token(&allocator, at), old, "equal blocks have equal tokens");
            drop(block);
            is_freed(Import::open(&rig.context, &old));
            let block = allocator.allocate(bytes, &stream).unwrap();
            assert_eq!(block.ptr(), at);
            is_freed(Import::open(&rig.context, &old));
            let new = token(&allocator, at);
            assert_ne!(new, old);
            drop(Import::open(&rig.context, &new).unwrap());
            drop(block);
            close(&allocator);
            is_freed(Import::open(&rig.context, &new));
        }
    });
}

/// The memory of a block that was freed is not reused while an import uses it.
#[test]
fn an_import_guards_its_block() {
    packed(|rig| {
        for bytes in [512, 100 * KIB, 5 * MIB] {
            let (allocator, stream) = (rig.allocator(), rig.stream());
            let block = allocator.allocate(bytes, &stream).unwrap();
            let (at, size) = (block.ptr(), block.size());
            let imports =
                [0; 2].map(|_| Import::open(&rig.context, &token(&allocator, at)).unwrap());
            assert_eq!(imports[0].ptr(), imports[1].ptr());
            drop(block);
            let guarded = || allocator.stats().packing.guarded;
            let [first, second] = imports;
            drop(first);
            assert_eq!(guarded(), size);
            let other = allocator.allocate(bytes, &stream).unwrap();
            assert_ne!(other.ptr(), at);
            drop(second);
            wait_until("the guard has ended", || guarded() == 0);
            drop(other);
            close(&allocator);
        }
    });
}

/// However many blocks of a handle are open, it is mapped once.
#[test]
fn imports_of_one_handle_share_a_mapping() {
    packed(|rig| {
        let (allocator, stream) = (rig.allocator(), rig.stream());
        let blocks: Vec<Block> = (0..1000)
            .map(|_| allocator.allocate(512, &stream).unwrap())
            .collect();
        let calls = |name| rig.calls(name);
        let before = ["cuMemMap", "cuMemExportToShareableHandle"].map(calls);
        let open =
            |block: &Block| Import::open(&rig.context, &token(&allocator, block.ptr())).unwrap();
        let imports: Vec<Import> = blocks.iter().chain(&blocks).map(open).collect();
        let handles: std::collections::HashSet<_> = blocks
            .iter()
            .map(|block| allocator.segments_of(block.ptr(), 1).unwrap()[0].handle)
            .collect();
        let after = ["cuMemMap", "cuMemExportToShareableHandle"].map(calls);
        let made = [after[0] - before[0], after[1] - before[1]];
        assert_eq!(made, [handles.len() as u64; 2]);
        for (block, import) in blocks.iter().zip(&imports) {
            assert_eq!(block.ptr() % 4096, import.ptr() % 4096);
        }
        drop((imports, blocks));
        close(&allocator);
    });
}

/// An import ends behind the work of its context; in a capture, which must not notice, when that is over.
#[test]
fn dropped_imports_wait_for_their_context() {
    only_simulated(Policy::Packed, |rig, sim| {
        let (allocator, stream) = (rig.allocator(), rig.stream());
        let block = allocator.allocate(5 * MIB, &stream).unwrap();
        let open = || Import::open(&rig.context, &token(&allocator, block.ptr())).unwrap();
        let (import, second) = (open(), open());
        sim.set_mode(Mode::Manual);
        rig.stamp(import.ptr(), 4096, 1, &stream);
        assert!(!stream.is_complete().unwrap());
        drop(import);
        assert!(stream.is_complete().unwrap());
        sim.set_mode(Mode::Instant);
        let capturing = Capturing::begin(&stream, MODE);
        drop(second);
        let unmaps = rig.calls("cuMemUnmap");
        drop(capturing.end().unwrap());
        drop(open());
        assert!(rig.calls("cuMemUnmap") > unmaps);
        drop(block);
        close(&allocator);
    });
}

/// After any failed driver call nothing is left of an import.
#[test]
fn failed_imports_leave_nothing() {
    only_simulated(Policy::Packed, |rig, sim| {
        let (allocator, stream) = (rig.allocator(), rig.stream());
        let block = allocator.allocate(70 * MIB, &stream).unwrap();
        for call in [
            "cuMemAddressReserve",
            "cuMemExportToShareableHandle",
            "cuMemImportFromShareableHandle",
            "cuMemMap",
            "cuMemSetAccess",
        ] {
            for nth in 1..3 {
                let code = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
                sim.fail(FailPlan::call(call, code).unwrap().nth(nth));
                let opened = Import::open(&rig.context, &token(&allocator, block.ptr()));
                sim.clear_failures();
                if nth == 1 {
                    assert!(opened.is_err(), "{call}");
                }
            }
        }
        drop(Import::open(&rig.context, &token(&allocator, block.ptr())).unwrap());
        drop(block);
        close(&allocator);
    });
}

#[test]
fn an_import_needs_a_device_that_reaches_the_memory() {
    let mut config = SimConfig::with_devices(3, 1 << 30);
    config.devices[2].peers = false;
    only_simulated_on(Policy::Packed, config, |rig, _| {
        let context = |device| rig.driver.context(device).unwrap();
        let allocator = Allocator::with_config(&context(0), Config::new()).unwrap();
        let stream = allocator.create_stream().unwrap();
        let block = allocator.allocate(MIB, &stream).unwrap();
        let token = token(&allocator, block.ptr());
        drop(Import::open(&context(1), &token).unwrap());
        assert_matches!(
            Import::open(&context(2), &token),
            Err(Error::NotSupported { .. })
        );
        drop(block);
        close(&allocator);
    });
}
