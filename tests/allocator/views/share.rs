//! Foreign uses of a block's physical memory: exports, imports, registrations.
#![cfg(unix)]

use std::os::fd::AsFd;

use super::{TWO, packed, scattered, view_of};
use crate::common::prelude::*;
use cualloc::allocator::PhysicalSegment;
use cualloc::driver::Feature;

/// Imports the handle of a segment, maps it elsewhere, and compares what is read there.
fn read_elsewhere(rig: &Rig, segment: &PhysicalSegment, word: u32, stream: &Stream) {
    let handle = segment.handle.expect("packed memory has handles");
    let bytes = segment.handle_bytes as usize;
    let entered = rig.context.enter().unwrap();
    // SAFETY: the handle is live while its range is guarded.
    let fd = unsafe { entered.export_fd(handle) }.unwrap();
    let imported = entered.import_fd(fd.as_fd()).unwrap();
    drop(fd);
    let address = entered.address_reserve(bytes, 0, 0).unwrap();
    let device = rig.context.device();
    // SAFETY: the range was reserved just now, and is as long as the handle.
    unsafe {
        entered.mem_map(address, bytes, imported).unwrap();
        entered
            .set_access(address, bytes, std::slice::from_ref(device))
            .unwrap();
    }
    let at = address + segment.offset;
    assert_eq!(rig.mismatches(at, segment.bytes as usize, word, stream), 0);
    // SAFETY: nothing uses the mapping any more; the handle was imported above.
    unsafe {
        entered.mem_unmap(address, bytes).unwrap();
        entered.mem_release(imported).unwrap();
        entered.address_free(address, bytes).unwrap();
    }
}

/// Registers a segment as the driver of a network card does.
fn register(rig: &Rig, segment: &PhysicalSegment) {
    let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED;
    let able = rig.context.device().attribute(attribute);
    if !rig.driver.has(Feature::RangeHandles) || able.unwrap() == 0 {
        return eprintln!("SKIPPED in part: the driver gives no dma-bufs");
    }
    // In pages of the host.
    let first = segment.address.next_multiple_of(4096);
    let end = (segment.address + segment.bytes) & !4095;
    if first < end {
        let entered = rig.context.enter().unwrap();
        entered.dma_buf(first, (end - first) as usize).unwrap();
    }
}

fn shared(rig: &Rig, allocator: &Allocator, block: &Block, stream: &Stream) -> usize {
    let (from, bytes) = (block.ptr(), block.requested() as u64);
    let guard = allocator.guard(from, bytes).unwrap();
    let segments = guard.segments();
    assert_eq!(segments.iter().map(|s| s.bytes).sum::<u64>(), bytes);
    for (word, segment) in (1..).zip(segments) {
        rig.stamp(segment.address, segment.bytes as usize, word, stream);
    }
    stream.synchronize().unwrap();
    for (word, segment) in (1..).zip(segments) {
        read_elsewhere(rig, segment, word, stream);
        register(rig, segment);
    }
    segments.len()
}

/// R18: the list of a range names every handle in it, so that a block of many is shared as a whole:
/// one at home, one in a view, and a small one.
#[test]
fn r18_every_handle_of_a_range_is_listed_and_shared() {
    packed(|rig| {
        if !rig.driver.has(Feature::VmmExport) {
            return eprintln!("SKIPPED: the driver cannot export handles");
        }
        let stream = rig.stream();
        let (allocator, kept) = scattered(rig, 2, &stream);
        let block = allocator.allocate(TWO, &stream).unwrap();
        assert!(view_of(&allocator, &block).is_some());
        assert!(
            shared(rig, &allocator, &block, &stream) >= 5,
            "two and a half handles twice"
        );
        drop((block, kept, allocator));

        let allocator = rig.checked();
        let _before = allocator.allocate(3 * MIB + 512, &stream).unwrap();
        let [home, small] = [100 * MIB, 4096].map(|b| allocator.allocate(b, &stream).unwrap());
        assert!(shared(rig, &allocator, &home, &stream) > 1);
        assert_eq!(shared(rig, &allocator, &small, &stream), 1);
    });
}
