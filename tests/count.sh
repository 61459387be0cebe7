#!/usr/bin/env bash
# count.sh LOG | --bless [LOG]: compares the number of tests of a run with the recorded one
#
# LOG is the output of `cargo test`. The number is in tests/count.txt: all tests that `cargo test` runs, examples of
# the documentation among them, ignored ones left out. So none is lost by a file or a feature that nobody builds any
# more. --bless writes the number anew; without a log it runs the tests for it.
set -euo pipefail
cd "$(dirname "$0")/.."
recorded=tests/count.txt

bless=
if [ "${1-}" = --bless ]; then
    bless=1
    shift
fi
log=${1-}
if [ -z "$log" ]; then
    [ -n "$bless" ] || { sed -n '2s/^# //p' "$0" >&2; exit 2; }
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    cargo test >"$log" 2>&1 || { tail -n 100 "$log"; exit 1; }
fi
count=$(awk '/^test result: / { for (i = 1; i < NF; i++) if ($(i + 1) ~ /^(passed|failed);?$/) n += $i } END { print n + 0 }' "$log")
if [ -n "$bless" ]; then
    echo "$count" >"$recorded"
fi
echo "$count tests ran, $(cat "$recorded") are recorded"
[ "$count" = "$(cat "$recorded")" ] || {
    echo "if that is meant: tests/count.sh --bless" >&2
    exit 1
}
