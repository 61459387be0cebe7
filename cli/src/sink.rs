//! Output files, written completely or not at all.

use crate::{Failure, FileError, text};
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::Path;

pub const STDOUT: &str = "<stdout>";

/// Calls `fill` to write the file with this name; `-` is stdout. A regular file, also behind a link, is replaced once
/// everything is written.
pub fn write<T>(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<T>,
) -> Result<T, Failure> {
    write_file(path, fill).map_err(|error| match error.kind() {
        // The reader has closed the pipe because it needs no more.
        io::ErrorKind::BrokenPipe => Failure::Output(error),
        _ => {
            let what = FileError::new("cannot be written");
            what.with_source(error).of(path, STDOUT).into()
        }
    })
}

fn write_file<T>(path: &Path, fill: impl FnOnce(&mut dyn Write) -> io::Result<T>) -> io::Result<T> {
    if text::is_standard(path) {
        return buffered(io::stdout(), fill);
    }
    let old = match std::fs::metadata(path) {
        Ok(old) if !old.is_file() => {
            return buffered(OpenOptions::new().write(true).open(path)?, fill);
        }
        Ok(old) => Some(old),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let target = match old {
        Some(_) => std::fs::canonicalize(path)?,
        None => path.to_owned(),
    };
    let folder = target
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let mut new = tempfile::Builder::new();
    new.prefix(".cualloc-");
    // The mode with which other programs create files, subject to the process's umask.
    #[cfg(unix)]
    new.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let new = new.tempfile_in(folder.unwrap_or(Path::new(".")))?;
    if let Some(old) = old {
        new.as_file().set_permissions(old.permissions())?;
    }
    let filled = buffered(new.as_file(), fill)?;
    File::sync_all(new.as_file())?;
    new.persist(&target)?;
    Ok(filled)
}

fn buffered<T>(
    to: impl Write,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<T>,
) -> io::Result<T> {
    let mut writer = BufWriter::with_capacity(1 << 16, to);
    let filled = fill(&mut writer)?;
    writer.flush()?;
    Ok(filled)
}
