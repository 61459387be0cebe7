#!/usr/bin/env bash
# Checks docs/coverage.md: tests/coverage.sh [--strict] [LOG...]
#
# Every line of the numbering has exactly one row, and every test that a row names exists. LOG is the
# output (both streams) of `cargo test -- --show-output`; where logs are given, the tests must have run
# in them and passed, and of each row at least one must not have been skipped. Without a log the tests
# are only listed, with all features. Rows that say "open" are counted; with --strict they fail.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

strict=0
logs=()
for argument in "$@"; do
    case $argument in
    --strict) strict=1 ;;
    -*) sed -n '2s/^# //p' "$0" >&2; exit 2 ;;
    *) logs+=("$argument") ;;
    esac
done
for log in ${logs[@]+"${logs[@]}"}; do
    [ -r "$log" ] || { echo "there is no log $log" >&2; exit 1; }
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
listed=0
if [ ${#logs[@]} = 0 ]; then
    listed=1
    logs=("$work/list")
    if ! CARGO_TERM_COLOR=never cargo test --workspace --features cualloc/arrow -- --list \
        >"$work/list" 2>&1; then
        tail -n 50 "$work/list"
        exit 1
    fi
fi

# Lines "binary::test STATE" of all logs: STATE is ok, FAILED, ignored, listed or skipped.
awk '
    # A test program starts; what it printed itself comes after its results.
    /^ +Running .+ \(.+\)$/ {
        path = $2 == "unittests" ? $3 : $2
        sub(/\.rs$/, "", path)
        sub(/^src\//, "", path)
        sub(/^tests\//, "", path)
        sub(/\/main$/, "", path)
        binary = path == "main" ? "cli" : path
        output = 0
        next
    }
    /^ +Doc-tests / { binary = "doc"; output = 0; next }
    /^test result: / { output = 0; next }
    /^(successes|failures):$/ { output = 1; name = ""; next }
    output && /^---- .+ stdout ----$/ {
        name = test_name(substr($0, 6, length($0) - 17))
        next
    }
    output && name != "" && /^SKIPPED/ && !/^SKIPPED in part/ { print name, "skipped" }
    output { next }
    /^test .+ \.\.\. / {
        line = substr($0, 6)
        at = index(line, " ... ")
        state = substr(line, at + 5)
        sub(/[^A-Za-z].*/, "", state)
        print test_name(substr(line, 1, at - 1)), state
        next
    }
    /: test$/ { print test_name(substr($0, 1, length($0) - 6)), "listed" }

    # Examples of the documentation go by their item: "src/a.rs - a::Item (line 7) - compile fail".
    function test_name(text) {
        if (binary == "doc") {
            sub(/^[^ ]+ - /, "", text)
            sub(/ \(line [0-9]+\).*$/, "", text)
        }
        sub(/ - should panic$/, "", text)
        return binary "::" text
    }
' "${logs[@]}" >"$work/tests"

awk -v strict="$strict" -v listed="$listed" '
    BEGIN {
        split("6 55 22 40 26 74", count, " ")
        for (part = 1; part <= 6; part++)
            for (n = 1; n <= count[part]; n++) expected["S" (part - 1) "." n] = ++lines
    }
    function fault(text) { print "  " text; faults++ }

    # The tests. One item may have several examples, and one test may run in several logs.
    FNR == NR {
        seen[$1] = 1
        if ($2 == "skipped") skipped[$1] = 1
        else if ($2 == "ignored") ignored[$1] = 1
        else if ($2 != "ok" && $2 != "listed") failed[$1] = $2
        next
    }

    # The rows.
    /^\| [A-Z][0-9.]+ \|/ {
        fields = split($0, field, / *\| */)
        id = field[2]
        if (fields != 5) { fault(id ": not three columns"); next }
        if (id in rows) fault(id ": a second row")
        rows[id] = 1
        if (id ~ /^S/ && !(id in expected)) fault(id ": no such line")
        if (field[3] == "" || field[3] == "-") fault(id ": no type or function")
        if (field[4] == "open") { open[++opens] = id; next }
        earnest = 0
        before = faults
        n = split(field[4], named, /, */)
        for (i = 1; i <= n; i++) {
            test = named[i]
            tests[test] = 1
            if (!(test in seen)) fault(id ": " test (listed ? " does not exist" : " did not run"))
            else if (test in failed) fault(id ": " test " failed")
            else if (test in ignored) fault(id ": " test " is ignored")
            else if (!(test in skipped)) earnest++
            else left_out[test] = 1
        }
        if (n == 0) fault(id ": no test")
        else if (!earnest && faults == before) fault(id ": none of its tests did its work")
    }

    END {
        for (part = 1; part <= 6; part++)
            for (n = 1; n <= count[part]; n++)
                if (!(("S" (part - 1) "." n) in rows)) fault("S" (part - 1) "." n ": no row")
        for (test in left_out) print "  SKIPPED: " test
        for (test in tests) distinct++
        for (i = 1; i <= opens; i++) list = list " " open[i]
        printf "coverage: %d lines, %d tests named, %d open%s, %d faults\n", \
            lines, distinct, opens, opens ? ":" list : "", faults
        exit faults > 0 || (strict && opens > 0)
    }
' "$work/tests" docs/coverage.md
