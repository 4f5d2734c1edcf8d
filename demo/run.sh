#!/bin/sh
# run.sh - fine-tunes SmolLM2-135M-Instruct on the Jargon File and shows that it learned.  `make demo` calls it.
# FOREBAY_DEMO_SHORT=1 makes four steps instead of 36, to see that everything works.
set -eu
cd "$(dirname "$0")/.."

python=.venv/bin/python
forebay=build/forebay
out=demo/out
model=$out/SmolLM2-135M-Instruct
tuned=$out/SmolLM2-jargon
config=demo/demo.yaml
question="What does 'userland' mean in hacker jargon?" # a held-out row
must_fall=0.2
short=
if [ -n "${FOREBAY_DEMO_SHORT:-}" ]; then
    short='max_steps=4 warmup_steps=1 logging_steps=1'
    must_fall=0.02
fi

step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
[ -t 1 ] || step() { printf '\n== %s\n' "$*"; }

# The number in the last line of `forebay eval`: "eval_loss: 2.3456 (1234 tokens)".
loss_in() { sed -n '$s/^eval_loss: \([0-9.]*\) .*/\1/p' "$1"; }

evaluate() { # FILE CONFIG-OVERRIDES...
    file=$1
    shift
    "$forebay" eval "$config" "$@" >"$file"
    tail -n 1 "$file"
    [ -n "$(loss_in "$file")" ] || { printf 'demo: no eval_loss in %s\n' "$file" >&2 && exit 1; }
}

ask() { # FILE MODEL_DIR
    "$forebay" generate "$2" "$question" max_new_tokens=60 temperature=0 >"$1"
}

show() { # LABEL FILE
    { cat "$2" && echo; } | tr '\n' ' ' | sed 's/ *$//' | fold -s -w 88 |
        sed "s/^/          /; 1s/^ */$(printf '%-10s' "$1")/"
    echo
}

step 'The model and the data'
if [ ! "$model/model.safetensors" -nt demo/convert_smollm2.py ]; then
    $python demo/convert_smollm2.py "$model"
fi
if [ ! "$out/jargon/eval.jsonl" -nt demo/make_jargon.py ]; then
    $python demo/make_jargon.py "$out/dictd" "$out/jargon"
fi
printf 'model     %s\nto learn  %s\nheld out  %s\n' "$model" "$out/jargon/train.jsonl" "$out/jargon/eval.jsonl"

step 'The plan: what the run will take'
# shellcheck disable=SC2086 # a list of words, here and below
"$forebay" plan "$config" $short

step 'Before training'
evaluate "$out/eval-before.txt"
ask "$out/answer-before.txt" "$model"
printf 'asked     %s\n' "$question"
show answered "$out/answer-before.txt"

step 'Training'
began=$(date +%s)
# shellcheck disable=SC2086
"$forebay" train "$config" $short
took=$(($(date +%s) - began))

step 'After training'
evaluate "$out/eval-after.txt" "model_name_or_path=$tuned"
ask "$out/answer-after.txt" "$tuned"
before=$(loss_in "$out/eval-before.txt")
after=$(loss_in "$out/eval-after.txt")

step "Held-out loss $before -> $after, $took s of training"
printf 'asked     %s\n' "$question"
show before "$out/answer-before.txt"
show after "$out/answer-after.txt"
cat <<END

The model is in $tuned; transformers' from_pretrained loads it.  Ask it yourself:

    $forebay generate $tuned "What does 'heisenbug' mean in hacker jargon?"

END
if ! awk -v before="$before" -v after="$after" -v fall="$must_fall" 'BEGIN { exit !(before - after >= fall) }'; then
    printf 'demo: the held-out loss should have fallen by at least %s; it did not\n' "$must_fall" >&2
    exit 1
fi
