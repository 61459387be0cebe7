//! The order of a capture's nodes, as far as it was asked for: which of them are over before what a stream
//! captures next begins.
//!
//! Nodes only come, so what was learnt of one stays true. Each node is asked for once in a capture, and looked at
//! once for each stream: a capture of n nodes costs n questions, and n steps a stream.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::allocator::extent::hash::Mixed;

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
    nodes: Box<[usize]>,
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
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Order {
    dependencies: HashMap<usize, Box<[Edge]>, Mixed>,
    streams: Vec<Reach>,
    /// The memory of a walk that is over, for the next one.
    spare: Walk,
}

/// A walk back from what a stream's next node depends on.
#[derive(Debug, Default)]
pub(crate) struct Walk {
    stream: usize,
    present: Vec<Edge>,
    todo: Vec<usize>,
    /// Nodes of the stream's former present that were not met so far.
    unmet: Vec<usize>,
    anew: bool,
}

impl Order {
    /// A stream joins the capture; its place there.
    pub(crate) fn add_stream(&mut self) -> usize {
        self.streams.push(Reach::default());
        self.streams.len() - 1
    }

    /// Begins to find out what a stream is behind, which now depends on these nodes. `None` if that is known.
    pub(crate) fn walk(
        &mut self,
        stream: usize,
        present: impl Iterator<Item = Edge>,
    ) -> Option<Walk> {
        let mut walk = std::mem::take(&mut self.spare);
        walk.present.clear();
        walk.present.extend(present);
        walk.present.sort_unstable();
        let reach = &self.streams[stream];
        if reach.present == walk.present {
            self.spare = walk;
            return None;
        }
        (walk.stream, walk.anew) = (stream, false);
        walk.todo.clear();
        walk.unmet.clear();
        walk.unmet
            .extend(reach.present.iter().map(|edge| edge.node));
        self.start(&mut walk);
        Some(walk)
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
            meet(reach, walk, begun);
        }
    }

    /// Goes on with a walk as far as dependencies are known; the next node whose dependencies are to be
    /// [learnt](Self::learn), or `None` at the end.
    pub(crate) fn next(&mut self, walk: &mut Walk) -> Option<usize> {
        loop {
            let reach = &mut self.streams[walk.stream];
            while let Some(node) = walk.todo.last() {
                let Some(dependencies) = self.dependencies.get(node) else {
                    return Some(*node);
                };
                walk.todo.pop();
                for edge in dependencies {
                    meet(reach, walk, *edge);
                }
            }
            if walk.unmet.is_empty() || walk.anew {
                break;
            }
            // The stream did not go forward: nothing that it was behind counts any more.
            walk.anew = true;
            reach.nodes.clear();
            reach.epoch += 1;
            self.start(walk);
        }
        std::mem::swap(&mut self.streams[walk.stream].present, &mut walk.present);
        self.spare = std::mem::take(walk);
        None
    }

    /// A walk could not go on: what it met is not known to be behind anything.
    pub(crate) fn give_up(&mut self, walk: &Walk) {
        let reach = &mut self.streams[walk.stream];
        reach.nodes.clear();
        reach.present.clear();
        reach.epoch += 1;
    }

    /// What a node depends on.
    pub(crate) fn learn(&mut self, node: usize, dependencies: impl Iterator<Item = Edge>) {
        self.dependencies.insert(node, dependencies.collect());
    }

    /// Nodes that were asked for.
    #[cfg(test)]
    pub(crate) fn asked(&self) -> usize {
        self.dependencies.len()
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

/// A walk meets a node behind an edge.
fn meet(reach: &mut Reach, walk: &mut Walk, edge: Edge) {
    if !walk.anew {
        walk.unmet.retain(|node| *node != edge.node);
    }
    match reach.nodes.entry(edge.node) {
        Entry::Occupied(mut known) => *known.get_mut() |= edge.full,
        Entry::Vacant(new) => {
            new.insert(edge.full);
            walk.todo.push(edge.node);
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
            let Some(mut walk) = order.walk(stream, present.iter().copied()) else {
                return;
            };
            while let Some(node) = order.next(&mut walk) {
                let known = self.0.get(&node).map_or(&[][..], Vec::as_slice);
                order.learn(node, known.iter().copied());
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
