//! Programs from a seed.

use cualloc::Policy;
use cualloc::allocator::Waits;
use cualloc::driver::sys::CUresult;

use super::graphs;
use super::rng::Rng;
use super::table::Fault;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Allocate,
    AllocateAligned,
    AllocatePlaced,
    AllocateAtHand,
    AllocateRaw,
    Surge,
    Free,
    Work,
    WorkElsewhere,
    Complete,
    Observe,
    NewStream,
    Retire,
    Leave,
    Trim,
    Synchronise,
    Limit,
    Mark,
    Guard,
    Unguard,
    Look,
    Garbage,
    BeginCapture,
    EndCapture,
    CaptureInside,
    OtherInside,
    Hook,
    Stash,
    Reopen,
    Abandon,
    Current,
    LeaveContext,
    Buffer,
    BufferWork,
    Column,
    Pooled,
    Lease,
    Resource,
    Native,
    Exchange,
    Share,
    Drop,
}

pub type Step = super::common::program::Step<Act>;

/// What a program has.
#[derive(Clone, Debug)]
pub struct Setup {
    pub seed: u64,
    pub policy: Policy,
    pub limit: Option<u64>,
    pub waits: Waits,
    pub views: bool,
    pub dense: bool,
    pub handle: Option<u64>,
    pub streams: usize,
    pub specials: bool,
    pub allocators: usize,
    pub contexts: bool,
    pub devices: usize,
    pub lag: Option<u64>,
    pub capture_checks: bool,
    pub broken_aliasing: bool,
    pub fault: Option<Fault>,
    /// Largest requests, in bytes.
    pub largest: u64,
    /// Requests are large for the limit, blocks are used immediately, and alignments are wide.
    pub tight: bool,
    pub frees_may_wait: bool,
    /// Streams that the allocator may keep are named by their handles, too.
    pub mixed: bool,
}

impl Setup {
    /// Whether calls fail because the driver takes a handle for invalid.
    pub fn has_invalid_handles(&self) -> bool {
        let code = self.fault.map(|fault| fault.code);
        code == Some(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Faults {
    None,
    One(&'static str),
    Turns,
    /// The driver takes a handle for invalid, in one of [`HANDLES`].
    Handles,
}

/// A kind of programs.
#[derive(Clone, Copy, Debug)]
pub struct Profile {
    pub name: &'static str,
    /// Of all programs, in parts of 1000.
    pub share: u64,
    pub steps: usize,
    pub acts: &'static [&'static [(Act, u32)]],
    pub streams: (u64, u64),
    pub tight: bool,
    pub faults: Faults,
    pub packed_only: bool,
    pub wide: bool,
    /// Captures make the whole process watchful, so these come last.
    pub captures: bool,
    /// Steps of `graphs.rs`.
    pub graphs: bool,
}

/// What fails in turn: every call that the allocator, or what stands on it, makes once it is there.
const FAILING: &str = "
    cuStreamWaitEvent cuEventRecord cuEventCreate cuEventQuery cuEventSynchronize cuEventDestroy_v2
    cuMemCreate cuMemMap cuMemSetAccess cuMemUnmap cuMemRelease cuMemAddressReserve cuMemAddressFree
    cuMemAlloc_v2 cuMemFree_v2 cuMemGetInfo_v2 cuCtxGetCurrent cuCtxSetCurrent cuCtxSynchronize
    cuCtxGetDevice cuCtxGetId cuStreamGetId cuStreamGetCtx cuStreamGetDevice cuStreamIsCapturing
    cuStreamQuery cuStreamSynchronize cuStreamCreate cuStreamDestroy_v2 cuThreadExchangeStreamCaptureMode
    cuMemsetD8Async cuMemsetD32Async cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoDAsync_v2
    cuLaunchKernel cuModuleLoadData cuModuleUnload cuModuleGetFunction cuMemGetAllocationGranularity
    cuMemRetainAllocationHandle cuPointerGetAttribute cuMemHostAlloc cuMemFreeHost
    cuMemHostRegister_v2 cuMemHostUnregister
    cuStreamCreateWithPriority cuStreamGetCaptureInfo_v2 cuMemAllocFromPoolAsync cuMemFreeAsync
    cuMemPoolCreate cuMemPoolDestroy cuMemPoolTrimTo cuMemPoolSetAttribute cuMemPoolGetAttribute
    cuMemPoolExportToShareableHandle cuMemPoolImportFromShareableHandle cuMemPoolExportPointer
    cuMemExportToShareableHandle cuMemImportFromShareableHandle cuMemGetAllocationPropertiesFromHandle
";

/// The calls that may find a handle invalid, most often what another stream waits for.
const HANDLES: &str = "
    cuStreamWaitEvent cuEventQuery cuStreamWaitEvent cuEventSynchronize cuStreamWaitEvent cuEventRecord
    cuStreamWaitEvent cuCtxSynchronize cuStreamWaitEvent cuCtxSetCurrent cuStreamWaitEvent
    cuStreamIsCapturing
";

const CODES: &[CUresult] = &[
    CUresult::CUDA_ERROR_OUT_OF_MEMORY,
    CUresult::CUDA_ERROR_OUT_OF_MEMORY,
    CUresult::CUDA_ERROR_INVALID_VALUE,
    CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
    CUresult::CUDA_ERROR_NOT_SUPPORTED,
];

/// A name of a list, which begins again after its end.
pub fn nth(list: &'static str, number: u64) -> Option<&'static str> {
    let count = list.split_whitespace().count() as u64;
    list.split_whitespace().nth((number % count) as usize)
}

/// The program of a number.
pub fn generate(
    profile: &Profile,
    number: u64,
    without: &dyn Fn(&str) -> bool,
) -> (Setup, Vec<Step>) {
    let mut rng = Rng::new(number.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ profile.share);
    let policy = match profile.packed_only || !rng.chance(35) || without("classic") {
        true => Policy::Packed,
        false => Policy::Classic,
    };
    let fault = match profile.faults {
        Faults::None => None,
        Faults::One(name) => Some(name),
        Faults::Turns if profile.graphs => nth(graphs::FAILING, number),
        Faults::Turns => nth(FAILING, number),
        Faults::Handles => nth(HANDLES, number),
    };
    let permille = match profile.faults {
        Faults::One(_) => rng.pick(&[200, 400, 400]),
        Faults::Handles => rng.pick(&[10, 50, 200]),
        _ => rng.pick(&[10, 50, 100, 200, 400]),
    };
    let code = match rng.chance(15) && !without("900") {
        true => CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        false => rng.pick(CODES),
    };
    let code = match profile.faults {
        Faults::Handles => CUresult::CUDA_ERROR_INVALID_HANDLE,
        _ => code,
    };
    // A capture forbids a call before it is executed.
    let executed = code != CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        && !without("executed")
        && (without("refused") || rng.chance(50));
    let (low, high) = profile.streams;
    let limit = match profile.tight {
        true => Some(rng.pick(&[12_u64, 20, 32, 48, 64]) << 20),
        false => rng.chance(30).then(|| (16 + rng.below(200)) << 20),
    };
    let packed = policy == Policy::Packed;
    let views = rng.chance(60);
    let setup = Setup {
        seed: number,
        policy,
        limit,
        waits: match number % 5 {
            0 => Waits::Always,
            1 => Waits::Never,
            _ => Waits::Scarce,
        },
        views: match profile.tight {
            true => rng.chance(45) || !packed,
            false => views || !packed,
        },
        dense: packed && rng.chance(40),
        handle: (rng.chance(25) && packed && !profile.tight)
            .then(|| rng.pick(&[2 << 20, 4 << 20, 8 << 20])),
        streams: (low + rng.below(high - low + 1)) as usize,
        specials: !profile.tight && rng.chance(50),
        allocators: match profile.wide {
            true => 2 + rng.index(2),
            false => 1 + usize::from(rng.chance(8)),
        },
        contexts: profile.wide,
        devices: 1 + usize::from(profile.wide && rng.chance(60)),
        lag: rng.chance(25).then(|| rng.pick(&[1, 5, 30])),
        capture_checks: rng.chance(20),
        broken_aliasing: rng.chance(4),
        fault: fault.map(|name| Fault {
            name,
            permille,
            code,
            executed,
        }),
        largest: match limit {
            Some(limit) => limit * 3 / 4,
            None => 48 << 20,
        },
        frees_may_wait: without("classic-free"),
        mixed: !without("mixed"),
        tight: profile.tight,
    };
    let acts = profile.acts.concat();
    let mut steps = Vec::with_capacity(profile.steps);
    while steps.len() < profile.steps {
        let step = Step::draw(&acts, &mut rng);
        if !without(&format!("{:?}", step.act)) {
            steps.push(step);
        }
    }
    (setup, steps)
}

/// The bytes of a request under a tight limit: what may grow beside used memory, and what fits in gaps.
pub fn tight_size(a: u32, b: u32, largest: u64) -> usize {
    let (a, b) = (u64::from(a), u64::from(b));
    let bytes = match a % 100 {
        0..8 => 1 + b % (64 << 10),
        8..30 => (64 << 10) + b % (960 << 10),
        30..45 => (1 << 20) + b % (3 << 20),
        45..75 => (1 << 20) + b % (largest / 2),
        _ => largest / 4 + b % (largest * 3 / 4),
    };
    bytes as usize
}

/// The bytes of a request, mostly of one of a few kinds.
pub fn size(a: u32, b: u32, largest: u64) -> usize {
    let (a, b) = (u64::from(a), u64::from(b));
    let bytes = match a % 100 {
        0..20 => 1 + b % (4 << 10),
        20..38 => 1 + b % (64 << 10),
        38..48 => (64 << 10) + b % (64 << 10),
        48..62 => 1 + b % (1 << 20),
        62..72 => 1 + b % (4 << 20),
        72..82 => (1 + b % 8) << 20,
        82..94 => 1 + b % (largest / 2),
        _ => 1 + b % largest,
    };
    bytes as usize
}
