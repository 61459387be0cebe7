#!/bin/sh
# Breaks one protected place at a time and checks that its tests notice.
#
#   tests/mutants.sh [--shard I/N] [--jobs N] [NAME...]
#   tests/mutants.sh --check
#
# tests/mutants/*.toml are tables of mutants, one for each module of src (several for the allocator, by subject):
#
#   [[mutant]]
#   name = "evict_in_use"                  # unique
#   guards = "R34"                         # the labels of what it breaks
#   tests = ["views life::r8_a_test"]      # BINARY TEST: BINARY is a file or folder in tests/, lib or capi
#   old = 'if slot.in_use {'              # whole lines, exactly once in all files under src; several lines in '''
#   new = 'if false {'                     # what takes their place, as far in as they were
#
# One that breaks several places has [[mutant.edit]] with `old` and `new` for each, instead of these in
# itself. `under = "tests"` (or "capi/src") beside `old` says that the lines are not under src. capi are the unit tests
# of the C library.
#
# Before the mutants their tests must pass on the tree as it is. A mutant passes if it compiles and each of its
# tests fails, aborts or hangs. Every test runs alone in its process: what another test does to the process
# does not count. A test that does not run, or is skipped, fails the run, and so does an empty choice.
#
# --check tells in a second, for all mutants, what the sources tell: names, lines, tests, and whether the labels
# of the tests are others than the mutant's. Copies of the tree and their builds stay in target/mutants: one run at a time.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
exec python3 -B "$root/tests/mutants/runner.py" "$@"
