//! Graphs, the executables made of them, their launches, and user objects, by which the driver reports that none of
//! these is left.

use cualloc::driver::sys::*;

use super::node_order::{NodeOrder, Touch};
use super::{Clock, Tracker, merge};

#[derive(Clone, Default)]
pub(super) struct Graph {
    pub order: NodeOrder,
    /// Its claims.
    pub claims: Vec<u64>,
    /// User objects that it holds.
    objects: Vec<u64>,
}

pub(super) struct Exec {
    graph: u64,
    touches: Vec<Touch>,
    claims: Vec<u64>,
    objects: Vec<u64>,
    /// What comes before the end of its last launch, with that.
    last: Option<Clock>,
}

/// A user object.
#[derive(Default)]
pub(super) struct Object {
    handle: u64,
    /// The last launches of executables that held it.
    launches: Vec<Clock>,
}

impl Tracker {
    pub fn graph(&mut self, graph: CUgraph) {
        self.graphs.insert(graph as u64, Graph::default());
    }

    pub fn graph_cloned(&mut self, clone: CUgraph, of: CUgraph) {
        let mut graph = self.graphs.get(&(of as u64)).cloned().unwrap_or_default();
        // Its nodes have handles of their own.
        graph.order.handles.clear();
        self.held(&graph.claims);
        self.graphs.insert(clone as u64, graph);
    }

    /// A node is added by hand.
    pub fn node(&mut self, graph: CUgraph, node: CUgraphNode, on: &[u64], ranges: &[(u64, u64)]) {
        let (mut touches, mut parts) = (Vec::new(), Vec::new());
        for &(start, bytes) in ranges {
            touches.push(self.touch(start, start + bytes, None));
            let physical = self.parts(start, start + bytes);
            parts.extend(physical.iter().map(|(s, e, p)| (*p, p + (e - s))));
        }
        let order = &mut self.graphs.entry(graph as u64).or_default().order;
        let on: Vec<(u64, bool)> = on.iter().map(|node| (*node, true)).collect();
        let number = order.add(&order.links(&on), None, touches, &parts);
        order.handles.insert(node as u64, number);
    }

    pub fn graph_destroyed(&mut self, graph: CUgraph) {
        self.graph_gone(graph as u64);
    }

    pub(super) fn graph_gone(&mut self, graph: u64) {
        if let Some(gone) = self.graphs.remove(&graph) {
            self.let_go(&gone.claims);
        }
    }

    /// The handle of a graph is known by now.
    pub(super) fn shown_as(&mut self, unseen: u64, graph: u64) {
        if let Some(known) = self.graphs.remove(&unseen) {
            for claim in &known.claims {
                if let Some(claim) = self.claims.get_mut(claim) {
                    claim.graph = graph;
                }
            }
            self.graphs.insert(graph, known);
        }
    }

    fn exec_of(&mut self, graph: CUgraph) -> Exec {
        let graph = graph as u64;
        let known = self.graphs.get(&graph);
        let nodes = known.into_iter().flat_map(|known| &known.order.nodes);
        let touches = nodes
            .flat_map(|node| node.touches.iter().copied())
            .collect();
        let claims = known.map(|known| known.claims.clone());
        let objects = known.map(|known| known.objects.clone());
        let exec = Exec {
            graph,
            touches,
            claims: claims.unwrap_or_default(),
            objects: objects.unwrap_or_default(),
            last: None,
        };
        self.held(&exec.claims);
        exec
    }

    pub fn instantiated(&mut self, exec: CUgraphExec, graph: CUgraph) {
        let made = self.exec_of(graph);
        self.execs.insert(exec as u64, made);
    }

    /// An executable does what another graph says from now on.
    pub fn updated(&mut self, exec: CUgraphExec, graph: CUgraph) {
        let mut made = self.exec_of(graph);
        if let Some(old) = self.execs.remove(&(exec as u64)) {
            made.last = old.last.clone();
            self.ended(old);
        }
        self.execs.insert(exec as u64, made);
    }

    pub fn exec_destroyed(&mut self, exec: CUgraphExec) {
        if let Some(gone) = self.execs.remove(&(exec as u64)) {
            self.ended(gone);
        }
    }

    fn ended(&mut self, exec: Exec) {
        self.let_go(&exec.claims);
        let Some(last) = exec.last else { return };
        for object in &exec.objects {
            if let Some(object) = self.objects.get_mut(object) {
                object.launches.push(last.clone());
            }
        }
    }

    // ---- launches --------------------------------------------------------------------------

    /// An executable is launched: behind what its stream has, and behind its own last launch.
    pub fn launched(&mut self, exec: CUgraphExec, stream: CUstream) {
        let lane = self.number(stream);
        let Some(position) = self.submitted(lane) else {
            return;
        };
        let Some(mut exec) = self.execs.remove(&(exec as u64)).map(|e| (exec as u64, e)) else {
            return;
        };
        if let Some(last) = &exec.1.last {
            merge(&mut self.lanes[lane].clock, last);
        }
        let used = (lane, position);
        for touch in exec.1.touches.clone() {
            self.judge_launch(&exec.1, &touch, lane);
        }
        for touch in &exec.1.touches {
            for (at, end, physical) in self.parts(touch.start, touch.end) {
                self.launched_at.add(at, end, used);
                self.launched.add(physical, physical + (end - at), used);
            }
        }
        for claim in &exec.1.claims {
            if let Some(claim) = self.claims.get_mut(claim) {
                claim.launches.push(used);
            }
        }
        exec.1.last = Some(self.lanes[lane].clock.clone());
        self.execs.insert(exec.0, exec.1);
    }

    /// The memory that a launch touches exists, belongs to no other owner, and is not in use elsewhere at the same time.
    fn judge_launch(&mut self, exec: &Exec, touch: &Touch, lane: usize) {
        let (start, end, graph) = (touch.start, touch.end, exec.graph);
        if !self.is_there(start, end) {
            self.found(format!(
                "a launch of graph {graph:#x} on stream {lane} touches {start:#x}..{end:#x}, which is not there"
            ));
            return;
        }
        for (_, _, from, to) in self.physical(start, end) {
            self.judge_owner(exec, touch, (from, to));
            let by_work = self.use_beside(false, lane, (from, to));
            let by_launch = self.use_beside(true, lane, (from, to));
            let both = [(by_work, "work"), (by_launch, "a launch")];
            let found = both.into_iter().find_map(|(found, by)| Some((found?, by)));
            if let Some(((at, (other, position)), by)) = found {
                self.found(format!(
                    "a launch of graph {graph:#x} on stream {lane} touches {:#x}, which {by} of stream {other} may \
                     use until {position}",
                    start + (at - from)
                ));
                return;
            }
        }
    }

    /// A live block that a launch writes was some graph's, and its memory is of the same pool; or it is the block that
    /// the node was captured with.
    fn judge_owner(&mut self, exec: &Exec, touch: &Touch, (from, to): (u64, u64)) {
        let other = self.occupied.range(..to).next_back();
        let Some((_, &(end, address))) = other else {
            return;
        };
        let Some(block) = self.live.get(&address).filter(|_| end > from) else {
            return;
        };
        let own = address <= touch.start && touch.end <= block.end && block.born <= touch.born;
        let claims = exec
            .claims
            .iter()
            .filter_map(|claim| self.claims.get(claim));
        let pool = claims.filter_map(|claim| claim.pool_at(touch.start)).next();
        let shared = block.captured && block.pool.is_some() && block.pool == pool;
        if !own && !shared {
            self.found(format!(
                "a launch of graph {:#x} writes {:#x}..{:#x}, which is in the live block {address:#x}",
                exec.graph, touch.start, touch.end
            ));
        }
    }

    // ---- user objects ----------------------------------------------------------------------

    pub fn object(&mut self, object: CUuserObject, token: u64) {
        let object = Object {
            handle: object as u64,
            launches: Vec::new(),
        };
        self.objects.insert(token, object);
    }

    fn token(&self, object: CUuserObject) -> Option<u64> {
        // The value of one that went comes back: the last one it is.
        let objects = self.objects.iter();
        let own = objects.filter(|(_, known)| known.handle == object as u64);
        own.map(|(token, _)| *token).max()
    }

    pub fn object_retained(&mut self, graph: CUgraph, object: CUuserObject) {
        if let Some(token) = self.token(object) {
            let graph = self.graphs.entry(graph as u64).or_default();
            graph.objects.push(token);
        }
    }

    /// The driver calls an object's function: no holder of it is left, and their launches are complete.
    pub fn object_over(&mut self, token: u64) {
        if let Some(gone) = self.objects.remove(&token) {
            for clock in &gone.launches {
                merge(&mut self.seen, clock);
            }
        }
        // The call that takes away the last of them may not have returned.
        let held = |exec: &&Exec| exec.objects.contains(&token);
        for clock in self
            .execs
            .values()
            .filter(held)
            .filter_map(|exec| exec.last.as_ref())
        {
            merge(&mut self.seen, clock);
        }
    }
}
