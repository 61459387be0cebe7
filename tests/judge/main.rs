//! The judge: random programs against an oracle that knows only the driver calls.
//!
//! It sits in the function table between allocator and driver and keeps vector clocks of streams, events and what the
//! host has observed, with the implicit order between legacy and blocking streams. `cuMemFree`, `cuMemFreeHost`,
//! `cuMemHostAlloc` and the loading of modules order nothing for it. It follows physical bytes through every mapping. The
//! program tells it only which blocks were handed out, recorded, freed or guarded, what was suspended, and which graphs use
//! a pool; other programs with random steps use it too. It reports
//!
//! - a block that overlaps a live or guarded one in physical bytes, or is not mapped and accessible as a whole;
//! - a block whose bytes were used before, unless that use precedes the next work on the block's stream or the host has
//!   observed its completion;
//! - an unmapping, a free of a segment, or a last release, under live or guarded blocks or unfinished work;
//! - a call that invalidates a capture, unless the capture began while the call was in progress; work of a capture that is
//!   taken for order outside of it;
//! - for graphs: bytes that a node touches without depending on their last user, or that another graph may touch; an
//!   unmapping of what a graph may touch; a launch that touches missing memory or a live block that is no graph's;
//! - suspended memory that is used, or that returns at another address;
//! - a report of the simulator, a failing `check()`, a panic, an error without a cause, and anything held after `close`.
//!
//! `violations.rs` has a log for each of these, beside the log that is right. A failing program is shrunk and printed;
//! programs with threads or graphs are printed by number. Longer runs:
//!
//! ```text
//! CUALLOC_JUDGE_PROGRAMS=200000 CUALLOC_JUDGE_SEED=7 CUALLOC_JUDGE_PROCESSES=16 \
//!     cargo test --release --test judge -- --nocapture
//! ```
//!
//! | variable | meaning |
//! |---|---|
//! | `CUALLOC_JUDGE_PROFILE` | only this profile of `program.rs` |
//! | `CUALLOC_JUDGE_PROGRAM` | only the program with this number, which a failure prints with its profile |
//! | `CUALLOC_JUDGE_WATCHFUL` | run in a process in which something was captured before |
//! | `CUALLOC_JUDGE_PROCESSES`, `CUALLOC_JUDGE_SHARE=I/N` | number of processes; one share of the programs |
//! | `CUALLOC_JUDGE_KEEP_GOING` | count failures instead of ending with the first |
//! | `CUALLOC_JUDGE_WITHOUT` | features to leave out, separated by commas: a step of `program.rs`, `mixed`, `classic`, `classic-free`, `900`, `executed`, `refused`, `retire-beside`, `thread-faults`, `close-beside`, `debug` |
#![cfg(feature = "sim")]

mod captures;
#[path = "../common/mod.rs"]
mod common;
mod violations;
// Other programs use more of it.
#[allow(dead_code)]
mod checker;
mod end;
mod graphs;
mod layers;
mod lives;
mod profiles;
mod program;
mod requests;
mod run;
mod threads;
mod world;

use checker::{table, tracker};
use common::rng;
