"""Breaks one protected place at a time and checks that its tests notice: see tests/mutants.sh."""

import argparse
import fcntl
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

from named import Tests
from tables import Fault, Sources, load

# Unit tests: of the library, of the C library.
UNITS = ("lib", "capi")
# Features that tests of a program are left out without.
FEATURES = {"exchange": "arrow"}

# Fewer seconds a build: nothing here depends on speed, and no backtrace is read. The oracle finds what
# breaks a stream's order in its first programs; sums go wrong at once.
ENVIRONMENT = {
    "CARGO_PROFILE_TEST_OPT_LEVEL": "0",
    "CARGO_PROFILE_TEST_DEBUG": "0",
    "CARGO_INCREMENTAL": "1",
    "CARGO_TERM_COLOR": "never",
    "RUST_BACKTRACE": "0",
    "CUALLOC_ORACLE_OPS": "40000",
    "CUALLOC_EXACT_OPS": "40000",
}
REMOVED = ("CUALLOC_TEST_DRIVER", "CUALLOC_TEST_POLICY", "CUALLOC_CONFIG", "RUST_TEST_THREADS")


class Broken(Exception):
    """The run cannot go on."""


def labels(text):
    """The labels of lines in a sentence (`S1.40`) or in a test's name (`s1_40_`)."""
    found = re.findall(r"(?<![A-Za-z0-9])(?:[Ss]\d+(?:[._]\d+)?|[DdRr]\d+)(?![A-Za-z0-9])", text)
    return {label.upper().replace("_", ".") for label in found}


def astray(mutant):
    """What the tests are about, if each says so and none is about what the mutant breaks."""
    guarded = labels(mutant.guards)
    about = [labels(test.name) for test in mutant.tests]
    if guarded and all(about) and not any(guarded & each for each in about):
        return f"it guards {mutant.guards}, and its tests are about {', '.join(sorted(set().union(*about)))}"
    return None


def checked(root, folder):
    """All mutants, what is wrong with them as far as the sources tell, and the names of those."""
    mutants, faults = load(folder)
    sources, tests = Sources(root), Tests(root)
    unsound = set()
    for mutant in mutants.values():
        wrong = [astray(mutant), *(tests.fault(test) for test in mutant.tests)]
        try:
            sources.mutated(mutant)
        except Fault as fault:
            wrong.append(str(fault))
        for fault in filter(None, wrong):
            faults.append(f"{mutant.table}: {mutant.name}: {fault}")
            unsound.add(mutant.name)
    if not mutants:
        faults.append("there are no mutants")
    return mutants, faults, unsound


class Slot:
    """A copy of the tree and its build, which one run has for itself while it is locked."""

    def __init__(self, root, target):
        self.root = root
        for number in range(1, 100):
            self.folder = target / "mutants" / str(number)
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.folder / "lock", "w")
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                self.lock.close()
        else:
            raise Broken("there are a hundred runs already")
        self.tree = self.folder / "tree"
        self.target = self.folder / "target"
        self.copy()

    def listed(self):
        """The files of the tree, by git where it is git's."""
        git = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=self.root, capture_output=True, check=False,
        )
        if git.returncode == 0:
            return {os.fsdecode(path) for path in git.stdout.split(b"\0") if path}
        paths = (path.relative_to(self.root) for path in self.root.rglob("*"))
        return {str(path) for path in paths if path.parts[0] != "target"}

    def copy(self):
        """Makes the copy what the tree is. What is equal keeps its time, so that it is not built again."""
        listed = {path for path in self.listed() if (self.root / path).is_file()}
        for path in listed:
            put(self.tree / path, (self.root / path).read_bytes())
        for path in self.tree.rglob("*"):
            if path.is_file() and str(path.relative_to(self.tree)) not in listed:
                path.unlink()


def put(path, content):
    try:
        if path.read_bytes() == content:
            return
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


class Verdict:
    PASSED, FAILED, ABORTED, HUNG, NOT_RUN, SKIPPED = "passed", "fails", "aborts", "hangs", "did not run", "is skipped"
    NOTICED = (FAILED, ABORTED, HUNG)


class Runner:
    """One slot's share of the mutants."""

    def __init__(self, root, mutants, slot, say, grace=120):
        self.root = root
        self.mutants = mutants
        self.slot = slot
        self.say = say
        # Seconds that every test may take beside ten times of what it took unbroken.
        self.grace = grace
        self.took = {}
        self.package = tomllib.loads((root / "Cargo.toml").read_text())["package"]["name"]
        self.environment = {name: value for name, value in os.environ.items() if name not in REMOVED}
        self.environment |= ENVIRONMENT | {"CARGO_TARGET_DIR": str(slot.target)}
        self.passed = 0
        self.failed = 0
        self.judged = 0

    def complain(self, name, what):
        self.failed += 1
        self.say(f"FAILED {name}: {what}")

    def build(self, tests):
        """The programs of the tests, by name; or None and what the compiler said."""
        programs = {}
        builds = {}
        for test in tests:
            package = f"{self.package}-capi" if test.binary == "capi" else self.package
            builds.setdefault((package, FEATURES.get(test.binary)), set()).add(test.binary)
        for (package, feature), binaries in builds.items():
            command = ["cargo", "test", "-q", "-p", package, "--no-run"]
            command += ["--message-format=json-render-diagnostics"]
            command += ["--features", feature] if feature else []
            command += ["--lib" if binary in UNITS else f"--test={binary}" for binary in sorted(binaries)]
            done = subprocess.run(
                command, cwd=self.slot.tree, env=self.environment, capture_output=True, text=True, check=False,
            )
            if done.returncode != 0:
                return None, done.stderr
            for line in done.stdout.splitlines():
                message = json.loads(line) if line.startswith("{") else {}
                if message.get("reason") != "compiler-artifact" or not message.get("executable"):
                    continue
                target = message["target"]
                units = "lib" if package == self.package else "capi"
                binary = target["name"] if target["kind"] == ["test"] else units
                programs[binary] = message["executable"]
        return programs, ""

    def judge(self, program, test):
        """Runs the one test alone, so that nothing beside it can end or stop it."""
        limit = self.grace + 10 * self.took.get(test, self.grace)
        start = time.monotonic()
        process = subprocess.Popen(
            [program, "--exact", test.name, "--show-output", "--color=never"],
            cwd=self.slot.tree,
            env=self.environment | {"CARGO_MANIFEST_DIR": str(self.slot.tree)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        hung = False
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            hung = True
        finally:
            # What the test has started may outlive it.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if hung:
            output, _ = process.communicate()
        self.took.setdefault(test, time.monotonic() - start)
        return verdict(output.decode(errors="replace"), process.returncode, hung)

    def unbroken(self):
        """Whether every test that is named does its work and passes on the tree as it is."""
        tests = list(dict.fromkeys(test for mutant in self.mutants for test in mutant.tests))
        if not tests:
            return
        programs, words = self.build(tests)
        if programs is None:
            self.say(words[-8000:])
            self.complain("the tree", "it does not compile")
            return
        for test in tests:
            result = self.judge(programs[test.binary], test)
            if result != Verdict.PASSED:
                self.complain("the tree", f"without a mutant {test} {result}")

    def run(self):
        start = time.monotonic()
        self.unbroken()
        if self.failed or not self.mutants:
            return
        self.say(f"the tree passes, {time.monotonic() - start:.0f} s")
        sources = Sources(self.slot.tree)
        # One after the other what changes the same file and is seen by the same programs: less is built again.
        places = {mutant.name: [sources.place(edit).path for edit in mutant.edits] for mutant in self.mutants}
        order = sorted(self.mutants, key=lambda one: (sorted({test.binary for test in one.tests}), places[one.name]))
        for mutant in order:
            changed = sources.mutated(mutant)
            try:
                for path, text in changed.items():
                    put(self.slot.tree / path, text.encode())
                self.one(mutant)
            finally:
                for path in changed:
                    put(self.slot.tree / path, "\n".join(sources.files[path]).encode())

    def one(self, mutant):
        start = time.monotonic()
        self.judged += 1
        programs, words = self.build(mutant.tests)
        built = time.monotonic()
        if programs is None:
            self.say(words[-2000:])
            self.complain(mutant.name, "it does not compile")
            return
        results = {test: self.judge(programs[test.binary], test) for test in mutant.tests}
        missed = [f"{test} ({result})" for test, result in results.items() if result not in Verdict.NOTICED]
        if missed:
            self.complain(mutant.name, f"not noticed by {', '.join(missed)}")
            return
        self.passed += 1
        how = ", ".join(dict.fromkeys(results.values()))
        self.say(f"ok {mutant.name} ({how}; {built - start:.1f} s + {time.monotonic() - built:.1f} s)")


def verdict(output, code, hung):
    """How the one test of a program ended."""
    if not re.search(r"^running 1 test$", output, re.M):
        return Verdict.NOT_RUN
    if hung:
        return Verdict.HUNG
    # The last is the program's own: a test may start another one, and show what that said.
    results = re.findall(r"^test result: (?:ok|FAILED)\. (\d+) passed; (\d+) failed; (\d+) ignored", output, re.M)
    if code < 0 or (code != 0 and not results):
        return Verdict.ABORTED
    if results and results[-1] == ("1", "0", "0") and code == 0:
        skipped = re.search(r"^SKIPPED(?! in part)", output, re.M)
        return Verdict.SKIPPED if skipped else Verdict.PASSED
    if results and results[-1] == ("0", "1", "0") and code != 0:
        return Verdict.FAILED
    return Verdict.NOT_RUN


def selected(mutants, names, shard):
    unknown = [name for name in names if name not in mutants]
    if unknown:
        raise Broken(f"there is no mutant {', '.join(unknown)}")
    chosen = sorted(dict.fromkeys(names)) if names else sorted(mutants)
    if shard:
        found = re.fullmatch(r"(\d+)/(\d+)", shard)
        part, parts = map(int, found.groups()) if found else (0, 0)
        if not 1 <= part <= parts:
            raise Broken(f"{shard} is no I/N with I from 1 to N")
        chosen = chosen[part - 1::parts]
    if not chosen:
        raise Broken(f"the shard {shard} is empty")
    return [mutants[name] for name in chosen]


def run_all(root, folder, target, options, say, grace=120):
    """Exit code of a run with these options."""
    start = time.monotonic()
    mutants, faults, unsound = checked(root, folder)
    for fault in faults:
        say(f"FAULT {fault}")
    if options.check:
        tests = {test for mutant in mutants.values() for test in mutant.tests}
        say(f"{len(mutants)} mutants, {len(tests)} tests, {len(faults)} faults, {time.monotonic() - start:.1f} s")
        return 1 if faults else 0
    try:
        chosen = selected(mutants, options.names, options.shard)
        if options.list:
            for mutant in chosen:
                say(f"{mutant.table} {mutant.name}: {mutant.guards}: {', '.join(map(str, mutant.tests))}")
        if options.list:
            return 1 if faults else 0
        sound = [mutant for mutant in chosen if mutant.name not in unsound]
        jobs = max(1, min(options.jobs, len(sound)))
        runners = [Runner(root, sound[job::jobs], Slot(root, target), say, grace) for job in range(jobs)]
    except Broken as broken:
        say(f"FAILED: {broken}")
        return 1
    threads = [threading.Thread(target=runner.run, daemon=True) for runner in runners[1:]]
    for thread in threads:
        thread.start()
    runners[0].run()
    for thread in threads:
        thread.join()
    passed = sum(runner.passed for runner in runners)
    failed = sum(runner.failed for runner in runners)
    unjudged = len(chosen) - sum(runner.judged for runner in runners)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    say(f"{passed} passed, {failed} failed, {time.monotonic() - start:.0f} s"
        + f" ({used.ru_utime + used.ru_stime:.0f} s of a processor)"
        + (f"; {unjudged} not judged" if unjudged else ""))
    return 0 if passed == len(chosen) and failed == 0 and not faults else 1


def parsed(arguments):
    parser = argparse.ArgumentParser(prog="tests/mutants.sh", allow_abbrev=False)
    parser.add_argument("--shard", metavar="I/N", help="every N-th mutant from the I-th on")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many beside each other")
    parser.add_argument("--list", action="store_true", help="show them, run nothing")
    parser.add_argument("--check", action="store_true", help="only what the sources tell, of all mutants")
    parser.add_argument("names", nargs="*", metavar="NAME")
    return parser.parse_args(arguments)


def main():
    options = parsed(sys.argv[1:])
    root = Path(__file__).resolve().parents[2]
    # An end from outside ends the test of the moment too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    target = Path(os.environ.get("CARGO_TARGET_DIR", root / "target")).absolute()
    lock = threading.Lock()

    def say(line):
        with lock:
            print(line, flush=True)

    return run_all(root, root / "tests/mutants", target, options, say)


if __name__ == "__main__":
    sys.exit(main())
