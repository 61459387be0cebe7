//! The begin and end of captures that use pools.

use crate::allocator::graph::arena::{NO_STREAM, Pending};
use crate::allocator::graph::capture::{Capture, Route};
use crate::allocator::graph::lease::Lease;
use crate::allocator::graph::scope::Scope;
use crate::allocator::graph::user::User;
use crate::allocator::graph::{Graphs, Pool};
use crate::allocator::stream::slot::StreamKey;
use crate::locks::thread_id::ThreadId;

impl Graphs {
    /// Returns the state of a capture, and creates it if necessary.
    pub(crate) fn capture(&mut self, id: u64) -> &mut Capture {
        let count = &mut self.count;
        self.captures.entry(id).or_insert_with(|| {
            *count += 1;
            Capture {
                number: *count,
                ..Capture::default()
            }
        })
    }

    /// Returns the state of a capture, if it still has this number.
    pub(crate) fn same_capture(&mut self, id: u64, number: u64) -> Option<&mut Capture> {
        let known = self.captures.get_mut(&id);
        known.filter(|known| known.number == number)
    }

    /// Records that a call found its stream in this capture, or in none: an earlier capture of the stream has ended.
    pub(crate) fn note_capture(&mut self, user: &User, now: Option<u64>) {
        let mut over = Vec::new();
        for (id, capture) in &mut self.captures {
            let mut streams = capture.streams.iter_mut();
            if let Some(known) = streams.find(|known| known.user.is(user)) {
                match Some(*id) == now {
                    true => known.thread = ThreadId::current(),
                    false => over.push(*id),
                }
            }
        }
        over.into_iter().for_each(|capture| self.ended(capture));
    }

    /// Whether this thread named a stream of a capture last: other threads must not query a graph that is being built.
    pub(crate) fn is_named_here(&self, user: &User, capture: u64) -> bool {
        let known = self.captures.get(&capture);
        let streams = known.into_iter().flat_map(|known| &known.streams);
        let mut named = streams.filter(|known| known.user.is(user));
        let thread = named.next().map_or(user.thread, |known| known.thread);
        thread == ThreadId::current()
    }

    /// Stores the route of a request of a stream of a capture, for a version of the scopes.
    pub(crate) fn set_route(&mut self, (capture, stream): (u64, usize), route: Route) {
        let known = self.captures.get_mut(&capture);
        if let Some(member) = known.and_then(|known| known.streams.get_mut(stream)) {
            member.route = Some(route);
        }
    }

    /// Stores the user of later blocks on the route of a stream of a capture.
    pub(crate) fn set_route_user(&mut self, (capture, stream): (u64, usize), user: &User) {
        let known = self.captures.get_mut(&capture);
        let member = known.and_then(|known| known.streams.get_mut(stream));
        if let Some(route) = member.and_then(|member| member.route.as_mut()) {
            route.user = user.trace();
        }
    }

    /// Returns the route of the requests of a capturing stream, and the stream's place in its capture, if this thread
    /// was the last to name the stream and nothing has changed since its last request.
    pub(crate) fn route(
        &self,
        capture: u64,
        key: StreamKey,
        raw: usize,
    ) -> Option<(usize, &Route)> {
        let known = self.captures.get(&capture)?;
        let place = known.place_of_named(key, raw)?;
        let member = &known.streams[place];
        let route = member.route.as_ref()?;
        let now = ThreadId::current();
        let same = self.is_route_valid(route.version, route.pool)
            && member.thread == now
            && route.thread == now;
        same.then_some((place, route))
    }

    /// Whether a route to a pool, made for a version of the scopes, is still valid, and the pool's memory is available
    /// without polling events.
    pub(crate) fn is_route_valid(&self, version: u64, pool: u64) -> bool {
        let there = |pool: &Pool| !pool.suspended;
        version == self.scopes.version
            && self.events.is_empty()
            && self.pools.get(&pool).is_some_and(there)
    }

    /// Returns the place of a stream of a capture, if the capture's graph has leased the pool, this thread named the
    /// stream last, and no scope through which the capture got memory was closed.
    pub(crate) fn place_if_unchanged(&self, capture: u64, user: &User, pool: u64) -> Option<usize> {
        let known = self.captures.get(&capture)?;
        let place = known.place_of_named(user.key, user.raw)?;
        let is_named_here = known.streams[place].thread == ThreadId::current();
        (is_named_here && known.leased.contains(&pool) && known.left.is_empty()).then_some(place)
    }

    /// Returns the streams of all captures, each with its capture.
    pub(crate) fn capturing(&self) -> Vec<(u64, User)> {
        let captures = self.captures.iter();
        captures
            .flat_map(|(id, known)| known.streams.iter().map(|known| (*id, known.user.name())))
            .collect()
    }

    /// Whether a stream, by its handle, is in a capture that is not known to have ended.
    pub(crate) fn captures_on(&self, raw: usize) -> bool {
        let mut captures = self.captures.values();
        captures.any(|known| known.streams.iter().any(|known| known.user.raw == raw))
    }

    /// Ends a capture: memory freed in it becomes available to all captures. If it produced a graph, launches of other
    /// graphs of the pool are ordered before or after its own; otherwise none of its work was executed.
    pub(crate) fn ended(&mut self, capture: u64) {
        self.captures.remove(&capture);
        for pool in self.pools.values_mut() {
            pool.arena.unmark(capture);
        }
    }

    /// Whether a stream used memory of a pool that is live or pending, or belongs to a capture that is not known to
    /// have ended.
    pub(crate) fn uses_stream(&self, user: &User) -> bool {
        let number = user.key.number();
        let mut captures = self.captures.values().flat_map(|known| &known.streams);
        captures.any(|known| known.user.is(user))
            || self.pools.values().any(|pool| {
                let mut live = pool.arena.live.values();
                live.any(|live| live.users.iter().any(|known| known.is(user)))
                    || pool.arena.pending().any(|used| used.stream == number)
            })
    }

    /// Records the retirement of a stream outside captures, whose name may be reused. If `end` is given, it replaces
    /// the stream's events in pending uses.
    pub(crate) fn note_retirement(&mut self, user: &User, end: Option<Pending>) {
        self.note_capture(user, None);
        if end.is_some() || matches!(user.key, StreamKey::Handle(_)) {
            let number = user.key.number();
            for pool in self.pools.values_mut() {
                let rename = |used: &mut Vec<Pending>| {
                    for used in used.iter_mut().filter(|used| used.stream == number) {
                        used.stream = NO_STREAM;
                        used.event = end.map_or(used.event, |end| end.event);
                    }
                };
                pool.arena.retag(|tag| rename(&mut tag.pending));
                let live = pool.arena.live.values_mut();
                live.for_each(|live| rename(&mut live.pending));
            }
        }
        if self.has_checkpoints && user.stream.is_none() {
            let now = self.number();
            self.departed.retain(|(_, known)| !known.is(user));
            self.departed.push((now, user.name()));
        }
    }

    pub(crate) fn lacks_lease(&self, capture: u64, pool: u64) -> bool {
        let known = self.captures.get(&capture);
        !known.is_some_and(|known| known.leased.contains(&pool))
    }

    pub(crate) fn lease_of(&self, capture: u64, pool: u64) -> Option<Lease> {
        let leases = &self.captures.get(&capture)?.leases;
        let own = leases.iter().find(|(of, _)| *of == pool);
        own.map(|(_, lease)| lease.clone())
    }

    /// Records that a capture's graph has a lease of a pool, or that the driver does not report its end.
    pub(crate) fn leased(&mut self, capture: u64, pool: u64, lease: Option<Lease>) {
        let known = self.capture(capture);
        known.leased.push(pool);
        known
            .leases
            .extend(lease.clone().map(|lease| (pool, lease)));
        if !self.pools.get(&pool).is_some_and(Pool::is_leased) {
            // The graphs of earlier captures have been destroyed.
            self.set_captured(pool, false);
        }
        self.add_lease(pool, lease);
    }

    /// Records that a capture gets memory of a pool through a scope, after its graph has a lease. False if the scope
    /// was closed since the request was routed to it, or if the scopes through which the capture got memory of the pool
    /// before were closed.
    pub(crate) fn serve(&mut self, capture: u64, scope: u64, pool: u64) -> bool {
        if !self.scopes.is_open(scope) {
            return false;
        }
        let known = self.capture(capture);
        if known.left.contains(&pool) {
            return false;
        }
        if !known.served.contains(&(scope, pool)) {
            known.served.push((scope, pool));
        }
        true
    }

    /// Closes a scope: captures that no other scope serves get no more memory of its pool, so that memory they freed
    /// becomes available to all others. Returns the scope, to be dropped without the lock.
    pub(crate) fn leave(&mut self, scope: u64) -> Option<Scope> {
        let left = self.scopes.remove(scope)?;
        let mut over = Vec::new();
        for (id, capture) in &mut self.captures {
            let by_it = capture.served.extract_if(.., |(by, _)| *by == scope);
            let pools: Vec<u64> = by_it.map(|(_, pool)| pool).collect();
            for pool in pools {
                if !capture.served.iter().any(|(_, other)| *other == pool) {
                    capture.left.push(pool);
                    over.push((*id, pool));
                }
            }
        }
        for (capture, pool) in over {
            if let Some(pool) = self.pools.get_mut(&pool) {
                pool.arena.unmark(capture);
            }
        }
        Some(left)
    }
}
