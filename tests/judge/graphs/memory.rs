//! Blocks outside of captures, checkpoints, and memory that goes away.

use cualloc::allocator::Contents;

use super::*;

impl Scene<'_> {
    fn bytes(&mut self) -> usize {
        let bytes = match self.rng.below(4) {
            0 => (1 + self.rng.below(40)) * 512,
            1 => (1 + self.rng.below(30)) << 16,
            _ => ((1 + self.rng.below(16)) << 19) + 512,
        };
        bytes as usize
    }

    /// A request on a stream, as it was sent to a pool or to none.
    pub(super) fn obtain(
        &mut self,
        group: Option<usize>,
        stream: usize,
    ) -> Result<Option<Block>, String> {
        let bytes = self.bytes();
        let made = self.allocator.allocate(bytes, &self.streams[stream]);
        let block = match made {
            Ok(block) => block,
            Err(Error::Capturing { .. }) if self.captures.iter().any(|c| c.has_left(stream)) => {
                return Ok(None);
            }
            Err(error) => {
                self.refused("an allocation was refused", &error)?;
                return Ok(None);
            }
        };
        let number = group.map(|group| self.groups[group].number);
        let lane = self.number(stream);
        let mut tracker = self.checker.tracker();
        tracker.handed_out_of(number, block.ptr(), bytes as u64, lane);
        tracker.take_violation().map_or(Ok(()), Err)?;
        Ok(Some(block))
    }

    /// Work on a block, all of it or a part.
    pub(super) fn touch(&mut self, at: (u64, usize), stream: usize) -> Done {
        let (ptr, bytes) = at;
        let part = if self.rng.chance(70) {
            bytes
        } else {
            bytes / 2
        };
        let (word, on) = (self.rng.next() as u32, self.streams[stream].raw());
        let fill = || {
            let entered = self.context.enter()?;
            // SAFETY: memory and stream are live.
            unsafe { entered.memset_d32(ptr, word, part / 4, on) }
        };
        ours(fill).map_err(text)
    }

    /// A block outside of captures, of a pool or of none.
    pub(super) fn allocate(&mut self) -> Done {
        let Some(stream) = self.stream().filter(|_| !self.away) else {
            return Ok(());
        };
        let (group, scope) = match self.rng.chance(60) {
            true => match self.group() {
                Some(group) => {
                    let by_thread = self.rng.chance(50);
                    let pool = self.pool(group);
                    let scope = match by_thread {
                        true => pool.enter(Scope::Thread),
                        false => pool.enter(Scope::Stream(&self.streams[stream])),
                    };
                    match scope {
                        Ok(scope) => (Some(group), Some(scope)),
                        Err(error) => return self.refused("a scope was refused", &error),
                    }
                }
                None => (None, None),
            },
            false => (None, None),
        };
        let block = self.obtain(group, stream)?;
        drop(scope);
        if let Some(block) = block {
            self.held.push(Held {
                block,
                group,
                home: stream,
                last: stream,
                frozen: false,
            });
            if self.rng.chance(70) {
                self.use_on(self.held.len() - 1, stream)?;
            }
        }
        Ok(())
    }

    /// Uses a block outside of captures, in order.
    fn use_on(&mut self, at: usize, stream: usize) -> Done {
        let held = &self.held[at];
        let (place, group) = ((held.block.ptr(), held.block.requested()), held.group);
        match group {
            Some(group) => self.follow(group, stream)?,
            None if held.last != stream => {
                let (from, to) = (&self.streams[held.last], &self.streams[stream]);
                ours(|| to.wait_for(from)).map_err(text)?;
            }
            None => {}
        }
        self.touch(place, stream)?;
        self.held[at].last = stream;
        match group {
            Some(group) => self.followed(group, stream),
            None => Ok(()),
        }
    }

    pub(super) fn work(&mut self) -> Done {
        let usable = |held: &Held| {
            let there = !held.group.is_some_and(|group| self.groups[group].asleep);
            let idle = !self.is_capturing(held.home) && !self.is_capturing(held.last);
            there && idle && !held.frozen && !self.away
        };
        let some: Vec<usize> = (0..self.held.len())
            .filter(|&at| usable(&self.held[at]))
            .collect();
        if some.is_empty() {
            return Ok(());
        }
        let at = some[self.rng.index(some.len())];
        let home = self.held[at].home;
        let Some(stream) = self.stream().filter(|_| self.rng.clone().chance(50)) else {
            return self.use_on(at, home);
        };
        if stream != home && !self.record(at, stream)? {
            return Ok(());
        }
        self.use_on(at, stream)
    }

    /// Records a stream on a block; false if that was refused.
    pub(super) fn record(&mut self, at: usize, stream: usize) -> Result<bool, String> {
        let block = &self.held[at].block;
        match block.record_stream(&self.streams[stream]) {
            Ok(()) => {
                let (ptr, lane) = (block.ptr(), self.number(stream));
                self.checker.tracker().recorded(ptr, lane);
                Ok(true)
            }
            Err(error) => {
                self.refused("a use could not be recorded", &error)?;
                Ok(false)
            }
        }
    }

    pub(super) fn free_some(&mut self) {
        if !self.held.is_empty() {
            let at = self.rng.index(self.held.len());
            let held = self.held.swap_remove(at);
            self.free(held);
        }
    }

    /// Frees a block, now and then on another thread.
    pub(super) fn free(&mut self, held: Held) {
        self.checker.tracker().freed(held.block.ptr());
        if !self.rng.chance(8) {
            return drop(held.block);
        }
        let checker = Arc::clone(self.checker);
        std::thread::scope(|threads| {
            threads.spawn(move || {
                checker.enter();
                drop(held.block);
                Checker::leave();
            });
        });
    }

    // ---- checkpoints -----------------------------------------------------------------------

    pub(super) fn point(&mut self) -> Done {
        let Some(group) = self.group() else {
            return Ok(());
        };
        if self.groups[group].points.len() < 3 {
            match self.pool(group).checkpoint() {
                Ok(point) => self.groups[group].points.push(point),
                Err(error) => return self.refused("no checkpoint", &error),
            }
        }
        Ok(())
    }

    /// Restores an earlier checkpoint, if the pool allows it.
    pub(super) fn restore(&mut self) -> Done {
        let Some(group) = self.group() else {
            return Ok(());
        };
        let points = self.groups[group].points.len();
        if points == 0 {
            return Ok(());
        }
        let point = self.rng.index(points);
        if !self.captures.is_empty() && self.rng.chance(80) {
            return Ok(());
        }
        let it = &self.groups[group];
        // SAFETY: blocks that cease are only freed.
        let restored = match unsafe { self.pool(group).restore(&it.points[point]) } {
            Ok(restored) => restored,
            Err(Error::GraphPool(_)) => return Ok(()),
            Err(error) => return self.refused("a pool did not come back", &error),
        };
        let mut tracker = self.checker.tracker();
        for block in &restored.ceased {
            tracker.freed(*block);
        }
        for block in &restored.revived {
            tracker.revived(it.number, block.ptr(), block.requested() as u64);
        }
        drop(tracker);
        let held = std::mem::take(&mut self.held).into_iter();
        let (lost, kept) = held.partition(|held| restored.ceased.contains(&held.block.ptr()));
        self.held = kept;
        for held in <Vec<Held> as IntoIterator>::into_iter(lost) {
            match held.block.free() {
                // An owner of nothing.
                Err(refused) => std::mem::forget(refused),
                Ok(()) => return Err("a block that ceased was freed".to_owned()),
            }
        }
        let revived = restored.revived.into_iter();
        self.held.extend(revived.map(|block| Held {
            block,
            group: Some(group),
            home: 0,
            last: 0,
            frozen: true,
        }));
        Ok(())
    }

    // ---- memory that is away ---------------------------------------------------------------

    pub(super) fn suspend(&mut self) -> Done {
        let asleep = self.groups.iter().position(|group| group.asleep);
        if let Some(group) = asleep {
            return match self.rng.chance(40) {
                true => self.disturb(group),
                false => self.resume(group),
            };
        }
        let keep = self
            .rng
            .pick(&[Contents::Drop, Contents::Pinned, Contents::Host]);
        if self.rng.chance(25) {
            return self.suspend_all(keep);
        }
        let Some(group) = self.group() else {
            return Ok(());
        };
        let number = [Some(self.groups[group].number)];
        self.checker.tracker().sleeps(&number);
        let select = Select::Pool(self.pool(group));
        // SAFETY: no work that uses the memory is submitted until it is restored.
        let result = unsafe { self.allocator.suspend(select, keep) };
        let asleep = self.allocator.is_suspended(select).map_err(text)?;
        self.groups[group].asleep = asleep;
        if !asleep {
            self.checker.tracker().wakes(&number);
        }
        match result {
            Ok(_) | Err(Error::Capturing { .. }) => Ok(()),
            Err(error) => self.refused("a suspension was refused", &error),
        }
    }

    /// A request for memory that is away.
    fn disturb(&mut self, group: usize) -> Done {
        let (Some(stream), Some(pool)) = (self.stream(), &self.groups[group].pool) else {
            return Ok(());
        };
        let scope = match pool.enter(Scope::Thread) {
            Ok(scope) => scope,
            Err(error) => return self.refused("a scope was refused", &error),
        };
        let made = self.allocator.allocate(1 << 20, &self.streams[stream]);
        drop(scope);
        match made {
            Err(Error::Suspended) => Ok(()),
            Err(error) => self.refused("a request for memory that is away", &error),
            Ok(block) => Err(format!("{:#x} is handed out while it is away", block.ptr())),
        }
    }

    fn everything(&self) -> Vec<Option<u64>> {
        let groups = self.groups.iter().map(|group| Some(group.number));
        groups.chain([None]).collect()
    }

    fn suspend_all(&mut self, keep: Contents) -> Done {
        self.checker.tracker().sleeps(&self.everything());
        // SAFETY: as above.
        let result = unsafe { self.allocator.suspend(Select::Allocator, keep) };
        self.away = self
            .allocator
            .is_suspended(Select::Allocator)
            .map_err(text)?;
        for group in &mut self.groups {
            group.asleep = self.away;
        }
        if !self.away {
            self.checker.tracker().wakes(&self.everything());
        }
        match result {
            Ok(_) | Err(Error::Capturing { .. }) => Ok(()),
            Err(error) => self.refused("a suspension was refused", &error),
        }
    }

    /// A group's memory comes back, or all of it.
    pub(super) fn resume(&mut self, group: usize) -> Done {
        if !self.groups[group].asleep {
            return Ok(());
        }
        let (select, back) = match self.away {
            true => (Select::Allocator, self.everything()),
            false => {
                let number = Some(self.groups[group].number);
                (Select::Pool(self.pool(group)), vec![number])
            }
        };
        match self.allocator.resume(select) {
            Ok(_) => {}
            Err(error) => return self.refused("memory did not come back", &error),
        }
        self.checker.tracker().wakes(&back);
        for group in &mut self.groups {
            group.asleep &= !back.contains(&Some(group.number));
        }
        self.away = false;
        Ok(())
    }
}
