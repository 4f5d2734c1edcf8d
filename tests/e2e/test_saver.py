"""Checkpoints are saved under training and looked at before they are trusted: no kill, full disk or flipped bit loses a run."""
import json
import os
import shutil
import signal
import subprocess

import pytest

from fb_checkpoint import make_rows, read_model
from fb_command import FOREBAY, HANG_SECONDS, forebay, options, read_log, train, write_rows, write_yaml
from kill_campaign import Campaign, half_written, start

FILES = {"adam_m.safetensors", "adam_v.safetensors", "config.json", "manifest.json", "model.safetensors", "remainders.safetensors",
         "tokenizer_config.json", "trainer_state.json"}


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    return Campaign(tmp_path_factory.mktemp("campaign"), seed=7)


def test_killed_six_times(campaign):
    kills = 0
    while kills < 6:
        kills += campaign.run(1, n_kill=6 - kills)
    assert campaign.count["kills"] == 6


def test_stopped_by_a_signal_inside_a_save(campaign, tmp_path):
    """SIGTERM waits for the save in hand and makes its own: nothing half written is left, and the run goes on from there."""
    config = campaign.config(tmp_path / "out", {}, save_steps=1, resume_from_checkpoint=True)
    process = start(config)
    while process.poll() is None and not half_written(tmp_path / "out"):
        pass
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 75, text
    assert not half_written(tmp_path / "out")
    step = int(text.split("stopped after step ")[1].split()[0])
    assert f"resumed from {tmp_path / 'out'}/checkpoint-{step} at step {step}" in forebay("train", config).err


# ---- a small run, saved at 4 and 8 of its 12 steps, in the middle of an interval of the log ----

@pytest.fixture(scope="module")
def kind(tmp_path_factory, models):
    at = tmp_path_factory.mktemp("small")
    model = shutil.copytree(models["tied"], at / "model")
    (model / "tokenizer_config.json").write_text('{"a": "companion"}')
    return dict(model=model, dataset=write_rows(at / "rows.jsonl", make_rows(16, seed=5)), num_train_epochs=3,
                disable_shuffling=False, compute_dtype="bfloat16", save_dtype="bfloat16", save_strategy="steps", save_steps=4,
                logging_steps=3)


@pytest.fixture(scope="module")
def finished(kind, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "out"
    train(out, **kind)
    return out


@pytest.fixture
def stopped(finished, tmp_path):
    """As a kill between the steps 8 and 12 leaves the folder."""
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    for name in ("model.safetensors", "config.json", "trainer_state.json"):
        (out / name).unlink()
    shutil.rmtree(out / "checkpoint-12")
    return out


def resume(out, kind, **more):
    more = {**kind, "resume_from_checkpoint": True, **more}
    return forebay("train", write_yaml(out.parent / "resume.yaml", options(out=out, **more)))


def ends_alike(out, finished):
    def facts(folder):
        return [(line["current_steps"], line["loss"], line["grad_norm"], line["learning_rate"]) for line in read_log(folder)]
    for name in ("model.safetensors", "checkpoint-12/adam_m.safetensors", "checkpoint-12/adam_v.safetensors",
                 "checkpoint-12/model.safetensors", "checkpoint-12/remainders.safetensors"):
        assert (out / name).read_bytes() == (finished / name).read_bytes(), name
    assert facts(out) == facts(finished)


def test_a_checkpoint_is_a_model_folder(finished):
    last = finished / "checkpoint-12"
    assert {p.name for p in last.iterdir()} == FILES
    listed = json.loads((last / "manifest.json").read_text())["files"]
    assert {f["name"]: f["size"] for f in listed} == {n: (last / n).stat().st_size for n in FILES - {"manifest.json"}}
    assert {name: w.shape for name, w in read_model(last).items()} == {name: w.shape for name, w in read_model(finished).items()}


def test_an_export_of_a_checkpoint_is_the_model(finished, tmp_path):
    """The final model is rounded from the masters; a checkpoint's weights and remainders are the masters."""
    assert forebay("export", finished / "checkpoint-12", tmp_path / "plain").code == 0
    assert (tmp_path / "plain" / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()


def flip(path, where):
    blob = bytearray(path.read_bytes())
    at = int(where * (len(blob) - 1))
    blob[at] ^= 1 << at % 8
    path.write_bytes(blob)


@pytest.mark.parametrize("name", sorted(FILES))
def test_one_flipped_bit_and_the_one_before_is_taken(name, stopped, finished, kind):
    flip(stopped / "checkpoint-8" / name, 0.7)
    result = resume(stopped, kind)
    assert result.code == 0, result.err
    assert "checkpoint-8 is passed over: " in result.err and f"checkpoint-8/{name}: " in result.err
    assert f"resumed from {stopped}/checkpoint-4 at step 4" in result.err
    ends_alike(stopped, finished)


def test_none_is_whole(stopped, kind):
    (stopped / "checkpoint-8" / "manifest.json").unlink()
    flip(stopped / "checkpoint-4" / "config.json", 0)
    log = (stopped / "trainer_log.jsonl").read_bytes()
    result = resume(stopped, kind)
    assert result.code == 3 and "none of its 2 checkpoints is whole" in result.last
    assert (stopped / "trainer_log.jsonl").read_bytes() == log


def test_a_named_one_is_taken_or_refused(stopped, finished, kind):
    flip(stopped / "checkpoint-8" / "adam_v.safetensors", 0.5)
    result = resume(stopped, kind, resume_from_checkpoint=stopped / "checkpoint-8")
    assert result.code == 3 and "checkpoint-8/adam_v.safetensors: is damaged" in result.last
    result = resume(stopped, kind, resume_from_checkpoint=stopped / "checkpoint-4")
    assert result.code == 0 and "passed over" not in result.err
    ends_alike(stopped, finished)


def test_what_was_half_written_goes(stopped, finished, kind):
    shutil.move(stopped / "checkpoint-8", stopped / "checkpoint-8.tmp")
    result = resume(stopped, kind)
    assert result.code == 0 and "checkpoint-8.tmp: is half a checkpoint, left by a run that was killed; it is removed" in result.err
    assert f"resumed from {stopped}/checkpoint-4 at step 4" in result.err
    assert not half_written(stopped)
    ends_alike(stopped, finished)


@pytest.mark.parametrize("more, sentence", [
    (dict(num_train_epochs=4), "is of another schedule: steps was 12, now it is 16"),
    (dict(learning_rate="2e-3"), "is of another schedule: learning_rate was 0.001, now it is 0.002"),
    (dict(lr_scheduler_type="linear"), 'is of another schedule: lr_scheduler_type was "cosine", now it is "linear"'),
    (dict(seed=1), "is of another data: seed was 42, now it is 1"),
    (dict(max_samples=15), "is of another data: "),
    (dict(micro_batch=1), "is of another data: rows in a micro-batch was 2, now it is 1"),
], ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_another_run_is_refused(more, sentence, stopped, kind):
    log = (stopped / "trainer_log.jsonl").read_bytes()
    result = resume(stopped, kind, **more)
    assert result.code == 2 and f"checkpoint-8: {sentence}" in result.last, result.err
    assert (stopped / "trainer_log.jsonl").read_bytes() == log


def test_another_model_is_refused(stopped, kind, models, tmp_path):
    model = shutil.copytree(kind["model"], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rope_theta": 5000.0}))
    result = resume(stopped, kind, model=model)
    assert result.code == 2 and "checkpoint-8: is of another model: config.json was " in result.last
    (model / "config.json").write_text(json.dumps({**config, "use_cache": False, "transformers_version": "9"}))
    assert resume(stopped, kind, model=model).code == 0


def test_touched_data_are_the_same_data(stopped, finished, kind):
    """The rows again, in a file of another name and time."""
    moved = shutil.copy(kind["dataset"], stopped.parent / "moved.jsonl")
    os.utime(moved, (1, 1))
    assert resume(stopped, kind, dataset=moved).code == 0
    ends_alike(stopped, finished)


@pytest.mark.parametrize("more", [dict(slots="all", compute_threads=1, save_steps=3),
                                  dict(slots=2, update_threads=3, save_buffer="0"),
                                  dict(recompute="full", overlap=False, save_buffer="2MiB", save_total_limit=1),
                                  dict(placement="resident", save_buffer="0", save_steps=1),
                                  dict(placement="layers:1", passes=2, save_buffer="2MiB", save_steps=2)], ids=str)
def test_how_it_runs_may_change(more, stopped, finished, kind):
    result = resume(stopped, kind, **more)
    assert result.code == 0, result.err
    ends_alike(stopped, finished)


def test_another_compute_dtype_is_warned_about(stopped, kind):
    """A resume on another back end may have another one by itself."""
    result = resume(stopped, kind, compute_dtype="float32")
    assert result.code == 0 and "checkpoint-8: was computed in bfloat16, the run goes on in float32" in result.err


# ---- a disk that is full ----

def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(stopped, finished, kind):
    more = {**kind, "resume_from_checkpoint": True, "save_steps": 1}
    config = write_yaml(stopped.parent / "full.yaml", options(out=stopped, **more))
    before = {p: p.read_bytes() for p in stopped.glob("checkpoint-*/*")}
    result = subprocess.run([FOREBAY, "train", config], capture_output=True, text=True, timeout=HANG_SECONDS,
                            env={**os.environ, "FOREBAY_FAULT_IO": "full=25"})
    assert result.returncode == 1, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert "No space left on device; checkpoint-9 was not saved and the run ends" in last, last
    assert {p: p.read_bytes() for p in stopped.glob("checkpoint-*/*")} == before
    assert not half_written(stopped)
    assert resume(stopped, kind).code == 0
    ends_alike(stopped, finished)


@pytest.fixture
def small_disk(finished, tmp_path):
    """Makes a folder on a file system with room for so many checkpoints beside the data."""
    at = tmp_path / "mount"
    at.mkdir()
    size = sum(p.stat().st_size for p in (finished / "checkpoint-12").iterdir())
    def mount(checkpoints):
        limit = int(checkpoints * size / 1024) + 64
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={limit}k", "none", at], capture_output=True).returncode != 0:
            pytest.skip("no right to mount")
        return at / "out"
    yield mount
    subprocess.run(["umount", at], capture_output=True)


def test_a_full_file_system(small_disk, kind, tmp_path):
    out = small_disk(2.5)
    result = forebay("train", write_yaml(tmp_path / "run.yaml", options(out=out, **{**kind, "save_steps": 2})))
    assert result.code == 1 and "No space left on device; checkpoint-6 was not saved and the run ends" in result.last, result.err
    assert {p.name for p in out.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}


def test_no_room_for_the_last_checkpoint_but_for_the_model(small_disk, finished, kind, tmp_path):
    """The disk has room for both at the start, and somebody else fills it under the run."""
    out = small_disk(2.5)
    more = {**kind, "save_steps": 12, "logging_steps": 1, "backend": "fault:delay=1000"}
    process = start(write_yaml(tmp_path / "run.yaml", options(out=out, **more)))
    assert any(line.startswith("step 1/12 ") for line in iter(process.stdout.readline, ""))
    disk = os.statvfs(out)
    room = int(0.6 * sum(p.stat().st_size for p in (finished / "checkpoint-12").iterdir()))
    (out.parent / "ballast").write_bytes(bytes(disk.f_bavail * disk.f_frsize - room))
    text, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0 and "No space left on device; checkpoint-12 was not saved" in text, text
    assert not list(out.glob("checkpoint-*"))
    assert (out / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()


# ---- memory ----

def test_the_plan_counts_buffer_and_checkpoint(kind, tmp_path):
    def plan(**more):
        result = forebay("plan", write_yaml(tmp_path / "plan.yaml", options(out=tmp_path / "out", **{**kind, **more})), "--json")
        return json.loads(result.out), result
    ledger, _ = plan()
    parameters = sum(w.size for w in read_model(kind["model"]).values())
    assert ledger["checkpoint_bytes"] == 12 * parameters
    assert plan(save_dtype="float16")[0]["checkpoint_bytes"] == 14 * parameters
    buffer = ledger["host"]["save buffer"]
    assert buffer >= 12 * parameters and ledger["save_wait_seconds"] == 0
    assert ledger["host_bytes"] == sum(ledger["host"].values())
    without = plan(save_strategy="no")[0]
    assert "save buffer" not in without["host"] and without["host_bytes"] == ledger["host_bytes"] - buffer
    least = plan(save_buffer="0")[0]["host"]["save buffer"]
    assert least == 12 << 17
    # What the budget leaves, to the piece; a size that is asked for is planned with, and refused to the byte.
    taken = without["host_bytes"] + without["device_bytes"]
    assert plan(ram_budget=taken + 2 * least + 1)[0]["host"]["save buffer"] == 2 * least
    short, result = plan(ram_budget=2 * least, save_buffer=2 * least)
    need = short["host_bytes"] + short["device_bytes"]
    assert result.code == 4 and f"{(need - 2 * least) / 2**20:.1f} MiB are short" in short["reason"]
    assert "the save buffer takes 3.0 MiB of it, save_buffer: auto" in short["reason"]
    fits, _ = plan(ram_budget=need, save_buffer=2 * least)
    assert fits["host"]["save buffer"] == 2 * least and fits["host_bytes"] + fits["device_bytes"] <= need
    assert plan(ram_budget=need - 1, save_buffer=2 * least)[1].code == 4
