use super::*;
use crate::allocator::graph::plan::{PlanFailure, PlanResources};
use crate::allocator::size::PHYSICAL_GRANULE;

const GRANULES: u32 = (PHYSICAL_GRANULE / GRANULE) as u32;

fn means(views: bool) -> PlanResources<'static> {
    PlanResources {
        room: 1 << 30,
        views,
        size: &|_| PHYSICAL_GRANULE,
    }
}

fn arena() -> Arena {
    let mut arena = Arena::default();
    arena.homes.add(1 << 40, 64 * PHYSICAL_GRANULE, false);
    arena.sites.add(1 << 41, 64 * PHYSICAL_GRANULE, false);
    arena
}

fn fit(granules: u32) -> Fit {
    Fit {
        granules,
        align: 1,
        views: true,
    }
}

/// Takes a block, with new memory if needed; returns its place.
fn block(arena: &mut Arena, granules: u32, views: bool) -> Place {
    let runs = arena.runs(|_| true);
    if let Some(place) = arena.find(fit(granules), |_| true) {
        place.parts.iter().for_each(|part| drop(arena.take(*part)));
        return place;
    }
    let plan = arena.plan(fit(granules), &runs, &means(views)).unwrap();
    let sizes = plan.fresh.iter().flat_map(|(_, sizes)| sizes);
    let handles: Vec<u64> = (1..).zip(sizes).map(|(handle, _)| handle).collect();
    arena.planned(plan, &handles)
}

fn free(arena: &mut Arena, place: &Place) {
    place
        .parts
        .iter()
        .for_each(|part| arena.put(*part, Tag::default()));
}

#[test]
fn growth_maps_what_is_missing_beside_free_memory() {
    let mut arena = arena();
    let first = block(&mut arena, GRANULES / 2, false);
    assert_eq!((first.addr, arena.held()), (1 << 40, PHYSICAL_GRANULE));
    let second = block(&mut arena, GRANULES, false);
    assert_eq!(second.addr, first.addr + PHYSICAL_GRANULE / 2);
    assert_eq!(arena.held(), 2 * PHYSICAL_GRANULE);
    assert_eq!(arena.free_bytes(), PHYSICAL_GRANULE / 2);
}

#[test]
fn scattered_handles_become_one_block_in_a_view() {
    let mut arena = arena();
    let blocks: Vec<Place> = (0..7).map(|_| block(&mut arena, GRANULES, true)).collect();
    for place in blocks.iter().step_by(2) {
        free(&mut arena, place);
    }
    let long = block(&mut arena, 3 * GRANULES + GRANULES / 2, true);
    assert_eq!((long.addr, arena.held()), (1 << 41, 7 * PHYSICAL_GRANULE));
    assert_eq!(arena.free_bytes(), PHYSICAL_GRANULE / 2);
    assert_eq!(
        arena.parts_at(long.addr, 3 * GRANULES + GRANULES / 2),
        Some(long.parts)
    );
    // Without views this required new memory.
    let other = block(&mut arena, GRANULES, false);
    assert_eq!(other.parts.len(), 1);
}

#[test]
fn the_shortest_run_serves_a_request_and_the_lowest_on_ties() {
    let mut arena = arena();
    let sizes = [4, 1, 3, 1, 2, 1, 2, 1];
    let blocks = sizes.map(|granules| block(&mut arena, granules, false));
    let _ = [0, 2, 4, 6].map(|at: usize| free(&mut arena, &blocks[at]));
    for (granules, run) in [(2, 4), (2, 6), (2, 2), (2, 0)] {
        let place = block(&mut arena, granules, false);
        assert_eq!(place.addr, blocks[run].addr, "{granules}");
    }
}

#[test]
fn a_view_serves_again_where_free_handles_adjoin_in_it() {
    const SITE: u64 = 1 << 41;
    let mut arena = arena();
    let blocks: Vec<Place> = (0..7).map(|_| block(&mut arena, GRANULES, true)).collect();
    for place in blocks.iter().step_by(2) {
        free(&mut arena, place);
    }
    for _ in 0..2 {
        let whole = block(&mut arena, 4 * GRANULES, true);
        assert_eq!((whole.addr, arena.views.len()), (SITE, 1));
        free(&mut arena, &whole);
    }
    let [first, second] = [(); 2].map(|()| block(&mut arena, GRANULES, true));
    assert_eq!((&first, &second), (&blocks[0], &blocks[2]));
    free(&mut arena, &first);
    // The first handle of the view is free, but the second is not.
    let back = block(&mut arena, GRANULES + GRANULES / 2, true);
    assert_eq!(back.addr, SITE + 2 * PHYSICAL_GRANULE);
    let homes: Vec<u64> = back.parts.iter().map(|part| part.home).collect();
    assert_eq!(homes, [blocks[4].addr, blocks[6].addr]);
}

#[test]
fn a_plan_that_fails_leaves_all_as_it_was() {
    let mut arena = arena();
    let blocks: Vec<Place> = (0..4).map(|_| block(&mut arena, GRANULES, true)).collect();
    free(&mut arena, &blocks[0]);
    free(&mut arena, &blocks[2]);
    let before = (
        arena.free_bytes(),
        arena.held(),
        arena.homes.lowest(1),
        arena.sites.lowest(1),
    );
    let runs = arena.runs(|_| true);
    let plan = arena.plan(fit(3 * GRANULES), &runs, &means(true)).unwrap();
    assert_eq!(plan.fresh_bytes(), PHYSICAL_GRANULE);
    let failure = crate::allocator::physical::GrowthFailure {
        error: crate::driver::DriverError::new(
            "cuMemCreate",
            crate::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        ),
        mapped: Vec::new(),
    };
    arena.revert(plan, &failure, &[]);
    let after = (
        arena.free_bytes(),
        arena.held(),
        arena.homes.lowest(1),
        arena.sites.lowest(1),
    );
    assert_eq!(before, after);
    let none = PlanResources {
        room: 0,
        ..means(true)
    };
    let refused = arena.plan(fit(3 * GRANULES), &runs, &none).unwrap_err();
    assert_eq!(refused, PlanFailure::Memory(PHYSICAL_GRANULE));
}

#[test]
fn addresses_without_memory_serve_again() {
    let mut arena = arena();
    let blocks = [(); 3].map(|()| block(&mut arena, GRANULES, true));
    let _ = [0, 2].map(|at: usize| free(&mut arena, &blocks[at]));
    assert_eq!(block(&mut arena, 2 * GRANULES, true).parts.len(), 2);
    arena.forget_memory();
    let whole = [&arena.homes, &arena.sites].map(|at| at.lowest(64 * PHYSICAL_GRANULE));
    assert_eq!(whole, [Some(1 << 40), Some(1 << 41)]);
}

#[test]
fn failed_releases_are_repeated() {
    let (mut arena, mut left) = (arena(), arena());
    let place = block(&mut left, 2 * GRANULES, false);
    free(&mut left, &place);
    arena.absorb(left);
    assert_eq!(arena.held(), 2 * PHYSICAL_GRANULE);
    assert!(arena.take_addresses().is_empty(), "they are mapped");
    let handles = arena.take_handles();
    let homes: Vec<_> = handles
        .iter()
        .map(|(home, _, mapped)| (*home, *mapped))
        .collect();
    assert_eq!(
        homes,
        [(1 << 40, true), ((1 << 40) + PHYSICAL_GRANULE, true)]
    );
    assert_eq!(arena.take_addresses().len(), 2);
}

#[test]
fn pieces_with_equal_tags_merge() {
    let mut arena = arena();
    let whole = block(&mut arena, GRANULES, false);
    let half = |at: u64| Part {
        home: whole.addr + at * PHYSICAL_GRANULE / 2,
        granules: GRANULES / 2,
    };
    let used = Tag {
        pending: vec![Pending {
            stream: 1,
            event: 2,
        }],
        ..Tag::default()
    };
    arena.put(half(0), Tag::default());
    arena.put(half(1), used.clone());
    assert_eq!(arena.tags().count(), 2);
    assert_eq!(arena.runs(|tag| tag.pending.is_empty()).len(), 1);
    arena.retag(|tag| tag.pending.clear());
    assert_eq!(arena.tags().count(), 1);
}

/// The outer parts of a piece from whose middle a block is taken keep the piece's uses.
#[test]
fn remainders_on_both_sides_of_a_piece_keep_its_uses() {
    let mut arena = arena();
    let whole = block(&mut arena, 6, false);
    let home = whole.parts[0].home;
    let used = Tag {
        pending: vec![Pending {
            stream: 1,
            event: 2,
        }],
        captured: true,
        ..Tag::default()
    };
    let part = |at: u64, granules| Part {
        home: home + at * GRANULE,
        granules,
    };
    arena.put(part(0, 6), used.clone());
    let mut seen = Vec::new();
    arena.take_each(part(2, 2), |part, tag| seen.push((part, tag.clone())));
    assert_eq!(seen, [(part(2, 2), used.clone())]);
    let left: Vec<_> = arena
        .tags()
        .filter(|(part, _)| part.home < home + 6 * GRANULE)
        .collect();
    assert_eq!(left, [(part(0, 2), &used), (part(4, 2), &used)]);
    assert_eq!(arena.take(part(4, 2)), [(part(4, 2), used.clone())]);
    assert_eq!(arena.take(part(1, 1)), [(part(1, 1), used.clone())]);
    assert_eq!(arena.take(part(0, 1)), [(part(0, 1), used)]);
}

#[test]
fn a_view_shows_no_handle_twice() {
    let mut arena = arena();
    // A handle whose front and back are free, but whose middle is not.
    let [front, middle, back] =
        [2, 1, 2].map(|fifths| block(&mut arena, GRANULES * fifths / 5, true));
    free(&mut arena, &front);
    free(&mut arena, &back);
    let scattered = block(&mut arena, GRANULES * 3 / 5, true);
    free(&mut arena, &middle);
    free(&mut arena, &scattered);
    for view in arena.views.values() {
        let mut shown: Vec<u64> = view.handles.iter().map(|(home, _)| *home).collect();
        shown.sort_unstable();
        assert!(shown.windows(2).all(|pair| pair[0] < pair[1]), "{shown:?}");
    }
    let long = block(&mut arena, GRANULES * 3 / 2, true);
    let mut parts = long.parts;
    parts.sort_unstable();
    assert!(
        parts.windows(2).all(|pair| pair[0].end() <= pair[1].home),
        "{parts:?}"
    );
}
