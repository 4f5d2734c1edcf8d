"""Documents that share a sequence never see one another."""
import json

import numpy as np
import pytest

from fb_command import GOLDEN, golden_dump, learned, read_rows, steps, train, write_rows

RECIPE = json.loads((GOLDEN / "recipe.json").read_text())
ROWS_A_STEP = RECIPE["batch_size"] * RECIPE["accumulation"]
LENGTHS = [11, 1, 30, 2, 17]
MODELS = ["llama-tied", "mistral-default", "qwen2-linear", "qwen3-llama3", "llama-dynamic"]


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("changed", range(len(LENGTHS)))
def test_other_documents_do_not_move(case, changed, tmp_path):
    rng = np.random.default_rng(changed)
    rows = [(rng.integers(0, 96, n).tolist(), None) for n in LENGTHS]
    other = list(rows)
    other[changed] = ([(token + 1) % 96 for token in rows[changed][0]], None)
    a, b = (golden_dump(GOLDEN / case / "model", write_rows(tmp_path / f"{name}.jsonl", set_of_rows),
                        tmp_path / f"{name}.safetensors", packed=True)["logits"]
            for name, set_of_rows in (("a", rows), ("b", other)))
    assert len(a) == sum(LENGTHS)
    starts = np.cumsum([0, *LENGTHS])
    for doc in range(len(LENGTHS)):
        part = slice(starts[doc], starts[doc + 1])
        same = a[part].tobytes() == b[part].tobytes()
        assert same == (doc != changed), f"document {doc}"


@pytest.mark.parametrize("case", ["llama-tied", "mistral-default", "qwen3-default"])
def test_training_on_a_pack_is_training_on_its_rows(case, tmp_path):
    golden = np.load(GOLDEN / case / "golden.npz")
    rows = write_rows(tmp_path / "rows.jsonl", read_rows(GOLDEN / case / "rows.jsonl")[:ROWS_A_STEP])
    log = steps(train(tmp_path / "out", GOLDEN / case / "model", rows, packing=True, cutoff_len=256,
                      per_device_train_batch_size=1, gradient_accumulation_steps=1))
    assert len(log) == 1
    assert log[0]["tokens"] == golden["learned_tokens"][0]
    np.testing.assert_allclose(log[0]["loss"], golden["loss"], rtol=2e-6)
    np.testing.assert_allclose(log[0]["grad_norm"], golden["grad_norms"][0], rtol=5e-6)


def test_packs_hold_every_row_once(tmp_path):
    rows = GOLDEN / "llama-tied" / "rows.jsonl"
    log = steps(train(tmp_path / "out", GOLDEN / "llama-tied" / "model", rows, packing=True, cutoff_len=64,
                      per_device_train_batch_size=1, gradient_accumulation_steps=1))
    assert sum(line["tokens"] for line in log) == learned(read_rows(rows))
    n_token = sum(len(ids) for ids, _ in read_rows(rows))
    assert n_token / 64 <= len(log) < ROWS_A_STEP * RECIPE["n_step"]
