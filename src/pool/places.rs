//! Where the buffers of a typed pool are and were, for one device.

use std::any::TypeId;
use std::ptr::NonNull;
use std::sync::Arc;

use super::error::{PoolError, zero_is_invalid};
use super::notes::{Gone, Left, Notes, Sought, TRIES, TypedStats};
use super::surplus::Surplus;
use crate::allocator::{Allocator, Beside, Block, Error, Request, Sides};
use crate::buffer::{DeviceBuffer, DeviceCopy, Memory};
use crate::driver::{Stream, process, sys};
use crate::sync::lock::Lock;

/// A typed pool's part for one device.
pub(super) struct Cache {
    pub surplus: Arc<Surplus>,
    pub allocator: Allocator,
    /// Of blocks that come from fronts, each under its front's lock,
    sides: Sides<Notes>,
    /// and of all others.
    rest: Lock<Notes>,
}

/// Notes, by whose lock they are under.
#[derive(Clone, Copy)]
enum Desk<'a> {
    Side(&'a Beside<Notes>),
    Rest(&'a Lock<Notes>),
}

impl Desk<'_> {
    fn with<R>(self, run: impl FnOnce(&mut Notes) -> R) -> R {
        match self {
            Desk::Side(side) => side.with(run),
            Desk::Rest(rest) => run(&mut rest.lock()),
        }
    }
}

/// A request under way, and where its memory might be.
pub(super) struct Asked<'a> {
    desk: Desk<'a>,
    hints: [sys::CUdeviceptr; TRIES],
    count: usize,
}

impl Asked<'_> {
    /// The addresses returned last, the newest first.
    pub fn hints(&self) -> &[sys::CUdeviceptr] {
        &self.hints[..self.count]
    }
}

impl Cache {
    pub fn new(surplus: Arc<Surplus>, allocator: Allocator) -> Arc<Cache> {
        Arc::new(Cache {
            surplus,
            allocator,
            sides: Sides::default(),
            rest: Lock::new(Notes::default()),
        })
    }

    fn desks(&self) -> impl Iterator<Item = Desk<'_>> {
        let sides = self.sides.iter().map(Desk::Side);
        let all = sides.chain([Desk::Rest(&self.rest)]);
        // In a forked child a lock may be held by a thread that does not exist there.
        all.take_while(|_| !process::is_forked_child())
    }

    fn desk_of(&self, block: &Block) -> Desk<'_> {
        match block.front() {
            Some(front) => Desk::Side(self.sides.of(front)),
            None => Desk::Rest(&self.rest),
        }
    }

    /// The memory that the stream returned last, if the front of the thread would give it out next:
    /// one step under one lock.
    #[inline(always)]
    pub fn at_once<T: DeviceCopy>(
        &self,
        sought: &Sought,
        len: usize,
        stream: &Stream,
    ) -> Option<(DeviceBuffer<T>, Place)> {
        let engine = self.allocator.engine();
        let (side, grant, (slot, lent)) = engine.take_beside(
            &self.sides,
            (sought.stream, sought.bytes),
            |notes| notes.latest(sought),
            |notes, address| notes.taken(sought, address, stream),
        )?;
        let block = Block::new(engine, grant, sought.bytes);
        let memory = if lent {
            // SAFETY: the notes keep a clone of just this stream while the buffer is live, as far as
            // they know, and its place is the last thing of it that goes.
            unsafe { Memory::on_lent_stream(block, stream, sought.stream) }
        } else {
            Memory::new(block, stream.clone(), sought.stream)
        };
        let place = Place {
            cache: NonNull::from(self),
            side: Some(NonNull::from(side)),
            slot,
        };
        Some((DeviceBuffer::over(memory, len), place))
    }

    /// Begins a request; [`answered`](Self::answered) ends one that did not fail.
    pub fn ask(
        &self,
        sought: &Sought,
        alignment: usize,
        stream: &Stream,
    ) -> Result<Asked<'_>, Error> {
        let engine = self.allocator.engine();
        engine.usable()?;
        let front = if engine.is_small(sought.bytes, alignment) {
            engine.front_for(stream)?
        } else {
            None
        };
        let desk = match front {
            Some(front) => Desk::Side(self.sides.of(front)),
            None => Desk::Rest(&self.rest),
        };
        let (hints, count) = desk.with(|notes| notes.hints(sought));
        Ok(Asked { desk, hints, count })
    }

    /// A request was a hit or a miss. Of its hints only those stay that lie in free memory still.
    pub fn answered(&self, sought: &Sought, asked: &Asked<'_>, hit: bool, free: &[u64]) {
        asked.desk.with(|notes| {
            let gone = asked.hints().iter().filter(|hint| !free.contains(hint));
            gone.for_each(|hint| notes.forget(sought, *hint));
            if hit {
                notes.stats.hits += 1;
            } else {
                notes.stats.misses += 1;
            }
        });
    }

    /// Gives a place to a buffer of a block.
    pub fn enter(self: &Arc<Self>, sought: &Sought, block: &Block, stream: &Stream) -> Place {
        let desk = self.desk_of(block);
        // What others cost hides the cost of counting a stream's users.
        let small = matches!(desk, Desk::Side(_));
        let (slot, lends, former) = desk.with(|notes| {
            let slot = notes.enter(sought, block.ptr(), self);
            let lends = small && notes.may_lend(stream);
            let former = lends.then(|| notes.lend(stream)).flatten();
            (slot, lends, former)
        });
        drop(former);
        if lends {
            self.let_go_of_streams();
        }
        Place {
            cache: NonNull::from(&**self),
            side: match desk {
                Desk::Side(side) => Some(NonNull::from(side)),
                Desk::Rest(_) => None,
            },
            slot,
        }
    }

    /// Where to note that a block which nobody names was freed: to be asked before.
    pub fn when_returned(&self, address: sys::CUdeviceptr) -> impl FnOnce(&Sought) + use<'_> {
        let desk = match self.allocator.engine().front_at(address) {
            Some(front) => Desk::Side(self.sides.of(front)),
            None => Desk::Rest(&self.rest),
        };
        move |sought| desk.with(|notes| notes.remember(sought, address))
    }

    /// Addresses of the live buffers of a rounded length and type.
    pub fn live(&self, capacity: usize, element: TypeId) -> Vec<sys::CUdeviceptr> {
        let mut live = Vec::new();
        for desk in self.desks() {
            desk.with(|notes| live.extend(notes.named(capacity, element)));
        }
        live
    }

    pub fn stats(&self) -> TypedStats {
        let mut sum = TypedStats::default();
        for desk in self.desks() {
            sum.add(desk.with(|notes| notes.stats));
        }
        sum
    }

    pub fn reset_stats(&self) {
        for desk in self.desks() {
            desk.with(|notes| notes.stats = TypedStats::default());
        }
    }

    /// Lets go of streams that nobody else holds, but the allocator.
    pub fn let_go_of_streams(&self) {
        for desk in self.desks() {
            drop(desk.with(Notes::idle_stream));
        }
    }

    /// Nobody can take buffers any more.
    pub fn close(&self) {
        let gone: Vec<Gone> = self.desks().map(|desk| desk.with(Notes::close)).collect();
        drop(gone);
    }
}

/// A request whose numbers are in order.
pub(super) struct Wish<'a> {
    pub cache: &'a Arc<Cache>,
    pub len: usize,
    pub alignment: usize,
    pub sought: Sought,
}

impl Wish<'_> {
    fn request(&self) -> Request {
        Request::new(self.sought.bytes).align(self.alignment)
    }

    /// A block from memory at hand, else a new one.
    pub fn obtain(&self, stream: &Stream) -> Result<Block, PoolError> {
        if let Some(found) = self.at_hand(stream)? {
            return Ok(found);
        }
        self.cache.surplus.release(true);
        let allocator = &self.cache.allocator;
        let made = allocator.allocate_with(self.request(), stream);
        made.map_err(zero_is_invalid)
    }

    /// A block from memory at hand.
    pub fn at_hand(&self, stream: &Stream) -> Result<Option<Block>, PoolError> {
        let (cache, sought) = (self.cache, &self.sought);
        let asked = cache.ask(sought, self.alignment, stream)?;
        let allocator = &cache.allocator;
        let (block, free) = allocator.allocate_near(self.request(), stream, asked.hints())?;
        cache.answered(sought, &asked, block.is_some(), &free);
        Ok(block)
    }
}

/// A live buffer's place in the notes of its cache. Ends when that is given back, or with
/// [`leave`](Self::leave) and [`end`](Self::end).
pub(super) struct Place {
    /// Kept by the notes while the place is taken.
    cache: NonNull<Cache>,
    /// The notes: beside a front, or the rest's.
    side: Option<NonNull<Beside<Notes>>>,
    slot: u32,
}

// SAFETY: a `Cache` is `Send` and `Sync`, and what is beside a front may be reached by any thread.
unsafe impl Send for Place {}
// SAFETY: as above.
unsafe impl Sync for Place {}

impl Place {
    #[inline]
    fn cache(&self) -> &Cache {
        // SAFETY: the notes keep the cache while the place is taken.
        unsafe { self.cache.as_ref() }
    }

    #[inline]
    fn side(&self) -> Option<&Beside<Notes>> {
        // SAFETY: it lies in the cache.
        self.side.map(|side| unsafe { side.as_ref() })
    }

    fn with<R>(&self, run: impl FnOnce(&mut Notes) -> R) -> R {
        match self.side() {
            Some(side) => side.with(run),
            None => run(&mut self.cache().rest.lock()),
        }
    }

    /// The buffer is to be returned on another stream than its own.
    pub fn move_to(&self, stream: u64) {
        self.with(|notes| notes.move_to(self.slot, stream));
    }

    /// Frees the buffer, and the place, if that takes no more than the front of the block.
    ///
    /// # Safety
    /// If it returns true both are gone: they must not be used, nor dropped.
    #[inline(always)]
    pub unsafe fn give_back_at_once<T: DeviceCopy>(&self, buffer: &mut DeviceBuffer<T>) -> bool {
        let Some(side) = self.side() else {
            return false;
        };
        if self.cache().surplus.is_bounded() {
            return false;
        }
        let note = |notes: &mut Notes| {
            let left = notes.leave(self.slot);
            notes.end(left)
        };
        // SAFETY: the caller's contract.
        match unsafe { buffer.free_beside(side, note) } {
            Some(last) => {
                if last {
                    self.close();
                }
                true
            }
            None => false,
        }
    }

    /// Frees the buffer, and the place.
    #[inline(never)]
    pub fn give_back<T: DeviceCopy>(self, buffer: DeviceBuffer<T>) {
        if process::is_gone() {
            // In a forked child a lock may be held by a thread that does not exist there.
            return std::mem::forget(buffer);
        }
        let left = self.leave();
        drop(buffer);
        self.end(left);
    }

    /// Just before the buffer is freed. Afterwards, [`end`](Self::end) or [`stay`](Self::stay).
    pub fn leave(&self) -> (Option<Sought>, Left) {
        self.with(|notes| (notes.sought(self.slot), notes.leave(self.slot)))
    }

    /// The buffer could not be freed.
    pub fn stay(&mut self, (sought, left): (Option<Sought>, Left), address: sys::CUdeviceptr) {
        if let Some(sought) = sought {
            self.slot = self.with(|notes| notes.stay(&sought, address, &left));
        }
    }

    /// The buffer was freed.
    pub fn end(self, (_, left): (Option<Sought>, Left)) {
        self.cache().surplus.release(false);
        if self.with(|notes| notes.end(left)) {
            self.close();
        }
    }

    /// The cache goes with this, unless others use it.
    #[cold]
    #[inline(never)]
    fn close(&self) {
        let gone = self.with(Notes::close);
        drop(gone);
    }
}
