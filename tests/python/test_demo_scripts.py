"""The demo's scripts, each against something that it did not compute itself."""
import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from tokenizers import Tokenizer, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[2] / "demo"))
import convert_smollm2
import make_jargon
import perplexity


def test_both_rope_layouts_give_the_same_attention_scores():
    """q.k after rotation is what matters; in GGUF's layout a rotated pair is a complex number times exp(i angle)."""
    rng = np.random.default_rng(7)
    n_head, head_dim, hidden, n_token = 3, 8, 12, 5
    gguf_q, gguf_k = (rng.standard_normal((n_head * head_dim, hidden)) for _ in range(2))
    x = rng.standard_normal((n_token, hidden))
    angle = np.arange(n_token)[:, None] * 10.0 ** -np.arange(head_dim // 2)

    def gguf_scores():
        pair = lambda w: (x @ w.T).reshape(n_token, n_head, head_dim // 2, 2).view(np.complex128)[..., 0]
        q, k = (pair(w) * np.exp(1j * angle)[:, None, :] for w in (gguf_q, gguf_k))
        return np.einsum("qhd,khd->hqk", q, k.conj()).real

    def hf_scores():
        cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
        q, k = (
            perplexity.rotate(
                (x @ convert_smollm2.undo_rope_layout(w, n_head).T).reshape(n_token, n_head, head_dim), cos, sin
            )
            for w in (gguf_q, gguf_k)
        )
        return np.einsum("qhd,khd->hqk", q, k)

    np.testing.assert_allclose(hf_scores(), gguf_scores(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "value, bits",
    [(1.0, 0x3F80), (-2.5, 0xC020), (1 + 2**-8, 0x3F80), (1 + 3 * 2**-8, 0x3F82), (1 + 2**-8 + 2**-20, 0x3F81), (0.0, 0)],
)
def test_bfloat16_rounds_to_nearest_even(value, bits):
    assert convert_smollm2.to_bfloat16(np.array([value])).tolist() == [bits]


def write_model(folder, embedding):
    """A Llama of one layer whose weights are all zero but the embedding and the norms: each layer adds nothing."""
    vocab, hidden = embedding.shape
    config = {"model_type": "llama", "hidden_size": hidden, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"num_hidden_layers": 1, "rms_norm_eps": 0.0, "rope_theta": 10000.0, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0."
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden)}
    shapes |= {"self_attn.k_proj": (hidden // 2, hidden), "self_attn.v_proj": (hidden // 2, hidden)}
    shapes |= {"mlp.gate_proj": (3, hidden), "mlp.up_proj": (3, hidden), "mlp.down_proj": (hidden, 3)}
    tensors = {f"{layer}{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for name in (layer + "input_layernorm", layer + "post_attention_layernorm", "model.norm"):
        tensors[name + ".weight"] = np.ones(hidden, np.float32)
    tensors["model.embed_tokens.weight"] = embedding.astype(np.float32)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_perplexity_has_a_closed_form_when_the_layers_add_nothing(tmp_path):
    """Token i embedded as 2 e_i, normed to sqrt(C) e_i: the logit is 2 sqrt(C) for the same token again, else 0."""
    hidden = 4
    write_model(tmp_path, 2.0 * np.eye(hidden))
    peak = np.exp(2 * np.sqrt(hidden))
    same, other = peak / (peak + hidden - 1), 1 / (peak + hidden - 1)
    assert perplexity.perplexity(tmp_path, "w1 w1 w2") == pytest.approx((same * other) ** -0.5, rel=1e-5)


def test_dictd_numbers_are_base_64():
    assert [make_jargon.dictd_number(text) for text in ("A", "B", "/", "BA", "BB/")] == [0, 1, 63, 64, 4096 + 64 + 63]


@pytest.mark.parametrize(
    "body, answer",
    [
        (
            "\n    [common; from the PDP-10] 1. To lose a race, badly and in public, as {\n    luser}s do. See also {spam},"
            " {\n    core dump}.\n\n    2. Anything else.\n",
            "To lose a race, badly and in public, as lusers do.",
        ),
        ("\n    (also frobnitz) A “thing” that nobody can name, but everybody wants.\n\n    F\n",
         'A "thing" that nobody can name, but everybody wants.'),
        ("\n    See {foo}.\n", None),
        ("\n    A list, drawn as a table of values, that takes a line or two to see\n    ─────\n", None),
        ("\n    Mail the editor, who will be glad of it, at somebody@example.com today.\n", None),
    ],
)
def test_a_definition_is_whole_sentences_without_markup(body, answer, monkeypatch):
    monkeypatch.setattr(make_jargon, "ANSWER_MIN", 40)
    assert make_jargon.definition(body.translate(make_jargon.PLAIN)) == answer


def test_a_long_definition_is_cut_between_sentences(monkeypatch):
    monkeypatch.setattr(make_jargon, "ANSWER_MAX", 100)
    text = make_jargon.definition("\n    " + "This sentence has a length of forty-six letters. " * 5)
    assert text == "This sentence has a length of forty-six letters. This sentence has a length of forty-six letters."


def test_a_folder_with_too_few_entries_is_refused(tmp_path):
    entry = "foo\n /foo/, n.\n\n    The first of the metasyntactic variables, used for whatever has no name yet.\n"
    (tmp_path / "jargon.dict.dz").write_bytes(gzip.compress(entry.encode()))
    (tmp_path / "jargon.index").write_text("foo\tA\tBA\n")
    with pytest.raises(SystemExit, match=r"at least 1000 \+ 30 are expected"):
        make_jargon.main(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
