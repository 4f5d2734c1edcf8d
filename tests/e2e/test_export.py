"""What a run leaves is a Hugging Face folder."""
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fb_checkpoint import HF_DTYPE, bf16_f32, f32_bf16, read_header, read_model, read_safetensors, write_safetensors
from fb_command import GOLDEN, HANG_SECONDS, distance, forebay, golden_dump, train

CASES = ["llama-tied", "llama-bias", "llama-f16-shards", "mistral-default", "qwen2-default", "qwen3-llama3"]
# Keys that may differ because of save_dtype, or because a tool signs with its version.
DTYPE_KEYS = {"torch_dtype", "dtype", "transformers_version"}


@pytest.mark.parametrize("save_dtype", ["float32", "auto"])
@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_it_with_the_same_logits(case, save_dtype, torch_or_skip, tmp_path):
    model, rows, out = GOLDEN / case / "model", GOLDEN / case / "rows.jsonl", tmp_path / "out"
    train(out, model, rows, max_steps=3, save_dtype=save_dtype)
    script = Path(__file__).parent / "torch_logits.py"
    done = subprocess.run([torch_or_skip, script, out, rows, tmp_path / "theirs.npy"], capture_output=True, text=True,
                          timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    ours = golden_dump(out, rows, tmp_path / "ours.safetensors")["logits"]
    assert distance(ours, np.load(tmp_path / "theirs.npy")) <= 1e-5


@pytest.mark.parametrize("case", CASES)
def test_config_and_tensors_are_kept(case, tmp_path):
    model, out = GOLDEN / case / "model", tmp_path / "out"
    train(out, model, GOLDEN / case / "rows.jsonl", max_steps=2, save_dtype=None)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (model, out))
    assert {k: v for k, v in after.items() if k not in DTYPE_KEYS} == \
        {k: v for k, v in before.items() if k not in DTYPE_KEYS}
    assert after.get("torch_dtype", after.get("dtype")) == before["torch_dtype"]
    header, _ = read_header(out / "model.safetensors")
    assert {t["dtype"] for t in header.values()} == {HF_DTYPE[before["torch_dtype"]]}
    want = read_model(model)
    assert {name: a.shape for name, a in read_model(out).items()} == {name: a.shape for name, a in want.items()}
    assert ("lm_head.weight" in want) == (not before["tie_word_embeddings"])


def test_save_dtype(models, rows24, tmp_path):
    """bfloat16 is the float32 master rounded once, to nearest even; config.json says which it is."""
    for dtype in ("float32", "bfloat16"):
        train(tmp_path / dtype, models["untied"], rows24, save_dtype=dtype)
        config = json.loads((tmp_path / dtype / "config.json").read_text())
        assert config.get("torch_dtype", config.get("dtype")) == dtype
    wide, narrow = (read_safetensors(tmp_path / dtype / "model.safetensors") for dtype in ("float32", "bfloat16"))
    assert all(np.array_equal(narrow[name], bf16_f32(f32_bf16(wide[name]))) for name in wide)


def test_files_beside_the_weights_come_along(models, rows24, tmp_path):
    model = shutil.copytree(models["tied"], tmp_path / "model")
    words = dict(version="1.0", truncation=None, padding=None, added_tokens=[], normalizer=None, pre_tokenizer=None,
                 post_processor=None, decoder=None,
                 model=dict(type="WordLevel", vocab={f"w{i}": i for i in range(96)}, unk_token="w0"))
    texts = {"tokenizer.json": json.dumps(words), "tokenizer_config.json": '{"eos_token": "w2", "odd": 1}',
             "special_tokens_map.json": '{"eos_token": "w2"}', "generation_config.json": '{"eos_token_id": 2}'}
    for name, text in texts.items():
        (model / name).write_text(text)
    train(tmp_path / "out", model, rows24, max_steps=1)
    assert {name: (tmp_path / "out" / name).read_text() for name in texts} == texts


def test_old_checkpoints_extra_tensors(models, rows24, tmp_path):
    """A head beside tied embeddings that equals them, and rotary tables: passed over, as transformers does."""
    model = shutil.copytree(models["tied"], tmp_path / "model")
    weights = read_safetensors(model / "model.safetensors")
    extra = {"lm_head.weight": weights["model.embed_tokens.weight"],
             "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    write_safetensors(model / "model.safetensors", {**weights, **extra})
    train(tmp_path / "plain", models["tied"], rows24, max_steps=2)
    train(tmp_path / "extra", model, rows24, max_steps=2)
    plain, other = (read_safetensors(tmp_path / name / "model.safetensors") for name in ("plain", "extra"))
    assert set(plain) == set(weights)
    assert all(np.array_equal(plain[name], other[name]) for name in plain)


def test_checkpoint_and_export(models, rows24, tmp_path):
    """A checkpoint is a folder of the same kind; `export` takes the model out of it."""
    out = tmp_path / "out"
    train(out, models["untied"], rows24, save_strategy="steps", save_steps=3)
    checkpoint = out / "checkpoint-6"
    for name in ("config.json", "model.safetensors", "trainer_state.json"):
        assert (checkpoint / name).exists()
    assert (out / "checkpoint-3").exists()
    result = forebay("export", checkpoint, tmp_path / "exported")
    assert result.code == 0, result.err
    final, exported = read_model(out), read_model(tmp_path / "exported")
    assert set(final) == set(exported)
    assert all(np.array_equal(final[name], exported[name]) for name in final)
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["model_type"] == "qwen3"


def test_save_total_limit(models, rows24, tmp_path):
    train(tmp_path / "out", models["tied"], rows24, save_strategy="steps", save_steps=1, save_total_limit=2)
    kept = sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*"))
    assert kept == ["checkpoint-5", "checkpoint-6"]


def test_inspect(models):
    result = forebay("inspect", models["untied"], "--json")
    assert result.code == 0, result.err
    text = json.dumps(json.loads(result.out))
    assert all(name in text for name in read_model(models["untied"]))
