//! The ways of writing and reading. Each round gets two addresses of one memory, which the next round swaps.

use super::lab::Needs::{self, Bulk, Nothing, Words};
use super::lab::{ADD, ANY, ATOMIC_ADD, CHECK, CONSTANT, EXCHANGE, Lab, READ_ONLY, STORE};
use crate::common::prelude::*;

pub struct Case {
    pub name: &'static str,
    pub needs: Needs,
    /// Lab, address to write, address to read, bytes, seed.
    pub run: fn(&Lab<'_>, u64, u64, usize, u32),
}

const fn case(name: &'static str, needs: Needs, run: fn(&Lab<'_>, u64, u64, usize, u32)) -> Case {
    Case { name, needs, run }
}

/// The reader comes after the writer, on the same stream or behind an event. Where it matters the
/// reader's address was read before, so that whatever is cached by address is there.
pub const IN_ORDER: &[Case] = &[
    case("kernel, kernel", Nothing, |lab, w, r, bytes, seed| {
        lab.fill(r, bytes, 1, &lab.a);
        lab.check(r, bytes, 1, &lab.a);
        lab.fill(w, bytes, seed, &lab.a);
        lab.check(r, bytes, seed, &lab.a);
    }),
    case("kernel, event", Nothing, |lab, w, r, bytes, seed| {
        lab.fill(w, bytes, seed, &lab.a);
        lab.follow(&lab.b, &lab.a);
        lab.check(r, bytes, seed, &lab.b);
        lab.follow(&lab.a, &lab.b);
    }),
    case("copy in, kernel", Nothing, |lab, w, r, bytes, seed| {
        lab.fill(lab.spare, bytes, seed, &lab.a);
        lab.copy(w, lab.spare, bytes, &lab.a);
        lab.check(r, bytes, seed, &lab.a);
    }),
    case("kernel, copy out", Nothing, |lab, w, r, bytes, seed| {
        lab.fill(w, bytes, seed, &lab.a);
        lab.copy(lab.spare, r, bytes, &lab.a);
        lab.check(lab.spare, bytes, seed, &lab.a);
    }),
    case("fill, copy out", Nothing, |lab, w, r, bytes, seed| {
        lab.rig.stamp(w, bytes, seed, &lab.a);
        lab.copy(lab.spare, r, bytes, &lab.a);
        assert_eq!(lab.rig.mismatches(lab.spare, 4 * KIB, seed, &lab.a), 0);
    }),
    case("fill, kernel", Words, |lab, w, r, bytes, seed| {
        lab.rig.stamp(w, bytes, seed, &lab.a);
        lab.words(CONSTANT, ANY, r, bytes, seed, &lab.a);
    }),
    case("kernel, read-only", Words, |lab, w, r, bytes, seed| {
        lab.words(STORE, ANY, r, bytes, 1, &lab.a);
        lab.words(READ_ONLY, ANY, r, bytes, 1, &lab.a);
        lab.words(STORE, ANY, w, bytes, seed, &lab.a);
        lab.words(READ_ONLY, ANY, r, bytes, seed, &lab.a);
    }),
    case("atomics, loads", Words, |lab, w, r, bytes, seed| {
        lab.words(EXCHANGE, ANY, w, bytes, seed, &lab.a);
        lab.words(ATOMIC_ADD, ANY, r, bytes, 5, &lab.a);
        lab.words(ADD, ANY, w, bytes, 6, &lab.a);
        lab.words(CHECK, ANY, r, bytes, seed + 11, &lab.a);
        lab.words(CHECK, ANY, w, bytes, seed + 11, &lab.a);
    }),
    case("kernel, bulk copy", Bulk, |lab, w, r, bytes, seed| {
        lab.words(STORE, ANY, r, bytes, 1, &lab.a);
        lab.bulk_check(ANY, r, bytes, 1, &lab.a);
        lab.words(STORE, ANY, w, bytes, seed, &lab.a);
        lab.bulk_check(ANY, r, bytes, seed, &lab.a);
    }),
    case("bulk copy, kernel", Bulk, |lab, w, r, bytes, seed| {
        lab.words(CHECK, ANY, r, 0, 0, &lab.a);
        lab.bulk_fill(ANY, w, bytes, seed, &lab.a);
        lab.words(CHECK, ANY, r, bytes, seed, &lab.a);
    }),
];

/// Two owners of alternate 512-byte pieces of the same pages, each through its own address and on its own stream,
/// without any order between them; then each reads what the other wrote.
pub const AT_ONCE: &[Case] = &[
    case("fills", Nothing, |lab, w, r, bytes, seed| {
        // One call a piece: a part of the memory is enough.
        let pieces = (bytes / 512).min(64) as u64;
        lab.follow(&lab.b, &lab.a);
        for piece in 0..pieces {
            let (at, stream) = if piece % 2 == 0 {
                (w, &lab.a)
            } else {
                (r, &lab.b)
            };
            lab.rig
                .stamp(at + piece * 512, 512, seed + piece as u32, stream);
        }
        lab.follow(&lab.a, &lab.b);
        lab.copy(lab.spare, r, pieces as usize * 512, &lab.a);
        for piece in 0..pieces {
            let at = lab.spare + piece * 512;
            let wrong = lab.rig.mismatches(at, 512, seed + piece as u32, &lab.a);
            assert_eq!(wrong, 0, "piece {piece}");
        }
    }),
    case("plain and atomic", Words, |lab, w, r, bytes, seed| {
        both(lab, w, r, bytes, seed, [STORE, ADD], [STORE, ADD]);
        both(lab, w, r, bytes, seed, [STORE, ATOMIC_ADD], [STORE, ADD]);
        both(
            lab,
            w,
            r,
            bytes,
            seed,
            [EXCHANGE, ATOMIC_ADD],
            [EXCHANGE, ATOMIC_ADD],
        );
    }),
    case("bulk beside accesses", Bulk, |lab, w, r, bytes, seed| {
        lab.follow(&lab.b, &lab.a);
        lab.bulk_fill(0, w, bytes, seed, &lab.a);
        lab.words(STORE, 1, r, bytes, seed + 1, &lab.b);
        lab.bulk_check(0, w, bytes, seed, &lab.a);
        lab.words(ATOMIC_ADD, 1, r, bytes, 3, &lab.b);
        lab.words(ADD, 0, w, bytes, 9, &lab.a);
        lab.bulk_check(1, r, bytes, seed + 4, &lab.b);
        lab.follow(&lab.a, &lab.b);
        lab.bulk_check(0, r, bytes, seed + 9, &lab.a);
        lab.bulk_check(1, w, bytes, seed + 4, &lab.a);
    }),
    case("bulk on both sides", Bulk, |lab, w, r, bytes, seed| {
        lab.follow(&lab.b, &lab.a);
        lab.bulk_fill(0, w, bytes, seed, &lab.a);
        lab.bulk_fill(1, r, bytes, seed + 1, &lab.b);
        lab.bulk_check(0, w, bytes, seed, &lab.a);
        lab.bulk_check(1, r, bytes, seed + 1, &lab.b);
        lab.follow(&lab.a, &lab.b);
        lab.words(CHECK, 0, r, bytes, seed, &lab.a);
        lab.words(CHECK, 1, w, bytes, seed + 1, &lab.a);
    }),
];

/// One owner writes `seed` to its pieces and adds 3, the other writes `seed + 5` and adds 9.
fn both(lab: &Lab<'_>, w: u64, r: u64, bytes: usize, seed: u32, mine: [u32; 2], theirs: [u32; 2]) {
    lab.follow(&lab.b, &lab.a);
    lab.words(mine[0], 0, w, bytes, seed, &lab.a);
    lab.words(theirs[0], 1, r, bytes, seed + 5, &lab.b);
    lab.words(mine[1], 0, w, bytes, 3, &lab.a);
    lab.words(theirs[1], 1, r, bytes, 9, &lab.b);
    lab.words(CHECK, 0, w, bytes, seed + 3, &lab.a);
    lab.words(CHECK, 1, r, bytes, seed + 14, &lab.b);
    lab.follow(&lab.a, &lab.b);
    lab.words(CHECK, 1, w, bytes, seed + 14, &lab.a);
    lab.words(CHECK, 0, r, bytes, seed + 3, &lab.a);
}
