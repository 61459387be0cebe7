//! All interleavings of what threads do at fronts, tried by loom on the code itself:
//!
//! ```text
//! RUSTFLAGS='--cfg loom' cargo test --release -p cualloc --lib interleavings
//! ```

use super::grain::PageInfo;
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

/// A front with one page and room for some granules.
fn front(rank: u32, base: u64, room: u64) -> &'static Front {
    let front: &'static Front = Box::leak(Box::new(Front::new(rank)));
    let mut inner = front.lock();
    (inner.allocator, inner.key) = (OWNER.allocator, OWNER.key);
    inner.set_fast(true);
    inner.runs.add_page(PageInfo {
        base,
        generation: 1,
        number: 1,
    });
    inner.accounts.allocated.set_room(room * GRANULE);
    drop(inner);
    front
}

fn take(front: &Front, granules: u32) -> Option<Taken> {
    match front.lock().take(request(granules)) {
        Allocated::Taken(taken) => Some(taken),
        _ => None,
    }
}

fn free(front: &Front, taken: &Taken) -> bool {
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
        assert_eq!(inner.runs.check(), Ok(()));
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
        assert_eq!(front.lock().runs.check(), Ok(()));
    });
}

/// Fronts that know each other.
fn row(fronts: &[&'static Front]) {
    let row: Others = fronts.into();
    for front in fronts {
        front.lock().set_others(&row);
    }
}

/// Takes a request beyond the room that is left, as callers do who have not come to the books.
fn take_with_help(front: &'static Front, granules: u32) -> Option<Taken> {
    let request = request(granules);
    let (inner, borrowed) = front.borrow_room(front.lock(), request.bytes());
    drop(inner);
    if borrowed || front.pool_room(request.bytes()) {
        return take(front, granules);
    }
    None
}

fn limits(fronts: &[&'static Front]) -> u64 {
    let limits = fronts.iter().map(|f| f.lock().accounts.allocated.limit());
    limits.sum::<u64>() / GRANULE
}

/// Two fronts that take room from each other at once, one by one or all together: no deadlock, the
/// limits together stay, and while there is enough for one of them somebody gets it.
#[test]
fn interleavings_of_lent_room() {
    loom::model(|| {
        let fronts = [front(0, PAGE, 3), front(1, 2 * PAGE, 3)];
        row(&fronts);
        let [left, right] = fronts;
        let other = thread::spawn(move || take_with_help(right, 4).is_some());
        let mine = take_with_help(left, 4).is_some();
        let theirs = other.join().unwrap_or(false);
        assert!(mine || theirs, "one of them has enough");
        assert!(!(mine && theirs), "there is not enough for both");
        assert_eq!(limits(&fronts), 6);
        let current = |front: &Front| front.lock().accounts.allocated.current();
        assert_eq!(current(left) + current(right), 4 * GRANULE);
    });
}

/// All room is pooled while the front that lends it serves its own thread.
#[test]
fn interleavings_of_pooled_room() {
    loom::model(|| {
        let fronts = [front(0, PAGE, 2), front(1, 2 * PAGE, 2)];
        row(&fronts);
        let [left, right] = fronts;
        let other = thread::spawn(move || {
            let mine = right.lock().take(request(1));
            matches!(mine, Allocated::Taken(_))
        });
        let pooled = left.pool_room(3 * GRANULE);
        let mine = take(left, 3);
        let theirs = other.join().unwrap_or(false);
        assert!(theirs || pooled, "one of them came first");
        assert_eq!(mine.is_some(), pooled, "what was pooled is there");
        assert_eq!(limits(&fronts), 4);
        let accounts = [left, right].map(|front| front.lock().accounts.allocated);
        let [mine, theirs] = accounts.map(|account| account.current() + account.room());
        assert_eq!(mine + theirs, 4 * GRANULE);
    });
}

/// A front that is stopped lends nothing any more.
#[test]
fn interleavings_of_room_and_a_retirement() {
    loom::model(|| {
        let fronts = [front(0, PAGE, 1), front(1, 2 * PAGE, 3)];
        row(&fronts);
        let [left, right] = fronts;
        let other = thread::spawn(move || {
            let mut inner = right.lock();
            inner.set_fast(false);
            inner.accounts.allocated.room()
        });
        let mine = take_with_help(left, 2);
        let room = other.join().unwrap_or(0);
        assert_eq!(
            room < 3 * GRANULE,
            mine.is_some(),
            "it lent before, or never"
        );
        assert_eq!(limits(&fronts), 4);
    });
}

/// Of fronts that are stopped, one after the other, none lends to the other any more: their limits can be
/// taken out of the sum one by one.
#[test]
fn interleavings_of_room_and_the_end_of_a_row() {
    loom::model(|| {
        let fronts = [front(0, PAGE, 3), front(1, 2 * PAGE, 1)];
        row(&fronts);
        let [left, right] = fronts;
        let other = thread::spawn(move || {
            for front in [left, right] {
                front.lock().set_fast(false);
            }
            let limits = [left, right].map(|front| front.lock().accounts.allocated.limit());
            limits.iter().sum::<u64>() / GRANULE
        });
        let (inner, _) = right.borrow_room(right.lock(), 2 * GRANULE);
        drop(inner);
        assert_eq!(other.join().unwrap_or(0), 4);
    });
}

/// Pages are taken away under pressure while a thread allocates and frees.
#[test]
fn interleavings_of_a_flush() {
    loom::model(|| {
        let front = front(0, PAGE, 8);
        let other = thread::spawn(move || {
            let mut inner = front.lock();
            inner.runs.flush_quick();
            inner.runs.remove_page(0)
        });
        let mine = take(front, 1);
        let freed = mine.is_some_and(|mine| free(front, &mine));
        let gone = other.join().ok().flatten();
        assert_eq!(mine.is_some(), freed);
        assert!(gone.is_some() || freed, "the page is somebody's");
        let inner = front.lock();
        assert_eq!(inner.runs.page_count(), usize::from(gone.is_none()));
        assert_eq!(inner.runs.check(), Ok(()));
    });
}

/// The stream of a front retires: a thread that still knows it gets a block before, or none.
#[test]
fn interleavings_of_a_retirement() {
    loom::model(|| {
        let front = front(0, PAGE, 8);
        assert!(take(front, 1).is_some_and(|first| free(front, &first)));
        let other = thread::spawn(move || {
            let mut inner = front.lock();
            inner.set_fast(false);
            inner.accounts.blocks.current()
        });
        let mine = front.lock().take_anywhere(OWNER, request(1));
        let seen = other.join().unwrap_or(0);
        assert_eq!(seen == 1, mine.is_some(), "what was given was seen");
        assert!(front.lock().take_anywhere(OWNER, request(1)).is_none());
        // Another stream gets the front.
        front.lock().key = OWNER.key + 1;
        front.lock().set_fast(true);
        assert!(front.lock().take_anywhere(OWNER, request(1)).is_none());
    });
}

/// A page is published while its address is looked up: it is not found, or it is all there.
#[test]
fn interleavings_of_a_publication() {
    loom::model(|| {
        let table: &'static PageTable = Box::leak(Box::new(PageTable::new()));
        let front = front(0, PAGE, 8);
        let base = 2 * PAGE;
        let info = table.info(base).expect("an address of a device");
        let other = thread::spawn(move || {
            let mut inner = front.lock();
            let page = inner.runs.add_page(info);
            table.set(base, front, page);
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
            assert_eq!(inner.runs.check(), Ok(()));
        }
    });
}
