"""bench/cpu_vs_torch.py with stand-ins for both sides: what it makes of their logs."""
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench/cpu_vs_torch.py"

# Each answers the way its original does: forebay train CONFIG, python -c ..., python torch_step.py train ... LOG STEPS ...
SIDE = """#!{python}
import json, sys
from pathlib import Path
arguments = sys.argv[1:]
if arguments[0] == "-c":
    sys.exit()
if "model" in arguments:
    sys.exit()
if arguments[0] == "train":
    config = dict(line.split(": ", 1) for line in Path(arguments[1]).read_text().splitlines())
    log, n_step = Path(json.loads(config["output_dir"])) / "trainer_log.jsonl", int(config["max_steps"])
    log.parent.mkdir(exist_ok=True)
else:
    log, n_step = Path(arguments[4]), int(arguments[5])
seconds = {seconds}
with open(log, "w") as out:
    for step in range(n_step):
        print(json.dumps({{"loss": {loss}, "step_time": 9 if step < 2 else seconds[step - 2]}}), file=out, flush=True)
print("a side of {loss}")
"""


def run(tmp_path, ours, torch, *more):
    command = [sys.executable, BENCH, "--steps", "5", "--rounds", "1", "--threads", "1", "--len", "8", *more]
    for option, name, (seconds, loss) in (("--forebay", "ours", ours), ("--torch-python", "torch", torch)):
        side = tmp_path / name
        side.write_text(SIDE.format(python=sys.executable, seconds=seconds, loss=loss))
        side.chmod(0o755)
        if option not in more:
            command += [option, side]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_last_line_is_the_ratio_of_the_medians_after_warm_up(tmp_path):
    done = run(tmp_path, ([3.0, 2.0, 7.0], 4.0), ([4.0, 1.0, 5.0], 4.0))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ratio 0.75 (forebay 3.00 s, torch 4.00 s)"
    # Four rows of 4 to 8 tokens are 8 + 7 + 6 + 4; all 8 long they are 32.
    assert "4 rows of 4 to 8 tokens, 25 in all" in done.stdout
    assert "4 rows of 8 to 8 tokens, 32 in all" in done.stdout


def test_steps_whose_losses_differ_are_not_compared(tmp_path):
    done = run(tmp_path, ([1.0, 1.0, 1.0], 4.0), ([1.0, 1.0, 1.0], 4.1))
    assert done.returncode == 1
    assert "the losses differ" in done.stderr
    assert "ratio" not in done.stdout


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--torch-python", "no-such-python", "name an interpreter that has torch with --torch-python"),
        ("--torch-python", "false", "cannot import torch and transformers"),
        ("--forebay", "no-such-forebay", "no such command; build it with make"),
        ("--threads", "100000", "ask for fewer"),
        ("--steps", "2", "expected more than 2 steps"),
    ],
)
def test_what_is_missing_is_named(tmp_path, option, value, sentence):
    done = run(tmp_path, ([1.0], 1.0), ([1.0], 1.0), option, value)
    assert done.returncode != 0
    assert sentence in done.stderr
