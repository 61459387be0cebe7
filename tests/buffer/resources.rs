//! Buffers over memory of any resource, and of others.

use crate::common::prelude::*;
use std::mem::MaybeUninit;
use std::sync::atomic::AtomicU32;

use cualloc::allocator::BlockState;
use cualloc::driver::Entered;
use cualloc::error::InvalidArgument;
use cualloc::pool::{DriverPool, DriverPoolConfig, WorkspacePool};
use cualloc::resource::{Access, AccessOrdered, Budget, CudaMemory, Launch, MemoryResource};

use crate::rig::{Rig, streams};

/// One of each kind of resource over a rig's device.
fn resources(rig: &Rig, alloc: &Allocator) -> Vec<Arc<dyn MemoryResource>> {
    let context = &rig.contexts[0];
    vec![
        Arc::new(alloc.clone()),
        Arc::new(Budget::new(alloc.clone(), Some(1 << 30))),
        Arc::new(AccessOrdered::new(alloc.clone())),
        Arc::new(CudaMemory::new(context)),
        Arc::new(DriverPool::new(context, DriverPoolConfig::new()).unwrap()),
        Arc::new(WorkspacePool::new(alloc)),
    ]
}

fn fill_on(entered: &Entered<'_>, ptr: u64, value: u8, stream: &Stream) {
    // SAFETY: 4096 bytes of a live buffer, ordered as the test wants it.
    unsafe { entered.memset_d8(ptr, value, 4096, stream.raw()) }.unwrap();
}

#[test]
fn every_resource_takes_its_memory_back() {
    Rig::each(|rig, alloc, stream| {
        let other = alloc.create_stream().unwrap();
        for resource in resources(rig, alloc) {
            let live = || resource.usage().unwrap().requested.current;
            let mut buffer = DeviceBuffer::from_slice(&resource, &[1u32, 2, 3], stream).unwrap();
            let block = buffer.id().unwrap();
            assert_eq!((block.ptr(), block.bytes()), (buffer.as_device_ptr(), 12));
            assert_eq!((resource.state(&block), live()), (BlockState::Live, 12));
            let home = buffer.home().unwrap();
            assert_eq!(home.state(&block), BlockState::Live);
            buffer.slice_mut(1..).unwrap().fill(7, &other).unwrap();
            assert_eq!(buffer.to_vec().unwrap(), [1, 7, 7]);
            buffer.record_use(&other).unwrap();
            buffer.record_stream(&other).unwrap();
            let kept = buffer.into_block();
            let mut buffer = match kept {
                Ok(block) => {
                    // An allocator alone gives its own blocks.
                    // SAFETY: allocated on this stream, and written.
                    unsafe { DeviceBuffer::from_block(block, 3, stream) }.unwrap()
                }
                Err(refused) => {
                    assert_matches!(refused.error, Error::NotSupported { .. });
                    *refused.value
                }
            };
            buffer.copy_from_slice(&[4, 5, 6]).unwrap();
            let bytes = buffer.into_bytes();
            assert_eq!((bytes.len(), live()), (12, 12));
            bytes.free().unwrap();
            assert_eq!(live(), 0);
            drop(DeviceBuffer::<u64>::zeroed(&resource, 100, stream).unwrap());
            assert_eq!(live(), 0);
            let none = DeviceBuffer::<u64>::zeroed(&resource, 0, stream).unwrap();
            assert_eq!((none.as_device_ptr(), live()), (0, 0));
            resource.reap().unwrap();
        }
    });
}

/// S1.19
#[test]
fn s1_19_a_request_has_size_and_placement() {
    Rig::each(|_, alloc, stream| {
        let request = Request::array::<u32>(1000).unwrap().align(1 << 16);
        let budget = Arc::new(Budget::new(alloc.clone(), Some(10_000)));
        for aligned in [
            DeviceBuffer::<u32>::uninit_with(alloc, request, stream).unwrap(),
            DeviceBuffer::<u32>::uninit_with(&budget, request, stream).unwrap(),
        ] {
            assert_eq!(aligned.len(), 1000);
            assert!(aligned.as_device_ptr().is_multiple_of(1 << 16));
        }
        let calls = alloc.driver_calls();
        for bytes in [0, 6] {
            let error = DeviceBuffer::<u32>::uninit_with(alloc, Request::new(bytes), stream);
            assert_matches!(error.unwrap_err(), Error::Invalid(InvalidArgument::Size { bytes: told }) if told == bytes as u64);
        }
        let over = DeviceBuffer::<u8>::uninit(&budget, 10_001, stream);
        assert_matches!(over.unwrap_err(), Error::OverBudget { .. });
        assert_eq!(alloc.driver_calls(), calls);
    });
}

/// S5.41
#[test]
fn launches_and_buffers_are_in_order() {
    Rig::each_simulated(|rig, sim, alloc| {
        sim.set_mode(Mode::Manual);
        let [home, other] = streams(alloc);
        let entered = rig.contexts[0].enter().unwrap();
        let resource = Arc::new(AccessOrdered::new(alloc.clone()));
        let mut buffer = DeviceBuffer::<u8>::zeroed(&resource, 4096, &home).unwrap();
        for value in 1..4 {
            // The launch follows what the buffer did, and what the buffer does next follows the launch.
            let mut launch = Launch::strict(&resource, &other);
            launch.write(&buffer).unwrap();
            launch.preflight().unwrap();
            fill_on(&entered, buffer.as_device_ptr(), value, &other);
            launch.commit().unwrap();
            buffer.fill(value, &home).unwrap();
        }
        buffer.prepare_use(&other, Access::ReadWrite).unwrap();
        fill_on(&entered, buffer.as_device_ptr(), 9, &other);
        buffer.finish_use(&other, Access::ReadWrite).unwrap();
        drop(buffer);
        sim.complete_all();
        assert_eq!(sim.take_reports(), []);
        resource.reap().unwrap();
    });
}

/// An owner that records whether, and after which call, it was dropped.
struct Owner(Arc<AtomicU32>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn foreign_memory_is_freed_with_its_owner() {
    Rig::each(|_, alloc, stream| {
        let other = alloc.create_stream().unwrap();
        let dropped = Arc::new(AtomicU32::new(0));
        let count = || dropped.load(Ordering::Relaxed);
        let block = alloc.allocate(64, stream).unwrap();
        let ptr = block.ptr();
        let owner = (block, Owner(Arc::clone(&dropped)));
        // SAFETY: the block is live as long as its owner, and freed on this stream; bytes are elements.
        let mut buffer =
            unsafe { DeviceBuffer::<u8>::from_raw_parts(ptr, 64, stream, owner) }.unwrap();
        assert!(buffer.id().is_none() && buffer.home().is_none());
        assert_eq!((buffer.as_device_ptr(), buffer.len()), (ptr, 64));
        buffer.fill(3, &other).unwrap();
        assert_eq!(buffer.to_vec().unwrap(), [3; 64]);
        let refused = buffer.into_block().unwrap_err();
        assert_matches!(refused.error, Error::NotSupported { .. });
        assert_eq!(count(), 0);
        refused.value.free().unwrap();
        assert_eq!(count(), 1);
        // SAFETY: nothing is done with the addresses.
        let (misaligned, empty) = unsafe {
            (
                DeviceBuffer::<u32>::from_raw_parts(2, 1, stream, Owner(Arc::clone(&dropped))),
                DeviceBuffer::<u32>::from_raw_parts(2, 0, stream, Owner(Arc::clone(&dropped))),
            )
        };
        assert_matches!(
            misaligned.unwrap_err(),
            Error::Invalid(InvalidArgument::Misaligned { ptr: 2, .. })
        );
        assert_eq!((empty.unwrap().as_device_ptr(), count()), (0, 3));
    });
}

/// R2
#[test]
fn streams_that_use_memory_without_records_are_waited_for() {
    Rig::each_simulated(|rig, sim, alloc| {
        sim.set_mode(Mode::Manual);
        let [home, other] = streams(alloc);
        let entered = rig.contexts[0].enter().unwrap();
        let use_of = |recorded: fn(&DeviceBuffer<MaybeUninit<u8>>, &Stream)| {
            let block = alloc.allocate(4096, &home).unwrap();
            let ptr = block.ptr();
            // SAFETY: the block is live as long as it is the owner, and freed on its stream.
            let buffer: DeviceBuffer<MaybeUninit<u8>> =
                unsafe { DeviceBuffer::from_raw_parts(ptr, 4096, &home, block) }.unwrap();
            recorded(&buffer, &other);
            fill_on(&entered, ptr, 1, &other);
            (ptr, buffer)
        };
        let (ptr, buffer) = use_of(|buffer, other| buffer.record_stream(other).unwrap());
        drop(buffer);
        let next = DeviceBuffer::<u8>::zeroed(alloc, 4096, &home).unwrap();
        assert_eq!(next.as_device_ptr(), ptr);
        sim.complete_all();
        assert_eq!(sim.take_reports(), []);
        drop(next);
        // A use that was not recorded cannot be waited for.
        let (_, buffer) = use_of(|_, _| ());
        drop(buffer);
        let next = DeviceBuffer::<u8>::zeroed(alloc, 4096, &home).unwrap();
        sim.complete_all();
        assert!(!sim.take_reports().is_empty());
        other.synchronize().unwrap();
        drop(next);
    });
}

/// R2
#[test]
fn a_recorded_stream_counts_until_foreign_memory_is_freed() {
    Rig::each_simulated(|rig, sim, alloc| {
        sim.set_mode(Mode::Manual);
        let [home, other] = [(); 2].map(|()| alloc.create_stream().unwrap());
        let entered = rig.contexts[0].enter().unwrap();
        let block = alloc.allocate(4096, &home).unwrap();
        let ptr = block.ptr();
        // SAFETY: the block is live as long as it is the owner, and freed on its stream; bytes are elements.
        let mut buffer: DeviceBuffer<u8> =
            unsafe { DeviceBuffer::from_raw_parts(ptr, 4096, &home, block) }.unwrap();
        buffer.record_stream(&other).unwrap();
        // It is in order with what the stream was given so far, and the stream is not forgotten by that.
        buffer.fill(1, &home).unwrap();
        buffer.prepare_use(&other, Access::ReadWrite).unwrap();
        fill_on(&entered, ptr, 2, &other);
        drop(buffer);
        let next = DeviceBuffer::<u8>::zeroed(alloc, 4096, &home).unwrap();
        assert_eq!(next.as_device_ptr(), ptr);
        sim.complete_all();
        assert_eq!(sim.take_reports(), []);
        drop(next);
    });
}
