//! Steps of programs on present memory, and errors for suspended memory.

use super::super::support::*;
use super::{Captured, Held, Home, Program};

impl Program<'_> {
    pub(super) fn allocate(&mut self) {
        let (stream, bytes) = (self.random.index(3), self.bytes());
        let home = match self.random.index(3) {
            0 => Home::Pool(self.random.index(self.pools.len())),
            _ => Home::Stream,
        };
        let scope = match home {
            Home::Pool(pool) => Some(self.pools[pool].enter(Scope::Thread).unwrap()),
            Home::Stream => None,
        };
        let got = self.allocator.allocate(bytes, &self.streams[stream]);
        drop(scope);
        let gone = match home {
            Home::Pool(pool) => self.away[pool],
            Home::Stream => self.arenas,
        };
        match got {
            Ok(block) => {
                assert!(!gone, "memory that is away was given out");
                self.held.push(Held {
                    block,
                    home,
                    stream,
                    word: None,
                    captured: false,
                });
                // New memory of a stream that is away lies where there is memory.
                let (at, word) = (self.held.len() - 1, self.word());
                let held = &mut self.held[at];
                let bytes = held.block.requested() / 4 * 4;
                let stream = &self.streams[held.stream];
                self.rig.stamp(held.block.ptr(), bytes, word, stream);
                held.word = Some(word);
            }
            Err(Error::Suspended) => assert!(gone, "there is memory"),
            Err(Error::OutOfMemory(_)) => {}
            Err(error) => panic!("{error:?}"),
        }
    }

    pub(super) fn free(&mut self) {
        if let Some(at) = self.one() {
            drop(self.held.swap_remove(at));
        }
    }

    /// Another stream uses a block, between two uses of its own.
    pub(super) fn share(&mut self) {
        let Some(at) = self.one() else { return };
        let (other, held) = (self.random.index(3), &self.held[at]);
        let stream = &self.streams[held.stream];
        if !self.is_there(held) {
            // Legal, and of no consequence.
            held.block.record_stream(&self.streams[other]).unwrap();
            return;
        }
        self.streams[other].wait_for(stream).unwrap();
        let (ptr, bytes) = (held.block.ptr(), held.block.requested() / 4 * 4);
        let word = self.word();
        self.rig.stamp(ptr, bytes, word, &self.streams[other]);
        let held = &mut self.held[at];
        held.block.record_stream(&self.streams[other]).unwrap();
        self.streams[held.stream]
            .wait_for(&self.streams[other])
            .unwrap();
        held.word = Some(word);
    }

    pub(super) fn capture(&mut self) {
        let (pool, stream) = (self.random.index(self.pools.len()), self.random.index(3));
        let (inner, bytes) = (self.bytes(), self.bytes());
        let (word, stream) = (self.word(), &self.streams[stream]);
        let scope = self.pools[pool].enter(Scope::NextCapture).unwrap();
        let under_way = Capturing::begin(stream, MODE);
        let output = (|| {
            let inner = self.allocator.allocate(inner.max(bytes), stream)?;
            self.rig.stamp(inner.ptr(), bytes, word, stream);
            let output = self.allocator.allocate(bytes, stream)?;
            // SAFETY: both are live, and the copy is captured.
            unsafe { stream.memcpy(output.ptr(), inner.ptr(), bytes) }.unwrap();
            Ok(output)
        })();
        let graph = under_way.end().unwrap();
        scope.leave().unwrap();
        match output {
            Ok(block) => {
                assert!(!self.away[pool]);
                self.graphs.push(Captured {
                    exec: graph.instantiate().unwrap(),
                    pool,
                    output: block.ptr(),
                    bytes,
                    word,
                });
                self.held.push(Held {
                    block,
                    home: Home::Pool(pool),
                    stream: 0,
                    word: None,
                    captured: true,
                });
            }
            Err(Error::Suspended) => assert!(self.away[pool]),
            Err(Error::OutOfMemory(_)) => {}
            Err(error) => panic!("{error:?}"),
        }
    }

    /// Launches of a pool are in order, and so is everything that uses it.
    pub(super) fn launch(&mut self) {
        if self.graphs.is_empty() {
            return;
        }
        let at = self.random.index(self.graphs.len());
        if self.random.index(8) == 0 {
            drop(self.graphs.swap_remove(at));
            return;
        }
        let pool = self.graphs[at].pool;
        let stream = self.streams[self.random.index(3)].clone();
        match self.pools[pool].launching() {
            Ok(()) => assert!(!self.away[pool]),
            Err(Error::Suspended) => {
                assert!(self.away[pool]);
                return;
            }
            Err(error) => panic!("{error:?}"),
        }
        for other in &self.streams {
            stream.wait_for(other).unwrap();
        }
        let graph = &mut self.graphs[at];
        // SAFETY: the pool's memory is there, and its launches are in order.
        unsafe { graph.exec.launch(&stream) }.unwrap();
        for other in &self.streams {
            other.wait_for(&stream).unwrap();
        }
        self.seen.launched += 1;
        // Data of other graphs may be overwritten; data outside of graphs is not.
        let (output, bytes, word) = (graph.output, graph.bytes, graph.word);
        let captured = self
            .held
            .iter_mut()
            .filter(|held| held.captured && held.home == Home::Pool(pool));
        for held in captured {
            let own = held.block.ptr() == output && held.block.requested() == bytes;
            held.word = own.then_some(word);
        }
    }
}
