//! Captures of a program: forks, joins, blocks that come and go, and their ends.

use cualloc::driver::Dependency;

use super::*;

/// Lets the next node begin while a kernel runs.
const EARLY: CUgraphEdgeData = CUgraphEdgeData {
    from_port: 1,
    to_port: 0,
    type_: 1,
    reserved: [0; 5],
};

/// A block that a capture uses, and the streams whose nodes do.
struct Used {
    ptr: u64,
    by: Vec<usize>,
}

/// A capture under way.
pub(super) struct Capture {
    pub group: usize,
    main: usize,
    joined: Vec<usize>,
    /// By which it gets memory. Once it was left, the capture gets no more memory, and others may get what it freed.
    scope: Option<PoolScope>,
    left: bool,
    used: Vec<Used>,
}

impl Capture {
    /// Whether it may get memory.
    fn serves(&self) -> bool {
        self.scope.is_some()
    }

    /// Whether a request on a stream may find that the capture's scope was left.
    pub fn has_left(&self, stream: usize) -> bool {
        self.left && self.has(stream)
    }

    pub fn has(&self, stream: usize) -> bool {
        self.joined.contains(&stream)
    }
}

impl Scene<'_> {
    pub(super) fn begin(&mut self) -> Done {
        if self.captures.len() > 1 {
            return Ok(());
        }
        let (Some(group), Some(main)) = (self.group(), self.stream()) else {
            return Ok(());
        };
        let stream = self.streams[main].clone();
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        ours(|| stream.begin_capture(mode)).map_err(text)?;
        let id = ours(|| stream.capture_id()).map_err(text)?;
        let Some(id) = id else {
            return Err("a capture without an id".to_owned());
        };
        let scope = self.scope(group, id)?;
        self.captures.push(Capture {
            group,
            main,
            joined: vec![main],
            scope,
            left: false,
            used: Vec::new(),
        });
        Ok(())
    }

    fn scope(&self, group: usize, capture: u64) -> Result<Option<PoolScope>, String> {
        match self.pool(group).enter(Scope::Capture(capture)) {
            Ok(scope) => Ok(Some(scope)),
            Err(error) => self.refused("a scope was refused", &error).map(|()| None),
        }
    }

    /// A capture's scope is left before its end.
    fn leave_scope(&mut self, at: usize) {
        let capture = &mut self.captures[at];
        capture.left |= capture.scope.take().is_some();
    }

    /// One thing in a capture.
    pub(super) fn captured(&mut self) -> Done {
        let at = self.rng.index(self.captures.len());
        let capture = &self.captures[at];
        let (group, serves) = (capture.group, capture.serves());
        let stream = self.rng.pick(&capture.joined);
        match self.rng.below(16) {
            0..6 if serves => {
                if let Some(block) = self.obtain(Some(group), stream)? {
                    let place = (block.ptr(), block.requested());
                    self.held.push(Held {
                        block,
                        group: Some(group),
                        home: stream,
                        last: stream,
                        frozen: false,
                    });
                    if self.rng.chance(85) {
                        self.node(at, place, stream)?;
                    }
                }
            }
            6..9 => self.free_of(group),
            9..11 if serves && !self.captures[at].left => self.use_in(at, stream)?,
            11 => {
                // A fork.
                if let Some(other) = self.stream() {
                    self.wait(other, stream)?;
                    self.captures[at].joined.push(other);
                }
            }
            12 => self.early(at, stream)?,
            13 => self.set_back(at, stream)?,
            14 if self.rng.chance(10) => self.leave_scope(at),
            _ => {
                let other = self.rng.pick(&self.captures[at].joined);
                self.wait(stream, other)?;
            }
        }
        Ok(())
    }

    fn wait(&self, stream: usize, of: usize) -> Done {
        if stream == of {
            return Ok(());
        }
        let (stream, of) = (&self.streams[stream], &self.streams[of]);
        ours(|| stream.wait_for(of)).map_err(text)
    }

    /// A node that uses a block, behind the other nodes that do.
    fn node(&mut self, capture: usize, place: (u64, usize), stream: usize) -> Done {
        let used = &mut self.captures[capture].used;
        let before = match used.iter_mut().find(|used| used.ptr == place.0) {
            Some(used) => std::mem::replace(&mut used.by, vec![stream]),
            None => {
                used.push(Used {
                    ptr: place.0,
                    by: vec![stream],
                });
                Vec::new()
            }
        };
        for other in before {
            self.wait(stream, other)?;
        }
        self.touch(place, stream)
    }

    /// A block of the capture's pools goes: one of its own, or an earlier one.
    fn free_of(&mut self, group: usize) {
        let held = &self.held;
        let some: Vec<usize> = (0..held.len())
            .filter(|&at| held[at].group == Some(group))
            .collect();
        if !some.is_empty() {
            let at = some[self.rng.index(some.len())];
            let held = self.held.swap_remove(at);
            self.free_in(held);
        }
    }

    fn free_in(&mut self, held: Held) {
        let ptr = held.block.ptr();
        // The next block at the address is another one.
        for capture in &mut self.captures {
            capture.used.retain(|used| used.ptr != ptr);
        }
        self.free(held);
    }

    /// A stream of the capture uses a block, which is recorded unless it is the block's own.
    fn use_in(&mut self, capture: usize, stream: usize) -> Done {
        let group = self.captures[capture].group;
        let fits = |held: &Held| {
            let here = self.captures[capture].has(held.home) || !self.is_capturing(held.home);
            held.group == Some(group) && !held.frozen && here
        };
        let some: Vec<usize> = (0..self.held.len())
            .filter(|&at| fits(&self.held[at]))
            .collect();
        if some.is_empty() {
            return Ok(());
        }
        let at = some[self.rng.index(some.len())];
        let held = &self.held[at];
        let (place, home) = ((held.block.ptr(), held.block.requested()), held.home);
        if self.captures[capture].has(home) {
            // It was allocated in the order of its own stream.
            self.wait(stream, home)?;
        }
        if stream == home && self.rng.chance(40) && !self.checker.is_failing() {
            // The free finds that its stream captures.
            self.node(capture, place, stream)?;
            let held = self.held.swap_remove(at);
            self.free_in(held);
            return Ok(());
        }
        // One that is not of this capture belongs to this graph only if a call says so.
        if !self.record(at, stream)? {
            return Ok(());
        }
        self.node(capture, place, stream)
    }

    fn present(&self, stream: usize) -> Result<Vec<Dependency>, String> {
        let stream = &self.streams[stream];
        let info = ours(|| stream.capture_info()).map_err(text)?;
        Ok(info.map(|info| info.dependencies).unwrap_or_default())
    }

    fn depend(&self, stream: usize, on: &[Dependency], as_well: bool) -> Done {
        let (raw, driver) = (self.streams[stream].raw(), self.context.driver());
        // SAFETY: nodes of the stream's capture.
        ours(|| unsafe { driver.set_capture_dependencies(raw, on, as_well) }).map_err(text)
    }

    /// Another stream begins while a kernel of this one, whose block is freed, may run.
    fn early(&mut self, capture: usize, stream: usize) -> Done {
        let group = self.captures[capture].group;
        let other = self.rng.pick(&self.captures[capture].joined);
        if other == stream || !self.captures[capture].serves() {
            return Ok(());
        }
        self.wait(other, stream)?;
        let Some(block) = self.obtain(Some(group), stream)? else {
            return Ok(());
        };
        self.kernel((block.ptr(), block.requested()), stream)?;
        self.free_here(block);
        let (last, before) = (self.present(stream)?, self.present(other)?);
        let early: Vec<Dependency> = last.iter().map(|on| on.with_edge(EARLY)).collect();
        self.depend(other, &early, true)?;
        // Only a kernel may begin early.
        let Some(block) = self.obtain(Some(group), other)? else {
            return self.depend(other, &before, false);
        };
        self.kernel((block.ptr(), block.requested()), other)?;
        self.free_here(block);
        Ok(())
    }

    /// Frees a block where its stream is named: a free by another thread counts from the stream's next call on, and
    /// the stream may have been set back by then.
    fn free_here(&self, block: Block) {
        self.checker.tracker().freed(block.ptr());
        drop(block);
    }

    fn kernel(&mut self, (ptr, bytes): (u64, usize), stream: usize) -> Done {
        let (words, seed) = (bytes as u64 / 4, 7_u32);
        let on = &self.streams[stream];
        let fill = self.fill;
        // SAFETY: the kernel writes the block.
        ours(|| unsafe { fill.launch(on, [8, 1, 1], [256, 1, 1], 0, &[&ptr, &words, &seed]) })
            .map_err(text)
    }

    /// What a stream did last runs beside what it does next; in the end it is behind both.
    fn set_back(&mut self, capture: usize, stream: usize) -> Done {
        let before = self.present(stream)?;
        let group = self.captures[capture].group;
        let serves = self.captures[capture].serves();
        if before.is_empty() || !serves || self.checker.is_failing() {
            return Ok(());
        }
        let mut branch = before.clone();
        for back in [true, false] {
            if let Some(block) = self.obtain(Some(group), stream)? {
                self.touch((block.ptr(), block.requested()), stream)?;
                self.free_here(block);
            }
            if back {
                branch = self.present(stream)?;
                self.depend(stream, &before, false)?;
            }
        }
        self.depend(stream, &branch, true)
    }

    /// A capture ends, with a graph or, if a stream was not joined or the capture was invalidated, without.
    pub(super) fn end_capture(&mut self) -> Done {
        let at = self.rng.index(self.captures.len());
        let spoilt = self.rng.chance(6);
        let main = self.captures[at].main;
        if spoilt {
            let raw = self.streams[main].raw();
            // SAFETY: alive; the question is refused, and reported.
            let _ = own(|f| unsafe { f.cuStreamQuery.unwrap()(raw) });
            drop(self.sim.take_reports());
        } else {
            for other in self.captures[at].joined.clone() {
                self.wait(main, other)?;
            }
        }
        let early = self.rng.chance(50);
        let mut capture = self.captures.swap_remove(at);
        if early {
            drop(capture.scope.take());
        }
        let stream = &self.streams[main];
        let ended = ours(|| stream.end_capture());
        drop(capture.scope);
        match ended {
            Ok(_) if spoilt => Err("a capture that was spoilt ended well".to_owned()),
            Err(_) if spoilt => Ok(()),
            Err(error) => Err(format!("a capture ended with {error:?}")),
            Ok(graph) => {
                let exec = ours(|| graph.instantiate()).map_err(text)?;
                self.made.push(Made {
                    group: capture.group,
                    graph: Some(graph),
                    execs: vec![exec],
                });
                Ok(())
            }
        }
    }
}
