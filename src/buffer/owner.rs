//! The owner that takes the memory of a buffer back.

use std::sync::{Arc, LazyLock};

use crate::allocator::{Block, User};
use crate::block::BlockId;
use crate::driver::kept_stream::KeptStream;
use crate::driver::{Context, Stream, StreamKind, sys};
use crate::error::{Error, Refused};
use crate::resource::{MemoryResource, RawBlock, UseTracking, give_back, identity_of};
use crate::sync::event::EventPools;
use crate::sync::{capture, order};

use super::unordered::{self, Unordered};

/// See the module documentation.
pub(crate) enum Owner {
    /// An allocator, without a resource in between.
    Block(Block),
    /// Any other resource.
    Resource(Loan),
    /// Foreign memory, released by dropping this value.
    Foreign(Box<Foreign>),
}

pub(crate) struct Loan {
    pub resource: Arc<dyn MemoryResource>,
    pub block: RawBlock,
}

pub(crate) struct Foreign {
    pub ptr: sys::CUdeviceptr,
    #[expect(dead_code, reason = "kept for its drop")]
    pub owner: Box<dyn Send + Sync>,
}

/// For memory without an allocator: each event is created for one use.
static EVENTS: LazyLock<EventPools> = LazyLock::new(EventPools::unpooled);

impl Owner {
    pub(super) fn ptr(&self) -> sys::CUdeviceptr {
        match self {
            Owner::Block(block) => block.ptr(),
            Owner::Resource(loan) => loan.block.ptr(),
            Owner::Foreign(foreign) => foreign.ptr,
        }
    }

    pub(crate) fn identity(&self, stream: u64) -> Option<BlockId> {
        match self {
            Owner::Block(block) => Some(identity_of(block, stream)),
            Owner::Resource(loan) => Some(loan.block.id()),
            Owner::Foreign(_) => None,
        }
    }

    /// Returns the key of the memory in [`unordered`].
    pub(super) fn key(&self) -> unordered::Key {
        match self {
            Owner::Block(block) => (block.engine().id, block.ptr()),
            Owner::Resource(loan) => (loan.block.id().source(), loan.block.ptr()),
            // Several owners of foreign memory may have the same address, so the owner's own address is the key.
            Owner::Foreign(foreign) => (0, std::ptr::from_ref(&**foreign).addr() as u64),
        }
    }

    /// Whether the owner can take the memory back now, as far as the host can determine.
    pub(super) fn usable(&self) -> Result<(), Error> {
        match self {
            Owner::Block(block) => block.engine().usable(),
            Owner::Resource(loan) => match (*loan.resource).allocator_under() {
                Some(allocator) => allocator.engine().usable(),
                None => Ok(()),
            },
            Owner::Foreign(_) => Ok(()),
        }
    }

    pub(super) fn events(&self) -> &EventPools {
        match self {
            Owner::Block(block) => &block.engine().events,
            Owner::Resource(loan) => match (*loan.resource).allocator_under() {
                Some(allocator) => &allocator.engine().events,
                None => &EVENTS,
            },
            Owner::Foreign(_) => &EVENTS,
        }
    }

    /// Returns the block if its resource orders accesses that a buffer does not know of.
    pub(super) fn ordered(&self) -> Option<&Loan> {
        match self {
            Owner::Resource(loan) if loan.resource.use_tracking() == UseTracking::Access => {
                Some(loan)
            }
            _ => None,
        }
    }

    /// Whether the home stream was retired: the owner then considers its last marker the end of all its work.
    #[inline]
    pub(super) fn is_retired(&self) -> bool {
        match self {
            Owner::Block(block) => block.stream_retired(),
            Owner::Resource(loan) => (*loan.resource).has_retired_stream(&loan.block),
            Owner::Foreign(_) => false,
        }
    }

    /// Records that another stream uses the memory until it is freed or, with `now`, that it has used it. Returns false
    /// if the home has to wait instead.
    pub(super) fn record(&self, stream: &Stream, now: bool) -> Result<bool, Error> {
        match self {
            Owner::Block(block) if now => block.record_use(stream)?,
            Owner::Block(block) => block.record_stream(stream)?,
            Owner::Resource(loan) => {
                let id = loan.block.id();
                match loan.resource.use_tracking() {
                    UseTracking::None => return Ok(false),
                    _ if now => loan.resource.record_use(&id, stream)?,
                    _ => loan.resource.record_stream(&id, stream)?,
                }
            }
            Owner::Foreign(_) => return Ok(false),
        }
        Ok(true)
    }

    pub(super) fn free(self) -> Result<(), Refused<Owner>> {
        match self {
            Owner::Block(block) => block.free().map_err(|failed| failed.map(Owner::Block)),
            Owner::Resource(loan) => {
                let Loan { resource, block } = loan;
                let freed = resource.deallocate_block(block);
                freed
                    .map_err(|failed| failed.map(|block| Owner::Resource(Loan { resource, block })))
            }
            Owner::Foreign(foreign) => {
                drop(foreign);
                Ok(())
            }
        }
    }

    /// Frees the memory and drops the owner in place, if its resource takes the memory back on the fast path. Otherwise
    /// returns false and changes nothing.
    ///
    /// # Safety
    /// If it returns true, the owner must not be used or dropped again.
    #[inline]
    pub(super) unsafe fn try_end(&mut self) -> bool {
        let Owner::Resource(loan) = self else {
            return false;
        };
        if !(*loan.resource).try_take_back(&mut loan.block) {
            return false;
        }
        // Usually there is nothing in the block to drop.
        if !loan.block.is_bare() {
            // SAFETY: the caller's contract.
            unsafe { std::ptr::drop_in_place(&mut loan.block) };
        }
        // SAFETY: as above.
        unsafe { std::ptr::drop_in_place(&mut loan.resource) };
        true
    }

    #[inline]
    pub(super) fn end(self) {
        match self {
            Owner::Block(block) => drop(block),
            Owner::Resource(loan) => {
                let Loan { resource, block } = loan;
                give_back(&resource, block, "cannot free a dropped buffer yet");
            }
            Owner::Foreign(foreign) => drop(foreign),
        }
    }

    /// Like [`end`](Self::end), if the home does not wait for all of these streams or contexts, or is itself among the
    /// streams.
    #[cold]
    pub(super) fn end_after(self, home: &Stream, user: Vec<Unordered>, mut contexts: Vec<Context>) {
        let mut users: Vec<KeptStream> = user.into_iter().map(|user| user.stream).collect();
        if self.is_retired() {
            match home.kind() {
                // The stream may have been destroyed.
                StreamKind::Borrowed => contexts.push(home.context().clone()),
                _ => users.push(KeptStream::new(home)),
            }
        }
        match self {
            // A failure may be transient; otherwise a later call of the allocator tries again.
            Owner::Block(block) => {
                let users = users.iter().map(|user| User::of(user.stream()));
                let mut users: Vec<User> = users.collect();
                users.extend(contexts.into_iter().map(User::Context));
                block.drop_after(users);
            }
            other
                if users.iter().all(|user| other.outlasts(user))
                    && contexts.iter().all(|it| order::wait_until_idle(it).is_ok()) =>
            {
                other.end();
            }
            other => {
                log::error!(
                    "leaking memory at {:#x}: cannot wait for its last use",
                    other.ptr()
                );
                std::mem::forget(other);
            }
        }
    }

    /// Whether the memory outlives the work of a stream, because the use is recorded or the work is complete.
    fn outlasts(&self, user: &KeptStream) -> bool {
        let by_name = |stream: Option<&Stream>| {
            // The handle of a per-thread default stream may mean another stream here.
            let stream = stream.filter(|stream| stream.kind() != StreamKind::PerThreadDefault)?;
            let recorded = matches!(self.record(stream, false), Ok(true));
            Some(recorded || order::wait(stream, self.events()).is_ok())
        };
        let by_context = || order::wait_until_idle(user.stream().context()).is_ok();
        user.with(by_name).unwrap_or_else(by_context)
    }

    /// Rejects streams that are being captured, because the memory would have to outlive the graph.
    pub(super) fn admit_use(&self, stream: &Stream) -> Result<(), Error> {
        self.usable()?;
        capture::refuse_capture(stream)
    }
}
