#!/usr/bin/env bash
# gpu-clients.sh [--cupy FOLDER] [--rmm FOLDER] [WHEEL]: CuPy's and RMM's own tests of memory and streams on cualloc.
#
# The folders are working copies of the two at the versions that are installed (CuPy 14.2: `tests/cupy_tests`, RMM 26.8:
# `python/rmm/rmm/tests`); the wheel is what `bash python/build.sh --out .gpu` has built (the one in .gpu by default).
# pytest is needed, and a GPU. Left out: tests with managed memory, which is none of ours, and CuPy's for a second GPU
# where there is none. Of CuPy that is in tests/cupy_tests: cuda_tests/test_{memory,memory_hook,stream}.py,
# cuda_tests/memory_hooks_tests, core_tests/test_{dlpack,ndarray_cuda_array_interface}.py; of RMM all that is Python.
# Exit code 0 only if all went well.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
cupy='' rmm=''
while [ $# -gt 1 ]; do
    case $1 in
    --cupy) cupy=$2 && shift 2 ;;
    --rmm) rmm=$2 && shift 2 ;;
    *) break ;;
    esac
done
wheel=${1:-$(ls .gpu/cualloc-*.whl 2>/dev/null | tail -n 1)}
if [ ! -f "$wheel" ] || [ -z "$cupy$rmm" ]; then
    sed -n '2s/^# *//p' "$0" >&2
    exit 2
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python=$(command -v python3)
"$python" -m pip install -q --no-index --no-deps --target "$scratch/packages" "$wheel" || exit 1
export PYTHONPATH=$scratch/packages:$PWD/python/tests/plugins${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
unset CUALLOC_CONFIG CUALLOC_DRIVER
CUPY_TEST_GPU_LIMIT=$(nvidia-smi -L | wc -l)
export CUPY_TEST_GPU_LIMIT
failures=0

# tests LIBRARY FOLDER TEST...: with the plugin of that name; it says at its end what we served.
tests() {
    local name=$1 folder=$2 log=$scratch/$1
    shift 2
    (cd "$folder" && timeout 300 "$python" -m pytest -q -rs -W ignore -p "cualloc_of_$name" -p no:cacheprovider "$@") \
        >"$log" 2>&1 </dev/null
    local status=$?
    tail -n 12 "$log"
    if [ "$status" != 0 ] || ! grep -q 'cualloc served [1-9][0-9]* blocks, the check is clean' "$log"; then
        failures=$((failures + 1))
        echo "--- $name FAILED (exit code $status)"
        grep -E '^(FAILED|ERROR|E  )' "$log" | head -n 40
    fi
}

if [ -n "$cupy" ]; then
    tests cupy "$cupy/tests" cupy_tests/cuda_tests/{test_memory.py,test_memory_hook.py,test_stream.py,memory_hooks_tests} \
        cupy_tests/core_tests/{test_dlpack.py,test_ndarray_cuda_array_interface.py}
fi
[ -z "$rmm" ] || tests rmm "$rmm/python/rmm/rmm" tests
[ "$failures" = 0 ] && echo "all passed in $SECONDS s"
exit "$failures"
