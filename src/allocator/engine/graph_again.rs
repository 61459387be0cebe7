//! Graph pools: the fast path for requests and frees of a capturing stream that use the same pool as its previous ones.
//! The earlier lookup remains valid, and only the nodes that the stream is behind are queried.

use std::cell::Cell;
use std::sync::atomic::Ordering;

use crate::allocator::graph::pooled;
use crate::driver::Stream;

use crate::allocator::cache::grant::Grant;
use crate::allocator::engine::Engine;
use crate::allocator::engine::graph::edge;
use crate::allocator::engine::naming::Named;
use crate::allocator::graph::arena::{Mark, Tag};
use crate::allocator::graph::capture::{Capture, Present};
use crate::allocator::graph::few::Few;
use crate::allocator::graph::user::User;
use crate::allocator::graph::{Asker, Graphs};
use crate::allocator::heap::Heap;
use crate::allocator::heap::request::Checked;
use crate::allocator::stream::slot::AfterFree;
use crate::error::Error;

impl Engine {
    /// Queries which nodes a stream is behind in its capture, and applies the result at the stream's place there.
    pub(crate) fn advance<T>(
        &self,
        user: &User,
        info: &Present,
        known: impl FnOnce(&Capture, usize) -> T,
    ) -> Result<T, Error> {
        let place = |graphs: &mut Graphs| Some(graphs.capture(info.id).place_of(user));
        let done = self.advance_from(user.raw, info, place, |heap, number, place| {
            let capture = heap.graphs.same_capture(info.id, number);
            capture.map(|capture| known(capture, place))
        });
        done?.flatten().ok_or(Error::Capturing { stream: user.raw })
    }

    /// Queries which nodes a stream is behind in its capture, if it has a place there, and applies the result under the
    /// same lock, with the capture's number and the place.
    pub(crate) fn advance_from<T>(
        &self,
        raw: usize,
        info: &Present,
        place: impl FnOnce(&mut Graphs) -> Option<usize>,
        then: impl FnOnce(&mut Heap, u64, usize) -> T,
    ) -> Result<Option<T>, Error> {
        let (number, place, mut asked) = {
            let mut heap = self.open()?;
            let Some(place) = place(&mut heap.graphs) else {
                return Ok(None);
            };
            let Some(capture) = heap.graphs.captures.get_mut(&info.id) else {
                return Ok(None);
            };
            let number = capture.number;
            match capture.order.walk(place, &info.edges) {
                Some(asked) => (number, place, asked),
                None => {
                    let done = then(&mut heap, number, place);
                    drop(heap);
                    return Ok(Some(done));
                }
            }
        };
        loop {
            let (walk, node) = asked;
            let dependencies = {
                let raw = std::ptr::with_exposed_provenance_mut(node);
                // SAFETY: the node belongs to the capture of the stream, and no other thread uses its graph while the
                // stream is in use.
                unsafe { self.driver().read_node(raw, edge) }
            };
            let mut heap = self.open()?;
            let Some(capture) = heap.graphs.same_capture(info.id, number) else {
                return Err(Error::Capturing { stream: raw });
            };
            let next = match dependencies {
                Ok(dependencies) => capture.order.learn(walk, node, dependencies),
                Err(error) => {
                    capture.order.give_up(&walk);
                    return Err(self.error(error));
                }
            };
            match next {
                Some(next) => asked = next,
                None => {
                    let done = then(&mut heap, number, place);
                    drop(heap);
                    return Ok(Some(done));
                }
            }
        }
    }

    /// [`allocate_in_pool`](Self::allocate_in_pool) for a capturing stream whose previous request went to a pool, from
    /// available memory, if nothing has changed since.
    pub(crate) fn allocate_again(
        &self,
        named: &Named<'_>,
        info: &Present,
        request: &Checked,
    ) -> Result<Option<Grant>, Error> {
        let device = |stream: &Stream| stream.context().device() == &self.device;
        if self.deferred.load(Ordering::Relaxed)
            || request.single
            || !named.stream.is_none_or(device)
        {
            return Ok(None);
        }
        let (raw, fit) = (named.raw as usize, request.fit());
        let way = Cell::new(None);
        let place = |graphs: &mut Graphs| {
            let (place, found) = graphs.way(info.id, named.key, raw)?;
            way.set(Some((found.version, found.pool, found.user.user())));
            Some(place)
        };
        let grant = self.advance_from(raw, info, place, |heap, number, stream| {
            let (version, pool, user) = way.take()?;
            let place = match heap.graphs.is_way(version, pool) {
                true => {
                    let asker = Asker::Captured {
                        capture: info.id,
                        number,
                        stream,
                    };
                    heap.graphs.take(pool, asker, fit)
                }
                false => None,
            };
            let Some(place) = place else {
                // The user is dropped without the lock, because it may hold the last reference to the stream.
                way.set(Some((version, pool, user)));
                return None;
            };
            let user = user.unwrap_or_else(|| {
                let user = Self::user_of(named, Some(info.id));
                heap.graphs.retrace((info.id, stream), &user);
                user
            });
            let sizes = (fit.granules, request.requested);
            Some(pooled::add(heap, pool, sizes, place, Few::from([user])))
        });
        Ok(grant?.flatten())
    }

    /// Frees a block that was allocated in this capture and that no other stream uses, if nothing else has to be
    /// checked: this thread named the stream last, the graph has its lease, and no scope of the capture was closed.
    pub(crate) fn free_again(
        &self,
        (life, ptr): ((u32, u32), u64),
        (pool, user): (u64, &User),
        info: &Present,
    ) -> Result<bool, Error> {
        if user.since != Some(info.id) {
            return Ok(false);
        }
        let place = |graphs: &mut Graphs| graphs.place_at_hand(info.id, user, pool);
        let freed = self.advance_from(user.raw, info, place, |heap, _, stream| {
            let live = heap.graphs.pools.get(&pool)?.arena.live.get(&ptr);
            let live = live.filter(|_| pooled::is_live(heap, life))?;
            let same = matches!(&*live.users, [known] if known.is_copy_of(user));
            if !same || !live.pending.is_empty() {
                return None;
            }
            let capture = heap.graphs.captures.get(&info.id)?;
            if !capture.left.is_empty() {
                return None;
            }
            let seen = capture.order.seen(stream);
            let tag = Tag {
                marks: Few::from([Mark {
                    capture: info.id,
                    seen,
                }]),
                captured: true,
                ..Tag::default()
            };
            let freed = pooled::remove(heap, pool, ptr, tag);
            let rest = self.rest_of_free(heap, AfterFree::default());
            Some((freed, rest, heap.graphs.has_leaving()))
        });
        let Some((freed, rest, has_leaving)) = freed?.flatten() else {
            return Ok(false);
        };
        drop(freed);
        if has_leaving {
            self.tidy_pools();
        }
        self.finish_free(rest);
        Ok(true)
    }
}
