//! Stacks of a snapshot as names of contexts.

use std::collections::HashMap;

use crate::record::tree::{MOST_FRAMES, Tree};

/// Bytes that the names may have together. A small file can share texts and so have any number of long stacks; those
/// beyond are none.
const MOST_BYTES: usize = 64 << 20;
/// Characters of a frame that are kept.
const MOST_CHARACTERS: usize = 200;

/// Names of stacks, each once.
#[derive(Default)]
pub(super) struct Stacks {
    /// That of context 1 first.
    pub names: Vec<String>,
    bytes: usize,
    numbers: HashMap<String, u32>,
    /// Contexts of lists of frames, which events share.
    lists: HashMap<u32, u32>,
}

impl Stacks {
    /// The context of a block or an event: its stack, or what the program said of it. 0 if there is neither.
    pub(super) fn of(&mut self, tree: &Tree, value: u32) -> u32 {
        let frames = tree.get(value, "frames");
        if let Some(frames) = frames
            && let Some(known) = self.lists.get(&frames)
        {
            return *known;
        }
        let parts = frames.and_then(|frames| tree.list(frames));
        let parts = parts.unwrap_or_default();
        if parts.is_empty() {
            let said = tree.get(value, "user_metadata");
            let said = said.and_then(|said| tree.text(said));
            return said.map_or(0, |said| self.number(shortened(said)));
        }
        // Innermost first.
        let innermost = parts.iter().take(MOST_FRAMES).rev();
        let names: Vec<String> = innermost.map(|frame| name(tree, *frame)).collect();
        let number = self.number(names.join(";"));
        if let Some(frames) = frames {
            self.lists.insert(frames, number);
        }
        number
    }

    fn number(&mut self, name: String) -> u32 {
        if let Some(number) = self.numbers.get(&name) {
            return *number;
        }
        if name.is_empty() || self.bytes + name.len() > MOST_BYTES {
            return 0;
        }
        self.bytes += name.len();
        self.names.push(name.clone());
        let number = self.names.len() as u32;
        self.numbers.insert(name, number);
        number
    }
}

/// A frame as PyTorch's tools write it: the file without its folder, the line and the function, or the function alone.
fn name(tree: &Tree, frame: u32) -> String {
    let text = |key| tree.get(frame, key).and_then(|value| tree.text(value));
    let (file, function) = (text("filename"), text("name").unwrap_or("?"));
    let file = file.and_then(|file| file.rsplit('/').next());
    let line = tree
        .get(frame, "line")
        .and_then(|value| tree.number(value))
        .unwrap_or(0);
    // Semicolons stand between frames.
    let frame = match file {
        Some(file) if !file.is_empty() => {
            format!("{}:{line}:{}", shortened(file), shortened(function))
        }
        _ => shortened(function),
    };
    frame.replace(';', ",")
}

fn shortened(text: &str) -> String {
    text.chars().take(MOST_CHARACTERS).collect()
}
