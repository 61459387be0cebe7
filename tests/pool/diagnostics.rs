//! Reports.

use cualloc::pool::{Fragmentation, PoolReport, SizeHistogram};

use crate::common::{KIB, each};

/// S3.23
#[test]
fn s3_23_a_report_describes_the_allocator() {
    each(|rig| {
        let allocator = rig.allocator();
        let stream = rig.stream();
        let before = PoolReport::of(&allocator);
        assert!(!before.leaks());
        assert_eq!(before.fragmentation.count, 0);
        let blocks: Vec<_> = (0..3)
            .map(|_| allocator.allocate(100 * KIB, &stream).unwrap())
            .collect();
        let report = PoolReport::of(&allocator);
        let blocks_of = &report.usage.blocks;
        let counts = (blocks_of.current, blocks_of.total_allocated);
        assert_eq!((counts, blocks_of.total_freed), ((3, 3), 0));
        assert!(report.leaks());
        assert_eq!(report.sizes.count(SizeHistogram::bucket(100 << 10)), 3);
        assert_eq!(report.usage.requested.current, 300 << 10);
        assert_eq!(
            report.usage.used.current + report.fragmentation.total_free,
            report.usage.reserved.current
        );
        let text = report.to_string();
        assert!(text.contains("3 blocks"), "{text}");
        drop(blocks);
        let report = PoolReport::of(&allocator);
        assert!(!report.leaks());
        assert_eq!(report.sizes.total(), 0);
        assert_eq!(report.usage.used.peak, 300 << 10);
        rig.close(&allocator);
    });
}

/// S3.22
#[test]
fn s3_22_fragmentation_excludes_the_largest_piece() {
    let none = Fragmentation::of([]);
    assert_eq!((none.ratio(), none.mean()), (0.0, 0));
    let one = Fragmentation::of([4096]);
    assert_eq!((one.ratio(), one.mean()), (0.0, 4096));
    let some = Fragmentation::of([1024, 512, 512]);
    let pieces = (some.total_free, some.largest_free, some.count);
    assert_eq!(pieces, (2048, 1024, 3));
    assert_eq!((some.ratio(), some.mean()), (0.5, 682));
}

/// S3.21
#[test]
fn s3_21_histogram_has_32_buckets_by_powers_of_two() {
    for bucket in 0..SizeHistogram::BUCKETS {
        let range = SizeHistogram::range(bucket).unwrap();
        assert_eq!(SizeHistogram::bucket(range.start), bucket);
        assert_eq!(SizeHistogram::bucket(range.end - 1), bucket);
    }
    let first = [0, 1, 31].map(SizeHistogram::range);
    assert_eq!(first, [0..32, 32..64, 1 << 35..u64::MAX].map(Some));
    assert_eq!(SizeHistogram::bucket(u64::MAX), 31);
    assert_eq!(SizeHistogram::range(32), None);

    let mut sizes = SizeHistogram::default();
    assert_eq!(sizes.median(), None);
    for bytes in 1..=100 {
        sizes.record(bytes, 1);
    }
    let shares = [0.0, 31.0, 32.0, 50.0, 250.0].map(|share| sizes.percentile(share));
    assert_eq!(shares, [0..32, 0..32, 32..64, 32..64, 64..128].map(Some));
    assert_eq!(sizes.percentile(f64::NAN), None);

    sizes.record(1 << 20, u64::MAX);
    sizes.record(1 << 20, 5);
    assert_eq!(sizes.count(SizeHistogram::bucket(1 << 20)), u64::MAX);
    assert_eq!(sizes.total(), u64::MAX);
    assert_eq!(sizes.median(), Some(1 << 20..1 << 21));
}
