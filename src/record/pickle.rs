//! Pickles: protocol 2 written, protocols 2 to 5 read, as far as plain values need it.
//!
//! The reader executes nothing: it supports no opcode that names or calls a class, and rejects unknown opcodes. A value
//! that is referenced several times is stored once, so a tree takes at most about 50 bytes of memory for each byte of
//! the pickle. Code that copies values out of a tree must limit their number, since a value may be referenced any
//! number of times.

use std::collections::HashMap;

use crate::record::tree::{Fault, Node, Tree};

/// A writer of nested values. Within a dictionary, texts and values alternate.
pub(super) struct Pickle {
    pub bytes: Vec<u8>,
    /// Memo indexes of texts, and of values by number.
    texts: HashMap<String, u32>,
    values: HashMap<u32, u32>,
    places: u32,
}

impl Default for Pickle {
    fn default() -> Pickle {
        Pickle {
            bytes: vec![0x80, 2],
            texts: HashMap::new(),
            values: HashMap::new(),
            places: 0,
        }
    }
}

impl Pickle {
    pub(super) fn end(mut self) -> Vec<u8> {
        self.bytes.push(b'.');
        self.bytes
    }

    /// Writes an opcode with a memo index, in its short or long form.
    fn at(&mut self, place: u32, short: u8, long: u8) {
        match u8::try_from(place) {
            Ok(place) => self.bytes.extend_from_slice(&[short, place]),
            Err(_) => {
                self.bytes.push(long);
                self.bytes.extend_from_slice(&place.to_le_bytes());
            }
        }
    }

    fn get(&mut self, place: u32) {
        self.at(place, b'h', b'j');
    }

    fn put(&mut self) -> u32 {
        let place = self.places;
        self.places += 1;
        self.at(place, b'q', b'r');
        place
    }

    pub(super) fn open_list(&mut self) {
        self.bytes.extend_from_slice(b"](");
    }

    pub(super) fn close_list(&mut self) {
        self.bytes.push(b'e');
    }

    pub(super) fn open_dict(&mut self) {
        self.bytes.extend_from_slice(b"}(");
    }

    pub(super) fn close_dict(&mut self) {
        self.bytes.push(b'u');
    }

    pub(super) fn text(&mut self, text: &str) {
        if let Some(place) = self.texts.get(text) {
            return self.get(*place);
        }
        self.bytes.push(b'X');
        let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
        self.bytes.extend_from_slice(&length.to_le_bytes());
        self.bytes
            .extend_from_slice(&text.as_bytes()[..length as usize]);
        let place = self.put();
        self.texts.insert(text.to_owned(), place);
    }

    /// Writes a reference to the value that was passed to [`keep`](Self::keep) with this number, if there is one.
    pub(super) fn again(&mut self, number: u32) -> bool {
        let place = self.values.get(&number).copied();
        place.into_iter().for_each(|place| self.get(place));
        place.is_some()
    }

    /// Makes the value just written available under this number.
    pub(super) fn keep(&mut self, number: u32) {
        let place = self.put();
        self.values.insert(number, place);
    }

    pub(super) fn number(&mut self, number: u64) {
        match number {
            0..=0xff => self.bytes.extend_from_slice(&[b'K', number as u8]),
            0x100..=0xffff => {
                self.bytes.push(b'M');
                self.bytes.extend_from_slice(&(number as u16).to_le_bytes());
            }
            0x1_0000..=0x7fff_ffff => {
                self.bytes.push(b'J');
                self.bytes.extend_from_slice(&(number as u32).to_le_bytes());
            }
            _ => {
                // The ninth byte is the sign, for numbers of 2^63 and more.
                let bytes = if number >> 63 == 0 { 8 } else { 9 };
                self.bytes.extend_from_slice(&[0x8a, bytes]);
                let wide = u128::from(number).to_le_bytes();
                self.bytes.extend_from_slice(&wide[..bytes.into()]);
            }
        }
    }

    pub(super) fn flag(&mut self, flag: bool) {
        self.bytes.push(if flag { 0x88 } else { 0x89 });
    }

    pub(super) fn pair(&mut self, first: u64, second: u64) {
        self.number(first);
        self.number(second);
        self.bytes.push(0x86);
    }

    pub(super) fn entry(&mut self, key: &str, number: u64) {
        self.text(key);
        self.number(number);
    }

    pub(super) fn text_entry(&mut self, key: &str, text: &str) {
        self.text(key);
        self.text(text);
    }
}

#[derive(Clone, Copy)]
enum Entry {
    Mark,
    Value(u32),
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    tree: Tree,
    stack: Vec<Entry>,
    memo: HashMap<u64, u32>,
}

/// Reads a pickle. The position of a fault is that of the opcode.
pub(super) fn read(bytes: &[u8]) -> Result<Tree, (usize, Fault)> {
    let mut reader = Reader {
        bytes,
        at: 0,
        tree: Tree::default(),
        stack: Vec::new(),
        memo: HashMap::new(),
    };
    loop {
        let at = reader.at;
        match reader.step() {
            Ok(false) => {}
            Ok(true) => return Ok(reader.tree),
            Err(fault) => return Err((at, fault)),
        }
    }
}

const STACK: Fault = Fault::Damaged("the stack is not as this needs it");

impl Reader<'_> {
    fn take(&mut self, bytes: usize) -> Result<&[u8], Fault> {
        let end = self.at.checked_add(bytes).ok_or(Fault::Short)?;
        let taken = self.bytes.get(self.at..end).ok_or(Fault::Short)?;
        self.at = end;
        Ok(taken)
    }

    fn number<const N: usize>(&mut self) -> Result<u64, Fault> {
        let mut number = [0; 8];
        number[..N].copy_from_slice(self.take(N)?);
        Ok(u64::from_le_bytes(number))
    }

    fn length<const N: usize>(&mut self) -> Result<usize, Fault> {
        usize::try_from(self.number::<N>()?).map_err(|_| Fault::Short)
    }

    fn push(&mut self, node: Node) {
        let number = self.tree.push(node);
        self.stack.push(Entry::Value(number));
    }

    /// Reads a text whose length field has this many bits.
    fn text<const N: usize>(&mut self) -> Result<(), Fault> {
        let bytes = self.length::<N>()?;
        // Python writes unpaired surrogates, which file names may contain and which are not valid UTF-8.
        let text = String::from_utf8_lossy(self.take(bytes)?).into_owned();
        self.push(Node::Text(text));
        Ok(())
    }

    fn unsigned<const N: usize>(&mut self) -> Result<(), Fault> {
        let number = self.number::<N>()?;
        self.push(Node::Number(number));
        Ok(())
    }

    fn signed(&mut self, bytes: usize) -> Result<(), Fault> {
        let node = integer(self.take(bytes)?);
        self.push(node);
        Ok(())
    }

    fn pop(&mut self) -> Result<u32, Fault> {
        match self.stack.pop() {
            Some(Entry::Value(number)) => Ok(number),
            _ => Err(STACK),
        }
    }

    fn top(&self) -> Result<u32, Fault> {
        match self.stack.last() {
            Some(Entry::Value(number)) => Ok(*number),
            _ => Err(STACK),
        }
    }

    /// Pops the items above the last mark, and the mark.
    fn above_mark(&mut self) -> Result<Vec<u32>, Fault> {
        let is_mark = |entry: &Entry| matches!(entry, Entry::Mark);
        let mark = self.stack.iter().rposition(is_mark).ok_or(STACK)?;
        let values = self.stack.drain(mark..).skip(1);
        Ok(values
            .filter_map(|entry| match entry {
                Entry::Value(number) => Some(number),
                Entry::Mark => None,
            })
            .collect())
    }

    fn list(&mut self, values: Vec<u32>) -> Result<(), Fault> {
        let depth = self.tree.depth_around(&values)?;
        self.push(Node::List(values, depth));
        Ok(())
    }

    fn tuple(&mut self, count: usize) -> Result<(), Fault> {
        let mut values = Vec::with_capacity(count);
        for _ in 0..count {
            values.push(self.pop()?);
        }
        values.reverse();
        self.list(values)
    }

    fn append(&mut self, values: Vec<u32>) -> Result<(), Fault> {
        let (to, deep) = (self.top()? as usize, self.tree.depth_around(&values)?);
        match self.tree.nodes.get_mut(to) {
            Some(Node::List(list, depth)) => {
                list.extend(values);
                *depth = deep.max(*depth);
                Ok(())
            }
            _ => Err(STACK),
        }
    }

    fn set(&mut self, values: &[u32]) -> Result<(), Fault> {
        let (to, deep) = (self.top()? as usize, self.tree.depth_around(values)?);
        if !values.len().is_multiple_of(2) {
            return Err(STACK);
        }
        match self.tree.nodes.get_mut(to) {
            Some(Node::Dict(dict, depth)) => {
                dict.extend(values.chunks_exact(2).map(|pair| (pair[0], pair[1])));
                *depth = deep.max(*depth);
                Ok(())
            }
            _ => Err(STACK),
        }
    }

    fn put(&mut self, place: u64) -> Result<(), Fault> {
        let top = self.top()?;
        self.memo.insert(place, top);
        Ok(())
    }

    fn get<const N: usize>(&mut self) -> Result<(), Fault> {
        let place = self.number::<N>()?;
        let known = self.memo.get(&place).copied();
        let known = known.ok_or(Fault::Damaged("nothing was put where this gets"))?;
        self.stack.push(Entry::Value(known));
        Ok(())
    }

    /// Executes one opcode; returns whether it was the last.
    fn step(&mut self) -> Result<bool, Fault> {
        let opcode = self.number::<1>()? as u8;
        match opcode {
            0x80 => match self.number::<1>()? {
                2..=5 => {}
                _ => return Err(Fault::Damaged("this protocol is not read")),
            },
            0x95 => drop(self.take(8)?),
            b'}' => self.push(Node::Dict(Vec::new(), 1)),
            b']' | b')' => self.push(Node::List(Vec::new(), 1)),
            b'(' => self.stack.push(Entry::Mark),
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.set(&[key, value])?;
            }
            b'u' => {
                let values = self.above_mark()?;
                self.set(&values)?;
            }
            b'a' => {
                let value = self.pop()?;
                self.append(vec![value])?;
            }
            b'e' => {
                let values = self.above_mark()?;
                self.append(values)?;
            }
            b'd' => {
                let values = self.above_mark()?;
                self.push(Node::Dict(Vec::new(), 1));
                self.set(&values)?;
            }
            b'l' | b't' => {
                let values = self.above_mark()?;
                self.list(values)?;
            }
            0x85 => self.tuple(1)?,
            0x86 => self.tuple(2)?,
            0x87 => self.tuple(3)?,
            b'K' => self.unsigned::<1>()?,
            b'M' => self.unsigned::<2>()?,
            b'J' => self.signed(4)?,
            0x8a => {
                let bytes = self.length::<1>()?;
                self.signed(bytes)?;
            }
            0x8b => {
                let bytes = self.length::<4>()?;
                self.signed(bytes)?;
            }
            b'G' => {
                let bits = self.number::<8>()?.swap_bytes();
                self.push(Node::Float(f64::from_bits(bits)));
            }
            b'N' => self.push(Node::Null),
            0x88 => self.push(Node::Flag(true)),
            0x89 => self.push(Node::Flag(false)),
            b'X' => self.text::<4>()?,
            0x8c => self.text::<1>()?,
            0x8d => self.text::<8>()?,
            b'q' => {
                let place = self.number::<1>()?;
                self.put(place)?;
            }
            b'r' => {
                let place = self.number::<4>()?;
                self.put(place)?;
            }
            0x94 => self.put(self.memo.len() as u64)?,
            b'h' => self.get::<1>()?,
            b'j' => self.get::<4>()?,
            b'.' => {
                self.tree.root = self.pop()?;
                return Ok(true);
            }
            other => return Err(Fault::Opcode(other)),
        }
        Ok(false)
    }
}

/// Reads a signed integer of any length, least significant byte first.
fn integer(bytes: &[u8]) -> Node {
    let negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
    let fill = if negative { 0xff } else { 0 };
    let mut low = [fill; 8];
    let kept = bytes.len().min(8);
    low[..kept].copy_from_slice(&bytes[..kept]);
    let number = i64::from_le_bytes(low);
    match bytes[kept..].iter().all(|byte| *byte == fill) {
        true if !negative => Node::Number(number.cast_unsigned()),
        true if number < 0 => Node::Negative(number),
        _ => Node::Huge,
    }
}
