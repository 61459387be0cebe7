//! Pointer attributes, IPC, peers, pool pointers, contexts.

use crate::support::*;
use cualloc::driver::sys::*;
use cualloc::sim::{SimConfig, SimDevice};
use std::ptr::{addr_of_mut, null_mut};

fn attribute<T: Default>(bench: &Bench, which: CUpointer_attribute, address: u64) -> (CUresult, T) {
    let mut value = T::default();
    let code = call!(
        bench,
        cuPointerGetAttribute(addr_of_mut!(value).cast(), which, address)
    );
    (code, value)
}

#[test]
fn pointer_attributes_distinguish_plain_from_mapped_memory() {
    type A = CUpointer_attribute;
    let bench = bench();
    let plain = bench.alloc(1000);
    let (mapped, _) = bench.mapped(GRANULE);
    let legacy = A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
    assert_eq!(attribute::<u8>(&bench, legacy, plain + 5), (OK, 1));
    assert_eq!(attribute::<u8>(&bench, legacy, mapped + 5), (OK, 0));
    let kinds = A::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES;
    assert_eq!(attribute::<u64>(&bench, kinds, mapped), (OK, 1));
    let start = A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR;
    assert_eq!(attribute::<u64>(&bench, start, plain + 999), (OK, plain));
    let unknown = attribute::<u64>(&bench, start, plain + (1 << 30)).0;
    assert_eq!(unknown, CUresult::CUDA_ERROR_INVALID_VALUE);

    let mut asked = [
        A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    ];
    let (mut device, mut kind) = (9i32, 9u32);
    let mut places = [addr_of_mut!(device).cast(), addr_of_mut!(kind).cast()];
    let (list, data) = (asked.as_mut_ptr(), places.as_mut_ptr());
    ok!(bench, cuPointerGetAttributes(2, list, data, plain));
    assert_eq!((device, kind), (0, 2));
    ok!(bench, cuPointerGetAttributes(2, list, data, 12345));
    assert_eq!((device, kind), (-2, 0));
}

#[test]
fn ipc_shares_plain_memory_and_nothing_else() {
    let bench = bench();
    let plain = bench.alloc(1000);
    let (mapped, _) = bench.mapped(GRANULE);
    let mut handle = CUipcMemHandle { reserved: [0; 64] };
    assert_ne!(call!(bench, cuIpcGetMemHandle(&mut handle, mapped)), OK);
    ok!(bench, cuIpcGetMemHandle(&mut handle, plain));
    let mut view = 0;
    ok!(bench, cuIpcOpenMemHandle_v2(&mut view, handle, 1));
    assert_ne!(view, plain);
    bench.memset(plain, 4, 16, bench.stream());
    assert_eq!(bench.word(view), 0x0404_0404);
    assert_eq!(
        call!(bench, cuMemFree_v2(view)),
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
    ok!(bench, cuIpcCloseMemHandle(view));
    assert_eq!(
        call!(bench, cuIpcCloseMemHandle(view)),
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
    ok!(bench, cuMemFree_v2(plain));
    assert_ne!(
        call!(bench, cuIpcOpenMemHandle_v2(&mut view, handle, 1)),
        OK
    );
}

#[test]
fn a_retained_handle_keeps_memory_and_needs_its_own_release() {
    let bench = bench();
    let (at, handle) = bench.mapped(GRANULE);
    let mut again = 0;
    let inside = (at + 4096) as *mut std::ffi::c_void;
    ok!(bench, cuMemRetainAllocationHandle(&mut again, inside));
    ok!(bench, cuMemRelease(handle));
    ok!(bench, cuMemUnmap(at, GRANULE));
    assert_eq!(bench.sim.memory_in_use(0), GRANULE as u64);
    ok!(bench, cuMemRelease(again));
    assert_eq!(bench.sim.memory_in_use(0), 0);
    bench.silent();
}

#[test]
fn memory_of_a_broken_second_mapping_has_no_handle() {
    let bench = with(SimConfig {
        broken_aliasing: true,
        ..SimConfig::default()
    });
    let (at, handle) = bench.mapped(GRANULE);
    let second = bench.reserve(GRANULE);
    assert_eq!(bench.map(second, GRANULE, handle), OK);
    let mut retained = 0;
    for (address, code) in [(second, CUresult::CUDA_ERROR_INVALID_VALUE), (at, OK)] {
        let address = address as *mut std::ffi::c_void;
        let call = call!(bench, cuMemRetainAllocationHandle(&mut retained, address));
        assert_eq!(call, code);
    }
    assert_eq!(retained, handle);
    bench.silent();
}

#[test]
fn peers_copy_and_reach_each_other_where_the_devices_can() {
    let apart = SimDevice {
        peers: false,
        ..SimDevice::default()
    };
    let devices = vec![SimDevice::default(), SimDevice::default(), apart];
    let bench = with(SimConfig {
        devices,
        // First the forbidden calls, then the allowed ones.
        sticky_errors: false,
        ..SimConfig::default()
    });
    let mut can = [9; 2];
    ok!(bench, cuDeviceCanAccessPeer(&mut can[0], 0, 1));
    ok!(bench, cuDeviceCanAccessPeer(&mut can[1], 0, 2));
    assert_eq!(can, [1, 0]);
    let (mut second, mut third) = (null_mut(), null_mut());
    ok!(bench, cuDevicePrimaryCtxRetain(&mut second, 1));
    ok!(bench, cuDevicePrimaryCtxRetain(&mut third, 2));
    let (first, here) = (bench.context.raw(), bench.alloc(64));
    ok!(bench, cuCtxSetCurrent(second));
    let there = bench.alloc(64);
    ok!(bench, cuCtxSetCurrent(first));
    let stream = bench.stream();
    bench.memset(here, 5, 64, stream);
    ok!(
        bench,
        cuMemcpyPeerAsync(there, second, here, first, 64, stream)
    );
    assert_eq!(bench.word(there), 0x0505_0505);
    bench.silent();
    bench.fill(there, 4, 0, stream);
    assert_eq!(bench.sim.take_reports().len(), 1, "no access yet");
    ok!(bench, cuCtxEnablePeerAccess(second, 0));
    bench.fill(there, 4, 0, stream);
    bench.silent();
    let twice = call!(bench, cuCtxEnablePeerAccess(second, 0));
    assert_eq!(twice, CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    let never = call!(bench, cuCtxEnablePeerAccess(third, 0));
    assert_eq!(never, CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
}

#[test]
fn a_released_primary_context_takes_its_memory_along() {
    let bench = with(SimConfig::with_devices(2, 1 << 30));
    let mut second = null_mut();
    ok!(bench, cuDevicePrimaryCtxRetain(&mut second, 1));
    ok!(bench, cuCtxSetCurrent(second));
    bench.alloc(1000);
    bench.stream();
    ok!(bench, cuDevicePrimaryCtxRelease_v2(1));
    assert!(bench.sim.leaks().is_empty());
    bench.silent();
    assert_eq!(
        call!(bench, cuCtxSetCurrent(second)),
        CUresult::CUDA_ERROR_INVALID_CONTEXT
    );
}

#[test]
fn a_foreign_context_has_its_own_id_and_streams() {
    let bench = bench();
    let foreign = bench.sim.create_context(0).unwrap();
    let (mut a, mut b) = (0, 0);
    ok!(bench, cuCtxGetId(bench.context.raw(), &mut a));
    ok!(bench, cuCtxGetId(foreign, &mut b));
    assert_ne!(a, b);
    ok!(bench, cuCtxSetCurrent(foreign));
    let stream = bench.stream();
    let mut ctx = null_mut();
    ok!(bench, cuStreamGetCtx(stream, &mut ctx));
    assert_eq!(ctx, foreign);
    assert!(bench.sim.destroy_context(foreign));
    assert_ne!(call!(bench, cuStreamQuery(stream)), OK);
    assert!(bench.sim.create_context(7).is_none());
}

#[test]
fn host_memory_is_known_by_its_address() {
    let bench = bench();
    let mut host = null_mut();
    ok!(bench, cuMemHostAlloc(&mut host, 100, 0));
    let kind = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    assert_eq!(attribute::<u32>(&bench, kind, host as u64 + 50), (OK, 1));
    let again = call!(bench, cuMemHostRegister_v2(host, 100, 0));
    assert_eq!(again, CUresult::CUDA_ERROR_INVALID_VALUE);
    ok!(bench, cuMemFreeHost(host));
    let mut own = [0u8; 64];
    let own = own.as_mut_ptr().cast();
    ok!(bench, cuMemHostRegister_v2(own, 64, 0));
    assert_eq!(bench.sim.leaks().host, 1);
    ok!(bench, cuMemHostUnregister(own));
    assert!(bench.sim.leaks().is_empty());
}
