"""Against transformers: logits, gradients and eight AdamW steps of every family and rope type.

The stored numbers come from tests/ref/make_golden.py; the tolerances are several times what transformers' own two
attention paths differ by on the same cases (tests/ref/README.md)."""
import json

import numpy as np
import pytest

from fb_checkpoint import read_model
from fb_command import GOLDEN, distance, golden_dump, read_rows, steps, train, write_rows

CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
RECIPE = json.loads((GOLDEN / "recipe.json").read_text())
ROWS_A_STEP = RECIPE["batch_size"] * RECIPE["accumulation"]


def load(case):
    return np.load(GOLDEN / case / "golden.npz")


def assert_first_step(dump, golden):
    assert distance(dump["logits"], golden["logits"]) <= 1e-5
    names = {key for key in golden.files if key.startswith("grad.")}
    assert {key for key in dump if key.startswith("grad.")} == names
    far = {name: float(distance(dump[name], golden[name])) for name in names}
    assert max(far.values()) <= 1e-5, {name: d for name, d in far.items() if d > 1e-5}


def first_rows(case, path):
    return write_rows(path, read_rows(GOLDEN / case / "rows.jsonl")[:ROWS_A_STEP])


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients(case, tmp_path):
    rows = first_rows(case, tmp_path / "rows.jsonl")
    assert_first_step(golden_dump(GOLDEN / case / "model", rows, tmp_path / "dump.safetensors"), load(case))


# The dynamic rope goes by the longest row of a micro-batch, so other micro-batches are other numbers.
@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith("dynamic")])
def test_packed_rows_are_the_same_rows(case, tmp_path):
    rows = first_rows(case, tmp_path / "rows.jsonl")
    dump = golden_dump(GOLDEN / case / "model", rows, tmp_path / "dump.safetensors", packed=True)
    assert_first_step(dump, load(case))


@pytest.mark.parametrize("case", CASES)
def test_eight_steps(case, tmp_path):
    golden = load(case)
    log = steps(train(tmp_path / "out", GOLDEN / case / "model", GOLDEN / case / "rows.jsonl",
                      save_strategy='"no"', per_device_train_batch_size=RECIPE["batch_size"],
                      gradient_accumulation_steps=RECIPE["accumulation"], learning_rate=RECIPE["learning_rate"],
                      lr_scheduler_type=RECIPE["schedule"], warmup_steps=RECIPE["warmup_steps"],
                      weight_decay=RECIPE["weight_decay"], adam_beta1=RECIPE["beta1"], adam_beta2=RECIPE["beta2"],
                      adam_epsilon=RECIPE["epsilon"], max_grad_norm=RECIPE["max_grad_norm"]))
    assert [line["current_steps"] for line in log] == list(range(1, RECIPE["n_step"] + 1))
    assert [line["tokens"] for line in log] == golden["learned_tokens"].tolist()
    np.testing.assert_allclose([line["learning_rate"] for line in log], golden["learning_rates"], rtol=1e-6, atol=0)
    np.testing.assert_allclose([line["loss"] for line in log], golden["losses"], rtol=2e-6, atol=0)
    np.testing.assert_allclose([line["grad_norm"] for line in log], golden["grad_norms"], rtol=5e-6, atol=0)

    before, after = read_model(GOLDEN / case / "model"), read_model(tmp_path / "out")
    names = {key.removeprefix("update.") for key in golden.files if key.startswith("update.")}
    assert set(after) == names
    far = {name: float(distance(after[name].astype(np.float64) - before[name], golden["update." + name]))
           for name in names}
    assert max(far.values()) <= 5e-4, {name: d for name, d in far.items() if d > 5e-4}
