//! Programs in C and C++ over the header and the built libraries, on the simulator.
//!
//! `CUALLOC_CAPI_CHECKER=valgrind` runs them under valgrind, `address` builds them with the address sanitizer and the
//! one for undefined behaviour.
#![cfg(target_os = "linux")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

mod tools;
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[path = "../../tests/common/watchdog.rs"]
mod watchdog;
use tools::{checked, has, libraries, run, source};

/// A separate folder for the files that a test builds.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&folder).unwrap();
    folder
}

enum Linked {
    Shared,
    Static,
}

/// Compiles a program with all warnings as errors; none where there is no compiler.
fn built(standard: &str, file: &Path, linked: Linked) -> Option<PathBuf> {
    let compiler = match standard.starts_with("c++") {
        true => "g++",
        false => "gcc",
    };
    if !has(compiler) {
        println!("SKIPPED: there is no {compiler}");
        return None;
    }
    let libraries = libraries();
    let how = match linked {
        Linked::Shared => "shared",
        Linked::Static => "static",
    };
    let stem = file.file_stem().unwrap().to_str().unwrap();
    let program = folder("programs").join(format!("{stem}-{standard}-{how}"));
    let mut command = Command::new(compiler);
    command
        .args([
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pedantic",
            "-O1",
            "-g",
            "-pthread",
        ])
        .arg(format!("-std={standard}"))
        .arg("-I")
        .arg(source("include"));
    if compiler == "g++" {
        command.args(["-x", "c++"]);
    }
    command.arg(file).args(["-x", "none", "-o"]).arg(&program);
    if checked() == "address" {
        command.arg("-fsanitize=address,undefined");
    }
    match linked {
        Linked::Shared => {
            let named = run_time_folder();
            // Before LD_LIBRARY_PATH, by which cargo may name an older build.
            let path = format!("-Wl,--disable-new-dtags,-rpath,{}", named.display());
            command.arg(libraries.join("libcualloc_capi.so")).arg(path);
        }
        Linked::Static => {
            command.arg(libraries.join("libcualloc_capi.a"));
            command.args(["-lgcc_s", "-lm"]);
        }
    }
    run(command.arg("-ldl"));
    Some(program)
}

/// A folder with the library by its run-time name, where programs look for it.
fn run_time_folder() -> PathBuf {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    let made = MADE.get_or_init(|| {
        let made = folder("linked");
        let named = made.join("libcualloc.so.0.1");
        let _ = fs::remove_file(&named);
        std::os::unix::fs::symlink(libraries().join("libcualloc_capi.so"), &named).unwrap();
        made
    });
    made.clone()
}

/// The simulator as a library with the driver's names, where the tests of the whole workspace have built it.
fn simulated_driver() -> Option<PathBuf> {
    let driver = libraries().join("../examples/libsimdriver.so");
    if !driver.exists() {
        println!("SKIPPED: {} is not built", driver.display());
        return None;
    }
    Some(driver)
}

/// Runs a program to its end, under the selected checker.
fn ends_well(program: &Path, arguments: &[&str]) {
    assert!(run(&mut checked_command(program, arguments)).ends_with("well\n"));
}

/// The command that runs a program under the selected checker.
fn checked_command(program: &Path, arguments: &[&str]) -> Command {
    let mut command = match checked().as_str() {
        "valgrind" => {
            let mut command = Command::new("valgrind");
            command.args(["-q", "--error-exitcode=9", "--leak-check=full"]);
            command.args([
                "--errors-for-leak-kinds=definite,indirect",
                "--show-leak-kinds=definite",
            ]);
            command.arg(program);
            command
        }
        _ => Command::new(program),
    };
    command
        .args(arguments)
        .env_remove("CUALLOC_CONFIG")
        .env_remove("CUALLOC_DEVICE");
    command
        .env("ASAN_OPTIONS", "abort_on_error=0")
        .env("UBSAN_OPTIONS", "halt_on_error=1");
    command
}

/// Under valgrind a round takes a hundred times as long.
fn rounds(plain: &'static str) -> &'static str {
    match checked().as_str() {
        "" => plain,
        _ => "2",
    }
}

fn program(standard: &str, name: &str, linked: Linked, arguments: &[&str]) {
    if let Some(program) = built(standard, &source("tests/c").join(name), linked) {
        ends_well(&program, arguments);
    }
}

/// Runs a program beside the simulated driver, unless there is none or no compiler.
fn driven(name: &str, arguments: &[&str]) {
    driven_on("1", name, arguments);
}

/// [`driven`] on this number of devices.
fn driven_on(devices: &str, name: &str, arguments: &[&str]) {
    let Some(driver) = simulated_driver() else {
        return;
    };
    if let Some(program) = built("c11", &source("tests/c").join(name), Linked::Shared) {
        let mut command = checked_command(&program, arguments);
        command
            .env("CUALLOC_DRIVER", driver)
            .env("CUALLOC_SIM_DEVICES", devices);
        assert!(run(&mut command).ends_with("well\n"));
    }
}

#[test]
fn a_c_program_calls_each_function() {
    program("c11", "basic.c", Linked::Shared, &[]);
}

#[test]
fn the_same_program_compiles_as_cpp() {
    program("c++17", "basic.c", Linked::Shared, &[]);
}

#[test]
fn the_same_program_with_the_static_library() {
    program("c11", "basic.c", Linked::Static, &[]);
}

/// Calls from the last destructors of a thread do what all others do: whole programs run in one.
#[test]
fn programs_run_in_the_last_destructors_of_a_thread() {
    let folder = folder("late");
    let driver = simulated_driver();
    let recordings = folder.to_str().unwrap();
    for (name, arguments, needs_driver) in [
        ("basic.c", &[][..], false),
        ("shared.c", &[rounds("2")], false),
        ("record.c", &[recordings], false),
        ("ends.c", &[rounds("2")], false),
        ("driver.c", &[], true),
        ("pools.c", &[rounds("5")], true),
        ("stranger.c", &["1"], true),
    ] {
        if needs_driver && driver.is_none() {
            continue;
        }
        let file = folder.join(format!("late-{name}"));
        let [program, late] = [name, "late.c"].map(|name| source("tests/c").join(name));
        let text = format!("#define PROGRAM {program:?}\n#include {late:?}\n");
        fs::write(&file, text).unwrap();
        let Some(program) = built("c11", &file, Linked::Shared) else {
            return;
        };
        let mut command = checked_command(&program, arguments);
        command.envs(driver.iter().map(|driver| ("CUALLOC_DRIVER", driver)));
        assert!(run(&mut command).ends_with("well\n"), "{name}");
    }
}

/// Wrong arguments from eight threads, by a caller that knows only the header.
#[test]
fn wrong_arguments_return_the_documented_errors() {
    driven(
        "stranger.c",
        &[if checked().is_empty() { "2" } else { "1" }],
    );
}

#[test]
fn parts_of_a_process_share_allocators() {
    program("c11", "shared.c", Linked::Shared, &[rounds("10")]);
    program("c++17", "shared.c", Linked::Shared, &["1"]);
}

#[test]
fn calls_during_a_destroy_end_or_find_it_closed() {
    program("c11", "ends.c", Linked::Shared, &[rounds("40")]);
}

#[test]
fn recordings_are_begun_dumped_and_ended() {
    let folder = folder("recordings");
    let folder = folder.to_str().unwrap();
    program("c11", "record.c", Linked::Shared, &[folder]);
}

#[test]
fn a_forked_child_gets_an_answer() {
    program("c11", "forked.c", Linked::Shared, &[]);
}

/// Runs without a checker, because a thread of the driver is blocked on purpose.
#[test]
fn a_child_forked_while_a_thread_is_in_the_simulated_driver_may_exit() {
    let Some(driver) = simulated_driver() else {
        return;
    };
    let Some(program) = built("c11", &source("tests/c/forked_driver.c"), Linked::Shared) else {
        return;
    };
    let mut command = Command::new(&program);
    command
        .env("CUALLOC_DRIVER", &driver)
        .env("ASAN_OPTIONS", "detect_leaks=0");
    assert!(run(&mut command).ends_with("well\n"));
}

#[test]
fn streams_and_contexts_are_the_callers() {
    driven("driver.c", &[]);
    driven("driver.c", &["context dies first"]);
}

#[test]
fn captures_go_through_pools_and_wrong_scopes_are_errors() {
    let Some(driver) = simulated_driver() else {
        return;
    };
    if let Some(program) = built("c11", &source("tests/c/pools.c"), Linked::Shared) {
        let mut command = checked_command(&program, &[rounds("50")]);
        let output = command.env("CUALLOC_DRIVER", &driver).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert_eq!((&output.stdout[..], &*said), (&b"well\n"[..], ""));
    }
}

#[test]
fn two_devices_have_an_allocator_each() {
    driven_on("2", "devices.c", &[]);
}

#[test]
fn ranges_grow_in_place() {
    driven("ranges.c", &[]);
}

#[test]
fn the_cpp_interface_owns_and_throws() {
    program("c++17", "face.cpp", Linked::Shared, &[]);
}

#[test]
fn the_cpp_header_refuses_standards_before_cpp17() {
    if !has("g++") {
        return println!("SKIPPED: there is no g++");
    }
    for (standard, is_accepted) in [
        ("c++11", false),
        ("c++14", false),
        ("c++17", true),
        ("c++20", true),
    ] {
        let mut compiler = Command::new("g++");
        let output = compiler
            .args([&format!("-std={standard}"), "-fsyntax-only", "-x", "c++"])
            .arg(source("include/cualloc.hpp"))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), is_accepted, "{standard}: {text}");
        let first = text.lines().find(|line| line.contains("error:"));
        assert!(
            first.is_none_or(|line| line.contains("requires C++17")),
            "{standard}: {text}"
        );
    }
}

/// `CUALLOC_RMM_HEADERS` is a folder that the wheels librmm, rapids-logger, nvidia-cuda-runtime and nvidia-cuda-crt
/// were unpacked into.
#[test]
fn the_memory_resource_is_one_of_rmm() {
    let Some(wheels) = std::env::var_os("CUALLOC_RMM_HEADERS").map(PathBuf::from) else {
        return println!("SKIPPED: CUALLOC_RMM_HEADERS names no folder with RMM's headers");
    };
    let program = folder("programs").join("rmm");
    let mut command = Command::new("g++");
    command.args([
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pedantic",
        "-I",
    ]);
    command.arg(source("include")).arg("-o").arg(&program);
    for headers in [
        "librmm/include",
        "librmm/include/rapids",
        "nvidia/cu13/include",
        "rapids_logger/include",
    ] {
        command.arg("-isystem").arg(wheels.join(headers));
    }
    command
        .arg(source("tests/c/rmm.cpp"))
        .arg(libraries().join("libcualloc_capi.so"));
    for (folder, library) in [
        ("librmm/lib64", "librmm.so"),
        ("rapids_logger/lib64", "librapids_logger.so"),
        ("nvidia/cu13/lib", "libcudart.so.13"),
    ] {
        command.arg(wheels.join(folder).join(library));
        command.arg(format!("-Wl,-rpath,{}", wheels.join(folder).display()));
    }
    run(command.arg(format!("-Wl,-rpath,{}", run_time_folder().display())));
    let mut command = Command::new(program);
    assert!(run(command.env_remove("CUALLOC_CONFIG")).ends_with("well\n"));
}

#[test]
fn the_snippet_of_the_document_runs() {
    let page = fs::read_to_string(source("../docs/clients/c.md")).unwrap();
    for (language, standard) in [("c", "c11"), ("cpp", "c++17")] {
        let mark = format!("```{language}\n");
        let snippet = page
            .split(&mark)
            .nth(1)
            .and_then(|rest| rest.split("```").next());
        let file = folder("programs").join(format!("snippet.{language}"));
        fs::write(&file, snippet.unwrap()).unwrap();
        if let Some(program) = built(standard, &file, Linked::Shared) {
            let mut command = Command::new(program);
            assert!(run(command.env_remove("CUALLOC_CONFIG")).contains("bytes held"));
        }
    }
}

/// The output of `nm` for a library, as lines.
fn defined(arguments: &[&str], library: &str) -> Vec<String> {
    let output = run(Command::new("nm")
        .args(arguments)
        .arg(libraries().join(library)));
    let names = output
        .lines()
        .filter_map(|line| line.split_whitespace().next());
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    names.sort();
    names
}

#[test]
fn the_shared_library_exports_what_is_listed_and_nothing_else() {
    if !has("nm") {
        return println!("SKIPPED: there is no nm");
    }
    let listed = fs::read_to_string(source("symbols.txt")).unwrap();
    let listed: Vec<&str> = listed.lines().collect();
    let exported = defined(&["-D", "--defined-only", "-P"], "libcualloc_capi.so");
    assert_eq!(exported, listed);
    // The header has a prototype of each, and of nothing else.
    let header = fs::read_to_string(source("include/cualloc.h")).unwrap();
    let declared = header
        .lines()
        .filter(|line| !line.starts_with([' ', '/', '#', '}']) && !line.starts_with("typedef"));
    // The first name of the library that is no type: a function may return a pointer to a function.
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let is_function = |name: &&str| name.starts_with("cualloc_") && !name.ends_with("_t");
    let mut declared: Vec<&str> = declared
        .filter(|line| line.contains('('))
        .filter_map(|line| line.split(|c| !is_part(c)).find(is_function))
        .collect();
    declared.sort_unstable();
    assert_eq!(declared, listed);
}

#[test]
fn the_shared_library_has_a_name_and_stays_loaded() {
    if !has("readelf") {
        return println!("SKIPPED: there is no readelf");
    }
    let library = libraries().join("libcualloc_capi.so");
    let dynamic = run(Command::new("readelf").args(["-d", "-W"]).arg(library));
    assert!(dynamic.contains("[libcualloc.so.0.1]"), "{dynamic}");
    assert!(dynamic.contains("NODELETE"), "{dynamic}");
    assert!(
        !dynamic.contains("libcuda"),
        "the driver is loaded when it is needed: {dynamic}"
    );
}

#[test]
fn it_is_installed_and_found_by_pkg_config() {
    let root = folder("installed");
    let prefix = root.join("usr");
    let mut install = Command::new("sh");
    install
        .arg(source("install.sh"))
        .arg("--prefix")
        .arg(&prefix);
    run(install.arg("--built").arg(libraries()));
    let dynamic = prefix.join("lib/libcualloc.so.0.1");
    assert!(prefix.join("lib/libcualloc.a").exists());
    if has("strip") && has("readelf") {
        let sections = run(Command::new("readelf").arg("-SW").arg(&dynamic));
        assert!(!sections.contains(".debug_"), "{sections}");
    }
    let described = fs::read_to_string(prefix.join("lib/pkgconfig/cualloc.pc")).unwrap();
    assert!(!described.contains('@'), "{described}");
    assert!(described.contains(&format!("Version: {}\n", env!("CARGO_PKG_VERSION"))));
    if !has("pkg-config") || !has("gcc") {
        return println!("SKIPPED in part: there is no pkg-config or no gcc");
    }
    let mut asked = Command::new("pkg-config");
    asked.args(["--cflags", "--libs", "cualloc"]);
    let flags = run(asked.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig")));
    let program = root.join("basic");
    let mut compiler = Command::new("gcc");
    compiler
        .arg("-std=c11")
        .arg(source("tests/c/basic.c"))
        .arg("-o")
        .arg(&program);
    run(compiler.args(flags.split_whitespace()));
    let mut command = Command::new(program);
    command
        .env_remove("CUALLOC_CONFIG")
        .env_remove("CUALLOC_DEVICE");
    assert!(run(command.env("LD_LIBRARY_PATH", prefix.join("lib"))).ends_with("well\n"));
}
