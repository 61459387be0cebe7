"""Checks what the documents say of the sources: python3 tests/documents.py [--self-test]

- each line of the log at `warn` or `error` has its text in docs/troubleshooting.md, and each text of an error there
  is one of the sources;
- each environment variable that is read is in docs/configuration.md, and so is each key of `CUALLOC_CONFIG`;
- each file of the allocator is in the table that ends docs/internals.md, and no other is;
- each function of the walk in docs/architecture.md is in the file that it is said to be in, and the walk has as many
  files and returns as its last sentence says;
- each file and folder that a document names is there;
- no document or source has a word of the list below, for which the field has another.

--self-test plants a fault of each kind and expects it to be found.
"""

import re
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Words that were ours alone, and what to say.
WORDS = {
    "books": "heap, metadata",
    "rung": "reclaim step",
    "climb": "reclaim",
    "shelf": "large-block cache",
    "shelves": "large-block caches",
    "fronts": "stream caches",
    "roster": "stream registry",
    "seam": "transaction",
    "stray": "orphaned",
    "crowd": "contended",
    "settle": "complete",
    "settled": "complete",
}
NUMBERS = {"no": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5}


class Tree:
    """The files, as they are or with some of them replaced."""

    def __init__(self, replaced=None):
        self.replaced = replaced or {}

    def read(self, path):
        if path in self.replaced:
            return self.replaced[path]
        return (ROOT / path).read_text()

    def exists(self, path):
        return path in self.replaced or (ROOT / path).exists()

    def files(self, pattern):
        found = {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern) if path.is_file()}
        named = {path for path in self.replaced if fnmatch(path, pattern.replace("**/", "*"))}
        return sorted(path for path in found | named if "/target/" not in f"/{path}")

    def sources(self):
        return [f for folder in ("src", "capi/src", "cli/src") for f in self.files(f"{folder}/**/*.rs")]

    def documents(self):
        return ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "cli/README.md", *self.files("docs/**/*.md")]


def joined(text):
    """A source with its string literals on one line each."""
    return re.sub(r"\\\n\s*", "", text)


def longest(text):
    """The longest part of a text with parts that vary; how often something happened is none."""
    parts = [part.strip(" :;,(") for part in re.split(r"\{[^}]*\}", text)]
    often = ("such events", "times so far", "later failures")
    return max((part for part in parts if not part.startswith(often)), key=len)


def log_lines(tree):
    doc = tree.read("docs/troubleshooting.md")
    for path in tree.sources():
        if path.startswith(("src/sim/", "cli/")):
            continue
        for line in re.findall(r'log::(?:warn|error)!\(\s*"((?:[^"\\]|\\.)*)"', joined(tree.read(path))):
            part = longest(line)
            if part and part not in doc:
                yield f"{path}: the line `{part}` of the log is not in docs/troubleshooting.md"


def error_texts(tree):
    doc = tree.read("docs/troubleshooting.md")
    everything = "\n".join(joined(tree.read(path)) for path in tree.sources())
    for cell in re.findall(r"^\| (`.*?) \|", doc.split("## Lines in the log")[0], re.M):
        for text in re.findall(r"`([^`]*)`", cell):
            for part in (part.strip() for part in text.split("...")):
                if len(part) > 3 and part != "cuInit" and part not in everything:
                    yield f"docs/troubleshooting.md: no error says `{part}`"


def variables(tree):
    doc = tree.read("docs/configuration.md")
    read = re.compile(r'(?:var|var_os|variable|env|getenv)\(\s*"((?:CUALLOC|NVTX)_[A-Z0-9_]+)"')
    named = re.compile(r'const \w*: &str = "((?:CUALLOC|NVTX)_[A-Z0-9_]+)"')
    for path in [*tree.sources(), "build.rs", *tree.files("tests/**/*.rs"), *tree.files("capi/tests/*.rs")]:
        text = tree.read(path)
        for name in {*read.findall(text), *named.findall(text)}:
            family = name.startswith(("CUALLOC_JUDGE_", "CUALLOC_SIM_"))
            # A test that runs itself again tells its child by a variable of its own.
            child = path.startswith("tests/") and re.search(r"_(CASE|CHILD)$", name)
            if name not in doc and not family and not child:
                yield f"{path}: {name} is not in docs/configuration.md"
    keys = re.findall(r'^ {16}"(\w+)" =>', tree.read("src/allocator/config/text.rs").split("#[cfg(test)]")[0], re.M)
    yield from (f"docs/configuration.md has no key `{key}`" for key in keys if f"`{key}" not in doc)


def allocator_files(tree):
    table = tree.read("docs/internals.md").split("## What the folders hold")[1].split("\nOf the other rooms")[0]
    said = {}
    for folder, text in re.findall(r"^\| (top|`[\w/]+`) \| (.*) \|$", table, re.M):
        said["" if folder == "top" else folder.strip("`")] = set(re.findall(r"`([\w/]+)`", text))
    there = {}
    for path in tree.files("src/allocator/**/*.rs"):
        folder, _, name = path.removeprefix("src/allocator/").rpartition("/")
        there.setdefault(f"{folder}/" if folder else "", set()).add(name.removesuffix(".rs"))
    # The files of a folder without a row are in that of the folder above.
    rows = {folder: {f for f in there.get(folder, ()) if f != "mod"} for folder in said}
    for folder, files in there.items():
        if folder not in said:
            above = folder.rstrip("/").rpartition("/")[0]
            rows.setdefault(f"{above}/" if above else "", set()).update(
                f"{folder}{f}" for f in files if f != "mod"
            )
    for folder, files in rows.items():
        names = {name.removesuffix("/") for name in said.get(folder, set()) if not name.endswith("/")}
        names.discard("mod")
        yield from (f"docs/internals.md does not name {folder}{name}" for name in sorted(files - names))
        gone = {n for n in names - files if not tree.exists(f"src/allocator/{folder}{n}.rs")}
        yield from (f"docs/internals.md names {folder}{name}, which is not there" for name in sorted(gone))


def walk(tree):
    text = tree.read("docs/architecture.md")
    rows = text[text.index("| | files, in order |") :].split("\n\n")[0].split("\n")[2:]
    order, here = [], None
    for row in rows:
        for path, name in re.findall(r"`([\w/]+)`|(\w+)", row.split("|")[2]):
            if path:
                here = f"src/allocator/{path}.rs"
                order.append(path)
            elif not tree.exists(here) or not re.search(rf"fn {name}\b", tree.read(here)):
                yield f"docs/architecture.md: {here} has no function `{name}`"
    said = re.search(r"These are (\w+) files, and (\w+) times the walk comes back", text)
    numbers = [int(NUMBERS.get(number, number)) for number in said.groups()] if said else None
    files = len(set(order))
    if numbers != [files, len(order) - files]:
        yield f"docs/architecture.md: the walk has {files} files and {len(order) - files} returns"


def places(tree):
    ends = ("rs", "py", "sh", "md", "toml", "h", "hpp", "c", "txt", "json", "allow")
    path = re.compile(rf"`((?:[\w.-]+/)*[\w-]+\.(?:{'|'.join(ends)})|(?:src|tests|docs|examples|benches|cli|capi|python)/[\w/.-]*)`")
    roots = ("", "src/", "src/allocator/", "tests/", "docs/", "capi/", "capi/include/", "python/cualloc/", "python/tests/")
    everywhere = {Path(f).name for p in ("src/**/*", "tests/**/*", "capi/**/*", "python/**/*") for f in tree.files(p)}
    made = re.compile(r"target/|torch/|^(malloc|program|cuda|trace|run|snapshot|page|out)\.")
    for document in tree.documents():
        if document == "CHANGELOG.md":
            continue
        for name in path.findall(tree.read(document)):
            short = "/" not in name and name in everywhere
            if not made.search(name) and not short and not any(tree.exists(root + name) for root in roots):
                folder = any(name in f for f in tree.files("src/**/*.rs"))
                if not folder:
                    yield f"{document}: there is no {name}"


def words(tree):
    found = re.compile(rf"\b(?:{'|'.join(WORDS)})s?\b", re.I)
    for path in [*tree.documents(), *tree.sources(), *tree.files("capi/include/*.h*"), *tree.files("python/cualloc/*.py")]:
        for number, line in enumerate(tree.read(path).split("\n"), 1):
            for word in found.findall(line):
                yield f"{path}:{number}: `{word}`: say {WORDS.get(word.lower()) or WORDS[word.lower()[:-1]]}"


CHECKS = [log_lines, error_texts, variables, allocator_files, walk, places, words]


def faults(tree):
    return [fault for check in CHECKS for fault in check(tree)]


def self_test():
    """Faults, each planted alone, with what is said of it."""
    tree = Tree()
    doc = {path: tree.read(path) for path in tree.documents()}
    main = tree.read("src/lib.rs")
    arch, internals = doc["docs/architecture.md"], doc["docs/internals.md"]
    planted = [
        ({"src/lib.rs": main + 'log::warn!("a planted line {x}");'}, "a planted line"),
        ({"docs/troubleshooting.md": "| `a planted error` | |\n" + doc["docs/troubleshooting.md"]}, "no error says"),
        ({"src/lib.rs": main + 'var("CUALLOC_PLANTED")'}, "CUALLOC_PLANTED"),
        ({"docs/configuration.md": doc["docs/configuration.md"].replace("`slack", "`slick")}, "no key `slack`"),
        ({"src/allocator/planted.rs": ""}, "does not name planted"),
        ({"src/allocator/heap/planted.rs": ""}, "does not name heap/planted"),
        ({"docs/internals.md": internals.replace("(`release`, `decay`)", "(`release`, `dacay`)")}, "names engine/dacay"),
        ({"docs/architecture.md": arch.replace(" miss_large |", " miss_lorge |")}, "no function `miss_lorge`"),
        ({"docs/architecture.md": arch.replace("| caches | `api/mod`", "| caches | `api/raw` allocate_raw, `api/mod`")}, "the walk has"),
        ({"docs/tuning.md": doc["docs/tuning.md"] + "`src/planted.rs`"}, "there is no src/planted.rs"),
        ({"docs/tuning.md": doc["docs/tuning.md"] + "the books"}, "`books`"),
    ]
    missed = [said for files, said in planted if not any(said in fault for fault in faults(Tree(files)))]
    print("\n".join(f"not noticed: {said}" for said in missed) or f"{len(planted)} planted faults, all noticed")
    return bool(missed)


def main():
    if "--self-test" in sys.argv[1:]:
        return self_test()
    found = faults(Tree())
    print("\n".join(found + [f"{len(CHECKS)} checks of the documents, {len(found)} faults"]))
    return bool(found)


sys.exit(main())
