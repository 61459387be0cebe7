//! Options, messages and tables.

use crate::{
    cualloc, data, fed, file, object, objects, refused, replayed, run, split, stderr, stdout,
};

#[test]
fn sizes_are_read_alike_everywhere() {
    let lf = data("lf.csv");
    for (limit, bytes) in [
        ("67108864", 64u64 << 20),
        ("64M", 64 << 20),
        ("0.0625GiB", 64 << 20),
        ("64mib", 64 << 20),
        ("50%", 20 << 30),
        ("100x", 104_887_600),
        ("7.25x", 7_604_351),
    ] {
        let output = run(&[
            "replay",
            "--device",
            "sim",
            "--sim-memory",
            "40G",
            "--json",
            "--limit",
            limit,
            &lf,
        ]);
        assert_eq!(
            output.status.code(),
            Some(0),
            "{limit}: {}",
            stderr(&output)
        );
        assert_eq!(object(&output)["limit_bytes"], bytes, "{limit}");
    }
    for limit in [
        "", "0", "0G", "0%", "101%", "1.5", "6Q", "x", "0x", "-1x", "nanx", "infx", "1 x",
    ] {
        refused(
            &run(&["replay", "--device", "sim", "--limit", limit, &lf]),
            "--limit",
        );
    }
    for memory in ["0", "50%", "much"] {
        refused(&run(&["info", "--sim-memory", memory]), "--sim-memory");
    }
    let help = stdout(&run(&["help", "replay"]));
    assert!(help.contains("144 GiB"), "{help}");
}

#[test]
fn the_environment_sets_the_allocator_and_options_count_more() {
    let lf = data("lf.csv");
    let with = |config: &str, arguments: &[&str]| {
        let mut command = cualloc();
        command.env("CUALLOC_CONFIG", config).args(arguments);
        command.output().unwrap()
    };
    let replay = ["replay", "--device", "sim", "--json", lf.as_str()];
    let output = with("policy=classic,limit=1.5G", &replay);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(
        stderr(&output).contains("CUALLOC_CONFIG=policy=classic"),
        "{}",
        stderr(&output)
    );
    let line = object(&output);
    assert_eq!(line["policy"], "classic");
    assert_eq!(line["limit_bytes"], 3 << 29);
    assert_eq!(line["config"], "policy=classic,limit=1.5G");
    let output = with(
        "policy=classic,limit=1G",
        &[&replay[..], &["--policy", "packed", "--limit", "2G"]].concat(),
    );
    let line = object(&output);
    assert_eq!(line["policy"], "packed");
    assert_eq!(line["limit_bytes"], 2u64 << 30);
    let handles = |config: &str| {
        let large = data("dataframe.csv.gz");
        let line = object(&with(
            config,
            &["replay", "--device", "sim", "--json", &large],
        ));
        line["replays"][0]["driver_calls"]["cuMemCreate"].as_u64()
    };
    // Larger handles are fewer.
    assert!(handles("tune.handle=64M") < handles(""));

    for command in ["replay", "capacity"] {
        for config in ["polcy=packed", "limit=0"] {
            refused(
                &with(config, &[command, "--device", "sim", &lf]),
                "CUALLOC_CONFIG",
            );
        }
        refused(
            &with(
                "profile=dense",
                &[command, "--device", "sim", "--policy", "classic", &lf],
            ),
            "CUALLOC_CONFIG",
        );
    }
    refused(&with("tune.views=maybe", &["info"]), "CUALLOC_CONFIG");
    refused(
        &with("tune.views=maybe", &["bench", "--quick"]),
        "CUALLOC_CONFIG",
    );
    let output = with("policy=classic", &["info", "--device", "sim"]);
    assert!(stdout(&output).contains("policy=classic"));
    let output = with("limit=1G", &["capacity", "--device", "sim", &lf]);
    assert_eq!(output.status.code(), Some(0));
    assert!(stderr(&output).contains("limit of CUALLOC_CONFIG is not used"));
}

#[test]
fn options_that_would_mean_nothing_are_refused() {
    let lf = data("lf.csv");
    for (arguments, words) in [
        (&["replay", "--parts", "2", &lf][..], "--parts needs --json"),
        (
            &["replay", "--parts", "4294967295", "--json", &lf],
            "--parts",
        ),
        (&["replay", "--seed", "2", &lf], "--verify"),
        (&["replay", "--wide", "--json", &lf], "--wide"),
        (
            &["generate", "sharded", "--streams", "2", "--out", "x.csv"],
            "--streams is for",
        ),
        (
            &["generate", "large", "--live", "1G", "--out", "x.csv"],
            "--live is for",
        ),
        (
            &["generate", "random", "--live", "0", "--out", "x.csv"],
            "--live",
        ),
        (
            &["generate", "random", "--live", "511", "--out", "x.csv"],
            "smallest block",
        ),
        (
            &["--device", "sim", "generate", "large", "--out", "x.csv"],
            "--device is not for generate",
        ),
        (
            &["vary", &lf, "--sim-memory", "1G", "--out", "x.csv"],
            "--sim-memory is not for vary",
        ),
        (
            &["info", "--device", "cuda", "--sim-memory", "1G"],
            "--sim-memory",
        ),
        (
            &["--json", "completions", "bash"],
            "--json is not for completions",
        ),
        (&["man", "nothing"], "no subcommand `nothing`"),
    ] {
        refused(&run(arguments), words);
    }
}

#[test]
fn global_options_stand_anywhere() {
    let lf = data("lf.csv");
    let before = run(&["--device", "sim", "--json", "replay", &lf, "--parts", "2"]);
    let behind = run(&["replay", &lf, "--parts", "2", "--device", "sim", "--json"]);
    for output in [before, behind] {
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert_eq!(
            object(&output)["replays"][0]["parts"]
                .as_array()
                .unwrap()
                .len(),
            2
        );
    }
    assert_eq!(run(&["--device", "sim", "info"]).status.code(), Some(0));
}

#[test]
fn quiet_leaves_results_and_errors() {
    let lf = data("lf.csv");
    for arguments in [
        &["generate", "large", "--rows", "5", "--out", "quiet.csv"][..],
        &["replay", "--device", "auto", &lf],
    ] {
        let mut command = cualloc();
        command
            .env("CUALLOC_DRIVER", "/there/is/no/driver.so")
            .args(arguments);
        assert!(!stderr(&command.output().unwrap()).is_empty());
        let quiet = command.arg("-q").output().unwrap();
        assert_eq!(stderr(&quiet), "");
        assert_eq!(quiet.status.code(), Some(0));
    }
    let output = run(&["--quiet", "replay", "--device", "sim", "missing.csv"]);
    assert_eq!(stderr(&output).lines().count(), 1);
}

#[test]
fn a_missing_driver_is_reported_once() {
    let lf = data("lf.csv");
    for arguments in [
        &["info", "--device", "cuda"][..],
        &["replay", "--device", "cuda", &lf],
    ] {
        let output = cualloc()
            .env("CUALLOC_DRIVER", "/there/is/no/driver.so")
            .args(arguments)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1));
        let printed = stdout(&output) + &stderr(&output);
        assert_eq!(printed.matches("No such file").count(), 1, "{printed}");
    }
    let output = cualloc()
        .env("CUALLOC_DRIVER", "/there/is/no/driver.so")
        .args(["replay", "--device", "cuda", "--json", &lf])
        .output()
        .unwrap();
    let line = object(&output);
    assert_eq!(line["schema"], 1);
    assert!(line["error"].as_str().unwrap().contains("driver.so"));
}

#[test]
fn invalid_numbers_are_reported() {
    let output = fed(
        &["replay", "--device", "sim", "-"],
        b"op,id,bytes,stream\na,0,-512,0\n",
    );
    assert_eq!(
        stderr(&output),
        "error: <stdin>:2: `bytes`: expected a whole number from 0 to 18446744073709551615, found `-512`\n"
    );
}

#[test]
fn terminals_are_not_steered_by_names_or_contents() {
    let steering = "\u{1b}[31m\u{7}\u{9b}\u{202e}red größe 大";
    let path = file(
        &format!("{steering}.csv"),
        &std::fs::read(data("lf.csv")).unwrap(),
    );
    let outputs = [
        run(&["replay", "--device", "sim", path.to_str().unwrap()]),
        run(&["capacity", "--device", "sim", path.to_str().unwrap()]),
        run(&[
            "vary",
            path.to_str().unwrap(),
            "--out",
            path.to_str().unwrap(),
        ]),
        run(&["replay", "--device", "sim", &format!("{steering}/x")]),
        run(&["replay", "--limit", steering, "x.csv"]),
        run(&[steering]),
        fed(
            &["replay", "--device", "sim", "-"],
            format!("op,id,bytes,stream\n{steering},0,1,0\n").as_bytes(),
        ),
    ];
    for output in outputs {
        let text = stdout(&output) + &stderr(&output);
        assert!(text.contains("red größe 大"), "{text:?}");
        assert!(
            !text.contains(['\u{1b}', '\u{7}', '\u{9b}', '\u{202e}']),
            "{text:?}"
        );
    }
    // A program gets the name as it is.
    let output = replayed(&path);
    assert_eq!(object(&output)["trace"], steering);
}

#[test]
fn tables_fit_the_terminal() {
    let long = file(
        &format!("{}.csv", "long".repeat(30)),
        &std::fs::read(data("lf.csv")).unwrap(),
    );
    let table = |command: &str, columns: &str, wide: bool| {
        let mut run = cualloc();
        run.env("COLUMNS", columns)
            .args([command, "--device", "sim"]);
        run.arg(&long).args(wide.then_some("--wide"));
        run.output().unwrap()
    };
    for command in ["replay", "capacity"] {
        for columns in [40, 80, 120] {
            let output = table(command, &columns.to_string(), false);
            assert_eq!(output.status.code(), Some(0));
            let text = stdout(&output);
            let widest = text.lines().map(|line| line.chars().count()).max();
            assert!(widest.unwrap() <= columns, "{text}");
            assert!(
                text.contains("ratio") && text.contains("longlong"),
                "{text}"
            );
        }
        let wide = stdout(&table(command, "40", true));
        assert!(
            wide.contains(&"long".repeat(30)) && wide.contains("requested MiB"),
            "{wide}"
        );
    }
    // Without a terminal all columns stand side by side, the first at the left.
    let whole = stdout(&run(&["capacity", "--device", "sim", &data("lf.csv")]));
    let head = "trace   policy  requested MiB   limit MiB   ratio  ns/row last  handles last\n";
    assert!(whole.starts_with(head), "{whole}");
    let narrow = table("replay", "80", false);
    assert!(stdout(&narrow).contains("calls"));
    assert!(stderr(&narrow).contains("--wide"));
}

#[test]
fn results_have_colours_where_they_are_wanted() {
    let lf = data("lf.csv");
    let run = |variable: &str, limit: &str| {
        let mut command = cualloc();
        command
            .env(variable, "1")
            .args(["replay", "--device", "sim", "--limit", limit, &lf]);
        stdout(&command.output().unwrap())
    };
    assert!(run("CLICOLOR_FORCE", "1G").contains("\u{1b}[32mok"));
    assert!(run("CLICOLOR_FORCE", "1").contains("\u{1b}[31m"));
    assert!(!run("NO_COLOR", "1").contains('\u{1b}'));
}

#[test]
fn completions_and_manuals_contain_every_option() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = run(&["completions", shell]);
        assert_eq!(output.status.code(), Some(0));
        let script = stdout(&output);
        for word in split("replay capacity advise vary view check-every sim-memory") {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    let page = stdout(&run(&["man"]));
    assert!(
        page.contains(".TH cualloc 1") && page.contains("Exit codes"),
        "{page}"
    );
    let page = stdout(&run(&["man", "replay"]));
    assert!(page.contains(".TH cualloc-replay 1"), "{page}");
    assert!(page.contains("check\\-every"), "{page}");
}

#[test]
fn a_figure_of_a_benchmark_has_a_schema() {
    let output = run(&split("bench --quick --only raw --device sim --json"));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    for line in objects(&output) {
        assert_eq!(line["schema"], 1);
        assert!(line["value"].as_f64().unwrap() > 0.0);
        assert!(line["error"].is_null());
    }
}
