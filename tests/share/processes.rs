//! Exporters and importers in processes of their own, which end as they please.

use super::*;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

const ROLE: &str = "CUALLOC_TEST_ROLE";
const BLOCKS: usize = 1000;

/// A child that plays a role, and a line for each of its answers.
struct Other {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Other {
    fn new(role: &str) -> Other {
        let mut command = itself("processes::child_entry");
        command
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        Other {
            input: child.stdin.take().unwrap(),
            output: BufReader::new(child.stdout.take().unwrap()),
            child,
        }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
        self.input.flush().unwrap();
    }

    /// The next answer: the rest of a line with a mark, which the test harness does not print.
    fn answer(&mut self) -> String {
        loop {
            let mut line = String::new();
            let read = self.output.read_line(&mut line).unwrap();
            assert!(read > 0, "the child has ended");
            if let Some((_, answer)) = line.trim_end().split_once("answer: ") {
                return answer.to_owned();
            }
        }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.kill();
    }
}

fn answer(text: impl std::fmt::Display) {
    println!("answer: {text}");
}

#[test]
fn child_entry() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let rig = Rig::new(Policy::Packed, SimConfig::with_devices(1, 8 << 30));
    let lines = std::io::stdin().lines().map(|line| line.unwrap());
    if role == "exporter" {
        let (allocator, stream) = (rig.allocator(), rig.stream());
        let blocks: Vec<Block> = (0..BLOCKS)
            .map(|at| allocator.allocate(bytes_of(at), &stream).unwrap())
            .collect();
        for (at, block) in blocks.iter().enumerate() {
            rig.stamp(block.ptr(), bytes_of(at), at as u32, &stream);
        }
        stream.synchronize().unwrap();
        for block in &blocks {
            answer(token(&allocator, block.ptr()));
        }
        // Lives until it is killed, or its parent has ended.
        return lines.for_each(drop);
    }
    let mut imports = Vec::new();
    for line in lines {
        match line.strip_prefix("drop ") {
            Some(count) => {
                imports.truncate(imports.len() - count.parse::<usize>().unwrap());
                answer("dropped");
            }
            None => match Import::open(&rig.context, &line.parse().unwrap()) {
                Ok(import) => {
                    answer(import.bytes());
                    imports.push(import);
                }
                Err(error) => answer(error),
            },
        }
    }
}

/// A size of up to 200 KiB, sometimes 5 MiB.
fn bytes_of(at: usize) -> usize {
    match at % 250 {
        0 => 5 * MIB,
        _ => 512 + 1024 * (at % 200),
    }
}

/// The open descriptors of this process.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// An importer ends guards by its word, and all of them with its end. Nothing is left of it here.
#[test]
fn guards_end_with_the_process_of_their_importer() {
    alone(|| {
        packed(|rig| {
            let (allocator, stream) = (rig.allocator(), rig.stream());
            let blocks: Vec<Block> = (0..BLOCKS)
                .map(|at| allocator.allocate(bytes_of(at), &stream).unwrap())
                .collect();
            // The first round also opens what the server and the driver keep.
            let mut kept = None;
            for ends_by_itself in [true, false, true] {
                let mut other = Other::new("importer");
                for block in &blocks[..BLOCKS / 2] {
                    other.tell(&token(&allocator, block.ptr()).to_string());
                    assert_eq!(other.answer(), block.size().to_string());
                }
                other.tell("drop 100");
                assert_eq!(other.answer(), "dropped");
                assert_matches!(allocator.close(), Err(Error::Guarded { .. }));
                let guards = || match allocator.close() {
                    Err(Error::Guarded { guards, .. }) => guards,
                    _ => 0,
                };
                wait_until("100 guards have ended", || guards() == 400);
                if !ends_by_itself {
                    // Half of the next message may be on its way.
                    other.tell(&token(&allocator, blocks[0].ptr()).to_string());
                    other.kill();
                }
                drop(other);
                wait_until("all guards have ended", || guards() == 0);
                let now = descriptors();
                assert_eq!(kept.replace(now).unwrap_or(now), now);
                allocator.check().unwrap();
            }
            drop(blocks);
            close(&allocator);
        });
    });
}

/// Memory and its contents outlive the process that shares them; its tokens do not.
#[test]
fn imports_outlive_their_exporter() {
    alone(|| {
        packed(|rig| {
            let mut other = Other::new("exporter");
            let answers = (0..BLOCKS).map(|_| other.answer().parse().unwrap());
            let tokens: Vec<Token> = answers.collect();
            let before = descriptors();
            let (opened, refused) = tokens.split_at(BLOCKS / 2);
            let open = |token: &Token| Import::open(&rig.context, token);
            let imports: Vec<Import> = opened.iter().map(|token| open(token).unwrap()).collect();
            other.kill();
            for token in refused.iter().chain(opened) {
                let end = open(token);
                assert_matches!(end, Err(Error::Share(ShareError::Ended { pid })) if pid == token.process());
            }
            let stream = rig.stream();
            for (at, import) in imports.iter().enumerate() {
                let (ptr, bytes) = (import.ptr(), bytes_of(at));
                assert_eq!(rig.mismatches(ptr, bytes, at as u32, &stream), 0);
                rig.stamp(ptr, bytes, 7, &stream);
                assert_eq!(rig.mismatches(ptr, bytes, 7, &stream), 0);
            }
            drop(imports);
            assert!(descriptors() <= before, "connections and memory are closed");
        });
    });
}
