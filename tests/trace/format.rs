//! The trace reader: what it accepts, and for every rule of the format the line it names.

use cualloc::trace::{Op, Trace, TraceError, TraceFault};
use std::error::Error;
use std::io::{self, BufReader, Read};
use std::path::PathBuf;

fn data(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(path)
}

fn read(path: &str) -> Result<Trace, TraceError> {
    let file = std::fs::File::open(data(path)).unwrap();
    Trace::read(path, BufReader::new(file))
}

fn parse(text: &str) -> Result<Trace, TraceError> {
    Trace::read("text", text.as_bytes())
}

#[test]
fn lf_and_crlf_read_alike() {
    for path in ["lf.csv", "crlf.csv"] {
        let trace = read(path).unwrap();
        assert_eq!(trace.name(), path);
        assert_eq!(trace.rows().len(), 8);
        assert_eq!(trace.streams(), [0, 1]);
        assert_eq!(trace.requested_peak(), 1_048_576 + 300);
        let released: Vec<_> = trace.allocations().iter().map(|a| a.released).collect();
        assert_eq!(released, [Some(2), None, Some(6), Some(7)]);
        assert_eq!(trace.rows()[3].op, Op::Allocate);
        assert_eq!(trace.rows()[3].bytes, 524_288);
        assert_eq!(trace.rows()[3].stream, 1);
        assert_eq!(trace.rows()[6].op, Op::Complete);
    }
}

#[test]
fn a_late_completion_keeps_its_block_in_the_peak() {
    let early = parse("op,id,bytes,stream\na,0,100,0\nf,0,0,0\na,1,10,0\nf,1,0,0\n").unwrap();
    assert_eq!(early.requested_peak(), 100);
    let late =
        parse("op,id,bytes,stream\na,0,100,0\nf,0,0,0\na,1,10,0\nc,0,0,0\nf,1,0,0\n").unwrap();
    assert_eq!(late.requested_peak(), 110);
}

#[test]
fn edges_that_are_valid() {
    let none = parse("op,id,bytes,stream").unwrap();
    assert_eq!((none.rows().len(), none.requested_peak()), (0, 0));
    assert!(none.streams().is_empty());
    // The last line may end with the file, stream numbers may have gaps, and the bytes of `f` and
    // `c` are ignored.
    let trace =
        parse("op,id,bytes,stream\r\na,0,18446744073709551615,4294967295\nf,0,9,4294967295\nc,0,9,4294967295")
            .unwrap();
    assert_eq!(trace.requested_peak(), u64::MAX);
    assert_eq!(trace.streams(), [4294967295]);
    assert_eq!(trace.rows()[1].bytes, 0);
    assert_eq!(trace.allocations()[0].released, Some(2));
    assert_eq!(Trace::line_of(2), 4);
}

/// Failed requests are rows without a block: also before the first block, and they are not live.
#[test]
fn failed_requests_are_rows_without_a_block() {
    let text = "op,id,bytes,stream\noom,7,900,3\na,0,100,0\noom,0,5000,0\nf,0,0,0\na,1,70,0\n";
    let trace = parse(text).unwrap();
    let oom = [&trace.rows()[0], &trace.rows()[2]];
    assert!(oom.iter().all(|row| row.op == Op::Oom && row.id == 0));
    assert_eq!(
        oom.map(|row| (row.bytes, row.stream)),
        [(900, 3), (5000, 0)]
    );
    assert_eq!(trace.allocations().len(), 2);
    assert_eq!((trace.requested_peak(), trace.streams()), (100, &[0][..]));
    assert_eq!(trace.live_bytes().collect::<Vec<_>>(), [0, 100, 100, 0, 70]);
    assert_eq!(trace.peak_row(), 1);
    let mut written = Vec::new();
    trace.write(&mut written).unwrap();
    assert_eq!(
        String::from_utf8(written).unwrap(),
        text.replace("oom,7", "oom,0")
    );
    let again = Trace::from_rows("rows", trace.rows().iter().copied()).unwrap();
    assert_eq!(again.rows(), trace.rows());
    let only = parse("op,id,bytes,stream\noom,0,1,0\n").unwrap();
    assert_eq!((only.rows().len(), only.requested_peak()), (1, 0));
    let none = parse("op,id,bytes,stream\na,0,1,0\noom,0,0,0\n").unwrap_err();
    assert!(matches!(none.fault(), TraceFault::ZeroBytes), "{none}");
    assert_eq!(none.line(), 3);
}

/// A broken file, the line that breaks it, and the fault.
macro_rules! broken {
    ($($file:literal, $line:literal, $fault:pat,)*) => {
        const BROKEN: &[&str] = &[$($file),*];
        #[test]
        fn every_rule_names_its_line() {
            $(
                let error = read(concat!("broken/", $file, ".csv")).expect_err($file);
                assert!(matches!(error.fault(), $fault), "{}: {error:?}", $file);
                assert_eq!(error.line(), $line, "{}", $file);
                assert!(error.to_string().starts_with(&format!("line {}: ", $line)), "{error}");
            )*
        }
    };
}

broken! {
    "header", 1, TraceFault::Header { .. },
    "header_space", 1, TraceFault::Header { .. },
    "empty", 1, TraceFault::Header { .. },
    "unknown_op", 3, TraceFault::UnknownOp { .. },
    "blank_line", 3, TraceFault::UnknownOp { .. },
    "id_gap", 3, TraceFault::IdOutOfOrder { expected: 1, found: 2, .. },
    "id_reused", 4, TraceFault::IdOutOfOrder { expected: 1, found: 0, .. },
    "id_not_from_zero", 2, TraceFault::IdOutOfOrder { expected: 0, found: 1, .. },
    "freed_twice", 4, TraceFault::FreedTwice { id: 0, .. },
    "freed_before_allocated", 3, TraceFault::UnknownId { id: 1, .. },
    "completed_twice", 5, TraceFault::CompletedTwice { id: 0, .. },
    "completed_before_freed", 3, TraceFault::CompletedBeforeFreed { id: 0, .. },
    "completed_unknown", 4, TraceFault::UnknownId { id: 7, .. },
    "zero_bytes", 3, TraceFault::ZeroBytes,
    "bytes_overflow", 2, TraceFault::NotANumber { field: "bytes", .. },
    "id_overflow", 3, TraceFault::NotANumber { field: "id", .. },
    "negative", 2, TraceFault::NotANumber { field: "bytes", .. },
    "plus_sign", 2, TraceFault::NotANumber { field: "bytes", .. },
    "not_a_number", 3, TraceFault::NotANumber { field: "bytes", .. },
    "not_text", 2, TraceFault::NotANumber { field: "stream", .. },
    "stream_too_large", 2, TraceFault::StreamTooLarge { found: 4294967296, .. },
    "stream_changed", 3, TraceFault::StreamChanged { id: 0, expected: 1, found: 2, .. },
    "field_missing", 2, TraceFault::FieldMissing { field: "stream", .. },
    "field_left_over", 2, TraceFault::FieldsLeftOver,
    "line_too_long", 2, TraceFault::LineTooLong,
    "live_bytes_overflow", 3, TraceFault::LiveBytesOverflow,
}

#[test]
fn every_broken_file_is_listed() {
    for entry in std::fs::read_dir(data("broken")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        assert!(BROKEN.contains(&name), "{name} is in no test");
    }
}

/// A reader that fails behind its first line.
struct Torn<'a>(&'a [u8]);

impl Read for Torn<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.0.read(buffer)? {
            0 => Err(io::Error::other("torn")),
            read => Ok(read),
        }
    }
}

#[test]
fn a_reader_that_fails_is_named_with_its_line_and_its_own_words() {
    let reader = BufReader::new(Torn(b"op,id,bytes,stream\na,0,5,0\n"));
    let error = Trace::read("torn", reader).unwrap_err();
    assert_eq!(error.line(), 3);
    assert!(matches!(error.fault(), TraceFault::Read { .. }));
    assert_eq!(error.source().unwrap().to_string(), "torn");
}

#[test]
fn a_byte_order_mark_is_skipped_and_invalid_numbers_are_reported() {
    let read = |text: &str| Trace::read("marked", text.as_bytes());
    let trace = read("\u{FEFF}op,id,bytes,stream\na,0,512,0\n").unwrap();
    assert_eq!(trace.rows().len(), 1);
    assert!(read("\u{FEFF}\u{FEFF}op,id,bytes,stream\n").is_err());
    for number in ["-512", "+1", "1.5", "", "18446744073709551616"] {
        let error = read(&format!("op,id,bytes,stream\na,0,{number},0\n")).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "line 2: `bytes`: expected a whole number from 0 to 18446744073709551615, found `{number}`"
            )
        );
    }
}
