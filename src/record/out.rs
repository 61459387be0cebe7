//! Values as they are written: the same calls make a pickle or JSON.

/// A writer of nested values. Within a dictionary texts and values alternate.
pub(super) trait Out {
    fn open_list(&mut self);
    fn close_list(&mut self);
    fn open_dict(&mut self);
    fn close_dict(&mut self);
    fn text(&mut self, text: &str);
    /// A number below 2^63.
    fn number(&mut self, number: u64);
    fn flag(&mut self, flag: bool);
    /// Two numbers as one value.
    fn pair(&mut self, first: u64, second: u64);

    /// Writes a value again that was written under a number before, if this form has a way to say that.
    fn again(&mut self, _number: u32) -> bool {
        false
    }

    /// The value that was just written may be written again, under a number.
    fn keep(&mut self, _number: u32) {}

    fn entry(&mut self, key: &str, number: u64) {
        self.text(key);
        self.number(number);
    }

    fn text_entry(&mut self, key: &str, text: &str) {
        self.text(key);
        self.text(text);
    }
}
