//! Graph pools with the driver: requests, uses and frees inside captures and outside, and the release of their memory.

pub(crate) mod allocate;
pub(crate) mod fast_path;
pub(crate) mod pools;
pub(crate) mod scopes;
pub(crate) mod streams;
pub(crate) mod uses;

use crate::allocator::graph::Graphs;
use crate::error::{Error, GraphPoolError};

pub(crate) fn refuse_released(graphs: &Graphs, pool: u64) -> Result<(), Error> {
    match graphs.pools.get(&pool) {
        Some(pool) if !pool.released => Ok(()),
        _ => Err(Error::GraphPool(GraphPoolError::Released)),
    }
}
