//! Uses of graph pool blocks by streams, inside captures and outside, and their frees.

use crate::allocator::graph::pooled;
use crate::driver::{Context, Stream};
use crate::locks::lines::keep_lines;
use crate::locks::lock::pause;
use crate::sync::capture::is_of_capture;
use crate::sync::event::Pooled;

use crate::allocator::engine::Engine;
use crate::allocator::engine::naming::Named;
use crate::allocator::graph::arena::{NO_STREAM, Pending};
use crate::allocator::graph::capture::{Capture, Present, Reached};
use crate::allocator::graph::few::Few;
use crate::allocator::graph::lease::Lease;
use crate::allocator::graph::user::User;
use crate::allocator::stream::slot::AfterFree;
use crate::error::Error;

/// The last uses of a block by its users: nodes of captures, and events behind work outside captures.
#[derive(Default)]
struct LastUses {
    captured: Few<Reached>,
    ends: Vec<(u64, Pooled)>,
    /// A user's stream may have been destroyed, so it was not queried.
    unasked: bool,
    /// Leases of graphs that may touch the block, one per capturing user; `None` where the driver does not report the
    /// end of the graph.
    in_graphs: Vec<Option<Lease>>,
}

impl Engine {
    /// Frees a live block of a pool by its id and generation. The pool and the users are passed as they were looked up.
    #[inline(never)]
    pub(crate) fn free_pooled(
        &self,
        life: (u32, u32),
        ptr: u64,
        (pool, users): (u64, Few<User>),
    ) -> Result<(), Error> {
        let gone = || Error::NotLive { ptr };
        // Declared first: the users are dropped before the log lines that they hold back are written.
        let _lines = keep_lines();
        let users = users;
        let (mut uses, mut all_told) = (LastUses::default(), Ok(()));
        let mut asked = None;
        if let [user] = &*users
            && user.since.is_some()
            && !self.unretired
        {
            let info = self.capture_of(user)?;
            if let Some(info) = &info
                && self.free_again((life, ptr), (pool, user), info)?
            {
                return Ok(());
            }
            asked = Some(info);
        }
        // Every user is queried even if one fails, because the graphs of all of them need leases.
        for user in &users {
            let told = self.last_use(pool, user, asked.take(), &mut uses);
            all_told = all_told.and(told);
        }
        let mut heap = self.open()?;
        if !uses.in_graphs.is_empty()
            && pooled::is_live(&heap, life)
            && let Some(live) = heap.graphs.live_mut(ptr)
        {
            // Also if the free has to wait for the end of the capture, and the capture has already ended by then.
            for lease in uses.in_graphs {
                match lease {
                    Some(lease) if !live.touched.contains(&lease) => live.touched.push(lease),
                    Some(_) => {}
                    None => live.captured = true,
                }
            }
        }
        all_told?;
        let live = heap
            .graphs
            .live(ptr)
            .filter(|_| pooled::is_live(&heap, life));
        let live = live.ok_or_else(gone)?;
        let same = |(known, asked): (&User, &User)| known.is_copy_of(asked);
        if live.users.len() != users.len() || !live.users.iter().zip(&users).all(same) {
            // A stream was recorded or retired meanwhile.
            let used = (live.owner, live.users.clone());
            drop(heap);
            drop(users);
            return self.free_pooled(life, ptr, used);
        }
        let mut pending = live.pending.clone();
        for (stream, event) in uses.ends {
            pending.push(heap.graphs.add_event(stream, event));
        }
        if uses.unasked {
            pending.push(heap.graphs.add_unasked());
        }
        let Some(tag) = heap.graphs.tag(pool, uses.captured, pending) else {
            return Err(Error::Capturing { stream: 0 });
        };
        let freed = pooled::remove(&mut heap, pool, ptr, tag);
        let rest = self.rest_of_free(&heap, AfterFree::default());
        let has_leaving = heap.graphs.has_leaving();
        drop(heap);
        drop((freed, users));
        if has_leaving {
            self.tidy_pools();
        }
        self.finish_free(rest);
        Ok(())
    }

    /// Determines the last use of a pool block by one of its users.
    ///
    /// # Errors
    /// [`Error::Capturing`] while that is impossible: the stream used the block before its present capture, so that no
    /// event can be recorded behind the use, or another thread builds the graph, which therefore cannot be queried.
    fn last_use(
        &self,
        pool: u64,
        user: &User,
        asked: Option<Option<Present>>,
        uses: &mut LastUses,
    ) -> Result<(), Error> {
        if asked.is_none()
            && self.may_be_destroyed(user)
            && !self.lock().graphs.serves_capture_of(user, pool)
        {
            uses.unasked = true;
            // The stream is not queried, but the capture that it is known to be in may touch the block.
            if self.lock().graphs.captures_on(user.raw) {
                uses.in_graphs.push(None);
            }
            return Ok(());
        }
        let info = match asked {
            Some(info) => info,
            None => self.capture_of(user)?,
        };
        let Some(info) = info else {
            let event = self.end_of(user)?;
            self.open()?.graphs.notice(user, None);
            uses.ends.push((user.key.number(), event));
            return Ok(());
        };
        let later = Error::Capturing { stream: user.raw };
        let lacks_lease = {
            let mut heap = self.open()?;
            if !heap.graphs.is_at_hand(user, info.id) {
                if heap.graphs.lacks_lease(info.id, pool)
                    && let Some(pool) = heap.graphs.pools.get_mut(&pool)
                {
                    // The graph uses the pool, but nothing will report its destruction.
                    pool.untold = true;
                }
                uses.in_graphs.push(heap.graphs.lease_of(info.id, pool));
                return Err(later);
            }
            heap.graphs.lacks_lease(info.id, pool)
        };
        if lacks_lease {
            self.lease(&info, pool)?;
        }
        if user.since != Some(info.id) {
            let lease = self.open()?.graphs.lease_of(info.id, pool);
            uses.in_graphs.push(lease);
            return Err(later);
        }
        let reached = |capture: &Capture, stream| Reached {
            capture: info.id,
            number: capture.number,
            seen: capture.order.seen(stream),
        };
        uses.captured.push(self.advance(user, &info, reached)?);
        Ok(())
    }

    /// Whether a stream that the current call does not name must not be used: its owner may have destroyed it, or its
    /// context is distrusted.
    pub(crate) fn may_be_destroyed(&self, user: &User) -> bool {
        let streams = &self.lock().streams;
        let known = streams.find(user.key);
        let raw = user.stream.is_none() && user.raw > 2;
        known.is_some_and(|stream| streams[stream].distrusted.is_some())
            || (self.unretired && raw && !streams.has_lasting(user.raw))
    }

    /// Returns an event behind all work submitted so far to a stream outside captures.
    pub(crate) fn end_of(&self, user: &User) -> Result<Pooled, Error> {
        self.refuse_other_threads(user.key, user.raw)?;
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
                // SAFETY: the stream lives until it is retired, by the contract for raw streams, and retirement waits
                // for every holder of the user's token.
                let stream = unsafe { Stream::from_raw(&context, raw) };
                stream.and_then(|stream| self.events.record(&stream))
            }
        };
        recorded.map_err(|error| match is_of_capture(error.code()) {
            true => Error::Capturing { stream: user.raw },
            false => {
                let raw = std::ptr::with_exposed_provenance_mut(user.raw);
                self.error_at(user.stream.as_ref().map(Stream::context), raw, error)
            }
        })
    }

    /// Returns an event of the allocator's own context that completes after an event of another context. That context
    /// may be destroyed once its streams are retired.
    fn brought_home(&self, event: &Pooled, context: &Context) -> Result<Pooled, Error> {
        let follower = Stream::new(&self.context).map_err(|e| self.error(e))?;
        let queued = event.hold_back(&follower);
        let own = queued.and_then(|()| self.events.record(&follower));
        own.map_err(|e| self.error_in(context, e))
    }

    /// Records a use of a block of a pool on another stream.
    pub(crate) fn record_pooled(
        &self,
        (start, life): (u64, (u32, u32)),
        named: &Named<'_>,
        now: bool,
    ) -> Result<(), Error> {
        let gone = || Error::NotLive { ptr: start };
        let captured = self.capture_of_named(named.key, named.raw, named.kept())?;
        let user = Self::user_of(named, captured.as_ref().map(|info| info.id));
        let known = {
            let mut heap = self.open()?;
            heap.graphs.notice(&user, user.since);
            let live = heap
                .graphs
                .live(start)
                .filter(|_| pooled::is_live(&heap, life));
            let live = live.ok_or_else(gone)?;
            let (pool, users) = (live.owner, &live.users);
            let known = users.iter().any(|known| known.is(&user));
            (pool, known, heap.graphs.number())
        };
        let (pool, known, begun) = known;
        if let Some(info) = &captured {
            self.lease(info, pool)?;
        }
        let end = match (now && !known, &captured) {
            (true, None) => Some(self.end_of(&user)?),
            _ => None,
        };
        let mut heap = self.open()?;
        if !pooled::is_live(&heap, life) {
            return Err(gone());
        }
        if let Some(info) = &captured {
            heap.graphs.capture(info.id).place_of(&user);
        }
        let ended = end.map(|event| heap.graphs.add_event(user.key.number(), event));
        let mut earlier = Vec::new();
        if let Some(live) = heap.graphs.live_mut(start) {
            let known = live.users.iter().any(|known| known.is(&user));
            live.captured |= captured.is_some();
            match ended {
                Some(ended) if known => earlier.push(ended),
                Some(ended) => {
                    // The later event of a stream covers the earlier one. Events that others added since this call
                    // began may have been recorded after its own.
                    let before =
                        |used: &mut Pending| used.stream == ended.stream && used.event < begun;
                    earlier.extend(live.pending.extract_if(.., before));
                    live.pending.push(ended);
                }
                None if known => {}
                None => live.users.push(user),
            }
        }
        let spent = heap.graphs.spent(&earlier);
        drop(heap);
        drop(spent);
        Ok(())
    }

    /// Whether a stream has used memory of a pool, or is known to be in a capture that does.
    pub(crate) fn pools_know(&self, named: &Named<'_>) -> bool {
        self.lock().graphs.knows(&Self::user_of(named, None))
    }

    /// Ends a stream's uses of pools: the stream receives no more work, and its handle is not used any more.
    pub(crate) fn leave_pools(&self, named: &Named<'_>) -> Result<(), Error> {
        let user = Self::user_of(named, None);
        if !self.pools_know(named) {
            self.lock().graphs.departed(&user, None);
            return Ok(());
        }
        if self.capture_of(&user)?.is_some() {
            return Err(Error::Capturing { stream: user.raw });
        }
        let mut event = self.end_of(&user)?;
        let elsewhere = event.context().filter(|c| c.id() != self.context.id());
        let elsewhere = elsewhere.cloned();
        if let Some(context) = &elsewhere {
            event = self.brought_home(&event, context)?;
        }
        let mut heap = self.open()?;
        let end = heap.graphs.add_event(NO_STREAM, event);
        heap.graphs
            .departed(&user, elsewhere.is_some().then_some(end));
        let (mut gone, pools) = (Vec::new(), heap.graphs.pools.values_mut());
        for live in pools.flat_map(|pool| pool.arena.live.values_mut()) {
            let before = live.users.len();
            live.users.retain(|known| {
                let goes = known.is(&user);
                gone.extend(goes.then(|| known.clone()));
                !goes
            });
            if live.users.len() < before {
                live.pending.push(end);
            }
        }
        let unneeded = heap.graphs.completed(&[]);
        drop(heap);
        drop(unneeded);
        // Frees in progress may still use the handle. Blocks of a capture have copies of one user.
        gone.sort_unstable_by_key(User::identity);
        gone.dedup_by(|other, left| other.is_copy_of(left));
        for left in gone {
            let mut round = 0;
            while !left.is_alone() {
                pause(round);
                round += 1;
            }
        }
        Ok(())
    }
}
