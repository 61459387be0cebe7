//! Rule violations that the simulator found.

use std::fmt;

/// An operation, as a report names it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Site {
    /// The name of the driver call or of the kernel.
    pub kind: &'static str,
    /// The id of its stream; for a node of a graph, the id of the stream on which the graph was launched.
    pub stream: u64,
    /// Its position in the stream's work, or in its graph, counted from 1.
    pub sequence: u64,
    /// The handle of the graph's node that it was; 0 for other work.
    pub node: u64,
    /// The device address of the range in question.
    pub address: u64,
    /// Bytes of that range.
    pub bytes: u64,
    /// The label that the submitting thread had set by [`Simulator::set_site`](super::Simulator::set_site).
    pub label: String,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} #{}{} on stream {} over {:#x}+{}",
            self.kind,
            self.sequence,
            if self.node == 0 { "" } else { " of a graph" },
            self.stream,
            self.address,
            self.bytes
        )?;
        if self.label.is_empty() {
            Ok(())
        } else {
            write!(f, " ({})", self.label)
        }
    }
}

/// One finding: a use of the driver that real hardware would punish, or might.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Report {
    /// Two operations on the same physical bytes, one of them writing, that nothing orders.
    Race {
        /// The one that completed first.
        first: Site,
        /// The one that completed second.
        second: Site,
    },
    /// An operation touched an address that nothing was mapped to.
    Unmapped {
        /// The operation, with the part of its range that has no mapping.
        site: Site,
    },
    /// An operation touched a mapping that its device has no access to.
    Unauthorised {
        /// The operation, with the part of its range in question.
        site: Site,
        /// The device that was refused.
        device: usize,
    },
    /// Memory was unmapped or released although an operation that uses it was not known to be complete.
    InUse {
        /// The driver call.
        call: &'static str,
        /// First address of the mapping in question.
        address: u64,
        /// Its size in bytes.
        bytes: u64,
        /// Stream and position of the operation.
        user: Site,
    },
    /// An operation was to read or write page-locked host memory that was freed, or no longer registered,
    /// when it completed.
    HostGone {
        /// The operation, with the host range.
        site: Site,
    },
    /// An operation read bytes that nothing had written.
    Undefined {
        /// The operation, with the undefined part of its range.
        site: Site,
    },
    /// A handle or address was used that had been destroyed or freed.
    Destroyed {
        /// The driver call.
        call: &'static str,
        /// The kind of handle: "stream", "event", "handle", "allocation" and so on.
        object: &'static str,
        /// Its value.
        value: u64,
    },
    /// A handle or address was used that never existed.
    Unknown {
        /// The driver call.
        call: &'static str,
        /// The kind of handle.
        object: &'static str,
        /// Its value.
        value: u64,
    },
    /// Event, stream or function belong to different contexts, or none was current.
    WrongContext {
        /// The driver call.
        call: &'static str,
    },
    /// A host wait although [`Simulator::deny_host_waits`](super::Simulator::deny_host_waits) is on.
    DeniedWait {
        /// The driver call.
        call: &'static str,
    },
    /// A wait for something that can never complete.
    ImpossibleWait {
        /// The stream that was waited for.
        stream: u64,
    },
    /// A call that is not allowed while a stream captures.
    DuringCapture {
        /// The driver call.
        call: &'static str,
    },
    /// A call by a thread that holds locks of the allocator: any call may wait, possibly for a thread that needs these
    /// locks. Detected in debug builds.
    UnderLock {
        /// The driver call.
        call: &'static str,
        /// How many locks.
        locks: u32,
    },
    /// Any other breach of a rule.
    Misuse {
        /// The driver call.
        call: &'static str,
        /// The rule.
        rule: &'static str,
        /// The address or handle in question.
        value: u64,
    },
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Report::Race { first, second } => write!(f, "race: {first} and {second}"),
            Report::Unmapped { site } => write!(f, "unmapped memory: {site}"),
            Report::Unauthorised { site, device } => {
                write!(f, "no access for device {device}: {site}")
            }
            Report::InUse {
                call,
                address,
                bytes,
                user,
            } => {
                write!(f, "{call} of {address:#x}+{bytes} under {user}")
            }
            Report::HostGone { site } => {
                write!(f, "host memory that was freed or unregistered: {site}")
            }
            Report::Undefined { site } => write!(f, "undefined bytes read: {site}"),
            Report::Destroyed {
                call,
                object,
                value,
            } => {
                write!(f, "{call}: {object} {value:#x} is destroyed")
            }
            Report::Unknown {
                call,
                object,
                value,
            } => {
                write!(f, "{call}: {object} {value:#x} never existed")
            }
            Report::WrongContext { call } => write!(f, "{call}: wrong context"),
            Report::DeniedWait { call } => write!(f, "{call}: host wait"),
            Report::ImpossibleWait { stream } => write!(f, "wait for stream {stream} cannot end"),
            Report::DuringCapture { call } => write!(f, "{call}: not allowed during capture"),
            Report::UnderLock { call, locks } => {
                write!(f, "{call}: called under {locks} locks of the allocator")
            }
            Report::Misuse { call, rule, value } => write!(f, "{call}: {rule} ({value:#x})"),
        }
    }
}

/// The objects that still exist in a simulator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leaks {
    /// Physical memory handles not released, in number.
    pub handles: usize,
    /// Mappings made by `cuMemMap` and not unmapped.
    pub mappings: usize,
    /// Address reservations not freed.
    pub reservations: usize,
    /// Plain allocations not freed.
    pub allocations: usize,
    /// Pool allocations not freed.
    pub pool_allocations: usize,
    /// Pools created and not destroyed.
    pub pools: usize,
    /// Streams not destroyed.
    pub streams: usize,
    /// Events not destroyed.
    pub events: usize,
    /// Page-locked host allocations and registrations.
    pub host: usize,
    /// Graphs not destroyed, those that captures are making included.
    pub graphs: usize,
    /// Executable graphs not destroyed, or destroyed with a launch in progress.
    pub executables: usize,
    /// User objects that something holds.
    pub user_objects: usize,
    /// Bytes of physical memory held on all devices, except those that
    /// [`Simulator::take_memory`](super::Simulator::take_memory) took.
    pub bytes: u64,
}

impl Leaks {
    /// Whether nothing lives any more.
    pub fn is_empty(&self) -> bool {
        *self == Leaks::default()
    }
}
