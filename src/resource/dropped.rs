//! Blocks whose owner was dropped, including those that cannot be freed yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::driver::process;
use crate::error::{Error, RareLog, Refused};
use crate::locks::held::Mutex;

use super::block::RawBlock;
use super::traits::MemoryResource;

/// Blocks that a later call frees, once the capture has ended or the driver no longer refuses: a call of the resource,
/// or one that does the deferred work of the process. Until then a block is live and keeps its resource.
static KEPT: Mutex<Vec<(Arc<dyn MemoryResource>, RawBlock)>> = Mutex::new(Vec::new());

/// Whether the list has blocks. Changed under its lock.
static ANY: AtomicBool = AtomicBool::new(false);

/// Deallocates a block that has no owner, or keeps it for a later call.
pub(crate) fn give_back(resource: &Arc<dyn MemoryResource>, block: RawBlock, what: &str) {
    if let Err(failure) = deallocate(&**resource, block) {
        keep(resource, *failure.value, &failure.error, what);
    }
}

/// Like [`give_back`], for a resource that cannot be kept: after a failure the block leaks.
pub(crate) fn give_back_now(resource: &impl MemoryResource, block: RawBlock, what: &str) {
    if let Err(failure) = deallocate(resource, block) {
        log_rarely(&failure.error, what);
    }
}

/// Tries twice, since a failure may be transient.
fn deallocate(
    resource: &(impl MemoryResource + ?Sized),
    mut block: RawBlock,
) -> Result<(), Refused<RawBlock>> {
    block.abandon();
    let done = resource.deallocate_block(block);
    done.or_else(|failure| resource.deallocate_block(*failure.value))
}

/// Keeps a block that could not be deallocated, unless it never can be.
pub(crate) fn keep(resource: &Arc<dyn MemoryResource>, block: RawBlock, error: &Error, what: &str) {
    if !matches!(error, Error::Capturing { .. }) {
        log_rarely(error, what);
    }
    let lost =
        process::is_unavailable() || error.driver_error().is_some_and(|error| error.is_fatal());
    if lost || matches!(error, Error::UseAfterFree { .. } | Error::Closed) {
        return;
    }
    put(Arc::clone(resource), block);
}

fn put(resource: Arc<dyn MemoryResource>, block: RawBlock) {
    let mut kept = process::lock(&KEPT);
    kept.push((resource, block));
    ANY.store(true, Ordering::Release);
    process::BLOCKS.postpone(|| free_kept(None));
}

/// Frees the kept blocks of a resource, as far as possible.
#[inline]
pub(crate) fn retry(resource: &impl MemoryResource) {
    if ANY.load(Ordering::Acquire) && !process::is_unavailable() {
        free_kept(Some(resource.id()));
    }
}

#[cold]
fn free_kept(source: Option<u64>) {
    let chosen = |(_, block): &mut (_, RawBlock)| source.is_none_or(|it| it == block.id().source());
    let tried: Vec<_> = (process::lock(&KEPT).extract_if(.., chosen)).collect();
    for (resource, block) in tried {
        if (resource.context()).is_some_and(|context| context.driver().forbids_destruction()) {
            std::mem::forget(block);
        } else if let Err(failure) = resource.deallocate_block(block) {
            put(resource, *failure.value);
        }
    }
    let kept = process::lock(&KEPT);
    if kept.is_empty() {
        ANY.store(false, Ordering::Release);
        process::BLOCKS.nothing_waits();
    }
}

/// Logs the first and every power-of-two-th failure of a drop or a callback.
fn log_rarely(error: &Error, what: &str) {
    static LOG: RareLog = RareLog::new();
    if let Some(count) = LOG.due() {
        log::warn!("{what} (occurrence {count}): {error}");
    }
}
