//! Resources, adaptors, stacks, and stacks of stacks.

use std::sync::Arc;

use cualloc::resource::*;

use crate::common::*;
use crate::parts::run;

macro_rules! suite {
    ($($(#[$doc:meta])* $name:ident: $make:expr;)*) => {$(
        $(#[$doc])*
        #[test]
        fn $name() {
            run($make);
        }
    )*};
}

fn caching(rig: &Rig) -> cualloc::Allocator {
    rig.allocator()
}

fn tracked_order(rig: &Rig) -> AccessOrdered {
    AccessOrdered::new(caching(rig))
}

fn poison() -> ProbeConfig {
    let mut config = ProbeConfig::default();
    config.poison_allocated = Some(0xCD);
    config.poison_freed = Some(0xDD);
    config.overlap = true;
    config
}

type SmallStack = Statistics<Logging<Budget<AccessOrdered>, RingSink>>;

fn small_stack(rig: &Rig) -> SmallStack {
    Statistics::new(Logging::new(
        Budget::new(tracked_order(rig), Some(GIB as u64)),
        RingSink::new(64),
    ))
}

suite! {
    /// S5.12: the caching resource.
    s5_12_caching_resource_passes_the_suite: caching;
    /// S5.19: the direct resource.
    s5_19_direct_resource_passes_the_suite: |rig| CudaMemory::new(&rig.context);
    /// S5.20: the async resource.
    s5_20_async_resource_passes_the_suite: tracked_order;
    async_over_direct: |rig| AccessOrdered::new(CudaMemory::new(&rig.context));
    budget: |rig| Budget::new(caching(rig), Some(GIB as u64));
    budget_over_direct: |rig| Budget::new(CudaMemory::new(&rig.context), Some(GIB as u64));
    budget_over_async: |rig| Budget::new(tracked_order(rig), Some(GIB as u64 / 2));
    async_over_budget: |rig| AccessOrdered::new(Budget::new(caching(rig), Some(GIB as u64 / 2)));
    statistics: |rig| Statistics::new(caching(rig));
    tracked: |rig| Tracking::new(caching(rig));
    logging: |rig| Logging::new(caching(rig), RingSink::new(16));
    logging_to_nowhere: |rig| Logging::new(caching(rig), NullSink);
    callback: |rig| FailureCallback::new(caching(rig), |_, _, _| false);
    guard: |rig| Guard::builder().budget(Some(GIB as u64 / 2)).build(caching(rig)).unwrap();
    guard_with_policy: |rig| Guard::builder()
        .policy(OomPolicy::FreeCaches)
        .build(caching(rig))
        .unwrap();
    probe_off: |rig| Probe::new(caching(rig), ProbeConfig::default());
    probe_over_caching: |rig| Probe::new(caching(rig), poison());
    probe_over_async: |rig| Probe::new(tracked_order(rig), poison());
    probe_over_direct: |rig| Probe::new(CudaMemory::new(&rig.context), poison());
    /// S5.33: adaptors pass on what is asked of them.
    s5_33_stack_passes_the_suite: small_stack;
    stack_of_stacks: |rig| {
        let below: Arc<dyn MemoryResource> = Arc::new(small_stack(rig));
        let watched = Guard::builder()
            .budget(Some(GIB as u64))
            .policy(OomPolicy::FreeCaches)
            .build(below)
            .unwrap();
        Probe::new(Tracking::new(FailureCallback::new(watched, |_, _, n| n < 2)), poison())
    };
    order_twice: |rig| AccessOrdered::new(Budget::new(
        AccessOrdered::new(Budget::new(caching(rig), Some(GIB as u64))), Some(GIB as u64)));
    runtime: |rig| Arc::clone(DeviceRuntime::on(&rig.context).unwrap().resource());
}
