//! An independent judge: random programs, and a second oracle that knows the driver's calls alone.
//!
//! `docs/testing.md` (The judge) says what it knows, and how to run more of it:
//!
//! ```text
//! CUALLOC_JUDGE_PROGRAMS=200000 CUALLOC_JUDGE_SEED=7 CUALLOC_JUDGE_PROCESSES=16 \
//!     cargo test --release --test judge -- --nocapture
//! ```
#![cfg(feature = "sim")]

mod captures;
#[path = "../common/mod.rs"]
mod common;
mod complaints;
mod court;
mod end;
mod graphs;
mod layers;
mod program;
mod requests;
mod run;
mod threads;
mod world;

use common::rng;
use court::{law, table};
