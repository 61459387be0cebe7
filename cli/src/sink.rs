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
    /// A new file in the folder of the old one, which takes its place when all is written.
    New { file: File, place: Place },
}

/// Where a new file belongs, and what it is called until it gets there: nothing where the system has files
/// without names, which go with a process that is killed.
pub struct Place {
    temporary: Temporary,
    target: PathBuf,
}

/// A name that lasts as long as this.
#[derive(Default)]
struct Temporary(Option<PathBuf>);

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // Nothing more can be done about a file that cannot be removed.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Place {
    /// Puts the file where it belongs.
    fn take(mut self, file: &File) -> io::Result<()> {
        if self.temporary.0.is_none() {
            self.temporary = beside(&self.target, |path| link(file, path))?.1;
        }
        if let Some(path) = &self.temporary.0 {
            std::fs::rename(path, &self.target)?;
        }
        self.temporary.0 = None;
        Ok(())
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
        let (file, temporary) = match unnamed(&target) {
            Some(file) => (file, Temporary::default()),
            None => beside(&target, |path| {
                OpenOptions::new().write(true).create_new(true).open(path)
            })?,
        };
        let place = Place { temporary, target };
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
            Sink::New { file, place } => {
                let mut writer = BufWriter::with_capacity(1 << 16, &file);
                let filled = fill(&mut writer)?;
                writer.flush()?;
                drop(writer);
                file.sync_all()?;
                place.take(&file)?;
                Ok(filled)
            }
        }
    }
}

/// Makes something with a new name in the folder of a file.
fn beside<T>(target: &Path, make: impl Fn(&Path) -> io::Result<T>) -> io::Result<(T, Temporary)> {
    let mut tried = 0;
    loop {
        let name = format!(".cualloc-{}-{tried}.tmp", std::process::id());
        let path = target.with_file_name(name);
        match make(&path) {
            Ok(made) => return Ok((made, Temporary(Some(path)))),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && tried < NAMES => {
                tried += 1;
            }
            Err(error) => return Err(error),
        }
    }
}

/// A file without a name in the folder of another; none where that cannot be had.
#[cfg(target_os = "linux")]
fn unnamed(target: &Path) -> Option<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let folder = match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(libc::O_TMPFILE);
    // Only through its number can it be named later.
    let file = options.open(folder).ok()?;
    Path::new(&numbered(&file)).exists().then_some(file)
}

#[cfg(not(target_os = "linux"))]
fn unnamed(_: &Path) -> Option<File> {
    None
}

#[cfg(target_os = "linux")]
fn numbered(file: &File) -> String {
    use std::os::fd::AsRawFd;
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Gives a file without a name one.
#[cfg(target_os = "linux")]
fn link(file: &File, path: &Path) -> io::Result<()> {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    let from = CString::new(numbered(file))?;
    let to = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: both are strings that end in zero and live through the call.
    let linked = unsafe {
        libc::linkat(
            libc::AT_FDCWD,
            from.as_ptr(),
            libc::AT_FDCWD,
            to.as_ptr(),
            libc::AT_SYMLINK_FOLLOW,
        )
    };
    match linked {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(not(target_os = "linux"))]
fn link(_: &File, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
