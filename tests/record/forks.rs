//! Recordings of a process that forks: its children have nothing to do with them, and end.

use crate::common::{Folder, SetAtEnd};
use crate::scene::Scene;
use cualloc::record::{Recorder, Recording, Target};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

const CASE: &str = "CUALLOC_TEST_FORK_CASE";

unsafe extern "C" {
    fn fork() -> i32;
    fn alarm(seconds: u32) -> u32;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    fn exit(code: i32) -> !;
    fn _exit(code: i32) -> !;
}

/// Forks again and again while a thread allocates and another writes; each child does `work` and ends. The statuses.
fn forks(scene: &Scene, mut work: impl FnMut()) -> Vec<i32> {
    let (done, stream) = (AtomicBool::new(false), scene.stream());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                drop(scene.block(4096, &stream));
            }
        });
        let _done = SetAtEnd(&done);
        let mut forked = || {
            // SAFETY: the child calls what a forked child may call, and ends.
            unsafe {
                let pid = fork();
                if pid == 0 {
                    alarm(10);
                    work();
                    _exit(1);
                }
                let mut status = -1;
                assert_eq!(waitpid(pid, &mut status, 0), pid);
                status
            }
        };
        // The first that hangs is enough.
        let mut statuses = Vec::new();
        while statuses.len() < 100 && statuses.last().is_none_or(|status| *status == 0) {
            statuses.push(forked());
        }
        statuses
    })
}

#[test]
fn child_entry() {
    let Ok(case) = std::env::var(CASE) else {
        return;
    };
    let scene = Scene::new("");
    let statuses = match case.strip_prefix("drop:") {
        // SAFETY: the handlers of the process run, which is the point.
        None => forks(&scene, || unsafe { exit(0) }),
        Some(path) => {
            let mut recorder = Some(Recorder::start(Target::File(path.as_ref())).unwrap());
            let statuses = forks(&scene, || {
                drop(recorder.take());
                // SAFETY: nothing else is to happen in the child.
                unsafe { _exit(0) }
            });
            recorder.take().unwrap().finish().unwrap();
            statuses
        }
    };
    assert_eq!(statuses, [0; 100]);
}

fn program(case: &str, record: &str) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "forks::child_entry", "--test-threads=1"])
        .env(CASE, case)
        .env("CUALLOC_RECORD", record)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn children_of_a_process_that_is_recorded_exit() {
    let folder = Folder::new("record-fork-exit");
    let path = folder.file("run.rec");
    program("exit", path.to_str().unwrap());
    let recording = Recording::read(&std::fs::read(path).unwrap()).unwrap();
    assert!(recording.is_complete());
}

#[test]
fn children_drop_a_recorder_of_their_parent() {
    let folder = Folder::new("record-fork-drop");
    let path = folder.file("run.rec");
    program(&format!("drop:{}", path.to_str().unwrap()), "");
    let recording = Recording::read(&std::fs::read(path).unwrap()).unwrap();
    assert!(recording.is_complete());
}
