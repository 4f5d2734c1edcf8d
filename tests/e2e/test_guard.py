"""A run against its surroundings: too little memory or disk, another run, signals, standing still."""
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from fb_checkpoint import make_model, make_rows
from fb_command import FOREBAY, HANG_SECONDS, forebay, options, read_log, run, steps, write_rows, write_yaml

FAILURE, CONFIG_BAD, NO_FIT, STOPPED = 1, 2, 4, 75
# Every fourth copy or kernel sleeps up to so many microseconds: a step takes tens of milliseconds and learns the same.
SLOW = "fault:delay=1000"


@pytest.fixture
def place(tmp_path):
    make_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", make_rows(24))
    return tmp_path


def config(place, out="out", name="run.yaml", **more):
    return write_yaml(place / name, options(place / "model", place / "rows.jsonl", place / out, **more))


class Running:
    """A run in the background; what it says is kept as it comes."""
    def __init__(self, *args, env=None, **more):
        self.process = subprocess.Popen([str(FOREBAY), *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        text=True, env={**os.environ, **(env or {})}, **more)
        self.lines = []
        self.reader = threading.Thread(target=lambda: self.lines.extend(iter(self.process.stdout.readline, "")))
        self.reader.start()

    def wait_for(self, part, n=1):
        """Until n lines have this part, or it ended."""
        until = time.monotonic() + HANG_SECONDS
        while sum(part in line for line in self.lines) < n:
            assert self.process.poll() is None and time.monotonic() < until, f"no {part!r} in\n{''.join(self.lines)}"
            time.sleep(0.002)
        return [line for line in self.lines if part in line]

    def end(self):
        code = self.process.wait(HANG_SECONDS)
        self.reader.join()
        return code

    def kill(self):
        self.process.kill()
        return self.end()


def assert_sentence(result, code, *parts):
    assert result.code == code, f"exit {result.code}, expected {code}\n{result.out}\n{result.err}"
    for part in parts:
        assert part in result.last, f"{part!r} is not in the sentence: {result.last}"


# --- one writer a folder -------------------------------------------------------------------------------------------

def test_the_second_run_is_refused_and_the_first_unharmed(place):
    assert forebay("train", config(place, out="alone", num_train_epochs=4)).code == 0
    path = config(place, num_train_epochs=4, backend=SLOW, save_strategy="steps", save_steps=5)
    first = Running("train", path)
    first.wait_for("step 3/")
    first.process.send_signal(signal.SIGSTOP)       # it holds its lock while the others come and go
    second = [forebay("train", path, more) for more in ("overwrite_output_dir=true", "resume_from_checkpoint=true")]
    second.append(forebay("export", place / "model", place / "out"))
    # What only reads, or makes token shards, may go on beside it.
    beside = [forebay("plan", path), forebay("data", path), forebay("eval", path, "backend=cpu", "cutoff_len=8"),
              forebay("train", config(place, out="out2", name="other.yaml", num_train_epochs=1))]
    first.process.send_signal(signal.SIGCONT)
    assert first.end() == 0, "".join(first.lines)
    for result in second:
        assert_sentence(result, CONFIG_BAD, str(place / "out"), f"train, process {first.process.pid} on {os.uname().nodename}")
    assert [result.code for result in beside] == [0] * 4, [result.err for result in beside]
    assert (place / "out" / "model.safetensors").read_bytes() == (place / "alone" / "model.safetensors").read_bytes()
    assert not (place / "out" / ".forebay.lock").exists()


def test_a_killed_run_leaves_no_lock(place):
    path = config(place, num_train_epochs=50, backend=SLOW)
    first = Running("train", path)
    first.wait_for("step 2/")
    first.kill()
    assert (place / "out" / ".forebay.lock").exists()       # the file, which nobody holds
    assert forebay("train", path, "num_train_epochs=1", "backend=cpu").code == 0


# --- what lies in the folder ---------------------------------------------------------------------------------------

def test_a_finished_run_is_not_overwritten(place):
    path = config(place)
    assert forebay("train", path).code == 0
    files = {name: (place / "out" / name).read_bytes() for name in ("model.safetensors", "trainer_log.jsonl", "trainer_state.json")}
    assert_sentence(forebay("train", path), CONFIG_BAD, str(place / "out"), "finished model", "overwrite_output_dir: true")
    # Without ours beside it a model is somebody's all the same.
    (place / "out" / "trainer_state.json").rename(place / "state")
    for resume in "false", "true", place / "model":
        result = forebay("train", path, f"resume_from_checkpoint={resume}")
        assert_sentence(result, CONFIG_BAD, str(place / "out"), "finished model")
    (place / "state").rename(place / "out" / "trainer_state.json")
    same = forebay("train", path, "resume_from_checkpoint=true")
    assert same.code == 0 and "nothing to do" in same.out
    other = forebay("train", path, "resume_from_checkpoint=true", "num_train_epochs=2")
    assert_sentence(other, CONFIG_BAD, f"{place / 'out'}/trainer_state.json: is of another schedule: steps was 6, now it is 12",
                    "overwrite_output_dir: true")
    assert {name: (place / "out" / name).read_bytes() for name in files} == files
    again = forebay("train", path, "overwrite_output_dir=true", "learning_rate=1e-2")
    assert again.code == 0 and (place / "out" / "model.safetensors").read_bytes() != files["model.safetensors"]


def test_an_overwritten_run_is_not_taken_for_finished(place):
    """Started afresh over a finished run and killed: the folder must not say that all is done."""
    assert forebay("train", config(place)).code == 0
    path = config(place, overwrite_output_dir=True, learning_rate="1e-2")
    second = Running("train", path, "backend=fault:delay=20000")
    second.wait_for("step 1/")
    second.kill()
    result = forebay("train", path, "resume_from_checkpoint=true")
    assert result.code == 0 and "nothing to do" not in result.out
    assert forebay("train", config(place, out="want", learning_rate="1e-2")).code == 0
    assert (place / "out" / "model.safetensors").read_bytes() == (place / "want" / "model.safetensors").read_bytes()


def test_the_model_itself_is_not_overwritten(place):
    before = (place / "model" / "model.safetensors").read_bytes()
    result = forebay("train", config(place, out="model", overwrite_output_dir=True))
    assert_sentence(result, CONFIG_BAD, "folder of the model")
    assert (place / "model" / "model.safetensors").read_bytes() == before


def test_a_token_shard_cut_while_it_is_mapped(place):
    first = Running("train", config(place, num_train_epochs=50, backend=SLOW))
    first.wait_for("step 2/")
    shard = place / "out" / "data" / "train.fbt"
    os.truncate(shard, 0)
    assert first.end() == FAILURE
    assert str(shard) in first.lines[-1] and "became shorter" in first.lines[-1], "".join(first.lines)


# --- signals -------------------------------------------------------------------------------------------------------

ENDING = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]


@pytest.mark.parametrize("signum", ENDING, ids=lambda s: s.name)
def test_the_first_signal_saves(signum, place):
    first = Running("train", config(place, num_train_epochs=50, backend=SLOW))
    first.wait_for("step 2/")
    first.process.send_signal(signum)
    assert first.end() == STOPPED, "".join(first.lines)
    assert len(list((place / "out").glob("checkpoint-*"))) == 1


def test_the_second_signal_of_another_kind_ends_it(place):
    """The step in hand takes many seconds here: it is not waited for."""
    first = Running("train", config(place, num_train_epochs=50, backend="fault:delay=1000000", watchdog=1))
    first.wait_for("nothing has moved")
    first.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == -signal.SIGTERM, "".join(first.lines)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_before_the_first_step_nothing_is_waited_for(signum, place):
    """A Python that never answers stands for hours of preparing data."""
    python = place / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {place}/pid\nexec {sys.executable} -c 'import time; time.sleep(600)'\n")
    python.chmod(0o755)
    first = Running("train", config(place), env={"FOREBAY_PYTHON": str(python)})
    until = time.monotonic() + HANG_SECONDS
    while not (place / "pid").exists() or not (place / "pid").read_text().strip():
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.2)     # the shell has become the Python
    first.process.send_signal(signum)
    assert first.end() == STOPPED, "".join(first.lines)
    assert "before the first step" in first.lines[-1]
    with pytest.raises(ProcessLookupError):
        os.kill(int((place / "pid").read_text()), 0)
    assert forebay("train", config(place)).code == 0


def test_an_ignored_signal_stays_ignored(place):
    """As under nohup."""
    first = Running("train", config(place, num_train_epochs=4, backend=SLOW),
                    preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    first.wait_for("step 2/")
    first.process.send_signal(signal.SIGHUP)
    assert first.end() == 0, "".join(first.lines)


def test_the_reader_of_our_output_may_die(place):
    first = subprocess.Popen([str(FOREBAY), "train", str(config(place, num_train_epochs=2, backend=SLOW))], stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT)
    first.stdout.readline()
    first.stdout.close()
    assert first.wait(HANG_SECONDS) == 0
    assert len(steps(read_log(place / "out"))) == 12


# --- what it is doing ----------------------------------------------------------------------------------------------

def test_a_report_on_request(place):
    first = Running("train", config(place, num_train_epochs=50, backend=SLOW))
    first.wait_for("step 2/")
    for n in 1, 2:
        first.process.send_signal(signal.SIGQUIT)
        reports = first.wait_for("report: layers on the device", n)
        assert len(reports) == n
    later = len([line for line in first.lines if line.startswith("step ")])
    first.wait_for("step ", later + 3)                  # it goes on
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == STOPPED
    state, memory, blocks = [line for line in first.lines if line.startswith("report: ")][:3]
    assert "report: step " in state and "workers busy)" in state and "last movement" in state
    assert "MiB held" in memory and "MiB more can be had" in memory
    layers, updates = blocks.split("; ")
    count = lambda text: sum(int(word) for word in text.replace(",", " ").split() if word.isdigit())
    assert (count(layers), count(updates)) == (4, 6)    # every layer, every block is in some state


@pytest.mark.parametrize("clip,awaited", [("1.0", "end of the step, waiting for the device, stream compute"),
                                          ("0", "waiting for a free slab for the gradient of block ")])
def test_it_says_when_nothing_moves(clip, awaited, place):
    """A device that dawdles for seconds: with clipping the host thread stands at the end of the step, without it it runs out
    of slabs before.  It says so, twice as late each time, and the run goes on."""
    first = Running("train",
                    config(place, watchdog=1, backend="fault:seed=2,delay=1000000", num_train_epochs=50, max_grad_norm=clip))
    first.wait_for("warning: nothing has moved for 1 s: step 1, ")
    lines = first.wait_for(awaited, 2)
    first.kill()
    assert all(line.startswith("warning: nothing has moved for ") and "(0 of " in line for line in lines), lines
    assert [int(line.split()[5]) for line in lines[:2]] == [1, 2], lines


# --- memory --------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A model whose run takes some 230 MiB."""
    at = tmp_path_factory.mktemp("large")
    make_model(at / "model", hidden_size=384, intermediate_size=768, vocab_size=6000)
    write_rows(at / "rows.jsonl", make_rows(4, vocab=6000))
    path = config(at, overwrite_output_dir=True)
    planned = json.loads(forebay("plan", path, "--json").out)
    return path, planned["host_bytes"] + planned["device_bytes"]


def new_group():
    """A memory cgroup of our own, either version; skipped where that is not allowed."""
    for root, limit in ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"):
        group = Path(root) / f"forebay-test-{uuid.uuid4().hex}"
        try:
            group.mkdir()
        except OSError:
            continue
        for no_swap in "memory.swap.max", "memory.swappiness":
            if (group / no_swap).exists():
                (group / no_swap).write_text("0")
        if (group / limit).exists() and not run("/bin/sh", "-c", f"echo $$ > {group}/cgroup.procs").code:
            return group, limit
        group.rmdir()
    pytest.skip("no memory cgroup can be made here")


def test_never_killed_by_the_kernel(large):
    """From hopeless to enough, the answer is a sentence or a finished run; the kernel's own count of kills stays at zero."""
    path, planned = large
    group, limit = new_group()
    codes = []
    try:
        for part in 0.3, 0.97, 1.05, 1.1, 1.15, 1.5:
            (group / limit).write_text(str(int(part * planned)))
            result = run("/bin/sh", "-c", f"echo $$ > {group}/cgroup.procs; exec {FOREBAY} train {path} save_strategy=epoch")
            codes.append(result.code)
            if result.code:
                assert_sentence(result, NO_FIT, f"cgroup /{group.name}", "MiB")
        kills = (group / ("memory.oom_control" if limit == "memory.limit_in_bytes" else "memory.events")).read_text()
        # The oracle: as much memory as the plan says, and no preflight in the way of taking it.
        (group / limit).write_text(str(planned // 2))
        naive = run("/bin/sh", "-c", f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -c 'bytearray({planned})'")
    finally:
        time.sleep(0.1)
        group.rmdir()
    assert codes[:2] == [NO_FIT] * 2 and codes[-1] == 0, codes
    assert "oom_kill 0" in kills
    assert naive.code == -signal.SIGKILL


def test_address_space_is_a_limit_too(large):
    path, planned = large

    def with_limit(size):
        done = subprocess.run([str(FOREBAY), "train", str(path), "compute_threads=1", "update_threads=1"], capture_output=True,
                              text=True, timeout=HANG_SECONDS,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size)))
        return done.returncode, done.stderr.splitlines()[-1]
    code, sentence = with_limit(planned)
    assert code == NO_FIT and "ulimit -v" in sentence, sentence
    code, sentence = with_limit(8 << 30)
    assert code == 0, sentence


def test_a_budget_of_more_than_there_is(place):
    result = forebay("train", config(place, ram_budget="900TiB"))
    assert_sentence(result, NO_FIT, "ram_budget is 943718400.0 MiB", "leaves", "auto")


# --- disk ----------------------------------------------------------------------------------------------------------

@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, of 2 MiB; mounting takes root."""
    at = tmp_path / "disk"
    at.mkdir()
    if run("mount", "-t", "tmpfs", "-o", "size=2m", "none", at).code:
        pytest.skip("mounting a small file system is not allowed here")
    yield at
    assert run("umount", "-l", at).code == 0


def test_a_small_disk(place, small_disk):
    """A checkpoint takes 0.49 MiB, the final model 0.07: of twelve checkpoints not all fit, of two they do."""
    path = config(place, out="disk/out", save_strategy="steps", save_steps=1, save_dtype="bfloat16", num_train_epochs=2)
    result = forebay("train", path)                     # 12 checkpoints: the disk is full with steps still to come
    assert "set save_total_limit to keep fewer" in result.err, result.err
    assert_sentence(result, FAILURE, "checkpoint-5", "No space left")       # as the warning said
    assert len(list(small_disk.glob("out/checkpoint-[1-4]"))) == 4          # what was saved before is whole
    assert run("rm", "-rf", place / "disk" / "out").code == 0
    fits = forebay("train", path, "save_total_limit=1")
    assert fits.code == 0 and "warning" not in fits.err, fits.err
    assert run("rm", "-rf", place / "disk" / "out").code == 0
    (small_disk / "ballast").write_bytes(bytes(1_500_000))
    refused = forebay("train", path)
    assert_sentence(refused, FAILURE, "one checkpoint and the final model take", "MiB free", "save_strategy: no")
    assert not list(small_disk.glob("out/checkpoint-*")) and not list(small_disk.glob("out/*.safetensors*"))
    assert forebay("train", path, "save_strategy=no").code == 0


def test_a_limit_on_files(place):
    done = subprocess.run([str(FOREBAY), "train", str(config(place))], capture_output=True, text=True, timeout=HANG_SECONDS,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)))
    assert done.returncode == FAILURE and "ulimit -f" in done.stderr.splitlines()[-1], done.stderr


def test_a_folder_that_cannot_be_written(place):
    (place / "file").write_text("")
    assert_sentence(forebay("train", config(place, out="file/out")), FAILURE, "is not a folder")
