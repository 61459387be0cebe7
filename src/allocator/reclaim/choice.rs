//! The choice of the next step of a reclaim: candidates, their cost, and the conditions for each.
//!
//! A choice depends only on the heap, the hooks and the [`Reclaim`]: a cursor over stages, and flags beside it. It
//! makes no driver call, and takes no lock except that of the list of hooks. It plans a step and claims the step's
//! memory, so that no other call takes it before the step is executed. Every attempt is recorded where it is chosen;
//! otherwise a reclaim would never end.

use crate::allocator::config::Waits;
use crate::allocator::engine::hooks::{Hooks, ReliefHook};
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::heap::take::Part;
use crate::allocator::physical::Release;
use crate::allocator::plan::alias::ready_in_view;
use crate::allocator::plan::growth::Bound;
use crate::allocator::plan::stitch::STITCH_MIN;
use crate::allocator::plan::{alias, growth, release, stitch};
use crate::allocator::reclaim::step::Step;
use crate::allocator::report::Regime;
use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE};
use crate::allocator::stream::slot::Slot;
use crate::allocator::view::mapping::Openings;
use crate::driver::DriverError;

/// Progress of a reclaim since memory last became complete. Such an event resets the cursor to the first stage, because
/// each stage may then succeed where it failed before.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// The heap was searched as it is.
    #[default]
    Fit,
    /// The large-block caches hold no free blocks.
    CachesEmptied,
    /// The caches of small blocks returned the pages that they do not need.
    Flushed,
    /// Idle views were unmapped.
    Evicted,
}

/// The steps with effects on the program or the device.
enum LastResort {
    /// Hooks that remain to be called; `None` before they have been collected.
    Hooks(Option<std::vec::IntoIter<ReliefHook>>),
    /// The contexts were synchronised.
    Synchronised,
}

/// A reclaim: the search for memory for one request.
pub(crate) struct Reclaim<'a> {
    hooks: &'a Hooks,
    total_memory: u64,
    /// Whether views may be used, as far as is known before the next step.
    pub views: bool,
    stage: Stage,
    /// Whether a stitch was refused; no other is tried until more memory may be available for it.
    pub no_stitch: bool,
    /// Whether memory was created for a stitch.
    supplied: bool,
    /// Whether no memory that has left a range can serve the request until more work is complete.
    pub settled: bool,
    /// Whether memory left behind by earlier failures was retried.
    retried: bool,
    /// Whether a marker on the requesting stream was tried since the last hook ran.
    marked: bool,
    /// Whether all streams with markers were polled.
    polled: bool,
    /// Whether the free memory of the device was queried.
    device_queried: bool,
    /// The driver's refusal of address space for the request, if any: then only existing memory may serve it.
    pub no_addresses: Option<DriverError>,
    /// The driver's refusal of memory in this reclaim.
    pub refusal: Option<DriverError>,
    last_resort: LastResort,
    /// The regime that begins with this reclaim, if it changes.
    pub regime: Option<Regime>,
    /// The peak of active bytes without this request, and with it.
    pub active: Option<(u64, u64)>,
    /// Whether no step can serve the request: see [`Reclaim::is_beyond`].
    pub beyond: bool,
    /// A failure that a later step may still compensate for.
    failure: Option<DriverError>,
}

/// Idle views are unmapped before the address space for views exceeds this multiple of the device's memory.
pub(crate) const VIEW_ADDRESSES: u64 = 8;

impl<'a> Reclaim<'a> {
    pub(crate) fn new(hooks: &'a Hooks, total_memory: u64) -> Self {
        Reclaim {
            hooks,
            total_memory,
            views: false,
            stage: Stage::Fit,
            no_stitch: false,
            supplied: false,
            settled: false,
            retried: false,
            marked: false,
            polled: false,
            device_queried: false,
            no_addresses: None,
            refusal: None,
            last_resort: LastResort::Hooks(None),
            regime: None,
            active: None,
            beyond: false,
            failure: None,
        }
    }

    /// Whether a request can never be served: it exceeds the device's memory, or the limit while no hook exists that
    /// might raise it. Releasing cached memory for it would be pointless.
    fn is_beyond(&self, heap: &Heap, want: &Want) -> bool {
        let bytes = u64::from(want.granules) * GRANULE;
        // A limit may be set below the held memory, which may serve the request once it is free.
        let most = heap
            .physical
            .limit
            .map(|limit| limit.max(heap.stats.all.reserved.current));
        bytes > self.total_memory
            || (most.is_some_and(|most| bytes > most) && self.hooks.is_empty())
    }

    /// Returns the driver error that an out-of-memory error names.
    pub(crate) fn cause(&self, heap: &Heap, want: &Want) -> Option<DriverError> {
        if self.no_addresses.is_some() && growth::missing(heap, want).is_none() {
            return self.no_addresses;
        }
        self.refusal.or(self.failure)
    }

    /// Returns the next hook to call.
    fn next_hook(&mut self) -> Option<ReliefHook> {
        match &mut self.last_resort {
            LastResort::Hooks(hooks) => hooks
                .get_or_insert_with(|| self.hooks.due().into_iter())
                .next(),
            LastResort::Synchronised => None,
        }
    }

    /// Resets the cursor after memory has become complete: pages may be whole, views idle, and handles free to stitch.
    pub(crate) fn restart(&mut self) {
        self.stage = Stage::Fit;
        self.no_stitch = false;
        self.settled = false;
        self.device_queried = false;
    }

    /// Gives up stitching after the driver had no memory or addresses for a view. Growth remains possible.
    pub(crate) fn abandon_stitch(&mut self, error: DriverError) {
        self.no_stitch = true;
        self.failure = Some(error);
    }

    // ---- the choice ---------------------------------------------------------------------------

    pub(crate) fn next(&mut self, heap: &mut Heap, want: &Want) -> Step {
        if !want.in_one_handle()
            && let Some(run) = heap.best_run(want)
        {
            return Step::Take(run);
        }
        if !heap.streams.advanced.is_empty() {
            return Step::Complete;
        }
        if self.is_beyond(heap, want) {
            self.beyond = true;
            return Step::Fail;
        }
        if !heap.rules.maps() {
            return self.choose_classic(heap, want);
        }
        if self.stage < Stage::CachesEmptied {
            self.stage = Stage::CachesEmptied;
            if heap.caches.have_large() || heap.streams.full.contains(&want.stream) {
                return Step::EmptyCaches;
            }
        }
        if want.in_one_handle() {
            return match self.take_settled(heap, want) {
                Some(step) => step,
                None => self.choose_handle(heap, want),
            };
        }
        if self.no_addresses.is_none() && growth::lacks_addresses(heap, want) {
            return Step::Reserve {
                space: want.space,
                bytes: u64::from(want.span()) * GRANULE,
            };
        }
        let mut open = None;
        if self.stitches(want)
            && let Some(run) = ready_in_view(heap, want, &mut open)
        {
            return Step::View(run);
        }
        if let Some(step) = self.take_settled(heap, want) {
            return step;
        }
        if let Some(step) = self.query_device(heap) {
            return step;
        }
        self.choose_regime(heap, want);
        if let Some(growth) = growth::plan(heap, want, Bound::SoftCap, false) {
            heap.stats.reclaim.grown += 1;
            return Step::Grow(growth);
        }
        let waits = heap.physical.tuning.waits;
        let stitches = self.stitches(want) && !self.no_stitch;
        let first = waits == Waits::Always;
        if !first && let Some(step) = self.poll(heap) {
            return step;
        }
        if first && let Some(step) = self.wait_for_memory(heap, want, run_behind_waits) {
            return step;
        }
        if stitches && let Some(step) = self.choose_stitch(heap, want, open, first) {
            return step;
        }
        if let Some(growth) = growth::plan(heap, want, Bound::Limit, false) {
            heap.stats.reclaim.grown_hard += 1;
            return Step::Grow(growth);
        }
        if waits == Waits::Scarce && heap.streams.several() {
            if let Some(step) = self.wait_for_memory(heap, want, run_behind_waits) {
                return step;
            }
            if stitches && let Some(step) = self.choose_stitch(heap, want, None, true) {
                return step;
            }
        }
        if waits != Waits::Never
            && let Some(growth) = growth::plan(heap, want, Bound::Limit, true)
        {
            heap.stats.reclaim.grown_hard += 1;
            return Step::Grow(growth);
        }
        self.make_room(heap, want)
    }

    /// Decides whether memory is scarce for a request that no ready memory serves, and counts the active bytes for it.
    fn choose_regime(&mut self, heap: &mut Heap, want: &Want) {
        let held = heap.counted() + growth::missing(heap, want).unwrap_or(0);
        self.regime = heap.physical.choose_regime(held).or(self.regime);
        heap.streams.unmarked_bytes = heap.physical.unmarked_bytes(heap.held());
        // With `waits=always`, memory pending on other streams serves the request after a wait.
        if heap.physical.regime == Regime::Plentiful
            && heap.physical.tuning.waits != Waits::Always
            && heap.streams.several()
        {
            let before = self.active.map_or(heap.peak_active, |(before, _)| before);
            heap.note_active(want);
            self.active = Some((before, heap.peak_active));
        }
    }

    /// Takes memory that has left a range, instead of growth or to make room for it.
    fn take_settled(&self, heap: &Heap, want: &Want) -> Option<Step> {
        if heap.ranges.leaving == 0 || self.settled {
            return None;
        }
        let missing = growth::missing(heap, want)?;
        (want.may_span_handles() || missing > heap.room()).then_some(Step::Settle(missing))
    }

    /// Polls all streams, once per reclaim, before growth or a wait.
    fn poll(&mut self, heap: &Heap) -> Option<Step> {
        if self.polled || !heap.streams.several() {
            return None;
        }
        self.polled = true;
        Some(Step::Poll)
    }

    /// Queries the free memory of the device, once before a growth that the limit allows.
    fn query_device(&mut self, heap: &Heap) -> Option<Step> {
        let below = heap.physical.limit.unwrap_or(u64::MAX);
        if self.device_queried || below.saturating_sub(heap.counted()) < PHYSICAL_GRANULE {
            return None;
        }
        self.device_queried = true;
        Some(Step::QueryDevice)
    }

    /// Queries the device, once per reclaim, if the earlier answer leaves no room: other processes may have freed
    /// memory.
    fn requery_device(&mut self, heap: &Heap) -> Option<Step> {
        if self.device_queried || self.refusal.is_some() || heap.physical.full_at.is_none() {
            return None;
        }
        self.device_queried = true;
        Some(Step::QueryDevice)
    }

    /// Chooses the steps of the classic policy before room is made.
    fn choose_classic(&mut self, heap: &mut Heap, want: &Want) -> Step {
        if let Some(step) = self.query_device(heap) {
            return step;
        }
        if let Some(fresh) = growth::plan_segment(heap, want) {
            heap.stats.reclaim.grown += 1;
            return Step::Segment(fresh);
        }
        if let Some(step) = self.wait_for_memory(heap, want, run_behind_waits) {
            return step;
        }
        self.make_room(heap, want)
    }

    /// Chooses the steps before room is made for a block that must lie in one handle: the smallest open stretch of a
    /// handle, a new handle, a stretch behind waits.
    fn choose_handle(&mut self, heap: &mut Heap, want: &Want) -> Step {
        if let Some(part) = growth::find_in_handle(heap, want, false) {
            heap.stats.reclaim.ready += 1;
            return Step::Claim(part);
        }
        let bytes = want.handle_bytes();
        let hole = growth::hole_for_handle(heap, want);
        if hole.is_none() && self.no_addresses.is_none() {
            return Step::Reserve {
                space: want.space,
                bytes,
            };
        }
        if let Some(step) = self.query_device(heap) {
            return step;
        }
        self.choose_regime(heap, want);
        let early = heap.physical.tuning.waits == Waits::Always;
        let within_cap = bytes <= growth::room_within(heap, Bound::SoftCap);
        if early
            && !within_cap
            && let Some(step) = self.wait_for_memory(heap, want, stretch_behind_waits)
        {
            return step;
        }
        if bytes <= heap.room()
            && let Some(growth) = hole.and_then(|hole| growth::plan_handle(heap, want, hole))
        {
            heap.stats.reclaim.count_growth(within_cap);
            return Step::Grow(growth);
        }
        if !early && let Some(step) = self.wait_for_memory(heap, want, stretch_behind_waits) {
            return step;
        }
        self.make_room(heap, want)
    }

    /// Chooses a step that waits for other streams where no growth can serve the request, unless the driver should be
    /// queried first.
    fn wait_for_memory(
        &mut self,
        heap: &mut Heap,
        want: &Want,
        find: impl FnOnce(&Heap, &Want) -> Option<Part>,
    ) -> Option<Step> {
        let waits = heap.physical.tuning.waits;
        if waits == Waits::Never || !heap.streams.several() {
            return None;
        }
        if waits == Waits::Scarce
            && let Some(step) = self.poll(heap).or_else(|| self.requery_device(heap))
        {
            return Some(step);
        }
        let part = find(heap, want)?;
        heap.stats.reclaim.waited += 1;
        Some(Step::Claim(part))
    }

    /// Whether a view could serve a request at all.
    fn views_for(&self, want: &Want) -> bool {
        want.fits_views(self.views, self.total_memory)
    }

    /// Whether a request is worth a view before the limit is reached.
    fn stitches(&self, want: &Want) -> bool {
        self.views_for(want) && u64::from(want.granules) * GRANULE >= STITCH_MIN
    }

    /// Chooses a stitch, or with `waits` a place in a view behind waits. `open` is the ready memory, if it is already
    /// known.
    fn choose_stitch(
        &mut self,
        heap: &mut Heap,
        want: &Want,
        open: Option<Openings>,
        waits: bool,
    ) -> Option<Step> {
        let open = match open {
            Some(open) => open,
            None => alias::openings(heap, want, false)?,
        };
        let reachable = match open.more && waits {
            true => Some(alias::openings(heap, want, true)?),
            false => None,
        };
        if let Some(reachable) = &reachable
            && let Some(run) = heap.views.find(want, reachable)
        {
            return Some(Step::View(run));
        }
        if let Some(bytes) = stitch::view_room_missing(heap, want) {
            let most = self.total_memory.saturating_mul(VIEW_ADDRESSES);
            if heap.extents.view_addresses().saturating_add(bytes) > most {
                let idle = heap.views.idle_addresses(&heap.streams, bytes);
                if !idle.is_empty() {
                    return Some(Step::FreeAddresses(idle));
                }
            }
            return Some(Step::Reserve {
                space: SpaceId::Views,
                bytes,
            });
        }
        let room = heap.room();
        let stitch = stitch::plan(heap, want, room, open, reachable)?;
        Some(Step::Stitch(Box::new(stitch)))
    }

    /// Obtains what a stitch lacks from the driver, if the limit leaves room for it or the other arena releases as
    /// much.
    fn supply_stitch(&mut self, heap: &mut Heap, want: &Want) -> Option<Step> {
        if !self.views_for(want) || self.no_stitch {
            return None;
        }
        let lacking = stitch::lacking_bytes(heap, want)?;
        if lacking > heap.room() {
            let plan = release::plan(heap, &[SpaceId::Small], lacking, heap.room());
            return self.release(heap, plan);
        }
        if self.supplied || lacking == 0 {
            return None;
        }
        let within_cap = lacking <= heap.soft_room();
        let fresh = growth::claim_home(heap, want, lacking)?;
        self.supplied = true;
        heap.stats.reclaim.count_growth(within_cap);
        Some(Step::Supply(fresh))
    }

    /// Unmaps idle views, once.
    fn unmap_idle_views(&mut self, heap: &Heap) -> Option<Step> {
        if self.stage == Stage::Evicted {
            return None;
        }
        let idle = heap.views.idle_views(&heap.streams, usize::MAX);
        if idle.is_empty() {
            return None;
        }
        self.stage = Stage::Evicted;
        Some(Step::Evict(idle))
    }

    /// Releases memory to the driver, if there is any.
    fn release(&mut self, heap: &mut Heap, plan: Vec<Release>) -> Option<Step> {
        if plan.is_empty() {
            return None;
        }
        heap.stats.reclaim.released += 1;
        // The driver may now have memory that it refused before.
        self.no_stitch = false;
        self.device_queried = false;
        Some(Step::Release(plan))
    }

    /// Chooses a release to the driver, or the memory that a stitch lacks.
    fn choose_release(&mut self, heap: &mut Heap, want: &Want) -> Option<Step> {
        match growth::missing(heap, want) {
            Some(missing) => {
                let plan = release::plan(heap, &release::ARENAS, missing, heap.room());
                let released = self.release(heap, plan);
                match released.or_else(|| self.supply_stitch(heap, want)) {
                    None if missing > heap.room() => self.unmap_idle_views(heap),
                    step => step,
                }
            }
            // Released memory leaves longer holes.
            None if self.no_addresses.is_some() => self.unmap_idle_views(heap).or_else(|| {
                let (plan, _) = release::plan_trim(heap, 0);
                self.release(heap, plan)
            }),
            None => None,
        }
    }

    /// Chooses the steps that make room below a limit.
    fn make_room(&mut self, heap: &mut Heap, want: &Want) -> Step {
        if self.stage < Stage::Flushed {
            self.stage = Stage::Flushed;
            return Step::Flush;
        }
        if !self.retried && !heap.physical.quarantined.is_empty() {
            self.retried = true;
            return Step::Retry;
        }
        let waits = heap.physical.tuning.waits != Waits::Never;
        if self.views_for(want) && !self.stitches(want) && !self.no_stitch {
            let mut open = None;
            // At the limit saving memory has priority, even for requests that would not be worth a view otherwise.
            if let Some(step) = ready_in_view(heap, want, &mut open)
                .map(Step::View)
                .or_else(|| self.choose_stitch(heap, want, open, waits))
            {
                return step;
            }
        }
        if let Some(step) = self.choose_release(heap, want) {
            return step;
        }
        if !self.marked && !heap.streams[want.stream].covered() {
            self.marked = true;
            // The stream may be idle, and then all memory freed on it is complete.
            self.restart();
            return Step::Mark(heap.streams[want.stream].key);
        }
        if let Some(step) = self.poll(heap).or_else(|| self.requery_device(heap)) {
            return step;
        }
        let wanted = |stream| waits || stream == want.stream;
        if let Some((stream, bound, event)) = heap.streams.oldest_marker(wanted) {
            heap.stats.reclaim.host_waits += 1;
            self.restart();
            return Step::HostWait {
                stream,
                bound,
                event,
            };
        }
        if let Some(hook) = self.next_hook() {
            let missing = growth::missing(heap, want);
            let missing = missing
                .unwrap_or(u64::from(want.span()) * GRANULE)
                .saturating_sub(heap.room());
            heap.stats.reclaim.hooks += 1;
            self.restart();
            // Memory that a hook frees may need a marker itself.
            self.marked = false;
            return Step::Hook { hook, missing };
        }
        let unsynchronised = matches!(self.last_resort, LastResort::Hooks(_));
        let mut slots = heap.streams.iter().map(|(_, slot)| slot);
        if waits && unsynchronised && slots.any(Slot::needs_context_wait) {
            heap.stats.reclaim.synchronised += 1;
            self.last_resort = LastResort::Synchronised;
            self.restart();
            return Step::Synchronise;
        }
        Step::Fail
    }
}

/// Returns the smallest stretch of a handle that fits behind waits.
fn stretch_behind_waits(heap: &Heap, want: &Want) -> Option<Part> {
    growth::find_in_handle(heap, want, true)
}

/// Returns memory that fits behind waits: the run whose newest wait is the oldest.
fn run_behind_waits(heap: &Heap, want: &Want) -> Option<Part> {
    let run = heap.finder(want.space, want.stream)?.oldest_run(want)?;
    Some(heap.part(want, run))
}
