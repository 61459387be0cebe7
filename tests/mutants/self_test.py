"""Shows on a small planted crate that the runner sees what it must see."""

import tempfile
import time
from pathlib import Path

import runner

FILES = {
    "Cargo.toml": """
[package]
name = "planted"
version = "0.0.0"
edition = "2024"

[workspace]
""",
    "src/lib.rs": """
pub mod inner {
    pub struct One;
    impl One {
        pub fn value(&self) -> i32 {
            let one = 1;

            one
        }
    }
}
pub fn two() -> i32 {
    2
}
pub fn three() -> i32 {
    3
}
pub fn four() -> i32 {
    4
}
#[cfg(test)]
mod tests {
    #[test]
    fn one_is_one() {
        assert_eq!(super::inner::One.value(), 1);
    }
}
""",
    "tests/beside/main.rs": """
mod deeper;
macro_rules! named {
    ($($name:ident: $value:expr;)*) => {$(
        #[test]
        fn $name() {
            assert_eq!($value, 4);
        }
    )*};
}
named! {
    four_is_four: planted::four();
}
#[test]
fn one_is_one() {
    assert_eq!(planted::inner::One.value(), 1);
}
#[test]
fn r1_four_again() {
    assert_eq!(planted::four(), 4);
}
#[test]
fn r2_s1_40_of_others() {}
#[test]
fn r2_again() {}
#[test]
fn two_or_abort() {
    if planted::two() != 2 {
        std::process::abort();
    }
}
#[test]
fn three_or_never() {
    while planted::three() != 3 {}
}
#[test]
fn four_or_end() {
    if planted::four() != 4 {
        std::process::exit(0);
    }
}
""",
    "tests/beside/deeper.rs": """
#[test]
#[ignore]
fn ignored() {}
#[cfg(any())]
#[test]
fn left_out() {}
#[test]
fn skipped() {
    println!("SKIPPED: there is nothing to do it with");
}
#[test]
fn skipped_in_part() {
    println!("SKIPPED in part: {}", planted::two() / (planted::two() - 1));
}
#[test]
fn always_fails() {
    panic!("as always");
}
""",
}


def mutant(name, tests, old, new, more=""):
    named = ", ".join(f'"{test}"' for test in tests.split(", "))
    return f"[[mutant]]\nname = \"{name}\"\nguards = \"R1\"\ntests = [{named}]\n{more}" \
        f"old = '''\n{old}\n'''\nnew = '''\n{new}\n'''\n"


# Each with what the runner must say of it.
JUDGED = [
    (mutant("nested", "lib tests::one_is_one, beside one_is_one", "let one = 1;\n\none", "let one = 2;\n\none"),
     "ok nested (fails;"),
    (mutant("of_two", "beside two_or_abort", "2", "0"), "ok of_two (aborts;"),
    (mutant("of_three", "beside three_or_never", "3", "0"), "ok of_three (hangs;"),
    (mutant("of_four", "beside four_is_four, beside r1_four_again", "4", "0"), "ok of_four (fails;"),
    (mutant("in_part", "beside deeper::skipped_in_part", "    2", "    1"), "ok in_part (fails;"),
    (mutant("several", "beside one_is_one, beside two_or_abort", "let one = 1;", "let one = 2;")
     + "[[mutant.edit]]\nold = '''\n2\n'''\nnew = '''\n3\n'''\n", "ok several (fails, aborts;"),
    (mutant("beside_an_abort", "beside one_is_one", "2", "0"),
     "FAILED beside_an_abort: not noticed by beside one_is_one (passed)"),
    (mutant("beside_a_hang", "beside one_is_one", "3", "0"),
     "FAILED beside_a_hang: not noticed by beside one_is_one (passed)"),
    (mutant("half_noticed", "beside one_is_one, beside two_or_abort", "2", "0"),
     "FAILED half_noticed: not noticed by beside one_is_one (passed)"),
    (mutant("quiet_end", "beside four_or_end", "4", "0"),
     "FAILED quiet_end: not noticed by beside four_or_end (did not run)"),
    (mutant("no_compile", "beside one_is_one", "2", "two"), "FAILED no_compile: it does not compile"),
    (mutant("others_do_not_compile", "lib tests::one_is_one", "pub fn three() -> i32 {", "pub fn drei() -> i32 {"),
     "FAILED others_do_not_compile: not noticed by lib tests::one_is_one (passed)"),
    (mutant("gone", "beside one_is_one", "#[test]\nfn one_is_one() {\n    assert_eq!(planted::inner",
            "#[allow(dead_code)]\nfn one_is_one() {\n    assert_eq!(planted::inner", 'under = "tests"\n')
     .replace("planted::inner\n", "planted::inner::One.value(), 1);\n"),
     "FAILED gone: not noticed by beside one_is_one (did not run)"),
]

# Tests that are no good without a mutant.
UNFIT = [("always_fails", "fails"), ("ignored", "did not run"), ("left_out", "did not run"),
         ("skipped", "is skipped")]

# Tables, and the fault that --check must find in each.
FAULTS = [
    (mutant("a", "beside one_is_one", "}", "{"), "places: src/lib.rs:"),
    (mutant("a", "beside one_is_one", "5", "6"), "are not under src"),
    (mutant("a", "beside one_is_one", "fn ignored() {}", "6"), "are not under src"),
    (mutant("a", "beside one_is_one", "2", "3") * 2, "also in x.toml"),
    (mutant("a", "beside one_is_one", "2", "2"), "`new` is `old`"),
    (mutant("a", "beside one_is_one", "", "2"), "`old` has no line"),
    (mutant("a", "beside none_such", "2", "3"), "there is no test beside none_such"),
    (mutant("a", "beside deeper::one_is_one", "2", "3"), "there is no test beside deeper::one_is_one"),
    (mutant("a", "beside no::one", "2", "3"), "there is no module no"),
    (mutant("a", "besides one_is_one", "2", "3"), "there is no test program besides"),
    (mutant("a", "one_is_one", "2", "3"), 'is not "BINARY TEST"'),
    (mutant("a", "beside one_is_one", "2", "3").replace("R1", ""), "it guards nothing"),
    (mutant("a", "beside one_is_one", "2", "3").replace("tests", "test"), "it names no test"),
    (mutant("a", "beside one_is_one", "2", "3").replace("new", "news"), "what is `news`?"),
    (mutant("a", "beside one_is_one", "2", "3").replace("name", "called"), "no name"),
    (mutant("a", "beside one_is_one", "    2\n}", "2\n}")
     + "[[mutant.edit]]\nold = '''\n}\npub fn three() -> i32 {\n'''\nnew = '''\n}\n'''\n", "two of its edits overlap"),
    (mutant("a", "beside r2_s1_40_of_others, beside r2_again", "2", "3"), "its tests are about R2, S1.40"),
    ("mutants = 1\n", "not an array of `mutant`"),
    ("mutant = [\n", "x.toml: "),
    ("", "not an array of `mutant`"),
]


def run():
    start = time.monotonic()
    cases, wrong = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "planted"
        tables = root / "tests/mutants"
        for path, text in FILES.items():
            runner.put(root / path, text.encode())

        def told(table, *arguments):
            """The exit code and the words of a run."""
            runner.put(tables / "x.toml", table.encode())
            said = []
            code = runner.run_all(
                root, tables, Path(folder) / "target", runner.parsed(arguments), said.append, grace=5
            )
            return code, "\n".join(said)

        def expect(what, told, code, *words):
            nonlocal cases, wrong
            cases += 1
            missing = [word for word in words if word not in told[1]]
            if told[0] != code or missing:
                wrong += 1
                print(f"WRONG {what}: code {told[0]}, expected {code}, and not said: {missing}\n{told[1]}")

        everything = "".join(table for table, _ in JUDGED)
        good = [table.split('"')[1] for table, words in JUDGED if words.startswith("ok")]
        expect("the tables", told(everything, "--check"), 0, " 0 faults")
        expect("a list", told(everything, "--list", "--shard", "2/100"), 0, "x.toml ")
        expect("all", told(everything), 1, *(words for _, words in JUDGED))
        expect("what is noticed, by two", told(everything, "--jobs", "2", *good), 0, f"{len(good)} passed, 0 failed")
        for test, words in UNFIT:
            table = mutant("unfit", f"beside deeper::{test}", "2", "3")
            expect(test, told(table), 1, f"without a mutant beside deeper::{test} {words}", "1 not judged")
        for number in range(1, len(JUDGED) + 1):
            expect("a shard", told(everything, "--list", "--shard", f"{number}/{len(JUDGED)}"), 0, "x.toml ")
        for shard in ("100/100", "0/3", "4/3", "1"):
            expect(f"shard {shard}", told(everything, "--shard", shard), 1, f"{shard} is")
        expect("an unknown name", told(everything, "of_two", "none_such"), 1, "there is no mutant none_such")
        for table, words in FAULTS:
            expect(f"the fault {words}", told(table, "--check"), 1, words)
            expect(f"the fault {words}, run", told(table), 1, words)
        (tables / "x.toml").unlink()
        expect("no table", (runner.run_all(root, tables, Path(folder) / "target", runner.parsed([]),
                                           lambda line: None), ""), 1)
        runner.put(root / "src/lib.rs", b"fn broken(")
        expect("a broken tree", told(mutant("a", "lib one", "fn broken(", "fn broken()")), 1)
    print(f"{cases - wrong} of {cases} cases as they must be, {time.monotonic() - start:.0f} s")
    return 1 if wrong else 0
