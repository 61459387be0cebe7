//! Memory that is made before a request needs it, as values.

use crate::allocator::extent::want::Want;
use crate::allocator::physical::Fresh;
use crate::allocator::report::MadeAhead;

/// Growths whose bytes are made ahead of the next ones: as much comes again while memory grows.
const GROWTHS: usize = 4;

/// What was made ahead of requests.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    /// Of `used` only what was seen before it left the list below.
    pub figures: MadeAhead,
    /// Bytes that the thread is making, or has in hand to give back.
    pub under_way: u64,
    /// The part of it that goes back.
    pub going: u64,
    /// Handles that nobody was seen to use yet.
    pub unused: Vec<Unused>,
    /// What was made last for a request that is not over.
    pub grown: Option<Grown>,
    /// Somebody who only makes memory ahead had the lock: who finds it taken met no other request.
    pub had_lock: bool,
}

/// A handle that was made ahead of requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unused {
    pub home: u64,
    pub bytes: u64,
    /// It was wholly free, and is claimed to be given back.
    pub leaves: bool,
}

/// Memory that was made for a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grown {
    pub want: Want,
    /// Where it ends.
    pub end: u64,
    pub bytes: u64,
}

/// What the last growths took.
#[derive(Debug, Default)]
pub(crate) struct Growths {
    bytes: [u64; GROWTHS],
    next: usize,
}

impl Growths {
    /// Counts one more. Returns what all of them took that count.
    pub(crate) fn count(&mut self, bytes: u64) -> u64 {
        self.bytes[self.next % GROWTHS] = bytes;
        self.next = self.next.wrapping_add(1);
        self.bytes.iter().sum()
    }
}

/// A wish for memory before anybody needs it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    /// The request that memory was last made for.
    pub want: Want,
    /// Where that memory ends.
    pub end: u64,
    /// How many bytes are to be free there.
    pub bytes: u64,
    /// Address space was leased for it.
    pub leased: bool,
}

/// What is to be done for it next.
#[derive(Debug)]
pub(crate) enum Plan {
    Nothing,
    /// Lease so many bytes of addresses.
    Lease(u64),
    Make(Fresh),
}
