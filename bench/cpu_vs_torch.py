#!/usr/bin/env python3
"""bench/cpu_vs_torch.py - the demo's training step against the same step in PyTorch, on the same cores.

    bench/cpu_vs_torch.py [--forebay build/forebay] [--torch-python PY] [--rows R] [--len L] [--steps N] [--rounds N]
                          [--threads N]

SmolLM2-135M's shape in float32, everything kept (recompute: none), rows of random ids that are all learned.  PyTorch's
side is bench/torch_step.py; its interpreter is --torch-python, $FOREBAY_TORCH_PYTHON or python3.  Two cases:

    padded  rows between L/2 and L long; PyTorch pads them to L, forebay computes no padding
    equal   rows all L long, so that PyTorch pads nothing and needs no mask: its best case, and the last line's

Rounds alternate: forebay alone, then PyTorch alone, each in a new process on the same N cores.  A round's first two
steps do not count.  Both log their losses; if these differ, it was not the same step, and the run fails.  On a machine
that is not idle wall time suffers from others, so CPU time is shown too, and how many cores others took meanwhile.
"""
import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO_MODEL = ROOT / "demo/out/SmolLM2-135M-Instruct"
TORCH_STEP = ROOT / "bench/torch_step.py"
VOCAB = 49152
LEARNING_RATE = 1e-5
WARM_UP = 2  # steps of a round that do not count
LOSS_TOLERANCE = 1e-4  # relative; float32 in another order gives 1e-7, another step's loss differs by more than 1e-2
UNSEEN = (math.nan,) * 3  # clocks at a moment that passed between two looks, as it does when steps take milliseconds
TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Timing:
    """Of one side in one case, over all rounds."""

    step: list = field(default_factory=list)  # seconds
    cpu: list = field(default_factory=list)  # CPU seconds a step, one figure a round
    others: list = field(default_factory=list)  # cores taken by other processes, one figure a round
    loss: list = field(default_factory=list)  # of the last round

    @property
    def median(self):
        return statistics.median(self.step)


def row_lengths(case, n_row, longest):
    if case == "equal" or n_row == 1:
        return [longest] * n_row
    return [longest - (longest // 2) * i // (n_row - 1) for i in range(n_row)]


def write_rows(path, lengths):
    draw = random.Random(42)
    with open(path, "w", encoding="utf-8") as out:
        for length in lengths:
            print(json.dumps({"input_ids": [draw.randrange(VOCAB) for _ in range(length)]}), file=out)


def write_config(path, options, model, rows, output):
    config = {
        "model_name_or_path": str(model),
        "dataset": str(rows),
        "output_dir": str(output),
        "overwrite_output_dir": True,
        "cutoff_len": options.len,
        "packing": False,
        "disable_shuffling": True,
        "per_device_train_batch_size": options.rows,
        "max_steps": options.steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0,
        "max_grad_norm": 1,
        "backend": "cpu",
        "compute_dtype": "float32",
        "slots": "all",
        "recompute": "none",
        "compute_threads": options.threads,
        "update_threads": options.threads,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in config.items()))


def process_cpu(pid):
    """CPU seconds of a process so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def machine_cpu():
    """CPU seconds that the machine's cores were busy so far, or taken by its host."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICK


def count_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def watch(command, log, n_step, timing):
    """Runs one side to its end.  CPU clocks are read when its log has WARM_UP lines and when it has n_step."""
    marks = {}
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            while child.poll() is None:
                n = count_lines(log)
                now = time.monotonic(), process_cpu(child.pid), machine_cpu()
                for mark in (WARM_UP, n_step):
                    if n >= mark and mark not in marks:
                        marks[mark] = now
                time.sleep(0.02)
        finally:
            child.kill()  # does nothing to a child that has ended
            child.wait()
        output.seek(0)
        text = output.read().strip()
    if child.returncode != 0:
        sys.exit(f"{command[0]} ended with exit status {child.returncode}:\n{text}")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    if len(lines) != n_step:
        sys.exit(f"{command[0]}: {len(lines)} steps logged, expected {n_step}")
    wall, cpu, machine = (end - begin for begin, end in zip(marks.get(WARM_UP, UNSEEN), marks.get(n_step, UNSEEN)))
    timing.step += [line["step_time"] for line in lines[WARM_UP:]]
    timing.cpu.append(cpu / (n_step - WARM_UP))
    timing.others.append(max(0.0, machine - cpu) / wall if wall else math.nan)
    timing.loss = [line["loss"] for line in lines]
    return text


def compare(case, options, model, folder):
    lengths = row_lengths(case, options.rows, options.len)
    rows, config, output = folder / f"{case}.jsonl", folder / f"{case}.yaml", folder / "out"
    ours_log, torch_log = output / "trainer_log.jsonl", folder / "torch.jsonl"
    write_rows(rows, lengths)
    write_config(config, options, model, rows, output)
    torch_command = [options.torch_python, str(TORCH_STEP), "train", str(model), str(rows), str(torch_log)]
    torch_command += [str(options.steps), str(options.threads), str(LEARNING_RATE)]
    ours, torch = Timing(), Timing()
    for _ in range(options.rounds):
        ours_log.unlink(missing_ok=True)
        torch_log.unlink(missing_ok=True)
        watch([options.forebay, "train", str(config)], ours_log, options.steps, ours)
        about = watch(torch_command, torch_log, options.steps, torch).splitlines()[-1]
    n_token, shape = sum(lengths), f"{len(lengths)} rows of {min(lengths)} to {max(lengths)} tokens"
    print(f"\n{case}: {shape}, {n_token} in all, {len(ours.step)} steps each; {about}")
    print(f"{'':10}{'median s':>10}{'min':>8}{'max':>8}{'tokens/s':>10}{'CPU s a step':>14}{'others, cores':>15}")
    for name, t in (("forebay", ours), ("torch", torch)):
        print(
            f"{name:10}{t.median:10.3f}{min(t.step):8.3f}{max(t.step):8.3f}{n_token / t.median:10.0f}"
            f"{statistics.median(t.cpu):14.3f}{statistics.median(t.others):15.2f}"
        )
    apart = max(abs(a - b) / b for a, b in zip(ours.loss, torch.loss))
    if not apart <= LOSS_TOLERANCE:  # nor when it is not a number
        sys.exit(f"the losses differ by {apart:.1e} of their size: not the same steps\n{ours.loss}\n{torch.loss}")
    print(f"losses {ours.loss[0]:.4f} to {ours.loss[-1]:.4f}, which differ by at most {apart:.1e} of their size")
    print(f"ratio {ours.median / torch.median:.2f} (forebay {ours.median:.2f} s, torch {torch.median:.2f} s)", flush=True)


def read_options():
    parser = argparse.ArgumentParser(description="The demo's training step against the same step in PyTorch.")
    parser.add_argument("--forebay", default=str(ROOT / "build/forebay"), help="the command to measure")
    parser.add_argument("--torch-python", default=os.environ.get("FOREBAY_TORCH_PYTHON", "python3"),
                        help="an interpreter with torch and transformers")
    parser.add_argument("--rows", type=int, default=4, help="rows in a step")
    parser.add_argument("--len", type=int, default=256, help="tokens in the longest row")
    parser.add_argument("--steps", type=int, default=8, help="steps in a round, the first two uncounted")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each side")
    parser.add_argument("--threads", type=int, default=2, help="cores, and threads of each side")
    options = parser.parse_args()
    if options.steps <= WARM_UP or min(options.rows, options.rounds, options.threads) < 1 or options.len < 4:
        parser.error(f"expected more than {WARM_UP} steps, rows of at least 4 tokens, at least one of all else")
    options.forebay = os.path.abspath(options.forebay)
    if not os.access(options.forebay, os.X_OK):
        parser.error(f"{options.forebay}: no such command; build it with make, or name it with --forebay")
    return options


def require_torch(python):
    try:
        found = subprocess.run([python, "-c", "import torch, transformers"], capture_output=True, text=True)
    except OSError as error:
        sys.exit(f"{python}: cannot be run ({error.strerror}); name an interpreter that has torch with --torch-python")
    if found.returncode != 0:
        reason = (found.stderr.strip().splitlines() or ["no reason given"])[-1]
        sys.exit(f"{python} cannot import torch and transformers ({reason}); name one that can with --torch-python or "
                 "$FOREBAY_TORCH_PYTHON")


def main():
    options = read_options()
    require_torch(options.torch_python)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < options.threads:
        sys.exit(f"{len(cores)} cores here, {options.threads} asked for with --threads; ask for fewer")
    os.sched_setaffinity(0, cores[: options.threads])  # both sides inherit it
    with tempfile.TemporaryDirectory(prefix="cpu_vs_torch-") as name:
        folder, model = Path(name), DEMO_MODEL
        if not (DEMO_MODEL / "model.safetensors").exists():
            model = folder / "model"
            subprocess.run([options.torch_python, str(TORCH_STEP), "model", str(model)], check=True)
        print(f"{model.name}, float32, on cores {cores[: options.threads]}", flush=True)
        for case in ("padded", "equal"):
            compare(case, options, model, folder)


if __name__ == "__main__":
    main()
