#!/bin/sh
# sanitize.sh [BUILD_DIR] - memcheck, initcheck and racecheck of compute-sanitizer on steps of a tiny model, in both dtypes.
#
# Three allowances for what the tools do not see, each covered in another way:
#   initcheck, bfloat16: what cuBLASLt stores by bulk copies counts as never written, so memory is filled beforehand; that nothing is
#     read before it is written shows in test_parity.py, where runs with different fillings have the same bits;
#   racecheck: products and cuDNN are left out (no_products.c says why); attention then takes our own kernels.
# Ends with one line a run, and exit 1 if any found something.
set -eu
build=$(cd "${1:-build}" && pwd)
cd "$(dirname "$0")/../ref/golden"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
head -n 2 qwen2-default/rows.jsonl >"$work/rows.jsonl"
mkdir "$work/nothing"
: >"$work/nothing/libcudnn.so.9"
found=0

# check TOOL DTYPE BACKEND [NAME=VALUE...]: variables of the program's environment
check() {
    tool=$1 dtype=$2 backend=$3
    shift 3
    if env "$@" compute-sanitizer --tool "$tool" --error-exitcode 9 "$build/tests/golden_dump" qwen2-default/model \
        "$work/rows.jsonl" "$work/dump.safetensors" "backend=$backend" "compute_dtype=$dtype" full_determinism=true \
        >"$work/log" 2>&1; then
        verdict=clean
    else
        verdict=FOUND
        found=1
        cat "$work/log"
    fi
    printf '%s %s %s: %s\n' "$tool" "$dtype" "$verdict" "$(grep SUMMARY "$work/log" | sed 's/=* *//')"
}

check memcheck float32 cuda
check memcheck bfloat16 cuda
check initcheck float32 cuda
check initcheck bfloat16 fault:poison=255
for dtype in float32 bfloat16; do
    check racecheck $dtype cuda "LD_PRELOAD=$build/tests/no_products.so" "LD_LIBRARY_PATH=$work/nothing:${LD_LIBRARY_PATH:-}"
done
exit $found
