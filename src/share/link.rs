//! Connections to exporters: one for each, which all imports from it share.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use rustix::net::connect;
use rustix::process::{Pid, PidfdGetfdFlags, pidfd_getfd};

use super::peer;
use super::server;
use super::token::{BlockName, Exporter};
use super::wire::{self, DONE, FREED, Message, Request};
use crate::error::{Error, ShareError};
use crate::locks::held::Mutex;

/// How long an exporter may take for a reply. It takes that long only if it is stopped.
const PATIENCE: i64 = 60;

static LINKS: Mutex<Vec<Weak<Link>>> = Mutex::new(Vec::new());

/// A connection to an exporter. Its guards end when it closes.
pub(super) struct Link {
    exporter: Exporter,
    socket: OwnedFd,
    /// Becomes readable when the exporter ends; none if it is in another namespace.
    process: Option<OwnedFd>,
    /// Requests without a reply that could not be sent yet. Held from a request to its reply.
    turn: Mutex<Vec<Request>>,
    /// Whether a reply is missing, so that no request follows.
    broken: AtomicBool,
}

/// Part of a handle list: handles with their bytes.
pub(super) type Parts = Vec<(u64, u64)>;

/// An exported block. The exporter keeps it guarded until this value has been dropped.
pub(super) struct Opened {
    link: Arc<Link>,
    guard: u64,
    /// The offset of the block in its first handle, in bytes.
    pub offset: u64,
    /// All handles of the block.
    pub parts: Parts,
}

/// Returns the connection to an exporter.
pub(super) fn link_to(exporter: &Exporter) -> Result<Arc<Link>, Error> {
    let known = |link: &Arc<Link>| link.exporter == *exporter && !link.is_broken();
    let find = || {
        let mut links = LINKS.lock();
        links.retain(|link| link.strong_count() > 0);
        links.iter().filter_map(Weak::upgrade).find(known)
    };
    if let Some(link) = find() {
        return Ok(link);
    }
    let link = Arc::new(Link::connect(exporter)?);
    let mut links = LINKS.lock();
    // Of two threads that connect at the same time, both keep their connection.
    links.push(Arc::downgrade(&link));
    Ok(link)
}

impl Link {
    fn connect(exporter: &Exporter) -> Result<Link, Error> {
        let pid = exporter.pid;
        let id = Pid::from_raw(pid.cast_signed()).filter(|_| exporter.is_visible());
        // Opened before the comparison, so that it is not of a later process.
        let process = peer::watch(id);
        if exporter.is_visible() && !exporter.is_running() {
            return Err(ShareError::Ended { pid }.into());
        }
        let by_name = || -> io::Result<OwnedFd> {
            let socket = server::new_socket()?;
            connect(&socket, &server::address(exporter)?)?;
            Ok(socket)
        };
        let socket = match by_name() {
            Ok(socket) => socket,
            Err(socket) => match by_descriptor(exporter, process.as_ref()) {
                Ok(socket) => socket,
                Err(descriptor) => {
                    return Err(ShareError::Unreachable {
                        pid,
                        socket,
                        descriptor,
                    }
                    .into());
                }
            },
        };
        let link = Link {
            exporter: *exporter,
            socket,
            process,
            turn: Mutex::new(Vec::new()),
            broken: AtomicBool::new(false),
        };
        let secret = exporter.secret;
        link.send_request(Request::Hello { secret })?;
        Ok(link)
    }

    fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// Guards a block.
    pub(super) fn open(self: &Arc<Link>, block: &BlockName) -> Result<Opened, Error> {
        let words = self.send_request(Request::Open(*block))?.0;
        let [guard, offset, count, first @ ..] = &words[..] else {
            return Err(self.malformed());
        };
        let mut opened = Opened {
            link: Arc::clone(self),
            guard: *guard,
            offset: *offset,
            parts: parts_of(first),
        };
        while (opened.parts.len() as u64) < *count {
            let (guard, first) = (opened.guard, opened.parts.len() as u64);
            let more = parts_of(&self.send_request(Request::List { guard, first })?.0);
            if more.is_empty() {
                return Err(self.malformed());
            }
            opened.parts.extend(more);
        }
        let bytes = (opened.parts.iter()).try_fold(0_u64, |sum, part| sum.checked_add(part.1));
        let end = offset.checked_add(block.bytes);
        match end.zip(bytes).is_some_and(|(end, bytes)| end <= bytes) {
            true => Ok(opened),
            false => Err(self.malformed()),
        }
    }

    fn malformed(&self) -> Error {
        self.system("read the reply of the exporter", Errno::BADMSG)
    }

    fn system(&self, what: &'static str, cause: Errno) -> Error {
        let pid = self.exporter.pid;
        match cause {
            Errno::SRCH => ShareError::Ended { pid }.into(),
            Errno::PIPE | Errno::CONNRESET if self.exporter.is_running() => {
                let reason = "it closed the connection; it serves processes of its own user";
                let reason = reason.to_owned();
                ShareError::Refused { pid, reason }.into()
            }
            Errno::PIPE | Errno::CONNRESET => ShareError::Ended { pid }.into(),
            cause => ShareError::System {
                what,
                cause: cause.into(),
            }
            .into(),
        }
    }

    /// Sends a request and waits for the reply: returns the words of the reply except for the first, and its
    /// descriptors.
    fn send_request(&self, request: Request) -> Result<(Vec<u64>, Vec<OwnedFd>), Error> {
        let mut turn = self.turn.lock();
        if self.is_broken() {
            return Err(self.system("reach the exporter", Errno::TIMEDOUT));
        }
        let asked = self.exchange(&mut turn, request);
        drop(turn);
        let message = asked.map_err(|error| {
            self.broken.store(true, Ordering::Relaxed);
            self.system("exchange messages with the exporter", error)
        })?;
        let (code, text) = message
            .bytes
            .split_first_chunk()
            .unwrap_or((&[255; 8], &[]));
        match (u64::from_le_bytes(*code), message.words()) {
            (DONE, Some(words)) => Ok((words[1..].to_vec(), message.fds)),
            (DONE, None) => Err(self.malformed()),
            (FREED, _) => Err(ShareError::Freed.into()),
            _ => Err(ShareError::Refused {
                pid: self.exporter.pid,
                reason: String::from_utf8_lossy(text).into_owned(),
            }
            .into()),
        }
    }

    fn exchange(&self, unsent: &mut Vec<Request>, request: Request) -> Result<Message, Errno> {
        self.flush(unsent)?;
        wire::send(&self.socket, &wire::bytes_of(&request.encode()), &[])?;
        loop {
            let ready = wire::wait(&self.socket, self.process.as_ref(), PATIENCE)?;
            match wire::receive(&self.socket) {
                Ok(Some(message)) => return Ok(message),
                Ok(None) => return Err(Errno::CONNRESET),
                Err(Errno::AGAIN) if !ready => return Err(Errno::TIMEDOUT),
                // Only the end of the process was reported.
                Err(Errno::AGAIN) if self.has_ended() => return Err(Errno::SRCH),
                Err(Errno::AGAIN) => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn has_ended(&self) -> bool {
        let process = self.process.as_ref();
        process.is_some_and(|process| wire::wait(process, None, 0) == Ok(true))
    }

    /// Sends requests that have no reply.
    fn flush(&self, unsent: &mut Vec<Request>) -> Result<(), Errno> {
        while let Some(request) = unsent.first() {
            wire::send(&self.socket, &wire::bytes_of(&request.encode()), &[])?;
            unsent.remove(0);
        }
        Ok(())
    }
}

impl Opened {
    /// Returns the descriptors of a page of handles.
    pub(super) fn export(&self, first: usize) -> Result<Vec<OwnedFd>, Error> {
        let (guard, first) = (self.guard, first as u64);
        Ok(self.link.send_request(Request::Export { guard, first })?.1)
    }

    /// Returns the process that shares the block.
    pub(super) fn exporter(&self) -> &Exporter {
        &self.link.exporter
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let mut unsent = self.link.turn.lock();
        unsent.push(Request::Close { guard: self.guard });
        // What cannot be sent now is sent before the next request, or ends with the connection.
        let _later = self.link.flush(&mut unsent);
    }
}

fn parts_of(words: &[u64]) -> Parts {
    let (pairs, _) = words.as_chunks::<2>();
    pairs
        .iter()
        .map(|[handle, bytes]| (*handle, *bytes))
        .collect()
}

/// Connects by a descriptor of the exporter: duplicates it, and sends one end of a new connection over it.
fn by_descriptor(exporter: &Exporter, process: Option<&OwnedFd>) -> io::Result<OwnedFd> {
    let process = process.ok_or(io::ErrorKind::NotFound)?;
    let inlet = pidfd_getfd(process, exporter.descriptor, PidfdGetfdFlags::empty())?;
    let (ours, theirs) = server::pair()?;
    wire::send(&inlet, &wire::bytes_of(&[DONE]), &[theirs.as_fd()])?;
    Ok(ours)
}
