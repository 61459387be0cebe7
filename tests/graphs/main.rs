//! Graph pools on a driver that runs what was captured: memory that keeps its address.
//!
//! The simulator launches graphs in any order that their edges allow, and reports every race and every use of memory
//! that is not there. Each test ends with the assertion that there was no report.
//!
//! Rules that always hold; tests and mutants name them by these labels:
//!
//! | label | rule |
//! |---|---|
//! | I1 | no byte of a live block is in another block, through any address, or in what a launch writes |
//! | I2 | no byte that work outside of captures may use is given to a capture, or to another stream |
//! | I3 | two uses of a byte in one capture are ordered by its graph |
//! | I4 | while a graph has a lease, what was mapped under it stays mapped |
//! | I5 | a request goes to the pool of its scope, and without a scope to none |
//! | I6 | a failed call changes nothing and invalidates no capture |
//! | I7 | no event is recorded on a stream that is being captured, none waits for it, and only a caller who names it queries its graph |
//! | I8 | suspended memory returns at the same addresses, with the same access and the contents that were kept |
//! | I9 | after the last lease and the last block nothing is held: memory, handles, addresses |
//! | I10 | other requests are placed as they would be without the capture |
//!
//! Labels with G are small models of real programs: layers as chains and forks (G2, G3), random programs (G4), 35 batch
//! sizes in one pool (G5), threads beside a capture (G7), failing calls (G8), outputs that are read later (G11), graphs that end before their launches (G12), checkpoints (G13), a thousand captures (G17).
#![cfg(feature = "sim")]

#[path = "../common/mod.rs"]
mod common;
// Other programs use more of it.
mod again;
mod buffers;
#[allow(dead_code)]
#[path = "../judge/checker/mod.rs"]
mod checker;
mod emptied;
mod idle;
mod judged;
mod kept;
mod leases;
mod postponed;
mod random;
mod refused;
mod reuse;
mod scopes;
mod sources;
mod support;
mod uses;
