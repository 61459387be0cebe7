//! Tools that NVTX attaches: a library of ours writes down each call with all of its fields.

use crate::common::prelude::*;
use cualloc::record::Context;
use std::ffi::OsString;

const CASE: &str = "CUALLOC_TEST_CASE";
const TOOL: &str = "NVTX_INJECTION64_PATH";
const MIB: usize = 1 << 20;

/// The calls that a tool with some definitions received, and the lines that the program printed, in order; `None`
/// without a compiler.
fn told(case: &str, defines: &[&str]) -> Option<Vec<String>> {
    let compiler = compiler()?;
    let folder = Folder::new(&format!("nvtx-{case}"));
    let (source, library) = (folder.file("tool.c"), folder.file("tool.so"));
    std::fs::write(&source, include_str!("../common/fake_tool.c")).unwrap();
    let fixed = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o"];
    let mut arguments: Vec<OsString> = fixed.iter().map(OsString::from).collect();
    arguments.extend([library.clone().into(), source.into()]);
    arguments.extend(defines.iter().map(|define| format!("-D{define}").into()));
    compile(&compiler, &arguments).unwrap();
    let thread = std::thread::current();
    let mut command = itself(thread.name().expect("tests run on threads of their names"));
    command.env(CASE, case).env(TOOL, &library);
    let output = command.env_remove("CUALLOC_CONFIG").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{errors}");
    let lines = text.lines();
    // The first line may stand behind what the harness says.
    let lines = lines.filter_map(|line| {
        let at = line.find("NVTX ").or_else(|| line.find("SAYS "))?;
        Some(line[at..].to_owned())
    });
    Some(lines.collect())
}

fn case() -> Option<String> {
    std::env::var(CASE).ok()
}

/// The calls that the tool must have received just now.
fn says(line: String) {
    println!("SAYS {line}");
}

fn on_simulator(settings: &str, work: impl FnOnce(&Allocator, &Stream)) {
    let simulator = Simulator::new(SimConfig::with_devices(1, 1 << 30)).unwrap();
    let context = simulator.driver().unwrap().context(0).unwrap();
    let config: Config = settings.parse().unwrap();
    let allocator = Allocator::with_config(&context, config).unwrap();
    let stream = allocator.create_stream().unwrap();
    work(&allocator, &stream);
    drop(stream);
    allocator.close().unwrap();
    assert_eq!(simulator.reports(), []);
}

/// Separates the calls that the tool received from those that the program expected.
fn agree(lines: &[String], prefix: &str) {
    let of = |by: &'static str| lines.iter().filter_map(move |line| line.strip_prefix(by));
    let told = of("NVTX ").filter(|line| !line.starts_with(prefix));
    assert!(told.eq(of("SAYS ")), "{lines:#?}");
}

#[test]
fn a_tool_receives_heaps_blocks_and_names() {
    if case().as_deref() == Some("memory") {
        return on_simulator("", |allocator, stream| {
            says("domain cualloc".into());
            for (number, name) in ["grow", "stitch", "wait", "trim", "oom"].iter().enumerate() {
                says(format!("category {} {name}", number + 1));
            }
            assert_eq!(allocator.policy(), Policy::Classic);
            let small = allocator.allocate(63, stream).unwrap();
            let heap = small.ptr();
            says("push 1 2097152 bytes".into());
            says("pop".into());
            says(format!("heap {heap:#x} {} cualloc", 2 * MIB));
            says(format!("born 1 {heap:#x} 63"));
            // In a context, with a label, and with both: the label counts.
            let before = Context::new("train;forward").enter();
            let second = allocator.allocate(1000, stream).unwrap();
            says(format!("born 1 {:#x} 1000", second.ptr()));
            says(format!("name {:#x} train;forward", second.ptr()));
            let request = Request::new(600).tag("weights");
            let third = allocator.allocate_with(request, stream).unwrap();
            says(format!("born 1 {:#x} 600", third.ptr()));
            says(format!("name {:#x} train;forward", third.ptr()));
            says(format!("name {:#x} weights", third.ptr()));
            before.enter();
            let fourth = allocator.allocate_with(request, stream).unwrap();
            says(format!("born 1 {:#x} 600", fourth.ptr()));
            says(format!("name {:#x} weights", fourth.ptr()));
            let at = third.ptr();
            drop(third);
            says(format!("gone {at:#x}"));
            let again = allocator.allocate(512, stream).unwrap();
            assert_eq!(again.ptr(), at, "the address is another's");
            says(format!("born 1 {at:#x} 512"));
            let Err(Error::OutOfMemory(refused)) = allocator.allocate(1 << 30, stream) else {
                panic!("more than the device has");
            };
            says(format!("mark 5 {refused}"));
            let large = allocator.allocate(20 * MIB, stream).unwrap();
            says(format!("push 1 {} bytes", 20 * MIB));
            says("pop".into());
            says(format!("heap {:#x} {} cualloc", large.ptr(), 20 * MIB));
            says(format!("born 2 {:#x} {}", large.ptr(), 20 * MIB));
            let at = large.ptr();
            large.free().unwrap();
            says(format!("gone {at:#x}"));
            allocator.trim(0).unwrap();
            says("push 4 0 bytes are kept".into());
            says("heap-gone 2".into());
            says("pop".into());
            for block in [again, small, second, fourth] {
                says(format!("gone {:#x}", block.ptr()));
                drop(block);
            }
            says("heap-gone 1".into());
        });
    }
    let Some(lines) = told("memory", &[]) else {
        return;
    };
    // Waits depend on what the simulator has finished by itself.
    let lines: Vec<String> = without_waits(lines);
    agree(&lines, "push 3");
}

/// Leaves out waits and their ends.
fn without_waits(lines: Vec<String>) -> Vec<String> {
    let mut open = false;
    let stays = |line: &String| match line.as_str() {
        wait if wait.starts_with("NVTX push 3") => {
            open = true;
            false
        }
        "NVTX pop" if open => {
            open = false;
            false
        }
        _ => true,
    };
    lines.into_iter().filter(stays).collect()
}

#[test]
fn a_tool_without_domains_receives_memory_without_a_domain() {
    if case().as_deref() == Some("no-domains") {
        return on_simulator("", |allocator, stream| {
            let block = allocator.allocate(100, stream).unwrap();
            says(format!("heap {:#x} {} cualloc", block.ptr(), 2 * MIB));
            says(format!("born 1 {:#x} 100", block.ptr()));
            says(format!("gone {:#x}", block.ptr()));
            says("heap-gone 1".into());
        });
    }
    if let Some(lines) = told("no-domains", &["WITHOUT_DOMAINS"]) {
        agree(&lines, "-");
    }
}

#[test]
fn a_tool_without_memory_sees_slow_paths_of_any_policy() {
    if case().as_deref() == Some("no-memory") {
        return on_simulator("", |allocator, stream| {
            assert_eq!(allocator.policy(), Policy::Packed);
            drop(allocator.allocate(100, stream).unwrap());
            drop(allocator.allocate(20 * MIB, stream).unwrap());
            allocator.trim(0).unwrap();
        });
    }
    let Some(lines) = told("no-memory", &["WITHOUT_MEMORY"]) else {
        return;
    };
    let of = |start: &str| lines.iter().filter(|line| line.starts_with(start)).count();
    assert!(
        of("NVTX push 1") >= 2 && of("NVTX push 4") == 1,
        "{lines:?}"
    );
    assert_eq!(of("NVTX push"), of("NVTX pop"));
    assert_eq!(of("NVTX heap") + of("NVTX born") + of("NVTX gone"), 0);
}

#[test]
fn no_tool_is_loaded_unless_configured() {
    if let Some(case) = case() {
        let (settings, policy) = match case.as_str() {
            "off" => ("tune.nvtx=off", Policy::Packed),
            // A heap in mapped memory would be refused: blocks of the packed policy are not reported.
            _ => ("policy=packed", Policy::Packed),
        };
        return on_simulator(settings, |allocator, stream| {
            assert_eq!(allocator.policy(), policy);
            drop(allocator.allocate(100, stream).unwrap());
            drop(allocator.allocate(MIB, stream).unwrap());
        });
    }
    let Some(lines) = told("off", &[]) else {
        return;
    };
    assert_eq!(lines, [""; 0]);
    let lines = told("packed", &[]).unwrap_or_default();
    let about_memory = |line: &&String| !line.contains("push") && !line.contains("pop");
    let about_memory: Vec<_> = lines.iter().filter(about_memory).collect();
    assert_eq!(
        about_memory.len(),
        6,
        "the domain, and its categories: {lines:?}"
    );
}
