#!/usr/bin/env bash
# Builds the wheel of the Python package, which needs neither PyTorch nor CUDA:
#
#   bash python/build.sh [--out DIR] [--features LIST] [--debug] [--any-glibc] [--torch DIR]...
#
# --torch adds the library for one build of PyTorch, from 2.9 on, so that users of that build need no compiler: DIR is a
# folder with its unpacked wheel and those of nvidia-cuda-runtime and nvidia-cuda-crt, as site-packages is.
#
# --out is target/wheels unless it is given. The wheel is for glibc 2.28 and later (manylinux_2_28), and the build fails
# where the libraries need a later one: those that a compiler here links against its own glibc mostly do, so zig links
# if it is there (`pip install ziglang`). With --any-glibc the wheel is tagged with the version that it needs. --debug
# is for tests, and so is --features sim. Linux, with Rust, g++ and binutils.
set -euo pipefail
cd "$(dirname "$0")/.."
out=target/wheels features= profile=release any= torches=()
while [ $# -gt 0 ]; do
    case $1 in
    --out) out=$2 && shift ;;
    --features) features=$2 && shift ;;
    --debug) profile=dev ;;
    --any-glibc) any=1 ;;
    --torch) torches+=("$2") && shift ;;
    *) sed -n '4s/^# *//p' "$0" >&2 && exit 2 ;;
    esac
    shift
done
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
machine=$(uname -m)
oldest=2.28

cargo build -q --profile "$profile" -p cualloc-capi ${features:+--features "$features"}
built=${CARGO_TARGET_DIR:-target}/${profile/dev/debug}
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
cp -r python/cualloc "$stage/cualloc"
cp capi/include/cualloc.h "$stage/cualloc"
rm -rf "$stage/cualloc/__pycache__"
libraries=("$stage/cualloc/libcualloc.so" "$stage/cualloc/libcualloc_torch.so")

# The static library is linked anew, since cargo's link is against the glibc of this machine.
if python3 -m ziglang version >/dev/null 2>&1; then
    link=(python3 -m ziglang cc -target "$machine-linux-gnu.$oldest" -lunwind)
else
    link=(gcc -lgcc_s)
fi
soname=$(readelf -dW "$built/libcualloc_capi.so" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p')
{
    echo '{ global:'
    sed 's/$/;/' capi/symbols.txt
    echo 'local: *; };'
} >"$stage/exports"
mapfile -t wanted < <(sed 's/^/-Wl,-u,/' capi/symbols.txt)
"${link[@]}" -shared -o "${libraries[0]}" "-Wl,-soname,$soname,-z,nodelete,-z,defs,--gc-sections" \
    "-Wl,--version-script=$stage/exports" "${wanted[@]}" "$built/libcualloc_capi.a" "${link[-1]}" -ldl -lpthread -lm
compile=(g++ -std=c++17 -O2 -Wall -Wextra -Werror -fPIC -fvisibility=default -I capi/include)
"${compile[@]}" -D_GLIBCXX_USE_CXX11_ABI=0 -c python/companion_strings.cpp -o "$stage/strings.o"
"${compile[@]}" -shared python/companion.cpp "$stage/strings.o" "${libraries[0]}" -Wl,-z,nodelete,-z,defs \
    -o "${libraries[1]}"
rm "$stage/strings.o"
for site in ${torches[@]+"${torches[@]}"}; do
    git_version=$(sed -n "s/^git_version = '\(.*\)'/\1/p" "$site/torch/version.py")
    # Wheels from 2.7 on have strings of C++11.
    libraries+=("$stage/cualloc/torch-$git_version-cxx11.so")
    g++ -std=c++20 -O2 -w -fPIC -shared -fvisibility=hidden -I capi/include -isystem "$site/torch/include" \
        -isystem "$site/torch/include/torch/csrc/api/include" -isystem "$(echo "$site"/nvidia/cu[0-9]*/include)" \
        python/cualloc/torch_allocator.cpp "${libraries[0]}" -L"$site/torch/lib" -ltorch_cuda -lc10_cuda -lc10 \
        -Wl,-z,nodelete,--unresolved-symbols=ignore-all,--allow-shlib-undefined -o "${libraries[-1]}"
done
strip --strip-unneeded "${libraries[@]}"

# used PREFIX: the latest version of a library's interface that the two use.
used() { readelf -W --version-info "${libraries[@]}" | grep -o "Name: $1_[0-9.]*" | sed "s/.*_//" | sort -Vu | tail -n 1; }
glibc=$(used GLIBC) cxx=$(used GLIBCXX)
echo "symbols of glibc up to $glibc, of libstdc++ up to $cxx:"
readelf -W --version-info "${libraries[@]}" | grep -o 'Name: [A-Z]*_[0-9.]*' | sed 's/Name: //' | sort -Vu | xargs
later() { [ "$(printf '%s\n' "$1" "$2" | sort -V | tail -n 1)" != "$2" ]; }
if later "$glibc" "$oldest" || later "$cxx" 3.4.25; then
    if [ -z "$any" ]; then
        echo "that is later than glibc $oldest and libstdc++ 3.4.25: install ziglang, or build with --any-glibc" >&2
        exit 1
    fi
    later "$glibc" "$oldest" && oldest=$glibc
fi
mkdir -p "$out"
python3 python/wheel.py "$stage" "$version" "manylinux_${oldest/./_}_$machine" "$out"
