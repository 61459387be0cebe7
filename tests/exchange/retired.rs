//! Streams of others that are retired and destroyed while memory that was exchanged on them lives on.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use crate::common::*;
use crate::foreign::{Plain, lent, returned};
use crate::shapes::Theirs;
use cualloc::allocator::Allocator;
use cualloc::driver::Stream;
use cualloc::error::StreamMisuse;
use cualloc::exchange::*;
use cualloc::pool::{DriverPool, DriverPoolConfig};
use cualloc::sim::Simulator;
use cualloc::{DeviceBuffer, Error, PinnedBuffer};

static DELETED: AtomicU64 = AtomicU64::new(0);

/// The result of an exchange on a foreign stream.
type Left = Box<dyn Any>;

/// An exchange with `theirs`, a stream of others, in memory at `at` if it is imported.
type Exchange = fn(&Rig, &Allocator, theirs: &Stream, at: u64) -> Left;

fn imported(at: u64, on: &Stream, producer: Peer) -> Tensor {
    let theirs = Theirs::new(at, &[1024], &[], &DELETED);
    theirs.offered_by(on, producer).unwrap()
}

fn pinned(rig: &Rig) -> Tensor {
    let host = PinnedBuffer::from_slice(&rig.context, &[1u32; 1024]).unwrap();
    Tensor::from_pinned(host, &[1024]).unwrap()
}

/// Exchanges of memory that no allocator tracks.
const UNTRACKED: [(&str, Exchange); 8] = [
    ("page-locked memory is lent", |rig, _, theirs, _| {
        let tensor = pinned(rig);
        Box::new((lent(&tensor, true, &Peer::on(theirs)), tensor))
    }),
    ("page-locked memory is recorded", |rig, _, theirs, _| {
        let tensor = pinned(rig);
        tensor.record_stream(theirs).unwrap();
        Box::new(tensor)
    }),
    ("page-locked memory comes back", |rig, _, theirs, _| {
        let tensor = pinned(rig);
        Box::new((returned(&tensor, true, &Peer::on(theirs), theirs), tensor))
    }),
    ("the producer's stream", |rig, _, theirs, at| {
        Box::new(imported(at, &rig.stream(), Peer::on(theirs)))
    }),
    ("the importing stream", |rig, _, theirs, at| {
        Box::new(imported(at, theirs, Peer::on(&rig.stream())))
    }),
    (
        "the importing stream of an unknown producer",
        |_, _, theirs, at| Box::new(imported(at, theirs, ordered())),
    ),
    ("imported memory is recorded", |rig, _, theirs, at| {
        let tensor = imported(at, &rig.stream(), ordered());
        tensor.record_stream(theirs).unwrap();
        Box::new(tensor)
    }),
    ("imported memory is lent on", |rig, _, theirs, at| {
        let tensor = imported(at, &rig.stream(), ordered());
        Box::new((lent(&tensor, false, &Peer::on(theirs)), tensor))
    }),
];

/// Exchanges of memory that an allocator, or a pool of the driver, frees in the order of streams.
const TRACKED: [(&str, Exchange); 4] = [
    (
        "an allocator's memory is lent",
        |rig, allocator, theirs, _| {
            let tensor = Tensor::zeroed(allocator, DType::F32, &[1024], &rig.stream()).unwrap();
            Box::new((lent(&tensor, true, &Peer::on(theirs)), tensor))
        },
    ),
    (
        "an allocator's memory comes back",
        |rig, allocator, theirs, _| {
            let tensor = Tensor::zeroed(allocator, DType::F32, &[1024], &rig.stream()).unwrap();
            Box::new((returned(&tensor, true, &Peer::on(theirs), theirs), tensor))
        },
    ),
    (
        "an allocator's memory comes back and is kept alone",
        |rig, allocator, theirs, _| {
            let tensor = Tensor::zeroed(allocator, DType::F32, &[1024], &rig.stream()).unwrap();
            Box::new(returned(&tensor, false, &Peer::on(theirs), theirs))
        },
    ),
    ("a driver's pool's memory is lent", |rig, _, theirs, _| {
        let pool = DriverPool::new(&rig.context, DriverPoolConfig::new()).unwrap();
        let tensor = Tensor::zeroed(&pool, DType::F32, &[1024], &rig.stream()).unwrap();
        Box::new((lent(&tensor, true, &Peer::on(theirs)), tensor))
    }),
];

fn exchanges() -> impl Iterator<Item = &'static (&'static str, Exchange)> {
    UNTRACKED.iter().chain(&TRACKED)
}

/// As the owner of a stream ends it. An allocator that does not know the stream says so.
fn retire(allocator: &Allocator, raw: &RawStream, by_handle: bool) {
    let retired = match by_handle {
        // SAFETY: the stream is alive.
        true => unsafe { allocator.retire_raw(raw.raw()) },
        false => allocator.retire(&raw.borrowed()),
    };
    match retired {
        Ok(()) | Err(Error::Stream(StreamMisuse::Unknown { .. })) => {}
        Err(error) => panic!("{error}"),
    }
}

fn reported(sim: &Simulator) -> Vec<String> {
    let reports = sim.take_reports().into_iter();
    reports.map(|report| report.to_string()).collect()
}

/// E5: a stream that was retired may be destroyed: the end of the memory waits for its work without its handle.
#[test]
fn a_stream_that_was_retired_is_not_used_at_the_end_of_exchanged_memory() {
    each_simulated(|rig, sim| {
        for (what, make) in exchanges() {
            for by_handle in [false, true] {
                let allocator = rig.allocator();
                let raw = RawStream::new(rig);
                let memory = Plain::new(&rig.context, 4096);
                let left = make(rig, &allocator, &raw.borrowed(), memory.ptr);
                let busy = rig.busy(&raw.borrowed());
                retire(&allocator, &raw, by_handle);
                raw.destroy();
                drop(left);
                assert_eq!(reported(sim), [""; 0], "{what}");
                let is_untracked = UNTRACKED.iter().any(|(untracked, _)| what == untracked);
                // The producer's work on its stream is not a use by us.
                if is_untracked && *what != "the producer's stream" {
                    assert_eq!(sim.pending(), [], "{what}");
                }
                drop((busy, memory));
                sim.complete_all();
                allocator.synchronize().unwrap();
                rig.close(&allocator);
                assert_eq!(reported(sim), [""; 0], "{what}");
            }
        }
        assert!(DELETED.load(SeqCst) > 0);
    });
}

/// As long as the stream is not retired nothing waits for it where that can be avoided.
#[test]
fn a_stream_that_lives_is_not_waited_for() {
    each_simulated(|rig, sim| {
        for (what, make) in exchanges() {
            // Page-locked memory is freed on the host, and so is what only the host can give back.
            if ["page-locked", "an unknown producer", "imported"]
                .iter()
                .any(|it| what.contains(it))
            {
                continue;
            }
            let allocator = rig.allocator();
            let raw = RawStream::new(rig);
            let memory = Plain::new(&rig.context, 4096);
            let left = make(rig, &allocator, &raw.borrowed(), memory.ptr);
            let busy = rig.busy(&raw.borrowed());
            drop(left);
            assert!(!sim.pending().is_empty(), "{what}");
            busy.release();
            sim.complete_all();
            drop(memory);
            allocator.synchronize().unwrap();
            retire(&allocator, &raw, true);
            raw.destroy();
            rig.close(&allocator);
        }
    });
}

/// The same of a buffer's stream that could not be ordered with its home when it was used.
#[test]
fn a_stream_that_was_retired_is_not_ordered_later() {
    use cualloc::driver::sys::CUresult;
    use cualloc::sim::FailPlan;
    each_simulated(|rig, sim| {
        let allocator = rig.allocator();
        let (home, raw) = (rig.stream(), RawStream::new(rig));
        let mut buffer = DeviceBuffer::<u8>::zeroed(&allocator, 4096, &home).unwrap();
        home.synchronize().unwrap();
        let busy = rig.busy(&raw.borrowed());
        for (call, nth) in [("cuStreamWaitEvent", 2), ("cuStreamSynchronize", 1)] {
            let plan = FailPlan::call(call, CUresult::CUDA_ERROR_NOT_PERMITTED).unwrap();
            sim.fail(plan.nth(nth).times(u64::MAX));
        }
        assert!(buffer.fill(3, &raw.borrowed()).is_err());
        sim.clear_failures();
        retire(&allocator, &raw, false);
        raw.destroy();
        buffer.fill(4, &home).unwrap();
        assert_eq!(buffer.to_vec().unwrap(), [4; 4096]);
        drop((buffer, busy));
        assert_eq!(reported(sim), [""; 0]);
        rig.close(&allocator);
    });
}
