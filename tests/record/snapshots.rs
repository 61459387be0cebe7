//! Snapshots of other programs as traces.

use cualloc::record::Snapshot;

/// What was there before the history of a snapshot begins counts in its peak: whether it fits depends on it.
#[test]
fn blocks_older_than_the_trace_of_a_snapshot_come_first() {
    let block = |state: &str, size: u64, asked: u64| {
        format!(r#"{{"size":{size},"requested_size":{asked},"state":"{state}","frames":[]}}"#)
    };
    let blocks = [
        block("active_allocated", 1024, 1000),
        block("inactive", 512, 0),
        block("active_allocated", 2048, 2000),
        block("active_pending_free", 4096, 4000),
    ];
    let segments = |device: u64| {
        format!(
            r#"{{"device":{device},"address":512,"total_size":7680,"stream":7,"segment_type":"small","blocks":[{}]}}"#,
            blocks.join(",")
        )
    };
    let entry = |action: &str, addr: u64, size: u64| {
        format!(r#"{{"action":"{action}","addr":{addr},"size":{size},"stream":7,"time_us":1}}"#)
    };
    let trace = [
        entry("free_requested", 9216, 300),
        entry("free_completed", 9216, 300),
        entry("alloc", 2048, 2000),
        entry("alloc", 9216, 100),
    ];
    let json = format!(
        r#"{{"segments":[{},{}],"device_traces":[[{}],[]]}}"#,
        segments(0),
        segments(1000),
        trace.join(",")
    );
    let snapshot = Snapshot::read(json.as_bytes()).unwrap();
    let rows = |device| crate::scene::rows(&snapshot.to_trace("older", device).unwrap());
    // Live at the end, pending at the end, and freed by the trace; then what the trace says.
    let first = "a,0,1000,0 a,1,4000,0 a,2,300,0";
    assert_eq!(rows(0), format!("{first} f,2,0,0 a,3,2000,0 a,4,100,0"));
    assert_eq!((rows(1), snapshot.devices()), (String::new(), 1001));
    assert_eq!(rows(1000), "a,0,1000,0 a,1,2000,0 a,2,4000,0");
    let beyond = json.replace("\"device\":1000", "\"device\":1024");
    let beyond = Snapshot::read(beyond.as_bytes()).unwrap_err();
    assert_eq!(
        beyond.to_string(),
        "`segments[1].device`: expected the ordinal of a device, below 1024, found 1024"
    );
}

/// The request that failed is what the reader of a snapshot wants to know about; it has a row of its own.
#[test]
fn failed_requests_of_a_snapshot_are_rows() {
    let json = r#"{"segments":[],"device_traces":[[
        {"action":"oom","device_free":7,"size":900,"stream":9,"time_us":1},
        {"action":"alloc","addr":512,"size":100,"stream":0,"time_us":2},
        {"action":"oom","device_free":0,"size":5000,"stream":0,"time_us":3},
        {"action":"free_requested","addr":512,"size":100,"stream":0,"time_us":4},
        {"action":"free_completed","addr":512,"size":100,"stream":0,"time_us":5}]]}"#;
    let trace = Snapshot::read(json.as_bytes()).unwrap();
    let trace = trace.to_trace("oom", 0).unwrap();
    let rows = crate::scene::rows(&trace);
    assert_eq!(rows, "oom,0,900,0 a,0,100,1 oom,0,5000,1 f,0,0,1");
    assert_eq!(trace.requested_peak(), 100);
}

/// More streams than 16 bits can number.
#[test]
fn every_stream_of_a_snapshot_appears_in_its_trace() {
    const STREAMS: u64 = (1 << 16) + 2;
    let entry = |number: u64| {
        let (addr, stream) = (512 * (number + 1), 4096 + number);
        format!(
            r#"{{"action":"alloc","addr":{addr},"size":512,"stream":{stream},"time_us":{number}}}"#
        )
    };
    let entries: Vec<String> = (0..STREAMS).map(entry).collect();
    let json = format!(
        r#"{{"segments":[],"device_traces":[[{}]]}}"#,
        entries.join(",")
    );
    let snapshot = Snapshot::read(json.as_bytes()).unwrap();
    let trace = snapshot.to_trace("many", 0).unwrap();
    assert_eq!(trace.streams().len() as u64, STREAMS);
    // As text, too.
    let mut text = Vec::new();
    trace.write(&mut text).unwrap();
    let again = cualloc::trace::Trace::read("many", text.as_slice()).unwrap();
    assert_eq!(again.rows(), trace.rows());
}
