//! Tests of the runs of a stream cache by themselves.

use super::granule::PageInfo;
use super::runs::Runs;
use super::{Allocated, Inner, Life, Owner, Small, Taken, Using};

const PAGE: u64 = 64 << 10;

fn runs(pages: u64) -> Runs {
    let mut runs = Runs::default();
    for at in 1..=pages {
        runs.add_page(PageInfo {
            base: at * PAGE,
            generation: 0,
        });
    }
    runs
}

const OWNER: Owner = Owner {
    allocator: 1,
    key: 7,
};

/// The state of a fast stream cache of [`OWNER`], with room for its figures.
fn inner(pages: u64) -> Inner {
    let mut inner = Inner {
        allocator: OWNER.allocator,
        key: OWNER.key,
        runs: runs(pages),
        ..Inner::default()
    };
    inner.set_fast(true);
    inner.runs.accounts.allocated.extend(1 << 20);
    inner
}

fn small(granules: u32, requested: u32) -> Small {
    Small {
        granules,
        align: 1,
        requested,
    }
}

/// A block that the caller alone looks at.
fn taken(inner: &mut Inner, request: Small) -> Taken {
    let Allocated::Taken(block) = inner.take(request) else {
        panic!("there is room");
    };
    block
}

/// Allocates and frees a number of blocks of the same length.
fn pass(runs: &mut Runs, count: u32, granules: u32) {
    let taken = |runs: &mut Runs| runs.take(granules, 1, granules * 512).map(|t| t.node);
    let nodes: Vec<_> = (0..count).filter_map(|_| taken(runs)).collect();
    assert_eq!(nodes.len(), count as usize);
    nodes.into_iter().for_each(|node| runs.put(node, granules));
    assert_eq!(runs.check(), Ok(()));
}

/// R61: for a request that finds no run, quick runs merge, but no more than it needs.
#[test]
fn r61_kept_runs_merge_for_a_longer_one() {
    let mut runs = runs(2);
    pass(&mut runs, 256, 1);
    assert_eq!(runs.quick_granules(), 256);
    assert!(runs.take(64, 1, 1).is_none());
    assert!(runs.flush_for(64));
    assert!(runs.take(64, 1, 1).is_some());
    assert_eq!(runs.check(), Ok(()));
}

/// The longest runs merge first, and those of other lengths stay if that suffices.
#[test]
fn r61_short_runs_are_kept_if_longer_ones_do() {
    let mut runs = runs(2);
    let whole = runs.take(128, 1, 1);
    pass(&mut runs, 2, 40);
    pass(&mut runs, 32, 1);
    assert!(runs.take(70, 1, 1).is_none());
    assert!(runs.flush_for(70));
    assert_eq!(runs.quick_granules(), 32);
    assert!(runs.take(70, 1, 1).is_some() && whole.is_some());
    assert_eq!(runs.check(), Ok(()));
}

/// If few quick runs are kept, another page is better.
#[test]
fn r61_few_runs_are_kept() {
    let mut runs = runs(8);
    let others: Vec<_> = (0..7).map(|_| runs.take(128, 1, 1)).collect();
    pass(&mut runs, 2, 30);
    assert!(runs.take(100, 1, 1).is_none() && others.iter().all(Option::is_some));
    assert!(!runs.flush_for(100));
    assert_eq!(runs.quick_granules(), 60);
}

/// R24: a stopped stream cache merges everything, and leaves each free to a caller with the heap.
#[test]
fn r24_a_stopped_cache_caches_no_freed_block() {
    let (mut inner, request) = (inner(1), small(3, 1500));
    let [first, second] = [(); 2].map(|()| inner.take_anywhere(OWNER, request).unwrap());
    let life = |generation| Life::Generation(generation);
    assert!(
        inner
            .free_quick(first.node, life(first.generation))
            .is_some()
    );
    assert_eq!(inner.runs.quick_granules(), 3);
    inner.set_fast(false);
    assert_eq!(inner.runs.quick_granules(), 0);
    assert!(
        inner
            .free_quick(second.node, life(second.generation))
            .is_none()
    );
    assert_eq!(inner.free_merged(second.node, second.generation), None);
    assert_eq!(inner.take_anywhere(OWNER, request), None);
    inner.set_fast(true);
    assert!(
        inner
            .free_quick(second.node, life(second.generation))
            .is_some()
    );
    assert_eq!(
        inner.take_anywhere(OWNER, request).map(|t| t.ptr),
        Some(second.ptr)
    );
    assert_eq!(inner.runs.check(), Ok(()));
}

/// S1.13: a block without room among the quick runs is merged, but only if it still has its generation, and only if no
/// other stream uses it.
#[test]
fn s1_13_a_block_is_merged_once_and_only_without_other_users() {
    let mut inner = inner(1);
    let block = taken(&mut inner, small(3, 1500));
    let generation = block.generation;
    assert_eq!(inner.free_merged(block.node, generation + 1), None);
    inner.runs.set_using(block.node, Using::MANY);
    assert_eq!(inner.free_merged(block.node, generation), None);
    inner.runs.set_using(block.node, Using::NONE);
    assert_eq!(inner.runs.accounts.current(), [1536, 1500, 1]);
    assert_eq!(inner.free_merged(block.node, generation), Some(false));
    assert_eq!(inner.free_merged(block.node, generation), None);
    assert_eq!(inner.runs.accounts.current(), [0; 3]);
    assert_eq!((inner.runs.whole_pages(), inner.free_bytes()), (1, 1 << 16));
    assert_eq!(inner.runs.check(), Ok(()));
}

/// S1.13: once the heap has the recorded uses of a block, no other thread can record a use there without the heap, or
/// free the block.
#[test]
fn s1_13_held_back_blocks_reach_the_heap_in_one_step() {
    let mut inner = inner(1);
    let Some(one) = Using::one(3) else {
        panic!("a slot's number is short");
    };
    for noted in [Using::NONE, one] {
        let block = taken(&mut inner, small(1, 512));
        assert_eq!(inner.leave_to_heap(block.node, block.ptr + 512), None);
        inner.runs.set_using(block.node, noted);
        assert_eq!(inner.leave_to_heap(block.node, block.ptr), Some(noted));
        let now = inner.live(block.node, block.ptr, None);
        assert_eq!(now.map(|live| live.using), Some(Using::MANY));
        assert!(inner.free_quick(block.node, Life::At(block.ptr)).is_none());
    }
    assert_eq!(inner.runs.check(), Ok(()));
}

/// R61: the stream cache needs a page that was in use meanwhile, even if it is free again.
#[test]
fn r61_pages_used_meanwhile_are_needed() {
    let mut runs = runs(3);
    assert_eq!(runs.take_needed_pages(), 3);
    assert_eq!(runs.take_needed_pages(), 0);
    let taken = [(); 2].map(|()| runs.take(100, 1, 1).unwrap().node);
    runs.put_merged(taken[0]);
    assert_eq!(runs.take_needed_pages(), 1);
    runs.put_merged(taken[1]);
    assert_eq!(runs.take_needed_pages(), 1);
    assert_eq!(runs.take_needed_pages(), 0);
}
