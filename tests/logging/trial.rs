//! Virtual memory that is advertised and refused: what is done instead, and what is said about it.

use std::cell::Cell;

use super::{collect, taken};
use crate::common::prelude::*;
use cualloc::driver::sys::{CUmemAllocationProp, CUmemGenericAllocationHandle, CuFunctions};
use cualloc::driver::{DriverError, MemoryProperties};
use cualloc::sim::Leaks;

/// Every call that the trial of virtual memory can be refused in.
const TRIED: [&str; 5] = [
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemsetD8Async",
];

/// Calls that it gives everything back with.
const GIVING_BACK: [&str; 3] = ["cuStreamSynchronize", "cuMemUnmap", "cuMemRelease"];

/// Codes of a refusal, that of a want of memory among them.
const CODES: [CUresult; 6] = [
    CUresult::CUDA_ERROR_NOT_SUPPORTED,
    CUresult::CUDA_ERROR_NOT_PERMITTED,
    CUresult::CUDA_ERROR_INVALID_VALUE,
    CUresult::CUDA_ERROR_INVALID_DEVICE,
    CUresult::CUDA_ERROR_OUT_OF_MEMORY,
    CUresult::CUDA_ERROR_SYSTEM_NOT_READY,
];

/// A rig on a simulator of its own; on a GPU nothing is refused.
fn simulated(policy: Policy, test: impl Fn(&Rig, &Simulator)) {
    collect();
    only_simulated_on(policy, SimConfig::with_devices(1, 8 << 30), |rig, sim| {
        taken();
        test(rig, sim);
    });
}

/// Runs a test for each call of the trial and each code that it is refused with.
fn each_refusal(policy: Policy, test: impl Fn(&Rig, &Simulator, &'static str, CUresult)) {
    for call in TRIED {
        for code in CODES {
            simulated(policy, |rig, sim| {
                refuse(sim, call, code);
                test(rig, sim, call, code);
            });
        }
    }
}

/// Refuses a call from now on.
fn refuse(sim: &Simulator, call: &str, code: CUresult) {
    sim.fail(FailPlan::call(call, code).unwrap().times(u64::MAX));
}

fn make(rig: &Rig) -> Result<Allocator, Error> {
    // Without headroom nothing asks what the device has free.
    let config = Config::new().headroom(0).policy(rig.policy);
    Allocator::with_config(&rig.context, config)
}

fn nothing_is_said() {
    let lines = taken();
    assert!(lines.is_empty(), "{lines:?}");
}

/// Blocks of all sizes keep what is written to them, alone and passed on, and everything goes back.
fn works(rig: &Rig, allocator: &Allocator) {
    let [a, b] = rig.streams();
    for round in 0..2 {
        let mut blocks: Vec<_> = [512, 40 * KIB, MIB, 3 * MIB, 12 * MIB, 24 * MIB]
            .map(|bytes| allocator.allocate(bytes, &a).unwrap())
            .into();
        for (block, word) in blocks.iter().zip(1..) {
            rig.stamp(block.ptr(), 512, word + 10 * round, &a);
        }
        let at_end = blocks.iter().zip(1..);
        for (block, word) in at_end {
            assert_eq!(rig.mismatches(block.ptr(), 512, word + 10 * round, &a), 0);
        }
        blocks[3].record_stream(&b).unwrap();
        blocks.truncate(5);
        drop(blocks);
        let other = allocator.allocate(12 * MIB, &b).unwrap();
        rig.stamp(other.ptr(), 64 * KIB, 99, &b);
        assert_eq!(rig.mismatches(other.ptr(), 64 * KIB, 99, &b), 0);
        allocator.check().unwrap();
    }
    allocator.synchronize().unwrap();
    allocator.trim(0).unwrap();
    assert_eq!(allocator.stats().all.reserved.current, 0);
}

/// Refused in whichever call and with whichever code: the classic policy, with one warning for the device,
/// and nothing is left of the trial.
#[test]
fn refused_virtual_memory_is_the_classic_policy_with_one_warning() {
    each_refusal(Policy::Auto, |rig, sim, call, code| {
        let before = sim.leaks();
        let first = make(rig).unwrap();
        assert_eq!(sim.leaks(), before, "{call}: {code:?}");
        assert_eq!(first.policy(), Policy::Classic);
        assert_eq!(
            first.memory_properties(),
            MemoryProperties::plain(first.context().device())
        );
        let lines = taken();
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains(call), "{lines:?}");
        assert!(lines[0].contains("classic"), "{lines:?}");
        works(rig, &first);
        let second = make(rig).unwrap();
        assert_eq!(second.policy(), Policy::Classic);
        nothing_is_said();
        rig.close(&first);
        rig.close(&second);
        // A refusal is not for ever: a driver may have been short of something.
        sim.clear_failures();
        let third = make(rig).unwrap();
        assert_eq!(third.policy(), Policy::Packed);
        rig.close(&third);
    });
}

/// Where the packed policy is asked for, and no other, the error names the call.
#[test]
fn refused_virtual_memory_is_an_error_if_requested() {
    each_refusal(Policy::Packed, |rig, sim, call, code| {
        let before = sim.leaks();
        let error = make(rig).unwrap_err();
        assert_eq!(sim.leaks(), before, "{call}: {code:?}");
        assert_eq!(error.driver_error(), Some(DriverError::new(call, code)));
        assert_matches!(error, Error::DeviceRefused { .. });
        assert!(chain(&error).contains(call), "{}", chain(&error));
        sim.clear_failures();
        let allocator = make(rig).unwrap();
        works(rig, &allocator);
        rig.close(&allocator);
    });
    // With peers there is nothing to fall back to.
    collect();
    let rig = Rig::new(Policy::Auto, SimConfig::with_devices(2, 8 << 30));
    let Some(sim) = rig.sim() else { return };
    refuse(sim, "cuMemMap", CODES[0]);
    let config = Config::new().peers([1]);
    let refused = Allocator::with_config(&rig.context, config);
    assert_matches!(refused, Err(Error::NotSupported { .. }));
}

/// A device that is full says nothing about virtual memory: packed, and the next allocator asks again.
#[test]
fn a_full_device_stays_packed() {
    simulated(Policy::Auto, |rig, sim| {
        // All of it but 1 MiB, then so much that a refusal is still believable.
        for left in [1 << 20, 63 << 20] {
            sim.take_memory(0, (8 << 30) - left);
            if left > 2 << 20 {
                refuse(sim, "cuMemCreate", CUresult::CUDA_ERROR_OUT_OF_MEMORY);
            }
            let tries = rig.calls("cuMemCreate");
            let allocator = make(rig).unwrap();
            assert_eq!(rig.calls("cuMemCreate") - tries, 1);
            assert_eq!(allocator.policy(), Policy::Packed);
            let stream = rig.stream();
            let error = allocator.allocate(4 * MIB, &stream).unwrap_err();
            assert!(error.is_out_of_memory(), "{error:?}");
            sim.clear_failures();
            sim.take_memory(0, 0);
            works(rig, &allocator);
            rig.close(&allocator);
        }
        nothing_is_said();
        let tries = rig.calls("cuMemCreate");
        rig.close(&make(rig).unwrap());
        rig.close(&make(rig).unwrap());
        assert_eq!(rig.calls("cuMemCreate") - tries, 1);
    });
}

/// Every single call that making an allocator consists of fails once: it is made, or not and says why,
/// and nothing is left of it either way.
#[test]
fn a_failing_trial_leaves_nothing_behind() {
    for policy in [Policy::Auto, Policy::Packed] {
        for code in [CODES[0], CUresult::CUDA_ERROR_OUT_OF_MEMORY] {
            for times in [1, 2] {
                let whole = Cell::new(false);
                for nth in 1.. {
                    simulated(policy, |rig, sim| {
                        let before = sim.leaks();
                        sim.fail(FailPlan::any(code).nth(nth).times(times));
                        let made = make(rig);
                        let left = sim.clear_failures() > 0;
                        whole.set(left && made.is_ok());
                        eprintln!("{policy:?}, {code:?}, {times} from {nth}: {made:?}");
                        match made {
                            Ok(allocator) => {
                                works(rig, &allocator);
                                allocator.close().unwrap();
                            }
                            Err(error) => assert!(error.driver_error().is_some(), "{error:?}"),
                        }
                        // What is not given back is logged, and is not tried twice. A stream whose destruction was not
                        // even attempted has been destroyed by a later call.
                        let lines = taken();
                        let logged = |call: &str| lines.iter().any(|line| line.contains(call));
                        if times == 1 {
                            let mut left = sim.leaks();
                            for (call, left, before) in [
                                ("cuStreamDestroy", &mut left.streams, before.streams),
                                ("cuMemRelease", &mut left.handles, before.handles),
                                (
                                    "cuMemAddressFree",
                                    &mut left.reservations,
                                    before.reservations,
                                ),
                            ] {
                                if logged(call) && *left > before {
                                    *left -= 1;
                                }
                            }
                            if logged("cuMemRelease") {
                                left.bytes = before.bytes;
                            }
                            // It may be less: what was owed is paid.
                            left.streams = left.streams.max(before.streams);
                            assert_eq!(left, before);
                        }
                    });
                    // Without a simulator nothing is tried at all.
                    if whole.get() || on_cuda() {
                        break;
                    }
                }
            }
        }
    }
}

/// Memory that the driver refuses to release is lost and reported; nothing is created over it.
#[test]
fn memory_that_a_trial_cannot_release_is_reported() {
    for call in GIVING_BACK {
        simulated(Policy::Auto, |rig, sim| {
            refuse(sim, call, CODES[0]);
            let allocator = make(rig).unwrap();
            sim.clear_failures();
            assert_eq!(allocator.policy(), Policy::Classic);
            let lines = taken();
            let released = usize::from(call == "cuMemRelease");
            assert_eq!(lines.len(), 2 + released, "{lines:?}");
            assert!(lines.iter().all(|line| line.contains(call)), "{lines:?}");
            let leaks = sim.leaks();
            // The rig has no stream of its own yet, and that of the trial was destroyed.
            assert_eq!(leaks.streams, 0);
            assert!(
                leaks.bytes <= 2 << 20 && leaks.reservations <= 1,
                "{leaks:?}"
            );
            works(rig, &allocator);
            allocator.close().unwrap();
        });
    }
}

thread_local! {
    static TRUE_CREATE: Cell<CuFunctions> = Cell::new(CuFunctions::default());
    /// The driver's answer for memory with these properties.
    static REFUSED: Cell<fn(&CUmemAllocationProp) -> Option<CUresult>> = const { Cell::new(|_| None) };
}

/// A driver that makes no memory of some properties.
fn refusing(
    functions: CuFunctions,
    refused: fn(&CUmemAllocationProp) -> Option<CUresult>,
) -> CuFunctions {
    unsafe extern "C" fn create(
        handle: *mut CUmemGenericAllocationHandle,
        bytes: usize,
        properties: *const CUmemAllocationProp,
        flags: u64,
    ) -> CUresult {
        // SAFETY: as the caller's.
        if let Some(code) = REFUSED.get()(unsafe { &*properties }) {
            return code;
        }
        // SAFETY: the caller's arguments, to the function that stood here.
        unsafe { TRUE_CREATE.get().cuMemCreate.unwrap()(handle, bytes, properties, flags) }
    }
    TRUE_CREATE.set(functions);
    REFUSED.set(refused);
    CuFunctions {
        cuMemCreate: Some(create),
        ..functions
    }
}

/// A driver that says it can export memory and makes none that can be.
fn refusing_exports(functions: CuFunctions) -> CuFunctions {
    refusing(functions, |properties| {
        let exported = properties.requestedHandleTypes.0 != 0;
        exported.then_some(CUresult::CUDA_ERROR_NOT_SUPPORTED)
    })
}

/// The same for registration with network cards.
fn refusing_cards(functions: CuFunctions) -> CuFunctions {
    refusing(functions, |properties| {
        let registered = properties.allocFlags.gpuDirectRDMACapable != 0;
        registered.then_some(CUresult::CUDA_ERROR_NOT_PERMITTED)
    })
}

/// Memory that cannot be exported is better than none: packed, said once, and exports are refused.
#[test]
fn handles_are_not_exportable_if_only_exports_are_refused() {
    collect();
    for policy in [Policy::Auto, Policy::Packed] {
        for (install, exports) in [
            (refusing_exports as fn(CuFunctions) -> CuFunctions, false),
            (refusing_cards, true),
        ] {
            let Some(rig) = Rig::behind(policy, install) else {
                return;
            };
            taken();
            let allocator = make(&rig).unwrap();
            let lines = taken();
            assert_eq!(lines.len(), 1, "{lines:?}");
            assert!(lines[0].contains("cuMemCreate"), "{lines:?}");
            assert_eq!(allocator.policy(), Policy::Packed);
            let properties = allocator.memory_properties();
            assert_eq!(properties.export.0 != 0, exports);
            assert!(!properties.gpu_direct_rdma);
            works(&rig, &allocator);
            let stream = rig.stream();
            let request = Request::new(MIB).single_handle();
            let block = allocator.allocate_with(request, &stream).unwrap();
            let guard = allocator.guard(block.ptr(), MIB as u64).unwrap();
            let handle = guard.segments()[0].handle.unwrap();
            let entered = rig.context.enter().unwrap();
            // SAFETY: the guard keeps the handle.
            let exported = unsafe { entered.export_fd(handle) };
            match exported {
                Ok(_) => assert!(exports),
                Err(error) => {
                    assert!(!exports);
                    assert_eq!(error.call(), "cuMemExportToShareableHandle");
                }
            }
            drop((guard, block));
            rig.close(&allocator);
            let second = make(&rig).unwrap();
            assert_eq!(second.memory_properties(), properties);
            rig.close(&second);
            nothing_is_said();
            assert!(rig.sim().is_some_and(|sim| {
                Leaks {
                    streams: 0,
                    ..sim.leaks()
                }
                .is_empty()
                    || exports
            }));
            rig.assert_clean();
        }
    }
}

/// What a trial costs, once for a device: ten calls beside those that make the context current. No
/// figure of the allocator shows it.
#[test]
fn a_trial_makes_ten_calls_per_process() {
    simulated(Policy::Auto, |rig, _| {
        let mut made = Vec::new();
        for expected in [1, 0] {
            let before = rig.driver.calls();
            let allocator = make(rig).unwrap();
            let calls = rig.driver.calls().since(&before);
            let mut count = 0;
            for (name, calls) in calls.iter() {
                let around = [
                    "cuCtxSetCurrent",
                    "cuThreadExchangeStreamCaptureMode",
                    "cuDeviceGetAttribute",
                    "cuDeviceTotalMem_v2",
                ];
                if !around.contains(&name) {
                    assert_eq!(calls, 1, "{name}");
                    count += 1;
                }
            }
            assert_eq!(count, 10 * expected);
            let stats = allocator.stats();
            assert_eq!(stats.all.reserved.peak, 0);
            assert_eq!(stats.all.segments.peak, 0);
            made.push(allocator);
        }
        for allocator in made {
            rig.close(&allocator);
        }
        nothing_is_said();
    });
}
