//! Reports.

use cualloc::pool::{PoolReport, SizeHistogram};

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
