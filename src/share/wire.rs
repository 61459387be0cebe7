//! Messages between an importer and the server of an exporter: packets of 64-bit words over a Unix socket, with file
//! descriptors beside them.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::token::BlockName;

/// The number of handles in one message: fewer than the descriptors that the kernel passes with one.
pub(super) const PAGE: usize = 128;
/// Bytes of the longest message.
const LONGEST: usize = 4096;
/// Room for the descriptors of a message.
const SPACE: usize = rustix::cmsg_space!(ScmRights(PAGE));

/// A request of an importer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    /// The first message on a connection.
    Hello { secret: [u64; 2] },
    /// Guards a block. The reply has the number of the guard, the offset of the block in its first handle, the number
    /// of its handles, and the first page of them.
    Open(BlockName),
    /// Asks for a page of the handles of a block, each with its descriptor.
    Export { guard: u64, first: u64 },
    /// Like [`Export`](Self::Export), without descriptors.
    List { guard: u64, first: u64 },
    /// Ends a guard. There is no reply.
    Close { guard: u64 },
}

impl Request {
    pub(super) fn encode(self) -> Vec<u64> {
        match self {
            Request::Hello { secret } => vec![1, secret[0], secret[1]],
            Request::Open(block) => {
                let (number, generation) = (block.number.into(), block.generation.into());
                let BlockName {
                    allocator,
                    address,
                    bytes,
                    ..
                } = block;
                vec![2, allocator, address, bytes, number, generation]
            }
            Request::Export { guard, first } => vec![3, guard, first],
            Request::List { guard, first } => vec![4, guard, first],
            Request::Close { guard } => vec![5, guard],
        }
    }

    pub(super) fn decode(words: &[u64]) -> Option<Request> {
        Some(match *words {
            [1, first, second] => Request::Hello {
                secret: [first, second],
            },
            [2, allocator, address, bytes, number, generation] => Request::Open(BlockName {
                allocator,
                address,
                bytes,
                number: u32::try_from(number).ok()?,
                generation: u32::try_from(generation).ok()?,
            }),
            [3, guard, first] => Request::Export { guard, first },
            [4, guard, first] => Request::List { guard, first },
            [5, guard] => Request::Close { guard },
            _ => return None,
        })
    }
}

/// What a reply begins with: success, a block that was freed, or another failure. A text follows failures.
pub(super) const DONE: u64 = 0;
pub(super) const FREED: u64 = 1;
pub(super) const REFUSED: u64 = 2;

/// A received message.
pub(super) struct Message {
    pub bytes: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Message {
    /// Returns the words of the message, if it consists of words.
    pub(super) fn words(&self) -> Option<Vec<u64>> {
        let (words, rest) = self.bytes.as_chunks::<8>();
        let words = words.iter().map(|word| u64::from_le_bytes(*word));
        rest.is_empty().then(|| words.collect())
    }
}

pub(super) fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Sends a message without waiting.
pub(super) fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOBIG);
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::io::retry_on_intr(|| sendmsg(&socket, &[io::IoSlice::new(bytes)], &mut beside, flags))
        .map(drop)
}

/// Receives a message without waiting. None after the other side has closed the connection.
pub(super) fn receive(socket: impl AsFd) -> Result<Option<Message>, Errno> {
    let mut bytes = vec![0; LONGEST];
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = rustix::io::retry_on_intr(|| {
        recvmsg(
            &socket,
            &mut [io::IoSliceMut::new(&mut bytes)],
            &mut beside,
            flags,
        )
    })?;
    let mut fds = Vec::new();
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    // Descriptors are missing if this process may not have more.
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Errno::MFILE);
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(Errno::MSGSIZE);
    }
    bytes.truncate(received.bytes);
    Ok((received.bytes > 0).then_some(Message { bytes, fds }))
}

/// Waits until a message can be received, the process of the other side has ended, or the time is up.
pub(super) fn wait(
    socket: &OwnedFd,
    process: Option<&OwnedFd>,
    seconds: i64,
) -> Result<bool, Errno> {
    let mut watched = vec![PollFd::new(socket, PollFlags::IN)];
    watched.extend(process.map(|process| PollFd::new(process, PollFlags::IN)));
    let time = Timespec {
        tv_sec: seconds,
        tv_nsec: 0,
    };
    rustix::io::retry_on_intr(|| poll(&mut watched, Some(&time))).map(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_words_and_back() {
        let block = BlockName {
            allocator: 1,
            address: 2,
            bytes: 3,
            number: 4,
            generation: 5,
        };
        for request in [
            Request::Hello { secret: [1, 2] },
            Request::Open(block),
            Request::Export { guard: 6, first: 7 },
            Request::List { guard: 6, first: 7 },
            Request::Close { guard: 8 },
        ] {
            let words = request.encode();
            assert_eq!(Request::decode(&words), Some(request));
            assert_eq!(Request::decode(&words[1..]), None);
            assert_eq!(Request::decode(&[&words[..], &[9]].concat()), None);
        }
        assert_eq!(Request::decode(&[2, 1, 2, 3, 1 << 32, 5]), None);
    }
}
