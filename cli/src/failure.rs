//! Why a subcommand stopped.

use crate::{input, machine, text};
use std::error::Error;
use std::path::Path;

/// The result of a subcommand that ran to its end: whether everything succeeded.
pub type Outcome = Result<bool, Failure>;

#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The options contradict each other or do not suit the machine.
    #[error("{0}")]
    Usage(String),
    /// The results could not be written, usually because their reader has closed the pipe.
    #[error("cannot write the results")]
    Output(#[from] std::io::Error),
    #[error(transparent)]
    Machine(#[from] machine::MachineError),
    #[error(transparent)]
    File(#[from] FileError),
}

impl Failure {
    pub fn usage(message: impl Into<String>) -> Failure {
        Failure::Usage(message.into())
    }
}

/// A file has no result. The message begins with the file, and with the line of the error if there is one.
#[derive(Debug, thiserror::Error)]
#[error("{place}: {what}")]
pub struct FileError {
    pub trace: String,
    pub line: Option<u64>,
    place: String,
    what: String,
    source: Option<Box<dyn Error>>,
}

impl FileError {
    /// An error whose file is named by [`FileError::of`].
    pub fn new(what: impl Into<String>) -> FileError {
        FileError {
            trace: String::new(),
            line: None,
            place: String::new(),
            what: what.into(),
            source: None,
        }
    }

    pub fn with_source(self, source: impl Error + 'static) -> FileError {
        let source = Some(source.into());
        FileError { source, ..self }
    }

    pub fn in_line(self, line: u64) -> FileError {
        let line = Some(line);
        FileError { line, ..self }
    }

    /// Adds the file; `standard` is the name of the stream that `-` stands for.
    pub fn of(self, path: &Path, standard: &str) -> FileError {
        FileError {
            trace: text::trace_name(path),
            place: text::place(path, standard, self.line),
            ..self
        }
    }

    /// The replay of a file could not start.
    pub fn cannot_replay(path: &Path, error: cualloc::Error) -> FileError {
        let what = match error {
            cualloc::Error::Driver(_) => "the replay cannot begin: the device cannot be used",
            _ => "the replay cannot begin: the allocator cannot be created",
        };
        FileError::new(what)
            .with_source(error)
            .of(path, input::STDIN)
    }
}
