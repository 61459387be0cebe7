//! Graphs: built by captures or by hand, and run by executables.

mod capture;
mod edit;
mod exec;
mod launch;
mod links;
mod users;

pub(super) use links::Link;

use super::call::{R, fail};
use super::clocks::Clock;
use super::objects::Callback;
use super::work::Work;
use crate::driver::sys::*;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Distance of handle values.
const STEP: u64 = 0x40;

/// Objects of one kind by handle. As with a real driver, the most recently freed value is reused first.
pub(super) struct Handles<T> {
    base: u64,
    list: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Handles<T> {
    pub(super) fn new(base: u64) -> Handles<T> {
        Handles {
            base,
            list: Vec::new(),
            free: Vec::new(),
        }
    }

    fn index(&self, handle: u64) -> Option<usize> {
        let offset = handle.checked_sub(self.base)?;
        (offset % STEP == 0).then_some((offset / STEP) as usize)
    }

    pub(super) fn add(&mut self, object: T) -> u64 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.list.push(None);
            self.list.len() - 1
        });
        self.list[index] = Some(object);
        self.base + index as u64 * STEP
    }

    pub(super) fn get(&self, handle: u64) -> Option<&T> {
        self.list.get(self.index(handle)?)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, handle: u64) -> Option<&mut T> {
        let index = self.index(handle)?;
        self.list.get_mut(index)?.as_mut()
    }

    pub(super) fn remove(&mut self, handle: u64) -> Option<T> {
        let index = self.index(handle)?;
        let object = self.list.get_mut(index)?.take()?;
        self.free.push(index);
        Some(object)
    }

    /// Whether there was ever an object with this handle.
    pub(super) fn existed(&self, handle: u64) -> bool {
        self.index(handle)
            .is_some_and(|index| index < self.list.len())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        let handles = (0..).map(|index| self.base + index * STEP);
        let objects = handles.zip(&self.list);
        objects.filter_map(|(handle, object)| Some((handle, object.as_ref()?)))
    }
}

/// The operation of a node.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) work: Work,
    pub(super) name: &'static str,
    pub(super) nanos: u64,
    pub(super) label: u32,
    pub(super) ctx: usize,
}

impl Task {
    fn kind(&self) -> CUgraphNodeType {
        match self.work {
            Work::Fill { .. } if !self.name.starts_with("cualloc_") => {
                CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET
            }
            Work::Copy { .. }
            | Work::Upload { .. }
            | Work::Download { .. }
            | Work::HostCopy { .. } => CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY,
            Work::Callback { .. } => CUgraphNodeType::CU_GRAPH_NODE_TYPE_HOST,
            _ => CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL,
        }
    }
}

#[derive(Clone)]
pub(super) struct Node {
    graph: u64,
    /// None for an empty node.
    task: Option<Task>,
    /// The nodes that this one depends on.
    links: Vec<Link>,
}

impl Node {
    fn is_kernel(&self) -> bool {
        self.kind() == CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL
    }

    fn kind(&self) -> CUgraphNodeType {
        let task = self.task.as_ref();
        task.map_or(CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY, Task::kind)
    }
}

/// References to user objects, by their handles.
type References = BTreeMap<u64, u64>;

#[derive(Default)]
pub(super) struct Graph {
    /// In the order in which they were added: each after its dependencies.
    nodes: Vec<u64>,
    objects: References,
    /// The capture that adds to it.
    capture: Option<u64>,
}

/// A capture in progress.
pub(super) struct Capture {
    origin: u32,
    thread: u64,
    mode: u32,
    pub(super) invalid: bool,
    graph: u64,
    /// Whether the graph was there before.
    into: bool,
    /// Each stream of the capture, with the dependencies of its next node.
    members: HashMap<u32, Vec<Link>>,
    /// The dependencies that a query returned for a stream, kept as long as the caller may read them.
    shown: HashMap<u32, QueryArrays>,
}

/// Arrays of the driver that a query hands out.
#[derive(Default)]
struct QueryArrays {
    nodes: Vec<u64>,
    edges: Vec<CUgraphEdgeData>,
}

/// A node of an executable.
struct Step {
    node: u64,
    task: Option<Task>,
    /// The steps that are complete when this one starts.
    after: Vec<usize>,
    /// One of the executable's lanes.
    lane: usize,
}

/// An executable graph.
pub(super) struct Exec {
    steps: Arc<[Step]>,
    /// The queues that the steps run on, with their contexts. Steps that the graph orders share a queue; concurrent
    /// steps have different ones.
    lanes: Vec<(u32, usize)>,
    objects: References,
    /// Steps that an update replaced while launches were in progress.
    replaced: Vec<References>,
    /// Launches that are not complete.
    running: u64,
    destroyed: bool,
    /// The last launch, which the next one follows: its queue, its position there, and the operations before it.
    last: Option<Launch>,
}

pub(super) struct UserObject {
    count: u64,
    callback: Callback,
    /// The last launches of executables that held it. They are over before its function runs, so code that the function
    /// notifies has observed their completion.
    launches: Vec<Launch>,
}

/// The end of a launch: its queue, its position there, and the operations before it.
pub(super) type Launch = (u32, u64, Arc<Clock>);

/// Everything that has to do with graphs.
pub(super) struct Graphs {
    pub(super) captures: HashMap<u64, Capture>,
    next_capture: u64,
    pub(super) graphs: Handles<Graph>,
    nodes: Handles<Node>,
    pub(super) execs: Handles<Exec>,
    pub(super) objects: Handles<UserObject>,
}

impl Default for Graphs {
    fn default() -> Graphs {
        Graphs {
            captures: HashMap::new(),
            next_capture: 1,
            graphs: Handles::new(0x1300_0000_0000),
            nodes: Handles::new(0x1400_0000_0000),
            execs: Handles::new(0x1500_0000_0000),
            objects: Handles::new(0x1600_0000_0000),
        }
    }
}

impl Graphs {
    /// Adds a node to a graph that is there.
    fn add_node(&mut self, graph: u64, task: Option<Task>, links: Vec<Link>) -> R<u64> {
        let Some(entry) = self.graphs.get_mut(graph) else {
            return fail(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        let node = self.nodes.add(Node { graph, task, links });
        entry.nodes.push(node);
        Ok(node)
    }

    /// Whether all of these are nodes of the graph, which edges with this data may leave.
    fn belong(&self, graph: u64, links: &[Link]) -> bool {
        let inside = |link: &Link| {
            let node = self.nodes.get(link.node);
            node.is_some_and(|node| node.graph == graph && link.may_leave(node.is_kernel()))
        };
        links.iter().all(inside)
    }
}
