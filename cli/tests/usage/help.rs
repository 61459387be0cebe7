//! Help, notes and tables: output for people.

use crate::{cualloc, data, file, object, refused, run, scratch, split, stderr, stdout};

#[test]
fn a_table_has_a_head_only_with_a_row() {
    for command in [
        &["replay", "--device", "sim"][..],
        &["capacity", "--device", "sim"],
        &["advise", "--memory", "1G"],
    ] {
        let output = run(&[command, &["none.csv", "no_other.csv"]].concat());
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(stdout(&output), "");
        assert_eq!(stderr(&output).lines().count(), 2);
        let lf = data("lf.csv");
        let output = run(&[command, &["none.csv", &lf, &lf]].concat());
        assert_eq!(stdout(&output).lines().count(), 3, "{}", stdout(&output));
        assert!(stdout(&output).starts_with("trace"));
    }
}

/// A failed replay has no ratio.
#[test]
fn a_failed_replay_has_no_ratio() {
    let grows = file(
        "grows.csv",
        b"op,id,bytes,stream\na,0,8388608,0\na,1,8388608,0\na,2,8388608,0\n",
    );
    let grows = grows.to_str().unwrap();
    let arguments = ["replay", "--device", "sim", "--limit", "16M", grows];
    let failed = run(&arguments);
    assert_eq!(failed.status.code(), Some(1));
    let row = stdout(&failed).lines().nth(1).unwrap().to_owned();
    let cells: Vec<&str> = row.split_whitespace().collect();
    assert_eq!(cells[5..9], ["24.0", "16.0", "-", "-"], "{row}");
    let line = object(&run(&[&arguments[..], &["--json"]].concat()));
    assert!(
        line["ratio"].is_null() && line["ratio_max"].is_null(),
        "{line}"
    );
    assert_eq!(line["reserved_peak_bytes"], 16 << 20);
    let line = object(&run(&["replay", "--device", "sim", "--json", grows]));
    assert_eq!(
        (&line["ratio"], &line["ratio_max"]),
        (&1.0.into(), &1.0.into())
    );
}

#[test]
fn advise_without_a_size_prints_the_needed_memory() {
    let lf = data("lf.csv");
    let line = object(&run(&["advise", "--json", &lf]));
    let needed = line["needed_bytes"].as_u64().unwrap();
    assert_eq!(line["memory_bytes"], needed);
    assert_eq!(
        (&line["fits"], &line["spare_bytes"]),
        (&true.into(), &0.into())
    );
    let under = |memory: u64| {
        object(&run(&[
            "advise",
            "--json",
            "--memory",
            &memory.to_string(),
            &lf,
        ]))
    };
    assert_eq!(under(needed)["fits"], true);
    assert_eq!(under(needed / 2)["needed_bytes"], needed);
    let table = stdout(&run(&["advise", &lf]));
    assert!(table.lines().nth(1).unwrap().contains(" yes "), "{table}");
}

#[test]
fn a_page_has_a_name_of_its_own() {
    let lf = data("lf.csv");
    let page = scratch().join("lf.view.html");
    let _ = std::fs::remove_file(&page);
    let output = run(&["view", &lf]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(stderr(&output), "note: the page is lf.view.html\n");
    assert!(
        std::fs::read(&page)
            .unwrap()
            .starts_with(b"<!DOCTYPE html>")
    );
    // Never that of a file that is read.
    let own = file("own.view.html", &std::fs::read(&lf).unwrap());
    for arguments in [
        &["view", "own.view.html", "-o", "own.view.html"][..],
        &["view", "own.view.html", &lf, "-o", "./own.view.html"],
    ] {
        refused(
            &run(arguments),
            "the page would replace own.view.html, which is read",
        );
    }
    assert_eq!(std::fs::read(own).unwrap(), std::fs::read(&lf).unwrap());
    refused(
        &run(&["view", &lf, "--open", "-o", "-"]),
        "--open needs a file",
    );
}

#[cfg(target_os = "linux")]
#[test]
fn a_page_is_opened_by_the_systems_program() {
    use std::os::unix::fs::PermissionsExt;
    let folder = scratch().join("browser");
    std::fs::create_dir_all(&folder).unwrap();
    let (program, printed) = (folder.join("xdg-open"), folder.join("printed"));
    let _ = std::fs::remove_file(&printed);
    // A pipe: its reader sees the end when the program has written its line.
    let made = std::process::Command::new("mkfifo")
        .arg(&printed)
        .status()
        .unwrap();
    assert!(made.success());
    std::fs::write(
        &program,
        format!("#!/bin/sh\necho \"$1\" > {}\n", printed.display()),
    )
    .unwrap();
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    let view = |path: &std::path::Path| {
        let mut command = cualloc();
        command.args(["view", "--open", "-o", "opened.html", &data("lf.csv")]);
        command.env("PATH", path).output().unwrap()
    };
    let output = view(&folder);
    assert_eq!(stderr(&output), "");
    let (send, receive) = std::sync::mpsc::channel();
    std::thread::spawn(move || send.send(std::fs::read_to_string(printed)));
    let line = receive.recv_timeout(std::time::Duration::from_secs(60));
    assert_eq!(line.unwrap().unwrap(), "opened.html\n");
    let output = view(std::path::Path::new("/nowhere"));
    assert_eq!(output.status.code(), Some(0));
    assert!(stderr(&output).starts_with("warning: cannot open a browser: "));
}

#[test]
fn a_negative_value_is_a_wrong_value() {
    let lf = data("lf.csv");
    let lf = lf.as_str();
    for (command, option, value, rest) in [
        ("replay", "--limit", "-5", lf),
        ("replay", "--limit", "-5G", lf),
        ("view", "--limit", "-1x", lf),
        ("advise", "--memory", "-1G", lf),
        ("replay", "--sim-memory", "-1G", lf),
        ("replay", "--lag", "-1", lf),
        ("replay", "--gpu", "-1", lf),
        ("replay", "--max-rows", "-1", lf),
        ("replay", "--repeat", "-1", lf),
        ("vary", "--percent", "-1", "--out=-"),
        ("generate random", "--rows", "-1", "--out=-"),
        ("generate random", "--live", "-1G", "--out=-"),
    ] {
        let arguments = [&split(command)[..], &[option, value, rest]].concat();
        refused(
            &run(&arguments),
            &format!("invalid value '{value}' for '{option}"),
        );
    }
}

#[test]
fn every_help_ends_with_examples() {
    for command in
        split("info replay capacity advise export view generate vary bench completions man")
    {
        for option in ["--help", "-h"] {
            let help = stdout(&run(&[command, option]));
            let (_, examples) = help.split_once("Examples:\n").unwrap_or_default();
            let examples: Vec<&str> = examples.lines().collect();
            assert!(!examples.is_empty(), "{help}");
            for line in examples {
                assert!(line.starts_with(&format!("  cualloc {command}")), "{line}");
            }
        }
    }
}

#[test]
fn repeated_notes_are_short() {
    let lf = data("lf.csv");
    let output = |arguments: &[&str]| {
        let mut command = cualloc();
        command.env("CUALLOC_DRIVER", "/there/is/no/driver.so");
        command.args(arguments).output().unwrap()
    };
    assert_eq!(
        stderr(&output(&["replay", &lf])),
        "note: device: the simulator (no CUDA driver; `cualloc info` says where it was looked for)\n"
    );
    assert_eq!(object(&output(&["replay", "--json", &lf]))["device"], "sim");
    let whole = stdout(&output(&["info"]));
    assert!(whole.contains("/there/is/no/driver.so") && whole.contains("memory pools"));
    let quiet = stdout(&output(&["info", "--quiet"]));
    assert!(
        quiet.contains("device 0:") && !quiet.contains("memory pools"),
        "{quiet}"
    );
    let capacity = stdout(&output(&["capacity", &lf]));
    assert!(
        capacity.contains("ns/row last") && capacity.contains("handles last"),
        "{capacity}"
    );
}
