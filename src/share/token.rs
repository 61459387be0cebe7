//! Tokens: the names of shared blocks, as text.

use std::fmt::{self, Write};
use std::str::FromStr;

use super::peer;
use crate::error::{Error, ShareError};

/// The version of tokens and of the messages between processes.
const PREFIX: &str = "cualloc1";

/// The name of a shared block: a text of at most 255 ASCII characters without spaces, which any channel can carry. It
/// holds no resource. Processes of other users cannot open it.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Token {
    pub(super) exporter: Exporter,
    pub(super) block: BlockName,
    /// The UUID of the device; zeros if the driver does not report it.
    pub(super) device: [u8; 16],
}

/// A process that shares blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Exporter {
    pub pid: u32,
    /// When the process started, in ticks of the operating system since its own start.
    pub start: u64,
    /// The namespace of its id.
    pub namespace: u64,
    /// The number in the name of its socket.
    pub socket: u64,
    /// What an importer must know.
    pub secret: [u64; 2],
    /// The descriptor, in that process, that leads to its server.
    pub descriptor: i32,
}

/// A live block of a process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct BlockName {
    pub allocator: u64,
    pub address: u64,
    pub bytes: u64,
    /// Number and generation, which no other block of the allocator has.
    pub number: u32,
    pub generation: u32,
}

impl Token {
    /// Returns the bytes of the block.
    pub fn bytes(&self) -> u64 {
        self.block.bytes
    }

    /// Returns the id of the process that shares the block, as that process sees it.
    pub fn process(&self) -> u32 {
        self.exporter.pid
    }

    fn words(&self) -> [u64; 14] {
        let (from, block) = (&self.exporter, &self.block);
        let device = u128::from_be_bytes(self.device);
        [
            from.pid.into(),
            from.start,
            from.namespace,
            from.socket,
            from.secret[0],
            from.secret[1],
            from.descriptor as u64,
            block.allocator,
            block.address,
            block.bytes,
            block.number.into(),
            block.generation.into(),
            (device >> 64) as u64,
            device as u64,
        ]
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(PREFIX)?;
        self.words()
            .iter()
            .try_for_each(|word| write!(f, "-{word:x}"))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token")
            .field("process", &self.exporter.pid)
            .field("block", &self.block)
            .finish_non_exhaustive()
    }
}

impl FromStr for Token {
    type Err = Error;

    fn from_str(text: &str) -> Result<Token, Error> {
        parse(text).ok_or_else(|| {
            let found = text.chars().take(300).collect();
            ShareError::Token { found }.into()
        })
    }
}

fn parse(text: &str) -> Option<Token> {
    let mut parts = text.strip_prefix(PREFIX)?.strip_prefix('-')?.split('-');
    let mut words = [0; 14];
    for word in &mut words {
        let part = parts.next()?;
        // Only what `Display` writes: `from_str_radix` also accepts a sign and zeros in front.
        let digits = part.bytes().all(|digit| digit.is_ascii_hexdigit());
        let zeros = part.len() > 1 && part.starts_with('0');
        *word = u64::from_str_radix(part, 16)
            .ok()
            .filter(|_| digits && !zeros)?;
    }
    let [pid, start, namespace, socket, first, second, descriptor, ..] = words;
    let [.., allocator, address, bytes, number, generation, high, low] = words;
    let token = Token {
        exporter: Exporter {
            pid: u32::try_from(pid).ok()?,
            start,
            namespace,
            socket,
            secret: [first, second],
            descriptor: i32::try_from(descriptor).ok()?,
        },
        block: BlockName {
            allocator,
            address,
            bytes,
            number: u32::try_from(number).ok()?,
            generation: u32::try_from(generation).ok()?,
        },
        device: (u128::from(high) << 64 | u128::from(low)).to_be_bytes(),
    };
    parts.next().is_none().then_some(token)
}

impl Exporter {
    /// Returns the name of its socket.
    pub(super) fn socket_name(&self) -> String {
        let mut name = format!("cualloc-{}-", self.pid);
        // Writing to a String does not fail.
        let _ = write!(name, "{:x}", self.socket);
        name
    }

    /// Whether its id means the same process here.
    pub(super) fn is_visible(&self) -> bool {
        self.namespace == peer::namespace()
    }

    /// Whether it is visible and has not ended.
    pub(super) fn is_running(&self) -> bool {
        self.is_visible() && peer::start_of(self.pid) == Some(self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(word: u64) -> Token {
        Token {
            exporter: Exporter {
                pid: word as u32,
                start: word,
                namespace: word,
                socket: word,
                secret: [word, !word],
                descriptor: word as i32 & i32::MAX,
            },
            block: BlockName {
                allocator: word,
                address: word,
                bytes: word,
                number: word as u32,
                generation: word as u32,
            },
            device: [word as u8; 16],
        }
    }

    #[test]
    fn a_token_is_a_short_text_and_back() {
        for word in [0, 1, 0xdead_beef, u64::MAX] {
            let text = token(word).to_string();
            assert!(text.len() < 256 && text.is_ascii(), "{text}");
            assert_eq!(text.parse::<Token>().unwrap(), token(word));
        }
    }

    #[test]
    fn only_texts_of_tokens_are_tokens() {
        let good = token(77).to_string();
        let mut bad: Vec<String> = (0..good.len()).map(|end| good[..end].into()).collect();
        bad.extend([
            format!("{good}-1"),
            good.replace('-', "-+"),
            good.replace("-4d", "-04d"),
        ]);
        bad.extend([
            good.replace("cualloc1", "cualloc2"),
            format!("{good}0000000000000000"),
        ]);
        for text in bad {
            let refused = text.parse::<Token>();
            let known = matches!(refused, Err(Error::Share(ShareError::Token { .. })));
            // A shorter last word is another token.
            assert!(known || text.matches('-').count() == 14, "{text}");
        }
    }
}
