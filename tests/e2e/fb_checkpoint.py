"""Tiny random checkpoints, good ones and, for the tests of refusals, broken ones.

Reading and writing safetensors is spelled out here, byte by byte, so that a test can write what no library would."""
import json
import struct
from pathlib import Path

import numpy as np

CONFIG = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=32, intermediate_size=40,
              num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=96,
              max_position_embeddings=128, hidden_act="silu", rms_norm_eps=1e-5, rope_theta=10000.0,
              tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, torch_dtype="bfloat16")
QWEN3 = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=16, attention_bias=False,
             use_sliding_window=False, sliding_window=None, max_window_layers=4)
NP_DTYPE = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
HF_DTYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def shapes(config):
    """Name and shape of every tensor, as the families' reference implementations register them."""
    c, hidden, ffn, out = config, config["hidden_size"], config["intermediate_size"], {}
    head_dim = c.get("head_dim") or hidden // c["num_attention_heads"]
    q, kv = head_dim * c["num_attention_heads"], head_dim * c["num_key_value_heads"]
    qkv_bias = c["model_type"] == "qwen2" or c.get("attention_bias", False)
    out["model.embed_tokens.weight"] = (c["vocab_size"], hidden)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        out[at + "input_layernorm.weight"] = (hidden,)
        for name, rows, cols in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)):
            out[at + f"self_attn.{name}_proj.weight"] = (rows, cols)
            if qkv_bias and (name != "o" or c["model_type"] != "qwen2"):
                out[at + f"self_attn.{name}_proj.bias"] = (rows,)
        if c["model_type"] == "qwen3":
            out[at + "self_attn.q_norm.weight"] = out[at + "self_attn.k_norm.weight"] = (head_dim,)
        out[at + "post_attention_layernorm.weight"] = (hidden,)
        for name, rows, cols in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
            out[at + f"mlp.{name}_proj.weight"] = (rows, cols)
            if c.get("mlp_bias", False):
                out[at + f"mlp.{name}_proj.bias"] = (rows,)
    out["model.norm.weight"] = (hidden,)
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (c["vocab_size"], hidden)
    return out


def random_weights(config, seed=1):
    """float32 values that bfloat16 holds exactly."""
    rng, weights = np.random.default_rng(seed), {}
    for name, shape in shapes(config).items():
        noise = rng.standard_normal(shape).astype(np.float32)
        if name.endswith("norm.weight"):
            noise = 1 + 0.2 * noise
        elif len(shape) == 1:
            noise *= 0.3
        else:
            noise *= 0.5 if "embed" in name else shape[1] ** -0.5
        weights[name] = bf16_f32(f32_bf16(noise))
    return weights


def f32_bf16(a):
    """Rounds to nearest, ties to even: bit patterns as uint16."""
    bits = np.ascontiguousarray(a, np.float32).view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def bf16_f32(a):
    return (a.astype(np.uint32) << 16).view(np.float32)


def encode(array, dtype):
    return (f32_bf16(array) if dtype == "BF16" else np.asarray(array).astype(NP_DTYPE[dtype])).tobytes()


def entries(weights, dtype="BF16"):
    """[(name, dtype, shape, begin, end)] and the data, in the order given: what a header says, free to be bent."""
    table, data = [], b""
    for name, array in weights.items():
        piece = encode(array, dtype)
        table.append([name, dtype, list(array.shape), len(data), len(data) + len(piece)])
        data += piece
    return table, data


def header_text(table):
    """Written out by hand, so that a name may come twice."""
    pairs = [f'{json.dumps(name)}:{json.dumps(dict(dtype=dtype, shape=shape, data_offsets=[begin, end]))}'
             for name, dtype, shape, begin, end in table]
    return "{" + ",".join(['"__metadata__":{"format":"pt"}', *pairs]) + "}"


def write_raw(path, header, data, length=None):
    """header: text; length: what the first eight bytes claim, when not the truth."""
    text = header.encode()
    Path(path).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def write_safetensors(path, weights, dtype="BF16"):
    table, data = entries(weights, dtype)
    write_raw(path, header_text(table), data)


def read_header(path):
    blob = Path(path).read_bytes()
    n, = struct.unpack_from("<Q", blob)
    header = json.loads(blob[8:8 + n])
    header.pop("__metadata__", None)
    return header, blob[8 + n:]


def read_safetensors(path):
    """Everything as float32, exactly."""
    header, data = read_header(path)
    out = {}
    for name, t in header.items():
        a = np.frombuffer(data[slice(*t["data_offsets"])], NP_DTYPE[t["dtype"]]).reshape(t["shape"])
        out[name] = bf16_f32(a) if t["dtype"] == "BF16" else a.astype(np.float32)
    return out


def read_model(folder):
    """All tensors of a model folder, one file or several."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else \
        ["model.safetensors"]
    out = {}
    for file in files:
        out.update(read_safetensors(folder / file))
    return out


def make_model(folder, seed=1, **config):
    config = {**CONFIG, **config}
    folder = Path(folder)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_safetensors(folder / "model.safetensors", random_weights(config, seed), HF_DTYPE[config["torch_dtype"]])
    return folder


def make_rows(n, seed=1, vocab=96, length=(3, 40), masked=True):
    """n rows of unequal length, about a third of their labels masked."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(n):
        ids = rng.integers(0, vocab, rng.integers(*length))
        labels = np.where(rng.random(len(ids)) < 0.3, -100, ids) if masked else ids.copy()
        labels[-1] = ids[-1]
        rows.append((ids.tolist(), labels.tolist()))
    return rows
