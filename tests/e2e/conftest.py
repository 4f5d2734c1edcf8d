"""Fixtures of the end-to-end tests.  FOREBAY names the command to test (default build/forebay)."""
import pytest

from fb_checkpoint import QWEN3, make_model, make_rows
from fb_command import FOREBAY, torch_python, write_rows


@pytest.fixture(scope="session", autouse=True)
def command():
    assert FOREBAY.exists(), f"{FOREBAY} is missing: build first, or set FOREBAY"


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Two unlike models: a tied Llama with biases in bfloat16, an untied Qwen3 in float32."""
    at = tmp_path_factory.mktemp("models")
    return {"tied": make_model(at / "tied", tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
            "untied": make_model(at / "untied", seed=2, torch_dtype="float32", **QWEN3)}


@pytest.fixture(scope="session")
def rows24(tmp_path_factory):
    """24 rows: 6 steps of 2 x 2."""
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", make_rows(24))


@pytest.fixture(scope="session")
def torch_or_skip():
    python = torch_python()
    if python is None:
        pytest.skip("torch and transformers are not importable by $FOREBAY_TORCH_PYTHON or python3")
    return python
