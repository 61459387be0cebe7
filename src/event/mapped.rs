//! Rings in a memory-mapped file: their contents survive the process, however it ends.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::event::file::{self, HEADER, MISSED, RECORD, RING_HEADER, Start};
use crate::event::names;
use crate::locks::held::Mutex;

/// Number of rings in a file, and the size reserved for names.
const RINGS: usize = 64;
const NAME_BYTES: usize = 256 << 10;

#[derive(Debug)]
pub(crate) struct Mapped {
    base: *mut u8,
    bytes: usize,
    /// Records per ring.
    capacity: usize,
    taken: AtomicUsize,
    /// Names in the file, and their size in bytes.
    names: Mutex<(usize, usize)>,
}

// SAFETY: all accesses to the memory are atomic, except those to the names, which are written under their lock.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Creates a file of rings with `records` records each.
    pub(crate) fn create(path: &Path, capacity: usize, start: &Start) -> io::Result<Mapped> {
        let bytes = HEADER + NAME_BYTES + RINGS * (RING_HEADER + capacity * RECORD);
        let (mut file, beside) = file::create_beside(path)?;
        let sizes = [RINGS, capacity, NAME_BYTES].map(|number| number as u32);
        let made = file
            .set_len(bytes as u64)
            .and_then(|()| imp::fill(&file, bytes))
            .and_then(|()| io::Write::write_all(&mut file, &start.header(Some(sizes))))
            .and_then(|()| imp::map(&file, bytes));
        let base = made.inspect_err(|_| {
            let _ = std::fs::remove_file(&beside);
        })?;
        let mapped = Mapped {
            base,
            bytes,
            capacity,
            taken: AtomicUsize::new(0),
            names: Mutex::new((0, 0)),
        };
        file::replace(&beside, path)?;
        Ok(mapped)
    }

    /// Returns the words of an unused ring, and its number of records.
    pub(crate) fn next_ring(&self) -> Option<(*const AtomicU64, usize)> {
        let ring = self.taken.fetch_add(1, Ordering::Relaxed);
        if ring >= RINGS {
            self.taken.store(RINGS, Ordering::Relaxed);
            return None;
        }
        let at = HEADER + NAME_BYTES + ring * (RING_HEADER + self.capacity * RECORD);
        debug_assert!(at + RING_HEADER + self.capacity * RECORD <= self.bytes);
        // SAFETY: the ring lies within the mapping, at a multiple of eight bytes.
        Some((unsafe { self.base.add(at) }.cast(), self.capacity))
    }

    /// Counts an event for which no ring is left.
    pub(crate) fn miss(&self) {
        // SAFETY: the word lies in the header, at a multiple of eight bytes, and is only accessed as an atomic.
        let missed = unsafe { &*self.base.add(MISSED).cast::<AtomicU64>() };
        missed.fetch_add(1, Ordering::Relaxed);
    }

    /// Writes the names that are not in the file yet, as far as they fit.
    pub(crate) fn write_names(&self) {
        let mut names = self.names.lock();
        let (known, at) = &mut *names;
        for (number, name) in names::since(*known) {
            *known += 1;
            let whole = 8 + name.len();
            if *at + whole > NAME_BYTES {
                continue;
            }
            let mut entry = Vec::with_capacity(whole);
            entry.extend_from_slice(&number.to_le_bytes());
            entry.extend_from_slice(&(name.len() as u32).to_le_bytes());
            entry.extend_from_slice(name.as_bytes());
            // SAFETY: the entry lies within the bytes reserved for names, where only the holder of the lock writes.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    entry.as_ptr(),
                    self.base.add(HEADER + *at),
                    entry.len(),
                );
            }
            *at += whole;
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        imp::unmap(self.base, self.bytes);
    }
}

#[cfg(all(target_os = "linux", not(miri)))]
mod imp {
    use std::ffi::{c_int, c_void};
    use std::fs::File;
    use std::io;
    use std::os::fd::AsRawFd;

    const PROT_READ_WRITE: c_int = 3;
    const MAP_SHARED: c_int = 1;

    unsafe extern "C" {
        fn mmap(
            at: *mut c_void,
            bytes: usize,
            access: c_int,
            flags: c_int,
            file: c_int,
            offset: i64,
        ) -> *mut c_void;
        fn munmap(at: *mut c_void, bytes: usize) -> c_int;
        fn posix_fallocate(file: c_int, offset: i64, bytes: i64) -> c_int;
    }

    /// Allocates the space of the whole file: writing to a hole on a full disk would kill the process.
    pub(super) fn fill(file: &File, bytes: usize) -> io::Result<()> {
        loop {
            // SAFETY: the call takes only numbers, and the file is open.
            match unsafe { posix_fallocate(file.as_raw_fd(), 0, bytes as i64) } {
                0 => return Ok(()),
                code => match io::Error::from_raw_os_error(code) {
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error => return Err(error),
                },
            }
        }
    }

    pub(super) fn map(file: &File, bytes: usize) -> io::Result<*mut u8> {
        // SAFETY: the kernel chooses unused addresses, and the file was just extended to this length.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                bytes,
                PROT_READ_WRITE,
                MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        match base.addr() {
            usize::MAX => Err(io::Error::last_os_error()),
            _ => Ok(base.cast()),
        }
    }

    pub(super) fn unmap(base: *mut u8, bytes: usize) {
        // SAFETY: the mapping is ours, and no ring in it is used any more.
        let code = unsafe { munmap(base.cast(), bytes) };
        debug_assert_eq!(code, 0);
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
mod imp {
    use std::fs::File;
    use std::io;

    pub(super) fn fill(_: &File, _: usize) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn map(_: &File, _: usize) -> io::Result<*mut u8> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn unmap(_: *mut u8, _: usize) {}
}
