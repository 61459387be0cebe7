//! Typed buffers, on the simulated driver and on a real one (`CUALLOC_TEST_DRIVER=cuda`).
#![cfg(feature = "sim")]

#[path = "../common/mod.rs"]
mod common;
mod elements;
mod faults;
mod flights;
mod order;
mod resources;
mod rig;

use common::prelude::*;
use cualloc::PinnedBuffer;
use cualloc::buffer::{CopyInFlight, DeviceSlice, DeviceSliceMut};
use cualloc::error::{InvalidArgument, StreamMisuse};
use cualloc::resource::Access;
use rig::{POLICIES, Rig};
use std::mem::MaybeUninit;
use std::ops::Bound;

fn requested(alloc: &Allocator) -> (u64, u64) {
    let requested = alloc.stats().all.requested;
    (requested.current, requested.peak)
}

/// S1.18
#[test]
fn s1_18_zeroed_copied_freed_and_dropped() {
    Rig::each(|_, alloc, stream| {
        // Memory that has been in use, so that zeros must be written.
        drop(DeviceBuffer::filled(alloc, 3000, 0xabu8, stream).unwrap());
        let zeros = DeviceBuffer::<u16>::zeroed(alloc, 1500, stream).unwrap();
        assert_eq!(zeros.to_vec().unwrap(), vec![0; 1500]);
        let values: Vec<[u64; 2]> = (0..1000).map(|i| [i, i * i]).collect();
        let copy = DeviceBuffer::from_slice(alloc, &values, stream).unwrap();
        assert_eq!(copy.to_vec().unwrap(), values);
        assert_eq!((copy.len(), copy.byte_len()), (1000, 16000));

        // A drop and a free leave the same behind.
        let left = || {
            let stats = alloc.stats();
            let all = stats.all;
            [all.requested, all.allocated, all.active].map(|bytes| (bytes.current, stats.free))
        };
        drop(copy);
        let after_drop = left();
        let copy = DeviceBuffer::from_slice(alloc, &values, stream).unwrap();
        copy.free().unwrap();
        assert_eq!(left(), after_drop);
        assert_eq!(after_drop[0].0, 3000);
        zeros.free().unwrap();
        assert_eq!(alloc.stats().all.active.current, 0);
    });
}

/// S1.37
#[test]
fn s1_37_buffers_come_from_the_cache() {
    Rig::each(|rig, alloc, stream| {
        for len in [100usize, 3 << 20] {
            DeviceBuffer::<f32>::zeroed(alloc, len, stream)
                .unwrap()
                .free()
                .unwrap();
            let calls = rig.driver.calls();
            let ptr = {
                let again = DeviceBuffer::<f32>::uninit(alloc, len, stream).unwrap();
                again.as_device_ptr()
            };
            // Bytes count, types do not.
            let other = DeviceBuffer::<[u8; 4]>::uninit(alloc, len, stream).unwrap();
            assert_eq!(other.as_device_ptr(), ptr);
            assert_eq!(rig.driver.calls().since(&calls).total(), 0);
        }
    });
}

/// S1.20
#[test]
fn s1_20_requested_bytes_follow_the_elements() {
    Rig::each(|_, alloc, stream| {
        assert_eq!(requested(alloc), (0, 0));
        let a = DeviceBuffer::<u64>::zeroed(alloc, 1001, stream).unwrap();
        assert_eq!(requested(alloc), (8008, 8008));
        let b = DeviceBuffer::<[u8; 3]>::uninit(alloc, 7, stream).unwrap();
        assert_eq!(requested(alloc), (8029, 8029));
        a.free().unwrap();
        assert_eq!(requested(alloc), (21, 8029));
        drop(b);
        assert_eq!(requested(alloc), (0, 8029));
    });
}

/// S1.21, S0.1
#[test]
fn s1_21_s0_1_zero_elements_need_no_memory_and_no_call() {
    Rig::each(|rig, alloc, stream| {
        let (calls, stats) = (rig.driver.calls(), alloc.stats());
        let mut empty = DeviceBuffer::<f32>::zeroed(alloc, 0, stream).unwrap();
        let other = DeviceBuffer::<f32>::from_slice(alloc, &[], stream).unwrap();
        let filled = DeviceBuffer::filled(alloc, 0, 1u8, stream).unwrap();
        let unset = DeviceBuffer::<f32>::uninit(alloc, 0, stream).unwrap();
        // Elements without bytes need no memory either.
        let nothing = DeviceBuffer::<[u8; 0]>::zeroed(alloc, 5, stream).unwrap();
        assert_eq!((nothing.len(), nothing.byte_len()), (5, 0));
        assert_eq!(nothing.to_vec().unwrap().len(), 5);
        for buffer in [&empty, &other] {
            assert_eq!((buffer.len(), buffer.byte_len()), (0, 0));
            assert!(buffer.is_empty());
            assert_eq!(buffer.as_device_ptr(), 0);
            assert!(buffer.id().is_none() && buffer.home().is_none() && buffer.stream().is_none());
        }
        empty.copy_from_slice(&[]).unwrap();
        empty.copy_to_slice(&mut []).unwrap();
        assert!(empty.to_vec().unwrap().is_empty());
        empty.copy_from(&other.as_slice(), stream).unwrap();
        empty.fill(1.0, stream).unwrap();
        empty.prepare_use(stream, Access::ReadWrite).unwrap();
        empty.finish_use(stream, Access::ReadWrite).unwrap();
        let host = PinnedBuffer::zeroed(&rig.contexts[0], 0).unwrap();
        assert_eq!(host.generation(), 0, "it has no pool");
        let copy = empty.upload(host, stream).unwrap();
        assert!(copy.is_complete().unwrap());
        let copy = empty.download(copy.wait().unwrap(), stream).unwrap();
        assert_eq!(copy.wait().unwrap().len(), 0);
        assert_eq!(empty.slice(..).unwrap().len(), 0);
        assert_eq!(empty.as_slice().cast::<u8>().unwrap().len(), 0);
        assert!(empty.slice(..1).is_err());
        let kept = other.into_block().unwrap_err();
        assert_matches!(kept.error, Error::NotSupported { .. });
        kept.value.free().unwrap();
        empty.free().unwrap();
        drop((filled, unset, nothing));
        assert_eq!(rig.driver.calls().since(&calls).total(), 0);
        assert_eq!(alloc.stats(), stats);
    });
}

#[test]
fn sizes_that_overflow_are_refused_before_any_call() {
    Rig::each(|rig, alloc, stream| {
        let (calls, stats) = (rig.driver.calls(), alloc.stats());
        for len in [usize::MAX, usize::MAX / 8 + 1, isize::MAX as usize / 8 + 1] {
            let too_large = |error| {
                assert_matches!(error, Error::Invalid(InvalidArgument::TooLarge { len: l, element_bytes: 8 })
                    if l == len);
            };
            too_large(DeviceBuffer::<u64>::zeroed(alloc, len, stream).unwrap_err());
            too_large(DeviceBuffer::<f64>::uninit(alloc, len, stream).unwrap_err());
            too_large(PinnedBuffer::<i64>::zeroed(&rig.contexts[0], len).unwrap_err());
        }
        let error = DeviceBuffer::filled(alloc, usize::MAX, 1u8, stream).unwrap_err();
        assert_matches!(error, Error::Invalid(InvalidArgument::TooLarge { .. }));
        let error = DeviceBuffer::<u8>::zeroed(alloc, isize::MAX as usize, stream).unwrap_err();
        let expected = Error::Invalid(InvalidArgument::Size {
            bytes: isize::MAX as u64,
        });
        assert_eq!(error.to_string(), expected.to_string());
        assert_eq!(rig.driver.calls().since(&calls).total(), 0);
        assert_eq!(alloc.stats(), stats);
    });
}

#[test]
fn parts_lie_in_their_buffer_and_lengths_agree() {
    Rig::each(|rig, alloc, stream| {
        let values: Vec<u32> = (0..100).collect();
        let mut buffer = DeviceBuffer::from_slice(alloc, &values, stream).unwrap();
        let part = buffer.slice(10..20).unwrap();
        assert_eq!(part.as_device_ptr(), buffer.as_device_ptr() + 40);
        assert_eq!(part.to_vec().unwrap(), values[10..20]);
        assert_eq!(
            part.slice(2..=4).unwrap().to_vec().unwrap(),
            values[12..=14]
        );
        assert_eq!(part.slice(10..).unwrap().len(), 0);
        let (head, tail) = part.split_at(3).unwrap();
        assert_eq!((head.len(), tail.len()), (3, 7));
        assert_eq!(tail.as_device_ptr(), head.as_device_ptr() + 12);

        let calls = rig.driver.calls();
        let outside = |result: Result<DeviceSlice<'_, u32>, Error>, s, e, n| {
            assert_matches!(result, Err(Error::OutOfBounds { generation: None, start, end, len })
                if (start, end, len) == (s, e, n));
        };
        outside(buffer.slice(..101), 0, 101, 100);
        outside(buffer.slice(101..), 101, 100, 100);
        outside(buffer.slice(..=100), 0, 101, 100);
        let (seven, six) = (7, 6);
        outside(buffer.slice(seven..six), 7, 6, 100);
        outside(buffer.slice(0..=usize::MAX), 0, usize::MAX, 100);
        let beyond = (Bound::Excluded(usize::MAX), Bound::Unbounded);
        outside(buffer.slice(beyond), usize::MAX, 100, 100);
        outside(part.slice(5..11), 5, 11, 10);
        assert!(part.split_at(11).is_err());
        assert!(buffer.slice_mut(..101).is_err());
        assert!(buffer.slice_mut(90..).unwrap().slice_mut(5..11).is_err());
        assert!(buffer.as_mut_slice().split_at_mut(101).is_err());

        let lengths = |result: Result<(), Error>, target, source| {
            assert_matches!(result, Err(Error::Invalid(InvalidArgument::Length { expected, found }))
                if (expected, found) == (target, source));
        };
        lengths(buffer.copy_from_slice(&[1; 99]), 100, 99);
        lengths(buffer.copy_to_slice(&mut [0; 101]), 101, 100);
        {
            let (mut head, tail) = buffer.as_mut_slice().split_at_mut(40).unwrap();
            lengths(head.copy_from(&tail.as_slice(), stream), 40, 60);
        }
        assert_eq!(rig.driver.calls().since(&calls).total(), 0);
        let host = PinnedBuffer::from_slice(&rig.contexts[0], &[5u32; 3]).unwrap();
        let error = buffer.upload(host, stream).unwrap_err();
        let error = buffer.download(*error.value, stream).unwrap_err();
        lengths(Err(error.error), 3, 100);
        // SAFETY: they were made with values, and nothing was copied.
        assert_eq!(unsafe { error.value.assume_init() }[..], [5; 3]);

        // Halves that do not overlap may be copied onto each other.
        let (mut head, tail) = buffer.as_mut_slice().split_at_mut(50).unwrap();
        assert_eq!(tail.as_device_ptr(), head.as_device_ptr() + 200);
        assert_eq!((head.len(), head.slice_mut(48..).unwrap().len()), (50, 2));
        assert!(!tail.is_empty() && head.slice_mut(50..).unwrap().is_empty());
        head.copy_from(&tail.as_slice(), stream).unwrap();
        head.slice_mut(..2).unwrap().fill(9, stream).unwrap();
        let mut expected = [&values[50..], &values[50..]].concat();
        expected[..2].fill(9);
        assert_eq!(buffer.to_vec().unwrap(), expected);
    });
}

#[test]
fn bytes_and_casts() {
    Rig::each(|_, alloc, stream| {
        let mut buffer = DeviceBuffer::from_slice(alloc, &[1.0f32, -2.5], stream).unwrap();
        let bytes = [1.0f32.to_ne_bytes(), (-2.5f32).to_ne_bytes()].concat();
        assert_eq!(buffer.as_slice().as_bytes().to_vec().unwrap(), bytes);
        buffer
            .as_mut_slice()
            .as_bytes_mut()
            .slice_mut(4..)
            .unwrap()
            .fill(0, stream)
            .unwrap();
        assert_eq!(buffer.to_vec().unwrap(), [1.0, 0.0]);
        let mut whole = buffer.as_mut_slice();
        let mut words = whole.cast_mut::<u32>().unwrap();
        words.fill(2.0f32.to_bits(), stream).unwrap();
        assert_eq!(buffer.to_vec().unwrap(), [2.0, 2.0]);
        buffer.fill(-1.5, stream).unwrap();
        assert_eq!(buffer.to_vec().unwrap(), [-1.5, -1.5]);

        let bytes = buffer.as_slice().as_bytes();
        let error = bytes.slice(1..5).unwrap().cast::<u32>().unwrap_err();
        assert_matches!(
            error,
            Error::Invalid(InvalidArgument::Misaligned { alignment: 4, .. })
        );
        let empty = bytes.cast::<[u8; 0]>().map(|_| ()).unwrap_err();
        for error in [bytes.slice(..6).unwrap().cast::<u32>().unwrap_err(), empty] {
            assert_matches!(error, Error::Invalid(InvalidArgument::Remainder { .. }));
        }
    });
}

#[test]
fn uninitialised_memory_and_blocks_go_in_and_out() {
    Rig::each(|rig, alloc, stream| {
        let mut unset = DeviceBuffer::<u32>::uninit(alloc, 10, stream).unwrap();
        unset
            .copy_from_slice(&[const { MaybeUninit::new(4) }; 10])
            .unwrap();
        // SAFETY: all of it was written just now.
        let set = unsafe { unset.assume_init() };
        assert_eq!(set.to_vec().unwrap(), [4; 10]);
        let ptr = set.as_device_ptr();
        let block = set.into_block().unwrap();
        assert_eq!((block.ptr(), block.requested()), (ptr, 40));
        // SAFETY: the block's own stream; bytes of it are numbers.
        let same = unsafe { DeviceBuffer::<u16>::from_block(block, 20, stream) }.unwrap();
        let first = same.slice(..2).unwrap().cast::<u32>().unwrap().to_vec();
        assert_eq!(first.unwrap(), [4]);

        let block = same.into_block().unwrap();
        let usable = block.size();
        // SAFETY: as above.
        let error = unsafe {
            DeviceBuffer::<u8>::from_block(block, usable as usize + 1, stream).unwrap_err()
        };
        assert_matches!(error.error, Error::Invalid(InvalidArgument::TooSmall { needed, usable: u }) if needed == 513 && u as u64 == usable);
        // SAFETY: as above.
        let error = unsafe { DeviceBuffer::<u64>::from_block(*error.value, usize::MAX, stream) }
            .unwrap_err();
        assert_matches!(
            error.error,
            Error::Invalid(InvalidArgument::TooLarge { .. })
        );
        error.value.free().unwrap();

        // A large alignment reaches the allocator.
        #[derive(Clone, Copy)]
        #[repr(C, align(4096))]
        struct Page([u8; 4096]);
        // SAFETY: an array of bytes.
        unsafe impl cualloc::DeviceCopy for Page {}
        drop(DeviceBuffer::<u8>::uninit(alloc, 1, stream).unwrap());
        let keep = DeviceBuffer::<u8>::uninit(alloc, 1, stream).unwrap();
        let page = DeviceBuffer::from_slice(alloc, &[Page([3; 4096])], stream).unwrap();
        assert_eq!(page.as_device_ptr() % 4096, 0);
        assert_eq!(page.to_vec().unwrap()[0].0, [3; 4096]);
        drop((keep, page));
        let _ = rig;
    });
}

#[test]
fn pinned_memory_and_copies_in_flight() {
    Rig::each(|rig, alloc, stream| {
        let context = &rig.contexts[0];
        let other = alloc.create_stream().unwrap();
        let values: Vec<i32> = (0..5000).collect();
        let mut host = PinnedBuffer::from_slice(context, &values).unwrap();
        host[0] = -1;
        let mut buffer = DeviceBuffer::<i32>::zeroed(alloc, 5000, stream).unwrap();
        let up = buffer.upload(host, &other).unwrap();
        let down = buffer
            .download(PinnedBuffer::uninit(context, 5000).unwrap(), stream)
            .unwrap();
        // The buffer may go before the copies are done.
        drop(buffer);
        let back = down.wait().unwrap();
        assert_eq!((back[0], &back[1..]), (-1, &values[1..]));
        // The work that the download waited for is complete too.
        assert!(up.is_complete().unwrap());
        assert_eq!(up.wait().unwrap()[..], back[..]);
    });
}

#[test]
fn async_copies_with_borrowed_memory() {
    Rig::each(|_, alloc, stream| {
        let other = alloc.create_stream().unwrap();
        let mut buffer = DeviceBuffer::<u8>::zeroed(alloc, 1 << 20, stream).unwrap();
        let (source, mut target) = (vec![6u8; 1 << 20], vec![0u8; 1 << 20]);
        // SAFETY: both live, and are left alone, until the streams have been waited for.
        unsafe {
            buffer
                .as_mut_slice()
                .copy_from_slice_async(&source, &other)
                .unwrap();
            buffer
                .as_slice()
                .copy_to_slice_async(&mut target, stream)
                .unwrap();
        }
        stream.synchronize().unwrap();
        other.synchronize().unwrap();
        assert_eq!(source, target);
    });
}

#[test]
fn two_devices() {
    for policy in POLICIES {
        let Some(rig) = Rig::with_devices(2, policy) else {
            return;
        };
        let create = |alloc: &Allocator| alloc.create_stream().unwrap();
        let streams: Vec<Stream> = rig.allocs.iter().map(create).collect();
        let values: Vec<u32> = (0..100_000).collect();
        let near = DeviceBuffer::from_slice(&rig.allocs[0], &values, &streams[0]).unwrap();
        let mut far = DeviceBuffer::<u32>::zeroed(&rig.allocs[1], 100_000, &streams[1]).unwrap();
        assert_eq!(far.device().unwrap().ordinal(), 1);
        // By the stream of either device.
        far.copy_from(&near.as_slice(), &streams[1]).unwrap();
        assert_eq!(far.to_vec().unwrap(), values);
        far.fill(0, &streams[1]).unwrap();
        far.copy_from(&near.as_slice(), &streams[0]).unwrap();
        drop(near);
        assert_eq!(far.to_vec().unwrap(), values);

        let calls = rig.driver.calls();
        let wrong = |result: Result<(), Error>| {
            assert_matches!(
                result,
                Err(Error::WrongDevice {
                    expected: 1,
                    found: 0
                })
            );
        };
        wrong(far.fill(1, &streams[0]));
        let mut second = DeviceBuffer::<u32>::uninit(&rig.allocs[1], 4, &streams[1]).unwrap();
        let third = DeviceBuffer::<u32>::uninit(&rig.allocs[1], 4, &streams[1]).unwrap();
        wrong(second.copy_from(&third.as_slice(), &streams[0]));
        assert_eq!(rig.driver.calls().since(&calls).get("cuMemsetD32Async"), 0);
        let host = PinnedBuffer::uninit(&rig.contexts[0], 100_000).unwrap();
        let error = far.download(host, &streams[0]).unwrap_err();
        wrong(Err(error.error));
        // Page-locked memory serves every device.
        let copy = far.download(*error.value, &streams[1]).unwrap();
        assert_eq!(copy.wait().unwrap()[..], values);
        let refused = DeviceBuffer::<u8>::zeroed(&rig.allocs[1], 1, &streams[0]).unwrap_err();
        assert_matches!(refused, Error::WrongDevice { .. });
        drop((far, second, third, streams));
        rig.finish();
    }
}

#[test]
fn default_streams() {
    Rig::each(|rig, alloc, stream| {
        let context = &rig.contexts[0];
        let legacy = Stream::legacy(context);
        let mut buffer = DeviceBuffer::filled(alloc, 1000, 1u32, &legacy).unwrap();
        buffer.fill(2, stream).unwrap();
        assert_eq!(buffer.to_vec().unwrap(), [2; 1000]);
        drop(buffer);

        let own = Stream::per_thread(context);
        let mut buffer = DeviceBuffer::filled(alloc, 1000, 3u32, &own).unwrap();
        buffer.fill(4, stream).unwrap();
        assert_eq!(buffer.to_vec().unwrap(), [4; 1000]);
        // Another thread has another stream by the same handle.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for error in [
                    buffer.fill(5, stream).unwrap_err(),
                    buffer.to_vec().unwrap_err(),
                ] {
                    assert_matches!(error, Error::Stream(StreamMisuse::WrongThread));
                }
            });
        });
        assert_eq!(buffer.to_vec().unwrap(), [4; 1000]);
        // To free it needs no name of the stream.
        std::thread::spawn(move || buffer.free().unwrap())
            .join()
            .unwrap();
    });
}

#[test]
fn threads_share_a_buffer() {
    Rig::each(|rig, alloc, stream| {
        let context = &rig.contexts[0];
        let values: Vec<u64> = (0..20_000).collect();
        let mut buffer = DeviceBuffer::from_slice(alloc, &values, stream).unwrap();
        for round in 0..3u64 {
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        let stream = alloc.create_stream().unwrap();
                        for _ in 0..4 {
                            let host = PinnedBuffer::uninit(context, values.len()).unwrap();
                            let copy = buffer.download(host, &stream).unwrap();
                            let mut own =
                                DeviceBuffer::<u64>::zeroed(alloc, 20_000, &stream).unwrap();
                            own.copy_from(&buffer.as_slice(), &stream).unwrap();
                            let host = copy.wait().unwrap();
                            assert_eq!((host[0], &host[1..]), (round, &values[1..]));
                            assert_eq!(own.to_vec().unwrap()[..], host[..]);
                        }
                    });
                }
            });
            let mut first = buffer.slice_mut(..1).unwrap();
            first.copy_from_slice(&[round + 1]).unwrap();
        }
    });
}

#[test]
fn types_are_send_and_have_debug_output() {
    fn shared<T: Send + Sync>() {}
    shared::<DeviceBuffer<f32>>();
    shared::<DeviceSlice<'_, f32>>();
    shared::<DeviceSliceMut<'_, f32>>();
    shared::<PinnedBuffer<f32>>();
    shared::<CopyInFlight<f32>>();
    Rig::each(|_, alloc, stream| {
        let buffer = DeviceBuffer::<f32>::zeroed(alloc, 12, stream).unwrap();
        let text = format!("{buffer:?}");
        let ptr = format!("{:#x}", buffer.as_device_ptr());
        for part in ["DeviceBuffer", "f32", "device: Some(0)", &ptr, "len: 12"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let text = format!("{:?}", buffer.slice(3..5).unwrap());
        assert!(text.contains("len: 2"), "{text}");
    });
}
