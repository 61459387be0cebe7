#!/bin/sh
# Breaks one protected line at a time and checks that its tests notice.
#
#   tests/mutants.sh [--shard I/N] [NAME...]
#
# Each tests/mutants/NAME.patch is applied alone to a copy of the tree. Its head says what it
# breaks and which tests must fail then:
#
#   # guards: S1.40 R21
#   # test: BINARY TEST        (BINARY: the name of a file in tests/, or lib)
#
# A mutant passes if it applies, compiles, and each of its tests fails. Before that the same tests
# must pass without any patch. Copies and their builds stay in target/mutants, one per shard, so
# shards may run side by side.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
part=1
parts=1
names=
while [ $# -gt 0 ]; do
    case $1 in
    --shard)
        part=${2%/*}
        parts=${2#*/}
        shift 2
        ;;
    -*)
        echo "usage: tests/mutants.sh [--shard I/N] [NAME...]" >&2
        exit 2
        ;;
    *)
        names="$names $1"
        shift
        ;;
    esac
done
if [ -z "$names" ]; then
    names=$(cd "$root/tests/mutants" && ls ./*.patch | sed 's|^\./||; s|\.patch$||' |
        awk -v part="$part" -v parts="$parts" '(NR - 1) % parts == part - 1')
fi

work=${CARGO_TARGET_DIR:-$root/target}/mutants/$part-$parts
tree=$work/tree
log=$work/log
mkdir -p "$work"
rm -rf "$tree.new"
mkdir "$tree.new"
(cd "$root" && git ls-files -z --cached --others --exclude-standard | xargs -0 tar cf - 2>/dev/null) |
    tar xf - -C "$tree.new"
rm -rf "$tree"
mv "$tree.new" "$tree"
# Else what the last mutant of an earlier run left in the build would pass for newer than its source.
find "$tree/src" "$tree/tests" -type f -exec touch {} +
# Fewer seconds a build: nothing here depends on speed, and no backtrace is read.
export CARGO_TARGET_DIR="$work/target" CARGO_PROFILE_TEST_OPT_LEVEL=0
export CARGO_PROFILE_TEST_DEBUG=0 CARGO_INCREMENTAL=1 RUST_BACKTRACE=0
# The oracle finds what breaks a stream's order in its first programs; sums go wrong at once.
export CUALLOC_ORACLE_OPS=40000 CUALLOC_EXACT_OPS=40000
unset CUALLOC_TEST_DRIVER CUALLOC_TEST_POLICY CUALLOC_CONFIG

tests_of() {
    sed -n 's/^# test: //p' "$@"
}

# Runs the tests "BINARY TEST" given on stdin; the output goes to $log. Fails if they do not compile.
run() {
    binaries=
    filters=
    features=
    while read -r binary one; do
        case $binary in
        lib) option=--lib ;;
        column_arrow)
            option="--test=$binary"
            features="--features arrow"
            ;;
        *) option="--test=$binary" ;;
        esac
        case " $binaries " in
        *" $option "*) ;;
        *) binaries="$binaries $option" ;;
        esac
        filters="$filters $one"
    done
    # shellcheck disable=SC2086
    (cd "$tree" && cargo test -q -p cualloc $features --no-run $binaries) >"$log" 2>&1 || return 1
    # A mutant may hang.
    # shellcheck disable=SC2086
    (cd "$tree" && timeout 300 cargo test -p cualloc $features --no-fail-fast $binaries -- \
        --exact $filters) >"$log" 2>&1 && return 0
    [ $? -ne 124 ] || echo "error: test failed: it hangs" >>"$log"
    return 0
}

passed=0
failed=0
complain() {
    failed=$((failed + 1))
    echo "FAILED $1: $2"
}

start=$(date +%s)
for name in $names; do
    tests_of "$root/tests/mutants/$name.patch"
done | sort -u >"$work/tests"
if ! run <"$work/tests"; then
    cat "$log"
    echo "the tree does not compile"
    exit 1
fi
while read -r binary test; do
    if ! grep -q "^test $test \.\.\. ok" "$log"; then
        echo "FAILED without a patch: $binary $test"
        failed=$((failed + 1))
    fi
done <"$work/tests"
[ "$failed" -eq 0 ] || exit 1

for name in $names; do
    patch=$root/tests/mutants/$name.patch
    if ! grep -q '^# guards: .' "$patch" || [ -z "$(tests_of "$patch")" ]; then
        complain "$name" "its head names no line or no test"
        continue
    fi
    if ! (cd "$tree" && patch -p1 -s -f --no-backup-if-mismatch -F0 -r - <"$patch") >"$log" 2>&1; then
        (cd "$tree" && cp -r "$root/src" "$root/tests" .)
        complain "$name" "the patch does not apply"
        continue
    fi
    tests_of "$patch" >"$work/tests"
    if ! run <"$work/tests"; then
        tail -n 20 "$log"
        complain "$name" "it does not compile"
    else
        missed=
        while read -r binary test; do
            if grep -q "^test $test \.\.\. ok" "$log"; then
                missed="$missed $test"
            elif ! grep -q "^test $test\|error: test failed\|test failed, to rerun" "$log"; then
                missed="$missed $test(did not run)"
            fi
        done <"$work/tests"
        if [ -n "$missed" ]; then
            complain "$name" "not noticed by$missed"
        else
            passed=$((passed + 1))
            echo "ok $name"
        fi
    fi
    (cd "$tree" && patch -p1 -s -f -R --no-backup-if-mismatch -F0 -r - <"$patch") >"$log" 2>&1
done
echo "$passed passed, $failed failed, $(($(date +%s) - start)) s"
[ "$failed" -eq 0 ]
