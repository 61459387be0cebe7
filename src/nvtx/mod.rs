//! Events for tools: blocks for compute-sanitizer, slow paths for Nsight.
//!
//! NVTX is an interface between libraries and a tool attached to the process. It is implemented here without NVTX's own
//! code: the environment variable `NVTX_INJECTION64_PATH`, which tools set, names a library that sets function
//! pointers. Without the variable nothing is loaded, and nothing here is ever called: callers check the process state
//! first.
//!
//! The tool is called under the lock that protects the block's state: once that is released, the address may belong to
//! another block. A tool does not know this library, so it cannot call back.

mod abi;
mod tool;

use std::sync::OnceLock;

use tool::VARIABLE;
pub(crate) use tool::{Category, Tool};

static TOOL: OnceLock<Option<Tool>> = OnceLock::new();

/// Attaches the tool named by the environment, once per process.
pub(crate) fn attach() -> Option<&'static Tool> {
    let mut failure = None;
    let tool = TOOL.get_or_init(|| {
        let tool = Tool::load();
        tool.unwrap_or_else(|error| {
            failure = Some(error);
            None
        })
    });
    // Not inside `call_once`: the logger may create an allocator, which attaches the tool.
    if let Some(error) = failure {
        log::warn!("cannot attach the tool named by {VARIABLE}: {error}");
    }
    tool.as_ref()
}

/// A range on the tool's timeline, until dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct Span(Option<&'static Tool>);

/// Begins a range on the calling thread, where it also ends, if a tool is attached.
pub(crate) fn span(category: Category, what: impl FnOnce() -> String) -> Span {
    let tool = TOOL.get().and_then(Option::as_ref);
    if let Some(tool) = tool {
        tool.push(category, &what());
    }
    Span(tool)
}

impl Drop for Span {
    fn drop(&mut self) {
        if let Some(tool) = self.0 {
            tool.pop();
        }
    }
}
