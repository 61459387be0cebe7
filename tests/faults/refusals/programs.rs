//! The programs that run with faults.

use cualloc::Tag;

use cualloc::PinnedBuffer;
use cualloc::exchange::dlpack::{DLManagedTensor, DLManagedTensorVersioned};
use cualloc::exchange::{DType, Dlpack, Peer, Tensor};
use cualloc::pool::{
    DriverPool, DriverPoolConfig, PinnedConfig, PinnedPool, ThresholdPool, TypedPool, WorkspacePool,
};
use cualloc::resource::{
    Access, AccessOrdered, Budget, CudaMemory, Launch, MemoryResource, Relief, StreamPool,
};
use cualloc::trace::{Replay, Trace};

use super::{Outcome, Program, World};
use crate::common::prelude::*;

pub const PROGRAMS: &[Program] = &[
    ("buffers", buffers),
    ("columns", columns),
    ("columns of a resource", resource_columns),
    ("exchange", exchange),
    ("pinned pool", pinned),
    ("driver's pool", native),
    ("workspaces", workspaces),
    ("typed pool", typed),
    ("threshold pool", threshold),
    ("direct resource", direct),
    ("async resource", asynchronous),
    ("driver's pool as resource", native_resource),
    ("adaptors", adaptors),
    ("manager", manager),
    ("streams and events", streams),
    ("replay", replay),
];

const T: Tag = Tag::new("test");

/// Work on memory, in the order of a stream.
fn work(context: &Context, ptr: u64, bytes: usize, stream: &Stream) -> Outcome {
    let entered = context.enter()?;
    // SAFETY: the programs pass live memory of that many bytes, and live streams.
    let submitted = unsafe { entered.memset_d8(ptr, 0x5a, bytes, stream.raw()) };
    if submitted.is_err() {
        // It may be queued all the same, and no other record of this use exists.
        stream.synchronize().or_else(|_| stream.synchronize())?;
    }
    Ok(submitted?)
}

/// Makes a stream wait for the work of another one.
fn follow(w: &World, earlier: &Stream, later: &Stream) -> Outcome {
    let event = w.context.enter()?.create_event()?;
    event.record(earlier)?;
    Ok(later.wait(&event)?)
}

fn buffers(w: &World) -> Outcome {
    let (a, b) = (w.alloc.create_stream()?, w.alloc.create_stream()?);
    let values: Vec<u32> = (0..500).collect();
    let mut one = DeviceBuffer::from_slice(&w.alloc, &values, &a)?;
    let mut two = DeviceBuffer::<u32>::zeroed(&w.alloc, 500, &b)?;
    two.copy_from(&one.as_slice(), &b)?;
    one.fill(7, &b)?;
    let mut target = [1u32; 500];
    two.copy_to_slice(&mut target)?;
    assert_eq!(target[..], values[..]);
    let copy = one.download(PinnedBuffer::uninit(&w.context, 500)?, &b)?;
    copy.is_complete()?;
    assert_eq!(copy.wait()?[..], [7; 500]);
    drop(one.upload(PinnedBuffer::from_slice(&w.context, &values)?, &b)?);
    one.prepare_use(&b, Access::ReadWrite)?;
    work(&w.context, one.as_device_ptr(), 2000, &b)?;
    one.finish_use(&b, Access::ReadWrite)?;
    assert_eq!(one.to_vec()?, [0x5a5a_5a5a; 500]);
    one.free()?;
    for stream in [w.alloc.create_stream()?, Stream::per_thread(&w.context)] {
        let mut late = DeviceBuffer::<u8>::zeroed(&w.alloc, 600, &stream)?;
        late.fill(1, &b)?;
        w.alloc.retire(&stream)?;
        late.fill(2, &stream)?;
        drop(late);
    }
    Ok(())
}

fn columns(w: &World) -> Outcome {
    let (a, b) = (w.alloc.create_stream()?, w.alloc.create_stream()?);
    let mut column = column(&w.alloc, &[5i64; 300], &a)?;
    assert_eq!(values::<i64>(&column)?, [5; 300]);
    let zeros = Tensor::zeroed(&w.alloc, DType::F32, &[1000], &a)?;
    zeros.record_stream(&b)?;
    follow(w, &a, &b)?;
    work(&w.context, zeros.ptr(), 4000, &b)?;
    drop(zeros);
    let other = Tensor::zeroed(&w.alloc, DType::F32, &[1000], &b)?;
    assert_eq!(values::<f32>(&other)?, [0.0; 1000]);
    set(&mut column, &[6i64; 300])?;
    assert_eq!(values::<i64>(&column)?, [6; 300]);
    let buffer = column.into_buffer::<i64>().map_err(|_| "shared")?;
    buffer.free()?;
    Ok(())
}

fn resource_columns(w: &World) -> Outcome {
    let resource: Arc<dyn MemoryResource> = Arc::new(AccessOrdered::new(w.alloc.clone()));
    let (a, b) = (w.alloc.create_stream()?, w.alloc.create_stream()?);
    let column = column(&resource, &[3i64, 5, 8], &a)?;
    let mut launch = Launch::strict(&resource, &b);
    launch.read_write(&column)?;
    launch.preflight()?;
    launch.commit()?;
    assert_eq!(values::<i64>(&column)?, [3, 5, 8]);
    let tensor = column.to_dlpack::<DLManagedTensor>(&Peer::on(&b))?;
    drop(column);
    work(&w.context, tensor.tensor()?.data as u64, 24, &b)?;
    drop(tensor);
    let zeros = Tensor::zeroed(&resource, DType::Bool, &[2000], &b)?;
    zeros.into_buffer::<u8>().map_err(|_| "shared")?.free()?;
    resource.reap()?;
    Ok(())
}

fn exchange(w: &World) -> Outcome {
    let (a, b) = (w.alloc.create_stream()?, w.alloc.create_stream()?);
    let column = column(&w.alloc, &[1.5f32; 700], &a)?;
    for consumer in [Peer::on(&b), Peer::starting_on(&b), ordered()] {
        let tensor = column.to_dlpack::<DLManagedTensor>(&consumer)?;
        let seen = Tensor::from_dlpack(tensor, &b, Peer::on(&a))?;
        assert_eq!(values::<f32>(&seen)?, [1.5; 700]);
        work(&w.context, seen.ptr() + 64, 0, &b)?;
    }
    let old = column.to_dlpack::<DLManagedTensorVersioned>(&Peer::on(&b))?;
    drop(column);
    work(&w.context, old.tensor()?.data as u64, 2800, &b)?;
    drop(old);
    let next = Tensor::zeroed(&w.alloc, DType::F32, &[700], &a)?;
    assert_eq!(values::<f32>(&next)?, [0.0; 700]);
    foreign(w, &a, &b)?;
    #[cfg(feature = "arrow")]
    arrow(w, &a, &b)?;
    Ok(())
}

/// Memory of another owner, who frees it when it is released.
mod theirs {
    use cualloc::driver::Context;
    use cualloc::exchange::dlpack::{DLDataType, DLDevice, DLManagedTensor, DLTensor};
    use std::ptr;

    struct Box_ {
        tensor: DLManagedTensor,
        shape: [i64; 1],
        context: Context,
    }

    pub fn tensor(context: &Context, ptr: u64, rows: i64) -> *mut DLManagedTensor {
        let mut made = Box::new(Box_ {
            tensor: DLManagedTensor {
                dl_tensor: DLTensor {
                    data: ptr::without_provenance_mut(ptr as usize),
                    device: DLDevice {
                        device_type: 2,
                        device_id: 0,
                    },
                    ndim: 1,
                    dtype: DLDataType {
                        code: 2,
                        bits: 32,
                        lanes: 1,
                    },
                    shape: ptr::null_mut(),
                    strides: ptr::null_mut(),
                    byte_offset: 0,
                },
                manager_ctx: ptr::null_mut(),
                deleter: Some(delete),
            },
            shape: [rows],
            context: context.clone(),
        });
        made.tensor.dl_tensor.shape = made.shape.as_mut_ptr();
        let made = Box::into_raw(made);
        // SAFETY: the box was just made.
        unsafe {
            (*made).tensor.manager_ctx = made.cast();
            &raw mut (*made).tensor
        }
    }

    unsafe extern "C-unwind" fn delete(tensor: *mut DLManagedTensor) {
        // SAFETY: the box of `tensor`, once.
        let made = unsafe { Box::from_raw((*tensor).manager_ctx.cast::<Box_>()) };
        let ptr = made.tensor.dl_tensor.data as u64;
        // The producer is as stubborn as it must be: the memory goes.
        for _ in 0..5 {
            let Ok(entered) = made.context.enter() else {
                continue;
            };
            // Our use is ordered before the producer's stream alone, and a free orders nothing.
            if entered.synchronize().is_err() {
                continue;
            }
            // SAFETY: released once, by who does not use it any more.
            if unsafe { entered.mem_free(ptr) }.is_ok() {
                break;
            }
        }
    }
}

fn foreign(w: &World, a: &Stream, b: &Stream) -> Outcome {
    for producer in [ordered(), Peer::on(a)] {
        let memory = w.context.enter()?.mem_alloc(4096)?;
        let raw = theirs::tensor(&w.context, memory, 1024);
        // SAFETY: just made, and taken over once.
        let tensor = unsafe { Dlpack::from_raw(raw) }?;
        let column = Tensor::from_dlpack(tensor, b, producer)?;
        work(&w.context, column.ptr(), 4096, b)?;
        let third = w.alloc.create_stream()?;
        column.record_stream(&third)?;
        follow(w, b, &third)?;
        work(&w.context, column.ptr(), 4096, &third)?;
    }
    Ok(())
}

#[cfg(feature = "arrow")]
fn arrow(w: &World, a: &Stream, b: &Stream) -> Outcome {
    let column = column(&w.alloc, &[4i64; 300], a)?;
    for consumer in [Peer::on(b), ordered()] {
        let array = column.to_arrow(&consumer)?;
        let seen = Tensor::from_arrow(array, DType::I64, b, ordered())?;
        assert_eq!(values::<i64>(&seen)?, [4; 300]);
    }
    Ok(())
}

fn pinned(w: &World) -> Outcome {
    let config = PinnedConfig::new().initial(1).maximum(4).buffer_bytes(8192);
    let pool = PinnedPool::new(&w.context, config)?;
    let stream = w.alloc.create_stream()?;
    let mut target = DeviceBuffer::<u32>::zeroed(&w.alloc, 5000, &stream)?;
    for round in 0..3u32 {
        let up = pool.acquire(1000)?.write(&[round; 1000])?;
        let up = target.slice_mut(..1000)?.upload(up, &stream)?;
        let down = target.slice(..1000)?;
        let down = down.download(pool.acquire(1000)?, &stream)?;
        let complete = down.is_complete()?;
        drop(up);
        if round == 1 {
            let mut down = down.wait()?;
            assert_eq!(down[..], [1; 1000], "{complete}");
            down.record_use(&stream)?;
        }
        stream.synchronize()?;
    }
    drop(target.upload(pool.acquire(5000)?.write(&[1; 5000])?, &stream)?);
    let told = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&told);
    let copy = target.download(pool.acquire(5000)?, &stream)?;
    copy.on_complete(move |host| seen.store(host[..] == [1; 5000], Ordering::Relaxed))?;
    stream.synchronize()?;
    assert!(told.load(Ordering::Relaxed));
    // A look that is refused leaves a buffer to the next one.
    pool.usage();
    let stats = pool.usage();
    nothing_left(stats.blocks.current + stats.pending)?;
    pool.trim(0);
    pool.restart();
    Ok(())
}

fn native(w: &World) -> Outcome {
    let pool = DriverPool::new(&w.context, DriverPoolConfig::new().initial(1 << 20))?;
    let (a, b) = (w.alloc.create_stream()?, w.alloc.create_stream()?);
    let block = DeviceBuffer::<u8>::uninit(&pool, 4096, &a)?;
    work(&w.context, block.as_device_ptr(), 4096, &a)?;
    block.record_stream(&b)?;
    follow(w, &a, &b)?;
    work(&w.context, block.as_device_ptr(), 4096, &b)?;
    if let Err(failed) = block.free() {
        // The caller has it still, and uses it on the recorded stream.
        work(&w.context, failed.value.as_device_ptr(), 4096, &b)?;
        failed.value.free()?;
        let next = DeviceBuffer::<u8>::uninit(&pool, 4096, &a)?;
        work(&w.context, next.as_device_ptr(), 4096, &a)?;
        drop(next);
        return Err(failed.error.into());
    }
    let second = DeviceBuffer::<u8>::uninit(&pool, 4096, &a)?;
    work(&w.context, second.as_device_ptr(), 4096, &a)?;
    follow(w, &a, &b)?;
    work(&w.context, second.as_device_ptr(), 4096, &b)?;
    if let Err(error) = second.record_use(&b) {
        // Only its maker knows of the use.
        if b.synchronize().or_else(|_| b.synchronize()).is_err() {
            std::mem::forget(second);
        }
        return Err(error.into());
    }
    drop(second);
    let third = DeviceBuffer::<u8>::uninit(&pool, 4096, &a)?;
    work(&w.context, third.as_device_ptr(), 4096, &a)?;
    third.free()?;
    pool.usage()?;
    a.synchronize()?;
    b.synchronize()?;
    pool.trim(0)?;
    nothing_left(pool.usage()?.blocks.current)?;
    pool.destroy()?;
    Ok(())
}

fn workspaces(w: &World) -> Outcome {
    let pool = WorkspacePool::new(&w.alloc);
    let (a, b) = (w.alloc.create_stream()?, w.alloc.create_stream()?);
    for bytes in [1000, 3 << 20, 1000] {
        let lease = pool.lease(&a, bytes)?;
        work(&w.context, lease.as_device_ptr(), bytes, &a)?;
        lease.record_stream(&b)?;
        follow(w, &a, &b)?;
        work(&w.context, lease.as_device_ptr(), bytes, &b)?;
        if bytes > 1000 {
            lease.record_use(&b)?;
        }
        drop(lease);
        let next = pool.lease(&a, bytes)?;
        work(&w.context, next.as_device_ptr(), bytes, &a)?;
    }
    pool.trim(0)?;
    assert_eq!(pool.usage()?.blocks.current, 0);
    Ok(())
}

fn typed(w: &World) -> Outcome {
    let pool = TypedPool::new(&w.alloc);
    let (a, b) = (w.alloc.create_stream()?, w.alloc.create_stream()?);
    let mut lent = DeviceBuffer::<u32>::zeroed(&pool, 5000, &a)?;
    lent.as_mut_slice().fill(3, &b)?;
    assert_eq!(lent.to_vec()?, [3; 5000]);
    drop(lent);
    let one = DeviceBuffer::<u32>::zeroed(&pool, 5000, &a)?;
    work(&w.context, one.as_device_ptr(), 20_000, &a)?;
    drop(one);
    let big = DeviceBuffer::<u8>::uninit(&pool, 30 << 20, &b)?;
    drop(big);
    let block = DeviceBuffer::<u8>::uninit_with(&pool, Request::new(6000).tag(T), &a)?;
    block.record_stream(&b)?;
    follow(w, &a, &b)?;
    work(&w.context, block.as_device_ptr(), 6000, &b)?;
    drop(block);
    pool.trim(0)?;
    Ok(())
}

fn threshold(w: &World) -> Outcome {
    let pool = ThresholdPool::over(&w.alloc);
    let (a, b) = (w.alloc.create_stream()?, w.alloc.create_stream()?);
    let mut one = DeviceBuffer::<u8>::zeroed(&pool, 9 << 20, &a)?;
    one.as_mut_slice().fill(4, &b)?;
    drop(one);
    pool.set_release_threshold(Some(0))?;
    let two = pool.uninit::<u8>(5 << 20, &b)?;
    drop(two);
    pool.trim(0)?;
    Ok(())
}

fn use_across(
    w: &World,
    resource: &Arc<impl MemoryResource + 'static>,
    a: &Stream,
    b: &Stream,
) -> Outcome {
    let before = resource.usage()?.outstanding();
    let take = |on| DeviceBuffer::<u8>::uninit_with(resource, Request::new(4096).tag(T), on);
    let first = take(a)?;
    let id = first.id().ok_or("no block")?;
    work(&w.context, id.ptr(), 4096, a)?;
    follow(w, a, b)?;
    resource.prepare_use(&id, b, Access::Write)?;
    work(&w.context, id.ptr(), 4096, b)?;
    resource.finish_use(&id, b, Access::Write)?;
    first.record_stream(b)?;
    work(&w.context, id.ptr(), 4096, b)?;
    match first.free() {
        Ok(()) => {}
        Err(failed) => {
            work(&w.context, id.ptr(), 4096, b)?;
            let error = failed.error;
            failed.value.free()?;
            let next = take(a)?;
            work(&w.context, next.as_device_ptr(), 4096, a)?;
            next.free()?;
            return Err(error.into());
        }
    }
    let second = take(b)?;
    work(&w.context, second.as_device_ptr(), 4096, b)?;
    drop(second);
    resource.reap()?;
    resource.trim(0)?;
    resource.usage()?;
    nothing_left(resource.usage()?.outstanding() - before)
}

/// The message of a program that finds something left.
pub const LEFT: &str = "something is left";

/// The objects that are left although all were released.
fn nothing_left(left: u64) -> Outcome {
    match left {
        0 => Ok(()),
        _ => Err(LEFT.into()),
    }
}

fn direct(w: &World) -> Outcome {
    let direct = Arc::new(CudaMemory::new(&w.context));
    let stream = w.alloc.create_stream()?;
    let block = direct.allocate_block(&Request::new(1 << 20).tag(T), &stream)?;
    let used = work(&w.context, block.ptr(), 1 << 20, &stream);
    if let Err(failed) = direct.deallocate_block(block) {
        direct.deallocate_block(*failed.value)?;
        return Err(failed.error.into());
    }
    assert_eq!(direct.usage().unwrap().outstanding(), 0);
    let owned = DeviceBuffer::<u8>::uninit(&direct, 4096, &stream)?;
    drop(owned);
    used
}

fn asynchronous(w: &World) -> Outcome {
    let (a, b) = (w.alloc.create_stream()?, w.alloc.create_stream()?);
    use_across(w, &Arc::new(AccessOrdered::new(w.alloc.clone())), &a, &b)
}

fn native_resource(w: &World) -> Outcome {
    let pool = DriverPool::new(&w.context, DriverPoolConfig::new())?;
    let (a, b) = (w.alloc.create_stream()?, w.alloc.create_stream()?);
    use_across(w, &Arc::new(AccessOrdered::new(pool.clone())), &a, &b)?;
    let block = DeviceBuffer::<u8>::uninit(&pool, 1000, &a)?;
    block.free()?;
    Ok(())
}

fn adaptors(w: &World) -> Outcome {
    let (a, b) = (w.alloc.create_stream()?, w.alloc.create_stream()?);
    let inner = Arc::new(AccessOrdered::new(Budget::of_live(w.alloc.clone(), None)));
    let guard = Arc::new(Relief::new(Budget::new(inner, Some(1 << 30))));
    let reserve = DeviceBuffer::<u8>::uninit(&guard, 4 << 20, &a)?;
    use_across(w, &guard, &a, &b)?;
    reserve.free()?;
    Ok(())
}

fn manager(w: &World) -> Outcome {
    let stack = Arc::new(AccessOrdered::new(w.alloc.clone()));
    let manager = Arc::new(Budget::of_live(Arc::clone(&stack), Some(1 << 30)));
    let (_, stream) = StreamPool::new(&w.context).acquire()?;
    let slice = DeviceBuffer::<u32>::uninit(&manager, 5000, &stream)?;
    slice.prepare_use(&stream, Access::Write)?;
    work(&w.context, slice.as_device_ptr(), 20_000, &stream)?;
    slice.finish_use(&stream, Access::Write)?;
    slice.free()?;
    let slice = DeviceBuffer::<u32>::uninit(&manager, 5000, &stream)?;
    drop(slice);
    stack.reap()?;
    nothing_left(stack.usage()?.outstanding())
}

fn streams(w: &World) -> Outcome {
    let a = Stream::new(&w.context)?;
    let b = Stream::with_priority(&w.context, -1)?;
    let own = Stream::legacy(&w.context);
    let per_thread = Stream::per_thread(&w.context);
    per_thread.id()?;
    let event = w.context.enter()?.create_event()?;
    for (one, two) in [(&a, &b), (&b, &own), (&own, &per_thread)] {
        event.record(one)?;
        two.wait(&event)?;
        w.context.enter()?.query(&event)?;
        one.is_complete()?;
        two.is_capturing()?;
    }
    w.context.enter()?.wait(&event)?;
    a.synchronize()?;
    let entered = w.context.enter()?;
    entered.synchronize()?;
    Ok(())
}

fn replay(w: &World) -> Outcome {
    let rows = "op,id,bytes,stream\na,0,300000,0\na,1,500,1\nf,0,0,0\na,2,300000,0\nf,1,0,1\na,3,700000,1\n";
    let trace = Trace::read("test", rows.as_bytes())?;
    for lag in [0, 2] {
        w.sim.set_mode(if lag > 0 {
            Mode::Lag(lag)
        } else {
            Mode::Instant
        });
        let report = Replay::new(&trace).repeat(2).verify(true).run(&w.context)?;
        let right = report.check.is_none() && report.mismatches == Some(0);
        if let Some(error) = report.error.or(report.close) {
            return Err(error.into());
        }
        assert!(right, "{:?} {:?}", report.check, report.mismatches);
    }
    Ok(())
}
