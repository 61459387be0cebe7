//! Copies in flight: awaited, and reported by callbacks.

use crate::common::prelude::*;
use std::future::Future;
use std::pin::pin;
use std::sync::mpsc::{Sender, channel};
use std::task::{self, Poll, Wake, Waker};

use cualloc::PinnedBuffer;
use cualloc::pool::{PinnedConfig, PinnedPool};
use cualloc::resource::{CudaMemory, MemoryResource};

use crate::rig::Rig;

struct Told(Sender<()>);

impl Wake for Told {
    fn wake(self: Arc<Self>) {
        // A task that was woken once is not woken again.
        let _ = self.0.send(());
    }
}

/// S4.23: a task is woken when its copy is complete, and not before.
#[test]
fn s4_23_a_copy_can_be_awaited() {
    Rig::each(|rig, alloc, stream| {
        let source = DeviceBuffer::filled(alloc, 1000, 7u32, stream).unwrap();
        stream.synchronize().unwrap();
        if let Some(sim) = &rig.sim {
            sim.set_mode(Mode::Manual);
        }
        let host = PinnedBuffer::uninit(&rig.contexts[0], 1000).unwrap();
        let mut copy = pin!(source.download(host, stream).unwrap());
        let waker = || {
            let (sender, woken) = channel();
            (Waker::from(Arc::new(Told(sender))), woken)
        };
        let ((first, elsewhere), (last, woken)) = (waker(), waker());
        let mut here = task::Context::from_waker(&last);
        let mut polled = copy.as_mut().poll(&mut task::Context::from_waker(&first));
        assert!(rig.sim.is_none() || polled.is_pending());
        if polled.is_pending() {
            polled = copy.as_mut().poll(&mut here);
        }
        if polled.is_pending() {
            if let Some(sim) = &rig.sim {
                assert!(woken.try_recv().is_err());
                sim.complete_all();
                assert!(elsewhere.try_recv().is_err(), "the last waker counts");
            }
            woken.recv().unwrap();
            polled = copy.as_mut().poll(&mut here);
        }
        let Poll::Ready(host) = polled else {
            panic!("it was woken for nothing");
        };
        assert_eq!(host.unwrap()[..], [7; 1000]);
        // Its result was already taken.
        let after = copy.as_mut().poll(&mut here);
        assert_matches!(after, Poll::Ready(Err(Error::Abandoned)));
        // Nothing to wait for.
        let empty = DeviceBuffer::<u32>::zeroed(alloc, 0, stream).unwrap();
        let host = PinnedBuffer::uninit(&rig.contexts[0], 0).unwrap();
        let copy = pin!(empty.download(host, stream).unwrap());
        assert!(copy.poll(&mut here).is_ready());
        if let Some(sim) = &rig.sim {
            sim.set_mode(Mode::Instant);
        }
    });
}

/// S4.23, S4.9: a callback gets the memory when the copy is complete, and may drop it, which calls the driver
/// only later.
#[test]
fn s4_23_s4_9_a_copy_is_reported() {
    Rig::each_simulated(|rig, sim, alloc| {
        let context = &rig.contexts[0];
        let stream = alloc.create_stream().unwrap();
        let pool = PinnedPool::new(context, PinnedConfig::new().initial(1)).unwrap();
        let mut target = DeviceBuffer::<u32>::zeroed(alloc, 1000, &stream).unwrap();
        stream.synchronize().unwrap();
        let held = sim.leaks().host;
        sim.set_mode(Mode::Manual);
        let (sender, told) = channel();
        for pooled in [true, false] {
            let host = match pooled {
                true => pool.acquire(1000).unwrap().write(&[3; 1000]).unwrap(),
                false => PinnedBuffer::from_slice(context, &[4; 1000]).unwrap(),
            };
            let sender = sender.clone();
            let copy = target.upload(host, &stream).unwrap();
            copy.on_complete(move |host| {
                sender.send(host[0]).unwrap();
                drop(host);
            })
            .unwrap();
        }
        assert!(told.try_recv().is_err());
        assert_eq!(pool.usage().blocks.current, 1);
        let calls = rig.driver.calls();
        sim.complete_all();
        assert_eq!([told.try_recv(), told.try_recv()], [Ok(3), Ok(4)]);
        assert_eq!(rig.driver.calls().since(&calls).total(), 0);
        assert_eq!(
            (pool.usage().blocks.current, pool.usage().cached_blocks),
            (0, 1)
        );
        // The deferred destroy runs with the next drop.
        stream.synchronize().unwrap();
        assert_eq!(sim.leaks().host, held + 1);
        drop(PinnedBuffer::<u8>::uninit(context, 1).unwrap());
        assert_eq!(sim.leaks().host, held);
        // A refusal gives the memory up, and the callback with it.
        let host = pool.acquire(1000).unwrap().write(&[5; 1000]).unwrap();
        let copy = target.upload(host, &stream).unwrap();
        let code = CUresult::CUDA_ERROR_NOT_PERMITTED;
        sim.fail(FailPlan::call("cuLaunchHostFunc", code).unwrap());
        let refused = copy.on_complete(move |host| sender.send(host[0]).unwrap());
        assert_eq!(refused.unwrap_err().code(), code);
        assert_eq!(
            (pool.usage().blocks.current, pool.usage().pending),
            (0, 4 << 20)
        );
        sim.complete_all();
        assert!(told.try_recv().is_err());
        assert_eq!((pool.usage().pending, pool.usage().cached_blocks), (0, 1));
        sim.set_mode(Mode::Instant);
    });
}

/// S4.9: what a callback dropped is destroyed with the last object of its context at the latest, also where the
/// context belongs to other code; and if that went in the callback, with the next one.
#[test]
fn s4_9_deferred_destroys_run_with_the_last_object_of_a_context() {
    let sim = Simulator::new(SimConfig::default()).unwrap();
    let driver = sim.driver().unwrap();
    let raw = sim.create_context(0).unwrap();
    // SAFETY: the context lives as long as the simulator.
    let foreign = || unsafe { Context::from_raw(&driver, raw) }.unwrap();
    let primary = || driver.context(0).unwrap();
    last_objects(&sim, &primary(), &foreign);
    assert_eq!(sim.primary_is_active(0), Some(false));
    last_objects(&sim, &foreign(), &primary);
    assert_eq!(sim.primary_is_active(0), Some(false));
    assert!(sim.reports().is_empty(), "{:?}", sim.reports());
}

/// Copies on a stream of the context that `named` makes an object of, for memory of another one.
fn last_objects(sim: &Simulator, other: &Context, named: &dyn Fn() -> Context) {
    sim.set_mode(Mode::Instant);
    let home = Stream::new(other).unwrap();
    let memory: Arc<dyn MemoryResource> = Arc::new(CudaMemory::new(other));
    let mut target = DeviceBuffer::<u8>::zeroed(&memory, 1000, &home).unwrap();
    let held = || (sim.leaks().host, sim.leaks().streams);
    for keep in [true, false] {
        sim.set_mode(Mode::Manual);
        let kept = named();
        let (context, kept) = (kept.clone(), keep.then_some(kept));
        let stream = Stream::new(&context).unwrap();
        let host = PinnedBuffer::from_slice(&context, &[1; 1000]).unwrap();
        let copy = target.upload(host, &stream).unwrap();
        drop((stream, context));
        copy.on_complete(drop).unwrap();
        let calls = other.driver().calls();
        sim.complete_all();
        assert_eq!(other.driver().calls().since(&calls).total(), 0);
        assert_eq!(held(), (1, 2));
        // Drops in another context are none of its business.
        drop(PinnedBuffer::<u8>::uninit(other, 1).unwrap());
        assert_eq!(held(), (1, 2));
        drop(kept.unwrap_or_else(named));
        assert_eq!(held(), (0, 1));
    }
}
