//! Device memory shared between processes of one machine.
//!
//! An exporter creates a [`Token`] of a live block, a short text that it sends to another process by any means. There
//! [`Import::open`] maps the memory of the block. The two processes may run in different containers, as long as they
//! belong to one user, and share a network namespace or may trace each other.
//!
//! ```no_run
//! use cualloc::share::{Export, Foreign, Import, Token};
//! # fn exporter(block: cualloc::Block) -> Result<(), Box<dyn std::error::Error>> {
//! // In one process:
//! let export = Export::new(block, Foreign::Allow)?;
//! println!("{}", export.token());
//! # Ok(())
//! # }
//! # fn importer(context: cualloc::driver::Context, line: String) -> Result<(), cualloc::Error> {
//!
//! // In another one:
//! let token: Token = line.parse()?;
//! let import = Import::open(&context, &token)?;
//! println!("{} bytes at {:#x}", import.bytes(), import.ptr());
//! # Ok(())
//! # }
//! ```
//!
//! # Lifetime
//! A token does not keep its block alive: it can be opened as long as the block is live, and is refused after the block
//! was freed, even if another block has the address. An [`Import`] guards the block
//! ([`RangeGuard`](crate::allocator::RangeGuard)): its owner may free it, but the memory is not reused before the
//! import is dropped or its process has ended. If the exporter ends first, imported memory stays valid, and its tokens
//! are refused.
//!
//! # Ordering
//! Opening a token orders nothing: the work that fills the block must be complete before the importer's work begins, so
//! the exporter waits for it before it sends the token, or the processes share an event. Dropping an import waits for
//! all work of its context. Writes by both sides are ordered by the program.
//!
//! # What is shared
//! Physical handles are shared as a whole: an importer can access all bytes of the handles that a block lies in.
//! [`Export::foreign_bytes`] is the number of those outside the block, and [`Foreign::Refuse`] rejects such an export.

mod import;
mod link;
mod peer;
mod server;
#[cfg(all(test, feature = "sim", not(loom)))]
mod tests;
mod token;
mod wire;

use crate::allocator::{Allocator, Block, Engine, Located, locate_block};
use crate::driver::sys;
use crate::error::{Error, Refused, ShareError};

pub use import::Import;
pub use token::Token;

/// Whether an export may expose bytes outside its block, which other blocks may use now or later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Foreign {
    /// The export succeeds, and reports the number of those bytes.
    #[default]
    Allow,
    /// The export fails if there are any.
    Refuse,
}

/// A block that other processes can open.
#[derive(Debug)]
pub struct Export {
    block: Block,
    shared: SharedBlock,
}

impl Export {
    /// Shares a block.
    ///
    /// # Errors
    /// As [`SharedBlock::new`]; the error has the block.
    pub fn new(block: Block, foreign: Foreign) -> Result<Export, Refused<Block>> {
        match share(block.engine(), block.ptr(), foreign) {
            Ok(shared) => Ok(Export { block, shared }),
            Err(error) => Err(Refused::new(block, error)),
        }
    }

    /// Returns the token by which other processes open the block.
    pub fn token(&self) -> &Token {
        &self.shared.token
    }

    /// Returns the number of bytes outside the block that the export exposes.
    pub fn foreign_bytes(&self) -> u64 {
        self.shared.foreign_bytes
    }

    /// Returns the block.
    pub fn block(&self) -> &Block {
        &self.block
    }

    /// Returns the block and ends the export: the token stays valid as long as the block is live.
    pub fn into_block(self) -> Block {
        self.block
    }
}

/// How other processes open a block that has another owner, such as a buffer or a tensor.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SharedBlock {
    /// The token of the whole block.
    pub token: Token,
    /// The offset of the given address in the block, in bytes.
    pub offset: u64,
    /// The number of bytes outside the block that the export exposes.
    pub foreign_bytes: u64,
}

impl SharedBlock {
    /// Shares the live block around an address. Equal blocks have equal tokens.
    ///
    /// # Errors
    /// [`Error::NotOurs`], [`Error::NotLive`], [`Error::Suspended`], [`Error::Closed`]; [`Error::NotSupported`] under
    /// the classic policy, for segments of another allocator, and where the device cannot export handles;
    /// [`ShareError::ForeignBytes`]; [`ShareError::System`]; a lost context.
    pub fn new(
        allocator: &Allocator,
        ptr: sys::CUdeviceptr,
        foreign: Foreign,
    ) -> Result<SharedBlock, Error> {
        share(allocator.engine(), ptr, foreign)
    }
}

fn share(engine: &Engine, ptr: sys::CUdeviceptr, foreign: Foreign) -> Result<SharedBlock, Error> {
    let found = locate_block(engine, ptr)?;
    ensure_exportable(engine, &found)?;
    let bytes = found.end - found.base;
    let handles: u64 = found.segments.iter().map(|part| part.handle_bytes).sum();
    let foreign_bytes = handles - bytes;
    if foreign == Foreign::Refuse && foreign_bytes > 0 {
        return Err(ShareError::ForeignBytes {
            bytes: foreign_bytes,
        }
        .into());
    }
    let block = token::BlockName {
        allocator: engine.id,
        address: found.base,
        bytes,
        number: found.life.0,
        generation: found.life.1,
    };
    let token = Token {
        exporter: server::serve(engine)?,
        block,
        device: engine.device.uuid()?.unwrap_or_default(),
    };
    Ok(SharedBlock {
        token,
        offset: ptr - found.base,
        foreign_bytes,
    })
}

/// Fails unless a block can be mapped elsewhere: whole handles side by side, with the block in them.
fn ensure_exportable(engine: &Engine, found: &Located) -> Result<(), Error> {
    let refused = |what| Err(Error::NotSupported { what });
    let descriptor = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if engine.properties.export != descriptor {
        return refused("sharing memory of this allocator: its handles cannot be exported");
    }
    match server::adjoin(&found.segments) {
        true => Ok(()),
        false => refused("sharing memory of another allocator, which has no handles"),
    }
}
