//! What stands on the allocator: buffers, columns, pools, leases, and the resource that orders accesses.

use std::mem::MaybeUninit;
use std::sync::Arc;

use cualloc::driver::Stream;
use cualloc::exchange::dlpack::{DLManagedTensor, DLManagedTensorVersioned};
use cualloc::exchange::{DType, Dlpack, Peer, Tensor};
use cualloc::pool::{DriverPool, DriverPoolConfig, TypedPool, WorkspacePool};
use cualloc::resource::{Access, AccessOrdered, MemoryResource, RawBlock};
use cualloc::{Allocator, DeviceBuffer, Request};

use super::program::{Act, Step, size};
use super::rng::Rng;
use super::world::{Done, Kind, World};

type Ordered = Arc<AccessOrdered<Allocator>>;

pub enum Layered {
    Buffer(DeviceBuffer<u32>),
    Column(Tensor),
    Pooled(DeviceBuffer<u32>),
    Lease(DeviceBuffer<MaybeUninit<u8>>),
    Resource(RawBlock, Ordered),
    /// Lent to a user who works on its stream.
    Legacy(Dlpack<DLManagedTensor>),
    Versioned(Dlpack<DLManagedTensorVersioned>),
    /// Not the allocator's: the judge hears nothing of it, and the simulator alone judges its uses.
    Native(DeviceBuffer<MaybeUninit<u8>>),
}

impl Layered {
    /// Whether the program may use it on its own stream without recording the use.
    pub fn free_for_all(&self) -> bool {
        matches!(
            self,
            Layered::Column(_)
                | Layered::Lease(_)
                | Layered::Legacy(_)
                | Layered::Versioned(_)
                | Layered::Native(_)
        )
    }
}

#[derive(Default)]
pub struct Layers {
    typed: Option<TypedPool>,
    leases: Option<WorkspacePool>,
    ordered: Option<Ordered>,
    native: Option<DriverPool>,
    others: bool,
}

impl Layers {
    pub fn is_empty(&self) -> bool {
        self.typed.is_none() && self.leases.is_none() && self.ordered.is_none() && !self.others
    }
}

impl World {
    pub fn layer(&mut self, step: Step, rng: &mut Rng) -> Done {
        let Step { act, a, b, c } = step;
        match act {
            Act::Drop => return self.drop_layered(a, rng),
            Act::BufferWork => return self.work_layered(a, b, rng),
            Act::Exchange => return self.exchange(a, b, rng),
            Act::Share => return self.share(a, rng),
            _ => {}
        }
        let slot = c as usize % self.slots.len();
        let Some(lane) = self.any_lane(slot, rng.next() as u32) else {
            return Ok(());
        };
        let Some(stream) = self.lanes[lane].stream.clone() else {
            return Ok(());
        };
        if !self.usable(lane) {
            return Ok(());
        }
        self.before_call(slot, lane);
        self.told(slot, lane, true);
        let words = 1 + size(a, b, 8 << 20) / 4;
        let made = self.make(act, slot, words, &stream, rng);
        match made {
            Ok(None) => Ok(()),
            Ok(Some((ptr, bytes, layered))) => {
                self.slots[slot].layers.others = true;
                if matches!(layered, Layered::Native(_)) {
                    self.hold(slot, lane, (ptr, bytes), Kind::Layered(layered));
                    return Ok(());
                }
                self.handed_out(slot, lane, (ptr, bytes), Kind::Layered(layered))
            }
            Err(text) if self.calm() && !text.contains("OutOfMemory") => {
                Err(format!("{act:?} was refused: {text}"))
            }
            Err(_) => Ok(()),
        }
    }

    fn make(
        &mut self,
        act: Act,
        slot: usize,
        words: usize,
        stream: &Stream,
        rng: &mut Rng,
    ) -> Result<Option<(u64, u64, Layered)>, String> {
        let say = |e: &dyn std::fmt::Debug| format!("{e:?}");
        let bytes = 4 * words as u64;
        let it = &mut self.slots[slot];
        let allocator = &it.allocator;
        Ok(Some(match act {
            Act::Buffer => {
                let made = match rng.chance(50) {
                    true => DeviceBuffer::<u32>::zeroed(allocator, words, stream),
                    false => DeviceBuffer::filled(allocator, words, 7, stream),
                };
                let buffer = made.map_err(|e| say(&e))?;
                (buffer.as_device_ptr(), bytes, Layered::Buffer(buffer))
            }
            Act::Column => {
                let column =
                    Tensor::zeroed(allocator, DType::F32, &[words], stream).map_err(|e| say(&e))?;
                (column.ptr(), bytes, Layered::Column(column))
            }
            Act::Pooled => {
                let pool = it
                    .layers
                    .typed
                    .get_or_insert_with(|| TypedPool::new(allocator));
                // Few lengths, so that they are met again.
                let words = words.next_power_of_two();
                let buffer =
                    DeviceBuffer::<u32>::zeroed(&*pool, words, stream).map_err(|e| say(&e))?;
                let place = (buffer.as_device_ptr(), 4 * words as u64);
                (place.0, place.1, Layered::Pooled(buffer))
            }
            Act::Lease => {
                let leases = it
                    .layers
                    .leases
                    .get_or_insert_with(|| WorkspacePool::new(allocator));
                let lease = leases.lease(stream, bytes as usize).map_err(|e| say(&e))?;
                (lease.as_device_ptr(), bytes, Layered::Lease(lease))
            }
            Act::Native => {
                let pool = match &mut it.layers.native {
                    Some(pool) => pool,
                    none => {
                        let config = DriverPoolConfig::new().exportable(true);
                        let made = DriverPool::new(allocator.context(), config);
                        none.insert(made.map_err(|e| say(&e))?)
                    }
                };
                if rng.chance(10) {
                    pool.trim(rng.below(8 << 20)).map_err(|e| say(&e))?;
                }
                let block = DeviceBuffer::uninit(pool, bytes as usize, stream);
                let block = block.map_err(|e| say(&e))?;
                (block.as_device_ptr(), bytes, Layered::Native(block))
            }
            _ => {
                let ordered = it
                    .layers
                    .ordered
                    .get_or_insert_with(|| Arc::new(AccessOrdered::new(allocator.clone())));
                let ordered = Arc::clone(ordered);
                if rng.chance(20) {
                    let _ = ordered.reap();
                }
                let block = ordered
                    .allocate_block(&Request::new(bytes as usize).tag("judge"), stream)
                    .map_err(|e| say(&e))?;
                (block.ptr(), bytes, Layered::Resource(block, ordered))
            }
        }))
    }

    /// The place of something layered.
    fn layered(&self, n: u32) -> Option<usize> {
        let fits = |index: &usize| matches!(self.held[*index].kind, Kind::Layered(_));
        let some: Vec<usize> = (0..self.held.len()).filter(fits).collect();
        (!some.is_empty()).then(|| some[n as usize % some.len()])
    }

    fn work_layered(&mut self, a: u32, b: u32, rng: &mut Rng) -> Done {
        let Some(index) = self.layered(a) else {
            return Ok(());
        };
        let slot = self.held[index].slot;
        let Some(lane) = self.any_lane(slot, b) else {
            return Ok(());
        };
        let Some(stream) = self.lanes[lane].stream.clone() else {
            return Ok(());
        };
        if !self.usable(lane) {
            return Ok(());
        }
        self.before_call(slot, lane);
        let (ptr, bytes, last, home) = {
            let held = &self.held[index];
            (held.ptr, held.bytes, held.last, held.home)
        };
        self.told(slot, lane, true);
        let used = {
            let Kind::Layered(layered) = &mut self.held[index].kind else {
                return Ok(());
            };
            match layered {
                Layered::Buffer(buffer) => match rng.below(6) {
                    0 if bytes < 40_000 => buffer.to_vec().is_ok(),
                    1 if bytes < 40_000 => buffer.copy_from_slice(&vec![3; buffer.len()]).is_ok(),
                    _ => buffer.fill(b, &stream).is_ok(),
                },
                Layered::Pooled(buffer) => buffer.as_mut_slice().fill(b, &stream).is_ok(),
                Layered::Column(column) => {
                    if bytes < 40_000 && last == home {
                        let _ = column.as_slice::<f32>().and_then(|all| all.to_vec());
                    }
                    false
                }
                Layered::Lease(_) | Layered::Resource(..) => false,
                Layered::Legacy(_) | Layered::Versioned(_) | Layered::Native(_) => false,
            }
        };
        if used {
            self.held[index].last = lane;
            return Ok(());
        }
        if !self.order(last, lane) {
            return Ok(());
        }
        self.before_call(slot, lane);
        let Kind::Layered(layered) = &self.held[index].kind else {
            return Ok(());
        };
        // What comes next is ordered behind an operation that failed, or refused.
        if matches!(
            layered,
            Layered::Buffer(_) | Layered::Pooled(_) | Layered::Legacy(_) | Layered::Versioned(_)
        ) {
            return Ok(());
        }
        if let Layered::Resource(block, ordered) = layered
            && ordered
                .prepare_use(&block.id(), &stream, Access::Write)
                .is_err()
        {
            return Ok(());
        }
        if !self.work_on(lane, ptr, bytes, rng.next()) {
            return Ok(());
        }
        self.before_call(slot, lane);
        let recorded = match layered {
            Layered::Resource(block, ordered) => {
                ordered.finish_use(&block.id(), &stream, Access::Write)
            }
            Layered::Column(column) => column.record_stream(&stream),
            Layered::Lease(block) | Layered::Native(block) if rng.chance(50) => {
                block.record_use(&stream)
            }
            Layered::Lease(block) | Layered::Native(block) => block.record_stream(&stream),
            _ => return Ok(()),
        };
        if recorded.is_err() {
            self.wait_for(lane);
        }
        self.held[index].last = lane;
        Ok(())
    }

    fn drop_layered(&mut self, a: u32, rng: &mut Rng) -> Done {
        match self.layered(a) {
            Some(index) => self.free_layered(index, rng),
            None => Ok(()),
        }
    }

    pub fn free_layered(&mut self, index: usize, rng: &mut Rng) -> Done {
        let held = self.held.swap_remove(index);
        self.before_call(held.slot, held.home);
        let Kind::Layered(layered) = held.kind else {
            return Ok(());
        };
        let block = self.checker.tracker().freed(held.ptr);
        match layered {
            Layered::Pooled(buffer) if rng.chance(40) => {
                let lane = self.any_lane(held.slot, rng.next() as u32);
                let stream = lane.and_then(|lane| self.lanes[lane].stream.clone());
                match (&self.slots[held.slot].layers.typed, stream) {
                    (Some(pool), Some(stream)) => {
                        // Refused or not, it is returned.
                        let _ = pool.put(buffer, Some(&stream));
                    }
                    _ => drop(buffer),
                }
            }
            Layered::Resource(block_of, ordered) => {
                if let Err(refused) = ordered.deallocate_block(block_of) {
                    if self.calm() {
                        return Err(format!("a deallocation was refused: {refused:?}"));
                    }
                    self.checker.tracker().live_again(held.ptr, block);
                    let kind = Kind::Layered(Layered::Resource(*refused.value, ordered));
                    self.held.push(super::world::Held { kind, ..held });
                }
            }
            Layered::Native(native) if rng.chance(60) => {
                if let Err(refused) = native.free() {
                    if self.calm() {
                        return Err(format!("a native block was not freed: {:?}", refused.error));
                    }
                    let kind = Kind::Layered(Layered::Native(*refused.value));
                    self.held.push(super::world::Held { kind, ..held });
                }
            }
            other => drop(other),
        }
        Ok(())
    }

    /// A column goes out as a tensor, or one comes back as a column.
    fn exchange(&mut self, a: u32, b: u32, rng: &mut Rng) -> Done {
        let fits = |index: &usize| {
            let layered = match &self.held[*index].kind {
                Kind::Layered(layered) => layered,
                _ => return false,
            };
            matches!(
                layered,
                Layered::Column(_) | Layered::Legacy(_) | Layered::Versioned(_)
            )
        };
        let some: Vec<usize> = (0..self.held.len()).filter(fits).collect();
        if some.is_empty() {
            return Ok(());
        }
        let index = some[a as usize % some.len()];
        let (slot, home, last) = {
            let held = &self.held[index];
            (held.slot, held.home, held.last)
        };
        let back = matches!(
            self.held[index].kind,
            Kind::Layered(Layered::Legacy(_) | Layered::Versioned(_))
        );
        // Who imports does so on the stream that the producer was told.
        let lane = match back {
            true => Some(home),
            false => self.any_lane(slot, b),
        };
        let Some(lane) = lane else { return Ok(()) };
        let Some(stream) = self.lanes[lane].stream.clone() else {
            return Ok(());
        };
        let epoch = self.held[index].epoch;
        if !self.usable(lane) || epoch != self.lanes[home].epoch || !self.order(last, home) {
            return Ok(());
        }
        self.before_call(slot, lane);
        self.told(slot, lane, true);
        let held = self.held.swap_remove(index);
        let Kind::Layered(layered) = held.kind else {
            return Ok(());
        };
        // SAFETY: the memory is ours, and in order whatever is said.
        let peer = unsafe { Peer::ordered() };
        let (layered, result) = match layered {
            Layered::Column(column) => {
                let consumer = match rng.chance(70) {
                    true => Peer::on(&stream),
                    false => Peer::starting_on(&stream),
                };
                let made = match rng.chance(50) {
                    true => column.to_dlpack(&consumer).map(Layered::Legacy),
                    false => column.to_dlpack(&consumer).map(Layered::Versioned),
                };
                match made {
                    Ok(layered) => (layered, Ok(())),
                    Err(error) => (Layered::Column(column), Err(format!("{error:?}"))),
                }
            }
            Layered::Legacy(tensor) => match Tensor::from_dlpack(tensor, &stream, peer) {
                Ok(column) => (Layered::Column(column), Ok(())),
                Err(refused) => {
                    let text = format!("{:?}", refused.error);
                    (Layered::Legacy(*refused.value), Err(text))
                }
            },
            Layered::Versioned(tensor) => match Tensor::from_dlpack(tensor, &stream, peer) {
                Ok(column) => (Layered::Column(column), Ok(())),
                Err(refused) => {
                    let text = format!("{:?}", refused.error);
                    (Layered::Versioned(*refused.value), Err(text))
                }
            },
            other => (other, Ok(())),
        };
        let (home, epoch, last) = match result {
            Ok(()) => (lane, self.lanes[lane].epoch, lane),
            Err(_) => (held.home, held.epoch, held.last),
        };
        let kind = Kind::Layered(layered);
        self.held.push(super::world::Held {
            kind,
            home,
            epoch,
            last,
            ..held
        });
        match result {
            Err(text) if self.calm() => Err(format!("an exchange was refused: {text}")),
            _ => Ok(()),
        }
    }

    /// Exports the memory behind a block, or of a pool, as for another process.
    #[cfg(unix)]
    fn share(&mut self, a: u32, rng: &mut Rng) -> Done {
        use std::os::fd::AsFd;
        if self.held.is_empty() {
            return Ok(());
        }
        let held = &self.held[a as usize % self.held.len()];
        let (slot, ptr) = (held.slot, held.ptr);
        let context = self.places[self.slots[slot].place].context.clone();
        if let Kind::Layered(Layered::Native(_)) = &held.kind {
            if let Some(pool) = &self.slots[slot].layers.native {
                let _ = pool.export_block(ptr);
                if let Ok(descriptor) = pool.export() {
                    drop(DriverPool::import(&context, descriptor.as_fd()));
                }
            }
            return Ok(());
        }
        let Ok(entered) = context.enter() else {
            return Ok(());
        };
        let Ok(handle) = entered.retain_handle(ptr) else {
            return Ok(());
        };
        let mut handles = vec![handle];
        if rng.chance(50) {
            // SAFETY: the handle is ours.
            let out = unsafe { entered.export_fd(handle) };
            handles.extend(out.ok().and_then(|fd| entered.import_fd(fd.as_fd()).ok()));
        }
        for handle in handles {
            // SAFETY: ours, and not used again.
            let _ = super::table::own(|f| unsafe { f.cuMemRelease.unwrap()(handle) });
        }
        Ok(())
    }

    #[cfg(not(unix))]
    fn share(&mut self, _: u32, _: &mut Rng) -> Done {
        Ok(())
    }

    /// All pools go.
    pub fn strip(&mut self, slot: usize) {
        self.become_current(self.slots[slot].place);
        if let Some(ordered) = &self.slots[slot].layers.ordered {
            let _ = ordered.reap();
        }
        self.slots[slot].layers = Layers::default();
    }
}
