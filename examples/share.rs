//! A block shared with another process: this program starts itself a second time and sends it a token.
//!
//! ```text
//! cargo run --example share --features sim,share
//! ```

use std::error::Error;
use std::io::{BufRead, Write};
use std::process::{Command, Stdio};

use cualloc::driver::{Driver, Stream};
use cualloc::share::{Export, Foreign, Import, Token};
use cualloc::{Allocator, Config, DeviceBuffer};

const BYTES: usize = 3 << 20;
const BYTE: u8 = 42;

fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1).as_deref() {
        None => exporter(),
        Some(_) => importer(),
    }
}

fn exporter() -> Result<(), Box<dyn Error>> {
    let context = Driver::load_or_simulate()?.context(0)?;
    let allocator = Allocator::with_config(&context, Config::from_env()?)?;
    let stream = allocator.create_stream()?;
    let block = allocator.allocate(BYTES, &stream)?;
    // SAFETY: the block is that long.
    unsafe { stream.memset(block.ptr(), BYTE, BYTES) }?;
    // The work has to be complete before the other process uses the block.
    stream.synchronize()?;
    let export = Export::new(block, Foreign::Allow)?;
    let outside = export.foreign_bytes();
    println!("{BYTES} bytes are shared, and {outside} bytes beside them in their handles");

    let mut other = Command::new(std::env::current_exe()?)
        .arg("importer")
        .stdin(Stdio::piped())
        .spawn()?;
    if let Some(mut input) = other.stdin.take() {
        writeln!(input, "{}", export.token())?;
    }
    let ended = other.wait()?;
    // The other process has ended, so nothing uses the block any more.
    drop(export.into_block());
    match ended.success() {
        true => Ok(()),
        false => Err(format!("the other process failed: {ended}").into()),
    }
}

fn importer() -> Result<(), Box<dyn Error>> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let token: Token = line.trim_end().parse()?;
    let context = Driver::load_or_simulate()?.context(0)?;
    let import = Import::open(&context, &token)?;
    println!(
        "{} bytes of process {} are at {:#x}",
        import.bytes(),
        token.process(),
        import.ptr()
    );
    let (ptr, stream) = (import.ptr(), Stream::new(&context)?);
    // SAFETY: the memory is as long as the block, and the buffer owns the import, whose drop waits for the work.
    let buffer = unsafe { DeviceBuffer::<u8>::from_raw_parts(ptr, BYTES, &stream, import) }?;
    match buffer.to_vec()?.iter().all(|byte| *byte == BYTE) {
        true => Ok(()),
        false => Err("the contents differ".into()),
    }
}
