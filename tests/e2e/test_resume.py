"""Killed at any instant, a run loses nothing: what it ends with is, bit for bit, what it would have ended with."""
import json
import shutil
import signal
import subprocess
import time

import pytest

from fb_checkpoint import make_model, make_rows
from fb_command import FOREBAY, HANG_SECONDS, forebay, options, read_log, steps, train, write_rows, write_yaml

FINAL = ("model.safetensors", "model.safetensors.index.json", "config.json", "trainer_state.json")


def weights(out):
    return (out / "model.safetensors").read_bytes()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def whole(request, tmp_path_factory, models):
    """Eight steps over two epochs, shuffled, never interrupted."""
    at = tmp_path_factory.mktemp("whole")
    rows = write_rows(at / "rows.jsonl", make_rows(16, seed=5))
    kind = dict(model=models["tied"], dataset=rows, num_train_epochs=2, disable_shuffling=False,
                compute_dtype=request.param)
    log = train(at / "out", **kind)
    return kind, weights(at / "out"), log


def learned_alike(log, want):
    return [(line["current_steps"], line["loss"], line["grad_norm"], line["tokens"]) for line in steps(log)] == \
        [(line["current_steps"], line["loss"], line["grad_norm"], line["tokens"]) for line in steps(want)]


def undo_the_end(out):
    """Leaves the folder as a kill between the fourth and the eighth step would have."""
    for name in FINAL:
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / "checkpoint-8", ignore_errors=True)


@pytest.mark.parametrize("resume", ["true", "path"])
def test_resume_in_the_middle(resume, whole, tmp_path):
    """The folder as a kill after the fourth step's checkpoint leaves it, with later lines in the log."""
    kind, want, log = whole
    out = tmp_path / "out"
    train(out, save_strategy="steps", save_steps=4, **kind)
    assert weights(out) == want                     # saving changes nothing
    undo_the_end(out)
    assert len(steps(read_log(out))) == 8
    again = train(out, save_strategy="steps", save_steps=4,
                  resume_from_checkpoint=True if resume == "true" else out / "checkpoint-4", **kind)
    assert weights(out) == want
    assert learned_alike(again, log)
    for line in steps(again):                       # at the pace so far, earlier starts included
        left = line["elapsed_time"] / line["current_steps"] * (line["total_steps"] - line["current_steps"])
        assert line["remaining_time"] == pytest.approx(left)


def test_nothing_to_resume_starts_afresh(whole, tmp_path):
    kind, want, log = whole
    again = train(tmp_path / "out", resume_from_checkpoint=True, **kind)
    assert weights(tmp_path / "out") == want
    assert learned_alike(again, log)


def test_resuming_a_finished_run(whole, tmp_path):
    kind, want, _ = whole
    out = tmp_path / "out"
    train(out, save_strategy="steps", save_steps=4, **kind)
    log = (out / "trainer_log.jsonl").read_bytes()
    train(out, save_strategy="steps", save_steps=4, resume_from_checkpoint=True, **kind)
    assert weights(out) == want
    assert (out / "trainer_log.jsonl").read_bytes() == log


def test_finished_but_the_model_is_gone(whole, tmp_path):
    """Success is claimed only of a folder that holds the model."""
    kind, want, _ = whole
    out = tmp_path / "out"
    train(out, save_strategy="steps", save_steps=4, **kind)
    (out / "model.safetensors").unlink()
    result = forebay("train", tmp_path / "out.yaml", "resume_from_checkpoint=true")
    assert result.code != 0 or weights(out) == want


def test_resume_may_run_differently(whole, tmp_path):
    """Slots, threads and recompute are how a run goes, not what it learns: they may change at a resume."""
    kind, want, _ = whole
    out = tmp_path / "out"
    train(out, save_strategy="steps", save_steps=4, **kind)
    undo_the_end(out)
    train(out, resume_from_checkpoint=True, slots="all", overlap=False, recompute="full", update_threads=1, **kind)
    assert weights(out) == want


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """Forty steps of a model that is slow enough to be caught on the way."""
    at = tmp_path_factory.mktemp("long")
    model = make_model(at / "model", hidden_size=128, intermediate_size=256, vocab_size=1024, num_hidden_layers=6)
    rows = write_rows(at / "rows.jsonl", make_rows(32, vocab=1024, length=(60, 100)))
    kind = dict(model=model, dataset=rows, num_train_epochs=5, save_strategy="steps", save_steps=5)
    train(at / "out", **kind)
    return kind, weights(at / "out")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_stopped_by_a_signal(signum, long_run, tmp_path):
    kind, want = long_run
    out = tmp_path / "out"
    config = write_yaml(tmp_path / "run.yaml", options(out=out, resume_from_checkpoint=True, **kind))
    process = subprocess.Popen([FOREBAY, "train", config], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None and len(steps(read_whole_lines(out))) < 7:
        time.sleep(0.001)
    process.send_signal(signum)
    _, err = process.communicate(timeout=HANG_SECONDS)
    if signum != signal.SIGKILL:
        assert process.returncode == 75, err.decode()
        assert any(out.glob("checkpoint-*"))
    assert not (out / "model.safetensors").exists()
    result = forebay("train", config)
    assert result.code == 0, result.err
    assert weights(out) == want
    assert [line["current_steps"] for line in steps(read_log(out))] == list(range(1, 41))


def read_whole_lines(out):
    """The log may be caught with its last line half written."""
    path = out / "trainer_log.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
