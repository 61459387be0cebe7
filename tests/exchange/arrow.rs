//! Arrow C Device arrays, with a consumer and a producer in C.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::c_void;
use std::thread;

use crate::common::*;
use crate::foreign::*;
use cualloc::Error;
use cualloc::allocator::{Allocator, Config, Policy};
use cualloc::driver::Stream;
use cualloc::error::{ImportFault, InvalidArgument};
use cualloc::exchange::dlpack::*;
use cualloc::exchange::*;
use cualloc::sim::{Mode, SimConfig, Simulator};

/// Counts what this thread holds on the heap.
struct Counting;

thread_local! {
    static HELD: Cell<i64> = const { Cell::new(0) };
}

fn held() -> i64 {
    HELD.with(Cell::get)
}

fn change(by: i64) {
    let _ = HELD.try_with(|held| held.set(held.get() + by));
}

// SAFETY: passes everything on.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        change(layout.size() as i64);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        change(-(layout.size() as i64));
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static HEAP: Counting = Counting;

fn arrow(ptr: u64, length: i64) -> SeenArrow {
    SeenArrow {
        data: ptr,
        length,
        n_buffers: 2,
        device_type: 2,
        ..SeenArrow::default()
    }
}

/// An array of the other side's, moved out of its structure.
fn foreign(
    other: &Other,
    seen: &SeenArrow,
) -> (ArrowDeviceArray, &'static std::sync::atomic::AtomicU64) {
    let counter = counter();
    let raw = other.new_arrow();
    other.make_arrow(raw, seen, count, with(counter));
    // SAFETY: made by the other side.
    let array = unsafe { ArrowDeviceArray::from_raw(raw.cast()) };
    assert_eq!(other.see_arrow(raw).released, 1, "moved away from");
    other.delete(raw, "free_arrow");
    (array, counter)
}

/// S5.63: the structures are laid out as a C compiler lays out the interface's definition.
#[test]
fn s5_63_layout_is_the_interfaces() {
    let Some(other) = other() else { return };
    let c = other.layout();
    // The device array's fields are private; the asserted offsets are in the library.
    assert_eq!(c[..6], [128, 0, 80, 88, 96, 104]);
    assert_eq!(c[0], size_of::<ArrowDeviceArray>());
    assert_eq!(c[6], 80);
    assert_eq!(
        c[7..],
        [
            size_of::<DLTensor>(),
            size_of::<DLManagedTensor>(),
            std::mem::offset_of!(DLManagedTensor, manager_ctx),
            std::mem::offset_of!(DLManagedTensor, deleter),
            size_of::<DLManagedTensorVersioned>(),
            std::mem::offset_of!(DLManagedTensorVersioned, manager_ctx),
            std::mem::offset_of!(DLManagedTensorVersioned, deleter),
            std::mem::offset_of!(DLManagedTensorVersioned, flags),
            std::mem::offset_of!(DLManagedTensorVersioned, dl_tensor),
        ]
    );
}

/// S5.63, S5.52: a consumer in C reads an export, moves it and releases it once, from another thread.
#[test]
fn s5_63_s5_52_export_through_c() {
    let Some(other) = other() else { return };
    each(|rig| {
        let allocator = rig.allocator();
        let [ours, theirs] = rig.streams();
        let column = column(&allocator, &[1i64, 2, 3], &ours).unwrap();
        let (first, second) = (other.new_arrow(), other.new_arrow());
        let array = column.to_arrow(&Peer::on(&theirs)).unwrap();
        assert!(!array.is_released());
        // SAFETY: a structure of C's, large enough.
        unsafe { array.write_to(first.cast()) };
        let seen = other.see_arrow(first);
        assert_ne!(seen.event, 0);
        assert_eq!(
            seen,
            SeenArrow {
                event: seen.event,
                ..arrow(column.ptr(), 3)
            }
        );
        drop(column);
        let before = allocator.stats().all.allocated.current;
        assert!(before > 0);
        other.move_arrow(first, second);
        // Released: nothing happens.
        other.delete(first, "release_arrow");
        assert_eq!(allocator.stats().all.allocated.current, before);
        let moved = second as usize;
        thread::scope(|scope| {
            scope.spawn(move || other.delete(moved as *mut c_void, "release_arrow"));
        });
        assert_eq!(other.see_arrow(second).released, 1);
        assert_eq!(allocator.stats().all.allocated.current, 0);
        // Once more: nothing happens.
        other.delete(second, "release_arrow");
        other.delete(first, "free_arrow");
        other.delete(second, "free_arrow");
        rig.close(&allocator);
    });
}

/// S5.63, S5.52: an array of a producer in C comes in with its event, and is released once.
#[test]
fn s5_63_s5_52_import_from_c() {
    let Some(other) = other() else { return };
    each(|rig| {
        let [home, theirs] = rig.streams();
        let plain = Plain::new(&rig.context, 4096);
        rig.stamp(plain.ptr, 4096, 0, &theirs);
        theirs.synchronize().unwrap();
        let hold = rig.hold(&theirs);
        rig.stamp(plain.ptr, 4096, 1, &theirs);
        let event = rig.context.enter().unwrap().create_event().unwrap();
        event.record(&theirs).unwrap();
        let seen = SeenArrow {
            offset: 2,
            event: event.raw() as u64,
            ..arrow(plain.ptr, 100)
        };
        let (array, count) = foreign(other, &seen);
        let column = Tensor::from_arrow(array, DType::I32, &home, ordered()).unwrap();
        assert_eq!((column.ptr(), column.shape()), (plain.ptr + 8, &[100][..]));
        assert_eq!((column.is_external(), column.id()), (true, None));
        assert!(column.is_read_only());
        // The event is waited for on our stream.
        rig.stamp(plain.ptr, 64, 2, &home);
        assert!(!home.is_complete().unwrap());
        hold.release();
        assert_eq!(rig.mismatches(plain.ptr, 64, 2, &home), 0);
        assert_eq!(column.as_slice::<i32>().unwrap().to_vec().unwrap()[14], 1);
        // Released behind our own use.
        let busy = rig.busy(&home);
        assert_eq!(released(count), 0);
        drop(column);
        assert_eq!(released(count), 1);
        assert!(home.is_complete().unwrap());
        drop(busy);
    });
}

/// S5.46, S5.52: our own memory keeps its identity through an array; ownership can be taken apart.
#[test]
fn s5_46_s5_52_identity_and_parts() {
    each(|rig| {
        let allocator = rig.allocator();
        let [a, b] = rig.streams();
        let mut truths = Tensor::zeroed(&allocator, DType::Bool, &[3], &a).unwrap();
        set(&mut truths, &[1u8, 0, 1]).unwrap();
        let id = truths.id();
        let out = || truths.to_arrow(&Peer::on(&b)).unwrap();
        let (array, device, kind, event) = out().into_parts();
        assert_eq!((kind, device, event.is_null()), (2, 0, false));
        assert_eq!((array.len(), array.num_buffers()), (3, 2));
        drop(array);
        let array = out();
        drop(truths);
        let back = Tensor::from_arrow(array, DType::Bool, &b, ordered()).unwrap();
        assert_eq!((back.is_external(), back.id()), (false, id));
        assert_eq!(values::<u8>(&back).unwrap(), [1, 0, 1]);
        drop(back);
        assert_eq!(allocator.stats().all.allocated.current, 0);
        // Empty ones have no event, and no memory.
        let empty = Tensor::uninit(&allocator, DType::F64, &[0], &a).unwrap();
        assert!(empty.to_arrow(&ordered()).unwrap().into_parts().3.is_null());
        let array = empty.to_arrow(&ordered()).unwrap();
        let back = Tensor::from_arrow(array, DType::F64, &b, ordered()).unwrap();
        assert_eq!((back.shape(), back.ptr()), (&[0][..], 0));
        // Types that Arrow lacks are not exported.
        let of = |dtype, shape: &[usize]| Tensor::zeroed(&allocator, dtype, shape, &a).unwrap();
        let halves = of(DType::BF16, &[4]).to_arrow(&ordered());
        assert_matches!(halves, Err(Error::NotSupported { .. }));
        let flat = of(DType::F32, &[2, 2]).to_arrow(&ordered());
        assert_matches!(
            flat,
            Err(Error::Invalid(InvalidArgument::Dimensions {
                found: 2,
                most: 1
            }))
        );
        rig.close(&allocator);
    });
}

/// S5.52: what a tensor cannot be is refused before any driver call, and given back.
#[test]
fn s5_52_import_checks() {
    let Some(other) = other() else { return };
    let rig = Rig::new(Policy::Packed, SimConfig::with_devices(1, 1 << 30));
    let stream = rig.stream();
    let plain = Plain::new(&rig.context, 4096);
    let good = arrow(plain.ptr, 16);
    let with = |change: &dyn Fn(&mut SeenArrow)| {
        let mut seen = good;
        change(&mut seen);
        seen
    };
    let length = |length| (with(&|a| a.length = length), ImportFault::Length { length });
    let buffers = |buffers| {
        let seen = with(&|a| a.n_buffers = buffers);
        (seen, ImportFault::Buffers { buffers })
    };
    let device = |device_type| {
        let seen = with(&|a| a.device_type = device_type);
        (seen, ImportFault::DeviceType { device_type })
    };
    let at = |offset: i64| {
        let why = ImportFault::Offset {
            offset: offset.try_into().unwrap_or(u64::MAX),
        };
        (with(&|a| a.offset = offset), why)
    };
    let nulls = |nulls, validity| {
        let seen = with(&|a| (a.null_count, a.validity) = (nulls, validity));
        (seen, ImportFault::Nulls { nulls })
    };
    let data = |address, why| (with(&|a| a.data = address), why);
    let (odd, high) = (plain.ptr + 4, u64::MAX - 15);
    let elsewhere = ImportFault::Device {
        expected: 0,
        actual: 1,
    };
    let misaligned = ImportFault::Alignment {
        address: odd,
        alignment: 8,
    };
    let overflow = ImportFault::Overflow {
        address: high,
        bytes: 128,
    };
    let cases = [
        device(1),
        device(3),
        (with(&|a| a.device_id = 1), elsewhere),
        buffers(1),
        buffers(-1),
        (with(&|a| a.n_children = 1), ImportFault::Nested),
        length(-1),
        length(i64::MAX),
        at(-1),
        at(i64::MAX),
        nulls(1, 0),
        nulls(-1, plain.ptr),
        data(0, ImportFault::NoData { elements: 16 }),
        data(odd, misaligned),
        data(high, overflow),
    ];
    let calls = rig.driver.calls().total();
    let import = |array| Tensor::from_arrow(array, DType::F64, &stream, ordered());
    for (seen, expected) in cases {
        let (array, count) = foreign(other, &seen);
        let refused = import(array).expect_err("refused");
        assert_matches!(&refused.error, Error::Import(why) if *why == expected, "{seen:?}: {:?}", refused.error);
        assert_eq!(released(count), 0);
        drop(refused);
        assert_eq!(released(count), 1);
    }
    let refused = import(ArrowDeviceArray::empty()).unwrap_err();
    assert_matches!(refused.error, Error::Import(ImportFault::Released));
    assert_eq!(rig.driver.calls().total(), calls);
    let allowed = [
        with(&|a| a.null_count = -1),
        with(&|a| a.validity = plain.ptr),
        with(&|a| (a.length, a.data) = (0, 0)),
    ];
    for seen in allowed {
        let (array, count) = foreign(other, &seen);
        drop(import(array).unwrap());
        assert_eq!(released(count), 1);
    }
}

/// S5.64: nothing stays on the heap, whichever end releases, and however the array was moved.
#[test]
fn s5_64_no_leak_on_the_heap() {
    let Some(other) = other() else { return };
    let rig = Rig::new(Policy::Packed, SimConfig::with_devices(1, 1 << 30));
    let allocator = rig.allocator();
    let stream = rig.stream();
    let consumer = Peer::on(&stream);
    let column = column(&allocator, &[1u64; 100], &stream).unwrap();
    let raw = other.new_arrow();
    let round = || {
        drop(column.to_arrow(&consumer).unwrap());
        // SAFETY: a structure of C's.
        unsafe { column.to_arrow(&consumer).unwrap().write_to(raw.cast()) };
        other.delete(raw, "release_arrow");
        let mut target = column.to_arrow(&consumer).unwrap();
        let array = target.take();
        assert!(target.is_released());
        drop(Tensor::from_arrow(array, DType::U64, &stream, ordered()).unwrap());
        for versioned in [false, true] {
            drop(returned(&column, versioned, &consumer, &stream));
        }
    };
    // The simulator's heap may grow at first.
    for _ in 0..100 {
        round();
    }
    let before = held();
    let events = rig.calls("cuEventCreate") - rig.calls("cuEventDestroy_v2");
    for _ in 0..1000 {
        round();
    }
    assert_eq!(
        rig.calls("cuEventCreate") - rig.calls("cuEventDestroy_v2"),
        events
    );
    // A leaked box of 1000 rounds would be 128,000 bytes or more.
    let grown = held() - before;
    assert!(grown < 16_384, "{grown} bytes stay");
    other.delete(raw, "free_arrow");
    drop(column);
    rig.close(&allocator);
}

/// S5.51, S5.52: every type has its field, and truth values are stored in bytes.
#[test]
fn s5_51_s5_52_fields() {
    let mut without = Vec::new();
    for dtype in DType::ALL {
        let Some(field) = dtype.arrow_field("x") else {
            without.push(*dtype);
            continue;
        };
        assert_eq!(DType::from_arrow_field(&field), Some(*dtype));
        assert_eq!(field.data_type().primitive_width(), Some(dtype.bytes()));
        let schema = arrow_schema::ffi::FFI_ArrowSchema::try_from(&field).unwrap();
        let back = arrow_schema::Field::try_from(&schema).unwrap();
        assert_eq!(DType::from_arrow_field(&back), Some(*dtype));
    }
    assert_eq!(without, [DType::BF16, DType::F8E4M3, DType::F8E5M2]);
    let field = |kind| arrow_schema::Field::new("x", kind, false);
    for kind in [
        arrow_schema::DataType::Boolean,
        arrow_schema::DataType::Date32,
        arrow_schema::DataType::Utf8,
    ] {
        assert_eq!(DType::from_arrow_field(&field(kind)), None);
    }
}

/// D10: an array does not say of what type its elements are; ours are not read past their end.
#[test]
fn d10_reimported_arrays_have_no_more_bytes() {
    each(|rig| {
        let allocator = rig.allocator();
        let stream = rig.stream();
        let column = Tensor::zeroed(&allocator, DType::I32, &[1 << 18], &stream).unwrap();
        let array = column.to_arrow(&ordered()).unwrap();
        let larger = Tensor::from_arrow(array, DType::I64, &stream, ordered());
        let failed = larger.expect_err("twice as many bytes");
        let beyond = matches!(&failed.error, Error::Import(ImportFault::Beyond { .. }));
        assert!(beyond, "{}", failed.error);
        let smaller = DType::U8;
        let back = Tensor::from_arrow(*failed.value, smaller, &stream, ordered());
        assert_eq!(
            back.unwrap().as_slice::<u8>().unwrap().to_vec().unwrap(),
            vec![0; 1 << 18]
        );
        drop(column);
        rig.close(&allocator);
    });
}

/// D10: the event of an export stands for the memory's own stream, also where a thread cannot name it.
#[test]
fn d10_an_exports_event_covers_another_threads_own_stream() {
    let mut config = SimConfig::with_devices(1, 1 << 30);
    config.mode = Mode::Manual;
    let sim = Simulator::new(config).unwrap();
    let driver = sim.driver().unwrap();
    let context = driver.context(0).unwrap();
    let allocator = Allocator::with_config(&context, Config::new()).unwrap();
    let make = || {
        let own = Stream::per_thread(&context);
        Tensor::zeroed(&allocator, DType::U32, &[1 << 18], &own).unwrap()
    };
    let column = thread::scope(|scope| scope.spawn(make).join().unwrap());
    let filling = || sim.pending().iter().any(|op| op.kind.contains("Memset"));
    assert!(filling());
    drop(column.to_arrow(&ordered()).unwrap());
    assert!(!filling());
}

/// D10: an array that says it has buffers and has none is refused, and released once.
#[test]
fn d10_arrays_without_their_buffers() {
    /// The structure of the interface, word by word.
    #[repr(C)]
    struct Words([u64; 16]);
    unsafe extern "C" fn release(array: *mut Words) {
        // SAFETY: the structure that is released, and the counter that it leads to, are alive.
        unsafe {
            *((*array).0[9] as *mut u64) += 1;
            (*array).0[8] = 0;
        }
    }
    let rig = Rig::new(Policy::Packed, SimConfig::with_devices(1, 1 << 30));
    let stream = rig.stream();
    let calls = rig.driver.calls().total();
    for (dictionary, expected) in [
        (0, ImportFault::Buffers { buffers: 2 }),
        (8, ImportFault::Nested),
    ] {
        let mut released = 0u64;
        let mut words = Words([0; 16]);
        (words.0[0], words.0[3], words.0[7]) = (16, 2, dictionary);
        words.0[8] = release as *const () as u64;
        words.0[9] = &raw mut released as u64;
        // The device's type, behind its ordinal.
        words.0[11] = 2;
        // SAFETY: the structure is an array's, as far as it is read before it is found to be none.
        let array = unsafe { ArrowDeviceArray::from_raw((&raw mut words).cast()) };
        let refused = Tensor::from_arrow(array, DType::F32, &stream, ordered()).unwrap_err();
        assert_matches!(&refused.error, Error::Import(fault) if *fault == expected);
        drop(refused);
        assert_eq!(released, 1);
    }
    assert_eq!(rig.driver.calls().total(), calls);
}
