"""Perplexity of a Llama checkpoint on a text, in plain numpy.

    python perplexity.py MODEL_DIR TEXT_FILE

It shares no code with forebay, so it serves twice: it shows that a converted checkpoint is sound, and it is a second
opinion on what `forebay eval` computes.  Float32 throughout, one document, no cache; small models only.
"""
import json
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer


def read_safetensors(path):
    """name -> float32 array.  A u64 header length, a JSON header, then the data (safetensors README, "Format")."""
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    header_size = int(raw[:8].view("<u8")[0])
    header = json.loads(raw[8 : 8 + header_size].tobytes())
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + header_size + offset for offset in entry["data_offsets"])
        data = raw[begin:end].tobytes()
        if entry["dtype"] == "BF16":  # the upper half of a float32
            values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] == "F32":
            values = np.frombuffer(data, "<f4")
        else:
            raise ValueError(f"{path}: '{name}' is {entry['dtype']}, this reader knows BF16 and F32")
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x, cos, sin):
    """Rotary embedding as Hugging Face lays it out: element i pairs with element i + head_dim / 2.  x [T, heads, D]."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def log_softmax(x):
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def logits(config, weights, ids):
    """[T, vocab] for the T tokens in ids: a Llama forward (Touvron et al. 2023), one sequence."""
    n_token, n_head, n_kv_head = len(ids), config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // n_head
    eps = config["rms_norm_eps"]

    frequency = config["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    angle = np.arange(n_token)[:, None] * frequency
    cos, sin = (f(angle).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))
    future = np.triu(np.full((n_token, n_token), -np.inf, dtype=np.float32), k=1)

    x = weights["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        w = lambda name: weights[f"model.layers.{i}.{name}.weight"]
        h = rms_norm(x, w("input_layernorm"), eps)
        q = rotate((h @ w("self_attn.q_proj").T).reshape(n_token, n_head, head_dim), cos, sin)
        k = rotate((h @ w("self_attn.k_proj").T).reshape(n_token, n_kv_head, head_dim), cos, sin)
        v = (h @ w("self_attn.v_proj").T).reshape(n_token, n_kv_head, head_dim)
        k, v = (np.repeat(a, n_head // n_kv_head, axis=1) for a in (k, v))
        score = np.einsum("qhd,khd->hqk", q, k) / np.float32(np.sqrt(head_dim)) + future
        mixed = np.einsum("hqk,khd->qhd", np.exp(log_softmax(score)), v)
        x = x + mixed.reshape(n_token, -1) @ w("self_attn.o_proj").T

        h = rms_norm(x, w("post_attention_layernorm"), eps)
        gate = h @ w("mlp.gate_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T

    head = weights["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return rms_norm(x, weights["model.norm.weight"], eps) @ head.T


def perplexity(model_dir, text):
    """exp of the mean -log p over every token of the text but the first."""
    model_dir = Path(model_dir)
    config = json.loads((model_dir / "config.json").read_text())
    if config["model_type"] != "llama" or config.get("rope_scaling"):
        raise ValueError(f"{model_dir}: only llama without rope scaling is written down here")
    weights = read_safetensors(model_dir / "model.safetensors")
    ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text).ids
    log_p = log_softmax(logits(config, weights, ids[:-1]))
    return float(np.exp(-log_p[np.arange(len(ids) - 1), ids[1:]].mean()))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: perplexity.py MODEL_DIR TEXT_FILE")
    print(f"perplexity: {perplexity(sys.argv[1], Path(sys.argv[2]).read_text().strip()):.4f}")
