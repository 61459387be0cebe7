//! The two forms of a recording's file, and how such files are made.
//!
//! Every number is little-endian. A file begins with [`HEADER`] bytes: [`MAGIC`]; `u32` version; `u32` form;
//! `u64` ticks in a second; `u64` ticks at the start; `u64` nanoseconds since 1970 at the start; then of the form
//! [`RINGS`] `u32` rings, `u32` records of a ring, `u32` bytes for names; then `u32` bytes between two samples of stacks in units of 512, 0 if there are none; `u64` events
//! that no ring was left for.
//!
//! Form [`CHUNKS`]: chunks until the end, each with `u32` kind, `u32` number, `u64` bytes that follow. [`RECORDS`] of
//! the ring with that number: `u64` records that were lost before, then records. [`NAME`]: the name with that number.
//! [`END`]: nothing; the recording was ended and not broken off.
//!
//! Form [`RINGS`]: the names, one behind the other, each `u32` number and `u32` bytes before it, zeros behind the
//! last; then the rings, each with 64 bytes that begin with the `u64` number of a record to which all are written, and its
//! records by number modulo their count. Those behind it are written, too, as far as they are of their lap.

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
/// Where a header of the form [`RINGS`] has the number of events that no ring was left for.
pub(crate) const MISSED: usize = 56;
/// Where a header has the bytes between two samples of stacks.
pub(crate) const SAMPLING: usize = 52;
/// The bytes between two samples are a multiple of this.
pub(crate) const UNIT: u64 = 512;
pub(crate) const CHUNKS: u32 = 0;
pub(crate) const RINGS: u32 = 1;
pub(crate) const CHUNK_HEADER: usize = 16;
pub(crate) const RECORDS: u32 = 1;
pub(crate) const NAME: u32 = 2;
pub(crate) const END: u32 = 3;
/// Bytes of a record.
pub(crate) const RECORD: usize = 32;
/// Bytes before the records of a ring in a file.
pub(crate) const RING_HEADER: usize = 64;

/// When a recording began.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Start {
    pub ticks: u64,
    pub per_second: u64,
    /// Nanoseconds since 1970.
    pub unix: u64,
    /// Bytes between two samples of stacks, a multiple of [`UNIT`]; 0 if there are none.
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

    /// The header of a file: with its rings, their records and the bytes for names, if it has the form of rings.
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

/// The header of a chunk.
pub(crate) fn chunk(kind: u32, number: u32, bytes: usize) -> [u8; CHUNK_HEADER] {
    let mut header = [0; CHUNK_HEADER];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[4..8].copy_from_slice(&number.to_le_bytes());
    header[8..].copy_from_slice(&(bytes as u64).to_le_bytes());
    header
}

/// A file beside its future place, which only its owner may read. Neither a file nor a link that somebody put there
/// is opened: the name is new, and [`replace`] puts the file in the place of whatever stands there.
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
            // Left behind by a process that had the same number.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}

/// Puts a file in its place, instead of a file or a link there.
pub(crate) fn replace(beside: &Path, path: &Path) -> io::Result<()> {
    std::fs::rename(beside, path).inspect_err(|_| {
        let _ = std::fs::remove_file(beside);
    })
}

/// Writes a file in one go, or leaves what is there as it is.
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
