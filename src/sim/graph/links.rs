//! Edges of graphs.

use crate::driver::sys::{CUgraphEdgeData, CUgraphNode};
use crate::sim::args::In;
use crate::sim::call::R;

/// A dependency on a node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(in crate::sim) struct Link {
    pub(super) node: u64,
    from_port: u8,
    to_port: u8,
    kind: u8,
}

impl Link {
    /// An ordinary one: the node is complete before the next begins.
    pub(super) fn whole(node: u64) -> Link {
        Link::new(node, CUgraphEdgeData::default())
    }

    pub(super) fn new(node: u64, data: CUgraphEdgeData) -> Link {
        Link {
            node,
            from_port: data.from_port,
            to_port: data.to_port,
            kind: data.type_,
        }
    }

    /// The same dependency on another node.
    pub(super) fn on(self, node: u64) -> Link {
        Link { node, ..self }
    }

    /// As the driver shows it.
    pub(super) fn data(&self) -> CUgraphEdgeData {
        CUgraphEdgeData {
            from_port: self.from_port,
            to_port: self.to_port,
            type_: self.kind,
            reserved: [0; 5],
        }
    }

    /// Whether the edge has data beyond the order of its two nodes.
    pub(super) fn has_data(&self) -> bool {
        (self.from_port, self.to_port, self.kind) != (0, 0, 0)
    }

    /// Whether the next node may begin while this one runs; both must be kernels.
    pub(super) fn is_programmatic(&self) -> bool {
        self.kind == 1
    }

    /// Whether an edge from a kernel, or from another node, may have this data. By the driver's header, only kernels
    /// have ports, and the port at which a kernel lets its successors begin needs a programmatic edge.
    pub(super) fn may_leave(&self, kernel: bool) -> bool {
        match (self.kind, self.from_port, self.to_port) {
            (0, 0, 0) => true,
            (0, 2, 0) | (1, 1 | 2, 0) => kernel,
            _ => false,
        }
    }

    /// Whether the node is complete before the next begins.
    pub(super) fn is_whole(&self) -> bool {
        self.kind == 0 && self.from_port == 0
    }
}

/// All of both, each once, in order.
pub(super) fn common(one: &[Link], other: &[Link]) -> Vec<Link> {
    let mut links: Vec<Link> = one.iter().chain(other).copied().collect();
    links.sort_unstable();
    links.dedup();
    links
}

/// The dependencies that a call passes; without data of edges, ordinary ones.
pub(super) fn read_links(
    nodes: &In<CUgraphNode>,
    edges: &In<CUgraphEdgeData>,
    count: usize,
) -> R<Vec<Link>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    let nodes = nodes.read(count)?;
    let edges = match edges.get() {
        Ok(_) => edges.read(count)?,
        Err(_) => vec![CUgraphEdgeData::default(); count],
    };
    let links = nodes.into_iter().zip(edges);
    Ok(common(
        &links
            .map(|(node, data)| Link::new(node as u64, data))
            .collect::<Vec<Link>>(),
        &[],
    ))
}
