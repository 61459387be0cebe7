//! The profiles of programs: which steps each has, and how often.

use super::program::{Act, Faults, Profile};
use Act::*;

const COMMON: &[(Act, u32)] = &[
    (Allocate, 160),
    (AllocateAligned, 30),
    (AllocatePlaced, 12),
    (AllocateAtHand, 12),
    (AllocateRaw, 60),
    (Free, 200),
    (Work, 160),
    (WorkElsewhere, 60),
    (Complete, 60),
    (Observe, 14),
    (NewStream, 16),
    (Retire, 10),
    (Leave, 8),
    (Trim, 10),
    (Synchronise, 2),
    (Limit, 3),
    (Mark, 5),
    (Guard, 6),
    (Unguard, 8),
    (Look, 4),
    (Garbage, 5),
    (Reopen, 2),
];

const TIGHT: &[(Act, u32)] = &[
    (Allocate, 110),
    (AllocateAligned, 200),
    (Surge, 40),
    (AllocateAtHand, 40),
    (AllocateRaw, 20),
    (Free, 330),
    (Work, 40),
    (WorkElsewhere, 16),
    (Complete, 24),
    (Observe, 3),
    (NewStream, 2),
    (Trim, 20),
];

/// Tight, with contexts of others, whose streams come and go.
const CONTEXTS: &[(Act, u32)] = &[
    (Allocate, 110),
    (AllocateAligned, 140),
    (Surge, 30),
    (AllocateAtHand, 40),
    (AllocateRaw, 120),
    (Free, 300),
    (Work, 60),
    (WorkElsewhere, 60),
    (Complete, 20),
    (Observe, 6),
    (NewStream, 12),
    (Retire, 10),
    (Leave, 8),
    (LeaveContext, 3),
    (Mark, 8),
    (Trim, 20),
    (Synchronise, 8),
    (Look, 4),
    (Reopen, 2),
];

const HOOKS: &[(Act, u32)] = &[
    (Allocate, 160),
    (AllocateAligned, 50),
    (AllocatePlaced, 30),
    (AllocateAtHand, 20),
    (AllocateRaw, 40),
    (Free, 150),
    (Work, 140),
    (WorkElsewhere, 40),
    (Complete, 30),
    (NewStream, 8),
    (Retire, 6),
    (Leave, 6),
    (Trim, 10),
    (Limit, 10),
    (Guard, 20),
    (Unguard, 18),
    (Hook, 10),
    (Stash, 60),
    (Abandon, 3),
    (Reopen, 3),
    (Look, 4),
];

const CAPTURES: &[(Act, u32)] = &[
    (Allocate, 140),
    (AllocateAligned, 30),
    (AllocateRaw, 80),
    (Free, 200),
    (Work, 140),
    (WorkElsewhere, 50),
    (Complete, 50),
    (Observe, 8),
    (NewStream, 14),
    (Retire, 10),
    (Leave, 8),
    (Trim, 12),
    (Synchronise, 6),
    (Mark, 8),
    (BeginCapture, 26),
    (EndCapture, 30),
    (CaptureInside, 20),
    (OtherInside, 20),
    (Abandon, 3),
    (Reopen, 4),
    (Limit, 3),
    (Garbage, 3),
];

const WORLDS: &[(Act, u32)] = &[
    (Allocate, 150),
    (AllocateAligned, 30),
    (AllocateAtHand, 12),
    (AllocateRaw, 90),
    (Free, 200),
    (Work, 160),
    (WorkElsewhere, 80),
    (Complete, 50),
    (Observe, 10),
    (NewStream, 22),
    (Retire, 14),
    (Leave, 12),
    (LeaveContext, 6),
    (Current, 12),
    (Trim, 12),
    (Synchronise, 4),
    (Limit, 3),
    (Mark, 6),
    (Guard, 5),
    (Unguard, 6),
    (Garbage, 6),
    (Abandon, 2),
    (Reopen, 3),
];

const LAYERS: &[(Act, u32)] = &[
    (Allocate, 60),
    (AllocateAligned, 16),
    (AllocateRaw, 20),
    (Free, 80),
    (Work, 80),
    (WorkElsewhere, 40),
    (Complete, 40),
    (Observe, 8),
    (NewStream, 10),
    (Retire, 8),
    (Leave, 8),
    (Trim, 8),
    (Buffer, 50),
    (BufferWork, 90),
    (Column, 30),
    (Pooled, 60),
    (Lease, 50),
    (Resource, 50),
    (Native, 30),
    (Exchange, 30),
    (Share, 8),
    (Drop, 180),
    (Limit, 3),
    (Look, 3),
];

const PLAIN: Profile = Profile {
    name: "plain",
    share: 180,
    steps: 260,
    acts: COMMON,
    streams: (1, 6),
    tight: false,
    faults: Faults::None,
    packed_only: false,
    wide: false,
    captures: false,
    graphs: false,
};

/// All of them.
pub const PROFILES: &[Profile] = &[
    PLAIN,
    Profile {
        name: "many",
        share: 60,
        steps: 400,
        streams: (60, 100),
        ..PLAIN
    },
    Profile {
        name: "tight",
        steps: 120,
        share: 120,
        acts: TIGHT,
        streams: (2, 4),
        tight: true,
        ..PLAIN
    },
    Profile {
        name: "tight-wait",
        steps: 120,
        share: 100,
        acts: TIGHT,
        streams: (2, 4),
        tight: true,
        faults: Faults::One("cuStreamWaitEvent"),
        packed_only: true,
        ..PLAIN
    },
    Profile {
        name: "tight-faults",
        steps: 120,
        share: 100,
        acts: TIGHT,
        streams: (2, 4),
        tight: true,
        faults: Faults::Turns,
        ..PLAIN
    },
    Profile {
        name: "faults",
        share: 140,
        faults: Faults::Turns,
        ..PLAIN
    },
    Profile {
        name: "hooks",
        share: 80,
        acts: HOOKS,
        tight: true,
        ..PLAIN
    },
    Profile {
        name: "worlds",
        share: 80,
        acts: WORLDS,
        wide: true,
        streams: (3, 8),
        ..PLAIN
    },
    Profile {
        name: "contexts",
        steps: 160,
        share: 60,
        acts: CONTEXTS,
        streams: (3, 6),
        tight: true,
        wide: true,
        faults: Faults::Handles,
        ..PLAIN
    },
    Profile {
        name: "layers",
        share: 80,
        acts: LAYERS,
        ..PLAIN
    },
    Profile {
        name: "layers-faults",
        share: 40,
        acts: LAYERS,
        faults: Faults::Turns,
        ..PLAIN
    },
    Profile {
        name: "threads",
        share: 40,
        steps: 1200,
        ..PLAIN
    },
    Profile {
        name: "captures",
        share: 120,
        acts: CAPTURES,
        captures: true,
        ..PLAIN
    },
    Profile {
        name: "captures-faults",
        share: 40,
        acts: CAPTURES,
        captures: true,
        faults: Faults::Turns,
        ..PLAIN
    },
    Profile {
        name: "graphs",
        share: 100,
        packed_only: true,
        captures: true,
        graphs: true,
        ..PLAIN
    },
    Profile {
        name: "graphs-faults",
        share: 60,
        packed_only: true,
        captures: true,
        graphs: true,
        faults: Faults::Turns,
        ..PLAIN
    },
];
