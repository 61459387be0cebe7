#!/usr/bin/env python3
"""One table of several allocators' figures.

    cualloc bench >ours.txt; OTHER_HARNESS >theirs.txt; benches/compare.py ours.txt theirs.txt

Reads lines `WORK NAME CASE: VALUE UNIT` (such as `pair malloc 4096 B: 20.1 ns`) and the objects of
`cualloc bench --json`, from files or from stdin (`-`), and writes a table in Markdown: a row for each work
and case in the order in which they first come, a column for each name, the best of a row in bold.
Other lines are ignored, and of two figures for the same thing the last counts. The exit code is 1 if
there was none at all.
"""

import json
import re
import sys

# Those of two words first, or their second word would be taken for a name.
WORKS = [
    "churn small",
    "churn wide",
    "threads own-stream-1MiB",
    "threads own-stream",
    "threads one-stream",
    "cross-stream free",
    "cross-stream pair",
    "cross-stream driver",
    "pair recorded",
    "pair stack",
    "pair workspace",
    "pair typed-pool",
    "pair",
    "free-blocks",
]
DIGITS = {"calls": 4, "Mops/s": 2}
LINE = re.compile(
    r"(?P<work>" + "|".join(map(re.escape, WORKS)) + r") (?P<name>\S+) (?P<case>[^:]+): "
    r"(?P<value>[0-9.]+) (?P<unit>\S+)$"
)


def parse(line):
    """(work, case, unit), name and value of a line; None if it is no figure."""
    line = line.strip()
    if line.startswith("{"):
        try:
            found = json.loads(line)
            found["value"] = float(found["value"])
            return (found["work"], found["case"], found["unit"]), found["name"], found["value"]
        except (ValueError, KeyError, TypeError):
            return None
    match = LINE.match(line)
    if not match:
        return None
    key = (match["work"], match["case"], match["unit"])
    return key, match["name"], float(match["value"])


def table(lines):
    rows, names = {}, []
    for found in filter(None, map(parse, lines)):
        key, name, value = found
        if name not in names:
            names.append(name)
        rows.setdefault(key, {})[name] = value
    text = ["| work | unit | " + " | ".join(names) + " |", "|---|---" + "|---" * len(names) + "|"]
    for (work, case, unit), values in rows.items():
        # Of operations in a second the most is best, of everything else the least.
        best = (max if unit.endswith("/s") else min)(values.values())
        cells = []
        for name in names:
            value = values.get(name)
            if value is None:
                cells.append("")
            else:
                cell = f"{value:.{DIGITS.get(unit, 1)}f}"
                cells.append(f"**{cell}**" if value == best and len(values) > 1 else cell)
        text.append(f"| {work}, {case} | {unit} | " + " | ".join(cells) + " |")
    return rows, "\n".join(text)


def main(paths):
    lines = []
    for path in paths or ["-"]:
        if path == "-":
            lines += sys.stdin.readlines()
            continue
        with open(path, encoding="utf-8") as file:
            lines += file.readlines()
    rows, text = table(lines)
    if not rows:
        print("no figures", file=sys.stderr)
        return 1
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
