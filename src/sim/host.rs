//! Page-locked host memory: its lifetime and its users.

use super::args::{Host, Out};
use super::call::{R, fail};
use super::physical::HostBlock;
use super::race::{Access, Entry, History};
use super::reports::Report;
use super::state::State;
use super::work::{Op, Work};
use crate::driver::sys::*;
use std::cell::UnsafeCell;
use std::ffi::{c_uint, c_void};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

impl State {
    /// The page-locked block that holds a host address.
    pub(super) fn host_block_at(&self, address: u64) -> Option<(u64, &HostBlock)> {
        let (&start, block) = self.host_blocks.range(..=address).next_back()?;
        (address < start + block.bytes).then_some((start, block))
    }

    fn lock_host(&mut self, start: u64, bytes: u64, memory: Option<Box<[UnsafeCell<u128>]>>) {
        let block = HostBlock {
            memory,
            bytes,
            life: self.next_host_life,
            uses: Vec::new(),
            history: History::default(),
        };
        self.next_host_life += 1;
        self.host_blocks.insert(start, block);
    }

    /// Records the page-locked blocks that submitted work will use. Other memory is the caller's responsibility.
    pub(super) fn mark_host(&self, work: &mut Work) {
        let mark = |host: &mut Host| {
            let block = self.host_block_at(host.address() as u64);
            host.life = block.map_or(0, |(_, block)| block.life);
        };
        match work {
            Work::Upload { source, .. } => mark(source),
            Work::Download { target, .. } => mark(target),
            Work::HostCopy { target, source, .. } => {
                mark(target);
                mark(source);
            }
            _ => {}
        }
    }

    /// Whether the host memory of work that completes is still there; notes the use of page-locked memory.
    pub(super) fn host_lives(
        &mut self,
        queue: u32,
        op: &Op,
        host: Host,
        bytes: u64,
        access: Access,
    ) -> bool {
        if host.life == 0 || bytes == 0 {
            return true;
        }
        let address = host.address() as u64;
        let entry = self.entry(queue, op, address, bytes);
        let found = self.host_blocks.range_mut(..=address).next_back();
        let Some((&start, block)) = found.filter(|(_, block)| block.life == host.life) else {
            let site = self.site(&entry);
            self.report(Report::HostGone { site });
            self.fault(queue);
            return false;
        };
        match block.uses.iter_mut().find(|user| user.queue == queue) {
            Some(user) => *user = entry,
            None => block.uses.push(entry),
        }
        if self.config.races {
            let history = &mut block.history;
            let before = history.len() as u64;
            let first = history.access(address - start, bytes, &entry, access, &op.clock);
            let after = history.len() as u64;
            self.history_entries = (self.history_entries + after).saturating_sub(before);
            if let Some(first) = first {
                let report = Report::Race {
                    first: self.site(&first),
                    second: self.site(&entry),
                };
                self.report(report);
            }
        }
        true
    }

    /// Removes a block, and reports uses of it that the host has not observed complete.
    fn end_host(&mut self, start: u64) {
        let Some(block) = self.host_blocks.remove(&start) else {
            return;
        };
        self.history_entries = self
            .history_entries
            .saturating_sub(block.history.len() as u64);
        let open = |entry: &&Entry| !self.host.covers(entry.queue, entry.seq);
        let mut user = block.uses.iter().find(open).copied();
        for &queue in &self.active {
            for op in &self.queues[queue as usize].ops {
                let hosts = match op.work {
                    Work::Upload { source: host, .. } | Work::Download { target: host, .. } => {
                        [host, host]
                    }
                    Work::HostCopy { target, source, .. } => [target, source],
                    _ => continue,
                };
                if hosts.iter().any(|host| host.life == block.life) {
                    user = user.or(Some(self.entry(queue, op, start, block.bytes)));
                }
            }
        }
        if let Some(user) = user {
            let report = Report::InUse {
                call: self.now.name(),
                address: start,
                bytes: block.bytes,
                user: self.site(&user),
            };
            self.report(report);
        }
    }
}

#[allow(non_snake_case)]
impl State {
    pub(super) fn cuMemHostAlloc(
        &mut self,
        pp: Out<*mut c_void>,
        bytes: usize,
        _flags: c_uint,
    ) -> R {
        pp.check()?;
        self.current()?;
        self.refuse_during_capture()?;
        if bytes == 0 {
            return fail(INVALID);
        }
        let units = bytes.div_ceil(16);
        let mut block = Vec::new();
        if block.try_reserve_exact(units).is_err() {
            return fail(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        block.resize_with(units, || UnsafeCell::new(0u128));
        let memory = block.into_boxed_slice();
        let pointer = memory.as_ptr().cast_mut();
        self.lock_host(pointer as u64, bytes as u64, Some(memory));
        pp.set(pointer.cast())
    }

    pub(super) fn cuMemFreeHost(&mut self, p: *mut c_void) -> R {
        self.refuse_during_capture()?;
        if p.is_null() {
            return Ok(());
        }
        match self.host_blocks.get(&(p as u64)) {
            Some(block) if block.memory.is_some() => {}
            Some(_) => return fail(INVALID),
            None => {
                self.dead("host allocation", p as u64, false);
                return fail(INVALID);
            }
        }
        self.begin_wait()?;
        if !self.config.strict_free {
            // The real call waits for the work that uses the memory; only the driver knows which that is.
            for ctx in 0..self.ctxs.len() {
                self.host_wait_ctx(ctx)?;
            }
        }
        self.end_host(p as u64);
        Ok(())
    }

    pub(super) fn cuMemHostGetDevicePointer_v2(
        &mut self,
        pdptr: Out<CUdeviceptr>,
        p: *mut c_void,
        _flags: c_uint,
    ) -> R {
        match self.host_block_at(p as u64) {
            Some(_) => pdptr.set(p as u64),
            None => fail(INVALID),
        }
    }

    pub(super) fn cuMemHostRegister_v2(
        &mut self,
        p: *mut c_void,
        bytes: usize,
        _flags: c_uint,
    ) -> R {
        self.current()?;
        if p.is_null() || bytes == 0 || self.host_block_at(p as u64).is_some() {
            return fail(INVALID);
        }
        self.lock_host(p as u64, bytes as u64, None);
        Ok(())
    }

    pub(super) fn cuMemHostUnregister(&mut self, p: *mut c_void) -> R {
        match self.host_blocks.get(&(p as u64)) {
            Some(block) if block.memory.is_none() => {
                self.end_host(p as u64);
                Ok(())
            }
            _ => fail(INVALID),
        }
    }
}
