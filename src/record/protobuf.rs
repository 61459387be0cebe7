//! Writes protocol buffers.

#[derive(Debug, Default)]
pub(super) struct Message(Vec<u8>);

fn varint(into: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        into.push(number as u8 | 0x80);
        number >>= 7;
    }
    into.push(number as u8);
}

impl Message {
    /// Writes a number; 0 is omitted, because absent fields are read as 0.
    pub(super) fn number(&mut self, field: u64, number: u64) {
        if number != 0 {
            varint(&mut self.0, field << 3);
            varint(&mut self.0, number);
        }
    }

    pub(super) fn bytes(&mut self, field: u64, bytes: &[u8]) {
        varint(&mut self.0, field << 3 | 2);
        varint(&mut self.0, bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    pub(super) fn packed(&mut self, field: u64, numbers: &[u64]) {
        let mut bytes = Vec::new();
        for number in numbers {
            varint(&mut bytes, *number);
        }
        self.bytes(field, &bytes);
    }

    pub(super) fn message(&mut self, field: u64, message: &Message) {
        self.bytes(field, &message.0);
    }

    pub(super) fn end(self) -> Vec<u8> {
        self.0
    }
}
