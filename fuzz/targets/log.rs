//! Allocation logs: any bytes are refused, or give a log whose devices are traces.
#![no_main]

use cualloc::trace::AllocationLog;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(log) = AllocationLog::read(bytes) else {
        return;
    };
    for device in log.devices() {
        drop(log.to_trace("fuzzed", device));
        drop(log.gaps(device));
    }
});
