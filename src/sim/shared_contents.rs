//! The bytes of memory that simulators of several processes share, in a file.

use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// Where the bytes begin; before them is a description of the memory.
const START: u64 = 4096;
const CHUNK: u64 = 1 << 20;
/// Combined with each byte, so that what was never written, zero in a file, reads as undefined memory does.
const UNDEFINED: u8 = 0xdb;

/// A file that each process has a descriptor of.
#[derive(Debug)]
pub(super) struct SharedContents(File);

impl SharedContents {
    pub(super) fn new(file: File) -> SharedContents {
        SharedContents(file)
    }

    pub(super) fn of(descriptor: BorrowedFd<'_>) -> io::Result<SharedContents> {
        Ok(SharedContents(descriptor.try_clone_to_owned()?.into()))
    }

    /// Returns a further descriptor of the file.
    pub(super) fn descriptor(&self) -> io::Result<OwnedFd> {
        Ok(self.0.try_clone()?.into())
    }

    /// Stores `len` bytes, which `bytes` returns piece by piece: by their offset and length, `None` if they are
    /// undefined.
    pub(super) fn write(
        &self,
        start: u64,
        len: u64,
        bytes: impl Fn(u64, usize) -> Option<Vec<u8>>,
    ) {
        for (offset, len) in chunks(len) {
            let mut bytes = bytes(offset, len).unwrap_or_else(|| vec![UNDEFINED; len]);
            bytes.iter_mut().for_each(|byte| *byte ^= UNDEFINED);
            let written = self.0.write_all_at(&bytes, START + start + offset);
            report("write", written);
        }
    }

    /// Calls `visit(offset, bytes)` for each piece in order.
    pub(super) fn read(&self, start: u64, len: u64, mut visit: impl FnMut(u64, Vec<u8>)) {
        for (offset, len) in chunks(len) {
            let mut bytes = vec![0; len];
            report("read", self.fill(&mut bytes, START + start + offset));
            bytes.iter_mut().for_each(|byte| *byte ^= UNDEFINED);
            visit(offset, bytes);
        }
    }

    /// Reads bytes; those after the end of the file, which were never written, stay as they are.
    fn fill(&self, mut bytes: &mut [u8], mut at: u64) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.0.read_at(bytes, at) {
                Ok(0) => break,
                Ok(read) => (bytes, at) = (&mut bytes[read..], at + read as u64),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn chunks(len: u64) -> impl Iterator<Item = (u64, usize)> {
    (0..len.div_ceil(CHUNK)).map(move |index| {
        let offset = index * CHUNK;
        (offset, CHUNK.min(len - offset) as usize)
    })
}

fn report(what: &str, done: io::Result<()>) {
    if let Err(error) = done {
        log::error!("cannot {what} shared memory of the simulator: {error}");
    }
}
