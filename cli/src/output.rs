//! Results for people and for programs, notes and errors.

use crate::options::GlobalOptions;
use crate::table::{Cell, Table};
use crate::text;
use console::{Term, style, truncate_str};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::error::Error;
use std::io::{self, Stdout, Write};

/// The version of the lines of `--json`: it grows when a key goes or changes its meaning.
pub const SCHEMA: u32 = 1;

/// The longest name beside a progress bar.
const BAR_NAME: usize = 24;

/// Where results go, and notes about them. Every line is written at once, so that a reader sees each as it
/// comes.
pub struct Output {
    stdout: Stdout,
    /// Whether results are objects of JSON.
    pub json: bool,
    pub quiet: bool,
    /// Whether a table has its head.
    headed: bool,
}

/// What `--json` writes where there is no result.
#[derive(Serialize)]
pub struct ErrorLine<'a> {
    pub schema: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<&'a str>,
    /// The line of the file that is to blame.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<u64>,
    pub completed: bool,
    pub error: String,
    /// The error, then what is behind it.
    pub reasons: Vec<String>,
}

impl ErrorLine<'_> {
    pub fn new<'a>(error: &dyn Error) -> ErrorLine<'a> {
        let reasons = text::messages(error);
        ErrorLine {
            schema: SCHEMA,
            trace: None,
            line: None,
            completed: false,
            error: reasons.join(": "),
            reasons,
        }
    }
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

    pub fn json(&mut self, value: &impl Serialize) -> io::Result<()> {
        let line = serde_json::to_string(value).map_err(io::Error::from)?;
        self.line(&line)
    }

    /// Writes a row of a table; before the first one its head.
    pub fn row(&mut self, table: &Table, cells: impl IntoIterator<Item = Cell>) -> io::Result<()> {
        if !std::mem::replace(&mut self.headed, true) {
            match table.left_out() {
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

    /// Says on stderr what is good to know, unless it was asked for quiet.
    pub fn note(&self, text: &str) {
        if !self.quiet {
            complain("note", text);
        }
    }

    /// Says on stderr that results are worth less than they look, unless it was asked for quiet.
    pub fn warning(&self, text: &str) {
        if !self.quiet {
            complain("warning", text);
        }
    }

    /// Says that there is no result for a trace, and why; the message of the error names the file.
    pub fn failed(&mut self, trace: &str, line: Option<u64>, why: &dyn Error) -> io::Result<()> {
        error(&text::chain(why));
        self.failure_line(trace, line, why)
    }

    /// As [`Output::failed`], where the error does not name the file.
    pub fn failed_file(&mut self, file: &str, trace: &str, why: &dyn Error) -> io::Result<()> {
        error(&format!("{file}: {}", text::chain(why)));
        self.failure_line(trace, None, why)
    }

    /// The object that says the same to a program, with everything that went wrong in words.
    pub fn failure(&mut self, trace: &str, reasons: Vec<String>) -> io::Result<()> {
        if !self.json {
            return Ok(());
        }
        self.json(&ErrorLine {
            schema: SCHEMA,
            trace: Some(trace),
            line: None,
            completed: false,
            error: reasons.first().cloned().unwrap_or_default(),
            reasons,
        })
    }

    fn failure_line(&mut self, trace: &str, line: Option<u64>, why: &dyn Error) -> io::Result<()> {
        if !self.json {
            return Ok(());
        }
        let mut failure = ErrorLine::new(why);
        failure.trace = Some(trace);
        failure.line = line;
        self.json(&failure)
    }

    /// A progress bar on stderr, drawn only on a terminal.
    pub fn progress(&self, length: u64, name: &str) -> ProgressBar {
        let template = "{prefix} {wide_bar} {percent:>3}% {elapsed}";
        self.bar(ProgressBar::new(length), template, name)
    }

    /// As [`Output::progress`], where nobody knows how much there is to do.
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
        let name = text::visible(name);
        bar.set_prefix(truncate_str(&name, BAR_NAME, "…").into_owned());
        bar
    }
}

/// The width of the terminal that tables go to: what `COLUMNS` says, else what stdout is. None without a
/// terminal.
pub fn width() -> Option<usize> {
    let columns = std::env::var("COLUMNS").ok();
    let columns = columns
        .and_then(|text| text.parse().ok())
        .filter(|n| *n > 0);
    columns.or_else(|| terminal(&Term::stdout()))
}

/// The width of a terminal; one that does not tell has as much as most.
fn terminal(term: &Term) -> Option<usize> {
    let told = term.size_checked().map(|(_, columns)| columns.into());
    term.is_term().then(|| told.unwrap_or(80))
}

/// A message on stderr; where no one reads it any more nothing happens. On a terminal a long one is a block of
/// lines.
fn complain(kind: &str, text: &str) {
    let lines: Vec<String> = text.lines().map(text::visible).collect();
    let mut message = format!("{kind}: {}", lines.join("\n    "));
    if let Some(width) = terminal(&Term::stderr())
        && lines.len() == 1
    {
        message = text::fold(&message, width);
    }
    if kind == "error"
        && let Some(rest) = message.strip_prefix(kind)
    {
        let kind = style(kind).for_stderr().red().bold();
        message = format!("{kind}{rest}");
    }
    let _ = writeln!(io::stderr(), "{message}");
}

/// Says on stderr what went wrong.
pub fn error(text: &str) {
    complain("error", text);
}

/// A line on stderr as it is.
pub fn plain(line: &str) {
    let _ = writeln!(io::stderr(), "{}", text::visible(line));
}

/// Bytes as MiB with one digit.
pub fn mebibytes(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / (1 << 20) as f64)
}

/// Nanoseconds in at most six characters.
pub fn nanos(nanos: f64) -> String {
    match nanos {
        few if few < 999_999.5 => format!("{few:.0}"),
        many => format!("{many:.1e}"),
    }
}

/// A ratio with four digits, or a dash.
pub fn ratio(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.4}"))
}

/// `bytes / of`; nothing if that makes no sense.
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
