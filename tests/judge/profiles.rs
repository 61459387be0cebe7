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

/// Contexts of others, whose streams come and go.
const CONTEXTS: &[(Act, u32)] = &[
    (AllocateRaw, 100),
    (Work, 20),
    (WorkElsewhere, 44),
    (NewStream, 10),
    (Retire, 10),
    (Leave, 8),
    (LeaveContext, 3),
    (Mark, 8),
    (Synchronise, 8),
    (Look, 4),
    (Reopen, 2),
];

/// Blocks that a relief hook frees, under guards.
const HOOKS: &[(Act, u32)] = &[
    (AllocateAligned, 20),
    (AllocatePlaced, 20),
    (Guard, 14),
    (Unguard, 10),
    (Limit, 7),
    (Hook, 10),
    (Stash, 60),
    (Abandon, 3),
];

const CAPTURES: &[(Act, u32)] = &[
    (BeginCapture, 26),
    (EndCapture, 30),
    (CaptureInside, 20),
    (OtherInside, 20),
    (Abandon, 3),
    (Reopen, 2),
];

/// Several contexts and devices.
const WORLDS: &[(Act, u32)] = &[
    (AllocateRaw, 30),
    (WorkElsewhere, 20),
    (NewStream, 6),
    (Retire, 4),
    (Leave, 4),
    (LeaveContext, 6),
    (Current, 12),
    (Abandon, 2),
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
    acts: &[COMMON],
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
        acts: &[TIGHT],
        streams: (2, 4),
        tight: true,
        ..PLAIN
    },
    Profile {
        name: "tight-wait",
        steps: 120,
        share: 100,
        acts: &[TIGHT],
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
        acts: &[TIGHT],
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
        acts: &[COMMON, HOOKS],
        tight: true,
        ..PLAIN
    },
    Profile {
        name: "worlds",
        share: 80,
        acts: &[COMMON, WORLDS],
        wide: true,
        streams: (3, 8),
        ..PLAIN
    },
    Profile {
        name: "contexts",
        steps: 160,
        share: 60,
        acts: &[TIGHT, CONTEXTS],
        streams: (3, 6),
        tight: true,
        wide: true,
        faults: Faults::Handles,
        ..PLAIN
    },
    Profile {
        name: "layers",
        share: 80,
        acts: &[LAYERS],
        ..PLAIN
    },
    Profile {
        name: "layers-faults",
        share: 40,
        acts: &[LAYERS],
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
        acts: &[COMMON, CAPTURES],
        captures: true,
        ..PLAIN
    },
    Profile {
        name: "captures-faults",
        share: 40,
        acts: &[COMMON, CAPTURES],
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
