//! Streams that use memory of graph pools, inside captures and outside.

use std::collections::HashSet;
use std::ops::Deref;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};

use crate::allocator::stream::slot::StreamKey;
use crate::driver::Stream;
use crate::locks::thread_id::ThreadId;

/// A stream as it was named when it began to use a block. Code that uses its handle without the heap's lock holds a
/// copy meanwhile, and a retirement of the stream waits for that.
#[derive(Debug, Clone)]
pub(crate) struct User(Arc<Identity>);

/// A set of names of streams, to test whether a user [is](User::is) one of them without visiting each.
#[derive(Debug, Default)]
pub(crate) struct Names {
    keys: HashSet<StreamKey>,
    /// All handles, and those of streams that have no other name.
    raws: HashSet<usize>,
    by_handle: HashSet<usize>,
}

impl Names {
    pub(crate) fn has(&self, user: &User) -> bool {
        let raws = match user.key {
            StreamKey::Handle(_) => &self.raws,
            StreamKey::Id(_) => &self.by_handle,
        };
        raws.contains(&user.raw) || self.keys.contains(&user.key)
    }
}

impl<'a> FromIterator<&'a User> for Names {
    fn from_iter<I: IntoIterator<Item = &'a User>>(users: I) -> Names {
        let mut names = Names::default();
        for user in users {
            names.keys.insert(user.key);
            names.raws.insert(user.raw);
            if let StreamKey::Handle(_) = user.key {
                names.by_handle.insert(user.raw);
            }
        }
        names
    }
}

/// A weak reference to a [`User`].
#[derive(Debug)]
pub(crate) struct Trace(Weak<Identity>);

impl Trace {
    #[inline]
    pub(crate) fn user(&self) -> Option<User> {
        self.0.upgrade().map(User)
    }
}

/// The identity of a [`User`].
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    /// The handle alone, if the stream was capturing then and its id could not be queried.
    pub key: StreamKey,
    pub raw: usize,
    /// Keeps the stream alive, where possible.
    pub stream: Option<Stream>,
    /// The capture in which it became a user; `None` if it was outside captures.
    pub since: Option<u64>,
    /// The thread that named it.
    pub thread: ThreadId,
}

impl Deref for User {
    type Target = Identity;

    #[inline]
    fn deref(&self) -> &Identity {
        &self.0
    }
}

impl User {
    pub(crate) fn new(
        key: StreamKey,
        raw: usize,
        stream: Option<Stream>,
        since: Option<u64>,
    ) -> User {
        User(Arc::new(Identity {
            key,
            raw,
            stream,
            since,
            thread: ThreadId::current(),
        }))
    }

    /// Returns the same user for lists whose streams are never queried; the result does not count as a copy.
    pub(crate) fn listed(&self) -> User {
        User(Arc::new(Identity::clone(self)))
    }

    /// Returns the identity of the stream, without keeping it alive.
    pub(crate) fn name(&self) -> User {
        User(Arc::new(Identity {
            stream: None,
            ..Identity::clone(self)
        }))
    }

    /// Returns a weak reference, which finds the user as long as a copy exists.
    pub(crate) fn trace(&self) -> Trace {
        Trace(Arc::downgrade(&self.0))
    }

    #[inline]
    pub(crate) fn is_copy_of(&self, other: &User) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns a number that copies of one user share, unique while any of them exists.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// Whether there is no other copy.
    pub(crate) fn is_alone(&self) -> bool {
        let alone = Arc::strong_count(&self.0) == 1;
        // Orders the work of the other holders before what follows.
        fence(Ordering::Acquire);
        alone
    }

    /// Whether both are the same stream, as far as that is known.
    #[inline]
    pub(crate) fn is(&self, other: &User) -> bool {
        self.is_named(other.key, other.raw)
    }

    #[inline]
    pub(crate) fn is_named(&self, key: StreamKey, raw: usize) -> bool {
        let by_handle = |key| matches!(key, StreamKey::Handle(_));
        self.key == key || (self.raw == raw && (by_handle(self.key) || by_handle(key)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_sets_find_their_users() {
        let keys = [1, 2, 3].map(StreamKey::Id).into_iter();
        let keys = keys.chain([1, 2, 3].map(StreamKey::Handle));
        let users = keys.flat_map(|key| [1, 2, 3].map(|raw| User::new(key, raw, None, None)));
        let users: Vec<User> = users.collect();
        for first in &users {
            for second in &users {
                let names: Names = [first, second].into_iter().collect();
                for user in &users {
                    let one = first.is(user) || second.is(user);
                    assert_eq!(names.has(user), one, "{first:?} {second:?} {user:?}");
                }
            }
        }
        assert!(!Names::default().has(&users[0]));
    }
}
