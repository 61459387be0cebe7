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

fn poisoned<R: MemoryResource>(resource: R) -> Sanitizer<R> {
    let poisoned = Sanitizer::new(resource).poison_allocated(Some(0xCD));
    poisoned.poison_freed(Some(0xDD)).check_overlap(true)
}

fn freeing_caches<R: MemoryResource>(resource: R) -> Relief<R> {
    let relief = Relief::new(resource);
    relief.set_policy(OomPolicy::FreeCaches);
    relief
}

type SmallStack = Logging<Budget<AccessOrdered>, RingSink>;

fn small_stack(rig: &Rig) -> SmallStack {
    let bounded = Budget::new(tracked_order(rig), Some(GIB as u64));
    Logging::new(bounded, RingSink::new(64))
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
    statistics: |rig| Budget::of_live(caching(rig), None);
    logging: |rig| Logging::new(caching(rig), RingSink::new(16));
    logging_to_nowhere: |rig| Logging::new(caching(rig), ());
    guard: |rig| Relief::new(Budget::new(caching(rig), Some(GIB as u64 / 2)));
    guard_with_policy: |rig| freeing_caches(Budget::new(caching(rig), None));
    manager: |rig| Budget::of_live(tracked_order(rig), Some(GIB as u64));
    sanitizer_off: |rig| Sanitizer::new(caching(rig));
    sanitizer_over_caching: |rig| poisoned(caching(rig));
    sanitizer_over_async: |rig| poisoned(tracked_order(rig));
    sanitizer_over_direct: |rig| poisoned(CudaMemory::new(&rig.context));
    /// S5.33: adaptors pass on what is asked of them.
    s5_33_stack_passes_the_suite: small_stack;
    stack_of_stacks: |rig| {
        let below: Arc<dyn MemoryResource> = Arc::new(small_stack(rig));
        let budget = Budget::new(below, Some(GIB as u64));
        poisoned(freeing_caches(budget))
    };
    order_twice: |rig| AccessOrdered::new(Budget::new(
        AccessOrdered::new(Budget::new(caching(rig), Some(GIB as u64))), Some(GIB as u64)));
    usual_stack: |rig| standard(&rig.context).unwrap();
}
