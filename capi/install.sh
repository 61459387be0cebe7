#!/bin/sh
# Builds the C library and installs it:
#
#   sh capi/install.sh [--prefix DIR] [--libdir DIR] [--includedir DIR] [--destdir DIR] [--features LIST] [--built DIR] [--no-strip]
#
# --prefix is /usr/local by default, and the libraries and headers go to lib and include below it. --destdir is put before
# all of them, for packages. --built takes the libraries from a folder instead of building them. Debug information is
# stripped, which makes the libraries several times smaller; --no-strip keeps it. Linux.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
prefix=/usr/local libdir= includedir= destdir= features= built= strip=strip
while [ $# -gt 0 ]; do
    case $1 in
    --prefix | --libdir | --includedir | --destdir | --features | --built)
        [ $# -gt 1 ] || { echo "$1 needs a value" >&2; exit 2; }
        case $1 in
        --prefix) prefix=$2 ;;
        --libdir) libdir=$2 ;;
        --includedir) includedir=$2 ;;
        --destdir) destdir=$2 ;;
        --features) features=$2 ;;
        --built) built=$2 ;;
        esac
        shift 2
        ;;
    --no-strip)
        strip=
        export CARGO_PROFILE_RELEASE_DEBUG=line-tables-only
        shift
        ;;
    *)
        sed -n '4s/^# *//p' "$0" >&2
        exit 2
        ;;
    esac
done
: "${libdir:=$prefix/lib}" "${includedir:=$prefix/include}"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$here/../Cargo.toml" | head -n 1)
# As build.rs names the library.
case $version in
0.*) suffix=${version%.*} ;;
*) suffix=${version%%.*} ;;
esac
if [ -z "$built" ]; then
    (cd "$here/.." && cargo build --release -p cualloc-capi ${features:+--features "$features"})
    built=${CARGO_TARGET_DIR:-$here/../target}/release
fi

mkdir -p "$destdir$libdir/pkgconfig" "$destdir$includedir"
install -m 755 "$built/libcualloc_capi.so" "$destdir$libdir/libcualloc.so.$version"
install -m 644 "$built/libcualloc_capi.a" "$destdir$libdir/libcualloc.a"
if [ -n "$strip" ] && command -v strip >/dev/null; then
    strip --strip-unneeded "$destdir$libdir/libcualloc.so.$version"
    strip --strip-debug "$destdir$libdir/libcualloc.a"
fi
# The run-time name, and the one that the linker looks for.
ln -sf "libcualloc.so.$version" "$destdir$libdir/libcualloc.so.$suffix"
ln -sf "libcualloc.so.$suffix" "$destdir$libdir/libcualloc.so"
for header in cualloc.h cualloc.hpp cualloc_rmm.hpp; do
    install -m 644 "$here/include/$header" "$destdir$includedir/$header"
done
sed -e "s|@prefix@|$prefix|" -e "s|@libdir@|$libdir|" -e "s|@includedir@|$includedir|" -e "s|@version@|$version|" \
    "$here/cualloc.pc.in" >"$destdir$libdir/pkgconfig/cualloc.pc"
echo "installed $destdir$libdir/libcualloc.so.$version"
