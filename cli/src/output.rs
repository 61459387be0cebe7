//! Results for people and for programs, notes and errors.

use crate::options::GlobalOptions;
use crate::table::{Cell, Table};
use crate::{Failure, Outcome, text};
use console::{StyledObject, style, truncate_str};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};
use std::io::{self, Stdout, Write};

/// The version of the lines of `--json`: incremented when a key is removed or changes its meaning.
pub const SCHEMA: u32 = 1;

/// The maximum length of a name beside a progress bar.
const BAR_NAME: usize = 24;

/// Writes results and notes. Every line is flushed, so that a reader sees it immediately.
pub struct Output {
    stdout: Stdout,
    pub json: bool,
    pub quiet: bool,
    /// Whether the table header was written.
    headed: bool,
}

impl Output {
    pub fn new(options: &GlobalOptions) -> Output {
        Output {
            stdout: io::stdout(),
            json: options.json,
            quiet: options.quiet,
            headed: false,
        }
    }

    pub fn line(&mut self, line: &str) -> io::Result<()> {
        let mut stdout = self.stdout.lock();
        writeln!(stdout, "{}", line.trim_end())?;
        stdout.flush()
    }

    pub fn json(&mut self, value: &Value) -> io::Result<()> {
        self.line(&value.to_string())
    }

    /// Writes a row of a table, preceded by the header before the first one.
    pub fn row(&mut self, table: &Table, cells: impl IntoIterator<Item = Cell>) -> io::Result<()> {
        if !std::mem::replace(&mut self.headed, true) {
            match table.hidden_columns() {
                0 => {}
                1 => self.note("a column does not fit here: --wide shows it"),
                count => self.note(&format!(
                    "{count} columns do not fit here: --wide shows them"
                )),
            }
            for line in table.header() {
                self.line(&line)?;
            }
        }
        self.line(&table.row(cells))
    }

    /// Writes a note to stderr, unless --quiet is given.
    pub fn note(&self, text: &str) {
        if !self.quiet {
            print_line(style("note"), text);
        }
    }

    /// Writes a warning about the results to stderr, unless --quiet is given.
    pub fn warning(&self, text: &str) {
        if !self.quiet {
            print_line(style("warning"), text);
        }
    }

    /// Reports the failure of one file, so that other files can follow.
    pub fn report_outcome(&mut self, outcome: Outcome) -> Outcome {
        match outcome {
            Err(failure @ Failure::File(_)) => {
                self.failed(&failure)?;
                Ok(false)
            }
            outcome => outcome,
        }
    }

    /// Writes a failure to stderr, and with `--json` as an object to stdout.
    pub fn failed(&mut self, failure: &Failure) -> io::Result<()> {
        let reasons = text::messages(failure);
        let message = reasons.join(": ");
        error(&message);
        let (trace, line) = match failure {
            Failure::File(file) => (Some(file.trace.as_str()), file.line),
            _ => (None, None),
        };
        self.failure(trace, line, &message, &reasons)
    }

    /// With `--json`, writes the object of a trace without a result. The faults were written to stderr before.
    pub fn failure(
        &mut self,
        trace: Option<&str>,
        line: Option<u64>,
        error: &str,
        reasons: &[String],
    ) -> io::Result<()> {
        if !self.json {
            return Ok(());
        }
        let mut object =
            json!({ "schema": SCHEMA, "completed": false, "error": error, "reasons": reasons });
        if let Some(trace) = trace {
            object["trace"] = trace.into();
        }
        if let Some(line) = line {
            object["line"] = line.into();
        }
        self.json(&object)
    }

    pub fn progress(&self, length: u64, name: &str) -> ProgressBar {
        let template = "{prefix} {wide_bar} {percent:>3}% {elapsed}";
        self.bar(ProgressBar::new(length), template, name)
    }

    /// Like [`Output::progress`], for work of unknown length.
    pub fn spinner(&self, name: &str) -> ProgressBar {
        self.bar(ProgressBar::new_spinner(), "{prefix}: {wide_msg}", name)
    }

    fn bar(&self, bar: ProgressBar, template: &str, name: &str) -> ProgressBar {
        if self.quiet {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        let name = text::escape(name);
        bar.set_prefix(truncate_str(&name, BAR_NAME, "…").into_owned());
        bar
    }
}

fn print_line(kind: StyledObject<&str>, text: &str) {
    let lines = Vec::from_iter(text.lines().map(text::escape));
    let _ = writeln!(io::stderr(), "{kind}: {}", lines.join("\n    "));
}

pub fn error(text: &str) {
    print_line(style("error").for_stderr().red().bold(), text);
}

/// Writes a line to stderr unchanged.
pub fn plain(line: &str) {
    let _ = writeln!(io::stderr(), "{}", text::escape(line));
}

/// Formats bytes as MiB with one decimal.
pub fn mebibytes(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / (1 << 20) as f64)
}

/// Formats nanoseconds in at most six characters.
pub fn nanos(nanos: f64) -> String {
    match nanos {
        few if few < 999_999.5 => format!("{few:.0}"),
        many => format!("{many:.1e}"),
    }
}

/// Formats a ratio with four decimals, or as a dash.
pub fn ratio(ratio: Option<f64>) -> Cell {
    Cell::or_dash(ratio.map(|ratio| format!("{ratio:.4}")))
}

/// Returns `bytes / of`; none if `of` is 0.
pub fn ratio_of(bytes: u64, of: u64) -> Option<f64> {
    (of > 0).then(|| bytes as f64 / of as f64)
}

#[cfg(test)]
mod tests {
    use super::nanos;

    #[test]
    fn nanoseconds_of_a_slow_machine_do_not_widen_a_table() {
        for (amount, text) in [
            (0.4, "0"),
            (999_999.4, "999999"),
            (999_999.6, "1.0e6"),
            (4_076_800.0, "4.1e6"),
            (1e15, "1.0e15"),
        ] {
            assert_eq!(nanos(amount), text);
        }
    }
}
