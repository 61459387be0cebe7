//! Mapping rules: whole handles only, access per mapping, memory lives as long as anything shows it.

use crate::support::*;
use cualloc::driver::sys::{CUmemAccess_flags, CUresult};
use cualloc::sim::{Leaks, Report, SimConfig};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Work without the necessary access is reported, and the test continues.
fn reporting(devices: usize) -> Bench {
    with(SimConfig {
        sticky_errors: false,
        ..SimConfig::with_devices(devices, 1 << 30)
    })
}

#[test]
fn a_handle_is_mapped_whole_and_once_per_address() {
    let bench = bench();
    let at = bench.reserve(4 * GRANULE);
    let (_, handle) = bench.create(2 * GRANULE);
    let offset = call!(bench, cuMemMap(at, GRANULE, GRANULE, handle, 0));
    assert_eq!(offset, CUresult::CUDA_ERROR_NOT_SUPPORTED);
    assert_eq!(bench.map(at, GRANULE, handle), INVALID);
    assert_eq!(bench.map(at, 2 * GRANULE, handle), OK);
    let (_, other) = bench.create(GRANULE);
    bench.silent();
    let taken = bench.map(at + GRANULE as u64, GRANULE, other);
    assert_eq!(taken, CUresult::CUDA_ERROR_ALREADY_MAPPED);
    assert_eq!(bench.map(at + 4 * GRANULE as u64, GRANULE, other), INVALID);
    assert_eq!(bench.create(GRANULE + 4096).0, INVALID);
}

#[test]
fn only_whole_mappings_are_unmapped() {
    let bench = bench();
    let at = bench.reserve(3 * GRANULE);
    let (_, big) = bench.create(2 * GRANULE);
    let (_, small) = bench.create(GRANULE);
    assert_eq!(bench.map(at, 2 * GRANULE, big), OK);
    assert_eq!(bench.map(at + 2 * GRANULE as u64, GRANULE, small), OK);
    assert_eq!(call!(bench, cuMemUnmap(at, GRANULE)), INVALID);
    assert_eq!(bench.access(at, GRANULE), INVALID);
    assert_eq!(bench.access(at, 3 * GRANULE), OK);
    let before = bench.sim.calls().nanos();
    ok!(bench, cuMemUnmap(at, 3 * GRANULE));
    assert_eq!(bench.sim.calls().nanos() - before, 2 * 13_500);
    assert_eq!(call!(bench, cuMemUnmap(at, 3 * GRANULE)), INVALID);
}

#[test]
fn memory_lives_until_its_last_mapping_and_reference_end() {
    let bench = bench();
    let (at, handle) = bench.mapped(GRANULE);
    let view = bench.view(handle);
    ok!(bench, cuMemRelease(handle));
    ok!(bench, cuMemUnmap(at, GRANULE));
    assert_eq!(bench.sim.memory_in_use(0), GRANULE as u64);
    bench.memset(view, 1, 16, bench.stream());
    bench.sync();
    ok!(bench, cuMemUnmap(view, GRANULE));
    assert_eq!(bench.sim.memory_in_use(0), 0);
    bench.silent();
    assert_eq!(call!(bench, cuMemRelease(handle)), INVALID);
    bench.destroyed("handle");
}

#[test]
fn use_without_mapping_or_access_is_reported() {
    let bench = reporting(1);
    let stream = bench.stream();
    let at = bench.reserve(GRANULE);
    bench.memset(at, 1, 16, stream);
    reported!(bench, Report::Unmapped { site } if site.bytes == 16);
    let (_, handle) = bench.create(GRANULE);
    assert_eq!(bench.map(at, GRANULE, handle), OK);
    bench.memset(at, 1, 16, stream);
    reported!(bench, Report::Unauthorised { device: 0, .. });
    assert_eq!(bench.access(at, GRANULE), OK);
    bench.memset(at, 1, 16, stream);
    bench.silent();
    bench.memset(at + GRANULE as u64 - 8, 1, 16, stream);
    reported!(bench, Report::Unmapped { site } if site.bytes == 8);
}

#[test]
fn unmapping_requires_host_observed_completion() {
    let bench = bench();
    let stream = bench.stream();
    let event = bench.event();
    let (at, _) = bench.mapped(GRANULE);
    bench.memset(at, 1, 16, stream);
    bench.record(event, stream);
    assert_eq!(bench.query(event), OK);
    ok!(bench, cuMemUnmap(at, GRANULE));
    bench.silent();
    let (at, _) = bench.mapped(GRANULE);
    bench.memset(at, 1, 16, stream);
    ok!(bench, cuMemUnmap(at, GRANULE));
    bench.in_use("cuMemUnmap");
}

#[test]
fn unmapping_under_pending_work_is_reported() {
    let bench = bench();
    bench.manual();
    let stream = bench.stream();
    let (at, _) = bench.mapped(GRANULE);
    bench.memset(at, 7, 16, stream);
    ok!(bench, cuMemUnmap(at, GRANULE));
    reported!(bench, Report::InUse { user, .. } if user.bytes == 16);
    let (_, other) = bench.create(GRANULE);
    assert_eq!(bench.map(at, GRANULE, other), OK);
    assert_eq!(bench.access(at, GRANULE), OK);
    bench.sim.complete_all();
    assert_eq!(bench.word(at), 0x0707_0707);
}

#[test]
fn reservations_are_freed_exactly_and_empty_and_hints_are_honoured() {
    let bench = bench();
    let (at, handle) = bench.mapped(GRANULE);
    assert_eq!(call!(bench, cuMemAddressFree(at, GRANULE)), INVALID);
    ok!(bench, cuMemUnmap(at, GRANULE));
    assert_eq!(call!(bench, cuMemAddressFree(at, 2 * GRANULE)), INVALID);
    assert_eq!(call!(bench, cuMemAddressFree(at + 4096, GRANULE)), INVALID);
    ok!(bench, cuMemAddressFree(at, GRANULE));
    let wanted = at + (1 << 30);
    let mut got = 0;
    ok!(bench, cuMemAddressReserve(&mut got, GRANULE, 0, wanted, 0));
    assert_eq!(got, wanted);
    ok!(
        bench,
        cuMemAddressReserve(&mut got, GRANULE, 1 << 30, wanted, 0)
    );
    assert_eq!((got % (1 << 30), got != wanted), (0, true));
    ok!(bench, cuMemRelease(handle));
    let leaks = bench.sim.leaks();
    assert_eq!(
        leaks,
        Leaks {
            reservations: 2,
            ..Leaks::default()
        }
    );
}

#[test]
fn physical_memory_is_finite_and_shared_with_others() {
    let bench = with(SimConfig::with_devices(1, 8 * MIB));
    bench.sim.take_memory(0, 3 * MIB);
    let (code, first) = bench.create(2 * GRANULE);
    assert_eq!(code, OK);
    assert_eq!(bench.create(GRANULE).0, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    let info = bench.entered().mem_info().unwrap();
    assert_eq!((info.free, info.total), (MIB, 8 * MIB));
    bench.sim.take_memory(0, 0);
    assert_eq!(bench.create(GRANULE).0, OK);
    ok!(bench, cuMemRelease(first));
    assert_eq!(bench.sim.memory_in_use(0), 2 * MIB);
}

#[cfg(unix)]
#[test]
fn an_exported_descriptor_imports_the_same_memory() {
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    let bench = bench();
    let (at, handle) = bench.mapped(GRANULE);
    bench.memset(at, 3, 16, bench.stream());
    bench.sync();
    let mut fd = -1i32;
    let kind =
        cualloc::driver::sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let place = std::ptr::addr_of_mut!(fd).cast();
    ok!(bench, cuMemExportToShareableHandle(place, handle, kind, 0));
    // SAFETY: the export has just given us this descriptor.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let copy = fd.try_clone().unwrap();
    drop(fd);
    let mut imported = 0;
    let number = copy.as_raw_fd() as usize as *mut std::ffi::c_void;
    ok!(
        bench,
        cuMemImportFromShareableHandle(&mut imported, number, kind)
    );
    let view = bench.reserve(GRANULE);
    assert_eq!(bench.map(view, GRANULE, imported), OK);
    assert_eq!(bench.word(view), 0x0303_0303);
    assert_eq!(bench.sim.memory_in_use(0), GRANULE as u64);
}

/// Access belongs to the mapping, separately for each device, and ends with it: after a new mapping it must be granted
/// to all of them again.
#[test]
fn each_mapping_has_the_access_of_each_device() {
    let mut config = SimConfig::with_devices(2, 1 << 30);
    config.sticky_errors = false;
    let bench = with(config);
    let (code, handle) = bench.create(GRANULE);
    assert_eq!(code, OK);
    let (home, view) = (bench.reserve(GRANULE), bench.reserve(GRANULE));
    let rights = |at: u64| {
        [0, 1].map(|device| {
            let mut flags = 9;
            let place = location(device);
            ok!(bench, cuMemGetAccess(&mut flags, &place, at));
            flags
        })
    };
    for at in [home, view] {
        assert_eq!(bench.map(at, GRANULE, handle), OK);
        assert_eq!(rights(at), [0, 0]);
    }
    let both = [access(0), access(1)];
    ok!(bench, cuMemSetAccess(home, GRANULE, both.as_ptr(), 2));
    let mut reader = access(1);
    reader.flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ;
    ok!(bench, cuMemSetAccess(view, GRANULE, &reader, 1));
    assert_eq!((rights(home), rights(view)), ([3, 3], [0, 1]));

    let mut peer = std::ptr::null_mut();
    ok!(bench, cuDevicePrimaryCtxRetain(&mut peer, 1));
    ok!(bench, cuCtxSetCurrent(peer));
    let theirs = bench.stream();
    bench.memset(home, 1, 16, theirs);
    bench.silent();
    bench.memset(view, 1, 16, theirs);
    reported!(bench, Report::Unauthorised { device: 1, .. });
    bench.sync();

    // The same addresses, mapped again, without access for one device.
    ok!(bench, cuMemUnmap(home, GRANULE));
    assert_eq!(bench.map(home, GRANULE, handle), OK);
    assert_eq!(rights(home), [0, 0]);
    assert_eq!(bench.access(home, GRANULE), OK);
    assert_eq!(rights(home), [3, 0]);
    bench.memset(home, 1, 16, theirs);
    reported!(bench, Report::Unauthorised { device: 1, .. });
    // None takes access away.
    let mut none = access(0);
    none.flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE;
    ok!(bench, cuMemSetAccess(home, GRANULE, &none, 1));
    assert_eq!(rights(home), [0, 0]);
}
