//! All interleavings of what threads do at fronts, tried by loom on the code itself:
//!
//! ```text
//! RUSTFLAGS='--cfg loom' cargo test --release -p cualloc --lib interleavings
//! ```

use super::grain::PageInfo;
use super::*;
use loom::thread;

const ALLOCATOR: u64 = 7;
const PAGE: u64 = 64 << 10;

fn request(granules: u32) -> Small {
    Small {
        granules,
        align: 1,
        requested: granules * GRANULE as u32,
    }
}

/// A front with one page and room for some granules.
fn front(rank: u32, base: u64, room: u64) -> &'static Front<()> {
    let front: &'static Front<()> = Box::leak(Box::new(Front::new(rank)));
    let mut inner = front.lock();
    inner.allocator = ALLOCATOR;
    inner.set_fast(true);
    inner.heap.add_page(PageInfo {
        base,
        generation: 1,
    });
    inner.accounts.allocated.set_room(room * GRANULE);
    drop(inner);
    front
}

fn take(front: &Front<()>, granules: u32) -> Option<Taken> {
    match front.lock().take(request(granules)) {
        Allocated::Taken(taken) => Some(taken),
        _ => None,
    }
}

fn free(front: &Front<()>, taken: &Taken) -> bool {
    let life = Life::Generation(taken.generation);
    front.lock().free_at_once(taken.node, life)
}

/// A block that another thread frees is handed out again once, and no two live ones overlap.
#[test]
fn interleavings_of_a_free_by_another_thread() {
    loom::model(|| {
        let front = front(0, PAGE, 8);
        let first = take(front, 2);
        let other = thread::spawn(move || first.is_some_and(|first| free(front, &first)));
        let mine = take(front, 2);
        let next = take(front, 2);
        assert!(other.join().is_ok_and(|freed| freed));
        let (mine, next) = mine.zip(next).expect("there is room for three");
        assert!(mine.ptr + 1024 <= next.ptr || next.ptr + 1024 <= mine.ptr);
        let inner = front.lock();
        assert_eq!(inner.accounts.blocks.current(), 2);
        assert_eq!(inner.heap.check(), Ok(()));
    });
}

/// Of two frees of one life one succeeds.
#[test]
fn interleavings_of_a_double_free() {
    loom::model(|| {
        let front = front(0, PAGE, 8);
        let block = take(front, 1).expect("there is room");
        let other =
            thread::spawn(move || front.lock().free_at_once(block.node, Life::At(block.ptr)));
        let mine = front.lock().free_at_once(block.node, Life::At(block.ptr));
        let theirs = other.join().unwrap_or(mine);
        assert!(mine != theirs);
        assert_eq!(front.lock().heap.check(), Ok(()));
    });
}

/// Two fronts that lend each other room at once: no deadlock, and the limits together stay.
#[test]
fn interleavings_of_lent_room() {
    loom::model(|| {
        let (left, right) = (front(0, PAGE, 3), front(1, 2 * PAGE, 3));
        left.lock().set_neighbours([Some(right), None]);
        right.lock().set_neighbours([Some(left), None]);
        let other = thread::spawn(move || right.take_with_help(ALLOCATOR, request(4)));
        let mine = left.take_with_help(ALLOCATOR, request(4));
        let theirs = other.join().unwrap_or(Allocated::Stranger);
        let taken = [mine, theirs].map(|outcome| matches!(outcome, Allocated::Taken(_)));
        assert!(taken[0] || taken[1], "one of them has enough");
        let limit = |front: &Front<()>| front.lock().accounts.allocated.limit();
        assert_eq!(limit(left) + limit(right), 6 * GRANULE);
        let current = |front: &Front<()>| front.lock().accounts.allocated.current();
        assert!(current(left) + current(right) <= 6 * GRANULE);
    });
}

/// Pages are taken away under pressure while a thread allocates and frees.
#[test]
fn interleavings_of_a_flush() {
    loom::model(|| {
        let front = front(0, PAGE, 8);
        let other = thread::spawn(move || {
            let mut inner = front.lock();
            inner.heap.flush_quick();
            inner.heap.remove_page(0)
        });
        let mine = take(front, 1);
        let freed = mine.is_some_and(|mine| free(front, &mine));
        let gone = other.join().ok().flatten();
        assert_eq!(mine.is_some(), freed);
        assert!(gone.is_some() || freed, "the page is somebody's");
        let inner = front.lock();
        assert_eq!(inner.heap.page_count(), usize::from(gone.is_none()));
        assert_eq!(inner.heap.check(), Ok(()));
    });
}

/// The stream of a front retires: a thread that still has its pass gets a block before, or none.
#[test]
fn interleavings_of_a_retirement() {
    loom::model(|| {
        let front = front(0, PAGE, 8);
        let pass = front.lock().pass().unwrap_or(NO_PASS);
        let other = thread::spawn(move || {
            let mut inner = front.lock();
            inner.set_fast(false);
            inner.accounts.blocks.current()
        });
        let mine = front.lock().take_at_once(pass, 1, 512);
        let seen = other.join().unwrap_or(0);
        assert_eq!(seen == 1, mine.is_some(), "what was given was seen");
        assert!(front.lock().take_at_once(pass, 1, 512).is_none());
        // Another stream gets the front: the old pass is not its.
        front.lock().set_fast(true);
        assert!(front.lock().take_at_once(pass, 1, 512).is_none());
    });
}

/// A page is published while its address is looked up: it is not found, or it is all there.
#[test]
fn interleavings_of_a_publication() {
    loom::model(|| {
        let table: &'static PageTable<()> = Box::leak(Box::new(PageTable::new()));
        let front = front(0, PAGE, 8);
        let base = 2 * PAGE;
        let info = table.info(base).expect("an address of a device");
        let other = thread::spawn(move || {
            let mut inner = front.lock();
            let page = inner.heap.add_page(info);
            table.set(base, front, page);
        });
        if let Some((found, page)) = table.find(base + 512) {
            let inner = found.lock();
            let run = inner.heap.around(page, base + 512);
            assert_eq!(run.map(|run| run.ptr), Some(base));
        }
        assert!(other.join().is_ok());
        assert!(table.find(base).is_some());
    });
}

/// A stream is split: the threads use its fronts apart, and each frees what the other has given.
#[test]
fn interleavings_of_a_split() {
    loom::model(|| {
        let (old, new) = (front(0, PAGE, 4), front(1, 2 * PAGE, 4));
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
        for front in [old, new] {
            let inner = front.lock();
            assert_eq!(inner.accounts.blocks.current(), 0);
            assert_eq!(inner.heap.check(), Ok(()));
        }
    });
}
