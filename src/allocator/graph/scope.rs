//! Scopes: which requests go to a pool.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use crate::allocator::graph::user::User;
use crate::driver::sys::CUstream;
use crate::locks::thread_id::ThreadId;

/// A user's predicate over streams, by their handles.
pub(crate) type Filter = Arc<dyn Fn(CUstream) -> bool + Send + Sync>;

thread_local!(static IN_PREDICATE: Cell<bool> = const { Cell::new(false) });

/// Whether the calling thread is in a predicate of a scope.
pub fn is_in_predicate() -> bool {
    IN_PREDICATE.get()
}

/// Runs `ask` as a predicate of a scope, in which [`is_in_predicate`] is true.
pub fn as_predicate<T>(ask: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IN_PREDICATE.set(self.0);
        }
    }
    let _restore = Restore(IN_PREDICATE.replace(true));
    ask()
}

/// The requests that a scope applies to.
#[derive(Clone)]
pub(crate) enum Kind {
    /// The capture with this id.
    Capture(u64),
    /// The next capture for which the thread requests memory.
    NextCapture(ThreadId),
    Stream(User),
    When(Filter),
    Thread(ThreadId),
}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Capture(id) => f.debug_tuple("Capture").field(id).finish(),
            Kind::NextCapture(thread) => f.debug_tuple("NextCapture").field(thread).finish(),
            Kind::Stream(user) => f.debug_tuple("Stream").field(user).finish(),
            Kind::When(_) => f.debug_tuple("When").finish_non_exhaustive(),
            Kind::Thread(thread) => f.debug_tuple("Thread").field(thread).finish(),
        }
    }
}

/// An open scope.
#[derive(Debug, Clone)]
pub(crate) struct Scope {
    number: u64,
    pool: u64,
    kind: Kind,
}

/// The open scopes, in the order of entry.
#[derive(Debug, Default)]
pub(crate) struct Scopes {
    open: Vec<Scope>,
    count: u64,
    /// Changes whenever a request may be routed differently than before.
    pub version: u64,
}

/// The properties of a request that scopes depend on.
pub(crate) struct ScopeQuery<'a> {
    pub user: &'a User,
    pub capture: Option<u64>,
    pub thread: ThreadId,
}

/// The scopes' answer for a request.
pub(crate) enum Answer {
    /// The request goes to a pool, through a scope.
    Pool { scope: u64, pool: u64 },
    /// The answer depends on these filters: the request goes to the pool of the first one that returns true; if none
    /// does, the remaining scopes decide.
    Filters(Vec<(u64, u64, Filter)>),
    /// The request belongs to no pool.
    NoPool,
}

impl Scopes {
    pub(crate) fn add(&mut self, pool: u64, kind: Kind) -> u64 {
        self.count += 1;
        self.version += 1;
        let number = self.count;
        self.open.push(Scope { number, pool, kind });
        number
    }

    /// Whether an open scope may apply to a capture that has not made a request yet, and whose streams are therefore
    /// unknown.
    pub(crate) fn await_captures(&self) -> bool {
        let awaits = |kind: &Kind| {
            matches!(
                kind,
                Kind::Capture(_) | Kind::NextCapture(_) | Kind::When(_)
            )
        };
        self.open.iter().any(|scope| awaits(&scope.kind))
    }

    pub(crate) fn is_open(&self, number: u64) -> bool {
        self.open.iter().any(|scope| scope.number == number)
    }

    /// Removes a scope if it is open. It may hold the last reference to a user's filter, so the caller drops it without
    /// the heap's lock.
    #[must_use = "a filter is not dropped under the lock"]
    pub(crate) fn remove(&mut self, number: u64) -> Option<Scope> {
        let at = self.open.iter().position(|scope| scope.number == number)?;
        self.version += 1;
        Some(self.open.remove(at))
    }

    /// Routes a request: to the pool of its capture, else of its stream, of a filter that returns true, or of its
    /// thread. Of several scopes the last one entered applies.
    pub(crate) fn resolve(&mut self, asked: &ScopeQuery<'_>, filtered: bool) -> Answer {
        let found = asked
            .capture
            .and_then(|capture| self.of_capture(capture, asked.thread));
        let found = found.or_else(|| {
            self.last(|kind| matches!(kind, Kind::Stream(user) if user.is(asked.user)))
        });
        if let Some((scope, pool)) = found {
            return Answer::Pool { scope, pool };
        }
        let filters: Vec<_> = self.open.iter().rev().filter_map(Scope::filter).collect();
        if !filtered && !filters.is_empty() {
            return Answer::Filters(filters);
        }
        let own = |kind: &Kind| matches!(kind, Kind::Thread(thread) if *thread == asked.thread);
        match self.last(own) {
            Some((scope, pool)) => Answer::Pool { scope, pool },
            None => Answer::NoPool,
        }
    }

    fn of_capture(&mut self, capture: u64, thread: ThreadId) -> Option<(u64, u64)> {
        let known = self.last(|kind| matches!(kind, Kind::Capture(id) if *id == capture));
        if known.is_some() {
            return known;
        }
        // The scope that has waited longest.
        let waits = |kind: &Kind| matches!(kind, Kind::NextCapture(of) if *of == thread);
        let scope = self.open.iter_mut().find(|scope| waits(&scope.kind))?;
        scope.kind = Kind::Capture(capture);
        self.version += 1;
        Some((scope.number, scope.pool))
    }

    fn last(&self, is: impl Fn(&Kind) -> bool) -> Option<(u64, u64)> {
        let scope = self.open.iter().rev().find(|scope| is(&scope.kind))?;
        Some((scope.number, scope.pool))
    }
}

impl Scope {
    fn filter(&self) -> Option<(u64, u64, Filter)> {
        match &self.kind {
            Kind::When(filter) => Some((self.number, self.pool, Arc::clone(filter))),
            _ => None,
        }
    }
}
