#!/usr/bin/env bash
# Instructions of the hot operations, counted by callgrind on the simulator.
#
#   benches/instructions.sh [--check | --bless] [--all | NAME...]
#
# For each NAME (pairs and churn_op; with --all also those of front ends, of large blocks and of
# the churn's own loop) a line `NAME N`, N being instructions per operation, and a line with the file that callgrind
# wrote and both iteration counts; for pairs also `NAME.calls N`, the driver's calls per pair, every question included:
#
#   pair            allocate 4096 bytes and drop the block
#   pair_raw        the same with a stream handle in, a pointer out, and the free by pointer
#   pair_adopted    pair_raw on a stream that was adopted
#   pair_default    pair_raw on the legacy default stream, by the null handle
#   pair_after_capture     pair in a process in which other streams were captured, and none is
#   pair_recorded   pair while a recording runs, to rings in memory
#   pair_while_capturing   pair while another thread captures another stream
#   pair_captured   pair in a capture, out of a graph pool in which 256 blocks are live, with a node between
#   pair_captured_16, pair_captured_1024, pair_captured_after_16, pair_captured_after_64
#                   the same with so many live blocks, or after so many graphs were captured in the pool, which are kept;
#                   by name alone, and not recorded
#   churn_op        an allocation or a free: random ones of 4096 slots are filled where empty, else
#                   emptied, with 512 B to 64 KiB (logarithm uniform); the loop around it is included
#   churn_harness   that loop with blocks that cost nothing
#   churn_wide      the same with 2048 slots and up to 32 MiB, once views are found again
#   churn_after     churn_wide, after a second stream was used once
#   churn_equal     the same with 64 slots of 1 MiB each
#   streams_3, streams_4x2   an operation (allocation, record, or free by pointer) of a program whose blocks cross
#                   streams: of one thread with three streams, of four threads with two each; the driver's calls are
#                   those of 1000 operations, also by name, and NAME.held is the most that was held, in percent of
#                   the most that was asked for at a time
#   replay, replay_after   a row of a made-up program's second replay on one stream, the latter after other streams
#                   were used that are there still; replay_after_streams is the latter in percent of the former
#   stack, workspace, typed_pool   pairs of 4096 bytes through the front ends
#
# N is a difference: of two runs that differ in nothing but the number of operations, divided by it,
# so start, warm-up and end cancel out. Collection is switched off while a function of the simulated
# driver runs (all calls of the driver enter it through `cualloc::sim::table::shims`), so what the
# driver does is not counted, and what the allocator does to call it is. Everything else is: release
# profile, public API, statistics, generations and checks on, the C library as it is linked.
#
# --check fails if a figure is more than 5 % above the one in benches/instructions.txt (calls: if it is above), --bless
# writes that file. Counts depend on the compiler and the processor's architecture: bless with the compiler that is
# named there, or bless all.
set -euo pipefail
cd "$(dirname "$0")/.."

recorded=benches/instructions.txt
mode=show
names=()
some=(pair pair_raw pair_adopted pair_default pair_after_capture pair_recorded pair_while_capturing pair_captured churn_op)
every=("${some[@]}" churn_harness churn_wide churn_after churn_equal streams_3 streams_4x2 replay replay_after)
every+=(stack workspace typed_pool)
while [ $# -gt 0 ]; do
    case $1 in
    --check | --bless) mode=${1#--} ;;
    --all) names=("${every[@]}") ;;
    -*)
        sed -n '2,5s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
    *) names+=("$1") ;;
    esac
    shift
done
if [ ${#names[@]} -eq 0 ]; then
    names=("${some[@]}")
    [ $mode != bless ] || names=("${every[@]}")
fi
command -v valgrind >/dev/null || {
    echo "valgrind is not installed" >&2
    exit 2
}

target=${CARGO_TARGET_DIR:-target}
folder=$target/instructions
mkdir -p "$folder"
cargo build -q --release -p cualloc --example hot >&2

# count NAME ITERATIONS: runs under callgrind; prints the instructions of the whole run.
count() {
    local file=$folder/callgrind.$1.$2.out
    # In this order: the switch alone would begin with collection off, and count the driver only.
    if ! valgrind --tool=callgrind --callgrind-out-file="$file" \
        --toggle-collect='cualloc::sim::table::shims::*' --collect-atstart=yes \
        "$target/release/examples/hot" "$1" "$2" >"$file.calls" 2>"$file.log"; then
        cat "$file.log" >&2
        return 1
    fi
    sed -n 's/^totals: //p' "$file"
}

# difference WORD LONG SHORT: what both runs say behind a word, the longer one's less the other's; nothing if neither does.
difference() {
    awk -v word="$1" '$1 == word { value[FILENAME] = $2; any = 1 }
        END { if (any) print value[ARGV[1]] - value[ARGV[2]] }' "$2" "$3"
}

failed=0
figures=

# figure NAME N PERCENT: prints it, and checks that it is no more than so many percent above the recorded one.
figure() {
    figures+="$1 $2"$'\n'
    echo "$1 $2"
    [ $mode = check ] || return 0
    local before
    before=$(sed -n "s/^$1 //p" "$recorded")
    if [ -z "$before" ]; then
        echo "$1 is not in $recorded" >&2
        failed=1
    elif [ $(($2 * 100)) -gt $((before * (100 + $3))) ]; then
        echo "$1 grew from $before to $2, by more than $3 %" >&2
        failed=1
    fi
}

for name in "${names[@]}"; do
    case $name in
    churn_wide | churn_after) few=200000 many=400000 ;;
    churn*) few=20000 many=220000 ;;
    streams*) few=1000 many=3000 ;;
    replay*) few=1 many=2 ;;
    *) few=1000 many=11000 ;;
    esac
    # Both at once: neither disturbs the other's count.
    count "$name" "$few" >"$folder/few" &
    more=$(count "$name" "$many")
    wait $!
    less=$(<"$folder/few")
    said=("$folder/callgrind.$name".{"$many","$few"}.out.calls)
    operations=$(difference operations "${said[@]}")
    operations=${operations:-$((many - few))}
    exact=$(awk -v a="$less" -v b="$more" -v n="$operations" 'BEGIN { printf "%.2f", (b - a) / n }')
    figure "$name" "$(awk -v x="$exact" 'BEGIN { printf "%d", x + 0.5 }')" 5
    echo "# $folder/callgrind.$name.$many.out iterations $few $many exactly $exact"
    case $name in
    replay) replay=$exact ;;
    replay_after)
        [ -z "${replay:-}" ] ||
            figure replay_after_streams "$(awk -v a="$exact" -v b="$replay" 'BEGIN { printf "%d", 100 * a / b + 0.5 }')" 2
        ;;
    esac
    calls=$(difference calls "${said[@]}")
    held=$(sed -n 's/^held //p' "${said[0]}")
    if [ -n "$held" ]; then
        figure "$name.calls" $(((calls * 1000 + operations / 2) / operations)) 2
        figure "$name.held" "$held" 1
        for call in $(sed -n 's/^\(cu[^ ]*\) .*/\1/p' "${said[1]}"); do
            echo "# $name $call $(($(difference "$call" "${said[@]}") * 1000 / operations))"
        done
    elif [ -n "$calls" ]; then
        figure "$name.calls" $(((calls + operations / 2) / operations)) 0
    fi
done

if [ $mode = bless ]; then
    {
        echo "# Instructions per operation, as benches/instructions.sh --bless --all counted them:"
        echo "# $(uname -m), $(rustc --version), $(valgrind --version)"
        printf %s "$figures"
    } >"$recorded"
fi

exit $failed
