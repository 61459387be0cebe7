//! Traces: any bytes are refused, or give a trace that is the same when it is written and read again.
#![no_main]

use cualloc::trace::Trace;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(trace) = Trace::read("fuzzed", bytes) else {
        return;
    };
    let mut text = Vec::new();
    trace.write(&mut text).unwrap();
    let again = Trace::read("again", &text[..]).unwrap();
    assert_eq!(again.rows(), trace.rows());
    assert_eq!(again.required_peak(), trace.required_peak());
});
