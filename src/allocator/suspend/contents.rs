//! What happens to contents during a suspension.

use crate::block::Tag;

/// What happens to the contents of live blocks while their memory is suspended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Contents {
    /// They are discarded: after a resume they are undefined until they are written again.
    #[default]
    Drop,
    /// They are kept in page-locked host memory, which is kept for the next suspension.
    Pinned,
    /// They are kept in pageable host memory: copies are slower, and no host memory is locked.
    Host,
}

/// What happens to contents, by the tags of pools.
///
/// ```
/// use cualloc::allocator::{Contents, Keep};
/// // Caches are lost, weights are not.
/// let keep = Keep::from(Contents::Drop).tag("weights", Contents::Pinned);
/// # let _ = keep;
/// ```
#[derive(Debug, Clone, Default)]
pub struct Keep {
    otherwise: Contents,
    tags: Vec<(Tag, Contents)>,
}

impl Keep {
    /// Sets what happens to the contents of pools with this tag; the last call for a tag counts.
    #[must_use]
    pub fn tag(mut self, tag: impl Into<Tag>, contents: Contents) -> Keep {
        self.tags.push((tag.into(), contents));
        self
    }

    /// Returns what happens to the contents of a pool with this tag, or of other memory.
    pub(crate) fn of(&self, tag: Option<Tag>) -> Contents {
        let mut tags = self.tags.iter().rev();
        let said = tags.find(|(known, _)| Some(*known) == tag);
        said.map_or(self.otherwise, |(_, contents)| *contents)
    }
}

impl From<Contents> for Keep {
    fn from(otherwise: Contents) -> Keep {
        Keep {
            otherwise,
            tags: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_setting_of_a_tag_applies() {
        let keep = Keep::from(Contents::Host)
            .tag("a", Contents::Pinned)
            .tag("a", Contents::Drop);
        assert_eq!(keep.of(Some(Tag::new("a"))), Contents::Drop);
        assert_eq!(keep.of(Some(Tag::new("b"))), Contents::Host);
        assert_eq!(keep.of(None), Contents::Host);
    }
}
