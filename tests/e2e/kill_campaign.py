"""Kill runs at random moments and go on, until they are done: what is left must be, to the byte, what a run leaves that was never
stopped.   kill_campaign.py [MOMENTS [SEED]]   ($FOREBAY names the command)

About half of the moments are chosen inside a save: as soon as a half-written checkpoint is seen, and a random while later.  Every
start after a kill must go on from the newest checkpoint there is, and find no fault with any; placement, slots, threads, buffer and
save interval differ from start to start."""
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from fb_checkpoint import make_model, make_rows
from fb_command import FOREBAY, HANG_SECONDS, options, read_log, write_rows, write_yaml

STEPS = 24
TIMES = ("step_time", "tokens_per_second", "elapsed_time", "remaining_time")
KINDS = [dict(compute_dtype=dtype, max_grad_norm=norm, save_dtype=save)
         for dtype, norm, save in (("float32", "1.0", "float32"), ("bfloat16", "1.0", "bfloat16"), ("bfloat16", "0", "bfloat16"))]


def prepare(folder):
    """A model that is slow enough to be caught on the way, with a tokenizer file to carry along."""
    model = make_model(folder / "model", hidden_size=128, intermediate_size=256, vocab_size=1024, num_hidden_layers=6)
    (model / "tokenizer_config.json").write_text(json.dumps(dict(chat_template="none" * 100)))
    return dict(model=model, dataset=write_rows(folder / "rows.jsonl", make_rows(32, vocab=1024, length=(60, 100))),
                num_train_epochs=3, disable_shuffling=False, save_strategy="steps", save_total_limit=3, logging_steps=3)


def newest(out):
    found = [int(p.name.split("-")[1]) for p in out.glob("checkpoint-*") if not p.name.endswith(".tmp")]
    return max(found, default=None)


def half_written(out):
    return any(out.glob("checkpoint-*.tmp"))


def what_is_left(out):
    """Everything that may not depend on how often the run was killed, by name."""
    last = out / f"checkpoint-{STEPS}"
    files = {p.relative_to(out).as_posix(): p.read_bytes() for p in (*last.iterdir(), *out.glob("model*"), out / "config.json")
             if p.name not in ("manifest.json", "trainer_state.json")}
    for path in (last / "trainer_state.json", out / "trainer_state.json"):
        state = json.loads(path.read_text())
        state["forebay"].pop("elapsed")
        files[path.relative_to(out).as_posix()] = state
    files["log"] = [{k: v for k, v in line.items() if k not in TIMES} for line in read_log(out)]
    return files


def start(config):
    return subprocess.Popen([FOREBAY, "train", config], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_moment(process, out, rng, inside_save, seconds):
    """Returns when it is time to kill, or when the run ends by itself."""
    if not inside_save:
        try:
            process.wait(rng.uniform(0, seconds))
        except subprocess.TimeoutExpired:
            pass
        return
    skip = rng.randrange(4)                       # saves to let pass
    seen = False
    while process.poll() is None:
        now = half_written(out)
        skip -= now and not seen
        seen = now
        if now and skip < 0:
            time.sleep(rng.choice([0, rng.uniform(0, 0.004), rng.uniform(0, 0.03)]))
            return


class Campaign:
    def __init__(self, folder, seed=1, say=lambda text: None):
        self.folder, self.rng, self.say = Path(folder), random.Random(seed), say
        self.common = prepare(self.folder)
        self.count = Counter()
        self.wanted = {}

    def config(self, out, kind, **more):
        return write_yaml(out.parent / (out.name + ".yaml"), options(out=out, **{**self.common, **kind, **more}))

    def undisturbed(self, index):
        """What is to be left, and how long a run takes."""
        if index not in self.wanted:
            out = self.folder / f"whole-{index}"
            before = time.monotonic()
            process = start(self.config(out, KINDS[index], save_steps=4))
            text, _ = process.communicate(timeout=HANG_SECONDS)
            assert process.returncode == 0, text
            self.wanted[index] = what_is_left(out), time.monotonic() - before
        return self.wanted[index]

    def run(self, index, n_kill):
        """One run from its start to its end, killed at most n_kill times on the way.  Returns how often it was."""
        want, seconds = self.undisturbed(index)
        rng, killed = self.rng, 0
        out = self.folder / f"killed-{self.count['runs']}"
        self.count["runs"] += 1
        while True:
            expected = newest(out)
            config = self.config(out, KINDS[index], resume_from_checkpoint=True, save_steps=rng.choice([1, 2, 3, 4]),
                                 slots=rng.choice([2, 3, "all"]), update_threads=rng.choice([1, 2, 3]),
                                 save_buffer=rng.choice(["auto", "0", "2MiB"]),
                                 placement=rng.choice(["stream", "layers:2", "resident"]))
            process = start(config)
            if killed < n_kill:
                wait_for_moment(process, out, rng, rng.random() < 0.6, seconds)
                process.kill()
            text, _ = process.communicate(timeout=HANG_SECONDS)
            self.look_at_start(text, expected)
            if process.returncode == 0:
                break
            assert process.returncode == -9, text
            killed += 1
            self.count["kills"] += 1
            self.count["kills inside a save"] += half_written(out)
            self.count["kills before the first checkpoint"] += newest(out) is None
        left = what_is_left(out)
        assert left.keys() == want.keys(), left.keys() ^ want.keys()
        for name in want:
            assert left[name] == want[name], f"{out}: {name} differs"
        assert len(list(out.glob("checkpoint-*"))) <= 3
        self.say(f"run {self.count['runs']}: {KINDS[index]}, killed {killed} times, the same to the byte")
        return killed

    def look_at_start(self, text, expected):
        """A start that came as far as saying so went on from the newest checkpoint, and none was found damaged."""
        assert "passed over" not in text, text
        resumed = [line for line in text.splitlines() if "resumed from" in line]
        if resumed:
            assert f"checkpoint-{expected} " in resumed[0], (expected, text)
            self.count["restarts from the newest checkpoint"] += 1
        elif " step " in text or text.startswith("step "):
            assert expected is None, text


def main(moments=60, seed=1):
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(folder, seed, say=lambda text: print(text, flush=True))
        while campaign.count["kills"] < moments or campaign.count["kills inside a save"] < moments // 3:
            campaign.run(campaign.count["runs"] % len(KINDS), n_kill=12)
        for name, n in campaign.count.items():
            print(f"{n:5} {name}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
