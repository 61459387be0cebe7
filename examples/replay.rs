//! Replays a recording with both policies, as `cualloc replay` does, and compares what they hold.
//!
//! ```text
//! cargo run --release --example replay --features sim [FILE]
//! ```
//!
//! FILE is a trace as text, described in `tests/data/README.md`; without one, a program is generated.

use std::error::Error;
use std::fs::File;
use std::io::BufReader;

use cualloc::driver::Driver;
use cualloc::trace::generate::{Kind, Program};
use cualloc::trace::{Replay, Trace};
use cualloc::{Config, Policy};

fn main() -> Result<(), Box<dyn Error>> {
    let trace = match std::env::args().nth(1) {
        Some(path) => Trace::read(path.as_str(), BufReader::new(File::open(&path)?))?,
        None => {
            let mut program = Program::new(Kind::Random, 1);
            program.rows = Some(5000);
            program.trace("made up")?
        }
    };
    let driver = Driver::load_or_simulate()?;
    let context = driver.context(0)?;
    println!("{}: {} rows", trace.name(), trace.rows().len());
    for policy in [Policy::Packed, Policy::Classic] {
        let config = Config::new().policy(policy);
        let report = Replay::new(&trace).repeat(2).config(config).run(&context)?;
        if let Some(error) = report.error {
            return Err(error.into());
        }
        let ratio = report.reserved_peak as f64 / trace.requested_peak() as f64;
        println!("{policy:?}: holds {ratio:.4} times what is asked for");
    }
    Ok(())
}
