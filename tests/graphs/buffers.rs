//! Typed buffers in captures: they are memory of the pool, and run with each launch.

use super::support::*;
use cualloc::PinnedBuffer;
use cualloc::allocator::{Contents, Select};
use cualloc::resource::Access;

const LEN: usize = 1 << 18;

fn zeroed(from: &Allocator, stream: &Stream) -> Result<DeviceBuffer<u32>, Error> {
    DeviceBuffer::zeroed(from, LEN, stream)
}

/// A buffer of the pool that was allocated outside of captures.
fn input(allocator: &Allocator, pool: &GraphPool, stream: &Stream) -> DeviceBuffer<u32> {
    let _scope = pool.enter(Scope::Thread).unwrap();
    zeroed(allocator, stream).unwrap()
}

#[track_caller]
fn assert_refused<T>(result: Result<T, Error>, stream: &Stream) {
    match result.map(drop) {
        Err(error @ Error::Capturing { stream: named }) => {
            assert_eq!(named, stream.raw() as usize);
            assert!(error.to_string().contains("GraphPool::enter"), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn buffers_of_a_pool_are_filled_and_copied_by_each_launch() {
    pooled(|_rig, allocator, pool, [stream]| {
        let mut input = input(&allocator, &pool, &stream);
        let (graph, output) = capture_output(&pool, &stream, || {
            let mut sum = DeviceBuffer::filled(&allocator, LEN, 7u32, &stream).unwrap();
            let at = sum.as_device_ptr();
            let (from, mut to) = (input.slice(..9).unwrap(), sum.slice_mut(..9).unwrap());
            to.copy_from(&from, &stream).unwrap();
            let mut output = zeroed(&allocator, &stream).unwrap();
            output.copy_from(&sum.as_slice(), &stream).unwrap();
            drop(sum);
            // Later nodes of the capture reuse its memory.
            let next = zeroed(&allocator, &stream).unwrap();
            assert_eq!(next.as_device_ptr(), at);
            output
        });
        assert_eq!(footprint(&allocator, &pool).leases, 1);
        for value in [1, 2] {
            input.copy_from_slice(&[value; LEN]).unwrap();
            run(&graph, &stream);
            let values = output.to_vec().unwrap();
            assert_eq!((values[8], values[9], values[LEN - 1]), (value, 7, 7));
        }
        output.free().unwrap();
        input.free().unwrap();
        assert_eq!(footprint(&allocator, &pool).live, 0);
    });
}

/// A branch of the capture uses a buffer of another branch: its nodes are ordered like operations on streams.
#[test]
fn a_buffer_orders_the_branches_of_its_capture() {
    pooled(|_rig, allocator, pool, [home, side, other]| {
        let mut outside = input(&allocator, &pool, &other);
        let (graph, buffer) = capture_output(&pool, &home, || {
            let mut buffer = zeroed(&allocator, &home).unwrap();
            // A stream outside of the capture is not drawn into it, and a home outside orders nothing in it.
            assert_refused(buffer.fill(1, &side), &home);
            assert_refused(outside.fill(1, &home), &home);
            side.wait_for(&home).unwrap();
            buffer.fill(2, &side).unwrap();
            buffer.slice_mut(..5).unwrap().fill(3, &home).unwrap();
            buffer.prepare_use(&side, Access::Write).unwrap();
            buffer.finish_use(&side, Access::Write).unwrap();
            buffer.slice_mut(..1).unwrap().fill(4, &side).unwrap();
            buffer
        });
        run(&graph, &home);
        assert_eq!(buffer.to_vec().unwrap()[..6], [4, 3, 3, 3, 3, 2]);
        outside.fill(1, &home).unwrap();
    });
}

/// What waits, or owns host memory until the copy is complete, cannot be captured. With host memory that the program
/// keeps, copies run with each launch.
#[test]
fn copies_with_the_host_are_captured_only_by_the_unsafe_forms() {
    pooled(|rig, allocator, pool, [stream]| {
        let mut source = PinnedBuffer::<u32>::zeroed(&rig.context, LEN).unwrap();
        let mut target = PinnedBuffer::<u32>::zeroed(&rig.context, LEN).unwrap();
        let graph = capture(&pool, &stream, || {
            let mut buffer = zeroed(&allocator, &stream).unwrap();
            assert_refused(buffer.to_vec(), &stream);
            assert_refused(buffer.copy_from_slice(&[1; LEN]), &stream);
            assert_refused(
                DeviceBuffer::from_slice(&allocator, &[1u32], &stream),
                &stream,
            );
            let host = || PinnedBuffer::<u32>::zeroed(&rig.context, LEN).unwrap();
            assert_refused(
                buffer.upload(host(), &stream).map_err(|it| it.error),
                &stream,
            );
            assert_refused(
                buffer.download(host(), &stream).map_err(|it| it.error),
                &stream,
            );
            // SAFETY: both live until the last launch is complete, and are used only between launches.
            unsafe {
                let mut all = buffer.as_mut_slice();
                all.copy_from_slice_async(&source, &stream).unwrap();
                let all = all.as_slice();
                all.copy_to_slice_async(&mut target, &stream).unwrap();
            }
        });
        for value in [5, 6] {
            source.fill(value);
            run(&graph, &stream);
            assert_eq!(target[LEN - 1], value);
        }
    });
}

#[test]
fn a_capture_without_memory_for_a_buffer_continues() {
    pooled(|rig, _, _, [stream, other]| {
        let allocator = rig.limited(8 * MIB);
        let pool = allocator.graph_pool().unwrap();
        let mut ordinary = zeroed(&allocator, &stream).unwrap();
        let (_, mut kept) = capture_output(&pool, &stream, || {
            // Memory of no pool: the graph would not keep its addresses.
            assert_refused(ordinary.fill(1, &stream), &stream);
            let mut kept = zeroed(&allocator, &stream).unwrap();
            assert_refused(kept.copy_from(&ordinary.as_slice(), &stream), &stream);
            let large = DeviceBuffer::<u32>::zeroed(&allocator, 16 * LEN, &stream);
            assert!(matches!(large.map(drop), Err(Error::OutOfMemory(_))));
            kept.fill(1, &stream).unwrap();
            kept
        });
        // No scope, and one for another stream.
        let under_way = Capturing::begin(&stream, MODE);
        assert_refused(zeroed(&allocator, &stream), &stream);
        let scope = pool.enter(Scope::Stream(&other)).unwrap();
        assert_refused(zeroed(&allocator, &stream), &stream);
        // It was allocated before, so its addresses are the graph's from here on.
        kept.fill(2, &stream).unwrap();
        drop(scope);
        let graph = under_way.end().unwrap();
        run(&graph, &stream);
        drop(graph);
        assert_eq!(kept.to_vec().unwrap()[0], 2);
        // SAFETY: nothing uses the memory until it is resumed.
        let suspended = unsafe { allocator.suspend(Select::Pool(&pool), Contents::Drop) };
        assert!(suspended.is_ok());
        capture(&pool, &stream, || {
            assert!(matches!(zeroed(&allocator, &stream), Err(Error::Suspended)));
        });
        allocator.resume(Select::Pool(&pool)).unwrap();
        pool.release().unwrap();
        let under_way = Capturing::begin(&stream, MODE);
        kept.fill(3, &stream).unwrap();
        let graph = under_way.end().unwrap();
        run(&graph, &stream);
        assert_eq!(kept.to_vec().unwrap()[0], 3);
        drop((graph, kept, ordinary));
        assert_trimmed(rig, &allocator);
    });
}

/// The drop of a buffer returns its memory to the pool: now where its stream allows that, otherwise by a later call.
#[test]
fn buffers_are_dropped_during_and_after_captures() {
    pooled(|rig, allocator, pool, [stream, other]| {
        let live = || footprint(&allocator, &pool).live;
        let make = || capture_output(&pool, &stream, || zeroed(&allocator, &stream).unwrap());
        // After its graph, and on another thread.
        let (graph, buffer) = make();
        run(&graph, &stream);
        drop(graph);
        await_leases(&allocator, &pool, 0);
        std::thread::scope(|scope| scope.spawn(|| drop(buffer)).join().unwrap());
        assert_eq!(live(), 0);
        // While another stream captures.
        let (graph, buffer) = make();
        capture(&pool, &other, || drop(buffer));
        assert_eq!(live(), 0);
        // While its own stream captures another graph, which may use the memory.
        let (_graph, mut buffer) = make();
        capture(&pool, &stream, || {
            buffer.fill(1, &stream).unwrap();
            drop(buffer);
            assert_eq!(live(), 4 * LEN as u64);
        });
        drop(allocator.allocate(1, &other).unwrap());
        assert_eq!(live(), 0);
        // The graphs still have the memory, so it serves no work outside.
        let _scope = pool.enter(Scope::Thread).unwrap();
        run(&graph, &stream);
        rig.settle(&stream);
    });
}

#[test]
fn without_pools_a_capturing_stream_gets_no_buffer() {
    only_on(Policy::Classic, late(), |rig| {
        let (allocator, [stream]) = rig.scene();
        let under_way = Capturing::begin(&stream, MODE);
        assert_refused(zeroed(&allocator, &stream), &stream);
        drop(under_way.end().unwrap());
        let unsupported = allocator.graph_pool().map(drop);
        assert!(matches!(unsupported, Err(Error::NotSupported { .. })));
    });
}
