//! Tests of the regimes and of the sizes of handles.

use super::*;
use crate::allocator::Config;

const MIB: u64 = 1 << 20;

fn want(bytes: u64) -> Want {
    Want {
        space: SpaceId::Large,
        stream: 0,
        granules: (bytes / GRANULE) as u32,
        align: 1,
        requested: bytes,
        single: false,
        whole: false,
        views: true,
    }
}

fn physical(limit: Option<u64>, profile: Profile) -> Physical {
    let bounds = Bounds {
        limit,
        device: 80 << 30,
        headroom: 512 * MIB,
    };
    Physical::new(bounds, Config::new().profile(profile).tuning())
}

#[test]
fn memory_is_scarce_where_the_device_has_little_beside_the_headroom() {
    let mut physical = physical(None, Profile::Default);
    let margin = (80 << 30) / 100 * SCARCE_PERCENT;
    let mut choose = |free, held| {
        physical.note_free(Some(free), held);
        physical.choose_regime(held)
    };
    assert_eq!(choose(margin + 512 * MIB, 1000 * MIB), None);
    let scarce = Some(Regime::Scarce(Scarcity::Device));
    assert_eq!(choose(margin + 511 * MIB, 1000 * MIB), scarce);
    assert_eq!(choose(100 * MIB, 1000 * MIB), None);
    assert_eq!(physical.room(1000 * MIB), 0);
    // An unknown amount of free memory does not change the regime.
    physical.note_free(None, 1000 * MIB);
    assert_eq!(physical.choose_regime(1000 * MIB), None);
    assert_eq!(physical.room(u64::MAX - MIB), MIB);
}

#[test]
fn memory_is_scarce_near_the_limit_and_after_a_refusal() {
    let scarce = |why| Some(Regime::Scarce(why));
    let mut physical = physical(Some(1000 * MIB), Profile::Default);
    assert_eq!(physical.choose_regime(960 * MIB), None);
    assert_eq!(physical.choose_regime(980 * MIB), scarce(Scarcity::Limit));
    let calm = |physical: &mut Physical| {
        (0..CALM_REQUESTS).for_each(|_| physical.count_request(&want(MIB)));
    };
    // Less than twice the margin is left, or too few requests have passed.
    calm(&mut physical);
    assert_eq!(physical.choose_regime(960 * MIB), None);
    assert_eq!(physical.regime, Regime::Scarce(Scarcity::Limit));
    calm(&mut physical);
    assert_eq!(physical.choose_regime(900 * MIB), Some(Regime::Plentiful));
    assert_eq!(physical.note_refusal(800 * MIB), scarce(Scarcity::Refused));
    assert_eq!(physical.choose_regime(790 * MIB), None);
    // The driver reports memory again.
    physical.note_free(Some(10_000 * MIB), 700 * MIB);
    assert_eq!(physical.choose_regime(700 * MIB), None);
    calm(&mut physical);
    assert_eq!(physical.choose_regime(700 * MIB), Some(Regime::Plentiful));
}

#[test]
fn the_dense_profile_is_always_scarce() {
    let physical = physical(None, Profile::Dense);
    assert_eq!(physical.regime, Regime::Scarce(Scarcity::Profile));
    assert_eq!(
        physical.soft_cap(10_000 * MIB, MemoryUsers::One),
        10_100 * MIB
    );
    assert_eq!(physical.growth_step(10_000 * MIB), PHYSICAL_GRANULE);
}

#[test]
fn handles_are_a_part_of_the_pool_and_few_while_memory_is_plentiful() {
    let physical = physical(None, Profile::Default);
    for (held, size) in [
        (100, 2),
        (300, 4),
        (1000, 8),
        (2000, 16),
        (6000, 64),
        (39_000, 64),
        (50_000, 32),
    ] {
        let made = physical.handle_size(&want(2 * MIB), 2 * MIB, held * MIB, MemoryUsers::One);
        assert_eq!(made, size * MIB, "{held} MiB");
        let step = physical.growth_step(held * MIB);
        assert_eq!(step, (size / 2).max(2) * MIB, "{held} MiB");
    }
    assert_eq!(physical.soft_cap(100 * MIB, MemoryUsers::One), 132 * MIB);
    assert_eq!(
        physical.soft_cap(10_000 * MIB, MemoryUsers::One),
        10_300 * MIB
    );
    assert_eq!(
        physical.soft_cap(10_000 * MIB, MemoryUsers::Several),
        10_500 * MIB
    );
}

/// Sizes in MiB of a handle for a small request to a pool, and for a large request to an empty pool.
#[test]
fn handles_are_small_while_memory_is_scarce() {
    let physical = physical(None, Profile::Dense);
    let shares = |sharers| {
        let size = |held| physical.handle_size(&want(2 * MIB), 2 * MIB, held * MIB, sharers);
        [640, 641, 1280, 1281, 1792]
            .map(size)
            .map(|size| size / MIB)
    };
    let parts = |sharers| {
        let size = |mib| physical.handle_size(&want(mib * MIB), mib * MIB, 0, sharers);
        [128, 240, 256, 512, 960].map(size).map(|size| size / MIB)
    };
    assert_eq!(shares(MemoryUsers::One), [2, 4, 4, 8, 8]);
    assert_eq!(parts(MemoryUsers::One), [4, 4, 8, 16, 16]);
    assert_eq!(shares(MemoryUsers::Several), [2, 2, 2, 4, 4]);
    assert_eq!(parts(MemoryUsers::Several), [8, 8, 16, 16, 16]);
    assert_eq!(shares(MemoryUsers::Pool), [2, 2, 2, 4, 4]);
    assert_eq!(parts(MemoryUsers::Pool), [16, 16, 32, 64, 64]);
}

#[test]
fn handles_are_small_from_half_of_the_limit_on() {
    let physical = physical(Some(16_384 * MIB), Profile::Default);
    let size = |held| physical.handle_size(&want(2 * MIB), 2 * MIB, held * MIB, MemoryUsers::One);
    assert_eq!([size(8000), size(8192)], [32 * MIB, 8 * MIB]);
}

#[test]
fn tiling_covers_exactly_with_the_fewest_pieces_of_halving_size() {
    let mib = 1 << 20;
    assert_eq!(tile(14 * mib, 8 * mib), [8 * mib, 4 * mib, 2 * mib]);
    assert_eq!(tile(6 * mib, 6 * mib), [6 * mib]);
    assert_eq!(tile(2 * mib, 64 * mib), [2 * mib]);
    for granules in 1..200 {
        for size in [1, 2, 3, 5, 8, 16] {
            let sizes = tile(granules * PHYSICAL_GRANULE, size * PHYSICAL_GRANULE);
            assert_eq!(sizes.iter().sum::<u64>(), granules * PHYSICAL_GRANULE);
            assert!(
                sizes
                    .iter()
                    .all(|s| s % PHYSICAL_GRANULE == 0 && *s <= size * PHYSICAL_GRANULE)
            );
        }
    }
}
