//! Blocks shared with other processes.

use std::ffi::c_char;

use crate::entry::{call, clear_result, text};
use crate::results::{CUALLOC_INVALID_ARGUMENT, Failure, NULL};
use crate::{cualloc_import_t, cualloc_t};

/// The size of a buffer for any token, in bytes.
pub const CUALLOC_TOKEN_BYTES: usize = 256;
/// For cualloc_share: fail if the export exposes bytes outside the block.
pub const CUALLOC_SHARE_REFUSE_FOREIGN: u32 = 1;

/// Shares the live block around an address: writes a token, a zero-terminated ASCII text without spaces of less than
/// CUALLOC_TOKEN_BYTES, by which other processes of the same user on this machine open the block
/// (cualloc_share_open). A token holds nothing; it is valid as long as the block is live, and equal blocks have equal
/// tokens. *offset is the offset of the address in the block, and *foreign_bytes the number of bytes outside the block
/// that an importer can access, because physical handles are shared as a whole; either pointer may be null. flags is 0
/// or CUALLOC_SHARE_REFUSE_FOREIGN.
///
/// Work that fills the block must be complete before an importer uses it. The first call starts a thread that serves
/// importers.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null allocator or token, a size below CUALLOC_TOKEN_BYTES, unknown flags, and
/// foreign bytes that are refused; CUALLOC_NOT_OURS, CUALLOC_NOT_LIVE; CUALLOC_UNSUPPORTED for memory whose handles
/// cannot be exported, and except on Linux; CUALLOC_SUSPENDED, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER;
/// CUALLOC_IO if the system refuses the thread or its sockets.
///
/// May be called from any thread.
///
/// # Safety
/// `token` is null or writable for `size` bytes; `offset` and `foreign_bytes` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_share(
    allocator: *mut cualloc_t,
    address: u64,
    flags: u32,
    token: *mut c_char,
    size: usize,
    offset: *mut u64,
    foreign_bytes: *mut u64,
) -> i32 {
    call(|| {
        // SAFETY: the caller's contract.
        unsafe { clear_result(token) }?;
        if size < CUALLOC_TOKEN_BYTES {
            let why = "the buffer for the token has less than CUALLOC_TOKEN_BYTES";
            return Err(Failure::Reason(CUALLOC_INVALID_ARGUMENT, why));
        }
        let found = blocks::share(allocator, address, flags)?;
        for (to, value) in [(offset, found.1), (foreign_bytes, found.2)] {
            if !to.is_null() {
                // SAFETY: the caller's contract.
                unsafe { to.write(value) };
            }
        }
        let name = &found.0.as_bytes()[..found.0.len().min(CUALLOC_TOKEN_BYTES - 1)];
        // SAFETY: the buffer has room for the name and the zero behind it, by the check above.
        unsafe {
            token.cast::<u8>().copy_from(name.as_ptr(), name.len());
            token.add(name.len()).write(0);
        }
        Ok(())
    })
}

/// Opens a token of cualloc_share, usually in another process: maps the block into the context of an allocator, which
/// is not involved otherwise. *address is the first byte of the block in this process, and *bytes its size. The memory
/// stays valid until cualloc_share_close, also if the exporter frees it or ends. Blocks in the same handles share a
/// mapping.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null argument and for a text that is no token; CUALLOC_NOT_LIVE for a block
/// that was freed; CUALLOC_CLOSED if its process has ended; CUALLOC_IO if that process cannot be reached;
/// CUALLOC_UNSUPPORTED if the device cannot access the memory, if that process refuses, and except on Linux;
/// CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER. *out is then null.
///
/// May be called from any thread.
///
/// # Safety
/// `token` is null or zero-terminated; `out`, `address` and `bytes` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_share_open(
    allocator: *mut cualloc_t,
    token: *const c_char,
    out: *mut *mut cualloc_import_t,
    address: *mut u64,
    bytes: *mut u64,
) -> i32 {
    call(|| {
        // SAFETY: the caller's contract.
        unsafe {
            clear_result(out)?;
            clear_result(address)?;
            clear_result(bytes)?;
        }
        // SAFETY: the caller's contract.
        let token = unsafe { text(token, "the token is not UTF-8") }?;
        let opened = blocks::open(allocator, token)?;
        // SAFETY: not null, and the caller's contract.
        unsafe {
            out.write(opened.0);
            address.write(opened.1);
            bytes.write(opened.2);
        }
        Ok(())
    })
}

/// Ends an import. Waits on the host for all work of the context that the memory is mapped for, so the exporter may
/// reuse the memory then. While a stream of the context is captured, a later call ends the import instead. The address
/// is invalid afterwards.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for null; CUALLOC_CLOSED for an import that was closed before;
/// CUALLOC_CONTEXT_LOST in a forked child; CUALLOC_UNSUPPORTED except on Linux.
///
/// May be called from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_share_close(import: *mut cualloc_import_t) -> i32 {
    call(|| match import.is_null() {
        true => Err(NULL),
        false => blocks::close(import),
    })
}

#[cfg(target_os = "linux")]
mod blocks {
    use cualloc::share::{Foreign, Import, SharedBlock, Token};

    use super::CUALLOC_SHARE_REFUSE_FOREIGN;
    use crate::handle_table::HandleTable;
    use crate::results::{CUALLOC_INVALID_ARGUMENT, Failure};
    use crate::{cualloc_import_t, cualloc_t, handles};

    static IMPORTS: HandleTable<Import> = HandleTable::new(
        0xca14,
        "the handle belongs to no import: it was closed or never existed",
    );

    /// Returns the token, the offset of the address, and the foreign bytes.
    pub(super) fn share(
        allocator: *mut cualloc_t,
        address: u64,
        flags: u32,
    ) -> Result<(String, u64, u64), Failure> {
        let foreign = match flags {
            0 => Foreign::Allow,
            CUALLOC_SHARE_REFUSE_FOREIGN => Foreign::Refuse,
            _ => {
                let why = "flags has an unknown bit";
                return Err(Failure::Reason(CUALLOC_INVALID_ARGUMENT, why));
            }
        };
        let found = handles::with(allocator, |allocator| {
            SharedBlock::new(allocator, address, foreign)
        })?;
        Ok((found.token.to_string(), found.offset, found.foreign_bytes))
    }

    /// Returns the import, its address, and its bytes.
    pub(super) fn open(
        allocator: *mut cualloc_t,
        token: &str,
    ) -> Result<(*mut cualloc_import_t, u64, u64), Failure> {
        let import = handles::with(allocator, |allocator| {
            Import::open(allocator.context(), &token.parse::<Token>()?)
        })?;
        let (address, bytes) = (import.ptr(), import.bytes());
        let handle = IMPORTS.add(import)?;
        Ok((handle as *mut cualloc_import_t, address, bytes))
    }

    pub(super) fn close(import: *mut cualloc_import_t) -> Result<(), Failure> {
        IMPORTS.remove(import as u64).map(drop)
    }
}

#[cfg(not(target_os = "linux"))]
mod blocks {
    use crate::results::{CUALLOC_UNSUPPORTED, Failure};
    use crate::{cualloc_import_t, cualloc_t};

    const UNSUPPORTED: Failure = Failure::Reason(
        CUALLOC_UNSUPPORTED,
        "blocks are shared between processes on Linux only",
    );

    pub(super) fn share(_: *mut cualloc_t, _: u64, _: u32) -> Result<(String, u64, u64), Failure> {
        Err(UNSUPPORTED)
    }

    pub(super) fn open(
        _: *mut cualloc_t,
        _: &str,
    ) -> Result<(*mut cualloc_import_t, u64, u64), Failure> {
        Err(UNSUPPORTED)
    }

    pub(super) fn close(_: *mut cualloc_import_t) -> Result<(), Failure> {
        Err(UNSUPPORTED)
    }
}
