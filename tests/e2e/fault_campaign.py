"""Make one thing fail in each of many runs, go on from what is left, and compare with a run in which nothing failed.
fault_campaign.py [FAULTS [SEED [JOBS]]]   ($FOREBAY names the command; a build with sanitizers is told apart by itself)

The calls of a healthy run are counted first; then each kind of fault strikes at the first call of its kind, at the last, and in
between.  A run that was struck ends within 30 s, either with one sentence and a documented exit code, or as if nothing had been.
Every checkpoint that lies there is the healthy run's, to the byte; so is the model that the next start ends with, and nothing
half-written is left."""
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from fb_checkpoint import make_model, make_rows
from fb_command import FOREBAY, ROOT, options, write_rows, write_yaml

BOUND_SECONDS = 30
EXIT_CODES = {1, 2, 3, 4}
SANITIZER_EXIT = 99
KILLED = -9
RUNS = [dict(compute_dtype="float32", save_dtype="float32"), dict(compute_dtype="bfloat16", save_dtype="bfloat16"),
        dict(compute_dtype="bfloat16", save_dtype="float32", max_grad_norm="0"),
        dict(compute_dtype="bfloat16", save_dtype="bfloat16", placement="layers:1", passes=2, activations="host",
             accumulators="host"),
        dict(compute_dtype="bfloat16", save_dtype="bfloat16", placement="resident", max_grad_norm="0", save_buffer="0")]
RESUMED = len(RUNS)     # one more: the second of these, gone on with from checkpoint-2 and checkpoint-4
RUNS.append(RUNS[1])
VARIES = {"trainer_state.json", "manifest.json"}        # they hold the time that a run took
DYING_CHILD = """#!/bin/sh
exec 3<&0
"$REAL_PYTHON" "$@" <&3 &
sleep "$CHILD_LIVES"
kill -9 $!
wait $!
"""


@dataclass(frozen=True)
class Fault:
    kind: str               # what is counted in the table
    calls: str              # whose calls are counted: "device upload"; "" for none
    device: str = ""        # words with {n}, the call that is struck
    io: str = ""
    host: str = ""
    child: bool = False
    file_size: bool = False


@dataclass
class Verdict:
    fault: str
    outcome: str = ""
    complaints: list = field(default_factory=list)


def all_faults(counts, sanitized):
    made = [Fault(f"device, {op} fails", f"device {op}", device=f"fail={op}:{{n}}") for op in counts["device"]]
    made += [Fault(f"device, {op} is slow", f"device {op}", device=f"slow={op}:{{n}}")
             for op in ("upload", "download", "call", "sync", "matmul_nt", "grad_out", "event_wait_host") if op in counts["device"]]
    made += [Fault(f"file, {op} fails", f"io {op}", io=f"fail={op}:{{n}}") for op in counts["io"]]
    made += [Fault(f"file, {op} fails, {why}", f"io {op}", io=f"fail={op}:{{n}}:{why}")
             for op, why in (("write", "ENOSPC"), ("write", "EINTR"), ("read", "EINTR"), ("open", "EMFILE"), ("open", "EACCES"),
                             ("mkdir", "ENOSPC"), ("rename", "EROFS"), ("sync", "ENOSPC"), ("map", "ENOMEM"))]
    made += [Fault("file, the disk is full", "io write", io="full={n}"),
             Fault("file, a short write", "io write", io="short=write:{n}"),
             Fault("file, a short read", "io read", io="short=read:{n}"),
             Fault("file, all writes and reads short", "", io="short=write:0,short=read:0"),
             Fault("file, slow writes", "", io="slow=write:1500"), Fault("file, slow syncs", "", io="slow=sync:9000")]
    made += [Fault(f"power cut at {op}", f"io {op}", io=f"die={op}:{{n}}")
             for op in ("open", "write", "sync", "rename", "mkdir", "remove") for _ in range(2)]
    if not sanitized:       # a sanitizer's own allocator cannot be stood in for
        made += [Fault(f"host, {op} fails", f"host {op}", host=f"{op}:{{n}}") for op in counts["host"] for _ in range(2)]
    made += [Fault("the data's process dies", "", child=True)] * 2
    made += [Fault("file, its size is limited", "", file_size=True)] * 2
    return made


def positions(n, rng):
    """Calls to strike at, of n: the first, the last, and then ever finer in between, in an order that chance decides."""
    ends = [1, n]
    rng.shuffle(ends)
    start, golden, j = rng.random(), 0.6180339887498949, 0
    while True:
        if j % 3 == 0 and ends:
            yield ends.pop()
        else:
            yield 1 + int((start + golden * j) % 1 * n)
        j += 1


def is_sanitized(program):
    return "__asan_init" in subprocess.run(["nm", str(program)], capture_output=True, text=True).stdout


def checkpoint_files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in VARIES}


class Campaign:
    def __init__(self, folder, seed=1):
        self.folder, self.rng = Path(folder), random.Random(seed)
        self.sanitized = is_sanitized(FOREBAY)
        self.model = make_model(self.folder / "model", num_hidden_layers=2)
        (self.model / "tokenizer_config.json").write_text(json.dumps(dict(chat_template="none" * 100)))
        self.rows = write_rows(self.folder / "rows.jsonl", make_rows(24))
        self.few = write_rows(self.folder / "few.jsonl", make_rows(4, seed=2))
        self.shim = self.folder / "fail_nth.so"
        source = ROOT / "tests" / "tools" / "fail_nth.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", self.shim, source, "-ldl"], check=True)
        self.child = self.folder / "dying_child"
        self.child.write_text(DYING_CHILD)
        self.child.chmod(0o755)
        self.python = os.environ.get("FOREBAY_PYTHON", sys.executable)
        self.healthy = [self.run_healthy(i) for i in range(len(RUNS))]

    def config(self, out, index, **more):
        return write_yaml(out.parent / (out.name + ".yaml"), options(
            self.model, self.rows, out, save_strategy="steps", save_steps=2, slots=2, eval_dataset=self.few, eval_strategy="steps",
            eval_steps=4, compute_threads=1, update_threads=2,
            resume_from_checkpoint=index == RESUMED or None, **{**RUNS[index], **more}))

    def prepare(self, out, index):
        if index == RESUMED:
            out.mkdir()
            for name in "checkpoint-2", "checkpoint-4":
                shutil.copytree(self.folder / "healthy-1" / name, out / name)

    def start(self, config, *words, before=(), **environment):
        """Exit code and standard error; None: it hung."""
        env = {**os.environ, "ASAN_OPTIONS": f"exitcode={SANITIZER_EXIT}:detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1",
               "FOREBAY_PYTHON": self.python, **environment}
        process = subprocess.Popen([*before, str(FOREBAY), "train", str(config), *words], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True, env=env)
        try:
            _, err = process.communicate(timeout=BOUND_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return None, process.communicate()[1]
        return process.returncode, err

    def run_healthy(self, index):
        """The calls that a run makes, what it leaves, and its checkpoints."""
        out, log = self.folder / f"healthy-{index}", self.folder / f"counts-{index}"
        self.prepare(out, index)
        host = {} if self.sanitized else dict(LD_PRELOAD=str(self.shim), FAIL_NTH=f"count:{log}")
        code, err = self.start(self.config(out, index), f"backend=fault:count={log}", FOREBAY_FAULT_IO=f"count={log}", **host)
        assert code == 0, err
        counts = defaultdict(dict)
        for who, op, n in map(str.split, log.read_text().splitlines()):
            if int(n):
                counts[who][op] = counts[who].get(op, 0) + int(n)
        saved = {p.name: checkpoint_files(p) for p in out.glob("checkpoint-*")}
        assert sorted(saved) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
        return counts, (out / "model.safetensors").read_bytes(), saved

    def draw(self, n):
        """n faults as (number, run, fault, call)."""
        kinds = [(i, fault) for i in range(len(RUNS)) for fault in all_faults(self.healthy[i][0], self.sanitized)]
        self.rng.shuffle(kinds)
        calls = [positions(self.healthy[i][0].get(fault.calls.split()[0], {}).get(fault.calls.split()[1], 1) if fault.calls else 1,
                           self.rng) for i, fault in kinds]
        return [(k, *kinds[k % len(kinds)], next(calls[k % len(kinds)])) for k in range(n)]

    def strike(self, number, index, fault, call):
        out = self.folder / f"run-{number}"
        words, env, before = [], {}, []
        chance = random.Random(number)
        if fault.device:
            words.append("backend=fault:" + fault.device.format(n=call))
        if fault.io:
            env["FOREBAY_FAULT_IO"] = fault.io.format(n=call)
        if fault.host:
            env.update(LD_PRELOAD=str(self.shim), FAIL_NTH=fault.host.format(n=call))
        if fault.child:
            lives = chance.choice([0, 0.02, 0.05, 0.1, 0.2])
            env.update(FOREBAY_PYTHON=str(self.child), REAL_PYTHON=self.python, CHILD_LIVES=str(lives))
        if fault.file_size:
            before = ["prlimit", f"--fsize={chance.choice([0, 100, 3000, 10000, 30000, 60000, 100000])}"]
        verdict = Verdict(f"{fault.kind}, call {call} (run {index}, {' '.join(before + words)} {env})")
        self.prepare(out, index)
        config = self.config(out, index)
        code, err = self.start(config, *words, before=before, **env)
        self.judge_end(verdict, fault, code, err)
        self.judge_folder(verdict, out, index)
        again, err_again = self.start(config, "resume_from_checkpoint=true")
        self.judge_resumed(verdict, out, index, again, err_again)
        if code == 0:
            verdict.outcome = "recovered"
        if not verdict.complaints:
            shutil.rmtree(out, ignore_errors=True)
            config.unlink()
        return verdict

    def judge_end(self, verdict, fault, code, err):
        say = verdict.complaints.append
        sentences = [line for line in err.splitlines() if line.startswith("forebay: ")]
        verdict.outcome = "killed" if code == KILLED else "a sentence"
        if code is None:
            say(f"it hung\n{err}")
        elif "Sanitizer" in err or "runtime error" in err or code == SANITIZER_EXIT:
            say(f"a sanitizer reports\n{err}")
        elif code == KILLED and fault.io.startswith("die="):
            pass
        elif code == 0 and sentences:
            say(f"exit 0 with an error sentence\n{err}")
        elif code != 0 and (code not in EXIT_CODES or len(sentences) != 1 or "Traceback" in err):
            say(f"exit {code}, {len(sentences)} sentences\n{err}")

    def judge_folder(self, verdict, out, index):
        for folder in out.glob("checkpoint-*"):
            if folder.suffix == ".tmp":
                continue
            files, want = checkpoint_files(folder), self.healthy[index][2].get(folder.name)
            if want is None or files.keys() != want.keys():
                verdict.complaints.append(f"{folder.name} has {sorted(files)}, wanted {sorted(want or ())}")
            for name in files.keys() & (want or {}).keys():
                if files[name] != want[name]:
                    verdict.complaints.append(f"{folder.name}/{name} is not the healthy run's")

    def judge_resumed(self, verdict, out, index, code, err):
        say = verdict.complaints.append
        if code != 0 or "Sanitizer" in err or "runtime error" in err:
            say(f"the next start: exit {code}\n{err}")
            return
        if "passed over" in err:
            say(f"the next start found a checkpoint damaged\n{err}")
        if (out / "model.safetensors").read_bytes() != self.healthy[index][1]:
            say("the next start's model is not the healthy run's")
        self.judge_folder(verdict, out, index)
        left = [p.name for p in out.rglob("*") if p.name.endswith(".tmp") or p.name == ".forebay.lock"]
        if left:
            say(f"left behind: {left}")

    def run(self, n, jobs=1):
        """Yields fault and verdict of each."""
        drawn = self.draw(n)
        with ThreadPoolExecutor(jobs) as pool:
            for (_, _, fault, _), verdict in zip(drawn, pool.map(lambda one: self.strike(*one), drawn)):
                yield fault, verdict


def main(n=1000, seed=1, jobs=1):
    folder = tempfile.mkdtemp(prefix="forebay-faults-")
    table, bad = defaultdict(Counter), 0
    campaign = Campaign(folder, seed)
    for fault, verdict in campaign.run(n, jobs):
        table[fault.kind][verdict.outcome] += 1
        for complaint in verdict.complaints:
            print(f"WRONG: {verdict.fault}: {complaint}", flush=True)
        bad += bool(verdict.complaints)
    outcomes = ["recovered", "a sentence", "killed"]
    print(f"{'fault':44}" + "".join(f"{o:>12}" for o in outcomes))
    for kind in sorted(table):
        print(f"{kind:44}" + "".join(f"{table[kind][o]:12}" for o in outcomes))
    print(f"{'in all':44}" + "".join(f"{sum(t[o] for t in table.values()):12}" for o in outcomes))
    print(f"{n} faults, {'with' if campaign.sanitized else 'without'} sanitizers: {bad} wrong" + (f"; see {folder}" if bad else ""))
    if not bad:
        shutil.rmtree(folder)
    return bad != 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])))
