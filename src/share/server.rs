//! The server of an exporter: one thread that guards blocks for importers and sends them descriptors.
//!
//! The thread starts with the first export. It holds no lock while it calls the driver or the operating system, and
//! does not keep the process alive. A guard ends by the importer's message, when its socket closes, or when its process
//! ends, which a socket that was inherited by a child would not tell.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Weak};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
    socketpair,
};
use rustix::process::geteuid;

use super::peer;
use super::token::{BlockName, Exporter};
use super::wire::{self, DONE, FREED, Message, PAGE, REFUSED, Request};
use crate::allocator::{Engine, PhysicalSegment, RangeGuard, guard_block};
use crate::driver::{DriverError, process};
use crate::error::{Error, ShareError};
use crate::foreign::guarded;
use crate::locks::held::Mutex;

/// The number of connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// The number of messages that a connection is served in turn.
const TURN: usize = 64;

static SERVER: Mutex<Option<Arc<Server>>> = Mutex::new(None);

struct Server {
    exporter: Exporter,
    /// By number.
    allocators: Mutex<HashMap<u64, Weak<Engine>>>,
    /// The end of a socket pair that importers duplicate if they cannot reach the socket by its name.
    _inlet: OwnedFd,
}

/// Adds an allocator to those that the server of this process knows, and starts it if there is none.
pub(super) fn serve(engine: &Engine) -> Result<Exporter, Error> {
    // The server's thread does not exist in a child.
    engine.usable()?;
    let mut server = SERVER.lock();
    let server = match &*server {
        Some(server) => Arc::clone(server),
        None => {
            let cannot = |cause| ShareError::System {
                what: "start the server of shared blocks",
                cause,
            };
            let started = Server::start().map_err(cannot)?;
            Arc::clone(server.insert(started))
        }
    };
    let mut known = server.allocators.lock();
    if !known.contains_key(&engine.id)
        && let Some(engine) = engine.keep()
    {
        known.retain(|_, engine| engine.strong_count() > 0);
        known.insert(engine.id, Arc::downgrade(&engine));
    }
    Ok(server.exporter)
}

impl Server {
    fn start() -> io::Result<Arc<Server>> {
        let mut random = [0; 24];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
        let word = |at: usize| {
            let bytes = random[8 * at..].first_chunk().copied();
            u64::from_le_bytes(bytes.unwrap_or_default())
        };
        let (inlet, outlet) = pair()?;
        let pid = std::process::id();
        let exporter = Exporter {
            pid,
            start: peer::start_of(pid).unwrap_or_default(),
            namespace: peer::namespace(),
            socket: word(0),
            secret: [word(1), word(2)],
            descriptor: inlet.as_raw_fd(),
        };
        let listener = new_socket()?;
        bind(&listener, &address(&exporter)?)?;
        listen(&listener, BACKLOG)?;
        let server = Arc::new(Server {
            exporter,
            allocators: Mutex::new(HashMap::new()),
            _inlet: inlet,
        });
        let run = Arc::clone(&server);
        std::thread::Builder::new()
            .name("cualloc-share".to_owned())
            .spawn(move || run.run(&listener, &outlet))?;
        Ok(server)
    }

    fn run(&self, listener: &OwnedFd, outlet: &OwnedFd) {
        let mut importers: Vec<Importer> = Vec::new();
        loop {
            let mut watched = vec![
                PollFd::new(listener, PollFlags::IN),
                PollFd::new(outlet, PollFlags::IN),
            ];
            for importer in &importers {
                watched.push(PollFd::new(&importer.socket, PollFlags::IN));
                // Without a descriptor of its process the socket is watched twice.
                let process = importer.process.as_ref().unwrap_or(&importer.socket);
                watched.push(PollFd::new(process, PollFlags::IN));
            }
            let polled = poll(&mut watched, None);
            let ready: Vec<bool> = watched.iter().map(|fd| !fd.revents().is_empty()).collect();
            drop(watched);
            if polled.is_err() {
                continue;
            }
            let mut served = ready[2..].chunks(2);
            importers.retain_mut(|importer| {
                let [socket, process] = match served.next() {
                    Some([socket, process]) => [*socket, *process],
                    _ => [true, false],
                };
                let ended = process && importer.process.is_some();
                let serve = || !socket || importer.serve(self);
                !ended && guarded("the server of shared blocks", serve) == Some(true)
            });
            let mut added = Ok(None);
            if ready[0] {
                added = accept_with(listener, SocketFlags::CLOEXEC).map(Some);
            } else if ready[1] {
                let message = wire::receive(outlet);
                added = message.map(|message| message.and_then(|mut message| message.fds.pop()));
            }
            match added {
                Ok(socket) => importers.extend(socket.and_then(Importer::new)),
                // The process may not have more descriptors: the connection waits until others are closed.
                Err(_) => std::thread::sleep(std::time::Duration::from_millis(10)),
            }
        }
    }
}

/// Returns the address of an exporter's socket.
pub(super) fn address(exporter: &Exporter) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new_abstract_name(
        exporter.socket_name().as_bytes(),
    )?)
}

pub(super) fn new_socket() -> io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(socket_with(family, kind, SocketFlags::CLOEXEC, None)?)
}

pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(socketpair(family, kind, SocketFlags::CLOEXEC, None)?)
}

/// A process that opens blocks of this one.
struct Importer {
    socket: OwnedFd,
    /// Becomes readable when the process ends; none if the process is in another namespace.
    process: Option<OwnedFd>,
    /// Whether it has named the secret.
    greeted: bool,
    /// The blocks that it uses, by number.
    guards: BTreeMap<u64, (RangeGuard, Arc<Engine>)>,
    opened: u64,
}

/// Why a request fails: the word that the reply begins with, and a text.
struct Fault(u64, String);

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        let code = match error {
            Error::NotLive { .. } | Error::NotOurs { .. } | Error::Closed => FREED,
            _ => REFUSED,
        };
        Fault(code, error.to_string())
    }
}

impl Importer {
    /// None for a process of another user.
    fn new(socket: OwnedFd) -> Option<Importer> {
        let (pid, user) = peer::of_socket(&socket)?;
        (user == geteuid().as_raw()).then(|| Importer {
            process: peer::watch(pid),
            socket,
            greeted: false,
            guards: BTreeMap::new(),
            opened: 0,
        })
    }

    /// Replies to the messages that have arrived. False if the connection is over.
    fn serve(&mut self, server: &Server) -> bool {
        for _ in 0..TURN {
            let message = match wire::receive(&self.socket) {
                Ok(Some(message)) => message,
                Err(Errno::AGAIN) => return true,
                Ok(None) | Err(_) => return false,
            };
            // The driver may have shut down.
            if process::is_unavailable() || !self.reply(server, &message) {
                return false;
            }
        }
        true
    }

    fn reply(&mut self, server: &Server, message: &Message) -> bool {
        let request = message.words().and_then(|words| Request::decode(&words));
        let mut fds = Vec::new();
        let done = match request {
            Some(Request::Hello { secret }) if secret == server.exporter.secret => {
                self.greeted = true;
                Ok(Vec::new())
            }
            Some(Request::Hello { .. }) => Err(Fault(
                REFUSED,
                "the token is of another exporter".to_owned(),
            )),
            // A malformed message, or one of a stranger.
            None => return false,
            Some(_) if !self.greeted => return false,
            Some(Request::Open(block)) => self.open(server, &block),
            Some(Request::List { guard, first }) => {
                self.page(guard, first).map(|(parts, _)| described(parts))
            }
            Some(Request::Export { guard, first }) => {
                self.page(guard, first).and_then(|(parts, engine)| {
                    fds = export(engine, parts).map_err(|e| engine.error(e))?;
                    Ok(described(parts))
                })
            }
            Some(Request::Close { guard }) => {
                self.guards.remove(&guard);
                return true;
            }
        };
        let bytes = match done {
            Ok(words) => wire::bytes_of(&[&[DONE], &words[..]].concat()),
            Err(Fault(code, text)) => {
                let text = text.bytes().take(1000);
                wire::bytes_of(&[code]).into_iter().chain(text).collect()
            }
        };
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        // An importer reads each reply before it sends the next request, so there is room for one.
        wire::send(&self.socket, &bytes, &fds).is_ok()
    }

    fn open(&mut self, server: &Server, block: &BlockName) -> Result<Vec<u64>, Fault> {
        let engine = server.allocators.lock().get(&block.allocator).cloned();
        let engine = engine.and_then(|engine| engine.upgrade());
        let engine = engine.ok_or(Error::Closed)?;
        let guard = guard_block(&engine, block.address, (block.number, block.generation))?;
        if !adjoin(guard.segments()) || guard.bytes() != block.bytes {
            return Err(Error::NotLive { ptr: block.address }.into());
        }
        let parts = guard.segments();
        let offset = parts.first().map_or(0, |part| part.offset);
        self.opened += 1;
        let mut words = vec![self.opened, offset, parts.len() as u64];
        words.extend(described(page(parts, 0)));
        self.guards.insert(self.opened, (guard, engine));
        Ok(words)
    }

    /// Returns a page of the handles of a guarded block.
    fn page(&self, guard: u64, first: u64) -> Result<(&[PhysicalSegment], &Engine), Fault> {
        let unknown = || Fault(REFUSED, "the block is not open".to_owned());
        let (guard, engine) = self.guards.get(&guard).ok_or_else(unknown)?;
        Ok((page(guard.segments(), first), engine))
    }
}

fn page(parts: &[PhysicalSegment], first: u64) -> &[PhysicalSegment] {
    let first = usize::try_from(first)
        .unwrap_or(usize::MAX)
        .min(parts.len());
    let rest = &parts[first..];
    &rest[..rest.len().min(PAGE)]
}

/// Describes handles: value and bytes of each.
fn described(parts: &[PhysicalSegment]) -> Vec<u64> {
    let parts = parts.iter();
    parts
        .flat_map(|part| [part.handle.unwrap_or_default(), part.handle_bytes])
        .collect()
}

fn export(engine: &Engine, parts: &[PhysicalSegment]) -> Result<Vec<OwnedFd>, DriverError> {
    let entered = engine.context.enter()?;
    let handles = parts.iter().map(|part| part.handle.unwrap_or_default());
    // SAFETY: the handles are live while their range is guarded.
    handles
        .map(|handle| unsafe { entered.export_fd(handle) })
        .collect()
}

/// Whether a block lies in whole handles side by side, except for the first and the last one.
pub(super) fn adjoin(segments: &[PhysicalSegment]) -> bool {
    let last = segments.len().saturating_sub(1);
    let mut parts = segments.iter().enumerate();
    !segments.is_empty()
        && parts.all(|(at, part)| {
            part.handle.is_some()
                && (at == 0 || part.offset == 0)
                && (at == last || part.offset + part.bytes == part.handle_bytes)
        })
}
