//! An out-of-memory error as JSON.

use std::fmt::{self, Write};

use crate::error::memory::{HeldBy, Holder, OutOfMemory};

/// A value of JSON.
pub(super) enum Json {
    Null,
    Number(u64),
    Text(String),
    List(Vec<Json>),
    Object(Vec<(&'static str, Json)>),
}

impl From<u64> for Json {
    fn from(number: u64) -> Json {
        Json::Number(number)
    }
}

impl From<&str> for Json {
    fn from(text: &str) -> Json {
        Json::Text(text.to_owned())
    }
}

impl<T: Into<Json>> From<Option<T>> for Json {
    fn from(value: Option<T>) -> Json {
        value.map_or(Json::Null, Into::into)
    }
}

impl<T: Into<Json>> FromIterator<T> for Json {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Json {
        Json::List(values.into_iter().map(Into::into).collect())
    }
}

/// Creates an object of names and values.
macro_rules! object {
    ($($name:ident: $value:expr),* $(,)?) => {
        Json::Object(vec![$((stringify!($name), Json::from($value))),*])
    };
}

impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Json::Null => f.write_str("null"),
            Json::Number(number) => number.fmt(f),
            Json::Text(text) => quote(text, f),
            Json::List(values) => {
                f.write_char('[')?;
                for (index, value) in values.iter().enumerate() {
                    f.write_str(if index > 0 { "," } else { "" })?;
                    value.fmt(f)?;
                }
                f.write_char(']')
            }
            Json::Object(members) => {
                f.write_char('{')?;
                for (index, (name, value)) in members.iter().enumerate() {
                    f.write_str(if index > 0 { "," } else { "" })?;
                    write!(f, "\"{name}\":{value}")?;
                }
                f.write_char('}')
            }
        }
    }
}

fn quote(text: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_char('"')?;
    for character in text.chars() {
        match character {
            '"' | '\\' => write!(f, "\\{character}")?,
            character if character.is_control() => write!(f, "\\u{:04x}", u32::from(character))?,
            character => f.write_char(character)?,
        }
    }
    f.write_char('"')
}

#[cfg(feature = "serde")]
impl serde::Serialize for Json {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Json::Null => to.serialize_unit(),
            Json::Number(number) => to.serialize_u64(*number),
            Json::Text(text) => to.serialize_str(text),
            Json::List(values) => to.collect_seq(values),
            Json::Object(members) => to.collect_map(members.iter().map(|(name, it)| (name, it))),
        }
    }
}

/// The members of [`OutOfMemory::to_json`].
#[cfg(feature = "serde")]
impl serde::Serialize for OutOfMemory {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.json().serialize(to)
    }
}

impl OutOfMemory {
    /// Returns the content of [`report`](Self::report) as a JSON object: `schema` is `cualloc.out_of_memory.2`, amounts
    /// are in bytes, unknown values are `null`.
    pub fn to_json(&self) -> String {
        self.json().to_string()
    }

    fn json(&self) -> Json {
        let bound = self.named_bound();
        let pending = self
            .pending
            .iter()
            .map(|it| object! { stream: it.stream_id, bytes: it.bytes, unmarked: it.unmarked });
        let pinned = self.pinned.iter().map(
            |it| object! { address: it.address, bytes: it.bytes, live: it.live, block: it.block },
        );
        let holes = self.holes.iter().map(
            |it| object! { address: it.address, bytes: it.bytes, before: it.before, after: it.after },
        );
        object! {
            schema: "cualloc.out_of_memory.2",
            device: self.device as u64,
            cause: self.cause().name(),
            requested: self.requested,
            live: self.live(),
            bound: bound.as_ref().map(|bound| bound.bytes),
            bound_of: bound.as_ref().map(|bound| bound.name),
            missing: self.missing(),
            advice: &*self.advice(),
            holders: self.holders.iter().map(holder).collect::<Json>(),
            other_live: self.other_live(),
            limit: self.limit,
            reserved: self.reserved,
            allocated: self.allocated,
            cached: self.cached,
            largest_free: self.largest_free,
            largest_run: self.largest_run,
            in_views: self.in_views,
            guarded: self.guarded,
            suspended: self.suspended,
            graph_pools: self.graph_pools,
            in_graph_pools: self.in_graph_pools,
            ranges: self.ranges,
            ranges_leaving: self.ranges_leaving,
            driver_free: self.driver_free,
            driver_total: self.driver_total,
            headroom: self.headroom,
            regime: self.regime,
            driver: self.driver.map(|error| error.to_string()).as_deref(),
            pending: pending.collect::<Json>(),
            pinned: pinned.collect::<Json>(),
            holes: holes.collect::<Json>(),
        }
    }
}

fn holder(holder: &Holder) -> Json {
    let (name, sizes) = match &holder.by {
        HeldBy::Tag(name) | HeldBy::Context(name) => (Some(&**name), None),
        HeldBy::Size {
            least,
            below,
            stream,
        } => (None, Some((*least, *below, *stream))),
    };
    object! {
        by: holder.by.kind(),
        name: name,
        least: sizes.map(|(least, ..)| least),
        below: sizes.map(|(_, below, _)| below),
        stream: sizes.map(|(.., stream)| stream),
        bytes: holder.bytes,
        blocks: holder.blocks,
    }
}
