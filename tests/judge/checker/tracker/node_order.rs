//! The nodes of a graph, and which of them come before which.

use std::collections::HashMap;

use crate::checker::ranges::Ranges;

/// A set of nodes by their numbers.
#[derive(Clone, Default)]
struct Nodes(Vec<u64>);

impl Nodes {
    fn has(&self, node: usize) -> bool {
        self.0
            .get(node / 64)
            .is_some_and(|w| w >> (node % 64) & 1 == 1)
    }

    fn add(&mut self, node: usize) {
        if self.0.len() <= node / 64 {
            self.0.resize(node / 64 + 1, 0);
        }
        self.0[node / 64] |= 1 << (node % 64);
    }

    fn join(&mut self, other: &Nodes) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (own, other) in self.0.iter_mut().zip(&other.0) {
            *own |= other;
        }
    }
}

/// A dependency on a node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Link {
    pub node: usize,
    /// The node is complete by then. Else it has begun.
    pub whole: bool,
}

/// Who captured a node: the capture, the stream, and the stream's stretch there: one that is set back begins another.
pub type Hand = (u64, usize, u32);

/// What comes before a point of a graph.
#[derive(Clone, Default)]
pub struct Past {
    /// Nodes that are complete.
    over: Nodes,
    /// Nodes that have begun, those among them.
    begun: Nodes,
}

/// Addresses that a node touches.
#[derive(Clone, Copy)]
pub struct Touch {
    pub start: u64,
    pub end: u64,
    /// The live block that it was in, as far as blocks were told of.
    pub block: Option<u64>,
    /// How many blocks had been handed out by then.
    pub born: u64,
}

#[derive(Clone)]
pub struct Node {
    past: Past,
    pub hand: Option<Hand>,
    pub touches: Vec<Touch>,
}

/// A graph's nodes.
#[derive(Clone, Default)]
pub struct NodeOrder {
    pub nodes: Vec<Node>,
    /// The driver's handles of nodes, as far as they were seen.
    pub handles: HashMap<u64, usize>,
    /// Nodes by the physical bytes that they touch, each as a stream of its own.
    used: Ranges,
}

impl NodeOrder {
    /// What comes before whatever depends on these.
    ///
    /// Of a node behind which the next one may begin early only what that node waited for is complete.
    pub fn past(&self, links: &[Link]) -> Past {
        let mut past = Past::default();
        for link in links {
            let before = &self.nodes[link.node].past;
            past.over.join(&before.over);
            past.begun.join(&before.begun);
            past.begun.add(link.node);
            if link.whole {
                past.over.add(link.node);
            }
        }
        past
    }

    /// Whether a node is done with its bytes at a point that a hand has reached: it is complete, or the hand's own
    /// from before, since what begins early waits before it touches what came later.
    fn is_behind(&self, past: &Past, hand: Hand, node: usize) -> bool {
        past.over.has(node) || (self.nodes[node].hand == Some(hand) && past.begun.has(node))
    }

    /// Whether all of these have begun at a point.
    pub fn have_begun(past: &Past, links: &[Link]) -> bool {
        links.iter().all(|link| past.begun.has(link.node))
    }

    /// Adds a node, with the physical bytes that it touches; its number.
    pub fn add(
        &mut self,
        links: &[Link],
        hand: Option<Hand>,
        touches: Vec<Touch>,
        parts: &[(u64, u64)],
    ) -> usize {
        let past = self.past(links);
        let node = self.nodes.len();
        for &(from, to) in parts {
            // Who is behind this one is behind those before it.
            let before = |used: (usize, u64)| past.over.has(used.0);
            let _ = self.used.find(from, to, before, |_| true);
            self.used.add(from, to, (node, 0));
        }
        self.nodes.push(Node {
            past,
            hand,
            touches,
        });
        node
    }

    /// A node that touches some of these physical bytes and that a hand is not behind: the byte, and the node.
    pub fn beside(
        &mut self,
        links: &[Link],
        hand: Hand,
        (from, to): (u64, u64),
    ) -> Option<(u64, usize)> {
        let past = self.past(links);
        let mut used = std::mem::take(&mut self.used);
        let fine = |used: (usize, u64)| self.is_behind(&past, hand, used.0);
        let found = used.find(from, to, |_| false, fine);
        self.used = used;
        found.map(|(at, (node, _))| (at, node))
    }
}
