//! Blocks of other processes, mapped into this one.

use std::collections::HashMap;
use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::sync::{Arc, LazyLock, Weak};

use super::link::{self, Opened, Parts};
use super::token::{Exporter, Token};
use super::wire::PAGE;
use crate::driver::{Context, Device, Entered, process, sys};
use crate::error::{Error, ShareError};
use crate::locks::held::Mutex;
use crate::sync::order;

/// The mappings of this process: blocks in the same handles share one.
static MAPPINGS: LazyLock<Mutex<HashMap<Key, Weak<Mapping>>>> = LazyLock::new(Mutex::default);
/// Imports whose context could not be waited for when they were dropped, usually because of a capture.
static POSTPONED: Mutex<Vec<Parted>> = Mutex::new(Vec::new());

#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    exporter: Exporter,
    /// Driver and context.
    context: (usize, u64),
    parts: Parts,
}

/// Handles of another process side by side in reserved address space.
struct Mapping {
    context: Context,
    base: u64,
    bytes: u64,
    /// Bytes from the base on that handles may be mapped at.
    mapped: u64,
    key: Key,
}

/// A mapping and the guard of a block in it. The guard ends after the mapping.
struct Parted {
    mapping: Arc<Mapping>,
    _guard: Opened,
}

/// A block of another process, mapped for a device of this one.
///
/// `Send` and `Sync`: it is an address with a lifetime. Dropping it waits on the host for all work of its context, so
/// that the exporter can reuse the memory, and then ends the guard of the block. If the context cannot be waited for,
/// because one of its streams is being captured, a later drop or import ends it.
pub struct Import {
    parted: ManuallyDrop<Parted>,
    address: sys::CUdeviceptr,
    bytes: u64,
}

impl Import {
    /// Opens a token for use in a context.
    ///
    /// # Errors
    /// [`ShareError::Freed`], [`ShareError::Ended`], [`ShareError::Unreachable`], [`ShareError::Refused`],
    /// [`ShareError::NoSuchDevice`], [`ShareError::System`]; [`Error::NotSupported`] if the context's device cannot
    /// access the memory; [`Error::ForkedChild`]; driver errors. The block is not guarded then.
    pub fn open(context: &Context, token: &Token) -> Result<Import, Error> {
        if process::is_forked_child() {
            return Err(Error::ForkedChild);
        }
        retry_postponed();
        ensure_access(context.device(), token)?;
        let opened = link::link_to(&token.exporter)?.open(&token.block)?;
        let mapping = mapping_of(context, &opened)?;
        Ok(Import {
            address: mapping.base + opened.offset,
            bytes: token.block.bytes,
            parted: ManuallyDrop::new(Parted {
                mapping,
                _guard: opened,
            }),
        })
    }

    /// Returns the address of the block's first byte in this process.
    pub fn ptr(&self) -> sys::CUdeviceptr {
        self.address
    }

    /// Returns the bytes of the block.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the context that the memory is mapped for.
    pub fn context(&self) -> &Context {
        &self.parted.mapping.context
    }
}

impl fmt::Debug for Import {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Import")
            .field("ptr", &format_args!("{:#x}", self.address))
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        // The driver may be gone, and the kernel releases everything.
        if process::is_unavailable() {
            return;
        }
        retry_postponed();
        // SAFETY: it is taken once, here.
        let parted = unsafe { ManuallyDrop::take(&mut self.parted) };
        release(parted);
    }
}

/// Waits for the work of the context, then ends the import.
fn release(parted: Parted) {
    match order::wait_until_idle(&parted.mapping.context) {
        Ok(()) => drop(parted),
        Err(_) => POSTPONED.lock().push(parted),
    }
}

fn retry_postponed() {
    let postponed = std::mem::take(&mut *POSTPONED.lock());
    postponed.into_iter().for_each(release);
}

/// Fails unless a device can access the memory of a token.
fn ensure_access(device: &Device, token: &Token) -> Result<(), Error> {
    let is_home =
        |device: &Device| Ok::<_, Error>(device.uuid()?.unwrap_or_default() == token.device);
    if is_home(device)? {
        return Ok(());
    }
    for ordinal in 0..device.driver().device_count()? {
        let home = device.driver().device(ordinal)?;
        if is_home(&home)? {
            return match device.can_access_peer(&home)? {
                true => Ok(()),
                false => Err(Error::NotSupported {
                    what: "access to the memory of another device",
                }),
            };
        }
    }
    Err(ShareError::NoSuchDevice.into())
}

fn mapping_of(context: &Context, opened: &Opened) -> Result<Arc<Mapping>, Error> {
    let key = Key {
        exporter: *opened.exporter(),
        context: (context.driver().library_number(), context.id()),
        parts: opened.parts.clone(),
    };
    let known = |mappings: &HashMap<Key, Weak<Mapping>>| mappings.get(&key).and_then(Weak::upgrade);
    if let Some(mapping) = known(&MAPPINGS.lock()) {
        return Ok(mapping);
    }
    let made = Arc::new(Mapping::new(context, opened, key.clone())?);
    let mut mappings = MAPPINGS.lock();
    // If another thread has inserted a mapping meanwhile, that one is used, and ours is dropped without the lock.
    let inserted = known(&mappings);
    if inserted.is_none() {
        mappings.insert(key, Arc::downgrade(&made));
    }
    drop(mappings);
    Ok(inserted.unwrap_or(made))
}

impl Mapping {
    fn new(context: &Context, opened: &Opened, key: Key) -> Result<Mapping, Error> {
        let bytes = key.parts.iter().map(|part| part.1).sum::<u64>();
        let entered = context.enter()?;
        let base = entered.address_reserve(bytes as usize, 0, 0)?;
        // From here on dropping it undoes everything, also on the error path.
        let mut mapping = Mapping {
            context: context.clone(),
            base,
            bytes,
            mapped: 0,
            key,
        };
        for (at, parts) in opened.parts.chunks(PAGE).enumerate() {
            let fds = opened.export(at * PAGE)?;
            for (fd, (_, bytes)) in fds.iter().zip(parts) {
                let handle = entered.import_fd(fd.as_fd())?;
                let address = base + mapping.mapped;
                mapping.mapped += bytes;
                // SAFETY: the range was reserved above and nothing is mapped there; the exporter created the handle
                // with this size.
                let mapped = unsafe { entered.mem_map(address, *bytes as usize, handle) };
                // SAFETY: the handle was imported above; the mapping keeps the memory.
                let released = unsafe { entered.mem_release(handle) };
                mapped.and(released)?;
            }
        }
        if mapping.mapped != bytes {
            let cause = std::io::ErrorKind::UnexpectedEof.into();
            let what = "receive the descriptors of the exporter";
            return Err(ShareError::System { what, cause }.into());
        }
        // SAFETY: the range consists of the mappings made above.
        unsafe {
            entered.set_access(base, bytes as usize, std::slice::from_ref(context.device()))
        }?;
        Ok(mapping)
    }

    fn unmap(&self, entered: &Entered<'_>) -> Result<(), crate::driver::DriverError> {
        let mut at = self.base;
        for (_, bytes) in &self.key.parts {
            if at >= self.base + self.mapped {
                break;
            }
            // SAFETY: a whole mapping of this object, or none after a failed call; the caller of the import has waited
            // for all work.
            unsafe { entered.mem_unmap_if_mapped(at, *bytes as usize) }?;
            at += bytes;
        }
        // SAFETY: the reservation has no mappings any more, and nothing uses its addresses.
        unsafe { entered.address_free(self.base, self.bytes as usize) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let mut mappings = MAPPINGS.lock();
        // The key may lead to a newer mapping.
        if mappings
            .get(&self.key)
            .is_some_and(|found| found.strong_count() == 0)
        {
            mappings.remove(&self.key);
        }
        drop(mappings);
        if self.context.driver().forbids_destruction() {
            return;
        }
        let unmapped = self
            .context
            .enter()
            .and_then(|entered| self.unmap(&entered));
        if let Err(error) = unmapped {
            log::warn!("cannot unmap imported memory at {:#x}: {error}", self.base);
        }
    }
}
