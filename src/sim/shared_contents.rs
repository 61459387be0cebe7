//! The bytes of memory that simulators of several processes share, in a file.

use super::contents::Content;
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

    /// Returns a further descriptor of the file.
    pub(super) fn descriptor(&self) -> io::Result<OwnedFd> {
        Ok(self.0.try_clone()?.into())
    }

    pub(super) fn of(descriptor: BorrowedFd<'_>) -> io::Result<SharedContents> {
        Ok(SharedContents(descriptor.try_clone_to_owned()?.into()))
    }

    /// Stores `content`, or makes the bytes undefined.
    pub(super) fn write(&self, start: u64, len: u64, content: Option<&Content>) {
        for (offset, len) in chunks(len) {
            let bytes = match content {
                Some(content) => content.skip(offset).bytes(len as usize),
                None => vec![UNDEFINED; len as usize],
            };
            let bytes: Vec<u8> = bytes.iter().map(|byte| byte ^ UNDEFINED).collect();
            let written = self.0.write_all_at(&bytes, START + start + offset);
            report("write", written);
        }
    }

    /// Calls `visit(offset, len, content)` for each piece in order.
    pub(super) fn read(
        &self,
        start: u64,
        len: u64,
        mut visit: impl FnMut(u64, u64, Option<Content>),
    ) {
        for (offset, len) in chunks(len) {
            let mut bytes = vec![0; len as usize];
            let end = bytes.len();
            let mut at = 0;
            // Bytes after the end of the file were never written.
            while at < end {
                match self
                    .0
                    .read_at(&mut bytes[at..], START + start + offset + at as u64)
                {
                    Ok(0) => break,
                    Ok(read) => at += read,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => {
                        report("read", Err(error));
                        break;
                    }
                }
            }
            bytes.iter_mut().for_each(|byte| *byte ^= UNDEFINED);
            visit(offset, len, Some(Content::Raw(bytes.into(), 0)));
        }
    }
}

fn chunks(len: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..len.div_ceil(CHUNK)).map(move |index| {
        let offset = index * CHUNK;
        (offset, CHUNK.min(len - offset))
    })
}

fn report(what: &str, done: io::Result<()>) {
    if let Err(error) = done {
        log::error!("cannot {what} shared memory of the simulator: {error}");
    }
}
