//! Replays a recording with both policies, as `cualloc replay` does, and compares what they hold.
//!
//! ```text
//! cargo run --release --example replay --features sim [FILE]
//! ```
//!
//! FILE is a recording as text (`tests/data/README.md` says how it looks); without one a program is made up.

use std::error::Error;
use std::fs::File;
use std::io::BufReader;

use cualloc::Policy;
use cualloc::driver::Driver;
use cualloc::trace::generate::{Kind, Program};
use cualloc::trace::{self, Options, Stage, Trace};

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
    let stage = Stage::new(&driver.device(0)?)?;
    println!("{}: {} rows", trace.name(), trace.rows().len());
    for policy in [Policy::Packed, Policy::Classic] {
        let mut options = Options::default();
        options.policy = policy;
        options.repeat = 2;
        let report = trace::replay(&stage, &trace, &options, &mut |_| {})?;
        if let Some(failure) = report.failure {
            return Err(failure.into());
        }
        let ratio = report.reserved_peak as f64 / trace.requested_peak() as f64;
        println!("{policy:?}: holds {ratio:.4} times what is asked for");
    }
    Ok(())
}
