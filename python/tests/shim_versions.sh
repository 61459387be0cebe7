#!/usr/bin/env bash
# Compiles the subclass of PyTorch's allocator class against other versions of PyTorch, without a GPU:
#
#   bash python/tests/shim_versions.sh [VERSION...]
#
# VERSION is a version on PyPI (by default the oldest supported one and the newest). The script fetches its wheel, about
# 0.8 GiB, unpacks the headers and three libraries, and checks that these export each symbol of PyTorch that the result
# needs.
# Exit code 3: the wheels cannot be fetched.
set -euo pipefail
cd "$(dirname "$0")/../.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
versions=("$@")
if [ ${#versions[@]} -eq 0 ]; then
    newest=$(timeout 60 python3 -m pip index versions torch 2>/dev/null | sed -n '1s/torch (\(.*\))/\1/p')
    [ -n "$newest" ] || exit 3
    versions=(2.9.1 "$newest")
fi
fetch() { timeout 900 python3 -m pip download -q --no-deps --no-cache-dir --only-binary=:all: -d "$scratch/wheels" "$@" 2>&1; }
fetch 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-crt==13.0.*' || exit 3
for wheel in "$scratch"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$scratch/cuda"; done
failed=0
for version in "${versions[@]}"; do
    rm -rf "$scratch/wheels" "$scratch/torch"
    fetch "torch==$version" || exit 3
    python3 - "$scratch"/wheels/*.whl "$scratch" <<'END'
import sys
import zipfile

wheel = zipfile.ZipFile(sys.argv[1])
libraries = {f"torch/lib/lib{name}.so" for name in ("c10", "c10_cuda", "torch_cuda")}
wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.startswith("torch/include/") or name in libraries])
END
    root=$scratch/torch
    if ! g++ -std=c++20 -O1 -w -fPIC -shared -fvisibility=hidden -Icapi/include -isystem "$root/include" \
        -isystem "$root/include/torch/csrc/api/include" -isystem "$scratch/cuda/nvidia/cu13/include" \
        python/cualloc/torch_allocator.cpp -Wl,--unresolved-symbols=ignore-all -o "$scratch/made.so"; then
        echo "PyTorch $version: cannot compile torch_allocator.cpp"
        failed=1
        continue
    fi
    symbols() { nm -D "$@" | sed 's/@.*//' | awk '{ print $NF }' | sort -u; }
    symbols --undefined-only "$scratch/made.so" | grep '^_Z.*\(c10\|torch\)' >"$scratch/needed"
    symbols --defined-only "$root"/lib/*.so >"$scratch/exported"
    missing=$(comm -23 "$scratch/needed" "$scratch/exported")
    if [ -n "$missing" ]; then
        echo "PyTorch $version exports no" $missing
        failed=1
    else
        echo "PyTorch $version: compiled, and all $(wc -l <"$scratch/needed") symbols are exported"
    fi
done
exit $failed
