//! Files that are written: whole or not at all.

use crate::text;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// How many names are tried for a file that is not there yet.
const NAMES: u32 = 100;

/// What takes the bytes of a file.
pub enum Sink {
    /// Stdout, or a file that is no regular one: it takes the bytes as they come.
    Stream(Box<dyn Write>),
    /// A new file beside the old one, which takes its place when all is written.
    New { file: File, place: Place },
}

/// Where a new file is and belongs; it is removed again if it never gets there.
pub struct Place {
    temporary: Option<PathBuf>,
    target: PathBuf,
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(path) = self.temporary.take() {
            // Nothing more can be done about a file that cannot be removed.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Sink {
    /// For the file with this name; `-` is stdout. Links are followed.
    pub fn create(path: &Path) -> io::Result<Sink> {
        if text::is_standard(path) {
            return Ok(Sink::Stream(Box::new(io::stdout())));
        }
        let old = match std::fs::metadata(path) {
            Ok(old) if !old.is_file() => {
                let file = OpenOptions::new().write(true).open(path)?;
                return Ok(Sink::Stream(Box::new(file)));
            }
            Ok(old) => Some(old),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let target = match old {
            Some(_) => std::fs::canonicalize(path)?,
            None => path.to_owned(),
        };
        let (file, temporary) = beside(&target)?;
        let place = Place {
            temporary: Some(temporary),
            target,
        };
        if let Some(old) = old {
            file.set_permissions(old.permissions())?;
        }
        Ok(Sink::New { file, place })
    }

    /// Lets `fill` write everything, and puts the file in its place.
    pub fn write<T, E: From<io::Error>>(
        self,
        fill: impl FnOnce(&mut dyn Write) -> Result<T, E>,
    ) -> Result<T, E> {
        match self {
            Sink::Stream(stream) => {
                let mut writer = BufWriter::with_capacity(1 << 16, stream);
                let filled = fill(&mut writer)?;
                writer.flush()?;
                Ok(filled)
            }
            Sink::New { file, mut place } => {
                let mut writer = BufWriter::with_capacity(1 << 16, &file);
                let filled = fill(&mut writer)?;
                writer.flush()?;
                drop(writer);
                file.sync_all()?;
                if let Some(temporary) = &place.temporary {
                    std::fs::rename(temporary, &place.target)?;
                }
                place.temporary = None;
                Ok(filled)
            }
        }
    }
}

/// A new file in the folder of another.
fn beside(target: &Path) -> io::Result<(File, PathBuf)> {
    let Some(name) = target.file_name() else {
        return Err(io::ErrorKind::InvalidFilename.into());
    };
    let mut tried = 0;
    loop {
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}-{tried}.tmp", std::process::id()));
        let path = target.with_file_name(hidden);
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(file) => return Ok((file, path)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && tried < NAMES => {
                tried += 1
            }
            Err(error) => return Err(error),
        }
    }
}
