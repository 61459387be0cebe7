//! Graph pools: who gets memory of which, what a capture did with it, and its way back.
//!
//! A stream that captures is asked in calls that name it, or that free what it used, and only what a capture allows:
//! whether it captures, in which capture, and behind which nodes. No event is recorded on it, and nothing waits
//! for it.

use std::sync::atomic::Ordering;
use std::thread;

use crate::driver::{CaptureInfo, Dependency, Stream, process, sys};
use crate::sync::capture::is_of_capture;
use crate::sync::event::Pooled;

use crate::allocator::cache::grant::Grant;
use crate::allocator::engine::Engine;
use crate::allocator::engine::naming::Named;
use crate::allocator::graph::arena::{Addresses, Arena, Live, Pending};
use crate::allocator::graph::commit;
use crate::allocator::graph::order::Edge;
use crate::allocator::graph::plan::Lacking;
use crate::allocator::graph::scope::{Answer, Asked, Kind};
use crate::allocator::graph::user::User;
use crate::allocator::graph::{Asker, Graphs};
use crate::allocator::heap::graph::PoolRequest;
use crate::allocator::heap::request::Checked;
use crate::allocator::size::PHYSICAL_GRANULE;
use crate::allocator::stream::slot::{AfterFree, is_special};
use crate::error::{Error, GraphPoolError};

/// Addresses are leased for a pool in steps of so many bytes at least.
const FIRST_LEASE: u64 = 1 << 30;

impl Engine {
    /// Whether requests may go to graph pools.
    #[inline]
    pub(crate) fn is_scoped(&self) -> bool {
        self.scopes.load(Ordering::Relaxed) > 0
    }

    // ---- pools and scopes ---------------------------------------------------------------------------

    /// Makes a pool; its number.
    pub(crate) fn add_pool(&self) -> Result<u64, Error> {
        if !self.rules.maps() {
            return Err(Error::NotSupported {
                what: "graph pools without virtual memory management",
            });
        }
        Ok(self.open()?.graphs.add_pool())
    }

    /// Opens a scope; its number. From here on calls look where they belong.
    pub(crate) fn enter_scope(&self, pool: u64, kind: Kind) -> Result<u64, Error> {
        let mut heap = self.open()?;
        usable_pool(&heap.graphs, pool)?;
        let scope = heap.graphs.scopes.add(pool, kind);
        process::watch();
        self.scopes.fetch_add(1, Ordering::Relaxed);
        Ok(scope)
    }

    /// Closes a scope.
    pub(crate) fn leave_scope(&self, scope: u64) -> Result<(), Error> {
        if process::is_forked_child() {
            return Err(Error::ForkedChild);
        }
        let left = self.lock().graphs.leave(scope);
        if !left {
            return Err(Error::GraphPool(GraphPoolError::NotEntered));
        }
        self.scopes.fetch_sub(1, Ordering::Relaxed);
        process::unwatch(1);
        self.tidy_pools();
        Ok(())
    }

    /// No further capture comes to a pool.
    pub(crate) fn release_pool(&self, pool: u64) -> Result<(), Error> {
        {
            let mut heap = self.open()?;
            usable_pool(&heap.graphs, pool)?;
            if let Some(pool) = heap.graphs.pools.get_mut(&pool) {
                pool.released = true;
            }
            heap.graphs.forget_released();
        }
        self.tidy_pools();
        Ok(())
    }

    /// Has a graph that was not captured keep a pool's memory.
    ///
    /// # Safety
    /// `graph` must be live, and nobody uses it meanwhile.
    pub(crate) unsafe fn retain_for(&self, pool: u64, graph: sys::CUgraph) -> Result<(), Error> {
        usable_pool(&self.open()?.graphs, pool)?;
        // SAFETY: the caller's contract.
        let lease = unsafe { commit::retain(&self.context, graph) }.map_err(|e| self.error(e))?;
        let mut heap = self.open()?;
        usable_pool(&heap.graphs, pool)?;
        if let Some(pool) = heap.graphs.pools.get_mut(&pool) {
            pool.leases.push(lease);
        }
        Ok(())
    }

    // ---- captures -----------------------------------------------------------------------------------

    fn user_of(named: &Named<'_>) -> User {
        User {
            key: named.key,
            raw: named.raw as usize,
            stream: named.kept().cloned(),
        }
    }

    /// The capture that a stream is in.
    fn capture_of(&self, user: &User) -> Result<Option<CaptureInfo>, Error> {
        let raw: sys::CUstream = std::ptr::with_exposed_provenance_mut(user.raw);
        let context = user.stream.as_ref().map_or(&self.context, Stream::context);
        let current = match is_special(raw) {
            true => Some(context.make_current().map_err(|e| self.error(e))?),
            false => None,
        };
        // SAFETY: whoever named the stream vouched for it, and special handles are valid while a context is current.
        let asked = unsafe {
            match self.driver().is_capturing(raw) {
                Ok(true) => self.driver().capture_info(raw),
                answer => answer.map(|_| None),
            }
        };
        drop(current);
        asked.map_err(|error| match is_of_capture(error.code()) {
            true => Error::Capturing { stream: user.raw },
            false => self.error(error),
        })
    }

    /// Finds out what a stream is behind in its capture. Its place there.
    fn advance(&self, user: &User, info: &CaptureInfo) -> Result<usize, Error> {
        let present = info.dependencies.iter().map(edge).collect();
        let (place, mut walk) = {
            let mut heap = self.open()?;
            let capture = heap.graphs.captures.entry(info.id).or_default();
            let place = capture.place_of(user);
            match capture.order.walk(place, present) {
                Some(walk) => (place, walk),
                None => return Ok(place),
            }
        };
        let over = Error::Capturing { stream: user.raw };
        loop {
            let next = {
                let mut heap = self.open()?;
                match heap.graphs.captures.get_mut(&info.id) {
                    Some(capture) => capture.order.next(&mut walk),
                    None => return Err(over),
                }
            };
            let Some(node) = next else {
                return Ok(place);
            };
            let raw = std::ptr::with_exposed_provenance_mut(node);
            // SAFETY: a node of the capture that the stream is in, whose graph nobody else uses while the stream is
            // being used.
            let asked = unsafe { self.driver().node_dependencies(raw) };
            let mut heap = self.lock();
            let Some(capture) = heap.graphs.captures.get_mut(&info.id) else {
                return Err(over);
            };
            match asked {
                Ok(dependencies) => {
                    let dependencies = dependencies.iter().map(edge).collect();
                    capture.order.learn(node, dependencies);
                }
                Err(error) => {
                    capture.order.give_up(&walk);
                    return Err(self.error(error));
                }
            }
        }
    }

    // ---- allocation ---------------------------------------------------------------------------------

    /// Allocates from the pool that a request belongs to, if it belongs to one.
    #[inline(never)]
    pub(crate) fn allocate_in_pool(
        &self,
        named: &Named<'_>,
        request: &Checked,
        cached_only: bool,
    ) -> Result<Option<Grant>, Error> {
        self.usable()?;
        let user = Self::user_of(named);
        let info = self.capture_of(&user)?;
        let Some((scope, pool)) = self.resolve(&user, info.as_ref())? else {
            return Ok(None);
        };
        if let Some(stream) = named.stream
            && stream.context().device() != &self.device
        {
            return Err(Error::WrongDevice {
                expected: self.device.ordinal(),
                found: stream.context().device().ordinal(),
            });
        }
        usable_pool(&self.open()?.graphs, pool)?;
        self.free_deferred();
        let asker = match &info {
            None => Asker::Eager {
                stream: user.key.number(),
            },
            Some(info) => {
                self.lease(info, scope, pool)?;
                Asker::Captured {
                    capture: info.id,
                    stream: self.advance(&user, info)?,
                }
            }
        };
        self.ask_pool_events(pool, false)?;
        let request = PoolRequest {
            pool,
            asker,
            fit: request.fit(),
            requested: request.requested,
            views: request.views && self.views_allowed(),
        };
        self.obtain_in_pool(&request, user, cached_only).map(Some)
    }

    /// The scope and the pool of a request.
    fn resolve(
        &self,
        user: &User,
        info: Option<&CaptureInfo>,
    ) -> Result<Option<(u64, u64)>, Error> {
        let asked = Asked {
            user,
            capture: info.map(|info| info.id),
            thread: thread::current().id(),
        };
        let mut filtered = false;
        loop {
            let answer = {
                let mut heap = self.open()?;
                heap.graphs.notice(user, asked.capture);
                heap.graphs.scopes.resolve(&asked, filtered)
            };
            match answer {
                Answer::Pool { scope, pool } => return Ok(Some((scope, pool))),
                Answer::Nobody => return Ok(None),
                Answer::Filters(filters) => {
                    let raw: sys::CUstream = std::ptr::with_exposed_provenance_mut(user.raw);
                    let mut filters = filters.into_iter();
                    if let Some((scope, pool, _)) = filters.find(|(_, _, filter)| filter(raw)) {
                        return Ok(Some((scope, pool)));
                    }
                    filtered = true;
                }
            }
        }
    }

    /// Has a capture's graph keep the pool's memory before it gets any.
    fn lease(&self, info: &CaptureInfo, scope: u64, pool: u64) -> Result<(), Error> {
        let lacks = self.open()?.graphs.lacks_lease(info.id, pool);
        let (lease, told) = match lacks {
            false => (None, true),
            // SAFETY: the graph is that of the capture which the calling stream is in.
            true => match unsafe { commit::retain(&self.context, info.graph) } {
                Ok(lease) => (Some(lease), true),
                Err(error) if error.code() == sys::CUresult::CUDA_ERROR_NOT_FOUND => (None, false),
                Err(error) => return Err(self.error(error)),
            },
        };
        let mut heap = self.lock();
        heap.graphs.serve(info.id, scope, pool, lease);
        if let Some(pool) = heap.graphs.pools.get_mut(&pool)
            && !told
        {
            pool.untold = true;
        }
        Ok(())
    }

    /// Takes a request from the pool's memory, or makes room for it.
    fn obtain_in_pool(
        &self,
        request: &PoolRequest,
        user: User,
        cached_only: bool,
    ) -> Result<Grant, Error> {
        let mut trimmed = false;
        loop {
            let mut heap = self.open()?;
            usable_pool(&heap.graphs, request.pool)?;
            let taken = heap.graphs.take(request.pool, request.asker, request.fit);
            if let Some(place) = taken {
                return Ok(heap.pooled_born(request.pool, request.sizes(), place, vec![user]));
            }
            if cached_only {
                return Err(Error::NotCached);
            }
            let plan = match heap.plan_in_pool(request) {
                Ok(plan) => plan,
                Err(Lacking::Homes(bytes)) => {
                    drop(heap);
                    self.lease_addresses(request.pool, bytes, |arena| &mut arena.homes)?;
                    continue;
                }
                Err(Lacking::Sites(bytes)) => {
                    drop(heap);
                    self.lease_addresses(request.pool, bytes, |arena| &mut arena.sites)?;
                    continue;
                }
                Err(Lacking::Memory(_)) if !trimmed => {
                    drop(heap);
                    trimmed = true;
                    self.make_room()?;
                    continue;
                }
                Err(Lacking::Memory(_)) => {
                    let error = heap.out_of_memory(request.requested);
                    drop(heap);
                    return Err(self.out_of_memory(error, None));
                }
            };
            drop(heap);
            let made = commit::make(&self.maker(), &plan);
            let mut heap = self.lock();
            let place = heap.graphs.planned(request.pool, plan, made.as_deref());
            match made {
                Ok(_) => {
                    if let Some(place) = place {
                        return Ok(heap.pooled_born(
                            request.pool,
                            request.sizes(),
                            place,
                            vec![user],
                        ));
                    }
                }
                Err(not_made) => {
                    let cause = not_made.failure.error;
                    if !cause.is_out_of_memory() {
                        drop(heap);
                        return Err(self.error(cause));
                    }
                    if trimmed {
                        let error = heap.out_of_memory(request.requested);
                        drop(heap);
                        return Err(self.out_of_memory(error, Some(cause)));
                    }
                    drop(heap);
                    trimmed = true;
                    self.make_room()?;
                }
            }
        }
    }

    /// Gives back what other memory can spare, without a wait.
    fn make_room(&self) -> Result<(), Error> {
        match self.trim(0) {
            Ok(_) => Ok(()),
            Err(Error::ContextLost(error)) => Err(Error::ContextLost(error)),
            // What could not be given back stays where it was.
            Err(_) => Ok(()),
        }
    }

    /// Leases addresses for a pool.
    fn lease_addresses(
        &self,
        pool: u64,
        bytes: u64,
        of: impl Fn(&mut Arena) -> &mut Addresses,
    ) -> Result<(), Error> {
        let (end, held) = {
            let mut heap = self.lock();
            let Some(known) = heap.graphs.pools.get_mut(&pool) else {
                return Err(Error::GraphPool(GraphPoolError::Released));
            };
            let addresses = of(&mut known.arena);
            (addresses.end(), addresses.held())
        };
        let least = bytes.next_multiple_of(PHYSICAL_GRANULE);
        let usual = held.clamp(FIRST_LEASE, self.total_memory.max(FIRST_LEASE));
        let lengths = [usual.max(least).next_multiple_of(PHYSICAL_GRANULE), least];
        let leased = self.addresses.lease_for(&self.context, end, lengths);
        let lease = leased.map_err(|e| self.error(e))?;
        let mut heap = self.lock();
        match heap.graphs.pools.get_mut(&pool) {
            Some(pool) => of(&mut pool.arena).add(lease.base, lease.bytes, lease.grown),
            None => self.addresses.give_back(lease.base, lease.bytes),
        }
        Ok(())
    }

    // ---- frees and uses -------------------------------------------------------------------------------

    /// Frees a live block of a pool by its identity.
    #[inline(never)]
    pub(crate) fn free_pooled(&self, life: (u32, u32), ptr: u64) -> Result<(), Error> {
        let gone = || Error::NotLive { ptr };
        let Live { users, pending, .. } = {
            let heap = self.open()?;
            let live = heap.graphs.live(ptr).filter(|_| heap.is_pooled(life));
            live.cloned().ok_or_else(gone)?
        };
        let (mut captured, mut ends) = (Vec::new(), Vec::new());
        for user in users.iter().cloned() {
            match self.capture_of(&user)? {
                Some(info) => {
                    self.advance(&user, &info)?;
                    captured.push((info.id, user));
                }
                None => {
                    let event = self.end_of(&user)?;
                    ends.push((user, event));
                }
            }
        }
        let mut heap = self.open()?;
        if !heap.is_pooled(life) {
            return Err(gone());
        }
        let mut pending: Vec<Pending> = pending;
        for (user, event) in ends {
            heap.graphs.notice(&user, None);
            pending.push(heap.graphs.add_event(user.key.number(), event));
        }
        let tag = heap.graphs.tag(&captured, pending);
        let freed = heap.pooled_freed(ptr, &tag);
        let rest = self.rest_of_free(&heap, AfterFree::default());
        drop(heap);
        drop((freed, users));
        self.tidy_pools();
        self.finish_free(rest);
        Ok(())
    }

    /// An event behind everything that a stream outside of captures was given so far.
    fn end_of(&self, user: &User) -> Result<Pooled, Error> {
        let recorded = match &user.stream {
            Some(stream) => self.events.record(stream),
            None => {
                let raw = std::ptr::with_exposed_provenance_mut(user.raw);
                let named = Named {
                    key: user.key,
                    raw,
                    stream: None,
                };
                let context = self.context_of(&named)?;
                // SAFETY: the stream lives until it is retired, by the contract for raw streams.
                let stream = unsafe { Stream::from_raw(&context, raw) };
                stream.and_then(|stream| self.events.record(&stream))
            }
        };
        recorded.map_err(|error| match is_of_capture(error.code()) {
            true => Error::Capturing { stream: user.raw },
            false => self.error(error),
        })
    }

    /// Records a use of a block of a pool on another stream.
    pub(crate) fn record_pooled(
        &self,
        (start, life): (u64, (u32, u32)),
        named: &Named<'_>,
        now: bool,
    ) -> Result<(), Error> {
        let user = Self::user_of(named);
        let captured = self.capture_of(&user)?;
        let end = match (now, &captured) {
            (true, None) => Some(self.end_of(&user)?),
            _ => None,
        };
        let mut heap = self.open()?;
        heap.graphs.notice(&user, captured.map(|info| info.id));
        if !heap.is_pooled(life) {
            return Err(Error::NotLive { ptr: start });
        }
        let ended = end.map(|event| heap.graphs.add_event(user.key.number(), event));
        if let Some(live) = heap.graphs.live_mut(start) {
            let known = live.users.iter().any(|known| known.is(&user));
            match ended {
                Some(_) if known => {}
                Some(ended) => live.pending.push(ended),
                None if known => {}
                None => live.users.push(user),
            }
        }
        Ok(())
    }

    /// Whether a live block of a pool was used by a stream.
    pub(crate) fn pools_know(&self, named: &Named<'_>) -> bool {
        let user = Self::user_of(named);
        let heap = self.lock();
        let pools = heap.graphs.pools.values();
        let mut users =
            pools.flat_map(|pool| pool.arena.live.values().flat_map(|live| &live.users));
        users.any(|known| known.is(&user))
    }

    /// A stream gets no more work, and its handle is not touched any more: what it used of pools it has used.
    pub(crate) fn leave_pools(&self, named: &Named<'_>) -> Result<(), Error> {
        let user = Self::user_of(named);
        if !self.pools_know(named) {
            return Ok(());
        }
        let event = self.end_of(&user)?;
        let mut heap = self.open()?;
        let end = heap.graphs.add_event(user.key.number(), event);
        let (mut gone, pools) = (Vec::new(), heap.graphs.pools.values_mut());
        for live in pools.flat_map(|pool| pool.arena.live.values_mut()) {
            let before = gone.len();
            gone.extend(live.users.extract_if(.., |known| known.is(&user)));
            if gone.len() > before {
                live.pending.push(end);
            }
        }
        drop(heap);
        // They may be the last to hold the stream.
        drop(gone);
        Ok(())
    }
}

/// Refuses a pool that was released.
pub(crate) fn usable_pool(graphs: &Graphs, pool: u64) -> Result<(), Error> {
    match graphs.pools.get(&pool) {
        Some(pool) if !pool.released => Ok(()),
        _ => Err(Error::GraphPool(GraphPoolError::Released)),
    }
}

fn edge(dependency: &Dependency) -> Edge {
    Edge {
        node: dependency.node.expose_provenance(),
        full: dependency.is_complete(),
    }
}
