#!/usr/bin/env python3
"""Files of `src` import each other in no circle, and layers import only those that tests/layers.allow lists.

A file imports another if its code names something that the other defines: in a `use`, or by a path
(`super::x::y`, `crate::x::y`, `x::y` of a module in scope). Names are followed through re-exports to the
file that defines them, so a `mod.rs` that only hands names on imports nothing. Code for tests (`cfg(test)`)
is left out, and so are comments. What a method call reaches is not followed.

Only the files of GUARDED may name the type of the guard of the heap's lock, since a function that takes a guard as a
value, or returns one, can release the lock without its caller seeing it. Mutexes of the standard library are not
allowed: debug builds count those of `src/locks` while they are held.
"""

import collections
import graphlib
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ALLOW = "tests/layers.allow"
# Who may name the guard of the heap's lock: the lock's own file, and the two that hand the guard on.
GUARDED = {
    "src/allocator/engine/mod.rs",
    "src/allocator/calls/allocate.rs",
    "src/allocator/reclaim/run.rs",
}
# Who may use locks that are not counted as held: where the counting is, and the simulated driver.
UNCOUNTED = ("src/locks/", "src/sim/")

# Comments and literals; a lifetime is no character.
BLANK = re.compile(
    r"""//[^\n]*|/\*|(?<!\w)(?:br|cr|r)(?P<hashes>\#*)"|"(?:\\.|[^"\\])*"|'(?:\\(?:u\{[^}]*\}|x..|.)|[^'\\\n])'""",
    re.S,
)
TOKEN = re.compile(r"'[A-Za-z_]\w*|(?:r\#)?[A-Za-z_]\w*|::|[0-9][\w.]*|[^\s\w]")
NAME = re.compile(r"(?:r#)?[A-Za-z_]\w*\Z")
EXPORTED = re.compile(r"#\[macro_export\]\s*(?:#\[[^\]]*\]\s*)*macro_rules!\s*(\w+)")
INCLUDE = re.compile(r"\binclude!\s*\((?P<what>[^;]*)\)\s*;")
ITEMS = {"fn", "struct", "enum", "union", "trait", "type", "const", "static", "macro_rules"}
OPEN, CLOSE = {"(": ")", "[": "]", "{": "}"}, {")", "]", "}"}


def strip(text):
    """The text without comments and literals."""
    out, at = [], 0
    while found := BLANK.search(text, at):
        out.append(text[at : found.start()])
        at = found.end()
        if found.group() == "/*":
            depth = 1
            while depth:
                edge = re.compile(r"/\*|\*/").search(text, at)
                if edge is None:
                    return "".join(out)
                depth += 1 if edge.group() == "/*" else -1
                at = edge.end()
        elif found["hashes"] is not None:
            at = text.index('"' + found["hashes"], at) + 1 + len(found["hashes"])
        out.append(" " if found.group().startswith("/") else " 0 ")
    return "".join(out) + text[at:]


def closing(tokens, at):
    """The place behind the bracket that closes the one at `at`."""
    depth = 0
    for place in range(at, len(tokens)):
        if tokens[place] in OPEN:
            depth += 1
        elif tokens[place] in CLOSE:
            depth -= 1
            if depth == 0:
                return place + 1
    return len(tokens)


def only_tests(condition):
    """Whether what stands under this condition of `cfg` is there for tests only."""
    if condition[:1] == ["test"]:
        return True
    if condition[:1] not in (["all"], ["any"]):
        return False
    parts, part, depth = [], [], 0
    for token in condition[2:-1]:
        depth += (token in OPEN) - (token in CLOSE)
        if token == "," and depth == 0:
            parts.append(part)
            part = []
        else:
            part.append(token)
    if part:
        parts.append(part)
    return (any if condition[0] == "all" else all)(map(only_tests, parts))


def behind_item(tokens, at):
    """The place behind the item, field or statement that begins at `at`."""
    while tokens[at : at + 1] == ["#"]:
        at = closing(tokens, at + 1)
    first = at
    if tokens[at : at + 1] == ["pub"]:
        at += 1
        if tokens[at : at + 1] == ["("]:
            at = closing(tokens, at)
    words = {"fn", "struct", "enum", "union", "trait", "impl", "mod", "macro_rules", "unsafe", "extern", "async"}
    ends_at_block = tokens[at] in words or tokens[at : at + 2] == ["const", "fn"] or tokens[first] == "{"
    ends_at_comma = tokens[at] not in words | {"use", "const", "static", "type", "let"}
    while at < len(tokens):
        token = tokens[at]
        if token in CLOSE:
            return at
        if token in OPEN:
            at = closing(tokens, at)
            if token == "{" and ends_at_block:
                return at
            continue
        at += 1
        if token == ";" or token == "," and ends_at_comma:
            return at
    return at


def without_tests(tokens):
    """The tokens without attributes and without what is there for tests only."""
    out, at = [], 0
    while at < len(tokens):
        if tokens[at] == "#" and tokens[at + 1 : at + 2] == ["["]:
            end = closing(tokens, at + 1)
            inside = tokens[at + 2 : end - 1]
            at = end
            if inside[:1] == ["cfg"] and only_tests(inside[2:-1]):
                at = behind_item(tokens, at)
        elif tokens[at] == "#" and tokens[at + 1 : at + 3] == ["!", "["]:
            at = closing(tokens, at + 2)
        else:
            out.append(tokens[at])
            at += 1
    return out


class Use:
    """One name of a `use`: its path, the name it gets here ("*": all), whether it is handed on, and whether
    others take it from here."""

    def __init__(self, path, name, public):
        self.path, self.name, self.public, self.taken = path, name, public, False


class Module:
    def __init__(self, path, file, parent):
        self.path, self.file, self.parent = path, file, parent
        self.modules, self.items, self.uses, self.paths = {}, set(), [], []
        # Names that the code itself has, and the file that is included, if one is.
        self.words, self.included = set(), None


class Tree:
    """The modules of a crate whose root is `src/lib.rs` under `root`."""

    def __init__(self, root):
        self.root = root
        self.modules = []
        # Macros that stand at the top of the crate, wherever they are.
        self.exported = {}
        # The module whose names are looked up.
        self.asking = None
        self.crate = self.file_module("src/lib.rs", (), None)

    def file_module(self, file, path, parent):
        with open(os.path.join(self.root, file), encoding="utf-8") as opened:
            text = opened.read()
        module = Module(path, file, parent)
        self.modules.append(module)
        code = strip(text)
        self.exported.update((name, file) for name in EXPORTED.findall(code))
        self.body(module, without_tests(TOKEN.findall(code)))
        for made in self.modules:
            if made.file == file and made.included:
                self.include(made, text)
        return module

    def include(self, module, text):
        """What is included counts as the checked-in file of the same name beside this one, if there is one."""
        folder = os.path.dirname(module.file)
        for found in INCLUDE.finditer(text):
            for name in re.findall(r'"/?([\w.]+\.rs)"', found["what"]):
                module.included = f"{folder}/{name}"

    def body(self, module, tokens):
        """Enters a module's items, imports and paths."""
        folder = os.path.dirname(module.file)
        stem = os.path.basename(module.file)[:-3]
        if stem not in ("lib", "mod"):
            folder = f"{folder}/{stem}"
        # Inline modules have folders of their own in it.
        depth_of_file = module.path[len(self.module_of_file(module).path) :]
        folder = "/".join([folder, *depth_of_file])
        at, depth = 0, 0
        while at < len(tokens):
            token = tokens[at]
            if token == "mod" and NAME.match(tokens[at + 1]):
                name, after = tokens[at + 1], tokens[at + 2]
                path = module.path + (name,)
                if after == "{":
                    end = closing(tokens, at + 2)
                    inner = Module(path, module.file, module)
                    module.modules[name] = inner
                    self.modules.append(inner)
                    self.body(inner, tokens[at + 3 : end - 1])
                    at = end
                    continue
                if after == ";":
                    for file in (f"{folder}/{name}.rs", f"{folder}/{name}/mod.rs"):
                        if os.path.exists(os.path.join(self.root, file)):
                            module.modules[name] = self.file_module(file, path, module)
                at += 3
                continue
            if token == "use" and tokens[at + 1] != "<":
                public = tokens[at - 1] == "pub" or tokens[at - 1] == ")" and "pub" in tokens[max(at - 8, 0) : at]
                end = at + 1
                while tokens[end] != ";":
                    end = closing(tokens, end) if tokens[end] == "{" else end + 1
                self.use(module, tokens[at + 1 : end], [], public)
                at = end + 1
                continue
            if token == "include" and tokens[at + 1 : at + 2] == ["!"]:
                module.included = module.file
            if depth == 0 and token in ITEMS:
                after = at + 2 if tokens[at + 1 : at + 2] in (["mut"], ["!"]) else at + 1
                if NAME.match(tokens[after]) and tokens[after] not in ("fn", "unsafe", "extern", "async"):
                    module.items.add(tokens[after])
                    if token == "macro_rules":
                        at = after + 1
                        continue
            depth += (token in OPEN) - (token in CLOSE)
            if NAME.match(token):
                path = [token]
                while tokens[at + 1 : at + 2] == ["::"] and at + 2 < len(tokens) and NAME.match(tokens[at + 2]):
                    path.append(tokens[at + 2])
                    at += 2
                module.words.add(path[0])
                if len(path) > 1:
                    module.paths.append(path)
            at += 1

    def module_of_file(self, module):
        while module.parent is not None and module.parent.file == module.file:
            module = module.parent
        return module

    def use(self, module, tokens, before, public):
        """Enters what one `use` names."""
        path, at = list(before), 0
        while at < len(tokens):
            token = tokens[at]
            if token == "{":
                part, depth = [], 0
                for inner in tokens[at + 1 : -1] + [","]:
                    depth += (inner in OPEN) - (inner in CLOSE)
                    if inner == "," and depth == 0:
                        if part:
                            self.use(module, part, path, public)
                        part = []
                    else:
                        part.append(inner)
                return
            if token == "as":
                module.uses.append(Use(path, tokens[at + 1], public))
                return
            if token == "*":
                module.uses.append(Use(path, "*", public))
                return
            if token == "self" and path:
                pass
            elif token != "::":
                path.append(token)
            at += 1
        module.uses.append(Use(path, path[-1], public))

    def named(self, module, name, last, seen):
        """What a name is in a module: a `Module`, a (file, name), or nothing."""
        if (module, name, last) in seen:
            return None
        seen.add((module, name, last))
        # A module and a function may have one name: what ends a path is the function.
        if last and name in module.items:
            return (module.file, name)
        if not last and name in module.modules:
            return module.modules[name]
        for use in module.uses:
            if use.name == name:
                use.taken |= module is not self.asking
                found = self.resolve(module, use.path, seen)
                if found is not None:
                    return found
        if name in module.modules:
            return module.modules[name]
        if name in module.items:
            return (module.file, name)
        for use in module.uses:
            if use.name == "*":
                inside = self.resolve(module, use.path, seen)
                if isinstance(inside, Module):
                    found = self.named(inside, name, last, seen)
                    if found is not None:
                        return found
        return None

    def resolve(self, module, path, seen=None):
        """What a path means in a module: a `Module`, a (file, name), or nothing if it is of another crate."""
        seen = set() if seen is None else seen
        here, own = module, False
        for place, part in enumerate(path):
            last = place + 1 == len(path)
            if part == "crate":
                here, own = self.crate, True
                continue
            if part == "self":
                own = True
                continue
            if part == "super":
                here, own = here.parent, True
                continue
            found = self.named(here, part, last, seen)
            if found is None:
                if here is self.crate and part in self.exported:
                    return (self.exported[part], part)
                # Made by a macro, or included.
                return (here.included or here.file, part) if own else None
            if not isinstance(found, Module):
                return found
            here, own = found, True
        return here

    def names(self):
        """For each module each name that its code takes from elsewhere: what it is, and its `use`, if it has one."""
        for module in self.modules:
            self.asking = module
            for use in module.uses:
                if use.name != "*":
                    yield module, use, self.resolve(module, use.path)
                    continue
                inside = self.resolve(module, use.path)
                if isinstance(inside, Module):
                    for word in sorted(module.words - module.items):
                        yield module, None, self.named(inside, word, True, set())
            for path in module.paths:
                yield module, None, self.resolve(module, path)

    def arrows(self):
        """For each file the files that it imports, each with the names taken from it."""
        arrows = collections.defaultdict(lambda: collections.defaultdict(set))
        for module, use, found in list(self.names()):
            if not isinstance(found, tuple) or found[0] == module.file:
                continue
            # What is only handed on is not used here.
            if use and (use.public or use.taken) and use.name not in module.words:
                continue
            arrows[module.file][found[0]].add(found[1])
        return arrows


def circle(arrows):
    """The nodes of one circle of arrows, the first repeated at the end, or an empty list."""
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return []


def allowed(root):
    """The layers with what each may import."""
    layers = {}
    with open(os.path.join(root, ALLOW), encoding="utf-8") as opened:
        for line in opened:
            if line := line.split("#")[0].strip():
                layer, imports = line.split(":")
                layers[layer] = set(imports.split())
    return layers


def layer_of(file, layers):
    """The innermost layer that holds a file."""
    inside = file[len("src/") :]
    holds = [layer for layer in layers if inside == layer or inside == layer + ".rs" or inside.startswith(layer + "/")]
    return max(holds, key=len, default=None)


def judge(root):
    """Everything that is wrong, as lines."""
    arrows, wrong, layers = Tree(root).arrows(), [], allowed(root)
    files = circle(arrows)
    for file, other in zip(files, files[1:]):
        wrong.append(f"in a circle: {file} -> {other}: {', '.join(sorted(arrows[file][other]))}")
    if found := circle(layers):
        wrong.append(f"{ALLOW}: a circle of layers: {' -> '.join(found)}")
    taken = collections.defaultdict(set)
    for file in sorted(arrows):
        for other, names in sorted(arrows[file].items()):
            here, there = layer_of(file, layers), layer_of(other, layers)
            if here is None or there is None:
                missing = f"{file if here is None else other} is in no layer of {ALLOW}"
                if missing not in wrong:
                    wrong.append(missing)
            elif here != there:
                taken[here].add(there)
                if there not in layers[here]:
                    wrong.append(f"{here} must not import {there}: {file} -> {other}: {', '.join(sorted(names))}")
    for layer, imports in sorted(layers.items()):
        for other in sorted(imports - taken[layer]):
            wrong.append(f"{layer} does not import {other}: remove it from {ALLOW}")
    return wrong + guards(root)


def guards(root):
    """The files that name a lock or a guard that only others may name."""
    wrong = []
    for module in Tree(root).modules:
        with open(os.path.join(root, module.file), encoding="utf-8") as opened:
            code = " ".join(without_tests(TOKEN.findall(strip(opened.read()))))
        heap = re.search(r"\bengine :: (?:\{[^}]*\b)?Guard\b|\bHeld < (?:'\w+ , )?(?:State|Heap)\b", code)
        if heap and module.file.startswith("src/allocator/") and module.file not in GUARDED:
            wrong.append(f"{module.file} must not name the guard of the heap's lock: see GUARDED")
        if re.search(r"\bsync :: (?:\{[^}]*\b)?(?:Mutex|RwLock)\b", code) and not module.file.startswith(UNCOUNTED):
            wrong.append(f"{module.file} must take Mutex and RwLock from crate::locks::held, which counts them")
    return sorted(set(wrong))


def main():
    wrong = judge(ROOT)
    print("\n".join(wrong) if wrong else "no circles of imports; every layer imports only those that it may")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
