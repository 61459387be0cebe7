//! Whether a device has the virtual memory that it advertises: one handle is created, mapped, opened and
//! written before the first allocator is made.
//!
//! Some drivers say that they support it and then refuse one of the calls, for any memory or for memory that
//! can be exported, or have hardly any address space. Every request would fail there, or every large one.

use crate::driver::sys::{CUdeviceptr, CUmemGenericAllocationHandle};
use crate::driver::{Context, Device, DriverError, Entered, MemoryProperties, Stream, Trials};

use crate::allocator::config::Policy;
use crate::allocator::physical::address::Addresses;
use crate::allocator::size::PHYSICAL_GRANULE;
use crate::error::Error;
use crate::error::memory::Bytes;

/// What is tried: the smallest handle that allocators make.
const BYTES: usize = PHYSICAL_GRANULE as usize;

/// With so much memory free a refusal for want of memory is a refusal.
const PLENTY: u64 = 32 * PHYSICAL_GRANULE;

/// What is missing where it is not there or refused.
const WHAT: &str = "virtual memory management";

/// What a trial came to.
enum Outcome {
    /// Memory with these properties can be used.
    Usable(MemoryProperties),
    /// Nothing can be said: the device is full.
    Unknown(MemoryProperties),
    Refused(DriverError),
}

/// What the physical memory of an allocator is made like; `None` if it has to do without. Otherwise the address space
/// has some that the allocator can lease.
pub(crate) fn memory_of(
    context: &Context,
    policy: Policy,
    addresses: &Addresses,
) -> Result<Option<MemoryProperties>, Error> {
    let device = context.device();
    if !device.supports_vmm()? {
        return match policy {
            Policy::Packed => Err(Error::NotSupported { what: WHAT }),
            _ => Ok(None),
        };
    }
    let wished = MemoryProperties::for_device(device)?;
    let trials = context.driver().trials();
    let outcome = outcome(context, wished, trials, addresses).map_err(failed);
    if !matches!(outcome, Ok(Outcome::Usable(_) | Outcome::Unknown(_))) {
        // Reservations that the driver does not take back serve the next allocator.
        let _returned = context
            .enter()
            .map(|entered| addresses.return_idle(&entered));
    }
    let cause = match outcome? {
        Outcome::Usable(properties) | Outcome::Unknown(properties) => return Ok(Some(properties)),
        Outcome::Refused(cause) => cause,
    };
    let what = match cause.call() {
        "cuMemAddressReserve" => "address space",
        _ => WHAT,
    };
    if policy == Policy::Packed {
        return Err(Error::DeviceRefused { what, cause });
    }
    if trials.first_refusal(device.ordinal()) {
        log::warn!(
            "device {} refuses {what}, using the classic policy: {cause}",
            device.ordinal()
        );
    }
    Ok(None)
}

fn failed(error: DriverError) -> Error {
    if error.is_fatal() {
        Error::ContextLost(error)
    } else {
        Error::Driver(error)
    }
}

/// Reserves address space, then tries the properties that are wished for, then with less. Only what went well is
/// remembered: a fault that passes costs the allocator that met it something, and not the process.
fn outcome(
    context: &Context,
    wished: MemoryProperties,
    trials: &Trials,
    addresses: &Addresses,
) -> Result<Outcome, DriverError> {
    let device = context.device();
    let entered = context.enter()?;
    match addresses.prepare(&entered) {
        Err(error) if error.is_fatal() => return Err(error),
        Err(error) => return Ok(Outcome::Refused(error)),
        Ok(()) if trials.passed(device.ordinal()) => return Ok(Outcome::Usable(wished)),
        Ok(()) => {}
    }
    let mut attempts = vec![wished];
    for less in [
        MemoryProperties {
            gpu_direct_rdma: false,
            ..wished
        },
        MemoryProperties::plain(device),
    ] {
        if !attempts.contains(&less) {
            attempts.push(less);
        }
    }
    let stream = match Stream::new(context) {
        Ok(stream) => stream,
        Err(error) if error.is_fatal() => return Err(error),
        // No word about memory.
        Err(_) => return Ok(Outcome::Unknown(wished)),
    };
    let mut refusal = None;
    for properties in attempts {
        let tried = try_memory(&entered, &stream, &properties, addresses);
        let Failure { error, leaks } = match tried {
            Ok(()) => {
                match refusal {
                    None => trials.pass(device.ordinal()),
                    Some(error) => say_reduced(trials, device, &properties, error),
                }
                return Ok(Outcome::Usable(properties));
            }
            Err(failure) => failure,
        };
        if error.is_fatal() {
            return Err(error);
        }
        if leaks {
            log::warn!(
                "device {} does not release {} that virtual memory was tested with: {error}",
                device.ordinal(),
                Bytes(PHYSICAL_GRANULE)
            );
            return Ok(Outcome::Refused(error));
        }
        if error.is_out_of_memory() && !has_plenty(&entered) {
            return Ok(Outcome::Unknown(wished));
        }
        refusal = Some(error);
    }
    Ok(refusal.map_or(Outcome::Unknown(wished), Outcome::Refused))
}

fn say_reduced(
    trials: &Trials,
    device: &Device,
    properties: &MemoryProperties,
    error: DriverError,
) {
    if !trials.first_refusal(device.ordinal()) {
        return;
    }
    let without = if *properties == MemoryProperties::plain(device) {
        "neither exported nor registered with network cards"
    } else {
        "not registered with network cards"
    };
    log::warn!(
        "device {} refuses memory with the properties that it advertises; memory of allocators can be {without}: {error}",
        device.ordinal()
    );
}

/// Whether the device has so much memory that a small handle cannot be refused for want of it.
fn has_plenty(entered: &Entered<'_>) -> bool {
    entered.mem_info().is_ok_and(|info| info.free >= PLENTY)
}

/// Why a trial failed.
struct Failure {
    error: DriverError,
    /// Something of it could not be given back.
    leaks: bool,
}

impl Failure {
    fn clean(error: DriverError) -> Self {
        let leaks = false;
        Failure { error, leaks }
    }

    fn leaking(error: DriverError) -> Self {
        let leaks = true;
        Failure { error, leaks }
    }
}

/// The first thing that failed, and whether anything of both leaks.
fn both(one: Result<(), Failure>, other: Result<(), Failure>) -> Result<(), Failure> {
    match (one, other) {
        (Err(one), Err(other)) => Err(Failure {
            error: if other.error.is_fatal() {
                other.error
            } else {
                one.error
            },
            leaks: one.leaks || other.leaks,
        }),
        (one, other) => one.and(other),
    }
}

/// Creates, maps, opens and writes a handle, and gives everything back. Waits for its own fill alone. None of
/// the calls is forbidden by a capture of others.
fn try_memory(
    entered: &Entered<'_>,
    stream: &Stream,
    properties: &MemoryProperties,
    addresses: &Addresses,
) -> Result<(), Failure> {
    let at = addresses.lease(entered, BYTES as u64);
    let at = at.map_err(Failure::clean)?;
    let (done, mapped) = match entered.mem_create(BYTES, properties) {
        Err(error) => (Err(Failure::clean(error)), false),
        Ok(handle) => {
            let (done, mapped) = try_mapping(entered, stream, at, handle);
            // SAFETY: made above, and not used any more; where it is still mapped the memory stays.
            let released = unsafe { entered.mem_release(handle) };
            (both(done, released.map_err(Failure::leaking)), mapped)
        }
    };
    if !mapped {
        addresses.give_back(at, BYTES as u64);
    }
    done
}

/// Maps, opens and writes a handle at an address, and unmaps it. Also says whether it is mapped still.
fn try_mapping(
    entered: &Entered<'_>,
    stream: &Stream,
    at: CUdeviceptr,
    handle: CUmemGenericAllocationHandle,
) -> (Result<(), Failure>, bool) {
    // SAFETY: no work but that of this function uses the range, and it is complete by then.
    let unmap_again =
        || unsafe { entered.mem_unmap_if_mapped(at, BYTES) }.map_err(Failure::leaking);
    // SAFETY: the range is leased for this and holds nothing; the handle is that large.
    if let Err(error) = unsafe { entered.mem_map(at, BYTES, handle) } {
        let unmapped = unmap_again();
        let mapped = unmapped.is_err();
        return (both(Err(Failure::clean(error)), unmapped), mapped);
    }
    let device = entered.context().device();
    // SAFETY: mapped above.
    let opened = unsafe { entered.set_access(at, BYTES, std::slice::from_ref(device)) };
    let written = opened.and_then(|()| {
        // SAFETY: the range is mapped and open, and the stream alive.
        unsafe { entered.memset_d8(at, 0xa5, BYTES, stream.raw()) }
    });
    // Also a fill that reported an error may be under way.
    if let Err(error) = stream.synchronize().or_else(|_| stream.synchronize()) {
        return (Err(Failure::leaking(written.err().unwrap_or(error))), true);
    }
    let done = written.map_err(Failure::clean);
    // SAFETY: as above.
    let unmapped = match unsafe { entered.mem_unmap(at, BYTES) } {
        Err(error) if !error.is_fatal() => unmap_again(),
        unmapped => unmapped.map_err(Failure::leaking),
    };
    let mapped = unmapped.is_err();
    (both(done, unmapped), mapped)
}
