"""The tables of mutants: what they say, where in the sources it is, and what is wrong with them."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path


class Fault(Exception):
    """What a mutant or its table has wrong."""


@dataclass(frozen=True)
class Test:
    """A test by the program that it is in (`lib`, `capi`, or a file or folder in tests/) and its name there."""

    binary: str
    name: str

    def __str__(self):
        return f"{self.binary} {self.name}"


@dataclass(frozen=True)
class Edit:
    """Whole lines and what takes their place, wherever they stand among the files in `under`."""

    old: tuple
    new: tuple
    under: str


@dataclass(frozen=True)
class Mutant:
    name: str
    guards: str
    tests: tuple
    edits: tuple
    table: str


@dataclass(frozen=True)
class Place:
    """Where an edit goes: the line it begins at, and how much further in than in the table."""

    path: str
    line: int
    shift: int


def lines_of(text):
    return tuple(text.removesuffix("\n").split("\n")) if text else ()


def indent(line):
    return len(line) - len(line.lstrip(" "))


def edit_of(entry, where):
    for key in entry:
        if key not in ("old", "new", "under"):
            raise Fault(f"{where}: what is `{key}`?")
    for key in ("old", "new"):
        if not isinstance(entry.get(key), str):
            raise Fault(f"{where}: no `{key}`")
    old, new = lines_of(entry["old"]), lines_of(entry["new"])
    if not any(line.strip() for line in old):
        raise Fault(f"{where}: `old` has no line")
    if old == new:
        raise Fault(f"{where}: `new` is `old`")
    under = entry.get("under", "src")
    if not isinstance(under, str) or under.startswith(("/", ".")):
        raise Fault(f"{where}: `under` is no folder of the tree")
    return Edit(old, new, under)


def mutant_of(entry, table, number):
    name = entry.get("name")
    where = f"{table}: {name if isinstance(name, str) else f'mutant {number}'}"
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise Fault(f"{where}: no name in lower case")
    guards = entry.get("guards")
    if not isinstance(guards, str) or not guards.strip():
        raise Fault(f"{where}: it guards nothing")
    tests = entry.get("tests")
    if not isinstance(tests, list) or not tests:
        raise Fault(f"{where}: it names no test")
    named = []
    for test in tests:
        parts = test.split(" ") if isinstance(test, str) else []
        if len(parts) != 2 or not all(parts):
            raise Fault(f"{where}: {test!r} is not \"BINARY TEST\"")
        named.append(Test(*parts))
    if len(set(named)) != len(named):
        raise Fault(f"{where}: it names a test twice")
    rest = {key: value for key, value in entry.items() if key not in ("name", "guards", "tests", "edit")}
    edits = entry.get("edit", [])
    if not isinstance(edits, list) or not all(isinstance(edit, dict) for edit in edits):
        raise Fault(f"{where}: `edit` is no array of tables")
    if rest or not edits:
        edits = [rest, *edits]
    return Mutant(name, guards, tuple(named), tuple(edit_of(edit, where) for edit in edits), table)


def load(folder):
    """All mutants of the tables in the folder, by name, and what is wrong with the tables."""
    mutants, faults = {}, []
    for path in sorted(Path(folder).glob("*.toml")):
        try:
            table = tomllib.loads(path.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            faults.append(f"{path.name}: {error}")
            continue
        entries = table.get("mutant")
        if list(table) != ["mutant"] or not isinstance(entries, list) or not entries:
            faults.append(f"{path.name}: not an array of `mutant`")
            continue
        for number, entry in enumerate(entries, 1):
            try:
                mutant = mutant_of(entry, path.name, number)
                if mutant.name in mutants:
                    raise Fault(f"{path.name}: {mutant.name}: also in {mutants[mutant.name].table}")
                mutants[mutant.name] = mutant
            except Fault as fault:
                faults.append(str(fault))
    return mutants, faults


class Sources:
    """The lines of all Rust files of a tree."""

    def __init__(self, root):
        self.root = Path(root)
        self.files = {}
        self.places = {}
        for folder in ("src", "tests", "capi/src"):
            for path in sorted((self.root / folder).rglob("*.rs")):
                self.files[str(path.relative_to(root))] = path.read_text().split("\n")
        for path, lines in self.files.items():
            for number, line in enumerate(lines):
                self.places.setdefault(line.strip(), []).append((path, number))

    def find(self, edit):
        """Every place where the old lines stand, however far in."""
        # The rarest line says where to look.
        lines = [(len(self.places.get(line.strip(), ())), at) for at, line in enumerate(edit.old) if line.strip()]
        _, rarest = min(lines)
        found = []
        for path, number in self.places.get(edit.old[rarest].strip(), ()):
            first = number - rarest
            if first < 0 or not path.startswith(edit.under + "/"):
                continue
            here = self.files[path][first:first + len(edit.old)]
            shift = indent(self.files[path][number]) - indent(edit.old[rarest])
            if here == shifted(edit.old, shift):
                found.append(Place(path, first, shift))
        return found

    def place(self, edit):
        found = self.find(edit)
        if len(found) == 1:
            return found[0]
        first = next(line.strip() for line in edit.old if line.strip())
        if not found:
            raise Fault(f"the lines from `{first}` are not under {edit.under}")
        where = ", ".join(f"{place.path}:{place.line + 1}" for place in found)
        raise Fault(f"the lines from `{first}` are at {len(found)} places: {where}")

    def mutated(self, mutant):
        """The files that the mutant changes, as it leaves them."""
        edits = {}
        for edit in mutant.edits:
            place = self.place(edit)
            edits.setdefault(place.path, []).append((place.line, place.shift, edit))
        changed = {}
        for path, here in edits.items():
            lines = list(self.files[path])
            end = len(lines)
            for line, shift, edit in sorted(here, key=lambda one: one[0], reverse=True):
                if line + len(edit.old) > end:
                    raise Fault("two of its edits overlap")
                new = shifted(edit.new, shift)
                if new is None:
                    raise Fault("`new` is further out than the lines around it")
                lines[line:line + len(edit.old)] = new
                end = line
            changed[path] = "\n".join(lines)
        return changed


def shifted(lines, by):
    """The lines further in, or None where one cannot go as far out."""
    result = []
    for line in lines:
        if not line.strip():
            result.append("")
        elif indent(line) + by < 0:
            return None
        else:
            result.append(" " * by + line if by >= 0 else line[-by:])
    return result
