//! The checked calls and handles, on a driver compiled from C that has no device behind it.

use crate::common::*;
use cualloc::driver::{Context, Driver, DriverError, LoadError, MemoryProperties, Stream, sys};
use std::ptr;
use std::thread;

/// A driver of its own for each test, or none where there is no compiler.
fn driver() -> Option<Driver> {
    let (_folder, path) = library(Fake::default())?;
    Some(open(path).unwrap())
}

fn context(driver: &Driver) -> Context {
    driver.context(0).unwrap()
}

/// The thread's current context and capture mode, queried without counting.
fn thread_state(driver: &Driver) -> (usize, u32) {
    let functions = driver.functions();
    let mut current = ptr::null_mut();
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: the functions are the fake driver's, the pointers are to locals.
    unsafe {
        let done = sys::CUresult::CUDA_SUCCESS;
        assert_eq!(functions.cuCtxGetCurrent.unwrap()(&mut current), done);
        let exchange = functions.cuThreadExchangeStreamCaptureMode.unwrap();
        assert_eq!(exchange(&mut mode), done);
        let before = mode.0;
        assert_eq!(exchange(&mut mode), done);
        (current as usize, before)
    }
}

fn set_thread_state(driver: &Driver, current: usize, mode: u32) {
    let functions = driver.functions();
    let mut mode = sys::CUstreamCaptureMode(mode);
    // SAFETY: as above; the fake driver never looks behind a handle.
    unsafe {
        let done = sys::CUresult::CUDA_SUCCESS;
        let current = ptr::without_provenance_mut(current);
        assert_eq!(functions.cuCtxSetCurrent.unwrap()(current), done);
        let exchange = functions.cuThreadExchangeStreamCaptureMode.unwrap();
        assert_eq!(exchange(&mut mode), done);
    }
}

#[test]
fn entering_leaves_the_thread_as_it_was() {
    let Some(driver) = driver() else { return };
    let one = context(&driver);
    let two = driver.context(1).unwrap();
    for current in [0, 0x1000, 0x5000] {
        for mode in [0, 1, 2] {
            set_thread_state(&driver, current, mode);
            {
                let outer = one.enter().unwrap();
                assert_eq!(thread_state(&driver), (0x1000, 2));
                {
                    let inner = two.enter().unwrap();
                    assert_eq!(thread_state(&driver), (0x1001, 2));
                    assert_eq!(inner.context().device().ordinal(), 1);
                }
                assert_eq!(thread_state(&driver), (0x1000, 2));
                outer.mem_alloc(700).unwrap_err();
                // Something below moved the context: it comes back all the same.
                set_thread_state(&driver, 0x6000, 2);
            }
            assert_eq!(thread_state(&driver), (current, mode));
            // Making and dropping handles, also in vain.
            let stream = Stream::new(&one).unwrap();
            Stream::per_thread(&one).id().unwrap();
            assert!(!stream.is_complete().unwrap());
            drop(one.enter().unwrap().create_event().unwrap());
            drop(stream);
            assert_eq!(thread_state(&driver), (current, mode));
        }
    }
}

/// A call that reports an error may have been executed: the thread is as it was all the same.
#[cfg(feature = "sim")]
#[test]
fn a_failed_enter_does_not_change_the_thread() {
    use cualloc::sim::{FailPlan, SimConfig, Simulator};
    let sim = Simulator::new(SimConfig::with_devices(2, 1 << 30)).unwrap();
    let driver = sim.driver().unwrap();
    let [one, two] = [0, 1].map(|ordinal| driver.context(ordinal).unwrap());
    for mode in [0, 1, 2] {
        set_thread_state(&driver, one.raw() as usize, mode);
        for call in ["cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode"] {
            for executed in [false, true] {
                let code = sys::CUresult::CUDA_ERROR_NOT_PERMITTED;
                let plan = FailPlan::call(call, code).unwrap();
                sim.fail(if executed { plan.executed() } else { plan });
                assert_eq!(two.enter().unwrap_err().call(), call);
                let state = thread_state(&driver);
                assert_eq!(state, (one.raw() as usize, mode), "{call}");
            }
        }
    }
    set_thread_state(&driver, 0, 0);
}

#[test]
fn entering_the_current_context_sets_nothing() {
    let Some(driver) = driver() else { return };
    let context = context(&driver);
    set_thread_state(&driver, 0x1000, 0);
    let before = driver.calls();
    drop(context.enter().unwrap());
    let calls = driver.calls().since(&before);
    assert_eq!(calls.get("cuCtxSetCurrent"), 0);
    assert_eq!(calls.get("cuThreadExchangeStreamCaptureMode"), 2);
    assert_eq!(calls.total(), 2);
}

#[test]
fn primary_context_is_retained_once_and_released_with_its_last_user() {
    let Some(driver) = driver() else { return };
    let first = context(&driver);
    let second = context(&driver);
    assert_eq!(first.raw(), second.raw());
    assert_eq!(first.id(), 0x1005);
    let count = |name: &str| driver.calls().get(name);
    assert_eq!(count("cuDevicePrimaryCtxRetain"), 1);
    let event = first.enter().unwrap().create_event().unwrap();
    drop((first, second));
    assert_eq!(count("cuDevicePrimaryCtxRelease_v2"), 0);
    drop(event);
    assert_eq!(count("cuEventDestroy_v2"), 1);
    assert_eq!(count("cuDevicePrimaryCtxRelease_v2"), 1);
    drop(context(&driver));
    assert_eq!(count("cuDevicePrimaryCtxRetain"), 2);
    assert_eq!(count("cuDevicePrimaryCtxRelease_v2"), 2);
}

#[test]
fn borrowed_handles_are_never_destroyed() {
    let Some(driver) = driver() else { return };
    set_thread_state(&driver, 0, 0);
    // SAFETY: its owner keeps it meanwhile.
    assert!(unsafe { Context::current(&driver) }.unwrap().is_none());
    set_thread_state(&driver, 0x3001, 0);
    // SAFETY: its owner keeps it meanwhile.
    let current = unsafe { Context::current(&driver) }.unwrap().unwrap();
    assert_eq!(current.device().ordinal(), 1);
    // SAFETY: the fake driver never looks behind a handle.
    unsafe {
        let error = Context::from_raw(&driver, ptr::null_mut()).unwrap_err();
        assert_eq!(error.code(), sys::CUresult::CUDA_ERROR_INVALID_CONTEXT);
        let stream = Stream::from_raw(&current, ptr::without_provenance_mut(0x9000)).unwrap();
        assert_eq!(stream.id().unwrap(), 0x9003);
        let raw = ptr::without_provenance_mut(0x9100);
        let event = cualloc::driver::Event::from_raw(&current, raw);
        assert_eq!(event.raw(), raw);
    }
    drop(current);
    for name in [
        "cuStreamDestroy_v2",
        "cuEventDestroy_v2",
        "cuDevicePrimaryCtxRelease_v2",
    ] {
        assert_eq!(driver.calls().get(name), 0, "{name}");
    }
}

/// R26: the per-thread default stream is another queue on each thread, by one handle value.
#[test]
fn r26_default_streams_are_distinguished() {
    let Some(driver) = driver() else { return };
    let (one, two) = (context(&driver), driver.context(1).unwrap());
    let legacy = Stream::legacy(&one);
    // SAFETY: null is a special handle.
    let null = unsafe { Stream::from_raw(&one, ptr::null_mut()) }.unwrap();
    assert_eq!(legacy.id(), null.id());
    assert_ne!(legacy.id(), Stream::legacy(&two).id());
    let own = Stream::per_thread(&one);
    let here = own.id().unwrap();
    assert_eq!(own.id().unwrap(), here);
    let there = thread::scope(|scope| scope.spawn(|| own.id().unwrap()).join().unwrap());
    assert_ne!(here, there);
    assert_ne!(here, legacy.id().unwrap());
}

/// R26: the same where the driver has no stream ids.
#[test]
fn r26_streams_are_distinguished_without_ids() {
    let without_ids = Fake::without(|symbol| symbol.name() == "cuStreamGetId");
    let Some((_folder, path)) = library(without_ids) else {
        return;
    };
    let driver = open(path).unwrap();
    let (one, two) = (context(&driver), driver.context(1).unwrap());
    let legacy = || Stream::legacy(&one).id().unwrap();
    assert_eq!(legacy(), legacy());
    assert_ne!(legacy(), Stream::legacy(&two).id().unwrap());
    let own = Stream::per_thread(&one);
    let here = own.id().unwrap();
    assert_eq!(here, own.id().unwrap());
    let there = thread::scope(|scope| scope.spawn(|| own.id().unwrap()).join().unwrap());
    assert_ne!(here, there);
    assert_ne!(here, legacy());
    let stream = Stream::new(&one).unwrap();
    assert_eq!(stream.id(), stream.clone().id());
    assert_ne!(stream.id(), Stream::new(&one).unwrap().id());
    // SAFETY: the stream is alive.
    assert_eq!(unsafe { driver.stream_id(stream.raw()) }.unwrap(), None);
}

#[test]
fn streams_count_their_holders_and_go_with_the_last() {
    let Some(driver) = driver() else { return };
    let context = context(&driver);
    let stream = Stream::new(&context).unwrap();
    assert_eq!(stream.holders(), 1);
    let clone = stream.clone();
    assert_eq!(stream.holders(), 2);
    drop(stream);
    assert_eq!(driver.calls().get("cuStreamDestroy_v2"), 0);
    drop(clone);
    assert_eq!(driver.calls().get("cuStreamDestroy_v2"), 1);
    drop(Stream::with_priority(&context, -1).unwrap());
    assert_eq!(driver.calls().get("cuStreamCreateWithPriority"), 1);
}

#[test]
fn queries_are_not_counted() {
    let Some(driver) = driver() else { return };
    let context = context(&driver);
    let stream = Stream::new(&context).unwrap();
    set_thread_state(&driver, 0x1000, 2);
    let before = driver.calls();
    // SAFETY: the stream is alive.
    unsafe {
        assert!(driver.stream_id(stream.raw()).unwrap().is_some());
        assert!(!driver.is_capturing(stream.raw()).unwrap());
    }
    assert!(!stream.is_capturing().unwrap());
    assert_eq!(driver.calls().since(&before).total(), 0);
    // SAFETY: the stream is alive.
    unsafe { driver.stream_context(stream.raw()) }.unwrap();
    let calls = driver.calls().since(&before);
    let list: Vec<_> = calls.iter().collect();
    assert_eq!(list, [("cuStreamGetCtx", 1)]);
    assert_eq!(calls.get("cuNoSuchFunction"), 0);
}

#[test]
fn handle_operations_and_time_are_counted() {
    let Some(driver) = driver() else { return };
    let context = context(&driver);
    let entered = context.enter().unwrap();
    let properties = MemoryProperties::for_device(context.device()).unwrap();
    let posix = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    assert_eq!(properties.export, posix);
    assert!(!properties.gpu_direct_rdma);
    let before = driver.calls();
    assert_eq!(before.nanos(), 0);
    driver.set_timing(true);
    let handle = entered.mem_create(2 << 20, &properties).unwrap();
    assert!(
        entered
            .mem_create(2, &properties)
            .unwrap_err()
            .is_out_of_memory()
    );
    driver.add_view_maps(3);
    // SAFETY: the handle is alive.
    unsafe { entered.mem_release(handle) }.unwrap();
    let calls = driver.calls().since(&before);
    assert_eq!(calls.handle_ops(), 5);
    assert_eq!(calls.get("cuMemCreate"), 2);
    assert_eq!(calls.get("cuMemRelease"), 1);
    assert_eq!(calls.total(), 3);
    driver.set_timing(false);
    let timed = driver.calls().nanos();
    entered.synchronize().unwrap();
    assert_eq!(driver.calls().nanos(), timed);
    assert_eq!(Driver::clone(&driver).calls(), driver.calls());
    assert_eq!(cualloc::driver::CallCounts::default().total(), 0);
}

#[test]
fn errors_are_typed() {
    let Some(driver) = driver() else { return };
    let context = context(&driver);
    let entered = context.enter().unwrap();
    let error = entered.mem_alloc(2).unwrap_err();
    let code = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    assert_eq!(error, DriverError::new("cuMemAlloc_v2", code));
    assert!(error.is_out_of_memory() && !error.is_fatal() && !error.is_usage());
    for ordinal in [2, usize::MAX, 1 << 31] {
        let error = driver.device(ordinal).unwrap_err();
        assert_eq!(error.code(), sys::CUresult::CUDA_ERROR_INVALID_DEVICE);
        assert!(error.is_usage());
    }
    let event = entered.create_event().unwrap();
    assert!(!entered.query(&event).unwrap());
    let text = driver.describe(sys::CUresult(12345));
    let expected = "CUDA_ERROR_FROM_THE_FUTURE: not invented yet";
    assert_eq!(text.as_deref(), Some(expected));
    assert_eq!(driver.describe(sys::CUresult(54321)), None);
    // A name that fills its buffer without a zero, and an attribute that the driver does not know.
    let device = driver.device(0).unwrap();
    assert_eq!(device.name().unwrap(), "x".repeat(256));
    assert!(device.supports_vmm().unwrap());
    assert!(!device.supports_pools().unwrap());
    let feature = cualloc::driver::Feature::Vmm;
    let unknown = sys::CUdevice_attribute(999);
    assert!(!device.supports(feature, unknown).unwrap());
    assert!(device.attribute(unknown).unwrap_err().is_usage());
    assert!(!driver.is_lost());
}

/// After a fatal code nothing is destroyed any more, and calls still go to the driver.
#[test]
fn lost_driver_is_left_alone_by_drops() {
    for code in [4, 214, 700, 719, 999] {
        let Some(driver) = driver() else { return };
        let context = context(&driver);
        let stream = Stream::new(&context).unwrap();
        let event = context.enter().unwrap().create_event().unwrap();
        let other = driver.clone();
        set_thread_state(&driver, 0x5000, 1);
        let error = context.enter().unwrap().mem_alloc(code).unwrap_err();
        assert!(error.is_fatal());
        assert!(other.is_lost());
        // The thread got back what it had all the same.
        assert_eq!(thread_state(&driver), (0x5000, 1));
        let before = driver.calls();
        drop((event, stream, context));
        assert_eq!(driver.calls(), before);
    }
    // Their context was destroyed by other code; the others stay valid.
    let Some(driver) = driver() else { return };
    let context = context(&driver);
    let error = context.enter().unwrap().mem_alloc(709).unwrap_err();
    assert!(error.is_fatal());
    assert!(!driver.is_lost());
}

#[test]
fn functions_of_this_process_make_a_driver() {
    let Some(library) = driver() else { return };
    // SAFETY: the functions are the fake driver's.
    let driver = unsafe { Driver::from_functions(*library.functions()) }.unwrap();
    assert_eq!(driver.library(), None);
    driver.device_count().unwrap();
    assert_eq!(driver.calls().get("cuDeviceGetCount"), 1);
    assert_eq!(library.calls().get("cuDeviceGetCount"), 0);
    let mut functions = *library.functions();
    functions.cuEventRecord = None;
    functions.cuMemMap = None;
    // SAFETY: as above.
    match unsafe { Driver::from_functions(functions) }.unwrap_err() {
        LoadError::SymbolMissing { name, source, .. } => {
            assert_eq!(name, "cuEventRecord");
            assert!(source.is_none());
        }
        other => panic!("{other:?}"),
    }
    // SAFETY: there is nothing in it.
    let empty = unsafe { Driver::from_functions(sys::CuFunctions::default()) };
    assert_matches!(empty, Err(LoadError::SymbolMissing { .. }));
}

#[test]
fn handles_are_send_and_sync() {
    fn check<T: Send + Sync>() {}
    check::<Driver>();
    check::<Context>();
    check::<Stream>();
    check::<cualloc::driver::Event>();
    check::<cualloc::driver::Module>();
    check::<cualloc::driver::Function>();
    check::<cualloc::driver::MemoryPool>();
    check::<DriverError>();
    check::<LoadError>();
}
