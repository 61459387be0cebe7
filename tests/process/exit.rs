//! Things that take a process of their own: its exit, and the choice of the driver under test.

use std::process::Output;
use std::sync::OnceLock;
use std::time::Duration;

use crate::common::prelude::*;

const CASE: &str = "CUALLOC_TEST_CASE";

fn child(case: &str, driver: Option<&str>) -> Output {
    let mut command = itself("exit::child_entry");
    command
        .env(CASE, case)
        .env("CUALLOC_DRIVER", "/nowhere/libcuda-of-a-test.so")
        .env_remove(DRIVER_VARIABLE);
    if let Some(driver) = driver {
        command.env(DRIVER_VARIABLE, driver);
    }
    command.output().unwrap()
}

fn text(output: &Output) -> String {
    let out = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    format!("{}\n{out}\n{errors}", output.status)
}

#[test]
fn child_entry() {
    match std::env::var(CASE).as_deref() {
        Ok("exit") => case_exit(),
        Ok("hang") => std::thread::sleep(Duration::from_secs(3600)),
        Ok("suite") => each(|rig| {
            let allocator = rig.allocator();
            drop(allocator.allocate(512, &rig.stream()).unwrap());
            println!("simulated: {}", rig.sim().is_some());
        }),
        _ => {}
    }
}

/// S1.47: without a GPU the suite runs on the simulated driver; asked for one, it fails instead of
/// passing over it.
#[test]
fn s1_47_tests_never_pass_by_not_running() {
    for driver in [None, Some("sim")] {
        let output = child("suite", driver);
        let text = text(&output);
        assert!(output.status.success(), "{text}");
        assert_eq!(text.matches("simulated: true").count(), 2, "{text}");
    }
    let output = child("suite", Some("cuda"));
    assert!(!output.status.success(), "{}", text(&output));
    assert!(text(&output).contains(DRIVER_VARIABLE), "{}", text(&output));
    let output = child("suite", Some("gpu"));
    assert!(!output.status.success(), "an unknown driver is no driver");
}

struct Kept {
    allocator: Allocator,
    block: Block,
    stream: Stream,
}

static SIMULATOR: OnceLock<Simulator> = OnceLock::new();
static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

unsafe extern "C" {
    fn atexit(handler: extern "C" fn()) -> i32;
}

extern "C" fn at_exit() {
    let sim = SIMULATOR.get().unwrap();
    sim.take_log();
    for kept in std::mem::take(&mut *KEPT.lock().unwrap()) {
        // A pool that outlives main: every call and every drop comes too late.
        drop(kept.block);
        let late = kept.allocator.allocate(4096, &kept.stream);
        drop(kept.stream);
        let trimmed = kept.allocator.empty_cache();
        drop(kept.allocator);
        println!("{:?} {:?}", late.err(), trimmed.err());
    }
    let calls = sim.take_log();
    println!("calls at exit: {}", calls.len());
    for call in calls {
        println!("{call:?}");
    }
}

fn case_exit() {
    // Registered before the library's own handler, so it runs after that.
    // SAFETY: a function of this program.
    assert_eq!(unsafe { atexit(at_exit) }, 0);
    let sim =
        SIMULATOR.get_or_init(|| Simulator::new(SimConfig::with_devices(1, 1 << 30)).unwrap());
    for policy in [Policy::Packed, Policy::Classic] {
        let driver = sim.driver().unwrap();
        let context = driver.context(0).unwrap();
        let config = Config::new().policy(policy);
        let allocator = Allocator::with_config(&context, config).unwrap();
        let stream = allocator.create_stream().unwrap();
        drop(allocator.allocate(12 * MIB, &stream).unwrap());
        let block = allocator.allocate(3 * MIB, &stream).unwrap();
        KEPT.lock().unwrap().push(Kept {
            allocator,
            block,
            stream,
        });
    }
    sim.record_log(true);
}

/// R71: a pool that lives until the process exits makes no driver call after the teardown.
#[test]
fn r71_static_pool_makes_no_call_at_exit() {
    let output = child("exit", None);
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("calls at exit: 0"), "{text}");
    assert_eq!(
        text.matches("Some(Exiting) Some(Exiting)").count(),
        2,
        "{text}"
    );
}

/// A test program that hangs ends by itself, and says in which test.
#[test]
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn a_test_program_that_hangs_names_the_test() {
    let mut command = itself("exit::child_entry");
    let output = command.env(CASE, "hang").env("CUALLOC_TEST_LIMIT", "1");
    let output = output.output().unwrap();
    assert!(!output.status.success());
    let text = text(&output);
    assert!(text.contains("the time limit of 1 s is over"), "{text}");
    let named = text.contains("test exit::child_entry\n");
    assert!(named, "{text}");
}
