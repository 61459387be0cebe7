//! Pickles of values, with integers in every form that other programs write.

use serde_json::Value;

/// How the pickles of these tests write integers.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Width {
    /// As short as it can be, as Python does.
    Short,
    /// Four bytes where they do.
    Four,
    /// `LONG1` with as many bytes as the number needs.
    Long,
    /// `LONG1` with eight bytes: a number of 2^63 and more is negative, as C++ writes it.
    Signed,
    /// `LONG4` with sixteen bytes.
    Longest,
}

pub const WIDTHS: [Width; 5] = [
    Width::Short,
    Width::Four,
    Width::Long,
    Width::Signed,
    Width::Longest,
];

/// A value as a pickle of a protocol from 2 to 5.
pub fn pickled(value: &Value, protocol: u8, width: Width) -> Vec<u8> {
    let mut bytes = vec![0x80, protocol];
    if protocol >= 4 {
        bytes.extend([0x95, 1, 0, 0, 0, 0, 0, 0, 0]);
    }
    put(value, protocol, width, &mut bytes);
    bytes.push(b'.');
    bytes
}

fn put(value: &Value, protocol: u8, width: Width, into: &mut Vec<u8>) {
    match value {
        Value::Null => into.push(b'N'),
        Value::Bool(flag) => into.push(0x89 - u8::from(*flag)),
        Value::Number(number) => match (number.as_i128(), number.as_f64()) {
            (Some(number), _) => put_integer(number, width, into),
            (None, number) => {
                into.push(b'G');
                into.extend(number.unwrap().to_be_bytes());
            }
        },
        Value::String(text) if protocol < 4 => {
            into.push(b'X');
            into.extend((text.len() as u32).to_le_bytes());
            into.extend(text.bytes());
        }
        Value::String(text) => {
            into.extend([0x8c, text.len() as u8]);
            into.extend(text.bytes());
            into.push(0x94);
        }
        Value::Array(values) => {
            into.extend(b"](");
            values
                .iter()
                .for_each(|value| put(value, protocol, width, into));
            into.push(b'e');
        }
        Value::Object(entries) => {
            into.extend(b"}(");
            for (key, value) in entries {
                put(&key.as_str().into(), protocol, width, into);
                put(value, protocol, width, into);
            }
            into.push(b'u');
        }
    }
}

pub fn put_integer(number: i128, width: Width, into: &mut Vec<u8>) {
    let bytes = number.to_le_bytes();
    // The shortest that keep the sign.
    let is_kept = |length: &usize| {
        let shift = 128 - 8 * *length as u32;
        number << shift >> shift == number
    };
    let length = (1..=16).find(is_kept).unwrap();
    match (width, number) {
        (Width::Short, 0..=0xff) => into.extend([b'K', bytes[0]]),
        (Width::Short, 0..=0xffff) => into.extend([b'M', bytes[0], bytes[1]]),
        (Width::Short | Width::Four, _) if length <= 4 => {
            into.push(b'J');
            into.extend(&bytes[..4]);
        }
        (Width::Signed, _) => {
            into.extend([0x8a, 8]);
            into.extend(&bytes[..8]);
        }
        (Width::Longest, _) => {
            into.extend([0x8b, 16, 0, 0, 0]);
            into.extend(bytes);
        }
        _ => {
            into.extend([0x8a, length as u8]);
            into.extend(&bytes[..length]);
        }
    }
}
