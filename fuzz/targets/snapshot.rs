//! Memory snapshots, pickled or as JSON: any bytes are refused, or give a snapshot whose devices are traces.
#![no_main]

use cualloc::record::Snapshot;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(snapshot) = Snapshot::read(bytes) else {
        return;
    };
    for device in 0..snapshot.devices() {
        if let Ok(trace) = snapshot.to_trace("fuzzed", device) {
            let failed = snapshot.failed_requests(device).len();
            assert_eq!(trace.failed_requests().count(), failed);
        }
        drop(snapshot.gaps(device));
    }
    assert!(Snapshot::read(&snapshot.to_pickle()).is_ok());
});
