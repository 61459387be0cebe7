//! Resources, pools, adaptors, stacks, and stacks of stacks.

use std::sync::Arc;

use cualloc::Config;
use cualloc::pool::*;
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

pub fn typed(rig: &Rig) -> TypedPool {
    TypedPool::new(&rig.allocator())
}

pub fn threshold(rig: &Rig) -> ThresholdPool {
    ThresholdPool::on_driver(&rig.driver, 0, Config::new().policy(rig.policy))
}

pub fn native(rig: &Rig) -> DriverPool {
    DriverPool::new(&rig.context, DriverPoolConfig::new()).unwrap()
}

/// Every pool carries every adaptor.
fn stacked<R: MemoryResource + Clone + 'static>(pool: R) -> impl MemoryResource {
    let budget = Budget::new(AccessOrdered::new(pool), Some(GIB as u64));
    let watched = Logging::new(budget, RingSink::new(16));
    let below: Arc<dyn MemoryResource> = Arc::new(watched);
    let guarded = Relief::new(Budget::new(below, None));
    let poisoned = Sanitizer::new(guarded).poison_freed(Some(0xDD));
    poisoned.check_overlap(true)
}

suite! {
    s2_14_typed_pool_passes_the_suite: typed;
    typed_pool_over_an_allocator_of_others: |rig| {
        let allocator = rig.allocator();
        allocator.set_limit(Some(2 * GIB as u64));
        TypedPool::new(&allocator)
    };
    s3_7_s3_25_s3_32_threshold_pool_passes_the_suite: threshold;
    s3_5_threshold_of_nothing: |rig| {
        let pool = threshold(rig);
        pool.set_release_threshold(Some(0)).unwrap();
        pool
    };
    s3_7_s3_25_s3_32_native_pool_passes_the_suite: native;
    s4_12_s4_17_workspaces_pass_the_suite: |rig| WorkspacePool::new(&rig.allocator());
    s4_12_s4_15_s4_17_exact_workspaces_pass_the_suite: |rig| WorkspacePool::exact(&rig.allocator());
    stack_over_typed_pool: |rig| stacked(typed(rig));
    stack_over_threshold_pool: |rig| stacked(threshold(rig));
    stack_over_native_pool: |rig| stacked(native(rig));
    stack_over_workspaces: |rig| stacked(WorkspacePool::exact(&rig.allocator()));
    stack_of_stacks_over_native_pool: |rig| stacked(Arc::new(stacked(native(rig))));
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
