//! Graph pools: the choice of the pool for a request, the uses of its memory in a capture, and its release.
//!
//! A capturing stream is queried only in calls that name it or that free memory it used, and only by queries that a
//! capture allows: whether it captures, in which capture, and behind which nodes. No event is recorded on it, and no
//! wait is made for it.

use std::sync::atomic::Ordering;

use crate::allocator::graph::pooled;
use crate::allocator::inspect::shortage::out_of_memory_in_pool;
use crate::driver::{Dependency, DriverError, Stream, process, sys};
use crate::sync::capture::is_of_capture;

use crate::allocator::cache::grant::Grant;
use crate::allocator::engine::Engine;
use crate::allocator::engine::naming::Named;
use crate::allocator::graph::addresses::Addresses;
use crate::allocator::graph::arena::{Arena, Fit};
use crate::allocator::graph::capture::{Capture, Present, Way};
use crate::allocator::graph::commit;
use crate::allocator::graph::few::Few;
use crate::allocator::graph::order::Edge;
use crate::allocator::graph::plan::Lacking;
use crate::allocator::graph::pooled::PoolRequest;
use crate::allocator::graph::scope::{Answer, Asked, Kind, as_predicate, is_in_predicate};
use crate::allocator::graph::user::User;
use crate::allocator::graph::{Asker, Graphs};
use crate::allocator::heap::request::Checked;
use crate::allocator::size::PHYSICAL_GRANULE;
use crate::allocator::stream::slot::{StreamKey, is_per_thread, is_special};
use crate::error::{Error, GraphPoolError, StreamMisuse};
use crate::locks::thread_id::ThreadId;

/// Minimum step, in bytes, in which addresses are leased for a pool.
const FIRST_LEASE: u64 = 1 << 30;

impl Engine {
    /// Whether requests may go to graph pools.
    #[inline]
    pub(crate) fn is_scoped(&self) -> bool {
        self.scopes.load(Ordering::Relaxed) > 0
    }

    // ---- pools and scopes ---------------------------------------------------------------------------

    /// Creates a pool and returns its number.
    pub(crate) fn add_pool(&self) -> Result<u64, Error> {
        if !self.rules.maps() {
            return Err(Error::NotSupported {
                what: "graph pools without virtual memory management",
            });
        }
        Ok(self.open()?.graphs.add_pool())
    }

    /// Opens a scope and returns its number. From here on requests look up their scope.
    pub(crate) fn enter_scope(&self, pool: u64, kind: Kind) -> Result<u64, Error> {
        let uncovered = {
            let mut heap = self.open()?;
            usable_pool(&heap.graphs, pool)?;
            heap.empty_large_caches();
            heap.streams.kept_uncovered()
        };
        // Once a stream captures, only an earlier marker shows when memory that was freed on it before is idle.
        self.mark_all(uncovered);
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
        self.review_pool_captures();
        let left = self.lock().graphs.leave(scope);
        if left.is_none() {
            return Err(Error::GraphPool(GraphPoolError::NotEntered));
        }
        // A dropped filter may own objects whose drop calls the allocator.
        drop(left);
        self.scopes.fetch_sub(1, Ordering::Relaxed);
        process::unwatch(1);
        // Includes blocks that were dropped in a capture and whose last use could not be determined then.
        self.free_deferred();
        self.tidy_pools();
        Ok(())
    }

    /// Declares that no further capture uses a pool.
    pub(crate) fn release_pool(&self, pool: u64) -> Result<(), Error> {
        {
            let mut heap = self.open()?;
            usable_pool(&heap.graphs, pool)?;
            if let Some(pool) = heap.graphs.pools.get_mut(&pool) {
                pool.released = true;
            }
            heap.graphs.scopes.version += 1;
            heap.graphs.forget_released();
        }
        self.tidy_pools();
        Ok(())
    }

    /// Makes a graph that was not captured keep a pool's memory.
    ///
    /// # Safety
    /// `graph` must be live, and no other thread uses it during the call.
    pub(crate) unsafe fn retain_for(&self, pool: u64, graph: sys::CUgraph) -> Result<(), Error> {
        let leases = {
            let heap = self.open()?;
            usable_pool(&heap.graphs, pool)?;
            heap.graphs.leases_of(pool)?
        };
        // SAFETY: the caller's contract.
        let lease = unsafe { commit::retain(&self.context, graph, &leases) };
        let lease = lease.map_err(|e| self.error(e))?;
        let mut heap = self.open()?;
        usable_pool(&heap.graphs, pool)?;
        heap.graphs.add_lease(pool, Some(lease));
        heap.graphs.set_captured(pool, true);
        Ok(())
    }

    // ---- captures -----------------------------------------------------------------------------------

    pub(crate) fn user_of(named: &Named<'_>, since: Option<u64>) -> User {
        User::new(named.key, named.raw as usize, named.kept().cloned(), since)
    }

    /// Refuses the per-thread default stream of another thread: on this thread its handle means another stream.
    pub(crate) fn refuse_other_threads(&self, key: StreamKey, raw: usize) -> Result<(), Error> {
        let own = || key == StreamKey::Id(self.context.per_thread_id());
        match is_per_thread(raw) && !own() {
            true => Err(Error::Stream(StreamMisuse::WrongThread)),
            false => Ok(()),
        }
    }

    /// Queries whether streams owned by this crate with captures in pools are still capturing.
    pub(crate) fn review_pool_captures(&self) {
        let streams = self.lock().graphs.capturing();
        for (capture, user) in streams {
            let StreamKey::Id(id) = user.key else {
                continue;
            };
            let own = self.driver().owned_stream(id);
            if own.is_some_and(|own| matches!(own.is_capturing(), Ok(false))) {
                self.lock().graphs.ended(capture);
            }
        }
    }

    /// Returns a stream of this crate whose capture uses pools, if there is one.
    pub(crate) fn pool_capturing(&self) -> Option<User> {
        self.review_pool_captures();
        let known = self.lock().graphs.capturing();
        let mut known = known.into_iter().map(|(_, user)| user);
        known.find(|user| match user.key {
            StreamKey::Id(id) => self.driver().owned_stream(id).is_some(),
            StreamKey::Handle(_) => false,
        })
    }

    /// Returns the capture that a stream is in.
    pub(crate) fn capture_of(&self, user: &User) -> Result<Option<Present>, Error> {
        let raw: sys::CUstream = std::ptr::with_exposed_provenance_mut(user.raw);
        self.capture_of_named(user.key, raw, user.stream.as_ref())
    }

    /// [`capture_of`](Self::capture_of) for a stream as a call names it.
    pub(crate) fn capture_of_named(
        &self,
        key: StreamKey,
        raw: sys::CUstream,
        stream: Option<&Stream>,
    ) -> Result<Option<Present>, Error> {
        self.refuse_other_threads(key, raw as usize)?;
        let context = stream.map_or(&self.context, Stream::context);
        let current = match is_special(raw) {
            true => Some(context.make_current().map_err(|e| self.error(e))?),
            false => None,
        };
        // For a stream that may be capturing, the capture itself is queried directly, without asking first whether
        // there is one.
        let at_once = self.driver().may_be_capturing(raw);
        // SAFETY: the caller that named the stream guarantees that it is alive, and special handles are valid while a
        // context is current.
        let asked = unsafe {
            let captures = match at_once {
                true => Ok(true),
                false => self.driver().is_capturing(raw),
            };
            match captures {
                Ok(true) => self.driver().read_capture(raw, edge),
                answer => answer.map(|_| None),
            }
        };
        drop(current);
        let present =
            asked.map(|asked| asked.map(|(id, graph, edges)| Present { id, graph, edges }));
        present.map_err(|error| match is_of_capture(error.code()) {
            true => Error::Capturing {
                stream: raw as usize,
            },
            false => self.error_at(stream.map(Stream::context), raw, error),
        })
    }

    // ---- allocation ---------------------------------------------------------------------------------

    /// Allocates from the pool that a request belongs to, if there is one.
    #[inline(never)]
    pub(crate) fn allocate_in_pool(
        &self,
        named: &Named<'_>,
        request: &Checked,
        cached_only: bool,
    ) -> Result<Option<Grant>, Error> {
        self.usable()?;
        refuse_in_predicate()?;
        let info = self.capture_of_named(named.key, named.raw, named.kept())?;
        if let Some(info) = &info
            && let Some(grant) = self.allocate_again(named, info, request)?
        {
            return Ok(Some(grant));
        }
        let user = Self::user_of(named, info.as_ref().map(|info| info.id));
        let Some((scope, pool, version)) = self.resolve(&user, info.as_ref())? else {
            return Ok(None);
        };
        if request.single {
            // Requests in pools do not consider where handles end.
            return Err(Error::NotSupported {
                what: "blocks of a graph pool in a single handle",
            });
        }
        if let Some(stream) = named.stream
            && stream.context().device() != &self.device
        {
            return Err(Error::WrongDevice {
                expected: self.device.ordinal(),
                found: stream.context().device().ordinal(),
            });
        }
        let lacks_lease = {
            let heap = self.open()?;
            usable_pool(&heap.graphs, pool)?;
            heap.graphs.ensure_present(pool)?;
            let mut capture = info.iter();
            capture.any(|info| heap.graphs.lacks_lease(info.id, pool))
        };
        self.free_deferred();
        let asker = match &info {
            None => Asker::Eager {
                stream: user.key.number(),
            },
            Some(info) if self.driver().is_joined(info.id) => {
                // The graph's other nodes may use any memory of the pool, and the allocator cannot see which.
                return Err(Error::NotSupported {
                    what: "graph pool memory in a capture into a graph that has nodes",
                });
            }
            Some(info) => {
                if lacks_lease {
                    self.lease(info, pool)?;
                }
                let place = |capture: &Capture, stream| (capture.number, stream);
                let (number, stream) = self.advance(&user, info, place)?;
                Asker::Captured {
                    capture: info.id,
                    number,
                    stream,
                }
            }
        };
        let awaits = {
            let mut heap = self.open()?;
            if let Asker::Captured { capture, .. } = asker
                && !heap.graphs.serve(capture, scope, pool)
            {
                return Err(Error::Capturing { stream: user.raw });
            }
            if let Asker::Captured {
                capture, stream, ..
            } = asker
            {
                let user = user.trace();
                let thread = ThreadId::current();
                let way = Way {
                    version,
                    pool,
                    user,
                    thread,
                };
                heap.graphs.set_way((capture, stream), way);
            }
            heap.graphs.has_events()
        };
        if awaits {
            self.ask_pool_events(pool, false)?;
        }
        let request = PoolRequest {
            pool,
            asker,
            fit: Fit {
                views: request.views && self.views_allowed(),
                ..request.fit()
            },
            requested: request.requested,
        };
        let stream = (user.key, user.raw);
        let made = self.obtain_in_pool(&request, user, cached_only);
        if process::is_recording()
            && let Err(Error::OutOfMemory(refused)) = &made
        {
            let heap = self.lock();
            heap.recorder.record_refusal(&heap.streams, refused, stream);
        }
        made.map(Some)
    }

    /// The scope and the pool of a request, tagged with the version of the scopes whose filters were called.
    fn resolve(
        &self,
        user: &User,
        info: Option<&Present>,
    ) -> Result<Option<(u64, u64, u64)>, Error> {
        let asked = Asked {
            user,
            capture: info.map(|info| info.id),
            thread: ThreadId::current(),
        };
        let mut filtered = None;
        loop {
            let (answer, version) = {
                let mut heap = self.open()?;
                heap.graphs.notice(user, asked.capture);
                let scopes = &mut heap.graphs.scopes;
                let answer = scopes.resolve(&asked, filtered.is_some());
                (answer, filtered.unwrap_or(scopes.version))
            };
            match answer {
                Answer::Pool { scope, pool } => return Ok(Some((scope, pool, version))),
                Answer::Nobody => return Ok(None),
                Answer::Filters(filters) => {
                    let raw: sys::CUstream = std::ptr::with_exposed_provenance_mut(user.raw);
                    let mut filters = filters.into_iter();
                    let fits = as_predicate(|| filters.find(|(_, _, filter)| filter(raw)));
                    if let Some((scope, pool, _)) = fits {
                        return Ok(Some((scope, pool, version)));
                    }
                    filtered = Some(version);
                }
            }
        }
    }

    /// Whether requests of a stream that was recently found capturing go to a pool.
    pub(crate) fn is_served(&self, named: &Named<'_>) -> Result<bool, Error> {
        refuse_in_predicate()?;
        let info = self.capture_of_named(named.key, named.raw, named.kept())?;
        let user = Self::user_of(named, info.as_ref().map(|info| info.id));
        Ok(info.is_none() || self.resolve(&user, info.as_ref())?.is_some())
    }

    /// Makes the graph of a capture keep the pool's memory, before the capture receives or uses any.
    pub(crate) fn lease(&self, info: &Present, pool: u64) -> Result<(), Error> {
        if !self.open()?.graphs.lacks_lease(info.id, pool) {
            return Ok(());
        }
        // Memory that earlier captures freed is available to this one as soon as they are known to have ended.
        self.review_pool_captures();
        let leases = self.lock().graphs.leases_of(pool)?;
        // SAFETY: the graph belongs to the capture of the stream that this thread names.
        let lease = match unsafe { commit::retain(&self.context, info.graph, &leases) } {
            Ok(lease) => Some(lease),
            Err(error) if error.code() == sys::CUresult::CUDA_ERROR_NOT_FOUND => None,
            Err(error) => return Err(self.error(error)),
        };
        self.open()?.graphs.leased(info.id, pool, lease);
        Ok(())
    }

    /// Takes a request from the pool's memory, or makes room for it.
    fn obtain_in_pool(
        &self,
        request: &PoolRequest,
        user: User,
        cached_only: bool,
    ) -> Result<Grant, Error> {
        let (mut request, pool) = (*request, request.pool);
        let (mut made_room, mut refusal, mut asked) = (false, None, false);
        loop {
            let mut heap = self.open()?;
            usable_pool(&heap.graphs, pool)?;
            heap.graphs.ensure_present(pool)?;
            if let Asker::Captured {
                capture, number, ..
            } = request.asker
                && heap.graphs.same_capture(capture, number).is_none()
            {
                return Err(Error::Capturing { stream: user.raw });
            }
            let taken = heap.graphs.take(pool, request.asker, request.fit);
            if let Some(place) = taken {
                return Ok(pooled::add(
                    &mut heap,
                    pool,
                    request.sizes(),
                    place,
                    Few::from([user]),
                ));
            }
            if cached_only {
                return Err(Error::NotCached);
            }
            if !asked {
                drop(heap);
                self.query_device();
                asked = true;
                continue;
            }
            let plan = pooled::plan(&mut heap, &request);
            drop(heap);
            let plan = match plan {
                Ok(plan) => plan,
                Err(Lacking::Homes(bytes)) => {
                    let leased = self.lease_addresses(pool, bytes, |arena| &mut arena.homes);
                    leased.map_err(|error| self.no_addresses(&request, error))?;
                    continue;
                }
                Err(Lacking::Sites(bytes)) => {
                    let leased = self.lease_addresses(pool, bytes, |arena| &mut arena.sites);
                    if leased.is_err() {
                        // New memory at its home addresses may need fewer addresses.
                        request.fit.views = false;
                    }
                    continue;
                }
                Err(Lacking::Memory(bytes)) if made_room => {
                    return Err(self.no_room(&request, bytes, refusal));
                }
                Err(Lacking::Memory(bytes)) => {
                    (made_room, asked) = (true, false);
                    self.make_room(pool, bytes, refusal)?;
                    continue;
                }
            };
            let fresh = plan.fresh_bytes();
            let made = commit::make(&self.maker(), &plan);
            let mut heap = self.lock();
            let place = pooled::commit_plan(&mut heap, pool, plan, made.as_deref());
            match made {
                Ok(_) => {
                    if let Some(place) = place {
                        return Ok(pooled::add(
                            &mut heap,
                            pool,
                            request.sizes(),
                            place,
                            Few::from([user]),
                        ));
                    }
                }
                Err(not_made) => {
                    drop(heap);
                    let cause = not_made.failure.error;
                    if !cause.is_out_of_memory() {
                        return Err(self.error(cause));
                    }
                    refusal = Some(cause);
                    if made_room {
                        return Err(self.no_room(&request, fresh, refusal));
                    }
                    (made_room, asked) = (true, false);
                    self.make_room(pool, fresh, refusal)?;
                }
            }
        }
    }

    /// Returns the error for a pool request for which no addresses could be leased.
    fn no_addresses(&self, request: &PoolRequest, error: Error) -> Error {
        match error {
            Error::Driver(refusal) => {
                let needed = request.fit.bytes().next_multiple_of(PHYSICAL_GRANULE);
                self.no_room(request, needed, Some(refusal))
            }
            error => error,
        }
    }

    /// Returns the error for a pool request for which the driver provided no memory.
    fn no_room(&self, request: &PoolRequest, needed: u64, refusal: Option<DriverError>) -> Error {
        let error = out_of_memory_in_pool(&mut self.lock(), request, needed);
        self.out_of_memory(error, refusal)
    }

    /// Leases addresses for a pool.
    pub(crate) fn lease_addresses(
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
        let open = self.open();
        let mut heap = match open {
            Ok(heap) => heap,
            Err(error) => {
                self.addresses.give_back(lease.base, lease.bytes);
                return Err(error);
            }
        };
        match heap.graphs.pools.get_mut(&pool) {
            Some(pool) => of(&mut pool.arena).add(lease.base, lease.bytes, lease.grown),
            None => {
                drop(heap);
                self.addresses.give_back(lease.base, lease.bytes);
            }
        }
        Ok(())
    }
}

/// Refuses to look up the pool of a request inside a predicate, because the predicate would be called for its own
/// request without end.
fn refuse_in_predicate() -> Result<(), Error> {
    match is_in_predicate() {
        true => Err(GraphPoolError::InPredicate.into()),
        false => Ok(()),
    }
}

/// Refuses a pool that was released.
pub(crate) fn usable_pool(graphs: &Graphs, pool: u64) -> Result<(), Error> {
    match graphs.pools.get(&pool) {
        Some(pool) if !pool.released => Ok(()),
        _ => Err(Error::GraphPool(GraphPoolError::Released)),
    }
}

pub(crate) fn edge(dependency: Dependency) -> Edge {
    Edge {
        node: dependency.node.expose_provenance(),
        full: dependency.is_complete(),
    }
}
