#!/bin/bash
# run.sh BUILD_DIR        each fuzz target for FUZZ_SECONDS (60), one after the other; FUZZ_TARGETS="shard yaml" picks some
# run.sh BUILD_DIR merge  leaves in corpus/ the fewest inputs that reach what the corpus and earlier runs have reached
#
# What a run finds lies in BUILD_DIR/findings, new inputs in BUILD_DIR/corpus.  The last line counts; the exit status is 0 only
# where every target ran and found nothing.  A finding goes, once mended, into corpus/TARGET under a name that says what it was.
set -u
here=$(cd "$(dirname "$0")" && pwd)
build=$(cd "$1" && pwd) || exit 2
mode=${2:-run}
seconds=${FUZZ_SECONDS:-60}
targets=${FUZZ_TARGETS:-$(cd "$here" && ls fuzz_*.c fuzz_*.py 2>/dev/null | sed -E 's/^fuzz_(.*)\.(c|py)$/\1/')}
python=${FOREBAY_PYTHON:-$here/../../.venv/bin/python}
input_size_max=4096

# In memory, and gone whatever ends the run.
FUZZ_TMP=$(mktemp -d -p /dev/shm forebay-fuzz.XXXXXX)
export FUZZ_TMP
trap 'rm -rf "$FUZZ_TMP"' EXIT
export ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1:${ASAN_OPTIONS:-}
export UBSAN_OPTIONS=print_stacktrace=1:${UBSAN_OPTIONS:-}

# Leaves the target's output in the log, and its last word here.
fuzz() {
    local target=$1 corpus=$build/corpus/$1 log=$build/fuzz-$1.log
    mkdir -p "$corpus" "$build/findings"
    if [ -f "$here/fuzz_$target.py" ]; then
        "$python" "$here/fuzz_$target.py" --seconds "$seconds" --findings "$build/findings" >"$log" 2>&1
    else
        local dict=()
        [ -f "$here/dict/$target.dict" ] && dict=("-dict=$here/dict/$target.dict")
        "$build/fuzz/fuzz_$target" "${dict[@]}" -max_total_time="$seconds" -max_len=$input_size_max -timeout=10 -rss_limit_mb=2048 \
            -print_final_stats=1 -artifact_prefix="$build/findings/$target-" "$corpus" "$here/corpus/$target" >"$log" 2>&1
    fi
}

merge() {
    local target=$1 merged=$build/merged/$1
    [ -f "$here/fuzz_$target.py" ] && return
    rm -rf "$merged" && mkdir -p "$merged" "$build/corpus/$target"
    "$build/fuzz/fuzz_$target" -merge=1 -max_len=$input_size_max "$merged" "$here/corpus/$target" "$build/corpus/$target" \
        >"$build/merge-$target.log" 2>&1 || return
    # Inputs with names of their own are regression tests, and stay whatever they reach.
    find "$here/corpus/$target" -type f -regextype posix-extended -regex '.*/[0-9a-f]{40}' -delete
    for input in "$merged"/*; do
        [ -f "$input" ] && cp -n "$input" "$here/corpus/$target/$(sha1sum "$input" | cut -d' ' -f1)"
    done
    echo "$target: $(ls "$here/corpus/$target" | wc -l) inputs, $(cat "$here/corpus/$target"/* | wc -c) bytes"
}

failed=0 passed=0
for target in $targets; do
    if [ "$mode" = merge ]; then
        merge "$target" || failed=$((failed + 1))
    elif fuzz "$target"; then
        passed=$((passed + 1))
        echo "ok    $target: $(grep -E 'stat::number_of_executed_units|^Done|^[0-9]+ inputs' "$build/fuzz-$target.log" | tail -n 1)"
    else
        failed=$((failed + 1))
        echo "FOUND $target: see $build/fuzz-$target.log"
        grep -E 'ERROR|not so|SUMMARY|Test unit written|finding' "$build/fuzz-$target.log" | tail -n 5
    fi
done
[ "$mode" = merge ] || echo "$passed passed, $failed failed"
[ $failed = 0 ]
