//! The time limit of a test program: one that hangs is aborted, and says which tests run.

use std::io::Write;
use std::time::Duration;

/// Several times what any program takes in a debug build on a machine with other work. Another limit, in seconds:
const VARIABLE: &str = "CUALLOC_TEST_LIMIT";
const LIMIT: u64 = 1800;
const SIGUSR1: i32 = 10;

unsafe extern "C" {
    fn signal(number: i32, handler: extern "C" fn(i32)) -> usize;
    fn tgkill(process: i32, thread: i32, number: i32) -> i32;
}

/// Runs before `main`, so that no test has to ask for it.
#[used]
// SAFETY: the loader calls each function in this section once, with arguments that C lets a function ignore.
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    let limit = std::env::var(VARIABLE).ok();
    let limit = limit.and_then(|text| text.parse().ok()).unwrap_or(LIMIT);
    let watch = move || {
        std::thread::sleep(Duration::from_secs(limit));
        say(&format!(
            "the time limit of {limit} s is over while these tests run:"
        ));
        let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten();
        // SAFETY: the handler only writes, and the process ends afterwards whatever it interrupts.
        unsafe { signal(SIGUSR1, say_name) };
        for thread in threads.flatten() {
            let number = thread
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok());
            // SAFETY: a call with numbers alone.
            number.map(|thread| unsafe { tgkill(std::process::id() as i32, thread, SIGUSR1) });
        }
        std::thread::sleep(Duration::from_secs(1));
        std::process::abort();
    };
    let watchdog = std::thread::Builder::new().name("watchdog".into());
    watchdog.spawn(watch).expect("a thread");
}

/// A test runs on a thread of its name.
extern "C" fn say_name(_: i32) {
    if let Some(name) = std::thread::current()
        .name()
        .filter(|name| !["main", "watchdog"].contains(name))
    {
        say(&format!("test {name}"));
    }
}

/// Not with `eprintln`, which tests capture.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
