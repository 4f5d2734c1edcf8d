"""Writes the first inputs of the C fuzz targets into a folder, one subfolder a target: small good files to mutate.

    python tests/fuzz/make_seeds.py FOLDER

tests/fuzz/corpus holds what fuzzing made of them (tests/fuzz/run.sh merge); another format's first inputs are added here."""
import json
import struct
import sys
from pathlib import Path

import numpy as np
import xxhash

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "e2e"), str(ROOT / "python")]
from fb_checkpoint import CONFIG, QWEN3, write_raw, write_safetensors
from forebay.shard import HEADER, HEADER_SIZE, MAGIC, Writer

CUT = b"\xff"  # between the parts of an input


def put(folder, name, data):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def shards(folder):
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "two", {"a": np.zeros((2, 2), np.float32), "b": np.ones(3, np.float32)})
    write_safetensors(folder / "f32", {"model.norm.weight": np.ones(4, np.float32)}, "F32")
    write_safetensors(folder / "empty_tensor", {"a": np.zeros((0, 3), np.float32), "b": np.zeros(1, np.float32)}, "F16")
    write_raw(folder / "none", "{}", b"")
    write_raw(folder / "scalar", '{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}   ', b"1234")


def indices(folder):
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    good = {"metadata": {"total_size": 16}, "weight_map": {"a": files[0], "b": files[1], "c": files[1]}}
    put(folder, "good", json.dumps(good))
    for name, target in (("up", "../out.safetensors"), ("link", "out.safetensors"), ("absolute", "/etc/passwd"), ("dot", "."),
                         ("dots", ".."), ("nul", "a\0b"), ("gone", "gone.safetensors")):
        put(folder, name, json.dumps({"weight_map": {**good["weight_map"], "d": target}}))


def configs(folder):
    ropes = {
        "linear": {"rope_type": "linear", "factor": 2.0},
        "dynamic": {"type": "dynamic", "factor": 4.0},
        "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 64},
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1,
                 "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False, "attention_factor": 1.1},
    }
    for name, rope in ropes.items():
        put(folder, name, json.dumps({**CONFIG, "rope_scaling": rope}))
    put(folder, "parameters", json.dumps({**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}))
    put(folder, "qwen3", json.dumps({**CONFIG, **QWEN3, "layer_types": ["full_attention"] * 4}))
    put(folder, "qwen2", json.dumps({**CONFIG, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
                                     "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}))
    put(folder, "mistral", json.dumps({**CONFIG, "model_type": "mistral", "architectures": ["MistralForCausalLM"],
                                       "sliding_window": 8}))
    put(folder, "tied", json.dumps({**CONFIG, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
                                    "pad_token_id": 0}))
    put(folder, "generation", json.dumps(CONFIG).encode() + CUT + b'{"eos_token_id": [2, 3, 4]}')
    put(folder, "wide", json.dumps({**CONFIG, "hidden_size": 2**31 - 2, "num_attention_heads": 1, "num_key_value_heads": 1,
                                    "num_hidden_layers": 512, "intermediate_size": 2**31 - 1, "vocab_size": 2**31 - 1}))


def options(folder):
    for path in sorted(ROOT.glob("demo/*.yaml")):
        put(folder, path.stem, path.read_bytes())
    put(folder, "keys", "model_name_or_path: m\ndataset: a, b\noutput_dir: o\nlearning_rate: 1e-4\n"
                        "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-6}\nhbm_budget: 16GiB\nslots: "
                        "all\nseed: 1_000\nval_size: 0.1\n"
                        "eval_steps: 5\nbf16: true\nreport_to: [none]\npacking: yes\nrecompute: full\n")
    put(folder, "arguments", b"seed: 1\n" + CUT + b"seed=2" + CUT + b"lr_scheduler_kwargs={min_lr: 1e-6}" + CUT +
        b"report_to=[none]" + CUT + b"warmup_type=linear" + CUT + b"lr_scheduler_type=warmup_stable_decay")
    put(folder, "refused", "a: &x [1, 2]\nb: *x\nc: !tag 3\n---\nd: |\n  text\n  more\n")
    put(folder, "mark", b"\xef\xbb\xbfseed: 7 # comment\n")


def token_shards(folder):
    folder.mkdir(parents=True, exist_ok=True)
    def write(name, documents):
        writer = Writer(str(folder / name))
        for ids, labels in documents:
            writer.add(np.array(ids), np.array(labels))
        writer.finish({"fingerprint": "0"})
    write("mask", [([1, 2, 3], [-100, 2, 3]), ([4, 5], [-100, 5])])
    write("ids", [([1, 2, 3, 9], [-100, 7, -100, 9])])
    meta = b"{}"  # nothing but a header
    ends = struct.pack("<Q", 0)
    body = ends + bytes(56) + meta
    head = HEADER.pack(MAGIC, 1, HEADER_SIZE, 0, 0, 0, 128, 128, 128, 192, len(meta), 128 + len(body),
                       xxhash.xxh3_64_intdigest(body), 0, 0, 0)
    put(folder, "nothing", head.ljust(HEADER_SIZE, b"\0") + body)


def progress(folder):
    ours = {"data_step": 3, "update_step": 2, "rows_per_epoch": 8, "steps_per_epoch": 4, "rope_len": 0, "nonfinite_in_a_row": 1,
            "loss_sum": 0.0, "n_learned": 0, "elapsed": 1.5, "finished": False, "run": {}}
    whole = {"epoch": 0.75, "global_step": 3, "max_steps": 12, "log_history": [], "forebay": ours}
    put(folder, "good", json.dumps(whole, indent=2))
    put(folder, "range", json.dumps({"max_steps": 1, "forebay": {**ours, "rope_len": 2**32}}))


def main():
    folder = Path(sys.argv[1])
    for name, make in (("shard", shards), ("index", indices), ("config", configs), ("yaml", options), ("tokens", token_shards),
                       ("progress", progress)):
        make(folder / name)


if __name__ == "__main__":
    main()
