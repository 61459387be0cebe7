//! Graphs of work, captured or built by hand.

use super::context::{Context, Entered};
use super::deferred::Deferred;
use super::error::DriverError;
use super::sys;
use super::table::{Driver, call, thin};
use super::user_object::UserObject;
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr;

/// A graph, captured or initially empty, destroyed on drop; executables made from it are independent of it.
///
/// `Send`; may be used by one thread at a time, even for queries.
pub struct Graph {
    context: Context,
    raw: sys::CUgraph,
}

// SAFETY: a graph is not tied to a thread, and cannot be shared without a lock (it is not `Sync`).
unsafe impl Send for Graph {}

/// A node that another node depends on, with the data of the edge between them.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Dependency {
    /// The earlier node.
    pub node: sys::CUgraphNode,
    /// The kind of ordering; all zero for an ordinary edge.
    pub edge: sys::CUgraphEdgeData,
}

impl Dependency {
    /// Creates an ordinary dependency: the node is complete before the dependent one begins.
    pub fn on(node: sys::CUgraphNode) -> Dependency {
        Dependency {
            node,
            edge: sys::CUgraphEdgeData::default(),
        }
    }

    /// Sets the data of the edge.
    pub fn with_edge(self, edge: sys::CUgraphEdgeData) -> Dependency {
        Dependency { edge, ..self }
    }

    /// Whether the node is complete, and its writes are visible, before the dependent one begins. An edge of another
    /// kind lets a kernel begin while the one before it is running.
    pub fn is_complete(&self) -> bool {
        self.edge.type_ == 0 && self.edge.from_port == 0
    }

    fn parts(&self) -> (usize, [u8; 3]) {
        let edge = self.edge;
        (
            self.node as usize,
            [edge.from_port, edge.to_port, edge.type_],
        )
    }

    /// Converts the list to the two arrays that the driver takes.
    pub(super) fn to_arrays(
        list: &[Dependency],
    ) -> (Vec<sys::CUgraphNode>, Vec<sys::CUgraphEdgeData>) {
        list.iter().map(|one| (one.node, one.edge)).unzip()
    }
}

impl PartialEq for Dependency {
    fn eq(&self, other: &Dependency) -> bool {
        self.parts() == other.parts()
    }
}

impl Eq for Dependency {}

impl Graph {
    /// Creates a graph without nodes.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` without [`Feature::Graphs`](super::Feature::Graphs).
    pub fn new(context: &Context) -> Result<Graph, DriverError> {
        let entered = context.enter()?;
        context.deferred().destroy(entered.driver(), false);
        let mut raw = ptr::null_mut();
        // SAFETY: the output is a local.
        unsafe { call!(entered.driver(), cuGraphCreate(&mut raw, 0)) }?;
        Ok(Graph::of(context, raw))
    }

    pub(super) fn of(context: &Context, raw: sys::CUgraph) -> Graph {
        Graph {
            context: context.clone(),
            raw,
        }
    }

    /// Returns the driver's handle.
    pub fn raw(&self) -> sys::CUgraph {
        self.raw
    }

    /// Returns the context in which the graph was created.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Returns a copy with the same nodes and edges, which also retains the same user objects.
    ///
    /// # Errors
    /// The driver's, such as for a graph that allocates memory.
    pub fn try_clone(&self) -> Result<Graph, DriverError> {
        let entered = self.context.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the output is a local, and the graph is alive.
        unsafe { call!(entered.driver(), cuGraphClone(&mut raw, self.raw)) }?;
        Ok(Graph::of(&self.context, raw))
    }

    /// Makes the graph, and every clone and executable made from it, retain the object.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_INVALID_HANDLE` for an object of another driver.
    pub fn retain(&mut self, object: &UserObject) -> Result<(), DriverError> {
        let entered = self.context.enter()?;
        let driver = entered.driver();
        driver.refuse_foreign(object.context().driver(), "cuGraphRetainUserObject")?;
        // SAFETY: both are alive.
        unsafe { driver.retain_object(self.raw, object.raw(), 0) }
    }

    /// Returns the nodes, in no particular order.
    pub fn nodes(&self) -> Result<Vec<sys::CUgraphNode>, DriverError> {
        let entered = self.context.enter()?;
        let (driver, mut count) = (entered.driver(), 0);
        // SAFETY: null asks only for the count; the graph is alive and no other code changes it.
        unsafe { driver.graph_nodes(self.raw, ptr::null_mut(), &mut count) }?;
        let mut nodes = vec![ptr::null_mut(); count];
        // SAFETY: as above; the array has the stated length.
        unsafe { driver.graph_nodes(self.raw, nodes.as_mut_ptr(), &mut count) }?;
        nodes.truncate(count);
        Ok(nodes)
    }

    /// Returns every edge: the later node and its dependency.
    pub fn edges(&self) -> Result<Vec<(sys::CUgraphNode, Dependency)>, DriverError> {
        let mut edges = Vec::new();
        for node in self.nodes()? {
            // SAFETY: a node of the graph, which is alive.
            let before = unsafe { self.context.driver().node_dependencies(node) }?;
            edges.extend(before.into_iter().map(|dependency| (node, dependency)));
        }
        Ok(edges)
    }

    /// Adds a node that does nothing, after nodes of the graph.
    ///
    /// # Errors
    /// The driver's; one of them for nodes of another graph.
    ///
    /// # Safety
    /// The nodes must belong to live graphs that no other thread uses during the call.
    pub unsafe fn add_empty(
        &mut self,
        after: &[sys::CUgraphNode],
    ) -> Result<sys::CUgraphNode, DriverError> {
        // SAFETY: the caller is responsible for the nodes.
        unsafe { self.context.enter()?.add_empty(self.raw, after) }
    }

    /// Adds a node that fills `bytes` bytes at `to` with `value`, after nodes of the graph.
    ///
    /// # Errors
    /// The driver's; one of them for nodes of another graph.
    ///
    /// # Safety
    /// As for [`add_empty`](Self::add_empty). Only launches write the memory, and their callers vouch for it.
    pub unsafe fn add_memset(
        &mut self,
        after: &[sys::CUgraphNode],
        to: sys::CUdeviceptr,
        value: u8,
        bytes: usize,
    ) -> Result<sys::CUgraphNode, DriverError> {
        let params = sys::CUDA_MEMSET_NODE_PARAMS {
            dst: to,
            pitch: bytes,
            value: value.into(),
            elementSize: 1,
            width: bytes,
            height: 1,
        };
        // SAFETY: as in `add_empty`.
        unsafe { self.context.enter()?.add_memset(self.raw, after, &params) }
    }

    /// Drops the wrapper without destroying the graph, whose ownership was passed on.
    pub(super) fn forget(self) {
        let mut graph = ManuallyDrop::new(self);
        // SAFETY: the context is dropped exactly once, here, and the value is not used any more.
        unsafe { ptr::drop_in_place(&mut graph.context) };
    }
}

debug_fields!(Graph, self => raw: self.raw);

impl Drop for Graph {
    fn drop(&mut self) {
        self.context.release(Deferred::Graph(self.raw));
    }
}

impl Driver {
    /// Returns the dependencies of a node.
    ///
    /// # Errors
    /// The driver's: `CUDA_ERROR_LOSSY_QUERY` where an edge has data and the driver lacks
    /// [`Feature::EdgeData`](super::Feature::EdgeData).
    ///
    /// # Safety
    /// `node` must belong to a live graph that no other thread uses during the call.
    #[doc(hidden)]
    pub unsafe fn node_dependencies(
        &self,
        node: sys::CUgraphNode,
    ) -> Result<Vec<Dependency>, DriverError> {
        // SAFETY: the caller's contract.
        unsafe { self.read_node(node, |dependency| dependency) }
    }

    /// [`node_dependencies`](Self::node_dependencies), with each dependency converted by `each`.
    ///
    /// # Errors
    /// As for `node_dependencies`.
    ///
    /// # Safety
    /// As for `node_dependencies`.
    #[inline]
    pub(crate) unsafe fn read_node<T, D: FromIterator<T>>(
        &self,
        node: sys::CUgraphNode,
        each: impl Fn(Dependency) -> T,
    ) -> Result<D, DriverError> {
        // Most nodes have at most this many dependencies, so that one call suffices.
        const FEW: usize = 4;
        let mut nodes = [ptr::null_mut(); FEW];
        let mut edges = [sys::CUgraphEdgeData::default(); FEW];
        let mut count = FEW;
        let (to, data) = (nodes.as_mut_ptr(), edges.as_mut_ptr());
        // SAFETY: the arrays have the stated length, and the caller is responsible for the node.
        unsafe { self.read_dependencies(node, to, data, &mut count) }?;
        let joined = |(node, edge): (&sys::CUgraphNode, &sys::CUgraphEdgeData)| {
            each(Dependency {
                node: *node,
                edge: *edge,
            })
        };
        if count < FEW {
            let both = nodes.iter().zip(&edges).take(count);
            return Ok(both.map(joined).collect());
        }
        loop {
            // SAFETY: null asks only for the count.
            unsafe { self.read_dependencies(node, ptr::null_mut(), ptr::null_mut(), &mut count) }?;
            let room = count + 1;
            let mut nodes = vec![ptr::null_mut(); room];
            let mut edges = vec![sys::CUgraphEdgeData::default(); room];
            count = room;
            let (to, data) = (nodes.as_mut_ptr(), edges.as_mut_ptr());
            // SAFETY: as above.
            unsafe { self.read_dependencies(node, to, data, &mut count) }?;
            if count < room {
                return Ok(nodes.iter().zip(&edges).take(count).map(joined).collect());
            }
        }
    }

    /// # Safety
    /// As for [`Driver::node_dependencies`]; the arrays are null or have `count` elements.
    unsafe fn read_dependencies(
        &self,
        node: sys::CUgraphNode,
        nodes: *mut sys::CUgraphNode,
        edges: *mut sys::CUgraphEdgeData,
        count: &mut usize,
    ) -> Result<(), DriverError> {
        if self.has(super::Feature::EdgeData) {
            // SAFETY: the caller's contract.
            return unsafe { self.dependencies_v2(node, nodes, edges, count) };
        }
        // SAFETY: as above.
        unsafe { call!(self, cuGraphNodeGetDependencies(node, nodes, count)) }
    }

    thin! {
        #[inline]
        unsafe fn dependencies_v2(&self, node: sys::CUgraphNode, nodes: *mut sys::CUgraphNode,
            edges: *mut sys::CUgraphEdgeData, count: &mut usize
        ) = cuGraphNodeGetDependencies_v2(node, nodes, edges, count);

        unsafe fn graph_nodes(&self, graph: sys::CUgraph, nodes: *mut sys::CUgraphNode, count: &mut usize)
            = cuGraphGetNodes(graph, nodes, count);

        unsafe fn retain_object(&self, graph: sys::CUgraph, object: sys::CUuserObject, flags: u32)
            = cuGraphRetainUserObject(graph, object, 1, flags);
    }
}

impl Entered<'_> {
    thin! {
        unsafe fn add_empty(&self, graph: sys::CUgraph, after: &[sys::CUgraphNode]) -> node: sys::CUgraphNode
            = cuGraphAddEmptyNode(&mut node, graph, after.as_ptr(), after.len());

        unsafe fn add_memset(
            &self, graph: sys::CUgraph, after: &[sys::CUgraphNode], params: &sys::CUDA_MEMSET_NODE_PARAMS
        ) -> node: sys::CUgraphNode = cuGraphAddMemsetNode(
            &mut node, graph, after.as_ptr(), after.len(), params, self.context().raw()
        );

        /// Creates an object with one reference; its end calls `destroy(data)`.
        pub(super) unsafe fn create_object(
            &self, destroy: unsafe extern "C" fn(*mut c_void), data: *mut c_void
        ) -> object: sys::CUuserObject = cuUserObjectCreate(
            &mut object, data, Some(destroy), 1, sys::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
        );
    }
}

#[doc(hidden)]
impl Entered<'_> {
    /// Calls `destroy(data)` once `graph` and every executable made from it are destroyed. After an error it is called
    /// during this call, or never.
    ///
    /// # Safety
    /// `graph` must be live. `data` must be valid for `destroy`, which runs on a thread of the driver, must not unwind
    /// and must not call the driver.
    pub unsafe fn on_graph_destroyed(
        &self,
        graph: sys::CUgraph,
        destroy: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller is responsible for function and data.
        let object = unsafe { self.create_object(destroy, data) }?;
        let flags = sys::CU_GRAPH_USER_OBJECT_MOVE;
        // SAFETY: the object was just created with one reference; the caller is responsible for the graph.
        unsafe { self.driver().retain_object(graph, object, flags) }
    }
}
