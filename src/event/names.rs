//! Contexts: numbers that stand for names, and the one that each thread is in.

use std::cell::Cell;
use std::collections::HashMap;

use crate::event::record::{MOST_CONTEXTS, or_none};
use crate::locks::held::Mutex;

/// Most names; one more is the context without a name.
const MOST: usize = MOST_CONTEXTS as usize;
/// Most bytes of a name; what is behind them is left out.
pub(crate) const LONGEST: usize = 4096;

#[derive(Debug, Default)]
struct Names {
    known: Vec<String>,
    numbers: HashMap<String, u32>,
}

static NAMES: Mutex<Option<Names>> = Mutex::new(None);

thread_local! {
    static CONTEXT: Cell<u32> = const { Cell::new(0) };
}

fn with<T>(work: impl FnOnce(&mut Names) -> T) -> T {
    let mut names = NAMES.lock();
    work(names.get_or_insert_default())
}

/// The number of a name, from 1; 0 if there are too many.
pub(crate) fn number_of(name: &str) -> u32 {
    let end = (0..=name.len().min(LONGEST)).rev();
    let end = end.into_iter().find(|at| name.is_char_boundary(*at));
    let name = name.get(..end.unwrap_or(0)).unwrap_or_default();
    with(|names| {
        if let Some(number) = names.numbers.get(name) {
            return *number;
        }
        if names.known.len() >= MOST {
            return 0;
        }
        names.known.push(name.to_owned());
        let number = names.known.len() as u32;
        names.numbers.insert(name.to_owned(), number);
        number
    })
}

/// The names that came after the first so many, with their numbers.
pub(crate) fn since(known: usize) -> Vec<(u32, String)> {
    with(|names| {
        let news = names.known.iter().enumerate().skip(known);
        news.map(|(at, name)| (at as u32 + 1, name.clone()))
            .collect()
    })
}

/// The name with a number.
pub(crate) fn name_of(number: u32) -> Option<String> {
    let at = (number as usize).checked_sub(1)?;
    with(|names| names.known.get(at).cloned())
}

/// Puts the thread in a context; the one before. A number that no context can have is none.
pub(crate) fn set_context(number: u32) -> u32 {
    // Here, so that nobody who records has to look.
    let number = or_none(number);
    CONTEXT
        .try_with(|context| context.replace(number))
        .unwrap_or(0)
}

/// The context that the thread is in; 0 for none.
#[inline(always)]
pub(crate) fn context() -> u32 {
    CONTEXT.try_with(Cell::get).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_keeps_its_number_and_a_thread_its_context() {
        let first = number_of("names: first");
        assert_ne!(first, 0);
        assert_eq!(number_of("names: first"), first);
        assert_ne!(number_of("names: second"), first);
        assert_eq!(set_context(first), 0);
        assert_eq!(context(), first);
        std::thread::scope(|scope| {
            scope.spawn(|| assert_eq!(context(), 0));
        });
        assert_eq!(set_context(u32::MAX), first);
        assert_eq!(set_context(0), 0);
    }

    #[test]
    fn a_name_that_is_too_long_ends_at_a_character() {
        let name = "ä".repeat(LONGEST);
        let number = number_of(&name);
        let kept = since(number as usize - 1);
        assert_eq!(kept[0].0, number);
        assert_eq!(kept[0].1.len(), LONGEST);
    }
}
