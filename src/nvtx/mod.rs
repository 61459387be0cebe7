//! What tools see of an allocator: compute-sanitizer its blocks, Nsight its slow paths.
//!
//! NVTX is a way for libraries to talk to a tool that may be attached to the process. Here it is spoken without NVTX's
//! own code: the environment variable `NVTX_INJECTION64_PATH`, which tools set, names a library, and that library fills
//! in functions. Without the variable nothing is loaded, and nothing here is ever called: callers ask the word of the
//! process first.
//!
//! The tool is told under the lock under which a block changes hands: its address may be somebody else's as soon as that
//! is free. A tool knows nothing of this library, so it cannot call back.

mod abi;
mod tool;

use std::sync::OnceLock;

use tool::VARIABLE;
pub(crate) use tool::{Category, Tool};

static TOOL: OnceLock<Option<Tool>> = OnceLock::new();

/// Attaches the tool that the environment names, once in the process.
pub(crate) fn attach() -> Option<&'static Tool> {
    let mut failure = None;
    let tool = TOOL.get_or_init(|| {
        let tool = Tool::load();
        tool.unwrap_or_else(|error| {
            failure = Some(error);
            None
        })
    });
    // Not in there: the logger may make an allocator, which attaches the tool.
    if let Some(error) = failure {
        log::warn!("cannot attach the tool named by {VARIABLE}: {error}");
    }
    tool.as_ref()
}

/// A range on the tool's time line, until it is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct Span(Option<&'static Tool>);

/// Begins a range on the calling thread, if a tool is attached. It ends there, too.
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
