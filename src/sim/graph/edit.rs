//! Graphs built node by node, and queries of a graph's nodes.

use super::links::{Link, read_links};
use super::{Graph, Node, Task};
use crate::driver::sys::*;
use crate::sim::args::{In, Out};
use crate::sim::call::{R, fail};
use crate::sim::state::State;
use crate::sim::work::Work;
use std::collections::HashMap;
use std::ffi::{c_uint, c_void};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

impl State {
    /// A graph that is there.
    pub(super) fn graph(&mut self, graph: CUgraph) -> R<u64> {
        let value = graph as u64;
        if self.graphs.graphs.get(value).is_some() {
            return Ok(value);
        }
        self.dead("graph", value, self.graphs.graphs.existed(value));
        fail(INVALID)
    }

    fn node(&mut self, node: CUgraphNode) -> R<&Node> {
        let value = node as u64;
        if self.graphs.nodes.get(value).is_none() {
            self.dead("graph node", value, self.graphs.nodes.existed(value));
        }
        self.graphs.nodes.get(value).ok_or(INVALID)
    }

    /// Takes a graph away, with its nodes and its references to user objects.
    pub(super) fn destroy_graph(&mut self, graph: u64) {
        let Some(gone) = self.graphs.graphs.remove(graph) else {
            return;
        };
        for node in gone.nodes {
            self.graphs.nodes.remove(node);
        }
        self.drop_all(gone.objects);
    }

    /// Adds a node by hand.
    fn add_by_hand(
        &mut self,
        out: &Out<CUgraphNode>,
        graph: CUgraph,
        (nodes, count): (&In<CUgraphNode>, usize),
        task: Option<Task>,
    ) -> R {
        out.check()?;
        let graph = self.graph(graph)?;
        let links = read_links(nodes, &In::none(), count)?;
        if links.len() != count || !self.graphs.belong(graph, &links) {
            return fail(INVALID);
        }
        out.set(self.graphs.add_node(graph, task, links)? as CUgraphNode)
    }

    /// Writes as many dependencies as the caller has room for, or only their number.
    fn write_links(
        links: &[Link],
        nodes: &Out<CUgraphNode>,
        edges: Option<&Out<CUgraphEdgeData>>,
        count: &Out<usize>,
    ) -> R {
        let room = count.get()?;
        if nodes.check().is_err() {
            return count.set(links.len());
        }
        let edges = edges.filter(|edges| edges.check().is_ok());
        if edges.is_none() && links.iter().any(Link::has_data) {
            return fail(CUresult::CUDA_ERROR_LOSSY_QUERY);
        }
        let shown = links.iter().take(room);
        nodes.fill(shown.clone().map(|link| link.node as CUgraphNode));
        if let Some(edges) = edges {
            edges.fill(shown.map(Link::data));
        }
        count.set(links.len().min(room))
    }

    fn links_of(&mut self, node: CUgraphNode) -> R<Vec<Link>> {
        self.node(node).map(|node| node.links.clone())
    }
}

#[allow(non_snake_case)]
impl State {
    pub(in crate::sim) fn cuGraphCreate(&mut self, out: Out<CUgraph>, flags: c_uint) -> R {
        out.check()?;
        if flags != 0 {
            return fail(INVALID);
        }
        out.set(self.graphs.graphs.add(Graph::default()) as CUgraph)
    }

    pub(in crate::sim) fn cuGraphDestroy(&mut self, graph: CUgraph) -> R {
        let graph = self.graph(graph)?;
        let captures = |graph: &Graph| graph.capture.is_some();
        if self.graphs.graphs.get(graph).is_some_and(captures) {
            self.misuse("a capture adds to the graph", graph);
            return fail(INVALID);
        }
        self.destroy_graph(graph);
        Ok(())
    }

    pub(in crate::sim) fn cuGraphClone(&mut self, out: Out<CUgraph>, graph: CUgraph) -> R {
        out.check()?;
        let graph = self.graph(graph)?;
        let Some(original) = self.graphs.graphs.get(graph) else {
            return fail(INVALID);
        };
        let (nodes, objects) = (original.nodes.clone(), original.objects.clone());
        let objects = self.share_all(&objects);
        let clone = self.graphs.graphs.add(Graph {
            objects,
            ..Graph::default()
        });
        let mut renamed = HashMap::new();
        for old in nodes {
            let Some(node) = self.graphs.nodes.get(old).cloned() else {
                continue;
            };
            let new_of = |old: &u64| renamed.get(old).copied().unwrap_or_default();
            let links = node.links.iter().map(|link| link.on(new_of(&link.node)));
            let new = self.graphs.add_node(clone, node.task, links.collect())?;
            renamed.insert(old, new);
        }
        out.set(clone as CUgraph)
    }

    pub(in crate::sim) fn cuGraphAddEmptyNode(
        &mut self,
        out: Out<CUgraphNode>,
        graph: CUgraph,
        nodes: In<CUgraphNode>,
        count: usize,
    ) -> R {
        self.add_by_hand(&out, graph, (&nodes, count), None)
    }

    pub(in crate::sim) fn cuGraphAddKernelNode_v2(
        &mut self,
        out: Out<CUgraphNode>,
        graph: CUgraph,
        nodes: In<CUgraphNode>,
        count: usize,
        params: In<CUDA_KERNEL_NODE_PARAMS_v2>,
    ) -> R {
        let params = params.get()?;
        let sizes = [
            params.gridDimX,
            params.gridDimY,
            params.gridDimZ,
            params.blockDimX,
            params.blockDimY,
            params.blockDimZ,
        ];
        let mut task = self.kernel(params.func, sizes, &params.kernelParams.into())?;
        task.label = self.threads[self.thread].label;
        self.add_by_hand(&out, graph, (&nodes, count), Some(task))
    }

    pub(in crate::sim) fn cuGraphAddMemsetNode(
        &mut self,
        out: Out<CUgraphNode>,
        graph: CUgraph,
        nodes: In<CUgraphNode>,
        count: usize,
        params: In<CUDA_MEMSET_NODE_PARAMS>,
        ctx: CUcontext,
    ) -> R {
        let params = params.get()?;
        let ctx = self.ctx(ctx)?;
        let value = params.value;
        let word = match params.elementSize {
            1 => u32::from_ne_bytes([value as u8; 4]),
            2 => value & 0xffff | value << 16,
            4 => value,
            _ => return fail(INVALID),
        };
        let row = params.width.checked_mul(params.elementSize as usize);
        let row = row.ok_or(INVALID)?;
        if params.height > 1 && params.pitch != row {
            // Gaps between rows are not modelled.
            return fail(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let bytes = row.checked_mul(params.height).ok_or(INVALID)?;
        let task = Task {
            work: Work::Fill {
                address: params.dst,
                bytes: bytes as u64,
                content: crate::sim::contents::Content::Words {
                    first: word,
                    step: 0,
                    phase: 0,
                },
            },
            name: self.now.name(),
            nanos: 0,
            label: self.threads[self.thread].label,
            ctx,
        };
        self.add_by_hand(&out, graph, (&nodes, count), Some(task))
    }

    pub(in crate::sim) fn cuGraphGetNodes(
        &mut self,
        graph: CUgraph,
        nodes: Out<CUgraphNode>,
        count: Out<usize>,
    ) -> R {
        let graph = self.graph(graph)?;
        let list = self.graphs.graphs.get(graph).map(|graph| &graph.nodes);
        let list = list.map(Vec::as_slice).unwrap_or_default();
        let links: Vec<Link> = list.iter().map(|node| Link::whole(*node)).collect();
        State::write_links(&links, &nodes, None, &count)
    }

    pub(in crate::sim) fn cuGraphGetEdges_v2(
        &mut self,
        graph: CUgraph,
        from: Out<CUgraphNode>,
        to: Out<CUgraphNode>,
        edges: Out<CUgraphEdgeData>,
        count: Out<usize>,
    ) -> R {
        let graph = self.graph(graph)?;
        let list = self.graphs.graphs.get(graph).map(|graph| &graph.nodes);
        let (mut links, mut targets) = (Vec::new(), Vec::new());
        for &node in list.into_iter().flatten() {
            let entry = self.graphs.nodes.get(node);
            for link in entry.map(|node| &node.links).into_iter().flatten() {
                links.push(*link);
                targets.push(node as CUgraphNode);
            }
        }
        if from.check().is_ok() != to.check().is_ok() {
            return fail(INVALID);
        }
        let room = count.get()?;
        State::write_links(&links, &from, Some(&edges), &count)?;
        to.fill(targets.into_iter().take(room));
        Ok(())
    }

    pub(in crate::sim) fn cuGraphNodeGetType(
        &mut self,
        node: CUgraphNode,
        kind: Out<CUgraphNodeType>,
    ) -> R {
        let found = self.node(node)?.kind();
        kind.set(found)
    }

    pub(in crate::sim) fn cuGraphNodeGetDependencies(
        &mut self,
        node: CUgraphNode,
        nodes: Out<CUgraphNode>,
        count: Out<usize>,
    ) -> R {
        let links = self.links_of(node)?;
        State::write_links(&links, &nodes, None, &count)
    }

    pub(in crate::sim) fn cuGraphNodeGetDependencies_v2(
        &mut self,
        node: CUgraphNode,
        nodes: Out<CUgraphNode>,
        edges: Out<CUgraphEdgeData>,
        count: Out<usize>,
    ) -> R {
        let links = self.links_of(node)?;
        State::write_links(&links, &nodes, Some(&edges), &count)
    }

    pub(in crate::sim) fn cuDeviceGetGraphMemAttribute(
        &mut self,
        device: CUdevice,
        attribute: CUgraphMem_attribute,
        value: Out<c_void>,
    ) -> R {
        self.device_index(device)?;
        if attribute.0 > CUgraphMem_attribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH.0 {
            return fail(INVALID);
        }
        // Graphs that allocate are not modelled, so none has memory.
        value.cast::<u64>().set(0)
    }

    pub(in crate::sim) fn cuDeviceGraphMemTrim(&mut self, device: CUdevice) -> R {
        self.device_index(device).map(|_| ())
    }
}
