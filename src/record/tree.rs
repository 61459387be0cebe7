//! Nested values read from a file, independent of its format, with typed access.

use std::fmt;

/// The maximum nesting depth.
pub(super) const DEEPEST: usize = 64;
/// The maximum number of frames of a stack: a name may have thousands of parts, and each block and event is written
/// with its stack.
pub(super) const MOST_FRAMES: usize = 32;
/// The maximum number of dictionary keys searched.
const MOST_KEYS: usize = 256;
/// The maximum number of characters of a text that an error quotes.
const QUOTED: usize = 40;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fault {
    /// It ends too early.
    Short,
    /// An opcode of a pickle that plain values do not need.
    Opcode(u8),
    /// Something in it is invalid.
    Damaged(&'static str),
}

/// A value; nested values are referenced by number.
#[derive(Debug)]
pub(super) enum Node {
    Null,
    Flag(bool),
    /// An integer of at least 0.
    Number(u64),
    /// An integer below 0.
    Negative(i64),
    /// An integer outside of both ranges.
    Huge,
    Float(f64),
    Text(String),
    /// Its values, and the depth of the deepest of them.
    List(Vec<u32>, usize),
    Dict(Vec<(u32, u32)>, usize),
}

#[derive(Debug, Default)]
pub(super) struct Tree {
    pub(super) nodes: Vec<Node>,
    pub(super) root: u32,
}

impl Tree {
    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(super) fn push(&mut self, node: Node) -> u32 {
        self.nodes.push(node);
        (self.nodes.len() - 1) as u32
    }

    pub(super) fn node(&self, number: u32) -> Option<&Node> {
        self.nodes.get(number as usize)
    }

    pub(super) fn depth(&self, number: u32) -> usize {
        match self.node(number) {
            Some(Node::List(_, depth) | Node::Dict(_, depth)) => *depth,
            _ => 0,
        }
    }

    /// Returns the depth of a new value that contains these.
    pub(super) fn depth_around(&self, values: &[u32]) -> Result<usize, Fault> {
        let deepest = values.iter().map(|number| self.depth(*number)).max();
        match deepest.unwrap_or(0) + 1 {
            depth if depth > DEEPEST => Err(Fault::Damaged("values nest too deep")),
            depth => Ok(depth),
        }
    }

    pub(super) fn root(&self) -> Value<'_> {
        Value {
            tree: self,
            number: Some(self.root),
            path: Path {
                parent: None,
                step: Step::Key(""),
            },
        }
    }
}

/// A value of a tree with its path, for error messages. The value may be missing.
#[derive(Clone, Copy)]
pub(super) struct Value<'a> {
    tree: &'a Tree,
    number: Option<u32>,
    path: Path<'a>,
}

#[derive(Clone, Copy)]
struct Path<'a> {
    parent: Option<&'a Path<'a>>,
    step: Step,
}

#[derive(Clone, Copy)]
enum Step {
    Key(&'static str),
    Index(usize),
}

/// Formats the path for people: `device_traces[0][17].addr`.
impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let outer = self.parent.map_or(String::new(), Path::to_string);
        match self.step {
            Step::Index(index) => write!(f, "{outer}[{index}]"),
            Step::Key(key) if outer.is_empty() => f.write_str(key),
            Step::Key(key) => write!(f, "{outer}.{key}"),
        }
    }
}

/// The error for a value of another type than the format requires.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unexpected {
    pub at: String,
    pub expected: &'static str,
    pub found: String,
}

impl<'a> Value<'a> {
    /// Returns the value of a key in a dictionary; the last one, if there are several. A dictionary with more than
    /// [`MOST_KEYS`] keys is of no known kind, and only its last keys are searched, to bound the time of a lookup.
    pub(super) fn get<'b>(&'b self, key: &'static str) -> Value<'b> {
        let number = match self.node() {
            Some(Node::Dict(entries, _)) => {
                let mut entries = entries.iter().rev().take(MOST_KEYS);
                let found = entries.find(|(name, _)| match self.tree.node(*name) {
                    Some(Node::Text(name)) => name == key,
                    _ => false,
                });
                found.map(|(_, value)| *value)
            }
            _ => None,
        };
        self.inner(number, Step::Key(key))
    }

    pub(super) fn at<'b>(&'b self, index: usize, number: u32) -> Value<'b> {
        self.inner(Some(number), Step::Index(index))
    }

    fn inner<'b>(&'b self, number: Option<u32>, step: Step) -> Value<'b> {
        let parent = Some(&self.path);
        Value {
            tree: self.tree,
            number,
            path: Path { parent, step },
        }
    }

    /// Returns the same value with a path that begins with this name.
    pub(super) fn named(mut self, name: &'static str) -> Value<'a> {
        self.path = Path {
            parent: None,
            step: Step::Key(name),
        };
        self
    }

    fn node(&self) -> Option<&'a Node> {
        self.tree.node(self.number?)
    }

    /// Identifies the value, which several places may share.
    pub(super) fn number(&self) -> Option<u32> {
        self.number
    }

    pub(super) fn exists(self) -> Option<Value<'a>> {
        match self.node() {
            None | Some(Node::Null) => None,
            Some(_) => Some(self),
        }
    }

    pub(super) fn is_dict(&self) -> bool {
        matches!(self.node(), Some(Node::Dict(..)))
    }

    /// Returns the first keys of a dictionary.
    pub(super) fn keys(&self) -> Vec<String> {
        match self.node() {
            Some(Node::Dict(entries, _)) => {
                let names = entries.iter().take(8);
                names.map(|(name, _)| self.describe(Some(*name))).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Creates an error that describes the value found.
    pub(super) fn unexpected(&self, expected: &'static str) -> Unexpected {
        Unexpected {
            at: self.path.to_string(),
            expected,
            found: self.found(),
        }
    }

    pub(super) fn found(&self) -> String {
        self.describe(self.number)
    }

    fn describe(&self, number: Option<u32>) -> String {
        match number.and_then(|number| self.tree.node(number)) {
            None => "nothing".to_owned(),
            Some(Node::Null) => "null".to_owned(),
            Some(Node::Flag(flag)) => flag.to_string(),
            Some(Node::Number(number)) => number.to_string(),
            Some(Node::Negative(number)) => number.to_string(),
            Some(Node::Huge) => "an integer of more than 64 bits".to_owned(),
            Some(Node::Float(number)) => format!("the floating-point number {number}"),
            Some(Node::Text(text)) => {
                let quoted: String = text.chars().take(QUOTED).collect();
                let dots = if quoted.len() < text.len() { "…" } else { "" };
                format!("`{quoted}{dots}`")
            }
            Some(Node::List(values, _)) => match values.first() {
                None => "an empty list".to_owned(),
                Some(first) => match self.tree.node(*first) {
                    Some(Node::List(..)) => "a list of lists".to_owned(),
                    Some(Node::Dict(..)) => "a list of dictionaries".to_owned(),
                    _ => format!("a list that begins with {}", self.describe(Some(*first))),
                },
            },
            Some(Node::Dict(..)) => "a dictionary".to_owned(),
        }
    }

    pub(super) fn list(&self) -> Result<&'a [u32], Unexpected> {
        match self.node() {
            Some(Node::List(values, _)) => Ok(values),
            _ => Err(self.unexpected("a list")),
        }
    }

    pub(super) fn dict(self) -> Result<Value<'a>, Unexpected> {
        match self.is_dict() {
            true => Ok(self),
            false => Err(self.unexpected("a dictionary")),
        }
    }

    pub(super) fn text(&self, expected: &'static str) -> Result<&'a str, Unexpected> {
        match self.node() {
            Some(Node::Text(text)) => Ok(text),
            _ => Err(self.unexpected(expected)),
        }
    }

    /// Returns an address or a handle: 64 bits, which C++ may write as a signed number.
    pub(super) fn address(&self, expected: &'static str) -> Result<u64, Unexpected> {
        match self.node() {
            Some(Node::Number(number)) => Ok(*number),
            Some(Node::Negative(number)) => Ok(number.cast_unsigned()),
            _ => Err(self.unexpected(expected)),
        }
    }

    /// Returns a count below a limit.
    pub(super) fn count(&self, limit: u64, expected: &'static str) -> Result<u64, Unexpected> {
        match self.node() {
            Some(Node::Number(number)) if *number < limit => Ok(*number),
            _ => Err(self.unexpected(expected)),
        }
    }

    pub(super) fn flag(&self) -> Result<bool, Unexpected> {
        match self.node() {
            Some(Node::Flag(flag)) => Ok(*flag),
            _ => Err(self.unexpected("true or false")),
        }
    }

    pub(super) fn bytes(&self) -> Result<u64, Unexpected> {
        self.count(1 << 63, "a number of bytes")
    }
}

/// Writes the values in another format.
#[cfg(feature = "json")]
impl serde::Serialize for Value<'_> {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let value = |number: &u32| self.inner(Some(*number), Step::Index(0));
        match self.node() {
            Some(Node::Flag(flag)) => to.serialize_bool(*flag),
            Some(Node::Number(number)) => to.serialize_u64(*number),
            Some(Node::Negative(number)) => to.serialize_i64(*number),
            Some(Node::Float(number)) => to.serialize_f64(*number),
            Some(Node::Text(text)) => to.serialize_str(text),
            Some(Node::List(values, _)) => to.collect_seq(values.iter().map(value)),
            Some(Node::Dict(entries, _)) => {
                to.collect_map(entries.iter().map(|(key, of)| (value(key), value(of))))
            }
            None | Some(Node::Null | Node::Huge) => to.serialize_unit(),
        }
    }
}
