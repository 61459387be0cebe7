//! Last uses of a range, as pairs of stream and ticket: until they are complete, the range may still be accessed.
//!
//! Every free on a stream carries the stream's open ticket. A marker (an event recorded on the
//! stream) covers all tickets up to a bound; when it has completed, so has everything freed under
//! them.

/// One stream's last use of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Use {
    pub stream: u32,
    pub ticket: u64,
}

/// A set of last uses, at most one per stream, ordered by stream.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum Uses {
    /// All work is complete as observed by the host.
    #[default]
    None,
    One(Use),
    Many(Box<[Use]>),
}

impl Uses {
    pub(crate) fn one(stream: u32, ticket: u64) -> Self {
        Uses::One(Use { stream, ticket })
    }

    /// Builds the set; of several uses by one stream the newest is kept.
    pub(crate) fn collect(mut uses: Vec<Use>) -> Self {
        uses.sort_unstable();
        // Tickets ascend within a stream: keeps the last of each.
        uses.reverse();
        uses.dedup_by_key(|u| u.stream);
        uses.reverse();
        match uses.as_slice() {
            [] => Uses::None,
            [only] => Uses::One(*only),
            _ => Uses::Many(uses.into_boxed_slice()),
        }
    }

    pub(crate) fn as_slice(&self) -> &[Use] {
        match self {
            Uses::None => &[],
            Uses::One(only) => std::slice::from_ref(only),
            Uses::Many(many) => many,
        }
    }

    /// Returns the set without the uses that are complete according to `done`; `None` if nothing changes.
    pub(crate) fn without(&self, done: impl Fn(&Use) -> bool) -> Option<Self> {
        let all = self.as_slice();
        if !all.iter().any(&done) {
            return None;
        }
        Some(Self::collect(
            all.iter().filter(|u| !done(u)).copied().collect(),
        ))
    }

    /// Returns the uses of either set.
    pub(crate) fn union(&self, other: &Self) -> Self {
        if let (Uses::One(a), Uses::One(b)) = (self, other)
            && a.stream == b.stream
        {
            return Uses::One(*a.max(b));
        }
        match (self, other) {
            (Uses::None, uses) | (uses, Uses::None) => return uses.clone(),
            _ => {}
        }
        Self::collect(
            self.as_slice()
                .iter()
                .chain(other.as_slice())
                .copied()
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_use_of_each_stream_counts() {
        let u = |stream, ticket| Use { stream, ticket };
        let uses = Uses::collect(vec![u(2, 5), u(1, 9), u(2, 7), u(1, 3)]);
        assert_eq!(uses.as_slice(), &[u(1, 9), u(2, 7)]);
        assert_eq!(uses.without(|u| u.ticket > 8), Some(Uses::one(2, 7)));
        assert_eq!(uses.without(|_| true), Some(Uses::None));
        assert_eq!(uses.without(|_| false), None);
        assert_eq!(uses.union(&Uses::one(2, 8)).as_slice(), &[u(1, 9), u(2, 8)]);
        assert_eq!(Uses::collect(vec![]), Uses::None);
    }
}
