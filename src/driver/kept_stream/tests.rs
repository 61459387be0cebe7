use super::*;
use crate::sim::{SimConfig, Simulator};
use std::sync::mpsc::channel;

fn borrowed(simulator: &Simulator) -> (Stream, Stream) {
    let owned = Stream::new(&simulator.context(0).unwrap()).unwrap();
    // SAFETY: the owned stream lives as long as the borrowed one.
    let borrowed = unsafe { Stream::from_raw(owned.context(), owned.raw()) };
    (owned, borrowed.unwrap())
}

fn is_there(kept: &KeptStream) -> bool {
    kept.with(|stream| stream.is_some())
}

#[test]
fn a_retirement_takes_a_borrowed_stream_from_all_that_keep_it() {
    let simulator = Simulator::new(SimConfig::default()).unwrap();
    let ((owned, one), (_other, two)) = (borrowed(&simulator), borrowed(&simulator));
    let retire_one = || retire(one.context().driver(), one.raw());
    let kept = [&one, &one, &two, &owned].map(KeptStream::new);
    assert_eq!(kept.each_ref().map(is_there), [true; 4]);
    retire_one();
    assert_eq!(kept.each_ref().map(is_there), [false, false, true, true]);
    // A stream kept after the retirement is alive, even if it has the same handle.
    let later = KeptStream::new(&one);
    assert!(is_there(&later));
    drop(kept);
    retire_one();
    assert!(!is_there(&later));
}

#[test]
fn loans_end_with_the_last_that_keeps_the_stream() {
    let simulator = Simulator::new(SimConfig::default()).unwrap();
    let (_owned, one) = borrowed(&simulator);
    let key = key(one.context().driver(), one.raw());
    let is_known = || LOANS.lock().as_ref().unwrap().contains_key(&key);
    let kept = [&one, &one].map(KeptStream::new);
    assert!(is_known());
    drop(kept);
    assert!(!is_known());
}

#[test]
fn a_retirement_waits_for_uses_under_way() {
    let simulator = Simulator::new(SimConfig::default()).unwrap();
    let (_owned, one) = borrowed(&simulator);
    let kept = KeptStream::new(&one);
    let (retired, has_retired) = channel();
    std::thread::scope(|threads| {
        kept.with(|stream| {
            assert!(stream.is_some());
            threads.spawn(|| {
                retire(one.context().driver(), one.raw());
                retired.send(()).unwrap();
            });
            let is_taken = |_| {
                std::thread::yield_now();
                !is_there(&kept)
            };
            assert!((0..100_000_000).any(is_taken));
            // The retirement must be waiting for this use.
            assert!(has_retired.try_recv().is_err());
        });
        has_retired.recv().unwrap();
    });
    assert!(!is_there(&kept));
}
