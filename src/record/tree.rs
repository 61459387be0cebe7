//! Nested values as a file has them, whatever its format.

/// Deepest nesting that is read.
pub(super) const DEEPEST: usize = 64;
/// Most frames of a stack: a name may have thousands of parts, and each block and event is written with its stack.
pub(super) const MOST_FRAMES: usize = 32;
/// Keys of a dictionary that are looked at.
const MOST_KEYS: usize = 256;

/// Why a file is not read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fault {
    /// It ends too early.
    Short,
    /// An opcode of a pickle that plain values do not need.
    Opcode(u8),
    /// Something in it cannot be.
    Damaged(&'static str),
}

/// A value; others that it holds by their numbers.
#[derive(Debug)]
pub(super) enum Node {
    /// Nothing, a flag, a number with a point, or one that is too large: of no use here.
    Other,
    Number(i64),
    Text(String),
    List(Vec<u32>, usize),
    Dict(Vec<(u32, u32)>, usize),
}

/// The values of a file.
#[derive(Debug, Default)]
pub(super) struct Tree {
    pub(super) nodes: Vec<Node>,
    pub(super) root: u32,
}

impl Tree {
    /// The number of its values.
    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(super) fn root(&self) -> u32 {
        self.root
    }

    fn node(&self, number: u32) -> Option<&Node> {
        self.nodes.get(number as usize)
    }

    pub(super) fn depth(&self, number: u32) -> usize {
        match self.node(number) {
            Some(Node::List(_, depth) | Node::Dict(_, depth)) => *depth,
            _ => 0,
        }
    }

    pub(super) fn list(&self, number: u32) -> Option<&[u32]> {
        match self.node(number)? {
            Node::List(values, _) => Some(values),
            _ => None,
        }
    }

    /// The value that a dictionary has for a key; the last one, if there are several. A dictionary with more than
    /// [`MOST_KEYS`] is of no known kind, and the first of them are passed over: to look for one key must not take long.
    pub(super) fn get(&self, number: u32, key: &str) -> Option<u32> {
        let Node::Dict(entries, _) = self.node(number)? else {
            return None;
        };
        let mut entries = entries.iter().rev().take(MOST_KEYS);
        let found = entries.find(|(name, _)| self.text(*name) == Some(key));
        found.map(|(_, value)| *value)
    }

    pub(super) fn text(&self, number: u32) -> Option<&str> {
        match self.node(number)? {
            Node::Text(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn number(&self, number: u32) -> Option<u64> {
        match self.node(number)? {
            Node::Number(number) => u64::try_from(*number).ok(),
            _ => None,
        }
    }
}
