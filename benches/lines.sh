#!/usr/bin/env bash
# Cache lines that a pair touches, on the simulator: lines of 64 bytes, data and code apart.
#
#   benches/lines.sh [--check | --functions]
#
# For `pair`, `pair_adopted` and `pair_default`, as benches/instructions.sh says what they are, lines `NAME.data N`,
# `NAME.stack N` and `NAME.code N`: how many distinct lines a warm allocation and its free touch together, with the loop
# around them, as valgrind's lackey traces them; those of the stack apart from other data. A cold pair waits for each.
# For `c_adopted` and `c_default`, the same two pairs through the shared library by a program in C (benches/pair.c), also
# `NAME.instructions N`. The loader resolves thread-local variables there; the data that it reads is not counted, because
# its addresses depend on the length of the library's path.
# For `large_alloc` and `large_free`, `NAME CODE DATA`: the medians of warm operations of 1 to 8 MiB by pointer on an
# adopted stream, out of memory that is held; `large_alloc_2` and `large_free_2` the same after a second stream was used
# once. What the simulated driver touches is not counted, except in the lines `NAME.with_driver CODE DATA`.
#
# --check fails if a warm pair touches more lines than `most` says. --functions also lists, for the last large operation
# of each kind, the functions that it enters, each with its code lines and instructions.
set -euo pipefail
cd "$(dirname "$0")/.."

check= functions=
case ${1-} in
--check) check=1 ;;
--functions) functions=1 ;;
'') ;;
*)
    sed -n '2,4s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
command -v valgrind >/dev/null || {
    echo "valgrind is not installed" >&2
    exit 2
}

target=${CARGO_TARGET_DIR:-target}
cargo build -q --release -p cualloc --example hot --example simdriver >&2
cargo build -q --release -p cualloc-capi >&2
mkdir -p "$target/lines"
gcc -O2 -Wall -Wextra -Icapi/include -o "$target/lines/pair" benches/pair.c -L"$target/release" -lcualloc -ldl \
    -Wl,-rpath,"$(realpath "$target/release")"
CHECK=$check FUNCTIONS=$functions CUALLOC_DRIVER=$target/release/examples/libsimdriver.so \
    python3 -B - "$target/release/examples/hot" "$target/lines/pair" <<'END'
import bisect, collections, os, re, statistics, subprocess, sys, tempfile

# data, code: a pair's lines, its stack's apart.
most = {"pair": (8, 17), "pair_adopted": (8, 17), "pair_default": (8, 17), "c_adopted": (13, 27), "c_default": (13, 27)}
MOST_INSTRUCTIONS = 285
# code, data: the medians of large operations. The layout of the program moves those of code by up to a tenth.
most_large = {"large": [(101, 38), (75, 33)], "large_2": [(176, 91), (84, 38)]}
LARGE = 400
PAIRS = 20
# Of the program in C, whose start has repetitions of its own: the last accesses are of pairs alone.
MANY_PAIRS = 1000
LAST = 100_000
LINE = 64
# Where valgrind maps the loader on this architecture.
LOADER = range(0x400_0000, 0x404_0000)


def trace(name):
    """The accesses of a run, each as kind, address, bytes; and what the program printed."""
    with tempfile.NamedTemporaryFile() as log:
        run = ["valgrind", "--tool=lackey", "--trace-mem=yes", "--basic-counts=no", f"--log-file={log.name}"]
        program = [sys.argv[2], name, str(MANY_PAIRS)] if name.startswith("c_") else [sys.argv[1], name, str(LARGE if name in most_large else PAIRS)]
        printed = subprocess.run(run + program, check=True, stdout=subprocess.PIPE, text=True).stdout
        accesses, executed = [], 0
        for line in open(log.name):
            found = re.match(r"(I | [LSM]) +([0-9a-f]+),(\d+)$", line)
            if found:
                kind, address = found[1].strip(), int(found[2], 16)
                if kind == "I":
                    executed = address
                elif executed in LOADER:
                    continue
                accesses.append((kind, address, int(found[3])))
    return accesses[-LAST:] if name.startswith("c_") else accesses, printed


def rounds(accesses, often):
    """Splits a run where its commonest instructions begin a new round: those that every pair has once."""
    counts = collections.Counter(address for kind, address, _ in accesses if kind == "I")
    # As many pairs as were asked for, and those before them.
    repeated = collections.Counter(n for n in counts.values() if n > often)
    pairs = repeated.most_common(1)[0][0]
    first = next(a for kind, a, _ in accesses if kind == "I" and counts[a] == pairs)
    at = [i for i, (kind, a, _) in enumerate(accesses) if kind == "I" and a == first]
    return [accesses[i:j] for i, j in zip(at, at[1:])]


def lines(accesses, wanted):
    found = set()
    for kind, address, size in accesses:
        if wanted(kind, address):
            found.update(range(address // LINE, (address + size - 1) // LINE + 1))
    return len(found)


def on_stack(address):
    return address >> 32 == 0x1F


def symbols(program):
    """The functions and variables of a program: their addresses, ascending, and their names."""
    listed = subprocess.run(["nm", "-nC", "--defined-only", program], check=True, stdout=subprocess.PIPE, text=True)
    found = [re.match(r"([0-9a-f]+) \S (.*?)(::h[0-9a-f]{16})?$", line) for line in listed.stdout.splitlines()]
    return [int(symbol[1], 16) for symbol in found if symbol], [symbol[2] for symbol in found if symbol]


SYMBOLS = symbols(sys.argv[1])


def function(address, base):
    return SYMBOLS[1][max(bisect.bisect(SYMBOLS[0], address - base) - 1, 0)]


def without_driver(accesses, base):
    """The accesses outside calls of the simulated driver."""
    shims = {base + a for a, name in zip(*SYMBOLS) if name.startswith("cualloc::sim::table::shims::")}
    kept, after = [], None
    for kind, address, size in accesses:
        if kind == "I" and after is None and address in shims:
            caller = next(access for access in reversed(kept) if access[0] == "I")
            after = caller[1] + caller[2]
        if kind == "I" and address == after:
            after = None
        if after is None:
            kept.append((kind, address, size))
    return kept


def operations(accesses, marks):
    """The accesses of the operations between two marks: of the allocations, and of the frees."""
    found, begun, which = ([], []), None, 0
    for at, (kind, address, _) in enumerate(accesses):
        if kind != "S" or not marks <= address < marks + LINE:
            continue
        if begun is not None:
            found[which].append(accesses[begun + 1 : at])
        which = (address - marks) // 8
        begun = at if which < 2 else None
    return found


def medians(operations, marks):
    """The medians of the code and data lines of some operations."""
    data = lambda kind, a: kind != "I" and not on_stack(a) and a // LINE != marks // LINE
    figures = [(lines(one, lambda kind, a: kind == "I"), lines(one, data)) for one in operations]
    return [int(statistics.median(column)) for column in zip(*figures)]


def print_functions(operation, base):
    touched = collections.defaultdict(list)
    for access in operation:
        if access[0] == "I":
            touched[function(access[1], base)].append(access)
    for name, accesses in touched.items():
        print(f"    {lines(accesses, lambda *_: True):4} {len(accesses):6} {name}")


failed = False
for name, bounds in most_large.items():
    accesses, printed = trace(name)
    marks = int(re.search("marks 0x([0-9a-f]+)", printed)[1], 16)
    base = marks - SYMBOLS[0][SYMBOLS[1].index("hot::MARKS")]
    for operation, warm, bound in zip(("alloc", "free"), operations(accesses, marks), bounds):
        warm = warm[-LARGE // 4 :]
        alone = [without_driver(one, base) for one in warm]
        label = f"large_{operation}{name[len('large'):]}"
        found = medians(alone, marks)
        print(label, *found)
        print(f"{label}.with_driver", *medians(warm, marks))
        if os.environ["FUNCTIONS"]:
            print_functions(alone[-1], base)
        if os.environ["CHECK"] and any(figure > most for figure, most in zip(found, bound)):
            print(f"{label} is {found}, more than {bound}", file=sys.stderr)
            failed = True
for name, (data, code) in most.items():
    warm = rounds(trace(name)[0], 100 if name.startswith("c_") else 1000)[-2]
    figures = {
        "data": lines(warm, lambda kind, a: kind != "I" and not on_stack(a)),
        "stack": lines(warm, lambda kind, a: kind != "I" and on_stack(a)),
        "code": lines(warm, lambda kind, a: kind == "I"),
    }
    bounds = {"data": data, "code": code}
    if name.startswith("c_"):
        figures["instructions"] = sum(kind == "I" for kind, _, _ in warm)
        bounds["instructions"] = MOST_INSTRUCTIONS
    for what, figure in figures.items():
        print(f"{name}.{what} {figure}")
    for what, bound in bounds.items():
        if os.environ["CHECK"] and figures[what] > bound:
            print(f"{name}.{what} is {figures[what]}, more than {bound}", file=sys.stderr)
            failed = True
sys.exit(failed)
END
