//! Ways to the server that other processes do not take: malformed messages, and sockets that cannot be reached.

use std::os::fd::{AsFd, OwnedFd};

use rustix::net::connect;

use super::token::Exporter;
use super::wire::{self, Message, Request};
use super::{Foreign, Import, SharedBlock, Token, server};
use crate::allocator::{Allocator, Block, Config};
use crate::driver::Context;
use crate::error::{Error, ShareError};
use crate::sim::{SimConfig, Simulator};

struct World {
    context: Context,
    allocator: Allocator,
    block: Block,
    token: Token,
    _sim: Simulator,
}

fn world() -> World {
    let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30)).unwrap();
    let context = sim.driver().unwrap().context(0).unwrap();
    let allocator = Allocator::with_config(&context, Config::new()).unwrap();
    let stream = allocator.create_stream().unwrap();
    let block = allocator.allocate(5 << 20, &stream).unwrap();
    let token = SharedBlock::new(&allocator, block.ptr(), Foreign::Allow).unwrap();
    World {
        context,
        allocator,
        block,
        token: token.token,
        _sim: sim,
    }
}

fn open(world: &World, token: &Token) -> Result<(), Error> {
    let import = Import::open(&world.context, token)?;
    assert_eq!(import.bytes(), world.block.size());
    Ok(())
}

/// A connection without a greeting.
fn connected(exporter: &Exporter) -> OwnedFd {
    let socket = server::new_socket().unwrap();
    connect(&socket, &server::address(exporter).unwrap()).unwrap();
    socket
}

/// The reply to a message; none if the server has closed the connection.
fn reply(socket: &OwnedFd, bytes: &[u8]) -> Option<Message> {
    wire::send(socket, bytes, &[socket.as_fd()]).unwrap();
    assert_eq!(wire::wait(socket, None, 60), Ok(true));
    wire::receive(socket).unwrap_or(None)
}

#[test]
fn malformed_messages_end_their_connection_only() {
    let world = world();
    let exporter = world.token.exporter;
    let greeting = |secret| wire::bytes_of(&Request::Hello { secret }.encode());
    let good = greeting(exporter.secret);
    let code = |message: Option<Message>| message.map(|message| message.words().unwrap()[0]);
    let strangers = [
        vec![0],
        vec![1; 4096],
        vec![1; 5000],
        good[..23].to_vec(),
        wire::bytes_of(&Request::Open(world.token.block).encode()),
        wire::bytes_of(&Request::List { guard: 1, first: 0 }.encode()),
    ];
    for message in &strangers {
        assert!(reply(&connected(&exporter), message).is_none());
    }
    let refused = reply(&connected(&exporter), &greeting([1, 2])).unwrap();
    assert_eq!(refused.bytes[..8], wire::bytes_of(&[wire::REFUSED]));

    let mut random = 1_u64;
    for round in 0..300 {
        let socket = connected(&exporter);
        assert_eq!(code(reply(&socket, &good)), Some(wire::DONE));
        // Random words behind a valid first one, of any number.
        let words: Vec<u64> = (0..round % 9)
            .map(|at| {
                random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                if at == 0 { random >> 32 & 7 } else { random }
            })
            .collect();
        let mut bytes = wire::bytes_of(&words);
        bytes.push(7);
        bytes.truncate(bytes.len() - usize::from(round % 3 > 0));
        if Request::decode(&words) != Some(Request::Close { guard: random }) && !bytes.is_empty() {
            let answered = reply(&socket, &bytes);
            let failed = answered.is_none_or(|answer| answer.bytes[..8] != [0; 8]);
            assert!(failed, "{words:x?}");
        }
    }
    open(&world, &world.token).unwrap();
    world.allocator.check().unwrap();
}

/// Without its socket an exporter is reached by its descriptor; without both the error names both reasons.
#[test]
fn an_exporter_is_reached_by_its_descriptor_or_not_at_all() {
    let world = world();
    let mut token = world.token.clone();
    token.exporter.socket += 1;
    match open(&world, &token) {
        Ok(()) => {}
        // The system does not let a process duplicate even its own descriptors.
        Err(error) => eprintln!("SKIPPED in part: {error}"),
    }
    token.exporter.descriptor = 1 << 20;
    token.exporter.socket += 1;
    let error = open(&world, &token).unwrap_err();
    assert!(
        matches!(error, Error::Share(ShareError::Unreachable { .. })),
        "{error}"
    );
    let text = error.to_string();
    assert!(
        text.contains("its socket: ") && text.contains("its descriptor: "),
        "{text}"
    );

    // The id may belong to another process by now.
    let mut token = world.token.clone();
    token.exporter.start += 1;
    let error = open(&world, &token).unwrap_err();
    assert!(
        matches!(error, Error::Share(ShareError::Ended { .. })),
        "{error}"
    );
    let mut token = world.token.clone();
    token.exporter.secret[1] ^= 1;
    let error = open(&world, &token).unwrap_err();
    assert!(
        matches!(error, Error::Share(ShareError::Refused { .. })),
        "{error}"
    );
    token = world.token.clone();
    token.device[0] ^= 1;
    let error = open(&world, &token).unwrap_err();
    assert!(
        matches!(error, Error::Share(ShareError::NoSuchDevice)),
        "{error}"
    );
    open(&world, &world.token).unwrap();
}
