//! Drops that report to nobody.

use crate::error::RareLog;

use super::block::RawBlock;
use super::traits::MemoryResource;

/// Logs the first and every power-of-two-th failure of a drop or a callback.
pub(super) fn log_rarely(error: &dyn std::error::Error, what: &str) {
    static LOG: RareLog = RareLog::new();
    if let Some(count) = LOG.due() {
        log::warn!("{what} ({count} such events): {error}");
    }
}

/// Deallocates a block that nobody can name from here on. Allocators, the driver's pools, and what keeps an order
/// over them, take it and give it back later where they cannot now; of others a refusal may be over at once, so it
/// is tried once more.
pub(crate) fn give_back(
    resource: &(impl MemoryResource + ?Sized),
    mut block: RawBlock,
    what: &str,
) {
    block.abandon();
    let done = resource.deallocate_block(block);
    if let Err(failure) = done.or_else(|failure| resource.deallocate_block(*failure.value)) {
        log_rarely(&failure.error, what);
    }
}
