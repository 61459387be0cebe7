//! Loggers that call the library again, which holds no lock while it logs.

use std::cell::Cell;
use std::rc::Rc;

use cualloc::allocator::{Contents, Select};
use cualloc::driver::sys::CUstreamCaptureMode;

use crate::common::prelude::*;
use crate::{CALL, collect};

/// The logger of this thread does something until this goes, also with a test that fails.
struct Calling;

impl Calling {
    fn begin(work: impl FnMut(&str) + 'static) -> Calling {
        CALL.set(Some(Box::new(work)));
        Calling
    }
}

impl Drop for Calling {
    fn drop(&mut self) {
        CALL.set(None);
    }
}

/// What the driver refuses is logged by the calls that meet it, and so is what debug modes find. The logger frees a block,
/// allocates, checks everything, retires the stream that the call may be using, and suspends memory.
#[test]
fn a_logger_may_use_the_allocator_that_logs() {
    collect();
    let refused = [
        ("cuMemsetD8Async", 6),
        ("cuMemcpyDtoHAsync_v2", 6),
        ("cuStreamSynchronize", 12),
        ("cuStreamCreate", 2),
        ("cuCtxSetCurrent", 60),
        ("cuThreadExchangeStreamCaptureMode", 30),
        ("cuEventRecord", 4),
        ("cuCtxSynchronize", 2),
    ];
    let settings = [
        "debug=guard+quarantine:1M+poison+leaks",
        "tune.capture_checks=on",
        "",
    ];
    each_simulated(|rig, sim| {
        let mut lines = 0;
        for settings in settings {
            for (call, times) in refused {
                for nth in 1..=times {
                    let code = CUresult::CUDA_ERROR_NOT_PERMITTED;
                    let refusal = FailPlan::call(call, code).unwrap().nth(nth);
                    lines += logs_and_calls_back(rig, sim, settings, refusal);
                }
            }
        }
        assert!(lines > 100, "{lines} lines");
    });
}

/// A program of which something is refused, and whose logger calls back. How many lines it logged.
fn logs_and_calls_back(rig: &Rig, sim: &Simulator, settings: &str, refusal: FailPlan) -> u64 {
    // An earlier refusal may have left the thread in another state.
    let (functions, mut mode) = (
        sim.functions(),
        CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
    );
    // SAFETY: no context is current then, and the mode is a local.
    unsafe {
        let _ = functions.cuCtxSetCurrent.unwrap()(std::ptr::null_mut());
        let _ = functions.cuThreadExchangeStreamCaptureMode.unwrap()(&mut mode);
    }
    let config: Config = settings.parse().unwrap();
    let allocator = rig.allocator_with(config);
    let (stream, raw) = (rig.stream(), RawStream::new(rig));
    let on_raw: Vec<Block> = (1..4)
        .map(|n| allocator.allocate(n * MIB, &raw.borrowed()).unwrap())
        .collect();
    let ours: Vec<Block> = (1..5)
        .map(|n| allocator.allocate(n * 100_000, &stream).unwrap())
        .collect();
    let lines = Rc::new(Cell::new(0));
    let calling = {
        let (lines, allocator, stream) = (Rc::clone(&lines), allocator.clone(), stream.clone());
        let (retired, mut ours) = (raw.borrowed(), ours);
        Calling::begin(move |line| {
            lines.set(lines.get() + 1);
            drop(ours.pop());
            drop(allocator.allocate(MIB, &stream));
            let _ = allocator.check();
            // Not at the first line, but while a call may be using the stream.
            if line.contains("was not released") {
                let _ = allocator.retire(&retired);
            }
            // SAFETY: no work uses the memory until it is back.
            let suspended = unsafe { allocator.suspend(Select::Allocator, Contents::Drop) };
            if suspended.is_ok() {
                let _ = allocator.resume(Select::Allocator);
            }
        })
    };
    sim.fail(refusal);
    let block = allocator.allocate(3 * MIB, &stream);
    if let Ok(block) = &block {
        // SAFETY: the block is longer; a guard is not part of what may be written.
        let _ = unsafe { stream.memset(block.ptr() + 3 * MIB as u64 - 1, 7, 1) };
    }
    let _ = allocator.check();
    drop((block, on_raw));
    let _ = allocator.trim(0);
    let _ = allocator.synchronize();
    drop(calling);
    sim.clear_failures();
    // A resumption may be what was refused.
    let _ = allocator.resume(Select::Allocator);
    match allocator.retire(&raw.borrowed()) {
        Ok(()) | Err(Error::Stream(_)) => raw.destroy(),
        Err(error) => panic!("{error}"),
    }
    allocator.check().unwrap();
    allocator.close().unwrap();
    lines.get()
}

/// A finding is logged while nothing is held back from the logger either.
#[test]
fn a_logger_may_free_when_a_finding_is_logged() {
    collect();
    each_simulated(|rig, _| {
        let config: Config = "debug=guard+quarantine:1M".parse().unwrap();
        let (allocator, [stream]) = rig.scene_with(config);
        let [block, other] = [64, 1000].map(|bytes| allocator.allocate(bytes, &stream).unwrap());
        // SAFETY: the guard is behind the block.
        unsafe { stream.memset(block.ptr() + 64, 7, 1) }.unwrap();
        let mut other = Some(other);
        let calling = Calling::begin(move |_| drop(other.take()));
        assert!(allocator.check().is_err());
        drop((block, calling));
        assert_eq!(allocator.findings().len(), 2);
    });
}

/// What happens once in a process holds up no other thread, and not the logger either: a tool that cannot be attached,
/// and a recording that begins with the first allocator.
#[test]
fn a_logger_may_make_an_allocator_while_the_first_one_is_made() {
    const CHILD: &str = "CUALLOC_TEST_CALLS_BACK";
    if std::env::var_os(CHILD).is_some() {
        collect();
        return only(Policy::Packed, |rig| {
            let (context, lines) = (rig.context.clone(), Rc::new(Cell::new(0)));
            let count = Rc::clone(&lines);
            let calling = Calling::begin(move |_| {
                count.set(count.get() + 1);
                drop(Allocator::with_config(&context, Config::new()).unwrap());
            });
            drop(rig.allocator());
            drop(calling);
            assert!(lines.get() >= 2, "{} lines", lines.get());
        });
    }
    let folder = Folder::new("calls-back");
    let test = "calls_back::a_logger_may_make_an_allocator_while_the_first_one_is_made";
    let mut child = itself(test);
    child
        .env(CHILD, "1")
        .env("CUALLOC_RECORD", folder.file("run.rec"));
    child.env("NVTX_INJECTION64_PATH", folder.file("missing.so"));
    let output = child.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}"
    );
}
