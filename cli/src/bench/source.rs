//! The memory sources to measure: the allocator by handle and by pointer, its front ends, and the host's `malloc` for
//! comparison.

// Programs that include this file use different parts of it.
#![allow(dead_code)]

use super::workload::{Failure, Source};
use cualloc::Tag;
use cualloc::driver::{Stream, sys};
use cualloc::pool::{TypedPool, WorkspacePool};
use cualloc::resource::{Budget, Logging, MemoryResource, RawBlock};
use cualloc::{Allocator, Block, DeviceBuffer, Request};
use std::alloc::{Layout, alloc, dealloc};

/// Out of line, so that the call is measured without the boxing of its errors.
#[cold]
#[inline(never)]
fn failed(error: cualloc::Error) -> Failure {
    error.into()
}

pub struct Handles<'a> {
    pub allocator: &'a Allocator,
    pub streams: &'a [Stream],
}

impl Source for Handles<'_> {
    type Stream = Stream;
    type Block = Block;

    fn stream(&self, index: usize) -> Stream {
        self.streams[index].clone()
    }

    #[inline]
    fn allocate(&self, bytes: usize, stream: &Stream) -> Result<Block, Failure> {
        self.allocator.allocate(bytes, stream).map_err(failed)
    }

    #[inline]
    fn free(&self, block: Block) -> Result<(), Failure> {
        drop(block);
        Ok(())
    }

    #[inline]
    fn clear(&self, slot: &mut Option<Block>) -> Result<(), Failure> {
        *slot = None;
        Ok(())
    }
}

/// Allocates with raw stream handles and returns pointers; frees by pointer.
pub struct Pointers<'a> {
    pub allocator: &'a Allocator,
    pub streams: &'a [Stream],
}

impl Source for Pointers<'_> {
    type Stream = sys::CUstream;
    type Block = sys::CUdeviceptr;

    fn stream(&self, index: usize) -> sys::CUstream {
        self.streams[index].raw()
    }

    #[inline]
    fn allocate(&self, bytes: usize, stream: &sys::CUstream) -> Result<sys::CUdeviceptr, Failure> {
        // SAFETY: the streams live as long as the allocator is used.
        unsafe { self.allocator.allocate_raw(bytes, *stream) }.map_err(failed)
    }

    #[inline]
    fn free(&self, block: sys::CUdeviceptr) -> Result<(), Failure> {
        // SAFETY: the block was allocated above, has no other owner, and no work uses it.
        unsafe { self.allocator.free_raw(block) }.map_err(failed)
    }
}

pub struct Malloc;

pub struct HostBlock {
    start: *mut u8,
    layout: Layout,
}

impl Source for Malloc {
    type Stream = ();
    type Block = HostBlock;

    fn stream(&self, _index: usize) {}

    #[inline]
    fn allocate(&self, bytes: usize, (): &()) -> Result<HostBlock, Failure> {
        let layout = Layout::from_size_align(bytes.max(1), 16)?;
        // SAFETY: the size is not 0. `black_box` keeps the compiler from removing the pair.
        let start = std::hint::black_box(unsafe { alloc(layout) });
        if start.is_null() {
            return Err("malloc has no memory".into());
        }
        Ok(HostBlock { start, layout })
    }

    #[inline]
    fn free(&self, block: HostBlock) -> Result<(), Failure> {
        // SAFETY: from `alloc` with the same layout, and freed once: the block is taken by value.
        unsafe { dealloc(block.start, block.layout) };
        Ok(())
    }
}

/// Blocks of a front end that free themselves, allocated by a function of their bytes and stream.
pub struct Owned<'a, F> {
    streams: &'a [Stream],
    allocate: F,
}

impl<B, F> Source for Owned<'_, F>
where
    F: Fn(usize, &Stream) -> Result<B, cualloc::Error> + Sync,
{
    type Stream = Stream;
    type Block = B;

    fn stream(&self, index: usize) -> Stream {
        self.streams[index].clone()
    }

    #[inline]
    fn allocate(&self, bytes: usize, stream: &Stream) -> Result<B, Failure> {
        (self.allocate)(bytes, stream).map_err(failed)
    }

    #[inline]
    fn free(&self, block: B) -> Result<(), Failure> {
        drop(block);
        Ok(())
    }
}

pub fn workspaces<'a>(
    allocator: &Allocator,
    streams: &'a [Stream],
) -> impl Source<Stream = Stream> + use<'a> {
    let pool = WorkspacePool::new(allocator);
    let allocate = move |bytes, stream: &Stream| pool.lease(stream, bytes);
    Owned { streams, allocate }
}

pub fn typed<'a>(
    allocator: &Allocator,
    streams: &'a [Stream],
) -> impl Source<Stream = Stream> + use<'a> {
    let pool = TypedPool::new(allocator);
    let allocate = move |bytes, stream: &Stream| {
        DeviceBuffer::<f32>::uninit(&pool, bytes / size_of::<f32>(), stream)
    };
    Owned { streams, allocate }
}

/// The allocator below a budget and a log without a writer.
pub struct Stack<'a> {
    resource: Logging<Budget<Allocator>, ()>,
    streams: &'a [Stream],
}

impl<'a> Stack<'a> {
    pub fn new(allocator: &Allocator, streams: &'a [Stream]) -> Stack<'a> {
        let resource = Logging::new(Budget::new(allocator.clone(), Some(1 << 40)), ());
        Stack { resource, streams }
    }
}

impl Source for Stack<'_> {
    type Stream = Stream;
    type Block = RawBlock;

    fn stream(&self, index: usize) -> Stream {
        self.streams[index].clone()
    }

    #[inline]
    fn allocate(&self, bytes: usize, stream: &Stream) -> Result<RawBlock, Failure> {
        const TAG: Tag = Tag::new("benchmark");
        self.resource
            .allocate_block(&Request::new(bytes).tag(TAG), stream)
            .map_err(failed)
    }

    #[inline]
    fn free(&self, block: RawBlock) -> Result<(), Failure> {
        Ok(self.resource.deallocate_block(block)?)
    }
}
