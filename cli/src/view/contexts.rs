//! Contexts for the page.

use cualloc::trace::Trace;

/// The maximum number of contexts with names on the page; all others are merged into one.
const MOST: usize = 4096;

/// The maximum number of characters shown of a name: the innermost part.
const CHARACTERS: usize = 600;

/// Names of contexts, those with the most bytes first, and the context of each block.
pub struct Contexts {
    pub names: Vec<String>,
    /// For each context of the trace, its index in `names`.
    places: Vec<usize>,
}

impl Contexts {
    pub fn of(trace: &Trace) -> Contexts {
        let count = trace.contexts().len();
        let mut bytes = vec![0u64; count];
        for (id, block) in trace.allocations().iter().enumerate() {
            if let Some(context) = trace.context_of(id) {
                bytes[context] = bytes[context].saturating_add(block.bytes);
            }
        }
        let mut order = Vec::from_iter(0..count);
        order.sort_by_key(|context| std::cmp::Reverse(bytes[*context]));
        let mut places = vec![0; count];
        for (place, context) in order.iter().enumerate() {
            places[*context] = place.min(MOST);
        }
        let names = order.iter().take(MOST);
        let names = names.map(|context| shorten(&trace.contexts()[*context]));
        let others = (count > MOST).then(|| "other contexts".to_owned());
        let names = names.chain(others).collect();
        Contexts { names, places }
    }

    /// Returns the number of a block's context, from 1; 0 for none.
    pub fn number(&self, trace: &Trace, id: usize) -> u64 {
        let place = trace.context_of(id).map(|context| self.places[context]);
        place.map_or(0, |place| place as u64 + 1)
    }
}

/// Shortens a long name to its end.
pub fn shorten(name: &str) -> String {
    match name.char_indices().rev().nth(CHARACTERS - 1) {
        Some((at, _)) if at > 0 => format!("…{}", &name[at..]),
        _ => name.to_owned(),
    }
}
