#!/usr/bin/env bash
# gpu-python.sh [WHEEL]: the Python package with real PyTorch, CuPy, RMM and JAX on a GPU.
#
# WHEEL is what `bash python/build.sh --out .gpu` has built (the one in .gpu by default). It is unpacked into a temporary
# folder, so nothing is installed, and nothing is fetched. Programs run with PyTorch's own allocator and with ours:
# losses must be the same bit by bit, unless they differ between two runs of PyTorch's own. What a machine lacks (a
# second GPU, CuPy, JAX, RMM) is SKIPPED. About ten minutes on one GPU. Exit code 0 only if all went well.
#
#   CUALLOC_GPU_LOGS         folder for the whole output of each program (else a temporary one)
#   CUALLOC_FIRST_CAPTURES   how many processes have a first capture beside threads that allocate (1000)
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
wheel=${1:-$(ls .gpu/cualloc-*.whl 2>/dev/null | tail -n 1)}
if [ ! -f "$wheel" ]; then
    echo "no wheel: build it with python/build.sh --out .gpu" >&2
    exit 2
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
logs=${CUALLOC_GPU_LOGS:-$scratch/logs}
mkdir -p "$logs"
python=$(command -v python3)
if ! "$python" -m pip install -q --no-index --no-deps --target "$scratch/packages" "$wheel" 2>"$logs/pip"; then
    cat "$logs/pip"
    exit 1
fi
export PYTHONPATH=$scratch/packages PYTHONDONTWRITEBYTECODE=1
unset CUALLOC_CONFIG CUALLOC_DRIVER PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF
"$python" - <<'END' || exit 1
import sys, torch
print("Python", sys.version.split()[0], "PyTorch", torch.__version__, torch.cuda.get_device_name(0), torch.cuda.device_count(), "GPU")
END
failures=0
failed() {
    failures=$((failures + 1))
    echo "--- $1 FAILED"
    tail -n 40 "$logs/$1"
}

# One after the other: their times are compared.
for work in train conv streams generate; do
    for allocator in native cualloc; do
        name=$work-$allocator
        timeout 100 "$python" python/tests/gpu_torch.py "$allocator" "$work" >"$logs/$name" 2>&1 </dev/null ||
            failed "$name"
        grep '^{' "$logs/$name" >>"$scratch/figures"
    done
done
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -gt 1 ]; then
    for allocator in native cualloc; do
        timeout 100 "$python" -m torch.distributed.run --standalone --nproc-per-node 2 python/tests/gpu_ddp.py \
            "$allocator" >"$logs/ddp-$allocator" 2>&1 </dev/null || failed "ddp-$allocator"
        grep '^{' "$logs/ddp-$allocator" >>"$scratch/figures"
        timeout 100 "$python" python/tests/gpu_two.py "$allocator" >"$logs/two-$allocator" 2>&1 </dev/null ||
            failed "two-$allocator"
        timeout 100 "$python" -m torch.distributed.run --standalone --nproc-per-node 2 python/tests/gpu_two.py \
            "$allocator" >"$logs/ranks-$allocator" 2>&1 </dev/null || failed "ranks-$allocator"
        grep -h '^{' "$logs/two-$allocator" "$logs/ranks-$allocator" >>"$scratch/subclass"
    done
else
    echo "SKIPPED: work on two GPUs, with one"
fi
cat "$scratch/figures"
cat >"$scratch/compare.py" <<'END'
import json, subprocess, sys

rows = {}
for line in open(sys.argv[1]):
    row = json.loads(line)
    rows[row["work"], row["allocator"]] = row
wrong = []
for work, allocator in list(rows):
    if allocator != "cualloc" or (work, "native") not in rows:
        continue
    ours, native = rows[work, allocator], rows[work, "native"]
    same = "the same losses"
    if ours["losses"] != native["losses"]:
        same = "OTHER LOSSES"
        if not work.startswith("ddp"):
            again = [sys.executable, "python/tests/gpu_torch.py", "native", work]
            said = subprocess.run(again, capture_output=True, text=True).stdout
            if json.loads(said)["losses"] != native["losses"]:
                same = "other losses, as between two native runs"
        if same.isupper():
            wrong.append(f"{work}: other losses")
    if ours.get("check") != "clean":
        wrong.append(f"{work}: the check did not pass")
    # On several streams memory is bounded by what work in flight still uses.
    ratio, bound, of = (ours["active_ratio"], 1.07, "active") if work == "streams" else (ours["ratio"], 1.03, "requested")
    if native["requested_MiB"] >= 1024 and ratio > bound:
        wrong.append(f"{work}: expected at most {bound} times the {of} bytes, found {ratio}")
    time = ours["step_ms"] / native["step_ms"]
    slow = ", SLOWER" if time > 1.05 else ""
    print(
        f"{work:<10} {same}; holds {ours['reserved_MiB']} MiB, native {native['reserved_MiB']}; "
        f"{ours['ratio']} of what was asked for; step {ours['step_ms']} ms, native {native['step_ms']} ({time:.3f}{slow})"
    )
print(*wrong, sep="\n")
sys.exit(1 if wrong else 0)
END
"$python" "$scratch/compare.py" "$scratch/figures" || failures=$((failures + 1))

# What only the subclass of PyTorch's allocator class supports: both allocators must compute the same values, and the
# reserved bytes are printed. Most of the time is spent on compilation, so both allocators run at the same time.
for allocator in native cualloc; do
    TORCHINDUCTOR_CACHE_DIR=$scratch/inductor-$allocator timeout 300 "$python" python/tests/gpu_subclass.py "$allocator" \
        >"$logs/subclass-$allocator" 2>&1 </dev/null || touch "$scratch/subclass-$allocator.failed" &
done
wait
for allocator in native cualloc; do
    [ ! -e "$scratch/subclass-$allocator.failed" ] || failed "subclass-$allocator"
    grep '^{"work"' "$logs/subclass-$allocator" >>"$scratch/subclass"
done
cat >"$scratch/rows.py" <<'END'
"""The rows of the file that the first argument names, by work and allocator."""

import json, sys

rows = {}
for line in open(sys.argv[1]):
    row = json.loads(line)
    rows.setdefault(row["work"], {})[row["allocator"]] = row
END
cat >"$scratch/compare_subclass.py" <<'END'
import sys
from rows import rows
wrong = []
for work, row in rows.items():
    ours, native = row.get("cualloc", {}), row.get("native", {})
    apart = {"allocator", "reserved_MiB", "step_ms", "check"}
    other = [key for key in native if key not in apart and ours.get(key) != native[key]]
    if not ours or not native or "error" in ours or "check" in ours or other:
        wrong.append(f"{work}: {ours.get('error') or ours.get('check') or f'other than native: {other}'}")
    print(f"{work:<18} reserved {ours.get('reserved_MiB')} MiB, native {native.get('reserved_MiB')}")
print(*wrong, sep="\n")
sys.exit(1 if wrong or not rows else 0)
END
"$python" "$scratch/compare_subclass.py" "$scratch/subclass" || failures=$((failures + 1))

# Tensors sent to other processes, which the subclass supports.
timeout 400 "$python" python/tests/gpu_share.py >"$logs/share" 2>&1 </dev/null || failed share
grep '^{' "$logs/share" || failed share

# Buffers, with what is installed of NumPy, PyTorch and CuPy.
timeout 300 "$python" python/tests/gpu_buffer.py >"$logs/buffer" 2>&1 </dev/null || failed buffer
grep -E '^[a-z_]+: ' "$logs/buffer" || failed buffer

# Growable ranges in a decode loop.
for program in tests/gpu_decode examples/decode; do
    name=$(basename "$program")
    timeout 200 "$python" "python/$program.py" >"$logs/$name" 2>&1 </dev/null || failed "$name"
    cat "$logs/$name"
done
# Five models with graph trees: losses, memory and times of a step beside two native processes.
timeout 300 "$python" python/tests/gpu_models.py >"$logs/models" 2>&1 </dev/null || failed models
grep '^{' "$logs/models" || failed models

# CUDA graphs: the same values, and what is held at most no more than the best of PyTorch's own two ways. Peaks are
# asked of the driver, so one runs after the other.
for work in callables shared decode; do
    for allocator in native reuse cualloc; do
        name=graphs-$work-$allocator
        timeout 150 "$python" python/tests/gpu_graphs.py "$allocator" "$work" >"$logs/$name" 2>&1 </dev/null ||
            failed "$name"
        grep '^{' "$logs/$name" | tee -a "$scratch/graphs"
    done
done
cat >"$scratch/compare_graphs.py" <<'END'
import sys
from rows import rows
wrong = []
for work, row in rows.items():
    if not row.keys() >= {"native", "cualloc"}:
        continue
    ours, native, best = row["cualloc"], row["native"], min(row.values(), key=lambda one: one["peak_MiB"])
    same = "the same values" if ours["values"] == native["values"] else "OTHER VALUES"
    if same.isupper() or ours.get("check") != "clean":
        wrong.append(f"{work}: {same}, check {ours.get('check')}")
    if work == "graphs-decode" and ours["peak_MiB"] > best["peak_MiB"]:
        wrong.append(f"{work}: holds {ours['peak_MiB']} MiB, and {best['allocator']} {best['peak_MiB']}")
    peaks = ", ".join(f"{name} {one['peak_MiB']}" for name, one in row.items())
    times = ", ".join(f"{name} {one['capture_ms']} and {one['replay_ms']}" for name, one in row.items())
    print(f"{work:<16} {same}; MiB at most: {peaks}; ms of all captures and of a replay: {times}")
print(*wrong, sep="\n")
sys.exit(1 if wrong else 0)
END
"$python" "$scratch/compare_graphs.py" "$scratch/graphs" || failures=$((failures + 1))

# Several at a time: they wait for the interpreter's start most of the time.
edge() {
    timeout 400 "$python" "python/tests/$1.py" "$2" >"$logs/$2" 2>&1 </dev/null
    echo $? >"$scratch/$2.code"
}
# Those of graphs look at what the device has left, and the others fill it, so they are alone.
cases=
# listed PROGRAM: its cases. A program that names none has failed.
listed() {
    "$python" "python/tests/$1.py" --list 2>"$logs/$1-list" | grep . || touch "$scratch/unlisted-$1"
}
for program in gpu_graphs gpu_beside; do
    for name in $(listed "$program"); do
        edge "$program" "$name"
        cases="$cases $name"
    done
done
edges=$(listed gpu_edges)
for name in $edges; do
    while [ "$(jobs -rp | wc -l)" -ge 8 ]; do wait -n; done
    edge gpu_edges "$name" &
done
wait
cases="$cases $edges"
for name in $cases; do
    if [ "$(cat "$scratch/$name.code")" = 0 ] && grep -qx well "$logs/$name"; then
        echo "$name: $(grep -E '^SKIPPED|^[0-9]+ ' "$logs/$name" || echo well)"
    else
        failed "$name"
    fi
done
for program in gpu_graphs gpu_beside gpu_edges; do
    [ ! -e "$scratch/unlisted-$program" ] || failed "$program-list"
done
if [ "$failures" -gt 0 ]; then
    echo "$failures failed"
    exit 1
fi
echo "all passed in $SECONDS s"
