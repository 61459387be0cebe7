//! Recordings: any bytes are refused, or give a recording of which everything else can be made.
#![no_main]

use cualloc::record::{Profile, Recording, Snapshot};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(recording) = Recording::read_at_most(bytes, 1 << 16) else {
        return;
    };
    if let Ok(trace) = recording.to_trace("fuzzed", None) {
        assert!(trace.rows().len() <= 2 * recording.events().len());
    }
    let snapshot = Snapshot::of(&recording);
    let again = Snapshot::read(&snapshot.to_pickle()).unwrap();
    assert_eq!(again.devices(), snapshot.devices());
    assert!(snapshot.to_json().starts_with('{'));
    for profile in [Profile::of(&recording), Profile::of_stacks(&recording)] {
        assert!(!profile.to_pprof().is_empty());
        let live = profile.shares().filter(|(_, share)| share.live_bytes > 0);
        assert_eq!(profile.to_collapsed().lines().count(), live.count());
    }
    recording.failed_requests(None).iter().for_each(|failed| drop(failed.advice()));
});
