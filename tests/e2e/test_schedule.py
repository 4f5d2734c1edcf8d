"""Epochs, steps, the log and evaluation."""
import json
import math
import re

import numpy as np
import pytest

from fb_checkpoint import make_model, make_rows, random_weights, read_model, CONFIG, write_safetensors
from fb_command import GOLDEN, forebay, learned, options, read_log, read_rows, steps, train, write_rows, write_yaml

FIELDS = {"current_steps", "total_steps", "epoch", "loss", "grad_norm", "learning_rate", "tokens", "elapsed_time"}


def test_log_fields(models, rows24, tmp_path):
    log = train(tmp_path / "out", models["tied"], rows24)
    assert len(log) == 6
    for line in log:
        assert FIELDS <= set(line)
        assert all(isinstance(line[key], int) for key in ("current_steps", "total_steps", "tokens"))
        assert line["total_steps"] == 6
    rows = read_rows(rows24)
    assert [line["tokens"] for line in log] == [learned(rows[at:at + 4]) for at in range(0, 24, 4)]
    times = [line["elapsed_time"] for line in log]
    if all(isinstance(t, (int, float)) for t in times):
        assert times == sorted(times) and times[0] >= 0


@pytest.mark.parametrize("n_row,epochs,total", [(8, 1, 2), (9, 1, 3), (9, 2, 6), (10, 2, 6), (3, 2, 2), (9, 1.5, 5)])
def test_epochs(n_row, epochs, total, models, tmp_path):
    """Rows of a step never straddle an epoch: the last step of an epoch takes what is left, as in transformers."""
    rows = make_rows(n_row)
    log = steps(train(tmp_path / "out", models["tied"], write_rows(tmp_path / "rows.jsonl", rows),
                      num_train_epochs=epochs))
    assert len(log) == total == log[-1]["total_steps"]
    a_epoch = math.ceil(n_row / 4)
    want = [learned(rows[at:at + 4]) for at in range(0, n_row, 4)]
    assert [line["tokens"] for line in log] == [want[step % a_epoch] for step in range(total)]
    for step, line in enumerate(log, 1):
        if step % a_epoch == 0:
            assert line["epoch"] == pytest.approx(step / a_epoch)
    epochs_seen = [line["epoch"] for line in log]
    assert epochs_seen == sorted(set(epochs_seen))


def test_last_partial_step_is_a_mean_over_its_own_tokens(models, tmp_path):
    """The ninth row alone, after two steps at learning rate zero, has the loss that it has alone."""
    rows = make_rows(9)
    still = dict(lr_scheduler_type="constant_with_warmup", warmup_steps=1000000)
    first = steps(train(tmp_path / "nine", models["untied"], write_rows(tmp_path / "nine.jsonl", rows), **still,
                        learning_rate="1e-9"))
    alone = steps(train(tmp_path / "one", models["untied"], write_rows(tmp_path / "one.jsonl", rows[8:]), **still))
    for key in ("loss", "grad_norm"):
        assert first[2][key] == pytest.approx(alone[0][key], rel=1e-6)


def test_max_steps_wins(models, rows24, tmp_path):
    log = steps(train(tmp_path / "out", models["tied"], rows24, max_steps=8, num_train_epochs=1))
    assert [line["current_steps"] for line in log] == list(range(1, 9))
    assert log[0]["tokens"] == log[6]["tokens"]     # the second epoch begins with the seventh step
    assert log[-1]["total_steps"] == 8


def test_a_row_with_nothing_to_learn_keeps_its_place(models, tmp_path):
    rows = make_rows(8)
    rows[1] = (rows[1][0], [-100] * len(rows[1][0]))
    log = steps(train(tmp_path / "out", models["tied"], write_rows(tmp_path / "rows.jsonl", rows)))
    assert [line["tokens"] for line in log] == [learned(rows[:4]), learned(rows[4:])]


def test_logging_steps(models, rows24, tmp_path):
    """A line every two steps, whose loss is the token mean since the line before."""
    each = steps(train(tmp_path / "each", models["tied"], rows24))
    pairs = steps(train(tmp_path / "pairs", models["tied"], rows24, logging_steps=2))
    assert [line["current_steps"] for line in pairs] == [2, 4, 6]
    for line, (a, b) in zip(pairs, zip(each[::2], each[1::2])):
        mean = (a["loss"] * a["tokens"] + b["loss"] * b["tokens"]) / (a["tokens"] + b["tokens"])
        assert line["loss"] == pytest.approx(mean, rel=1e-6)
        assert line["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-6)


def test_schedule_linear(models, rows24, tmp_path):
    log = steps(train(tmp_path / "out", models["tied"], rows24, lr_scheduler_type="linear", learning_rate="3e-3"))
    want = [0, 0.5, 1, 0.75, 0.5, 0.25]             # warmup 2 of 6, then down to 0 at the seventh
    np.testing.assert_allclose([line["learning_rate"] for line in log], [3e-3 * w for w in want], rtol=1e-6)


def test_shuffle_is_seeded(models, rows24, tmp_path):
    def tokens(name, seed):
        return [line["tokens"] for line in steps(train(tmp_path / name, models["tied"], rows24, seed=seed,
                                                       disable_shuffling=False, num_train_epochs=2))]
    one, again, other = tokens("one", 1), tokens("again", 1), tokens("other", 2)
    assert one == again != other
    assert one[:6] != one[6:]                       # each epoch has its own order
    assert sum(one[:6]) == sum(one[6:]) == learned(read_rows(rows24))


def test_eval_loss(tmp_path):
    """The rate is zero in the first step, so that the evaluation after it sees the initial weights."""
    case = GOLDEN / "qwen3-default"
    golden = np.load(case / "golden.npz")
    held_out = write_rows(tmp_path / "eval.jsonl", read_rows(case / "rows.jsonl")[:4])
    log = train(tmp_path / "out", case / "model", case / "rows.jsonl", eval_dataset=held_out, eval_steps=1,
                max_steps=3)
    evals = [line for line in log if "eval_loss" in line]
    assert [line["current_steps"] for line in evals] == [1, 2, 3]
    assert evals[0]["eval_loss"] == pytest.approx(float(golden["loss"]), rel=2e-6)
    assert evals[2]["eval_loss"] != evals[0]["eval_loss"]


def test_eval_command(tmp_path):
    case = GOLDEN / "qwen3-default"
    rows = write_rows(tmp_path / "eval.jsonl", read_rows(case / "rows.jsonl")[:4])
    result = forebay("eval", write_yaml(tmp_path / "run.yaml", options(case / "model", rows, tmp_path / "out",
                                                                       eval_dataset=rows)))
    assert result.code == 0, result.err
    loss = float(np.load(case / "golden.npz")["loss"])
    numbers = [float(text) for text in re.findall(r"\d+\.\d+", result.out)]
    assert any(abs(number - loss) < 1e-3 for number in numbers), result.out


def test_val_size(models, rows24, tmp_path):
    """Four of the 24 rows are held out: five steps are left."""
    log = train(tmp_path / "out", models["tied"], rows24, val_size=4, eval_steps=5)
    assert [line["current_steps"] for line in log if "eval_loss" in line] == [5]
    assert steps(log)[-1]["total_steps"] == 5


def test_overrides_win_over_the_file(models, rows24, tmp_path):
    config = write_yaml(tmp_path / "run.yaml", options(models["tied"], rows24, tmp_path / "out"))
    assert forebay("train", config, "max_steps=2", "learning_rate=5e-4").code == 0
    log = steps(read_log(tmp_path / "out"))
    assert log[-1]["total_steps"] == 2
    assert log[1]["learning_rate"] == pytest.approx(5e-4 / 2)


def test_not_finite(rows24, tmp_path):
    """Weights that are finite but overflow at once: exit 5 after three steps in a row, and no model is written."""
    model = make_model(tmp_path / "model", torch_dtype="float32")
    weights = random_weights(CONFIG)
    weights["model.norm.weight"] = np.full(32, 3e38, np.float32)
    write_safetensors(model / "model.safetensors", weights, "F32")
    log = train(tmp_path / "out", model, rows24, code=5)
    assert len(log) <= 3
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert json.loads((model / "config.json").read_text()) and read_model(model)    # the source is as it was
