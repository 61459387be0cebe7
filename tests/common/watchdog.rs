//! The time limit of a test program: one that hangs ends with the names of the tests that are stuck.

use std::time::Duration;

/// Several times what any program takes in a debug build on a machine with other work. Another limit, in seconds:
const VARIABLE: &str = "CUALLOC_TEST_LIMIT";
const LIMIT: u64 = 1800;

/// Runs before `main`, so that no test has to ask for it.
#[cfg(target_os = "linux")]
#[used]
// SAFETY: the loader calls each function in this section once, with arguments that C lets a function ignore.
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    let limit = std::env::var(VARIABLE)
        .ok()
        .and_then(|text| text.parse().ok());
    let limit = limit.unwrap_or(LIMIT);
    let watch = std::thread::Builder::new()
        .name("watchdog".into())
        .spawn(move || {
            std::thread::sleep(Duration::from_secs(limit));
            eprintln!(
                "the time limit of {limit} s is over in: {}",
                stuck().join(", ")
            );
            std::process::abort();
        });
    drop(watch.expect("a thread"));
}

/// The tests that run: each has a thread of its name, of which the system keeps 15 bytes.
fn stuck() -> Vec<String> {
    let program = std::env::current_exe().expect("a path");
    let list = std::process::Command::new(program)
        .args(["--list", "--format", "terse"])
        .env_remove(VARIABLE)
        .output();
    let list = list.map_or_else(|_| Vec::new(), |output| output.stdout);
    let threads = std::fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten();
    let threads =
        threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok());
    let threads: Vec<String> = threads.map(|name| name.trim_end().to_owned()).collect();
    let list = String::from_utf8_lossy(&list).into_owned();
    let tests = list.lines().filter_map(|line| line.strip_suffix(": test"));
    let runs = |test: &&str| {
        threads
            .iter()
            .any(|name| name.len() == test.len().min(15) && test.starts_with(name))
    };
    tests.filter(runs).map(str::to_owned).collect()
}
