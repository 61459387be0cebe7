//! Builds rows from other formats.

use super::error::TraceError;
use super::format::{Op, Row, Trace};

#[derive(Debug, Clone, Copy)]
pub(crate) struct RowBlock {
    pub id: usize,
    pub stream: u32,
}

/// The rows of an unfinished trace, and the context of each block; 0 for none.
#[derive(Debug, Default)]
pub(crate) struct RowMaker {
    rows: Vec<Row>,
    contexts: Vec<u32>,
}

impl RowMaker {
    pub(crate) fn allocate(&mut self, stream: u32, bytes: u64, context: u32) -> RowBlock {
        let id = self.contexts.len();
        let block = RowBlock { id, stream };
        self.contexts.push(context);
        self.push(Op::Allocate, block, bytes);
        block
    }

    pub(crate) fn free(&mut self, block: Option<RowBlock>) {
        if let Some(block) = block {
            self.push(Op::Free, block, 0);
        }
    }

    /// Records that the work on a freed block is complete. Directly after the free it is omitted.
    pub(crate) fn complete(&mut self, block: RowBlock) {
        let last = self.rows.last();
        if last.is_none_or(|row| row.id != block.id || row.op != Op::Free) {
            self.push(Op::Complete, block, 0);
        }
    }

    pub(crate) fn fail(&mut self, stream: u32, bytes: u64) {
        self.push(Op::Oom, RowBlock { id: 0, stream }, bytes);
    }

    pub(crate) fn count(&self) -> usize {
        self.rows.len()
    }

    fn push(&mut self, op: Op, RowBlock { id, stream }: RowBlock, bytes: u64) {
        self.rows.push(Row {
            op,
            stream,
            id,
            bytes,
        });
    }

    /// Returns the trace, whose contexts have these names.
    pub(crate) fn trace(
        &self,
        name: &str,
        name_of: impl Fn(u32) -> Option<String>,
    ) -> Result<Trace, TraceError> {
        let trace = Trace::from_rows(name, self.rows.iter().copied())?;
        Ok(trace.with_contexts(&self.contexts, name_of))
    }
}
