"""What `tests/layers.py --self-test` does: faults are planted in copies, and have to be found."""

import os
import shutil
import tempfile

from layers import ALLOW, ROOT, Tree, allowed, judge


def guard_in(file, names="Guard"):
    """A tree with a lock, and a file that takes its guard."""
    module = file[len("src/allocator/") : -3].split("/")
    tree = {
        "src/lib.rs": "mod allocator;\n",
        "src/allocator/mod.rs": f"mod engine;\nmod {module[0]};\n",
        "src/allocator/engine/mod.rs": "pub struct Engine;\npub type Guard<'a> = &'a Engine;\n",
        file: f"use crate::allocator::engine::{names};\nfn f<'a>(state: Guard<'a>) -> Guard<'a> {{ state }}\n",
        ALLOW: "allocator:\n",
    }
    if module[1:]:
        tree[f"src/allocator/{module[0]}/mod.rs"] = f"mod {module[1]};\n"
    return tree


def run():
    """Plants circles and other faults in copies, and expects each to be found, and nothing else."""
    tree = {
        "src/lib.rs": "mod low;\nmod high;\nmod top;\npub use high::Face;\n",
        "src/top.rs": "pub fn top() { crate::high::roof(); }\n",
        "src/low/mod.rs": "mod a;\nmod b;\nmacro_rules! made { ($n:ident) => { pub struct $n; } }\nmade!(Made);\n"
        "pub use a::A;\npub(crate) use b::{B, self as bee};\n",
        "src/low/a.rs": "/// See [`super::B`].\npub struct A;\nfn f<'a>(x: &'a str) -> char { let _ = \"super::B\"; 'b' }\n"
        "// super::B\n/* crate::Face /* nested */ super::B */\n#[cfg(all(test, unix))]\nmod tests { use super::super::B; }\n"
        "#[cfg(test)]\nuse super::B;\n",
        "src/low/b.rs": "use super::A;\npub struct B(A);\n",
        "src/high/mod.rs": "mod roof;\nmod wall;\npub use roof::{Face, roof};\nuse crate::low::Made;\n"
        "struct Kept(Made);\nfn helper() {}\n",
        "src/high/roof.rs": "use super::wall;\nuse crate::low;\npub struct Face;\npub fn roof() { wall::stand(low::A); super::helper() }\n",
        "src/high/wall.rs": "pub fn stand(_: crate::low::A) {}\n",
        ALLOW: "low:\nhigh: low\ntop: high\nlib:\n",
    }
    circle = "circle of 2 files:"
    cases = [
        ("nothing", {}, []),
        ("a use", {"src/low/a.rs": "use super::b::B;\n"}, [circle]),
        ("a use through the door", {"src/low/a.rs": "use super::{B as Other};\n"}, [circle]),
        ("a use of all", {"src/low/a.rs": "use super::*;\nfn g(_: B) {}\n"}, [circle]),
        ("a path", {"src/high/wall.rs": "fn g() { super::roof::roof() }\n"}, [circle]),
        ("a path through a module in scope", {"src/low/a.rs": "use crate::low::bee;\nfn g(_: bee::B) {}\n"}, [circle]),
        ("a path in a macro", {"src/low/a.rs": "macro_rules! m { () => { $crate::low::B } }\n"}, [circle]),
        ("an inline module", {"src/low/a.rs": "mod inner { use super::super::B; }\n"}, [circle]),
        ("the door itself", {"src/high/mod.rs": "fn g() -> Face { loop {} }\n"}, [circle]),
        ("the top of the crate", {"src/high/wall.rs": "use crate::Face;\n"}, [circle]),
        ("any is not for tests only", {"src/low/a.rs": "#[cfg(any(test, unix))]\nuse super::B;\n"}, [circle]),
        ("what follows a test", {"src/low/a.rs": "#[cfg(test)]\nfn t<A, C>() {}\nuse super::B;\n"}, [circle]),
        ("three files", {"src/low/a.rs": "use crate::top::top;\n"}, ["circle of 4 files:", "low must not know top"]),
        ("up", {"src/low/b.rs": "use crate::high::Face;\n"}, ["low must not know high"]),
        ("a new room", {"src/lib.rs": "mod new;\nuse new::N;\nfn g(_: N) {}\n", "src/new.rs": "pub struct N;\n"}, ["src/new.rs is in no room"]),
        ("an arrow that is gone", {ALLOW: "free: low\n"}, ["free does not know low any more"]),
        ("rooms in a circle", {ALLOW: "high: low top\n"}, ["rooms that may know each other", "high does not know top"]),
        ("allowed", {"src/low/a.rs": "use super::B;\n", ALLOW: "circle\n    src/low/a.rs\n    src/low/b.rs\n"}, []),
        ("a circle that is gone", {ALLOW: "circle\n    src/low/a.rs\n    src/low/b.rs\n"}, ["src/low/a.rs is in no circle", "src/low/b.rs is in no circle"]),
        ("a guard", guard_in("src/allocator/heap.rs"), ["src/allocator/heap.rs must not name the guard"]),
        ("a guard among others", guard_in("src/allocator/heap.rs", "{Engine, Guard}"), ["src/allocator/heap.rs must not name the guard"]),
        ("a guard by its own type", {"src/lib.rs": "mod allocator;\n", "src/allocator/mod.rs": "fn f(_: Held<'_, State>) {}\n", ALLOW: "allocator:\n"}, ["src/allocator/mod.rs must not name the guard"]),
        ("a guard that may be named", guard_in("src/allocator/reclaim/run.rs"), []),
        ("a circle that has grown", {"src/low/a.rs": "use super::B;\nuse crate::low::Made;\n", "src/low/mod.rs": "fn g(_: A) {}\n", ALLOW: "circle\n    src/low/a.rs\n    src/low/b.rs\n"}, ["circle of 3 files, grown by src/low/mod.rs"]),
    ]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, planted, expected in cases:
            root = os.path.join(folder, "small")
            for file in sorted({*tree, *planted}):
                os.makedirs(os.path.dirname(os.path.join(root, file)), exist_ok=True)
                with open(os.path.join(root, file), "w", encoding="utf-8") as opened:
                    opened.write(tree.get(file, "") + planted.get(file, ""))
            wrong = [line for line in judge(root) if not line.startswith(" ")]
            if len(wrong) != len(expected) or any(part not in line for part, line in zip(expected, wrong)):
                failed += 1
                print(f"self-test, {name}: expected {expected}, found {wrong}")
            shutil.rmtree(root)
        failed += planted_in_copy(os.path.join(folder, "copy"))
    print(f"self-test: {len(cases) + 1} cases, {failed} failed")
    return failed


def planted_in_copy(root):
    """In a copy of the sources, an import turned round."""
    shutil.copytree(os.path.join(ROOT, "src"), os.path.join(root, "src"))
    os.makedirs(os.path.join(root, "tests"))
    shutil.copy(os.path.join(ROOT, ALLOW), os.path.join(root, ALLOW))
    tree, open_files = Tree(root), set().union(*allowed(root)[1])
    before, arrows = judge(root), tree.arrows()
    items = {module.file: module for module in tree.modules if module.items and module is tree.module_of_file(module)}
    file, other = next(
        (file, other)
        for file in sorted(arrows)
        for other in sorted(arrows[file])
        if file in items and other in items and not {file, other} & open_files and not file.endswith("mod.rs")
    )
    path = "::".join(["crate", *items[file].path, sorted(items[file].items)[0]])
    with open(os.path.join(root, other), "a", encoding="utf-8") as opened:
        opened.write(f"\nuse {path} as Planted;\n")
    new = [line for line in judge(root) if line not in before]
    if any(line.startswith(f"  {other} -> {file}:") for line in new):
        return 0
    print(f"self-test: {path} planted in {other} was not found")
    return 1
