//! JSON, written.

use crate::record::out::Out;

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
}
