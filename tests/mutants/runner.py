"""Breaks one protected place at a time and checks that its tests notice: see tests/mutants.sh."""

import argparse
import collections
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Features that tests of a program are left out without.
FEATURES = {"exchange": "arrow"}
# Cheap builds: nothing here depends on speed, and no backtrace is read. The oracle finds what breaks a stream's order
# in its first programs; sums go wrong at once.
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
# Seconds that a test may take beside ten times of what it took unbroken.
GRACE = 120


class Fault(Exception):
    """What a mutant has wrong."""


class Mutant:
    """An entry of a table."""

    def __init__(self, table, entry):
        self.table, self.name, self.guards = table, entry["name"], entry["guards"]
        self.tests = [tuple(test.split(" ")) for test in entry["tests"]]
        edits = entry.get("edit", []) + ([entry] if "old" in entry else [])
        self.edits = [(lines(edit["old"]), lines(edit["new"]), edit.get("under", "src")) for edit in edits]
        if not self.tests or not self.edits or any(old == new for old, new, _ in self.edits):
            raise Fault(f"{table}: {self.name}: no test, no edit, or one that changes nothing")


def lines(text):
    return text.removesuffix("\n").split("\n") if text else []


def indent(line):
    return len(line) - len(line.lstrip(" "))


def shifted(text, by):
    """Lines, further in by so much."""
    return [" " * (indent(line) + by) + line.lstrip(" ") if line.strip() else "" for line in text]


def load():
    """All mutants by name."""
    mutants = {}
    for path in sorted((ROOT / "tests/mutants").glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            mutant = Mutant(path.name, entry)
            if mutants.setdefault(mutant.name, mutant) is not mutant:
                raise Fault(f"{path.name}: {mutant.name} is there twice")
    return mutants


class Sources:
    """The lines of all Rust files."""

    def __init__(self):
        self.files, self.places = {}, collections.defaultdict(list)
        for folder in ("src", "tests", "capi/src"):
            for path in sorted((ROOT / folder).rglob("*.rs")):
                self.files[str(path.relative_to(ROOT))] = path.read_text().split("\n")
        for path, text in self.files.items():
            for number, line in enumerate(text):
                self.places[line.strip()].append((path, number))

    def place(self, old, under):
        """The file and line at which the old lines stand, and how much further in than in the table."""
        # The rarest line says where to look.
        _, rarest = min((len(self.places[line.strip()]), at) for at, line in enumerate(old) if line.strip())
        found = []
        for path, number in self.places[old[rarest].strip()]:
            first, text = number - rarest, self.files[path]
            shift = indent(text[number]) - indent(old[rarest])
            if first >= 0 and path.startswith(under + "/") and text[first:first + len(old)] == shifted(old, shift):
                found.append((path, first, shift))
        if len(found) != 1:
            where = ", ".join(f"{path}:{line + 1}" for path, line, _ in found) or f"nowhere under {under}"
            raise Fault(f"the lines from `{old[rarest].strip()}` must be at one place, and are at: {where}")
        return found[0]

    def mutated(self, mutant):
        """The files that a mutant changes, as it leaves them."""
        changed = {}
        places = [(*self.place(old, under), old, new) for old, new, under in mutant.edits]
        # From the last line on, so that the numbers of the others stay right.
        for path, line, shift, old, new in sorted(places, key=lambda place: place[:2], reverse=True):
            text = changed.setdefault(path, list(self.files[path]))
            text[line:line + len(old)] = shifted(new, shift)
        return {path: "\n".join(text) for path, text in changed.items()}

    def has(self, binary, test):
        """Whether the sources of a program have a test of this name; a run tells whether it is found there."""
        root = {"lib": "src", "capi": "capi/src"}.get(binary, f"tests/{binary}")
        name = re.compile(rf"\bfn {test.split('::')[-1]}\b|^\s*{test.split('::')[-1]}:")
        within = (text for path, text in self.files.items() if path.startswith((f"{root}/", f"{root}.rs")))
        return any(name.search(line) for text in within for line in text)


def labels(text):
    """The labels in a sentence (`S1.40`) or in a test's name (`s1_40_`)."""
    found = re.findall(r"(?<![A-Za-z0-9])(?:[Ss]\d+(?:[._]\d+)?|[DdRr]\d+)(?![A-Za-z0-9])", text)
    return {label.upper().replace("_", ".") for label in found}


def check(mutants, sources):
    """What is wrong with the tables, as far as the sources tell."""
    for mutant in mutants.values():
        about, guarded = [labels(name) for _, name in mutant.tests], labels(mutant.guards)
        if guarded and all(about) and not guarded & set().union(*about):
            yield f"{mutant.name}: it guards {mutant.guards}, and its tests are about others"
        for binary, name in mutant.tests:
            if not sources.has(binary, name):
                yield f"{mutant.name}: there is no test {binary} {name}"
        try:
            sources.mutated(mutant)
        except Fault as fault:
            yield f"{mutant.table}: {mutant.name}: {fault}"


def put(path, text):
    """Writes a file that has changed; others keep their times, so that they are not built again."""
    if not path.is_file() or path.read_bytes() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)


class Runner:
    """A copy of the tree with a build of its own, and one share of the mutants."""

    def __init__(self, target, mutants, sources):
        self.mutants, self.sources, self.tree, self.took = mutants, sources, target / "tree", {}
        self.environment = {name: value for name, value in os.environ.items() if name not in REMOVED}
        self.environment |= ENVIRONMENT | {"CARGO_TARGET_DIR": str(target / "target")}
        listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
        listed = {path for path in map(os.fsdecode, listed.stdout.split(b"\0")) if path and (ROOT / path).is_file()}
        for path in listed:
            put(self.tree / path, (ROOT / path).read_bytes())
        for path in self.tree.rglob("*"):
            if path.is_file() and str(path.relative_to(self.tree)) not in listed:
                path.unlink()

    def build(self, tests):
        """The programs of the tests by name."""
        programs, builds = {}, collections.defaultdict(set)
        for binary, _ in tests:
            builds["cualloc-capi" if binary == "capi" else "cualloc", FEATURES.get(binary)].add(binary)
        for (package, feature), binaries in builds.items():
            command = ["cargo", "test", "-q", "-p", package, "--no-run", "--message-format=json-render-diagnostics"]
            command += ["--features", feature] if feature else []
            command += ["--lib" if binary in ("lib", "capi") else f"--test={binary}" for binary in sorted(binaries)]
            done = subprocess.run(command, cwd=self.tree, env=self.environment, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise Fault("it does not compile\n" + done.stderr[-2000:])
            for line in filter(lambda line: line.startswith("{"), done.stdout.splitlines()):
                message = json.loads(line)
                if message.get("reason") == "compiler-artifact" and message.get("executable"):
                    target = message["target"]
                    units = "lib" if package == "cualloc" else "capi"
                    programs[target["name"] if target["kind"] == ["test"] else units] = message["executable"]
        return programs

    def verdict(self, program, test):
        """How the one test ends, alone in a process."""
        start = time.monotonic()
        process = subprocess.Popen(
            [program, "--exact", test[1], "--show-output", "--color=never"], cwd=self.tree, start_new_session=True,
            env=self.environment | {"CARGO_MANIFEST_DIR": str(self.tree)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        try:
            output, _ = process.communicate(timeout=GRACE + 10 * self.took.get(test, GRACE))
        except subprocess.TimeoutExpired:
            return "hangs"
        finally:
            # What the test has started may outlive it.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        self.took.setdefault(test, time.monotonic() - start)
        output = output.decode(errors="replace")
        if not re.search(r"^running 1 test$", output, re.M):
            return "does not run"
        # The last is the program's own: a test may start another one, and show what that said.
        results = re.findall(r"^test result: (?:ok|FAILED)\. (\d+) passed; (\d+) failed", output, re.M)
        if process.returncode < 0 or process.returncode and not results:
            return "aborts"
        if process.returncode == 0 and results[-1:] == [("1", "0")]:
            return "is skipped" if re.search(r"^SKIPPED(?! in part)", output, re.M) else "passes"
        return "fails" if process.returncode and results[-1] == ("0", "1") else "does not run"

    def ends(self, tests, wanted):
        """The ends of tests, of which each must be one of those that are wanted."""
        programs = self.build(tests)
        ends = {test: self.verdict(programs[test[0]], test) for test in tests}
        missed = [f"{' '.join(test)} {end}" for test, end in ends.items() if end not in wanted]
        if missed:
            raise Fault(", ".join(missed))
        return ", ".join(dict.fromkeys(ends.values()))

    def run(self):
        """How many of the mutants were not noticed."""
        try:
            self.ends(list(dict.fromkeys(test for mutant in self.mutants for test in mutant.tests)), ["passes"])
        except Fault as fault:
            print(f"FAILED the tree without a mutant: {fault}", flush=True)
            return len(self.mutants)
        failed = 0
        # One after the other what is seen by the same programs: less is built again.
        for mutant in sorted(self.mutants, key=lambda mutant: sorted({binary for binary, _ in mutant.tests})):
            start, changed = time.monotonic(), self.sources.mutated(mutant)
            try:
                for path, text in changed.items():
                    put(self.tree / path, text.encode())
                how = self.ends(mutant.tests, ["fails", "aborts", "hangs"])
                print(f"ok {mutant.name} ({how}; {time.monotonic() - start:.1f} s)", flush=True)
            except Fault as fault:
                failed += 1
                print(f"FAILED {mutant.name}: {fault}", flush=True)
            finally:
                for path in changed:
                    put(self.tree / path, "\n".join(self.sources.files[path]).encode())
        return failed


def main():
    parser = argparse.ArgumentParser(prog="tests/mutants.sh", allow_abbrev=False)
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="every N-th mutant from the I-th on")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many run beside each other")
    parser.add_argument("--check", action="store_true", help="only what the sources tell, of all mutants")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    # An end from outside ends the test of the moment too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        mutants, sources = load(), Sources()
        part, parts = map(int, options.shard.split("/"))
        chosen = [mutants[name] for name in sorted(options.names or mutants)][part - 1::parts]
    except (Fault, KeyError, ValueError) as error:
        sys.exit(f"FAILED: {type(error).__name__}: {error}")
    faults = list(check(mutants, sources))
    print(*(f"FAULT {fault}" for fault in faults), f"{len(mutants)} mutants, {len(faults)} faults", sep="\n", flush=True)
    if options.check or faults or not chosen:
        return 1 if faults or not chosen else 0
    # Copies and their builds are kept for the next run.
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).absolute() / "mutants"
    jobs = max(1, min(options.jobs, len(chosen)))
    runners = [Runner(target / str(job), chosen[job::jobs], sources) for job in range(jobs)]
    with ThreadPoolExecutor(jobs) as pool:
        failed = sum(pool.map(Runner.run, runners))
    print(f"{len(chosen) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
