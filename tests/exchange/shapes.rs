//! Tensors of any shape, memory of the host, and structures that are not what they should be.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use crate::common::capturing::{Capturing, MODE};
use crate::common::*;
use crate::foreign::Plain;
use cualloc::allocator::{Allocator, Policy};
use cualloc::driver::Stream;
use cualloc::error::{ImportFault, InvalidArgument};
use cualloc::exchange::dlpack::*;
use cualloc::exchange::*;
use cualloc::pool::{PinnedConfig, PinnedPool};
use cualloc::sim::{SimConfig, Simulator};
use cualloc::{DeviceBuffer, Error, PinnedBuffer};

fn live(allocator: &Allocator) -> u64 {
    allocator.stats().all.allocated.current
}

/// Foreign memory with any shape, as its owner writes it.
pub(crate) struct Theirs<'a> {
    tensor: DLTensor,
    shape: Vec<i64>,
    strides: Vec<i64>,
    deleted: &'a AtomicU64,
    panics: bool,
}

impl<'a> Theirs<'a> {
    pub(crate) fn new(
        ptr: u64,
        shape: &[i64],
        strides: &[i64],
        deleted: &'a AtomicU64,
    ) -> Theirs<'a> {
        Theirs {
            tensor: DLTensor {
                data: ptr::without_provenance_mut(ptr as usize),
                device: DLDevice {
                    device_type: DLDevice::CUDA,
                    device_id: 0,
                },
                ndim: shape.len() as i32,
                dtype: DType::F32.dlpack(),
                shape: ptr::null_mut(),
                strides: ptr::null_mut(),
                byte_offset: 0,
            },
            shape: shape.to_vec(),
            strides: strides.to_vec(),
            deleted,
            panics: false,
        }
    }

    /// The memory as a tensor on a stream.
    fn offered(self, on: &Stream) -> Result<Tensor, Error> {
        self.offered_by(on, ordered())
    }

    /// [`offered`](Self::offered) by a producer that says how it orders its work.
    pub(crate) fn offered_by(self, on: &Stream, producer: Peer) -> Result<Tensor, Error> {
        unsafe extern "C-unwind" fn delete(raw: *mut DLManagedTensorVersioned) {
            // SAFETY: the two boxes made below, once.
            let managed = unsafe { Box::from_raw(raw) };
            // SAFETY: as above; the counter outlives the tensors of a test.
            let theirs = unsafe { Box::from_raw(managed.manager_ctx.cast::<Theirs<'_>>()) };
            theirs.deleted.fetch_add(1, SeqCst);
            assert!(!theirs.panics, "a deleter that panics");
        }
        let theirs = Box::into_raw(Box::new(self));
        // SAFETY: just made.
        let (tensor, shape, strides) = unsafe {
            let theirs = &mut *theirs;
            (theirs.tensor, &mut theirs.shape, &mut theirs.strides)
        };
        let numbers = |numbers: &mut Vec<i64>| match numbers.is_empty() {
            true => ptr::null_mut(),
            false => numbers.as_mut_ptr(),
        };
        let managed = Box::new(DLManagedTensorVersioned {
            version: DLPackVersion::CURRENT,
            manager_ctx: theirs.cast::<c_void>(),
            deleter: Some(delete),
            flags: 0,
            dl_tensor: DLTensor {
                shape: numbers(shape),
                strides: numbers(strides),
                ..tensor
            },
        });
        // SAFETY: just made, and taken over once.
        let taken = unsafe { Dlpack::from_raw(Box::into_raw(managed)) }?;
        Ok(Tensor::from_dlpack(taken, on, producer)?)
    }
}

/// S5.50: four dimensions go out and come back, of all types, as C sees them; slices of them are typed.
#[test]
fn s5_50_tensors_of_many_dimensions() {
    each(|rig| {
        let allocator = rig.allocator();
        let [ours, theirs] = rig.streams();
        let pixels: Vec<f32> = (0..8 * 3 * 5 * 7_u16).map(f32::from).collect();
        let buffer = DeviceBuffer::from_slice(&allocator, &pixels, &ours).unwrap();
        let images = Tensor::from_buffer(buffer, &[8, 3, 5, 7]).unwrap();
        assert_eq!(images.strides(), [105, 35, 7, 1]);
        let out = images
            .to_dlpack::<DLManagedTensorVersioned>(&Peer::on(&theirs))
            .unwrap();
        let seen = out.tensor().unwrap();
        assert_eq!((seen.ndim, seen.data as u64), (4, images.ptr()));
        let numbers = |at: *const i64| (0..4).map(move |i| at.wrapping_add(i));
        // SAFETY: four numbers each, of a tensor that is alive.
        let read = |at| -> Vec<i64> { numbers(at).map(|at| unsafe { at.read() }).collect() };
        assert_eq!(read(seen.shape), [8, 3, 5, 7]);
        assert_eq!(read(seen.strides), [105, 35, 7, 1]);
        let back = Tensor::from_dlpack(out, &theirs, Peer::on(&ours)).unwrap();
        assert_eq!((back.shape(), back.id()), (&[8, 3, 5, 7][..], images.id()));
        assert_eq!(values::<f32>(&back).unwrap(), pixels);
        drop((back, images));
        // A number alone has no dimension, and 32 are the most.
        let one = Tensor::zeroed(&allocator, DType::F64, &[], &ours).unwrap();
        assert_eq!((one.byte_len(), one.shape().len()), (8, 0));
        let out = one
            .to_dlpack::<DLManagedTensor>(&Peer::on(&theirs))
            .unwrap();
        let back = Tensor::from_dlpack(out, &theirs, ordered()).unwrap();
        assert_eq!(values::<f64>(&back).unwrap(), [0.0]);
        drop((back, one));
        let of = |shape: &[usize]| Tensor::uninit(&allocator, DType::U8, shape, &ours);
        assert_eq!(of(&[1; 32]).unwrap().byte_len(), 1);
        assert_matches!(
            of(&[1; 33]),
            Err(Error::Invalid(InvalidArgument::Dimensions {
                found: 33,
                most: 32
            }))
        );
        for shape in [
            &[usize::MAX, 2][..],
            &[0, usize::MAX, 2],
            &[1 << 32, 1 << 31],
        ] {
            assert_matches!(
                of(shape),
                Err(Error::Invalid(InvalidArgument::TooLarge { .. }))
            );
        }
        assert_eq!(live(&allocator), 0);
        rig.close(&allocator);
    });
}

/// S5.49: Python's capsules are named by the form that they hold, and renamed when it is taken.
#[test]
fn s5_49_capsules_have_the_protocols_names() {
    type Legacy = Dlpack<DLManagedTensor>;
    type Versioned = Dlpack<DLManagedTensorVersioned>;
    assert_eq!(Legacy::CAPSULE, c"dltensor");
    assert_eq!(Legacy::USED_CAPSULE, c"used_dltensor");
    assert_eq!(Versioned::CAPSULE, c"dltensor_versioned");
    assert_eq!(Versioned::USED_CAPSULE, c"used_dltensor_versioned");
}

/// S5.50: strides of any kind come in and go out again; only elements that follow each other are slices.
#[test]
fn s5_50_strides() {
    let rig = Rig::new(Policy::Packed, SimConfig::with_devices(1, 1 << 30));
    let allocator = rig.allocator();
    let stream = rig.stream();
    let memory = DeviceBuffer::<f32>::zeroed(&allocator, 64, &stream).unwrap();
    let (ptr, deleted) = (memory.as_device_ptr(), AtomicU64::new(0));
    let cases: [(&[i64], &[i64], bool); 7] = [
        (&[4, 4], &[4, 1], true),
        (&[4, 4], &[1, 4], false),
        (&[4, 4], &[8, 2], false),
        (&[4, 1, 4], &[4, 99, 1], true),
        (&[4], &[0], false),
        (&[3], &[-1], false),
        (&[0, 4], &[77, -5], true),
    ];
    for (count, (shape, strides, compact)) in cases.into_iter().enumerate() {
        // In the middle, so that there is memory before it.
        let theirs = Theirs::new(ptr + 128, shape, strides, &deleted);
        let tensor = theirs.offered(&stream).unwrap();
        let given: Vec<i64> = tensor
            .strides()
            .iter()
            .map(|stride| *stride as i64)
            .collect();
        assert_eq!((&given[..], tensor.shape().len()), (strides, shape.len()));
        match tensor.as_slice::<f32>() {
            Ok(slice) => assert!(compact && slice.to_vec().unwrap().iter().all(|v| *v == 0.0)),
            Err(error) => {
                assert!(matches!(error, Error::Invalid(InvalidArgument::Strided)) && !compact);
            }
        }
        let again = tensor
            .to_dlpack::<DLManagedTensorVersioned>(&Peer::on(&stream))
            .unwrap();
        drop(tensor);
        let again = Tensor::from_dlpack(again, &stream, ordered()).unwrap();
        assert_eq!(again.shape().len(), shape.len());
        assert_eq!(deleted.load(SeqCst), count as u64);
        drop(again);
        assert_eq!(deleted.load(SeqCst), count as u64 + 1);
    }
    drop(memory);
    rig.close(&allocator);
}

/// D10: structures that cannot be are errors before any driver call, each deleted once.
#[test]
fn d10_hostile_structures() {
    let rig = Rig::new(Policy::Packed, SimConfig::with_devices(1, 1 << 30));
    let allocator = rig.allocator();
    let stream = rig.stream();
    let memory = DeviceBuffer::<f32>::zeroed(&allocator, 64, &stream).unwrap();
    let (ptr, deleted) = (memory.as_device_ptr(), AtomicU64::new(0));
    let of = |shape: &[i64], strides: &[i64]| Theirs::new(ptr, shape, strides, &deleted);
    let with = |change: fn(&mut DLTensor)| {
        let mut theirs = of(&[2, 2], &[2, 1]);
        change(&mut theirs.tensor);
        theirs
    };
    let length = |length| ImportFault::Length { length };
    let stride = |stride| ImportFault::Stride { stride };
    let half = 1 << 31;
    let overflow = |address, bytes| ImportFault::Overflow { address, bytes };
    let low = 4 * ((ptr / 4) as i64 + 1);
    let cases = [
        (with(|t| t.ndim = -1), ImportFault::Dimensions { ndim: -1 }),
        (
            with(|t| t.ndim = i32::MIN),
            ImportFault::Dimensions { ndim: i32::MIN },
        ),
        (of(&[1; 33], &[]), ImportFault::Dimensions { ndim: 33 }),
        (
            Theirs {
                shape: Vec::new(),
                ..of(&[2], &[1])
            },
            ImportFault::NoShape,
        ),
        (of(&[2, -2], &[2, 1]), length(-2)),
        (of(&[half, half], &[]), length(half)),
        (of(&[0, i64::MAX, 2], &[]), length(i64::MAX)),
        (of(&[i64::MAX], &[0]), length(i64::MAX)),
        (of(&[2, 2], &[i64::MAX, 1]), stride(i64::MAX)),
        (of(&[2, 2], &[i64::MIN, 1]), stride(i64::MIN)),
        (of(&[2], &[-low / 4]), overflow(ptr, low as usize + 4)),
        (
            with(|t| t.byte_offset = u64::MAX - 3),
            ImportFault::Offset {
                offset: u64::MAX - 3,
            },
        ),
        (
            with(|t| t.byte_offset = 1),
            ImportFault::Offset { offset: 1 },
        ),
        // Each distance can be, and so can the offset, but not all of them together.
        (of(&[2; 32], &[i64::MAX / 4; 32]), overflow(ptr, usize::MAX)),
        (
            with(|t| t.byte_offset = u64::MAX - 15 - t.data as u64),
            overflow(u64::MAX - 15, 16),
        ),
        (
            with(|t| t.device.device_id = 7),
            ImportFault::Device {
                expected: 0,
                actual: 7,
            },
        ),
        (
            with(|t| t.device.device_type = 1),
            ImportFault::DeviceType { device_type: 1 },
        ),
        (
            with(|t| t.data = ptr::null_mut()),
            ImportFault::NoData { elements: 4 },
        ),
        (
            with(|t| t.dtype.lanes = 4),
            ImportFault::DType {
                code: 2,
                bits: 32,
                lanes: 4,
            },
        ),
    ];
    let calls = rig.driver.calls().total();
    for (count, (theirs, expected)) in cases.into_iter().enumerate() {
        let error = theirs.offered(&stream).unwrap_err();
        assert_matches!(&error, Error::Import(fault) if *fault == expected, "{expected:?}: {error:?}");
        assert_eq!(deleted.load(SeqCst), count as u64 + 1, "{expected:?}");
    }
    assert_eq!(rig.driver.calls().total(), calls);
    // A panic of a deleter does not leave its own drop.
    let panicking = |shape: &[i64]| Theirs {
        panics: true,
        ..of(shape, &[])
    };
    let before = deleted.load(SeqCst);
    assert!(panicking(&[-1]).offered(&stream).is_err());
    let tensor = panicking(&[64]).offered(&stream).unwrap();
    assert_eq!(values::<f32>(&tensor).unwrap(), [0.0; 64]);
    let out = tensor.to_dlpack::<DLManagedTensor>(&Peer::on(&stream));
    drop(tensor);
    assert_eq!(deleted.load(SeqCst), before + 1);
    drop(out);
    assert_eq!(deleted.load(SeqCst), before + 2);
    drop(memory);
    assert_eq!(live(&allocator), 0);
    rig.close(&allocator);
}

/// S5.50: page-locked memory goes out as such, and goes only when its users are done.
#[test]
fn s5_50_pinned_memory() {
    each(|rig| {
        let theirs = rig.stream();
        let host = PinnedBuffer::from_slice(&rig.context, &[1u16, 2, 3, 4]).unwrap();
        let refused = Tensor::from_pinned(host, &[5]).unwrap_err();
        assert_matches!(
            refused.error,
            Error::Invalid(InvalidArgument::Length {
                expected: 5,
                found: 4
            })
        );
        let at = refused.value.as_ptr() as u64;
        let tensor = Tensor::from_pinned(*refused.value, &[2, 2]).unwrap();
        assert!(tensor.is_host() && !tensor.is_external() && tensor.id().is_none());
        assert_eq!((tensor.ptr(), tensor.byte_len()), (at, 8));
        assert_matches!(tensor.as_slice::<u16>(), Err(Error::NotSupported { .. }));
        let out = tensor
            .to_dlpack::<DLManagedTensorVersioned>(&Peer::on(&theirs))
            .unwrap();
        let device = out.tensor().unwrap().device;
        assert_eq!(device.device_type, DLDevice::CUDA_HOST);
        let back = Tensor::from_dlpack(out, &theirs, ordered()).unwrap();
        assert!(back.is_host() && !back.is_external());
        let tensor = tensor.into_buffer::<u16>().expect_err("of the host").value;
        let busy = rig.busy(&theirs);
        drop((tensor, back));
        assert!(theirs.is_complete().unwrap(), "the last release waits");
        drop(busy);
        // That of others is released like any memory of theirs.
        let (deleted, host) = (AtomicU64::new(0), [0f32; 4]);
        let mut foreign = Theirs::new(host.as_ptr() as u64, &[4], &[], &deleted);
        foreign.tensor.device.device_type = DLDevice::CUDA_HOST;
        let foreign = foreign.offered(&theirs).unwrap();
        assert!(foreign.is_host() && foreign.is_external());
        drop(foreign);
        assert_eq!(deleted.load(SeqCst), 1);
    });
}

/// D4: what a thread imported on its own stream it gives back behind that stream alone, also while another one
/// captures; another thread, which cannot name the stream, waits for the context.
#[test]
fn d4_a_thread_returns_its_import_on_its_own_stream() {
    each(|rig| {
        let (mine, other) = (Stream::per_thread(&rig.context), rig.stream());
        let deleted = AtomicU64::new(0);
        let memory = Plain::new(&rig.context, 4096);
        let import = || {
            Theirs::new(memory.ptr, &[64], &[], &deleted)
                .offered(&mine)
                .unwrap()
        };
        let (first, second) = (import(), import());
        let capture = Capturing::begin(&other, MODE);
        drop(first);
        assert_eq!(deleted.load(SeqCst), 1);
        // A capture that was spoilt ends with an error.
        drop(capture.end().unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| drop(second));
        });
        assert_eq!(deleted.load(SeqCst), 2);
    });
}

/// S5.50: page-locked memory is of no device, whichever context it was made in.
#[test]
fn s5_50_pinned_memory_is_of_no_device() {
    let sim = Simulator::new(SimConfig::with_devices(2, 1 << 30)).unwrap();
    for ordinal in [0, 1] {
        let context = sim.context(ordinal).unwrap();
        let host = PinnedBuffer::from_slice(&context, &[1u16, 2]).unwrap();
        let tensor = Tensor::from_pinned(host, &[2]).unwrap();
        let theirs = Peer::on(&Stream::new(&context).unwrap());
        let out = tensor.to_dlpack::<DLManagedTensor>(&theirs).unwrap();
        let expected = DLDevice {
            device_type: DLDevice::CUDA_HOST,
            device_id: 0,
        };
        assert_eq!(out.tensor().unwrap().device, expected);
    }
}

/// S5.50: page-locked memory of a pool returns to it with the work of its users, and is not exported while other work
/// may use it, nor after its pool has begun a new generation.
#[test]
fn s5_50_pinned_memory_of_a_pool() {
    each(|rig| {
        let theirs = rig.stream();
        let config = PinnedConfig::new().initial(1).buffer_bytes(64 << 10);
        let pool = PinnedPool::new(&rig.context, config).unwrap();
        let take = || {
            pool.acquire::<u16>(4)
                .unwrap()
                .write(&[1, 2, 3, 4])
                .unwrap()
        };
        let tensor = Tensor::from_pinned(take(), &[4]).unwrap();
        let out = tensor
            .to_dlpack::<DLManagedTensor>(&Peer::on(&theirs))
            .unwrap();
        let busy = rig.busy(&theirs);
        drop((tensor, out));
        assert!(!theirs.is_complete().unwrap(), "no call waits");
        assert_eq!(
            (pool.usage().pending, pool.usage().blocks.current),
            (64 << 10, 0)
        );
        busy.release();
        theirs.synchronize().unwrap();
        let mut host = take();
        assert_eq!((pool.usage().pending, pool.usage().blocks.current), (0, 1));
        let busy = rig.busy(&theirs);
        host.record_use(&theirs).unwrap();
        let refused = Tensor::from_pinned(host, &[4]).unwrap_err();
        assert_matches!(refused.error, Error::InFlight);
        busy.release();
        theirs.synchronize().unwrap();
        pool.restart();
        let refused = Tensor::from_pinned(*refused.value, &[4]).unwrap_err();
        assert_matches!(refused.error, Error::Stale { .. });
        drop(refused);
        assert_eq!(pool.usage().blocks.current, 0);
    });
}
