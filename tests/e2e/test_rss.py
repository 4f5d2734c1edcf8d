"""A long run holds no more memory at its end than it did soon after its start."""
import re
import subprocess
from pathlib import Path

from fb_command import FOREBAY, HANG_SECONDS, options, write_yaml

STEPS, EVERY, SETTLED = 2000, 50, 50
BOUND = 256 << 10       # bytes: an allocator's and the page cache's noise; a leak of 140 bytes a step shows


def resident(process):
    """Bytes, counted page by page: the sums in statm lag behind by as much as is looked for here."""
    text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    return 1024 * int(re.search(r"^Rss:\s+(\d+) kB", text, re.M)[1])


def test_resident_memory_is_flat(models, rows24, tmp_path):
    config = write_yaml(tmp_path / "run.yaml", options(
        models["tied"], rows24, tmp_path / "out", num_train_epochs=None, max_steps=STEPS, logging_steps=EVERY, slots=2,
        save_strategy="steps", save_steps=200, save_total_limit=2, eval_dataset=rows24, eval_strategy="steps", eval_steps=100))
    seen = {}
    process = subprocess.Popen([str(FOREBAY), "train", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        step = re.match(r"step (\d+)/\d+  loss", line)
        if step and int(step[1]) < STEPS:       # after the last the final model is written
            seen[int(step[1])] = resident(process)
    assert process.wait(HANG_SECONDS) == 0
    assert sorted(seen) == list(range(EVERY, STEPS, EVERY))
    growth = {step: held - seen[SETTLED] for step, held in seen.items() if step >= SETTLED}
    assert max(growth.values()) <= BOUND, list(growth.values())
