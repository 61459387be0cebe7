//! Streams that use memory of graph pools, in captures and outside of them.

use std::collections::HashSet;
use std::ops::Deref;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};

use crate::allocator::stream::slot::StreamKey;
use crate::driver::Stream;
use crate::locks::thread_id::ThreadId;

/// A stream as it was named when it began to use a block. Who touches its handle beside the heap's lock holds a copy
/// meanwhile: a stream that is retired leaves after that.
#[derive(Debug, Clone)]
pub(crate) struct User(Arc<Who>);

/// The names of streams, to find out whether a user [is](User::is) one of them without a look at each.
#[derive(Debug, Default)]
pub(crate) struct Names {
    keys: HashSet<StreamKey>,
    /// The handles of all, and of those that are known by nothing else.
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

/// A [`User`], which it does not keep.
#[derive(Debug)]
pub(crate) struct Trace(Weak<Who>);

impl Trace {
    #[inline]
    pub(crate) fn user(&self) -> Option<User> {
        self.0.upgrade().map(User)
    }
}

/// What a [`User`] is.
#[derive(Debug, Clone)]
pub(crate) struct Who {
    /// By its handle alone where it was captured then and has no name of its own: nobody may ask for that.
    pub key: StreamKey,
    pub raw: usize,
    /// Keeps the stream alive, where that can be had.
    pub stream: Option<Stream>,
    /// The capture in which it became a user; none if it was outside of captures.
    pub since: Option<u64>,
    /// The thread that named it.
    pub thread: ThreadId,
}

impl Deref for User {
    type Target = Who;

    #[inline]
    fn deref(&self) -> &Who {
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
        User(Arc::new(Who {
            key,
            raw,
            stream,
            since,
            thread: ThreadId::current(),
        }))
    }

    /// The same user for lists that nobody asks the driver about: no copy of this one.
    pub(crate) fn listed(&self) -> User {
        User(Arc::new(Who::clone(self)))
    }

    /// What tells the stream from others, without keeping it alive.
    pub(crate) fn name(&self) -> User {
        User(Arc::new(Who {
            stream: None,
            ..Who::clone(self)
        }))
    }

    /// Finds the user as long as anybody holds a copy.
    pub(crate) fn trace(&self) -> Trace {
        Trace(Arc::downgrade(&self.0))
    }

    /// Whether both are copies of one.
    #[inline]
    pub(crate) fn is_copy_of(&self, other: &User) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// A number that copies of one have in common, and no others as long as there are any.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// Whether nobody else holds a copy.
    pub(crate) fn is_alone(&self) -> bool {
        let alone = Arc::strong_count(&self.0) == 1;
        // What the others did comes before what follows.
        fence(Ordering::Acquire);
        alone
    }

    /// Whether both are one stream, as far as that is known.
    #[inline]
    pub(crate) fn is(&self, other: &User) -> bool {
        self.is_named(other.key, other.raw)
    }

    /// [`is`](Self::is), of a stream by its name.
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
    fn names_have_the_users_that_are_one_of_them() {
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
