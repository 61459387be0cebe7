"""Which tests there are, by the sources alone: a walk along the modules that a name goes through."""

import re
from pathlib import Path

TOKEN = re.compile(
    r"""//[^\n]* | /\*.*?\*/
    | \bb?r(?P<hashes>\#*)".*?"(?P=hashes) | "(?:\\.|[^"\\])*"
    | '(?:\\[^\n]{1,8}?|[^'\\\n])' | '[A-Za-z_]\w*
    | \#\[path\s*=\s*"(?P<path>[^"]*)"\]
    | \#\[(?P<test>test)\]
    | \bmod\s+(?P<mod>\w+)\s*(?P<end>[;{])
    | \bfn\s+(?P<fn>\$?\w+)
    | (?P<brace>[{}])""",
    re.X | re.S,
)


class Module:
    def __init__(self, path, folder):
        self.path = path
        self.folder = folder
        self.modules = {}
        self.tests = set()
        # Whether a macro here names tests by its arguments.
        self.by_macro = False


class Tests:
    """The tests of a package; a file is read when a name first goes through it."""

    def __init__(self, root):
        self.root = Path(root)
        self.files = {}

    def program(self, binary):
        if binary == "lib":
            return self.root / "src/lib.rs"
        if binary == "capi":
            return self.root / "capi/src/lib.rs"
        files = (self.root / "tests" / f"{binary}.rs", self.root / "tests" / binary / "main.rs")
        return next((path for path in files if path.is_file()), None)

    def fault(self, test):
        """What is wrong with the name, or None."""
        path = self.program(test.binary)
        if path is None:
            return f"there is no test program {test.binary}"
        module = self.file(path, path.parent)
        *outer, name = test.name.split("::")
        for part in outer:
            module = module.modules.get(part)
            if isinstance(module, tuple):
                module = self.file(*module)
            if module is None:
                return f"there is no module {part} for the test {test}"
        if name in module.tests:
            return None
        if module.by_macro and re.search(rf"^\s*{re.escape(name)}:", module.path.read_text(), re.M):
            return None
        return f"there is no test {test}"

    def file(self, path, folder):
        if path not in self.files:
            self.files[path] = self.read(path, folder) if path.is_file() else None
        return self.files[path]

    def read(self, path, folder):
        top = Module(path, folder)
        # The modules that are open, each with the depth of its brace.
        open_modules = [(top, 0)]
        depth = 0
        elsewhere = None
        is_test = False
        for token in TOKEN.finditer(path.read_text()):
            module = open_modules[-1][0]
            if token["path"]:
                elsewhere = token["path"]
            elif token["test"]:
                is_test = True
            elif token["mod"]:
                name = token["mod"]
                if token["end"] == "{":
                    depth += 1
                    inner = Module(path, module.folder / name)
                    module.modules[name] = inner
                    open_modules.append((inner, depth))
                elif elsewhere:
                    file = (path.parent / elsewhere).resolve()
                    module.modules[name] = (file, file.parent)
                else:
                    file = module.folder / f"{name}.rs"
                    if not file.is_file():
                        file = module.folder / name / "mod.rs"
                    module.modules[name] = (file, module.folder / name)
                elsewhere = None
            elif token["fn"]:
                if is_test and token["fn"].startswith("$"):
                    module.by_macro = True
                elif is_test:
                    module.tests.add(token["fn"])
                is_test = False
            elif token["brace"] == "{":
                depth += 1
            elif token["brace"] == "}":
                if depth == open_modules[-1][1] and len(open_modules) > 1:
                    open_modules.pop()
                depth -= 1
        return top
