//! Executable graphs.

use super::context::{Context, Entered};
use super::deferred::Deferred;
use super::error::DriverError;
use super::graph::Graph;
use super::stream::Stream;
use super::sys;
use super::table::{call, thin};

/// An executable made from a graph, destroyed on drop: launches in progress go on, and objects retained by the graph
/// ([`Graph::retain`]) are kept until the last of them is complete.
///
/// `Send`; may be used by one thread at a time.
pub struct GraphExec {
    context: Context,
    raw: sys::CUgraphExec,
}

// SAFETY: an executable is not tied to a thread, and cannot be shared without a lock (it is not `Sync`).
unsafe impl Send for GraphExec {}

impl Graph {
    /// Makes an executable of the graph as it is now. It also retains the graph's user objects.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` without [`Feature::GraphExecs`](super::Feature::GraphExecs).
    pub fn instantiate(&self) -> Result<GraphExec, DriverError> {
        let entered = self.context().enter()?;
        self.context().deferred().destroy(entered.driver(), false);
        // SAFETY: the graph is alive.
        let raw = unsafe { entered.instantiate(self.raw()) }?;
        let context = self.context().clone();
        Ok(GraphExec { context, raw })
    }
}

impl GraphExec {
    /// Returns the driver's handle.
    pub fn raw(&self) -> sys::CUgraphExec {
        self.raw
    }

    /// Launches the graph in the order of `stream`, after earlier launches of this executable. Returns without waiting.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_INVALID_HANDLE` for a stream of another driver.
    ///
    /// # Safety
    /// Until the launch is complete, the memory that the graph's nodes use must be valid for them, as for the captured
    /// work.
    pub unsafe fn launch(&mut self, stream: &Stream) -> Result<(), DriverError> {
        let entered = stream.context().enter()?;
        let driver = entered.driver();
        driver.refuse_foreign(self.context.driver(), "cuGraphLaunch")?;
        // SAFETY: the handles are alive, and the caller is responsible for the memory.
        unsafe { call!(driver, cuGraphLaunch(self.raw, stream.raw())) }
    }

    /// Makes later launches run `graph`, which must have the same nodes and edges, although their parameters may
    /// differ. Cheaper than a new executable. The retained user objects are then those of `graph`.
    ///
    /// # Errors
    /// The driver's, including `CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE`: then nothing has changed. `CUDA_ERROR_NOT_FOUND`
    /// without [`Feature::GraphExecUpdate`](super::Feature::GraphExecUpdate).
    pub fn update(&mut self, graph: &Graph) -> Result<(), DriverError> {
        let entered = self.context.enter()?;
        let driver = entered.driver();
        driver.refuse_foreign(graph.context().driver(), "cuGraphExecUpdate_v2")?;
        // SAFETY: both are alive.
        unsafe { entered.update_exec(self.raw, graph.raw()) }
    }
}

impl Entered<'_> {
    thin! {
        unsafe fn instantiate(&self, graph: sys::CUgraph) -> exec: sys::CUgraphExec
            = cuGraphInstantiateWithFlags(&mut exec, graph, 0);

        unsafe fn update_exec(&self, exec: sys::CUgraphExec, graph: sys::CUgraph)
            -> info: sys::CUgraphExecUpdateResultInfo = cuGraphExecUpdate_v2(exec, graph, &mut info) => (): ();
    }
}

debug_fields!(GraphExec, self => raw: self.raw);

impl Drop for GraphExec {
    fn drop(&mut self) {
        self.context.release(Deferred::GraphExec(self.raw));
    }
}
