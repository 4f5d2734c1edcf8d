#!/bin/sh
# bundle.sh BUILD_DIR OUT_DIR - a folder that runs from wherever it is put: the command, the libraries that a distribution
# may lack or have in another version, the CUDA plug-in if it was built, the Python package.  Not in it: libc, Python, the
# driver, CUDA and cuDNN.  Beside it OUT_DIR.tar.xz.
set -eu
build=$1
out=$2
rm -rf "$out"
cmake --install "$build" --prefix "$out" >/dev/null
private=$out/lib/forebay
# What the command needs, by the loader's own account, less what belongs to the C library.
ldd "$build/forebay" | awk '$2 == "=>" { print $3 }' | while read -r library; do
    case $(basename "$library") in
    libc.so* | libm.so* | libdl.so* | libpthread.so* | librt.so* | ld-linux*) ;;
    *) cp -L "$library" "$private/" ;;
    esac
done
rm -rf "$out/include" "$out/lib/pkgconfig"
find "$out/bin" "$out/lib" -type f -exec strip --strip-unneeded {} + 2>/dev/null || true
tar -C "$(dirname "$out")" -cJf "$out.tar.xz" "$(basename "$out")"
size=$(du -sm "$out" | cut -f1)
printf 'bundle: %s (%s MB unpacked), %s\n' "$out" "$size" "$out.tar.xz"
[ "$size" -lt 60 ] || { printf 'bundle: %s MB is more than the 60 it may have\n' "$size" >&2 && exit 1; }
