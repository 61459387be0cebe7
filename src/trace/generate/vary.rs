//! A program repeated with changed sizes.

use super::draft::Random;
use crate::trace::format::{Op, Row, Trace};

pub(super) fn rows(trace: &Trace, copies: usize, percent: u8, seed: u64) -> Vec<Row> {
    let percent = u64::from(percent.min(99));
    let mut random = Random::new(seed);
    let mut rows = Vec::with_capacity(trace.rows().len() * copies);
    let blocks = trace.allocations().len();
    for copy in 0..copies {
        let first = copy * blocks;
        for row in trace.rows() {
            let share = random.between(100 - percent, 100 + percent);
            let bytes = match row.op {
                // In parts of a hundredth, so that nothing overflows, and never nothing.
                Op::Allocate => (row.bytes / 100 * share + row.bytes % 100 * share / 100).max(1),
                _ => 0,
            };
            rows.push(Row {
                id: first + row.id,
                bytes,
                ..*row
            });
        }
        for (id, block) in trace.allocations().iter().enumerate() {
            if block.released.is_none() {
                rows.push(Row {
                    op: Op::Free,
                    stream: block.stream,
                    id: first + id,
                    bytes: 0,
                });
            }
        }
    }
    rows
}
