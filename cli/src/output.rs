//! Results for people and for programs, and complaints.

use crate::input;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::error::Error;
use std::io::{self, Stdout, Write};
use std::path::PathBuf;

/// Where results go. Every line is written at once, so that a reader sees each as it comes.
pub struct Output {
    stdout: Stdout,
}

impl Output {
    pub fn stdout() -> Output {
        Output {
            stdout: io::stdout(),
        }
    }

    pub fn line(&mut self, line: &str) -> io::Result<()> {
        let mut stdout = self.stdout.lock();
        writeln!(stdout, "{}", line.trim_end())?;
        stdout.flush()
    }

    pub fn json(&mut self, value: &impl Serialize) -> io::Result<()> {
        let line = serde_json::to_string(value).map_err(io::Error::from)?;
        self.line(&line)
    }
}

/// A table whose lines are written as they come: widths are set beforehand.
pub struct Table {
    columns: Vec<(&'static str, usize)>,
}

impl Table {
    /// Columns with their least widths. The first is aligned left, the others right.
    pub fn new(columns: &[(&'static str, usize)]) -> Table {
        let columns = columns.iter();
        Table {
            columns: columns
                .map(|(name, width)| (*name, name.len().max(*width)))
                .collect(),
        }
    }

    pub fn header(&self) -> String {
        self.row(self.columns.iter().map(|(name, _)| (*name).to_owned()))
    }

    pub fn row(&self, cells: impl IntoIterator<Item = String>) -> String {
        let mut line = String::new();
        for (index, ((_, width), cell)) in self.columns.iter().zip(cells).enumerate() {
            let width = *width;
            match index {
                0 => line += &format!("{cell:<width$}"),
                _ => line += &format!("  {cell:>width$}"),
            }
        }
        line
    }
}

/// The width of the longest name that these files' traces can have.
pub fn name_width(files: &[PathBuf]) -> usize {
    let names = files.iter().map(|path| input::name(path).chars().count());
    names.max().unwrap_or(0)
}

/// Bytes as MiB with one digit.
pub fn mebibytes(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / (1 << 20) as f64)
}

/// A ratio with four digits, or a dash.
pub fn ratio(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.4}"))
}

/// `bytes / of`; nothing if that makes no sense.
pub fn ratio_of(bytes: u64, of: u64) -> Option<f64> {
    (of > 0).then(|| bytes as f64 / of as f64)
}

/// As `eprintln!`, but where no one reads stderr any more nothing happens instead of a panic.
macro_rules! note {
    ($($argument:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($argument)*);
    }};
}
pub(crate) use note;

/// An error and everything behind it, on one line of stderr.
pub fn complain(error: &dyn Error) {
    note!("error: {}", chain(error));
}

/// The messages of an error and of all its sources, in one line.
pub fn chain(error: &dyn Error) -> String {
    messages(error).join(": ")
}

/// The message of an error, then those of its sources.
pub fn messages(error: &dyn Error) -> Vec<String> {
    let mut messages = vec![error.to_string()];
    let mut source = error.source();
    while let Some(error) = source {
        messages.push(error.to_string());
        source = error.source();
    }
    messages
}

/// A progress bar on stderr, drawn only on a terminal.
pub fn progress(length: u64, name: &str) -> ProgressBar {
    let bar = ProgressBar::new(length);
    if let Ok(style) =
        ProgressStyle::with_template("{prefix} {wide_bar} {percent:>3}% {elapsed} {msg}")
    {
        bar.set_style(style);
    }
    bar.set_prefix(name.to_owned());
    bar
}
