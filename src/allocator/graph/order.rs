//! The known order of a capture's nodes: which nodes are complete before the next captured work of a stream begins.
//!
//! Nodes are only added, so knowledge about a node stays true. Each node is queried once per capture, and visited once
//! per stream: a capture of n nodes costs n queries, and n steps per stream. While a capture has one stream, and each
//! node depends only on the previous one, the chain is all the knowledge, and it is expanded when another stream joins;
//! a node that such a stream is set back to is queried once more.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::allocator::extent::hash::Mixed;
use crate::allocator::graph::few::Few;

/// A dependency on an earlier node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Edge {
    pub node: usize,
    /// Whether the dependent begins only when the node is complete and its writes are visible. Otherwise it may begin
    /// as soon as the node has begun.
    pub full: bool,
}

/// A use of memory in a capture: the last nodes of a stream at that time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LastNodes {
    /// The stream's place in the capture.
    pub stream: usize,
    epoch: u32,
    nodes: Few<usize>,
}

/// The nodes that one stream of a capture is behind.
#[derive(Debug, Default)]
struct KnownNodes {
    /// Dependencies of the stream's next node.
    present: Vec<Edge>,
    /// Nodes that have begun before the present point; true if they are complete by then.
    nodes: HashMap<usize, bool, Mixed>,
    /// Number of times that the present point moved other than forward.
    epoch: u32,
    /// A chain of nodes, each with the previous one as its only dependency. The first depends on one of `nodes`, the
    /// last is the present point; they are not stored anywhere else yet.
    chain: Vec<usize>,
}

/// The order; see the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Order {
    dependencies: HashMap<usize, Few<Edge>, Mixed>,
    streams: Vec<KnownNodes>,
    /// Memory of a finished walk, for reuse.
    spare: Option<Box<Walk>>,
}

/// A walk back from the dependencies of a stream's next node.
#[derive(Debug, Default)]
pub(crate) struct Walk {
    stream: usize,
    present: Vec<Edge>,
    todo: Vec<usize>,
    /// Whether the walk had to visit no node: the capture has one stream, whose new node depends only on the previous
    /// one.
    step: bool,
    /// Nodes of the stream's former present point that were not visited yet.
    unmet: Vec<usize>,
    anew: bool,
}

impl Order {
    /// Adds a stream to the capture, and returns its place.
    pub(crate) fn add_stream(&mut self) -> usize {
        // From here on other streams need to know what it captured.
        self.expand_chain();
        self.streams.push(KnownNodes::default());
        self.streams.len() - 1
    }

    /// Computes what a stream is behind, given the dependencies of its next node, as far as dependencies are known.
    /// Returns `None` at the end, otherwise the next node whose dependencies have to be [learned](Self::learn).
    pub(crate) fn walk(&mut self, stream: usize, present: &[Edge]) -> Option<(Box<Walk>, usize)> {
        let reach = &self.streams[stream];
        if reach.present == present {
            return None;
        }
        let mut walk = self.spare.take().unwrap_or_default();
        walk.present.clear();
        walk.present.extend_from_slice(present);
        if let [_, _, ..] = present {
            walk.present.sort_unstable();
            if reach.present == walk.present {
                self.spare = Some(walk);
                return None;
            }
        }
        (walk.stream, walk.anew, walk.step) = (stream, false, false);
        walk.todo.clear();
        if let ([_], [now], [_]) = (&*self.streams, present, &*reach.present)
            && !self.dependencies.contains_key(&now.node)
        {
            walk.step = true;
            return Some((walk, now.node));
        }
        // The next node does not follow the last one.
        self.expand_chain();
        self.begin(walk)
    }

    fn begin(&mut self, mut walk: Box<Walk>) -> Option<(Box<Walk>, usize)> {
        let reach = &self.streams[walk.stream];
        walk.unmet.clear();
        walk.unmet
            .extend(reach.present.iter().map(|edge| edge.node));
        self.start(&mut walk);
        self.next(walk)
    }

    /// Visits the nodes that a walk begins with. They have begun before the next node; they are known to be complete as
    /// long as the next node depends on them.
    fn start(&mut self, walk: &mut Walk) {
        let reach = &mut self.streams[walk.stream];
        for at in 0..walk.present.len() {
            let begun = Edge {
                full: false,
                ..walk.present[at]
            };
            walk.visit(reach, begun);
        }
    }

    /// Continues a walk with the dependencies of its node; returns like [`walk`](Self::walk).
    pub(crate) fn learn(
        &mut self,
        mut walk: Box<Walk>,
        node: usize,
        dependencies: Few<Edge>,
    ) -> Option<(Box<Walk>, usize)> {
        if walk.step {
            walk.step = false;
            let alone = self.streams.len() == 1;
            let reach = &mut self.streams[walk.stream];
            if let (true, [before], [edge]) = (alone, &*reach.present, &*dependencies)
                && before.node == edge.node
                && edge.full
            {
                if reach.chain.is_empty() {
                    // Uses recorded before the stream was set back may refer to this node.
                    reach.nodes.insert(edge.node, true);
                    reach.chain.push(edge.node);
                }
                reach.chain.push(node);
                std::mem::swap(&mut reach.present, &mut walk.present);
                self.spare = Some(walk);
                return None;
            }
            self.expand_chain();
            self.dependencies.insert(node, dependencies);
            return self.begin(walk);
        }
        if walk.todo.last() == Some(&node) {
            walk.todo.pop();
        }
        let reach = &mut self.streams[walk.stream];
        for edge in &dependencies {
            walk.visit(reach, *edge);
        }
        self.dependencies.insert(node, dependencies);
        self.next(walk)
    }

    /// Expands the chain into the known nodes.
    fn expand_chain(&mut self) {
        for reach in &mut self.streams {
            for pair in reach.chain.windows(2) {
                let edge = Edge {
                    node: pair[0],
                    full: true,
                };
                self.dependencies.insert(pair[1], Few::from([edge]));
                reach.nodes.insert(pair[0], true);
                reach.nodes.insert(pair[1], false);
            }
            reach.chain.clear();
        }
    }

    fn next(&mut self, mut walk: Box<Walk>) -> Option<(Box<Walk>, usize)> {
        loop {
            let reach = &mut self.streams[walk.stream];
            while let Some(node) = walk.todo.last().copied() {
                let Some(dependencies) = self.dependencies.get(&node) else {
                    return Some((walk, node));
                };
                walk.todo.pop();
                for edge in dependencies {
                    walk.visit(reach, *edge);
                }
            }
            if walk.unmet.is_empty() || walk.anew {
                break;
            }
            // The stream did not move forward: earlier knowledge about what it is behind is void.
            walk.anew = true;
            reach.nodes.clear();
            reach.epoch += 1;
            self.start(&mut walk);
        }
        std::mem::swap(&mut self.streams[walk.stream].present, &mut walk.present);
        self.spare = Some(walk);
        None
    }

    /// Abandons a walk: the nodes that it visited are not known to be ordered.
    pub(crate) fn give_up(&mut self, walk: &Walk) {
        self.expand_chain();
        let reach = &mut self.streams[walk.stream];
        reach.nodes.clear();
        reach.present.clear();
        reach.epoch += 1;
    }

    /// Returns the number of nodes that were queried.
    #[cfg(test)]
    pub(crate) fn query_count(&self) -> usize {
        let chains = self.streams.iter().map(|reach| &reach.chain);
        let steps = chains.map(|chain| chain.len().saturating_sub(1));
        self.dependencies.len() + steps.sum::<usize>()
    }

    /// Returns the use by a stream up to its present point.
    pub(crate) fn last_nodes(&self, stream: usize) -> LastNodes {
        let reach = &self.streams[stream];
        LastNodes {
            stream,
            epoch: reach.epoch,
            nodes: reach.present.iter().map(|edge| edge.node).collect(),
        }
    }

    /// Whether a use is complete before the next captured work of a stream begins.
    ///
    /// A stream that only moved forward is behind all its own work: a kernel that was launched with an early start
    /// waits for its predecessor before it touches memory allocated after the predecessor's launch.
    pub(crate) fn is_behind(&self, seen: &LastNodes, stream: usize) -> bool {
        let reach = &self.streams[stream];
        if seen.stream == stream && seen.epoch == reach.epoch {
            return true;
        }
        seen.nodes.iter().all(|node| {
            let over = Edge {
                node: *node,
                full: true,
            };
            reach.nodes.get(node) == Some(&true) || reach.present.contains(&over)
        })
    }
}

impl Walk {
    /// Visits a node behind an edge.
    #[inline]
    fn visit(&mut self, reach: &mut KnownNodes, edge: Edge) {
        if !self.anew {
            self.unmet.retain(|node| *node != edge.node);
        }
        match reach.nodes.entry(edge.node) {
            Entry::Occupied(mut known) => *known.get_mut() |= edge.full,
            Entry::Vacant(new) => {
                new.insert(edge.full);
                self.todo.push(edge.node);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A made-up capture.
    #[derive(Default)]
    struct Graph(HashMap<usize, Vec<Edge>>);

    impl Graph {
        fn node(&mut self, node: usize, dependencies: &[Edge]) {
            self.0.insert(node, dependencies.to_vec());
        }

        fn advance(&self, order: &mut Order, stream: usize, present: &[Edge]) {
            let mut asked = order.walk(stream, present);
            while let Some((walk, node)) = asked {
                let known = self.0.get(&node).map_or(&[][..], Vec::as_slice);
                asked = order.learn(walk, node, known.iter().copied().collect());
            }
        }
    }

    fn full(node: usize) -> Edge {
        Edge { node, full: true }
    }

    fn early(node: usize) -> Edge {
        Edge { node, full: false }
    }

    #[test]
    fn a_stream_is_behind_the_streams_it_joined_only() {
        let (mut graph, mut order) = (Graph::default(), Order::default());
        let [main, side] = [(); 2].map(|()| order.add_stream());
        graph.node(1, &[]);
        graph.node(2, &[full(1)]);
        graph.node(3, &[full(1)]);
        graph.advance(&mut order, main, &[full(2)]);
        graph.advance(&mut order, side, &[full(3)]);
        let (on_main, on_side) = (order.last_nodes(main), order.last_nodes(side));
        assert!(order.is_behind(&on_main, main) && order.is_behind(&on_side, side));
        assert!(!order.is_behind(&on_main, side) && !order.is_behind(&on_side, main));
        // The join of both branches.
        graph.advance(&mut order, main, &[full(2), full(3)]);
        assert!(order.is_behind(&on_side, main));
        graph.node(4, &[full(2), full(3)]);
        graph.advance(&mut order, main, &[full(4)]);
        assert!(order.is_behind(&on_side, main) && !order.is_behind(&on_main, side));
    }

    #[test]
    fn a_node_with_an_early_start_is_behind_the_dependencies_of_its_predecessor() {
        let (mut graph, mut order) = (Graph::default(), Order::default());
        let [main, side] = [(); 2].map(|()| order.add_stream());
        graph.node(1, &[]);
        graph.advance(&mut order, main, &[full(1)]);
        let first = order.last_nodes(main);
        graph.node(2, &[full(1)]);
        graph.advance(&mut order, main, &[full(2)]);
        let second = order.last_nodes(main);
        graph.node(3, &[early(2)]);
        graph.advance(&mut order, main, &[full(3)]);
        graph.advance(&mut order, side, &[full(3)]);
        assert!(order.is_behind(&first, side));
        assert!(!order.is_behind(&second, side));
        assert!(
            order.is_behind(&second, main),
            "it went on in its own order"
        );
    }

    #[test]
    fn a_stream_that_was_set_back_is_only_behind_its_new_dependencies() {
        let (mut graph, mut order) = (Graph::default(), Order::default());
        let main = order.add_stream();
        graph.node(1, &[]);
        graph.node(2, &[full(1)]);
        graph.advance(&mut order, main, &[full(1)]);
        let first = order.last_nodes(main);
        graph.advance(&mut order, main, &[full(2)]);
        let second = order.last_nodes(main);
        graph.advance(&mut order, main, &[full(1)]);
        assert!(order.is_behind(&first, main));
        assert!(!order.is_behind(&second, main), "the second runs beside");
        graph.node(3, &[full(1)]);
        graph.advance(&mut order, main, &[full(3)]);
        assert!(!order.is_behind(&second, main));
        graph.advance(&mut order, main, &[full(2), full(3)]);
        assert!(order.is_behind(&second, main));
    }

    #[test]
    fn joining_streams_see_what_a_lone_stream_captured() {
        let (mut graph, mut order) = (Graph::default(), Order::default());
        let main = order.add_stream();
        graph.node(0, &[]);
        graph.advance(&mut order, main, &[full(0)]);
        let mut seen = Vec::new();
        for node in 1..9 {
            graph.node(node, &[full(node - 1)]);
            graph.advance(&mut order, main, &[full(node)]);
            seen.push(order.last_nodes(main));
            assert!(seen.iter().all(|seen| order.is_behind(seen, main)));
        }
        let side = order.add_stream();
        graph.advance(&mut order, side, &[full(5)]);
        let behind = seen.iter().map(|seen| order.is_behind(seen, side));
        let expected = [true, true, true, true, true, false, false, false];
        assert_eq!(behind.collect::<Vec<_>>(), expected);
        assert!(order.is_behind(&order.last_nodes(side), main));
        assert_eq!(order.query_count(), 9);
    }

    /// A stream that captured a chain of nodes, and its last nodes after each.
    fn chain(nodes: usize) -> (Graph, Order, usize, Vec<LastNodes>) {
        let (mut graph, mut order) = (Graph::default(), Order::default());
        let main = order.add_stream();
        let mut seen = Vec::new();
        for node in 0..nodes {
            let before: Vec<Edge> = node.checked_sub(1).map(full).into_iter().collect();
            graph.node(node, &before);
            graph.advance(&mut order, main, &[full(node)]);
            seen.push(order.last_nodes(main));
        }
        (graph, order, main, seen)
    }

    #[test]
    fn a_lone_stream_that_was_set_back_is_behind_its_new_dependencies() {
        let (mut graph, mut order, main, seen) = chain(5);
        graph.advance(&mut order, main, &[full(2)]);
        graph.node(9, &[full(2)]);
        graph.advance(&mut order, main, &[full(9)]);
        let behind = seen.iter().map(|seen| order.is_behind(seen, main));
        let expected = [true, true, true, false, false];
        assert_eq!(behind.collect::<Vec<_>>(), expected);
        // A node with an early start does not interrupt the chain.
        graph.node(10, &[early(9)]);
        let ninth = order.last_nodes(main);
        graph.advance(&mut order, main, &[full(10)]);
        let side = order.add_stream();
        graph.advance(&mut order, side, &[full(10)]);
        assert!(order.is_behind(&ninth, main) && !order.is_behind(&ninth, side));
    }

    #[test]
    fn a_lone_stream_that_went_on_elsewhere_is_not_behind_its_former_work() {
        let (mut graph, mut order, main, seen) = chain(4);
        // It was set back, and captured a node, between two calls.
        graph.node(9, &[full(1)]);
        graph.advance(&mut order, main, &[full(9)]);
        let behind = seen.iter().map(|seen| order.is_behind(seen, main));
        let expected = [true, true, false, false];
        assert_eq!(behind.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn after_an_abandoned_walk_a_stream_is_behind_nothing() {
        let (mut graph, mut order) = (Graph::default(), Order::default());
        let [main, _side] = [(); 2].map(|()| order.add_stream());
        graph.node(1, &[]);
        graph.advance(&mut order, main, &[full(1)]);
        let own = order.last_nodes(main);
        assert!(order.is_behind(&own, main));
        let asked = order.walk(main, &[full(2)]);
        order.give_up(&asked.unwrap().0);
        assert!(!order.is_behind(&own, main));
        graph.node(2, &[full(1)]);
        graph.advance(&mut order, main, &[full(2)]);
        assert!(order.is_behind(&own, main));
    }

    #[test]
    fn each_node_is_queried_once() {
        let (mut graph, mut order) = (Graph::default(), Order::default());
        let streams = [(); 3].map(|()| order.add_stream());
        graph.node(0, &[]);
        for node in 1..3000 {
            graph.node(node, &[full(node - 1)]);
            graph.advance(&mut order, streams[node % 3], &[full(node)]);
        }
        assert_eq!(order.query_count(), 3000);
        assert!(order.is_behind(&order.last_nodes(streams[0]), streams[2]));
    }
}
