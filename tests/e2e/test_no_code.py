"""No code that lies in a checkpoint folder is run, and no pickle is opened."""
import json

import pytest

from fb_checkpoint import make_model, make_rows
from fb_command import forebay, options, write_rows, write_yaml

MODULE = "open({marker!r}, 'w').close()\n"


@pytest.fixture
def place(tmp_path):
    """A checkpoint whose every way of bringing code along is used: importing any of it leaves a mark."""
    auto_map = {name: f"evil.{name}" for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")}
    make_model(tmp_path / "model", auto_map=auto_map, trust_remote_code=True)
    code = MODULE.format(marker=str(tmp_path / "ran"))
    for name in ("evil.py", "sitecustomize.py", "numpy.py", "tokenizers.py", "jinja2.py", "json.py", "setup.py", "__init__.py"):
        (tmp_path / "model" / name).write_text(code)
    words = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": words}))
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map, "tokenizer_class": "evil"}))
    write_rows(tmp_path / "rows.jsonl", make_rows(4))
    return tmp_path


def test_training_runs_none(place, monkeypatch):
    monkeypatch.chdir(place / "model")  # where a Python that looked into its working folder would find it
    config = write_yaml(place / "run.yaml", options(place / "model", place / "rows.jsonl", place / "out"))
    result = forebay("train", config)
    assert result.code == 0, result.err
    assert forebay("data", config).code == 0
    assert not (place / "ran").exists()
    assert not list((place / "out").glob("*.py"))


def test_templates_run_none(place, monkeypatch):
    """The template's process starts in the checkpoint's folder too."""
    monkeypatch.chdir(place / "model")
    (place / "model" / "chat_template.jinja").write_text("{% import 'evil.py' as e %}")
    (place / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    result = forebay("train", write_yaml(place / "run.yaml", options(place / "model", place / "rows.jsonl", place / "out")))
    assert result.code == 3 and "the chat template fails: no loader" in result.last, result.err
    assert not (place / "ran").exists()


def test_pickles_are_refused(place):
    (place / "model" / "model.safetensors").rename(place / "model" / "pytorch_model.bin")
    result = forebay("inspect", place / "model")
    assert result.code == 3 and "neither model.safetensors nor" in result.last, result.err
