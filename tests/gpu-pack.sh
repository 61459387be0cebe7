#!/usr/bin/env bash
# gpu-pack.sh [TRACE...]: builds here what `tests/gpu.sh` runs on a machine with a GPU and no Rust.
#
# Everything goes to `.gpu/`, which travels with a copy of the repository: stripped test programs, the
# command, and traces (those in tests/data are taken from there; add files or folders of more).
# Both machines must have the same processor architecture and a C library of like age.
set -euo pipefail
cd "$(dirname "$0")/.."
out=.gpu
limit=$((60 << 20))

rm -rf "$out"
mkdir -p "$out/tests" "$out/traces"

# One profile for tests and command, so that everything is built once.
build() {
    cargo "$@" --release --workspace --exclude cualloc-capi --message-format=json |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | sort -u
}
# Without /deps/ in its path it is the command itself, built for its own tests.
programs=$(build test --no-run)
command=$(grep -v '/deps/' <<<"$programs" | head -n 1)
install -s "$command" "$out/cualloc"
for program in $(grep '/deps/' <<<"$programs"); do
    name=$(basename "$program")
    name=${name%-*}
    # The simulator's own tests learn nothing from a GPU.
    case $name in sim) continue ;; esac
    # The library's and the command's unit tests have the same name.
    [ -e "$out/tests/$name" ] && name=$name-2
    install -s "$program" "$out/tests/$name"
done
# Programs over the C library, built as with an installed library.
cargo build -q --release -p cualloc-capi
mkdir -p "$out/tests/c"
install -s "${CARGO_TARGET_DIR:-target}/release/libcualloc_capi.so" "$out/tests/c/libcualloc.so.0.1"
for source in basic.c stranger.c ends.c forked.c driver.c pools.c planted.c; do
    gcc -std=c11 -O2 -pthread -I capi/include "capi/tests/c/$source" "$out/tests/c/libcualloc.so.0.1" -ldl \
        -Wl,-rpath,'$ORIGIN' -o "$out/tests/c/${source%.c}"
done
g++ -std=c++17 -O2 -I capi/include capi/tests/c/face.cpp "$out/tests/c/libcualloc.so.0.1" -Wl,-rpath,'$ORIGIN' \
    -o "$out/tests/c/face"
for trace in "$@"; do
    if [ -d "$trace" ]; then
        cp "$trace"/*.csv.gz "$out/traces/"
    else
        cp "$trace" "$out/traces/"
    fi
done
# The paths that the programs were built with: the scratch folder, the command.
{
    echo "root=$PWD"
    echo "command=$command"
    echo "built=$(git describe --always --dirty 2>/dev/null || echo unknown)"
} >"$out/paths"

# Without traces their folder is empty.
find "$out" -type f -size +64k -printf '%s %p\n' | sort -n |
    awk '{ printf "%8.2f MiB  %s\n", $1 / 1048576, $2 }'
# The programs have much in common, and copies of a tree are often bounded in size.
tar -C "$out" -czf "$out/tests.tar.gz" tests
rm -rf "$out/tests"
total=$(du -sb "$out" | cut -f 1)
awk -v t="$total" 'BEGIN { printf "%8.2f MiB  in all, packed\n", t / 1048576 }'
if [ "$total" -gt "$limit" ]; then
    echo "more than $((limit >> 20)) MiB: give fewer traces" >&2
    exit 1
fi
