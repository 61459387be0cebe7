//! Loom tests: all interleavings of threads at stream caches, on the production code.
//!
//! ```text
//! RUSTFLAGS='--cfg loom' cargo test --release -p cualloc --lib interleavings
//! ```

use super::granule::PageInfo;
use super::*;
use loom::thread;

const OWNER: Owner = Owner {
    allocator: 7,
    key: 3,
};
const PAGE: u64 = 64 << 10;

fn request(granules: u32) -> Small {
    Small {
        granules,
        align: 1,
        requested: granules * GRANULE as u32,
    }
}

/// A stream cache with one page and room for some granules.
fn cache(rank: u32, base: u64, room: u64) -> &'static StreamCache {
    let cache: &'static StreamCache = Box::leak(Box::new(StreamCache::new(rank)));
    let mut inner = cache.lock();
    (inner.allocator, inner.key) = (OWNER.allocator, OWNER.key);
    inner.set_fast(true);
    inner.runs.add_page(PageInfo {
        base,
        generation: 1,
    });
    inner.runs.accounts.allocated.set_room(room * GRANULE);
    drop(inner);
    cache
}

fn take(cache: &StreamCache, granules: u32) -> Option<Taken> {
    match cache.lock().take(request(granules)) {
        Allocated::Taken(taken) => Some(taken),
        _ => None,
    }
}

fn free(cache: &StreamCache, taken: &Taken) -> bool {
    let life = Life::Generation(taken.generation);
    cache.lock().free_quick(taken.node, life).is_some()
}

/// A block that another thread frees is allocated again once, and no two live blocks overlap.
#[test]
fn interleavings_of_a_free_by_another_thread() {
    loom::model(|| {
        let cache = cache(0, PAGE, 8);
        let first = take(cache, 2);
        let other = thread::spawn(move || first.is_some_and(|first| free(cache, &first)));
        let mine = take(cache, 2);
        let next = take(cache, 2);
        assert!(other.join().is_ok_and(|freed| freed));
        let (mine, next) = mine.zip(next).expect("there is room for three");
        assert!(mine.ptr + 1024 <= next.ptr || next.ptr + 1024 <= mine.ptr);
        let inner = cache.lock();
        assert_eq!(inner.runs.accounts.blocks.current(), 2);
        assert_eq!(inner.runs.check(), Ok(()));
    });
}

/// Of two frees of the same allocation exactly one succeeds.
#[test]
fn interleavings_of_a_double_free() {
    loom::model(|| {
        let cache = cache(0, PAGE, 8);
        let block = take(cache, 1).expect("there is room");
        let other = thread::spawn(move || {
            cache
                .lock()
                .free_quick(block.node, Life::At(block.ptr))
                .is_some()
        });
        let mine = cache
            .lock()
            .free_quick(block.node, Life::At(block.ptr))
            .is_some();
        let theirs = other.join().unwrap_or(mine);
        assert!(mine != theirs);
        assert_eq!(cache.lock().runs.check(), Ok(()));
    });
}

/// Makes stream caches known to each other.
fn row(caches: &[&'static StreamCache]) {
    let row: Others = caches.into();
    for cache in caches {
        cache.lock().set_others(Some(&row));
    }
}

/// Takes a request beyond the remaining room, as callers do before they enter the heap.
fn take_with_help(cache: &'static StreamCache, granules: u32) -> Option<Taken> {
    let request = request(granules);
    let (inner, borrowed) = cache.borrow_room(cache.lock(), request.bytes());
    drop(inner);
    if borrowed || cache.pool_room(request.bytes()) {
        return take(cache, granules);
    }
    None
}

fn limits(caches: &[&'static StreamCache]) -> u64 {
    let limits = caches
        .iter()
        .map(|f| f.lock().runs.accounts.allocated.limit());
    limits.sum::<u64>() / GRANULE
}

/// Two stream caches that take room from each other concurrently, one by one or all together, do not deadlock; the sum
/// of the limits stays the same; and while there is enough for one of them, one succeeds.
#[test]
fn interleavings_of_borrowed_room() {
    loom::model(|| {
        let caches = [cache(0, PAGE, 3), cache(1, 2 * PAGE, 3)];
        row(&caches);
        let [left, right] = caches;
        let other = thread::spawn(move || take_with_help(right, 4).is_some());
        let mine = take_with_help(left, 4).is_some();
        let theirs = other.join().unwrap_or(false);
        assert!(mine || theirs, "one of them has enough");
        assert!(!(mine && theirs), "there is not enough for both");
        assert_eq!(limits(&caches), 6);
        let current = |cache: &StreamCache| cache.lock().runs.accounts.allocated.current();
        assert_eq!(current(left) + current(right), 4 * GRANULE);
    });
}

/// All room is pooled while the lending stream cache serves its own thread.
#[test]
fn interleavings_of_pooled_room() {
    loom::model(|| {
        let caches = [cache(0, PAGE, 2), cache(1, 2 * PAGE, 2)];
        row(&caches);
        let [left, right] = caches;
        let other = thread::spawn(move || {
            let mine = right.lock().take(request(1));
            matches!(mine, Allocated::Taken(_))
        });
        let pooled = left.pool_room(3 * GRANULE);
        let mine = take(left, 3);
        let theirs = other.join().unwrap_or(false);
        assert!(theirs || pooled, "one of them came first");
        assert_eq!(mine.is_some(), pooled, "what was pooled is there");
        assert_eq!(limits(&caches), 4);
        let accounts = [left, right].map(|cache| cache.lock().runs.accounts.allocated);
        let [mine, theirs] = accounts.map(|account| account.current() + account.room());
        assert_eq!(mine + theirs, 4 * GRANULE);
    });
}

/// A stopped stream cache lends no room.
#[test]
fn interleavings_of_room_and_a_retirement() {
    loom::model(|| {
        let caches = [cache(0, PAGE, 1), cache(1, 2 * PAGE, 3)];
        row(&caches);
        let [left, right] = caches;
        let other = thread::spawn(move || {
            let mut inner = right.lock();
            inner.set_fast(false);
            inner.runs.accounts.allocated.room()
        });
        let mine = take_with_help(left, 2);
        let room = other.join().unwrap_or(0);
        assert_eq!(
            room < 3 * GRANULE,
            mine.is_some(),
            "it aliased before, or never"
        );
        assert_eq!(limits(&caches), 4);
    });
}

/// Of stream caches that are stopped one after another, none lends to another any more: their limits can be subtracted
/// from the sum one by one.
#[test]
fn interleavings_of_room_and_the_end_of_a_row() {
    loom::model(|| {
        let caches = [cache(0, PAGE, 3), cache(1, 2 * PAGE, 1)];
        row(&caches);
        let [left, right] = caches;
        let other = thread::spawn(move || {
            for cache in [left, right] {
                cache.lock().set_fast(false);
            }
            let limits = [left, right].map(|cache| cache.lock().runs.accounts.allocated.limit());
            limits.iter().sum::<u64>() / GRANULE
        });
        let (inner, _) = right.borrow_room(right.lock(), 2 * GRANULE);
        drop(inner);
        assert_eq!(other.join().unwrap_or(0), 4);
    });
}

/// Pages are removed under memory pressure while a thread allocates and frees.
#[test]
fn interleavings_of_a_flush() {
    loom::model(|| {
        let cache = cache(0, PAGE, 8);
        let other = thread::spawn(move || {
            let mut inner = cache.lock();
            inner.runs.flush_quick();
            inner.runs.remove_page(0)
        });
        let mine = take(cache, 1);
        let freed = mine.is_some_and(|mine| free(cache, &mine));
        let gone = other.join().ok().flatten();
        assert_eq!(mine.is_some(), freed);
        assert!(gone.is_some() || freed, "a live block keeps its page");
        let inner = cache.lock();
        assert_eq!(inner.runs.page_count(), usize::from(gone.is_none()));
        assert_eq!(inner.runs.check(), Ok(()));
    });
}

/// The stream of a stream cache retires: a thread that still knows the cache gets a block before that, or none.
#[test]
fn interleavings_of_a_retirement() {
    loom::model(|| {
        let cache = cache(0, PAGE, 8);
        assert!(take(cache, 1).is_some_and(|first| free(cache, &first)));
        let other = thread::spawn(move || {
            let mut inner = cache.lock();
            inner.set_fast(false);
            inner.runs.accounts.blocks.current()
        });
        let mine = cache.lock().take_anywhere(OWNER, request(1));
        let seen = other.join().unwrap_or(0);
        assert_eq!(seen == 1, mine.is_some(), "what was given was seen");
        assert!(cache.lock().take_anywhere(OWNER, request(1)).is_none());
        // The stream cache is assigned to another stream.
        cache.lock().key = OWNER.key + 1;
        cache.lock().set_fast(true);
        assert!(cache.lock().take_anywhere(OWNER, request(1)).is_none());
    });
}

/// A page is published while its address is looked up: the lookup finds nothing, or the complete page.
#[test]
fn interleavings_of_a_publication() {
    loom::model(|| {
        let table: &'static PageTable = Box::leak(Box::new(PageTable::new(1)));
        let cache = cache(0, PAGE, 8);
        let base = 2 * PAGE;
        let info = table.info(base).expect("an address of a device");
        let other = thread::spawn(move || {
            let mut inner = cache.lock();
            let page = inner.runs.add_page(info);
            table.set(base, cache, page);
        });
        if let Some((found, page)) = table.find(base + 512) {
            let inner = found.lock();
            let run = inner.runs.around(page, base + 512);
            assert_eq!(run.map(|run| run.ptr), Some(base));
        }
        assert!(other.join().is_ok());
        assert!(table.find(base).is_some());
    });
}

/// A stream gets a second cache: the threads use separate caches, and each frees the blocks of the other.
#[test]
fn interleavings_of_a_split() {
    loom::model(|| {
        let (old, new) = (cache(0, PAGE, 4), cache(1, 2 * PAGE, 4));
        let kept = take(old, 1);
        let other = thread::spawn(move || {
            let mine = take(new, 1);
            let freed = kept.is_some_and(|kept| free(old, &kept));
            (mine, freed)
        });
        let mine = take(old, 1);
        let (theirs, freed) = other.join().unwrap_or((None, false));
        assert!(freed, "a live block is freed");
        assert!(theirs.is_some_and(|theirs| free(new, &theirs)));
        assert!(mine.is_some_and(|mine| free(old, &mine)));
        for cache in [old, new] {
            let inner = cache.lock();
            assert_eq!(inner.runs.accounts.blocks.current(), 0);
            assert_eq!(inner.runs.check(), Ok(()));
        }
    });
}
