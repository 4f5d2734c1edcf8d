"""A small model trained from scratch on real text: bfloat16 on the GPU against float32 on the CPU.

  python tests/gpu/curve.py TEXT_FILE WORK_DIR [STEPS]     $FOREBAY: the command (default build/forebay)

The text goes in as bytes.  Prints both curves where they were logged, the largest relative distance of the smoothed losses,
and the most that the GPU run held in host and device memory in steps 40 to 100 and in the last 60.  Exit 1: a curve is more
than 1% off, or memory grew."""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from fb_checkpoint import make_model  # noqa: E402

FOREBAY = Path(os.environ.get("FOREBAY", ROOT / "build" / "forebay"))
ROW, ROWS_A_STEP, SMOOTH = 256, 8, 10


def write_rows(text, path, n):
    data = text.read_bytes()[: n * ROW]
    path.write_text("".join(json.dumps({"input_ids": list(data[i:i + ROW])}) + "\n" for i in range(0, len(data) - ROW + 1, ROW)))


def gpu_bytes():
    used = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True,
                          text=True)
    return int(used.stdout.split()[0]) << 20


def train(out, model, rows, steps, **more):
    config = dict(model_name_or_path=model, dataset=rows, output_dir=out, stage="sft", cutoff_len=ROW, save_strategy="no",
                  logging_steps=1, per_device_train_batch_size=ROWS_A_STEP, learning_rate="1e-3", lr_scheduler_type="cosine",
                  warmup_steps=20, max_steps=steps, max_grad_norm="1.0", **more)
    log = out / "trainer_log.jsonl"
    child = subprocess.Popen([FOREBAY, "train", write_config(out, config)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                             text=True)
    held = []
    while child.poll() is None:
        n = len(log.read_text().splitlines()) if log.exists() else 0
        status = Path(f"/proc/{child.pid}/status").read_text() if child.poll() is None else ""
        rss = [int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon")]
        if rss:
            held.append((n, rss[0], gpu_bytes()))
        time.sleep(0.01)
    assert child.returncode == 0, child.stderr.read()
    return np.array([json.loads(line)["loss"] for line in log.read_text().splitlines() if '"loss"' in line]), held


def write_config(out, config):
    out.mkdir(parents=True, exist_ok=True)
    path = out.with_suffix(".yaml")
    path.write_text("".join(f"{key}: {value}\n" for key, value in config.items()))
    return path


def smooth(curve):
    return np.convolve(curve, np.ones(SMOOTH) / SMOOTH, "valid")


def main():
    text, work, steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 300
    work.mkdir(parents=True, exist_ok=True)
    model = make_model(work / "model", hidden_size=256, intermediate_size=768, num_hidden_layers=4, vocab_size=256,
                       num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False)
    write_rows(text, work / "rows.jsonl", steps * ROWS_A_STEP)
    cpu, _ = train(work / "cpu", model, work / "rows.jsonl", steps, backend="cpu", compute_dtype="float32")
    gpu, held = train(work / "gpu", model, work / "rows.jsonl", steps, backend="cuda", compute_dtype="bfloat16")
    for step in sorted({0, *range(steps // 10 - 1, steps, steps // 10)}):
        print(f"step {step + 1:4}  cpu float32 {cpu[step]:.4f}  gpu bfloat16 {gpu[step]:.4f}")
    far = float(np.abs(smooth(gpu) / smooth(cpu) - 1).max())
    print(f"largest distance of the losses, smoothed over {SMOOTH} steps: {100 * far:.3f}%; "
          f"unsmoothed {100 * np.abs(gpu / cpu - 1).max():.3f}%")
    early, late = ([h[1:] for h in held if first <= h[0] < last] for first, last in ((40, 100), (steps - 60, steps)))
    assert len(early) >= 2 and len(late) >= 2, held
    most = [tuple(max(column) for column in zip(*part)) for part in (early, late)]
    print(f"held at most, host and device MiB: steps 40 to 100 {[b / 2**20 for b in most[0]]} ({len(early)} looks), "
          f"last 60 {[b / 2**20 for b in most[1]]} ({len(late)} looks)")
    grown = [end - begin for begin, end in zip(*most)]
    sys.exit(far > 0.01 or cpu[-1] > 0.8 * cpu[0] or max(grown) > 1 << 20)


main()
