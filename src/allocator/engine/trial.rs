//! Trial of virtual memory management: creates, maps, opens and writes one handle before the first allocator is
//! created.
//!
//! Some drivers report support and then refuse one of the calls, for any memory or for exportable memory, or have
//! hardly any address space. Every request, or every large one, would fail there.

use crate::driver::sys::{CUdeviceptr, CUmemGenericAllocationHandle};
use crate::driver::{Context, Device, DriverError, Entered, MemoryProperties, Stream, Trials};

use crate::allocator::config::Policy;
use crate::allocator::physical::address::Addresses;
use crate::allocator::size::PHYSICAL_GRANULE;
use crate::error::Error;
use crate::error::memory::Bytes;

/// Size of the trial: the smallest handle that allocators create.
const BYTES: usize = PHYSICAL_GRANULE as usize;

/// If this much memory is free, an out-of-memory refusal counts as missing support.
const PLENTY: u64 = 32 * PHYSICAL_GRANULE;

/// Name of the feature in errors.
const WHAT: &str = "virtual memory management";

/// Outcome of a trial.
enum Outcome {
    /// Memory with these properties can be used.
    Usable(MemoryProperties),
    /// Undecided, because the device is full.
    Unknown(MemoryProperties),
    Refused(DriverError),
}

/// Returns the properties of the physical memory of an allocator, or `None` if it cannot use virtual memory management.
/// With `Some`, the address space contains addresses that the allocator can lease.
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
        // Reservations that the driver does not release serve the next allocator.
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

/// Reserves address space, then tries the wished properties, then reduced ones. Only a success is remembered, so that a
/// transient fault affects the allocator that met it, and not the whole process.
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
        // The error says nothing about memory.
        Err(_) => return Ok(Outcome::Unknown(wished)),
    };
    let mut refusal = None;
    for properties in attempts {
        let tried = try_memory(&entered, &stream, &properties, addresses);
        let Failure { error, leaks } = match tried {
            Ok(()) => {
                match refusal {
                    None => trials.pass(device.ordinal()),
                    Some(error) => log_reduced(trials, device, &properties, error),
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
                "cannot release {} after a test of virtual memory on device {}: {error}",
                Bytes(PHYSICAL_GRANULE),
                device.ordinal()
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

fn log_reduced(
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
        "device {} refuses memory with the properties that it advertises; the memory of its allocators can be {without}: {error}",
        device.ordinal()
    );
}

/// Whether so much memory is free that a small handle cannot be refused for lack of it.
fn has_plenty(entered: &Entered<'_>) -> bool {
    entered.mem_info().is_ok_and(|info| info.free >= PLENTY)
}

/// Why a trial failed.
struct Failure {
    error: DriverError,
    /// Whether something could not be released.
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

/// Returns the first failure, and whether either of them leaks.
fn first_failure(one: Result<(), Failure>, other: Result<(), Failure>) -> Result<(), Failure> {
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

/// Creates, maps, opens and writes a handle, and releases everything. It waits only for its own fill. A capture of
/// other code forbids none of these calls.
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
            // SAFETY: the handle was created above and is not used any more; if it is still mapped, the memory stays.
            let released = unsafe { entered.mem_release(handle) };
            (
                first_failure(done, released.map_err(Failure::leaking)),
                mapped,
            )
        }
    };
    if !mapped {
        addresses.give_back(at, BYTES as u64);
    }
    done
}

/// Maps, opens and writes a handle at an address, and unmaps it. Also returns whether it is still mapped.
fn try_mapping(
    entered: &Entered<'_>,
    stream: &Stream,
    at: CUdeviceptr,
    handle: CUmemGenericAllocationHandle,
) -> (Result<(), Failure>, bool) {
    // SAFETY: only work of this function uses the range, and it is complete by then.
    let retry_unmap =
        || unsafe { entered.mem_unmap_if_mapped(at, BYTES) }.map_err(Failure::leaking);
    // SAFETY: the range is leased for this trial and empty; the handle has this size.
    if let Err(error) = unsafe { entered.mem_map(at, BYTES, handle) } {
        let unmapped = retry_unmap();
        let mapped = unmapped.is_err();
        return (first_failure(Err(Failure::clean(error)), unmapped), mapped);
    }
    let device = entered.context().device();
    // SAFETY: mapped above.
    let opened = unsafe { entered.set_access(at, BYTES, std::slice::from_ref(device)) };
    let written = opened.and_then(|()| {
        // SAFETY: the range is mapped and accessible, and the stream alive.
        unsafe { entered.memset_d8(at, 0xa5, BYTES, stream.raw()) }
    });
    // A fill that reported an error may still be running.
    if let Err(error) = stream.synchronize().or_else(|_| stream.synchronize()) {
        return (Err(Failure::leaking(written.err().unwrap_or(error))), true);
    }
    let done = written.map_err(Failure::clean);
    // SAFETY: as above.
    let unmapped = match unsafe { entered.mem_unmap(at, BYTES) } {
        Err(error) if !error.is_fatal() => retry_unmap(),
        unmapped => unmapped.map_err(Failure::leaking),
    };
    let mapped = unmapped.is_err();
    (first_failure(done, unmapped), mapped)
}
