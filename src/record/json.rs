//! JSON, written, and read into a tree of values.

use std::collections::HashMap;

use crate::record::out::Out;
use crate::record::tree::{DEEPEST, Fault, Node, Tree};

/// A text that grows.
#[derive(Default)]
pub(super) struct Json {
    pub text: String,
    /// Of each open list or dictionary: whether it is a dictionary, and how many texts and values it has.
    open: Vec<(bool, usize)>,
}

impl Json {
    /// What stands before the next value.
    fn begin(&mut self) {
        if let Some((dict, values)) = self.open.last_mut() {
            match (*values, *dict && *values % 2 == 1) {
                (_, true) => self.text.push(':'),
                (0, _) => {}
                _ => self.text.push(','),
            }
            *values += 1;
        }
    }

    fn open(&mut self, dict: bool) {
        self.begin();
        self.text.push(if dict { '{' } else { '[' });
        self.open.push((dict, 0));
    }

    fn close(&mut self, end: char) {
        self.open.pop();
        self.text.push(end);
    }
}

impl Out for Json {
    fn open_list(&mut self) {
        self.open(false);
    }

    fn close_list(&mut self) {
        self.close(']');
    }

    fn open_dict(&mut self) {
        self.open(true);
    }

    fn close_dict(&mut self) {
        self.close('}');
    }

    fn text(&mut self, text: &str) {
        self.begin();
        quote(&mut self.text, text);
    }

    fn number(&mut self, number: u64) {
        self.begin();
        self.text.push_str(&number.to_string());
    }

    fn flag(&mut self, flag: bool) {
        self.begin();
        self.text.push_str(if flag { "true" } else { "false" });
    }

    fn pair(&mut self, first: u64, second: u64) {
        self.open_list();
        self.number(first);
        self.number(second);
        self.close_list();
    }
}

/// A text as JSON has it. What could end a script that it stands in is escaped, too.
fn quote(into: &mut String, text: &str) {
    into.push('"');
    for character in text.chars() {
        match character {
            '"' => into.push_str("\\\""),
            '\\' => into.push_str("\\\\"),
            '\n' => into.push_str("\\n"),
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' | '\0'..='\u{1f}' | '\u{7f}' => {
                into.push_str(&format!("\\u{:04x}", u32::from(character)));
            }
            _ => into.push(character),
        }
    }
    into.push('"');
}

/// Whether a file can only be JSON: a dictionary or a list, behind white space and a byte order mark.
pub(super) fn is_json(bytes: &[u8]) -> bool {
    let text = bytes.strip_prefix(MARK).unwrap_or(bytes);
    let first = text.iter().find(|byte| !is_white(**byte));
    matches!(first, Some(b'{' | b'['))
}

const MARK: &[u8] = "\u{FEFF}".as_bytes();

fn is_white(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r' | b'\n')
}

/// A list or dictionary that is not closed yet.
struct Open {
    dict: bool,
    /// A dictionary's keys and values alternate.
    values: Vec<u32>,
    /// How deep the deepest value lies.
    depth: usize,
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    tree: Tree,
    open: Vec<Open>,
    /// Texts are kept once: most are keys.
    texts: HashMap<String, u32>,
}

/// Reads JSON. The place of a fault is that of the value or sign.
pub(super) fn read(bytes: &[u8]) -> Result<Tree, (usize, Fault)> {
    let mut reader = Reader {
        bytes,
        at: if bytes.starts_with(MARK) {
            MARK.len()
        } else {
            0
        },
        tree: Tree::default(),
        open: Vec::new(),
        texts: HashMap::new(),
    };
    let outcome = reader.all();
    outcome.map_err(|fault| (reader.at.min(bytes.len()), fault))?;
    Ok(reader.tree)
}

const SIGN: Fault = Fault::Damaged("this is not JSON");

impl Reader<'_> {
    fn peek(&self) -> Result<u8, Fault> {
        self.bytes.get(self.at).copied().ok_or(Fault::Short)
    }

    fn skip_white(&mut self) {
        while self.bytes.get(self.at).copied().is_some_and(is_white) {
            self.at += 1;
        }
    }

    /// One value after another, until that is closed which was opened first.
    fn all(&mut self) -> Result<(), Fault> {
        loop {
            self.skip_white();
            let ended = match self.peek()? {
                sign @ (b'{' | b'[') => {
                    if self.open.len() >= DEEPEST {
                        return Err(Fault::Damaged("values nest too deep"));
                    }
                    self.at += 1;
                    self.open.push(Open {
                        dict: sign == b'{',
                        values: Vec::new(),
                        depth: 0,
                    });
                    self.skip_white();
                    // Nothing in it, or the first value comes.
                    match (self.peek()?, sign) {
                        (b'}', b'{') | (b']', b'[') => self.close_all()?,
                        _ => continue,
                    }
                }
                _ => {
                    let value = self.plain()?;
                    self.add(value, 0)?;
                    self.close_all()?
                }
            };
            if ended {
                self.skip_white();
                return match self.at == self.bytes.len() {
                    true => Ok(()),
                    false => Err(SIGN),
                };
            }
        }
    }

    /// A text, a number or a word.
    fn plain(&mut self) -> Result<u32, Fault> {
        let expects_key = self
            .open
            .last()
            .is_some_and(|open| open.dict && open.values.len() % 2 == 0);
        match self.peek()? {
            b'"' => self.text(),
            _ if expects_key => Err(SIGN),
            b'-' | b'0'..=b'9' => self.number(),
            _ => {
                // Python writes the last two, and another with a sign.
                let words: [&[u8]; 5] = [b"true", b"false", b"null", b"NaN", b"Infinity"];
                let rest = &self.bytes[self.at..];
                let word = words
                    .iter()
                    .find(|word| rest.starts_with(word))
                    .ok_or(SIGN)?;
                self.at += word.len();
                Ok(self.push(Node::Other))
            }
        }
    }

    fn push(&mut self, node: Node) -> u32 {
        self.tree.nodes.push(node);
        (self.tree.nodes.len() - 1) as u32
    }

    /// Enters a value where it belongs.
    fn add(&mut self, value: u32, depth: usize) -> Result<(), Fault> {
        match self.open.last_mut() {
            None => self.tree.root = value,
            Some(open) => {
                open.values.push(value);
                open.depth = open.depth.max(depth);
                if open.dict && open.values.len() % 2 == 1 {
                    self.skip_white();
                    if self.peek()? != b':' {
                        return Err(SIGN);
                    }
                    self.at += 1;
                }
            }
        }
        Ok(())
    }

    /// Reads on to where the next value begins, and closes what ends before; whether that was everything.
    fn close_all(&mut self) -> Result<bool, Fault> {
        loop {
            let Some(open) = self.open.last() else {
                return Ok(true);
            };
            let (end, values) = (if open.dict { b'}' } else { b']' }, open.values.len());
            // Its value comes.
            if open.dict && values % 2 == 1 {
                return Ok(false);
            }
            self.skip_white();
            let sign = self.peek()?;
            if sign == b',' && values > 0 {
                self.at += 1;
                self.skip_white();
                return match self.peek()? {
                    b'}' | b']' => Err(SIGN),
                    _ => Ok(false),
                };
            }
            if sign != end {
                return Err(SIGN);
            }
            self.at += 1;
            if let Some(open) = self.open.pop() {
                let depth = open.depth + 1;
                let node = match open.dict {
                    true => {
                        let pairs = open.values.chunks_exact(2).map(|pair| (pair[0], pair[1]));
                        Node::Dict(pairs.collect(), depth)
                    }
                    false => Node::List(open.values, depth),
                };
                let value = self.push(node);
                self.add(value, depth)?;
            }
        }
    }

    /// A whole number below 2^63; others are of no use here.
    fn number(&mut self) -> Result<u32, Fault> {
        let rest = &self.bytes[self.at..];
        let is_part = |byte: &u8| matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E');
        let end = rest
            .iter()
            .position(|byte| !is_part(byte))
            .unwrap_or(rest.len());
        let text = std::str::from_utf8(&rest[..end]).map_err(|_| SIGN)?;
        let node = match (text.parse::<i64>(), text.parse::<f64>()) {
            (Ok(number), _) => Node::Number(number),
            (_, Ok(_)) => Node::Other,
            _ if rest.starts_with(b"-Infinity") => {
                self.at += b"-Infinity".len();
                return Ok(self.push(Node::Other));
            }
            _ => return Err(SIGN),
        };
        self.at += end;
        Ok(self.push(node))
    }

    fn text(&mut self) -> Result<u32, Fault> {
        self.at += 1;
        let mut text = String::new();
        loop {
            let rest = self.bytes.get(self.at..).ok_or(Fault::Short)?;
            let plain = rest.iter().position(|byte| matches!(byte, b'"' | b'\\'));
            let plain = plain.ok_or(Fault::Short)?;
            let part = std::str::from_utf8(&rest[..plain]);
            text.push_str(part.map_err(|_| Fault::Damaged("a text is not UTF-8"))?);
            self.at += plain + 1;
            if rest[plain] == b'"' {
                break;
            }
            text.push(self.escaped()?);
        }
        if let Some(known) = self.texts.get(&text) {
            return Ok(*known);
        }
        let number = self.push(Node::Text(text.clone()));
        self.texts.insert(text, number);
        Ok(number)
    }

    /// What stands behind a backslash. Half a pair of surrogates is no character.
    fn escaped(&mut self) -> Result<char, Fault> {
        let sign = self.peek()?;
        self.at += 1;
        Ok(match sign {
            b'"' | b'\\' | b'/' => sign.into(),
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let first = self.unit()?;
                let paired =
                    (0xd800..0xdc00).contains(&first) && self.bytes[self.at..].starts_with(b"\\u");
                if !paired {
                    return Ok(char::from_u32(first).unwrap_or(char::REPLACEMENT_CHARACTER));
                }
                let behind = self.at;
                self.at += 2;
                let second = self.unit()?;
                match (0xdc00..0xe000).contains(&second) {
                    true => {
                        let whole = 0x1_0000 + ((first - 0xd800) << 10) + (second - 0xdc00);
                        char::from_u32(whole).unwrap_or(char::REPLACEMENT_CHARACTER)
                    }
                    false => {
                        self.at = behind;
                        char::REPLACEMENT_CHARACTER
                    }
                }
            }
            _ => return Err(SIGN),
        })
    }

    fn unit(&mut self) -> Result<u32, Fault> {
        let digits = self.bytes.get(self.at..self.at + 4).ok_or(Fault::Short)?;
        let mut digits = digits.iter().map(|digit| char::from(*digit).to_digit(16));
        let unit = digits.try_fold(0, |unit, digit| Some(unit * 16 + digit?));
        self.at += 4;
        unit.ok_or(SIGN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_nest_and_texts_are_escaped() {
        let mut json = Json::default();
        json.open_dict();
        json.text("a\"\\\n</script>");
        json.open_list();
        json.number(1);
        json.flag(true);
        json.pair(2, 3);
        json.open_dict();
        json.close_dict();
        json.close_list();
        json.text_entry("b", "c");
        json.close_dict();
        let expected = r#"{"a\"\\\n\u003c/script\u003e":[1,true,[2,3],{}],"b":"c"}"#;
        assert_eq!(json.text, expected);
    }

    #[test]
    fn what_is_written_is_read_back() {
        let mut json = Json::default();
        json.open_dict();
        json.text_entry("a \"\\\n\u{1}</script>", "\u{1f600} \u{2028}");
        json.text("list");
        json.open_list();
        json.number(u64::MAX >> 1);
        json.pair(2, 3);
        json.open_dict();
        json.close_dict();
        json.open_list();
        json.close_list();
        json.flag(true);
        json.close_list();
        json.close_dict();
        let tree = read(json.text.as_bytes()).unwrap();
        let root = tree.root();
        let said = tree.get(root, "a \"\\\n\u{1}</script>").unwrap();
        assert_eq!(tree.text(said), Some("\u{1f600} \u{2028}"));
        let list = tree.get(root, "list").unwrap();
        let list = tree.list(list).unwrap();
        assert_eq!(list.len(), 5);
        assert_eq!(tree.number(list[0]), Some(u64::MAX >> 1));
        let pair = tree.list(list[1]).unwrap();
        assert_eq!(
            [tree.number(pair[0]), tree.number(pair[1])],
            [Some(2), Some(3)]
        );
        assert_eq!(tree.list(list[3]), Some(&[][..]));
    }

    #[test]
    fn texts_have_the_escapes_of_json_and_numbers_may_be_of_no_use() {
        let text = "\u{FEFF} [ \"\\ud83d\\ude00\\u0041\\/\\ud83dx\" , -1, 1.5e3, 99999999999999999999, null, NaN, -Infinity ] \n";
        let tree = read(text.as_bytes()).unwrap();
        let list = tree.list(tree.root()).unwrap();
        assert_eq!(tree.text(list[0]), Some("\u{1f600}A/\u{fffd}x"));
        assert_eq!(list.len(), 7);
        assert!(list[1..].iter().all(|value| tree.number(*value).is_none()));
    }

    #[test]
    fn what_is_no_json_is_refused() {
        for text in [
            "[1,]",
            "{\"a\"}",
            "{\"a\":}",
            "{1:2}",
            "[1 2]",
            "[1]]",
            "[}",
            "{\"a\":1,}",
            "[,1]",
            "[\"\\x\"]",
            "[+]",
            "[-]",
            "[tru]",
        ] {
            let fault = read(text.as_bytes()).unwrap_err().1;
            assert_eq!(fault, SIGN, "{text}");
        }
        for text in ["", "[", "[1", "{\"a\":", "{\"a\":1", "[\"a", "[\"\\u00"] {
            assert_eq!(read(text.as_bytes()).unwrap_err().1, Fault::Short, "{text}");
        }
        let deep = "[".repeat(DEEPEST + 1);
        let deep = read(deep.as_bytes()).unwrap_err();
        assert_eq!(deep, (DEEPEST, Fault::Damaged("values nest too deep")));
    }
}
