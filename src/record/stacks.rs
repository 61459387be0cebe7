//! Converts stacks of a snapshot to names of contexts.

use std::collections::HashMap;

use crate::record::tree::{MOST_FRAMES, Unexpected, Value};
use crate::trace::Names;

/// The maximum total size of the names. A small file can share texts and so contain any number of long stacks; those
/// beyond the limit are dropped.
const MOST_BYTES: usize = 64 << 20;
const MOST_LINES: u64 = i32::MAX as u64;
/// The maximum number of characters kept of a frame.
const MOST_CHARACTERS: usize = 200;

/// Names of stacks, deduplicated.
#[derive(Default)]
pub(super) struct Stacks {
    pub names: Names,
    bytes: usize,
    /// Contexts by list of frames, which events share.
    lists: HashMap<u32, u32>,
}

impl Stacks {
    /// Returns the context of a block or an event: its stack, or the program's own description. 0 if there is neither.
    pub(super) fn of(&mut self, value: &Value<'_>) -> Result<u32, Unexpected> {
        let frames = value.get("frames");
        let shared = frames.number();
        if let Some(known) = shared.and_then(|number| self.lists.get(&number)) {
            return Ok(*known);
        }
        let parts = match frames.exists() {
            Some(frames) => frames.list()?,
            None => &[],
        };
        if parts.is_empty() {
            // It may be any value that the program chose.
            let text = value
                .get("user_metadata")
                .text("a text")
                .unwrap_or_default();
            return Ok(self.number(&shorten(text)));
        }
        // Innermost first.
        let innermost = parts.iter().enumerate().take(MOST_FRAMES).rev();
        let names = innermost.map(|(index, frame)| name(&frames.at(index, *frame)));
        let names: Vec<String> = names.collect::<Result<_, _>>()?;
        let context = self.number(&names.join(";"));
        self.lists.extend(shared.map(|number| (number, context)));
        Ok(context)
    }

    fn number(&mut self, name: &str) -> u32 {
        if let Some(number) = self.names.find(name) {
            return number;
        }
        if name.is_empty() || self.bytes + name.len() > MOST_BYTES {
            return 0;
        }
        self.bytes += name.len();
        self.names.number(name)
    }
}

/// Formats a frame as PyTorch's tools do: the file without its folder, the line and the function, as far as known.
fn name(frame: &Value<'_>) -> Result<String, Unexpected> {
    let frame = frame.dict()?;
    let [file, line, function] = ["filename", "line", "name"].map(|key| frame.get(key));
    let file = file.exists().map(|file| file.text("the name of a file"));
    let line = line
        .exists()
        .map(|line| line.address("the number of a line"));
    let function = function
        .exists()
        .map(|function| function.text("the name of a function"));
    let file = file.transpose()?.and_then(|file| file.rsplit('/').next());
    let file = file.filter(|file| !file.is_empty()).map(shorten);
    // Python writes -1 for an unknown line. Without a file a line has no meaning.
    let line = line
        .transpose()?
        .filter(|line| file.is_some() && *line <= MOST_LINES);
    let function = shorten(function.transpose()?.unwrap_or("?"));
    let parts = [file, line.map(|line| line.to_string()), Some(function)];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    // Semicolons separate frames, so they are replaced.
    Ok(parts.join(":").replace(';', ","))
}

fn shorten(text: &str) -> String {
    text.chars().take(MOST_CHARACTERS).collect()
}
