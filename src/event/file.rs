//! The two formats of a recording's file, and the creation of such files.
//!
//! Every number is little-endian. A file begins with [`HEADER`] bytes: [`MAGIC`]; `u32` version; `u32` form; `u64`
//! ticks per second; `u64` ticks at the start; `u64` nanoseconds since 1970 at the start. For the form [`RINGS`], then
//! `u32` number of rings, `u32` records per ring, `u32` bytes for names. Then `u32` bytes between two samples of stacks
//! in units of 512, 0 if there are none; `u64` number of events for which no ring was left.
//!
//! Form [`CHUNKS`]: chunks until the end, each with `u32` kind, `u32` number, and `u64` size of the following data.
//! [`RECORDS`] of the ring with that number: `u64` number of records lost before, then records. [`NAME`]: the name with
//! that number. [`END`]: no data; the recording was stopped properly.
//!
//! Form [`RINGS`]: the names, one after the other, each preceded by its `u32` number and `u32` size, with zeros after
//! the last; then the rings. Each ring begins with 64 bytes, the first 8 of which are the `u64` number of a record up
//! to which all are written. Then come its records, at their number modulo the size of the ring. Later records are
//! valid, too, if they belong to the same lap.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::event::clock;

pub(crate) const MAGIC: [u8; 8] = *b"cuallocR";
pub(crate) const VERSION: u32 = 2;
pub(crate) const HEADER: usize = 64;
/// The header offset of the number of events for which no ring was left, in the form [`RINGS`].
pub(crate) const MISSED: usize = 56;
/// The header offset of the number of bytes between two samples of stacks.
pub(crate) const SAMPLING: usize = 52;
/// The number of bytes between two samples is a multiple of this.
pub(crate) const UNIT: u64 = 512;
pub(crate) const CHUNKS: u32 = 0;
pub(crate) const RINGS: u32 = 1;
pub(crate) const CHUNK_HEADER: usize = 16;
pub(crate) const RECORDS: u32 = 1;
pub(crate) const NAME: u32 = 2;
pub(crate) const END: u32 = 3;
pub(crate) const RECORD: usize = 32;
/// The number of bytes before the records of a ring in a file.
pub(crate) const RING_HEADER: usize = 64;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Start {
    pub ticks: u64,
    pub per_second: u64,
    /// Nanoseconds since 1970.
    pub unix: u64,
    /// Bytes between two samples of stacks, a multiple of [`UNIT`]; 0 without samples.
    pub sampling: u64,
}

impl Start {
    pub(crate) fn now(sampling: u64) -> Start {
        let per_second = clock::per_second();
        let unix = SystemTime::now().duration_since(UNIX_EPOCH);
        Start {
            ticks: clock::ticks(),
            per_second,
            unix: unix.map_or(0, |since| since.as_nanos() as u64),
            sampling: sampling
                .min(u64::from(u32::MAX) * UNIT)
                .next_multiple_of(UNIT),
        }
    }

    /// Builds the header of a file; in the form of rings with the number of rings and records, and the bytes for names.
    pub(crate) fn header(&self, rings: Option<[u32; 3]>) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            header[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&MAGIC);
        put(&VERSION.to_le_bytes());
        put(&rings.map_or(CHUNKS, |_| RINGS).to_le_bytes());
        put(&self.per_second.to_le_bytes());
        put(&self.ticks.to_le_bytes());
        put(&self.unix.to_le_bytes());
        for number in rings.into_iter().flatten() {
            put(&number.to_le_bytes());
        }
        let sampling = (self.sampling / UNIT) as u32;
        header[SAMPLING..SAMPLING + 4].copy_from_slice(&sampling.to_le_bytes());
        header
    }
}

pub(crate) fn chunk(kind: u32, number: u32, bytes: usize) -> [u8; CHUNK_HEADER] {
    let mut header = [0; CHUNK_HEADER];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[4..8].copy_from_slice(&number.to_le_bytes());
    header[8..].copy_from_slice(&(bytes as u64).to_le_bytes());
    header
}

/// Creates a temporary file in the folder of its destination, accessible only to its owner. Its name is new, so no
/// existing file or link is opened; [`replace`] then moves it to its destination.
pub(crate) fn create_beside(path: &Path) -> io::Result<(File, PathBuf)> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let old = std::fs::symlink_metadata(path).map(|old| old.file_type());
    if old.is_ok_and(|old| !old.is_file() && !old.is_symlink()) {
        let why = "what stands there is neither a file nor a link";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    loop {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let mut beside = OsString::from(".");
        beside.push(name);
        beside.push(format!(".{}-{number}", std::process::id()));
        let beside = path.with_file_name(beside);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        match options.open(&beside) {
            Ok(file) => return Ok((file, beside)),
            // Left behind by a process with the same id.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}

/// Moves a file to its destination, replacing a file or a link there.
pub(crate) fn replace(beside: &Path, path: &Path) -> io::Result<()> {
    std::fs::rename(beside, path).inspect_err(|_| {
        let _ = std::fs::remove_file(beside);
    })
}

/// Writes a file completely, or leaves the existing one unchanged.
pub(crate) fn write_whole(
    path: &Path,
    write: impl FnOnce(&mut io::BufWriter<&File>) -> io::Result<()>,
) -> io::Result<()> {
    let (file, beside) = create_beside(path)?;
    let mut writer = io::BufWriter::new(&file);
    let written = write(&mut writer).and_then(|()| io::Write::flush(&mut writer));
    drop(writer);
    match written {
        Ok(()) => replace(&beside, path),
        Err(error) => {
            let _ = std::fs::remove_file(&beside);
            Err(error)
        }
    }
}
