//! Contexts: numbers that stand for names, and the current one of each thread.

use std::cell::Cell;
use std::collections::HashMap;

use crate::event::record::{MOST_CONTEXTS, or_none};
use crate::locks::held::Mutex;

/// The maximum number of names, besides the empty context.
const MOST: usize = MOST_CONTEXTS as usize;
/// The maximum size of a name in bytes; the outermost parts of a longer one are removed.
pub(crate) const LONGEST: usize = 4096;

/// Deduplicated names, with numbers from 1; 0 stands for none.
#[derive(Debug, Clone, Default)]
pub(crate) struct Names {
    names: Vec<String>,
    numbers: HashMap<String, u32>,
}

impl Names {
    /// Returns the number of a name, adding it if it is new.
    pub(crate) fn number(&mut self, name: &str) -> u32 {
        if let Some(number) = self.find(name) {
            return number;
        }
        self.names.push(name.to_owned());
        let number = self.names.len() as u32;
        self.numbers.insert(name.to_owned(), number);
        number
    }

    pub(crate) fn find(&self, name: &str) -> Option<u32> {
        self.numbers.get(name).copied()
    }

    pub(crate) fn name(&self, number: u32) -> Option<&str> {
        let place = (number as usize).checked_sub(1)?;
        self.names.get(place).map(String::as_str)
    }

    pub(crate) fn into_vec(self) -> Vec<String> {
        self.names
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }
}

static NAMES: Mutex<Option<Names>> = Mutex::new(None);

thread_local! {
    static CONTEXT: Cell<u32> = const { Cell::new(0) };
}

fn with<T>(work: impl FnOnce(&mut Names) -> T) -> T {
    let mut names = NAMES.lock();
    work(names.get_or_insert_default())
}

/// Returns the inner end of a name that is too long: whole parts, or the end of the innermost part if it alone is too
/// long.
fn shorten(name: &str) -> &str {
    let excess = name.len().saturating_sub(LONGEST);
    let mut cuts = excess..=name.len();
    let cut = cuts.find_map(|at| name.split_at_checked(at));
    let (outer, inner) = cut.unwrap_or(("", name));
    match inner.split_once(';') {
        Some((_, whole)) if !(outer.is_empty() || outer.ends_with(';') || whole.is_empty()) => {
            whole
        }
        _ => inner,
    }
}

/// Returns the number of a name, from 1; 0 if there are too many.
pub(crate) fn number_of(name: &str) -> u32 {
    let name = shorten(name);
    with(|names| match names.find(name) {
        None if names.names.len() >= MOST => 0,
        known => known.unwrap_or_else(|| names.number(name)),
    })
}

/// Returns the names after the first `known` ones, with their numbers.
pub(crate) fn since(known: usize) -> Vec<(u32, String)> {
    with(|names| {
        let news = names.iter().enumerate().skip(known);
        news.map(|(at, name)| (at as u32 + 1, name.to_owned()))
            .collect()
    })
}

pub(crate) fn name_of(number: u32) -> Option<String> {
    with(|names| names.name(number).map(str::to_owned))
}

/// Sets the context of the thread and returns the previous one. An impossible number counts as none.
pub(crate) fn set_context(number: u32) -> u32 {
    // Checked here, so that recording an event need not check it.
    let number = or_none(number);
    CONTEXT
        .try_with(|context| context.replace(number))
        .unwrap_or(0)
}

/// Returns the context of the thread; 0 for none.
#[inline(always)]
pub(crate) fn context() -> u32 {
    CONTEXT.try_with(Cell::get).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_inner_end_of_a_name_that_is_too_long_is_kept() {
        let long = |count: usize| "ä".repeat(count / 2);
        for (name, kept) in [
            (long(LONGEST), long(LONGEST)),
            (long(LONGEST + 2), long(LONGEST)),
            // Characters are never cut in two.
            (long(LONGEST + 2) + "x", long(LONGEST - 2) + "x"),
            // A part is kept completely or not at all.
            (
                format!("outer;{};inner", long(100)),
                format!("outer;{};inner", long(100)),
            ),
            (
                format!("{};middle;inner", long(LONGEST)),
                "middle;inner".to_owned(),
            ),
            (format!("outer;{}", long(LONGEST)), long(LONGEST)),
            (
                format!("outer;{};inner", long(LONGEST - 6)),
                format!("{};inner", long(LONGEST - 6)),
            ),
            (
                format!("outer;{};inner", long(LONGEST - 4)),
                "inner".to_owned(),
            ),
            (
                format!("{};", long(LONGEST)),
                format!("{};", long(LONGEST - 2)),
            ),
        ] {
            let number = number_of(&name);
            assert_eq!(since(number as usize - 1)[0], (number, kept));
        }
    }
}
