//! Graph pools: memory for stream captures.
//!
//! A graph holds addresses and nothing else. So a pool is an arena of its own, whose addresses stay mapped as long as
//! a graph that was captured with them, an executable made of it, or a launch of that may use them: a *lease*. Inside
//! a capture memory is used again behind the nodes that used it last ([`order`]); across the captures of a pool it is
//! used again freely, because whoever shares a pool promises to launch its graphs one behind another.
//!
//! Here is the metadata of all pools of an allocator, under the heap's lock; calls of the driver stand in [`commit`].

pub(crate) mod addresses;
pub(crate) mod arena;
pub(crate) mod capture;
pub(crate) mod capturing;
pub(crate) mod check;
pub(crate) mod checkpoint;
pub(crate) mod commit;
pub(crate) mod few;
pub(crate) mod lease;
pub(crate) mod order;
pub(crate) mod plan;
pub(crate) mod scope;
pub(crate) mod user;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use crate::allocator::extent::hash::Mixed;
use crate::allocator::graph::arena::{Arena, Fit, Live, Mark, NO_STREAM, Pending, Place, Tag};
use crate::allocator::graph::capture::{Capture, Reached};
use crate::allocator::graph::commit::NotMade;
use crate::allocator::graph::few::Few;
use crate::allocator::graph::lease::{Lease, Leases};
use crate::allocator::graph::plan::{Lacking, Means, Plan};
use crate::allocator::graph::scope::Scopes;
use crate::allocator::graph::user::User;
use crate::allocator::size::GRANULE;
use crate::clock::Wakeup;
use crate::error::{Error, GraphPoolError};
use crate::sync::event::Pooled;

/// The pools of an allocator, the captures that use them, and who gets memory of which.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    pub pools: BTreeMap<u64, Pool>,
    pub captures: HashMap<u64, Capture, Mixed>,
    pub scopes: Scopes,
    /// What uses outside of captures end with, by number.
    pub events: BTreeMap<u64, Arc<Pooled>>,
    /// Uses that end with the streams of which nobody may ask any more: complete when everything was waited for.
    pub unasked: BTreeSet<u64>,
    /// Bytes that all pools hold from the driver, and that growth under way will add.
    pub held: u64,
    /// Woken when a lease is over.
    pub ended: Arc<Wakeup>,
    /// Streams by their handles that were retired, each with the count at the time. Only kept once there are
    /// checkpoints, which may name them.
    departed: Vec<(u64, User)>,
    has_checkpoints: bool,
    /// The pool with the memory of the block that had its place last.
    latest: u64,
    /// Pools and events so far.
    count: u64,
}

/// One pool.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    pub arena: Arena,
    /// Nobody begins to capture with it any more.
    pub released: bool,
    pub leases: Leases,
    /// Its memory is not there, or is about to go: nobody gets any of it.
    pub suspended: bool,
    /// Its memory is not there, and does not count.
    pub away: bool,
    /// A graph may use it of whose end the driver tells nobody.
    pub untold: bool,
    /// Calls that work on it without the lock.
    pub calls: u32,
    /// Bytes that these calls will add.
    planned: u64,
    /// Most bytes of live blocks at once.
    pub peak: u64,
}

/// What a graph pool holds, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Footprint {
    /// Of live blocks, after rounding.
    pub live: u64,
    /// How many those are.
    pub blocks: u64,
    /// Of free memory.
    pub free: u64,
    /// Most bytes of live blocks at once.
    pub peak: u64,
    /// Held from the driver.
    pub physical: u64,
    /// Graphs, with what was made of them, that may use the pool's addresses.
    pub leases: u64,
}

/// Who asks for memory of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asker {
    /// A stream of a capture: by its place there, which is good as long as the capture has this number.
    Captured {
        capture: u64,
        number: u64,
        stream: usize,
    },
    /// A stream outside of captures, by its number.
    Eager { stream: u64 },
}

impl Pool {
    /// Whether a graph may use it.
    pub(crate) fn is_leased(&self) -> bool {
        self.untold || self.has_leases()
    }

    /// Whether it has memory, and no live block.
    pub(crate) fn has_only_free(&self) -> bool {
        self.arena.live.is_empty() && self.arena.has_memory()
    }

    /// Whether a graph holds a lease.
    pub(crate) fn has_leases(&self) -> bool {
        self.leases.count() > 0
    }

    /// Whether a launch may write memory that work outside of captures asks for.
    fn is_leased_for(&self, asker: Asker) -> bool {
        matches!(asker, Asker::Eager { .. }) && self.is_leased()
    }
}

impl Graphs {
    pub(crate) fn number(&mut self) -> u64 {
        self.count += 1;
        self.count
    }

    pub(crate) fn add_pool(&mut self) -> u64 {
        let pool = self.number();
        let new = Pool {
            leases: Leases::new(&self.ended),
            ..Pool::default()
        };
        self.pools.insert(pool, new);
        pool
    }

    /// Notes the event that a use by a stream ends with.
    pub(crate) fn add_event(&mut self, stream: u64, event: Pooled) -> Pending {
        let number = self.number();
        self.events.insert(number, Arc::new(event));
        Pending {
            stream,
            event: number,
        }
    }

    /// Notes a use by a stream that may be gone.
    pub(crate) fn add_unasked(&mut self) -> Pending {
        let number = self.number();
        self.unasked.insert(number);
        Pending {
            stream: NO_STREAM,
            event: number,
        }
    }

    /// Whether the capture in which a stream became a user gets memory of a pool still: its stream is alive then.
    pub(crate) fn serves_capture_of(&self, user: &User, pool: u64) -> bool {
        let capture = user.since.and_then(|capture| self.captures.get(&capture));
        capture.is_some_and(|capture| !capture.left.contains(&pool))
    }

    /// Live blocks of all pools and their bytes.
    pub(crate) fn live_totals(&self) -> (u64, u64) {
        let arenas = self.pools.values().map(|pool| &pool.arena);
        arenas.fold((0, 0), |(blocks, bytes), arena| {
            (blocks + arena.live.len() as u64, bytes + arena.live.bytes())
        })
    }

    /// Counts the bytes that pools hold anew.
    pub(crate) fn recount(&mut self) {
        let pools = self.pools.values().filter(|pool| !pool.away);
        self.held = pools.map(|pool| pool.arena.held() + pool.planned).sum();
    }

    /// The pool of the live block that starts at an address. Mostly it is the one that had the last.
    pub(crate) fn pool_of(&self, addr: u64) -> Option<u64> {
        let has = |pool: &Pool| pool.arena.live.contains_key(&addr);
        if self.pools.get(&self.latest).is_some_and(has) {
            return Some(self.latest);
        }
        let mut pools = self.pools.iter();
        pools.find(|(_, pool)| has(pool)).map(|(id, _)| *id)
    }

    pub(crate) fn live(&self, addr: u64) -> Option<&Live> {
        self.pools.get(&self.pool_of(addr)?)?.arena.live.get(&addr)
    }

    pub(crate) fn live_mut(&mut self, addr: u64) -> Option<&mut Live> {
        let pool = self.pool_of(addr)?;
        self.pools.get_mut(&pool)?.arena.live.get_mut(addr)
    }

    // ---- memory -----------------------------------------------------------------------------------

    /// Takes room for a request out of memory that is there.
    pub(crate) fn take(&mut self, pool: u64, asker: Asker, fit: Fit) -> Option<Place> {
        let pool = self.pools.get_mut(&pool)?;
        let usable = usable(&self.captures, asker, pool.is_leased_for(asker));
        let arena = &mut pool.arena;
        if arena.hand_fits(fit, &usable) {
            return arena.take_hand();
        }
        arena.lay_down();
        let mut place = arena.find(fit, &usable)?;
        for part in &place.parts {
            let open = &mut place.open;
            arena.take_each(*part, |_, tag| open.extend(&tag.pending));
        }
        Some(place)
    }

    /// Free bytes of a pool's memory that an asker may use now, and those that it might use if no work outside of
    /// captures were pending.
    pub(crate) fn free_for(&self, pool: u64, asker: Asker) -> (u64, u64) {
        let Some(pool) = self.pools.get(&pool) else {
            return (0, 0);
        };
        let usable = usable(&self.captures, asker, pool.is_leased_for(asker));
        let (mut ready, mut waiting) = (0, 0);
        for (part, tag) in pool.arena.tags() {
            let bytes = u64::from(part.granules) * GRANULE;
            let done = Tag {
                pending: Vec::new(),
                ..tag.clone()
            };
            if usable(tag) {
                ready += bytes;
            } else if usable(&done) {
                waiting += bytes;
            }
        }
        (ready, waiting)
    }

    /// Plans more room. A plan stands for a call under way.
    pub(crate) fn plan(
        &mut self,
        pool: u64,
        asker: Asker,
        fit: Fit,
        means: &Means<'_>,
    ) -> Result<Plan, Lacking> {
        let Some(pool) = self.pools.get_mut(&pool) else {
            return Err(Lacking::Memory(fit.bytes()));
        };
        let usable = usable(&self.captures, asker, pool.is_leased_for(asker));
        pool.arena.lay_down();
        let runs = pool.arena.runs(usable);
        let plan = pool.arena.plan(fit, &runs, means)?;
        pool.calls += 1;
        pool.planned += plan.fresh_bytes();
        self.recount();
        Ok(plan)
    }

    /// Finds a home for a handle that moves into a pool, with no block in it yet. None if the pool lacks addresses.
    pub(crate) fn plan_free(&mut self, id: u64, bytes: u64) -> Option<u64> {
        let pool = self.pools.get_mut(&id)?;
        let home = pool.arena.homes.lowest(bytes)?;
        pool.arena.homes.cut(home, bytes);
        pool.calls += 1;
        pool.planned += bytes;
        self.recount();
        Some(home)
    }

    /// What was planned is there, with these new handles, or not. The block's place.
    pub(crate) fn planned(
        &mut self,
        id: u64,
        plan: Plan,
        made: Result<&[u64], &NotMade>,
    ) -> Option<Place> {
        let pool = self.pools.get_mut(&id)?;
        pool.calls -= 1;
        pool.planned -= plan.fresh_bytes();
        let place = match made {
            Ok(handles) => Some(pool.arena.planned(plan, handles)),
            Err(NotMade { failure, lost }) => {
                pool.arena.not_made(plan, failure, lost);
                None
            }
        };
        self.recount();
        place
    }

    /// A block has its place.
    #[inline]
    pub(crate) fn enter(&mut self, addr: u64, live: Live) {
        let Some(pool) = self.pools.get_mut(&live.owner) else {
            return;
        };
        self.latest = live.owner;
        pool.arena.live.insert(addr, live);
        pool.peak = pool.peak.max(pool.arena.live.bytes());
    }

    /// The use of a pool's memory by streams that capture, and by those that do not with what each of their uses ends
    /// with. None if a capture was forgotten since the order of its nodes was asked for.
    pub(crate) fn tag(
        &mut self,
        pool: u64,
        captured: Few<Reached>,
        pending: Vec<Pending>,
    ) -> Option<Tag> {
        let mut tag = Tag {
            pending,
            marks: Few::new(),
            captured: !captured.is_empty(),
            touched: Vec::new(),
        };
        for Reached {
            capture,
            number,
            seen,
        } in captured
        {
            // A capture that gets no more memory of the pool needs no order among its own uses.
            if !self.same_capture(capture, number)?.left.contains(&pool) {
                tag.marks.push(Mark { capture, seen });
            }
        }
        Some(tag)
    }

    /// Whether anything may wait for an event.
    pub(crate) fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Events that free memory of a pool waits for.
    pub(crate) fn awaited(&self, pool: u64) -> Vec<(u64, Arc<Pooled>)> {
        if self.events.is_empty() {
            return Vec::new();
        }
        let arena = self.pools.get(&pool).map(|pool| &pool.arena);
        let tags = arena.into_iter().flat_map(|arena| arena.tags());
        let pending = tags.flat_map(|(_, tag)| &tag.pending);
        let mut events: Vec<u64> = pending.map(|used| used.event).collect();
        events.sort_unstable();
        events.dedup();
        events
            .into_iter()
            .filter_map(|number| Some((number, Arc::clone(self.events.get(&number)?))))
            .collect()
    }

    /// Events were seen complete. What stood for them, or for memory that somebody has by now, which is let go
    /// without the lock.
    pub(crate) fn completed(&mut self, events: &[u64]) -> Vec<Arc<Pooled>> {
        let events: HashSet<u64, Mixed> = events.iter().copied().collect();
        let over = |used: &Pending| events.contains(&used.event);
        let mut awaited: HashSet<u64> = HashSet::new();
        for pool in self.pools.values_mut() {
            let arena = &mut pool.arena;
            arena.retag(|tag| tag.pending.retain(|used| !over(used)));
            for live in arena.live.values_mut() {
                live.pending.retain(|used| !over(used));
            }
            awaited.extend(arena.pending().map(|used| used.event));
        }
        self.unasked.retain(|number| awaited.contains(number));
        let known = self.events.keys().copied();
        let done: Vec<u64> = known.filter(|number| !awaited.contains(number)).collect();
        let done = done.iter();
        done.filter_map(|number| self.events.remove(number))
            .collect()
    }

    /// Removes the events of uses that nothing waits for any more; the caller drops them without the lock.
    pub(crate) fn spent(&mut self, uses: &[Pending]) -> Vec<Arc<Pooled>> {
        let uses = uses.iter();
        uses.filter_map(|used| self.events.remove(&used.event))
            .collect()
    }

    // ---- the end of a pool --------------------------------------------------------------------------

    /// Whether a released pool still exists.
    pub(crate) fn has_leaving(&self) -> bool {
        self.pools.values().any(|pool| pool.released)
    }

    /// The leases of a pool.
    ///
    /// # Errors
    /// The pool is gone.
    pub(crate) fn leases_of(&self, pool: u64) -> Result<Leases, Error> {
        let known = self.pools.get(&pool);
        let leases = known.map(|known| known.leases.clone());
        leases.ok_or(Error::GraphPool(GraphPoolError::Released))
    }

    /// Leases that still hold in all pools.
    pub(crate) fn count_leases(&self) -> u64 {
        self.pools.values().map(|pool| pool.leases.count()).sum()
    }

    /// Whether a graph holds a lease.
    pub(crate) fn are_leased(&self) -> bool {
        self.pools.values().any(Pool::has_leases)
    }

    /// A graph has a lease of a pool from here on, or the driver tells nobody of its end.
    pub(crate) fn add_lease(&mut self, pool: u64, lease: Option<Lease>) {
        if let Some(pool) = self.pools.get_mut(&pool) {
            match lease {
                Some(lease) => lease.hold(),
                None => pool.untold = true,
            }
        }
    }

    /// Any memory of a pool may be in a graph from here on, or none is in one.
    pub(crate) fn set_captured(&mut self, pool: u64, captured: bool) {
        if let Some(pool) = self.pools.get_mut(&pool) {
            let arena = &mut pool.arena;
            arena.retag(|tag| {
                tag.captured = captured;
                tag.touched.retain(|lease| !lease.is_over());
            });
            let live = arena.live.values_mut();
            live.for_each(|live| live.captured = captured);
        }
    }

    /// No capture is under way any more. All pools, and whether one was used by a graph of whose end nobody tells.
    pub(crate) fn end(&mut self) -> (Vec<u64>, bool) {
        let captures: Vec<u64> = self.captures.keys().copied().collect();
        captures.into_iter().for_each(|capture| self.ended(capture));
        let untold = self.pools.values().any(|pool| pool.untold);
        (self.pools.keys().copied().collect(), untold)
    }

    /// All work is over, that of graphs of whose end nobody tells as well.
    pub(crate) fn told(&mut self) {
        let pools = self.pools.values_mut();
        pools.for_each(|pool| pool.untold = false);
    }

    /// What a pool holds.
    pub(crate) fn footprint(&self, id: u64) -> Footprint {
        let Some(pool) = self.pools.get(&id) else {
            return Footprint::default();
        };
        let arena = &pool.arena;
        Footprint {
            live: arena.live.bytes(),
            blocks: arena.live.len() as u64,
            free: arena.free_bytes(),
            peak: pool.peak,
            physical: if pool.away { 0 } else { arena.held() },
            leases: pool.leases.count(),
        }
    }

    /// Whether nothing uses a pool's memory, and no graph can: no lease, no block, no work, no capture.
    pub(crate) fn is_idle(&self, id: u64) -> bool {
        let mut served = self.captures.values().flat_map(|known| &known.served);
        if served.any(|(_, pool)| *pool == id) {
            return false;
        }
        self.pools.get(&id).is_some_and(|pool| {
            let arena = &pool.arena;
            let quiet = |tag: &Tag| tag.pending.is_empty() && tag.marks.is_empty();
            pool.calls == 0
                && !pool.suspended
                && !pool.is_leased()
                && arena.live.is_empty()
                && arena.tags().all(|(_, tag)| quiet(tag))
        })
    }

    /// Whether a released pool is suspended and has no lease, no block and no call under way.
    pub(crate) fn is_unused(&self, id: u64) -> bool {
        self.pools.get(&id).is_some_and(|pool| {
            pool.released
                && !pool.is_leased()
                && pool.away
                && pool.calls == 0
                && pool.arena.live.is_empty()
        })
    }

    /// Takes out the arenas of pools that nothing uses: of all, or of those that were released. The released ones are
    /// gone then.
    pub(crate) fn take_idle(&mut self, all: bool) -> Vec<(u64, Arena)> {
        let pools: Vec<u64> = self.pools.keys().copied().collect();
        let mut taken = Vec::new();
        for id in pools {
            let goes = |pool: &Pool| (all || pool.released) && pool.arena.has_memory();
            if !self.pools.get(&id).is_some_and(goes) || !self.is_idle(id) {
                continue;
            }
            if let Some(pool) = self.pools.get_mut(&id) {
                pool.calls += 1;
                let arena = std::mem::take(&mut pool.arena);
                pool.planned += arena.held();
                taken.push((id, arena));
            }
        }
        self.forget_released();
        taken
    }

    /// What could not be given back of so many bytes of a pool stays there.
    pub(crate) fn put_back(&mut self, id: u64, held: u64, left: Arena) {
        if let Some(pool) = self.pools.get_mut(&id) {
            pool.calls -= 1;
            pool.planned -= held;
            pool.arena.absorb(left);
        }
        self.recount();
        self.forget_released();
    }

    /// Forgets pools that were released and hold nothing.
    pub(crate) fn forget_released(&mut self) {
        let gone: Vec<u64> = self
            .pools
            .iter()
            .filter(|(_, pool)| pool.released && pool.calls == 0 && !pool.arena.has_memory())
            .map(|(id, _)| *id)
            .collect();
        for id in gone {
            if self.is_idle(id) {
                self.pools.remove(&id);
            }
        }
    }
}

/// Which free memory somebody may have; `leased`: a graph may write what captures were given.
fn usable(
    captures: &HashMap<u64, Capture, Mixed>,
    asker: Asker,
    leased: bool,
) -> impl Fn(&Tag) -> bool {
    let order = match asker {
        Asker::Captured {
            capture, number, ..
        } => {
            let known = captures.get(&capture);
            let known = known.filter(|known| known.number == number);
            known.map(|known| &known.order)
        }
        Asker::Eager { .. } => None,
    };
    move |tag| match asker {
        Asker::Eager { stream } => {
            // A launch would write what a graph was captured with.
            !(tag.captured && leased)
                && tag.touched.iter().all(Lease::is_over)
                && tag.marks.is_empty()
                && tag.pending.iter().all(|used| used.stream == stream)
        }
        Asker::Captured {
            capture, stream, ..
        } => {
            let behind = |mark: &Mark| {
                mark.capture == capture
                    && order.is_some_and(|order| order.is_behind(&mark.seen, stream))
            };
            // A wait for work outside would become the graph's.
            tag.pending.is_empty() && tag.marks.iter().all(behind)
        }
    }
}
