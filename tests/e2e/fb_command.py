"""Run the command as a user does, and read what it leaves behind."""
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "ref" / "golden"
FOREBAY = Path(os.environ.get("FOREBAY", ROOT / "build" / "forebay")).resolve()
GOLDEN_DUMP = FOREBAY.parent / "tests" / "golden_dump"
HANG_SECONDS = 300      # a guard against a dead lock, not a measure of speed
IGNORED = -100


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def last(self):
        """The last line of standard error, where the error sentence stands."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        return lines[-1] if lines else ""


def run(program, *args, env=None):
    done = subprocess.run([str(program), *map(str, args)], capture_output=True, text=True, timeout=HANG_SECONDS,
                          env={**os.environ, **(env or {})})
    return Result(done.returncode, done.stdout, done.stderr)


def forebay(*args, env=None):
    return run(FOREBAY, *args, env=env)


def write_yaml(path, options):
    """One line a key.  Strings are written bare, as people do: `save_strategy: no`, `learning_rate: 3e-3`."""
    def text(value):
        return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    Path(path).write_text("".join(f"{key}: {text(value)}\n" for key, value in options.items()))
    return path


def options(model, dataset, out, **more):
    """A run whose every bit is fixed, in float32 on the CPU; `more` overrides, None leaves a key out."""
    base = dict(model_name_or_path=model, dataset=dataset, output_dir=out, stage="sft", backend="cpu",
                compute_dtype="float32", save_dtype="float32", save_strategy="no", disable_shuffling=True,
                packing=False, cutoff_len=512, logging_steps=1, num_train_epochs=1, per_device_train_batch_size=2,
                gradient_accumulation_steps=2, learning_rate="1e-3", lr_scheduler_type="cosine", warmup_steps=2,
                weight_decay=0.1, max_grad_norm="1.0")
    base.update(more)
    return {key: value for key, value in base.items() if value is not None}


def train(out, model, dataset, code=0, **more):
    """Trains into the folder `out`; the config lies beside it.  Returns the log's lines."""
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    config = write_yaml(out.parent / (out.name + ".yaml"), options(model, dataset, out, **more))
    result = forebay("train", config)
    assert result.code == code, f"exit {result.code}, expected {code}\n{result.out}\n{result.err}"
    return read_log(out)


def read_log(out):
    path = Path(out) / "trainer_log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps(log):
    """The lines of optimizer steps, without those of evaluations."""
    return [line for line in log if "loss" in line]


def write_rows(path, rows):
    """rows: (input_ids, labels); labels None: everything is learned."""
    lines = [json.dumps(dict(input_ids=list(ids)) if labels is None else
                        dict(input_ids=list(ids), labels=list(labels))) for ids, labels in rows]
    Path(path).write_text("".join(line + "\n" for line in lines))
    return path


def read_rows(path):
    return [(row["input_ids"], row.get("labels")) for row in map(json.loads, Path(path).read_text().splitlines())]


def learned(rows):
    return sum(label != IGNORED for ids, labels in rows for label in (ids if labels is None else labels)[1:])


def golden_dump(model, rows, out, packed=False):
    """First-step logits [tokens, vocab] and gradients from our engine, by a test driver beside the command:
    the rows of a file in their order, two a micro-batch, or, packed, all in one micro-batch laid end to end."""
    from fb_checkpoint import read_safetensors
    assert GOLDEN_DUMP.exists(), f"{GOLDEN_DUMP} is missing: build the tests first"
    result = run(GOLDEN_DUMP, model, rows, out, *(["--packed"] if packed else []))
    assert result.code == 0, result.err
    return read_safetensors(out)


def distance(a, b):
    """Norm of the difference over the norm."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def torch_python():
    """A Python with torch and transformers, or None: ours does not need them."""
    python = os.environ.get("FOREBAY_TORCH_PYTHON", "python3")
    try:
        found = subprocess.run([python, "-c", "import torch, transformers"], capture_output=True, timeout=HANG_SECONDS)
    except OSError as error:
        assert "FOREBAY_TORCH_PYTHON" not in os.environ, f"FOREBAY_TORCH_PYTHON: {error}"
        return None
    assert found.returncode == 0 or "FOREBAY_TORCH_PYTHON" not in os.environ, found.stderr.decode()
    return python if found.returncode == 0 else None


def cpu_has(flag):
    if sys.platform != "linux":
        return False
    return any(line.startswith("flags") and f" {flag} " in line + " " for line in open("/proc/cpuinfo"))
