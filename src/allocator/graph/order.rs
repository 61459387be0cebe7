//! The order of a capture's nodes, as far as it was asked for: which of them are over before what a stream
//! captures next begins.
//!
//! Nodes only come, so what was learnt of one stays true. Each node is asked for once in a capture, and looked at
//! once for each stream: a capture of n nodes costs n questions, and n steps a stream. While a capture has one stream, and
//! each node depends on the one before, that is all there is to know, and it is noted when another stream joins; a node
//! that such a stream is set back to is asked for once more.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::allocator::extent::hash::Mixed;
use crate::allocator::graph::few::Few;

/// A dependency: the node that comes before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Edge {
    pub node: usize,
    /// What comes after begins only when the node is over and what it wrote can be seen. Else it may begin as soon
    /// as the node has begun.
    pub full: bool,
}

/// A use of memory that a capture knows: the nodes that were a stream's last ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    /// The stream's place in the capture.
    pub stream: usize,
    epoch: u32,
    nodes: Few<usize>,
}

/// What one stream of a capture is behind.
#[derive(Debug, Default)]
struct Reach {
    /// What the stream's next node depends on.
    present: Vec<Edge>,
    /// Nodes that have begun before the present point; true if they are over by then.
    nodes: HashMap<usize, bool, Mixed>,
    /// How often the present point went elsewhere than forward.
    epoch: u32,
    /// Nodes that came one behind another, each with the former as its only dependency, the first of them one of
    /// `nodes`, the last one the present: not noted anywhere else yet.
    chain: Vec<usize>,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Order {
    dependencies: HashMap<usize, Few<Edge>, Mixed>,
    streams: Vec<Reach>,
    /// The memory of a walk that is over, for the next one.
    spare: Option<Box<Walk>>,
}

/// A walk back from what a stream's next node depends on.
#[derive(Debug, Default)]
pub(crate) struct Walk {
    stream: usize,
    present: Vec<Edge>,
    todo: Vec<usize>,
    /// It has begun with the only node of a stream that is alone, and that depended on one before: nothing was met.
    step: bool,
    /// Nodes of the stream's former present that were not met so far.
    unmet: Vec<usize>,
    anew: bool,
}

impl Order {
    /// A stream joins the capture; its place there.
    pub(crate) fn add_stream(&mut self) -> usize {
        // From here on others look for what it captured.
        self.note();
        self.streams.push(Reach::default());
        self.streams.len() - 1
    }

    /// Finds out what a stream is behind, which now depends on these nodes, as far as dependencies are known. `None` at
    /// the end, else the next node whose dependencies are to be [learnt](Self::learn).
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
        // What comes next does not follow what came last.
        self.note();
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

    /// Meets the nodes that a walk begins with. They have begun before the next node; that they are over is known
    /// as long as the next node depends on them.
    fn start(&mut self, walk: &mut Walk) {
        let reach = &mut self.streams[walk.stream];
        for at in 0..walk.present.len() {
            let begun = Edge {
                full: false,
                ..walk.present[at]
            };
            walk.meet(reach, begun);
        }
    }

    /// Goes on with a walk, with what its node depends on; as [`walk`](Self::walk).
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
                    // Uses from before the stream was set back may be known by it.
                    reach.nodes.insert(edge.node, true);
                    reach.chain.push(edge.node);
                }
                reach.chain.push(node);
                std::mem::swap(&mut reach.present, &mut walk.present);
                self.spare = Some(walk);
                return None;
            }
            self.note();
            self.dependencies.insert(node, dependencies);
            return self.begin(walk);
        }
        if walk.todo.last() == Some(&node) {
            walk.todo.pop();
        }
        let reach = &mut self.streams[walk.stream];
        for edge in &dependencies {
            walk.meet(reach, *edge);
        }
        self.dependencies.insert(node, dependencies);
        self.next(walk)
    }

    /// Notes what came one behind another.
    fn note(&mut self) {
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
                    walk.meet(reach, *edge);
                }
            }
            if walk.unmet.is_empty() || walk.anew {
                break;
            }
            // The stream did not go forward: nothing that it was behind counts any more.
            walk.anew = true;
            reach.nodes.clear();
            reach.epoch += 1;
            self.start(&mut walk);
        }
        std::mem::swap(&mut self.streams[walk.stream].present, &mut walk.present);
        self.spare = Some(walk);
        None
    }

    /// A walk could not go on: what it met is not known to be behind anything.
    pub(crate) fn give_up(&mut self, walk: &Walk) {
        self.note();
        let reach = &mut self.streams[walk.stream];
        reach.nodes.clear();
        reach.present.clear();
        reach.epoch += 1;
    }

    /// Nodes that were asked for.
    #[cfg(test)]
    pub(crate) fn asked(&self) -> usize {
        let chains = self.streams.iter().map(|reach| &reach.chain);
        let steps = chains.map(|chain| chain.len().saturating_sub(1));
        self.dependencies.len() + steps.sum::<usize>()
    }

    /// A use by a stream until its present point.
    pub(crate) fn seen(&self, stream: usize) -> Seen {
        let reach = &self.streams[stream];
        Seen {
            stream,
            epoch: reach.epoch,
            nodes: reach.present.iter().map(|edge| edge.node).collect(),
        }
    }

    /// Whether a use is over before what a stream captures next begins.
    ///
    /// A stream that only went forward is behind all that it did itself: work that was launched to begin early
    /// touches what was allocated after its predecessor's launch only after it has waited for that.
    pub(crate) fn is_behind(&self, seen: &Seen, stream: usize) -> bool {
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
    /// Meets a node behind an edge.
    #[inline]
    fn meet(&mut self, reach: &mut Reach, edge: Edge) {
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
    fn a_stream_is_behind_what_it_joined_and_not_what_runs_beside_it() {
        let (mut graph, mut order) = (Graph::default(), Order::default());
        let [main, side] = [(); 2].map(|()| order.add_stream());
        graph.node(1, &[]);
        graph.node(2, &[full(1)]);
        graph.node(3, &[full(1)]);
        graph.advance(&mut order, main, &[full(2)]);
        graph.advance(&mut order, side, &[full(3)]);
        let (on_main, on_side) = (order.seen(main), order.seen(side));
        assert!(order.is_behind(&on_main, main) && order.is_behind(&on_side, side));
        assert!(!order.is_behind(&on_main, side) && !order.is_behind(&on_side, main));
        // The join.
        graph.advance(&mut order, main, &[full(2), full(3)]);
        assert!(order.is_behind(&on_side, main));
        graph.node(4, &[full(2), full(3)]);
        graph.advance(&mut order, main, &[full(4)]);
        assert!(order.is_behind(&on_side, main) && !order.is_behind(&on_main, side));
    }

    #[test]
    fn a_node_that_may_begin_early_is_not_behind_the_one_before_but_behind_what_that_waited_for() {
        let (mut graph, mut order) = (Graph::default(), Order::default());
        let [main, side] = [(); 2].map(|()| order.add_stream());
        graph.node(1, &[]);
        graph.advance(&mut order, main, &[full(1)]);
        let first = order.seen(main);
        graph.node(2, &[full(1)]);
        graph.advance(&mut order, main, &[full(2)]);
        let second = order.seen(main);
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
    fn a_stream_that_was_set_back_is_behind_what_it_finds_there_alone() {
        let (mut graph, mut order) = (Graph::default(), Order::default());
        let main = order.add_stream();
        graph.node(1, &[]);
        graph.node(2, &[full(1)]);
        graph.advance(&mut order, main, &[full(1)]);
        let first = order.seen(main);
        graph.advance(&mut order, main, &[full(2)]);
        let second = order.seen(main);
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
    fn what_a_stream_captured_alone_is_known_to_those_that_join() {
        let (mut graph, mut order) = (Graph::default(), Order::default());
        let main = order.add_stream();
        graph.node(0, &[]);
        graph.advance(&mut order, main, &[full(0)]);
        let mut seen = Vec::new();
        for node in 1..9 {
            graph.node(node, &[full(node - 1)]);
            graph.advance(&mut order, main, &[full(node)]);
            seen.push(order.seen(main));
            assert!(seen.iter().all(|seen| order.is_behind(seen, main)));
        }
        let side = order.add_stream();
        graph.advance(&mut order, side, &[full(5)]);
        let behind = seen.iter().map(|seen| order.is_behind(seen, side));
        let expected = [true, true, true, true, true, false, false, false];
        assert_eq!(behind.collect::<Vec<_>>(), expected);
        assert!(order.is_behind(&order.seen(side), main));
        assert_eq!(order.asked(), 9);
    }

    #[test]
    fn a_stream_that_is_alone_and_was_set_back_is_behind_what_it_finds_there() {
        let (mut graph, mut order) = (Graph::default(), Order::default());
        let main = order.add_stream();
        graph.node(0, &[]);
        graph.advance(&mut order, main, &[full(0)]);
        let mut seen = vec![order.seen(main)];
        for node in 1..5 {
            graph.node(node, &[full(node - 1)]);
            graph.advance(&mut order, main, &[full(node)]);
            seen.push(order.seen(main));
        }
        graph.advance(&mut order, main, &[full(2)]);
        graph.node(9, &[full(2)]);
        graph.advance(&mut order, main, &[full(9)]);
        let behind = seen.iter().map(|seen| order.is_behind(seen, main));
        let expected = [true, true, true, false, false];
        assert_eq!(behind.collect::<Vec<_>>(), expected);
        // One that may begin early is not in the way of the chain.
        graph.node(10, &[early(9)]);
        let ninth = order.seen(main);
        graph.advance(&mut order, main, &[full(10)]);
        let side = order.add_stream();
        graph.advance(&mut order, side, &[full(10)]);
        assert!(order.is_behind(&ninth, main) && !order.is_behind(&ninth, side));
    }

    #[test]
    fn each_node_is_asked_for_once() {
        let (mut graph, mut order) = (Graph::default(), Order::default());
        let streams = [(); 3].map(|()| order.add_stream());
        graph.node(0, &[]);
        for node in 1..3000 {
            graph.node(node, &[full(node - 1)]);
            graph.advance(&mut order, streams[node % 3], &[full(node)]);
        }
        assert_eq!(order.asked(), 3000);
        assert!(order.is_behind(&order.seen(streams[0]), streams[2]));
    }
}
