//! JSON, read into a tree of values.

use std::collections::HashMap;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::record::tree::{DEEPEST, Node, Tree};

pub(super) fn read(bytes: &[u8]) -> Result<Tree, serde_json::Error> {
    let mut builder = Builder::default();
    let mut from = serde_json::Deserializer::from_slice(bytes);
    let root = Seed(&mut builder, 0).deserialize(&mut from)?;
    from.end()?;
    builder.tree.root = root;
    Ok(builder.tree)
}

#[derive(Default)]
struct Builder {
    tree: Tree,
    /// Texts are stored once: most are keys.
    texts: HashMap<String, u32>,
}

/// Adds the next value at a depth, which is bounded here, so nodes do not store it.
struct Seed<'a>(&'a mut Builder, usize);

impl Seed<'_> {
    fn push<E>(self, node: Node) -> Result<u32, E> {
        Ok(self.0.tree.push(node))
    }

    /// For values within this one.
    fn inner<E: Error>(&mut self) -> Result<Seed<'_>, E> {
        match self.1 {
            DEEPEST => Err(E::custom("values nest too deep")),
            depth => Ok(Seed(self.0, depth + 1)),
        }
    }
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = u32;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<u32, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = u32;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<u32, E> {
        self.push(Node::Null)
    }

    fn visit_bool<E>(self, flag: bool) -> Result<u32, E> {
        self.push(Node::Flag(flag))
    }

    fn visit_u64<E>(self, number: u64) -> Result<u32, E> {
        self.push(Node::Number(number))
    }

    fn visit_i64<E>(self, number: i64) -> Result<u32, E> {
        self.push(match u64::try_from(number) {
            Ok(number) => Node::Number(number),
            Err(_) => Node::Negative(number),
        })
    }

    fn visit_f64<E>(self, number: f64) -> Result<u32, E> {
        self.push(Node::Float(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<u32, E> {
        let Builder { tree, texts } = self.0;
        Ok(match texts.get(text) {
            Some(known) => *known,
            None => {
                let number = tree.push(Node::Text(text.to_owned()));
                texts.insert(text.to_owned(), number);
                number
            }
        })
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut from: A) -> Result<u32, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = from.next_element_seed(self.inner()?)? {
            values.push(value);
        }
        self.push(Node::List(values, 0))
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut from: A) -> Result<u32, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = from.next_key_seed(self.inner()?)? {
            entries.push((key, from.next_value_seed(self.inner()?)?));
        }
        self.push(Node::Dict(entries, 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::pickle;

    #[test]
    fn values_are_those_of_the_text_and_of_a_pickle_of_it() {
        let text = r#"{"a \"\\\n\u0001</script>":"\ud83d\ude00 \u2028","list":[true,-1,9223372036854775808,{},[[]]]}"#;
        let tree = read(text.as_bytes()).unwrap();
        let root = tree.root();
        assert_eq!(
            serde_json::to_value(root).unwrap(),
            serde_json::from_str::<serde_json::Value>(text).unwrap()
        );
        let mut pickle = pickle::Pickle::default();
        pickle.open_dict();
        pickle.text_entry("a", "\u{1f600}");
        pickle.text("list");
        pickle.open_list();
        for number in [
            0,
            255,
            256,
            65_536,
            1 << 31,
            u64::MAX >> 1,
            1 << 63,
            u64::MAX,
        ] {
            pickle.number(number);
        }
        pickle.flag(false);
        pickle.pair(2, 3);
        pickle.close_list();
        pickle.close_dict();
        let tree = pickle::read(&pickle.end()).unwrap();
        assert_eq!(
            serde_json::to_string(&tree.root()).unwrap(),
            "{\"a\":\"\u{1f600}\",\"list\":[0,255,256,65536,2147483648,9223372036854775807,\
             9223372036854775808,18446744073709551615,false,[2,3]]}"
        );
    }

    #[test]
    fn nesting_is_limited() {
        let deep = |depth| read(format!("{}{}", "[".repeat(depth), "]".repeat(depth)).as_bytes());
        assert!(deep(DEEPEST).is_ok());
        let fault = deep(DEEPEST + 1).unwrap_err().to_string();
        assert!(fault.starts_with("values nest too deep at"), "{fault}");
    }
}
