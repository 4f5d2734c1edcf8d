#!/usr/bin/env python3
"""Write golden/: what transformers computes for tiny random checkpoints of every family and rope type.

Needs torch and transformers (README.md names the versions); runs on the CPU in float32 with eager attention.

    python make_golden.py            write every case anew
    python make_golden.py NAME ...   only these
    python make_golden.py --sdpa     write nothing; print how far the same recipe with SDPA attention lands from what is
                                     stored: the noise floor under the tests' tolerances

A case is a folder:
    model/       config.json, as real checkpoints spell it, and the initial weights
    rows.jsonl   N_STEP * ROWS_A_STEP rows of unequal length, in the order in which they are trained on
    golden.npz   first step:  logits [tokens of its rows, vocab], loss, grad.<parameter>
                 every step:  losses, grad_norms, learning_rates, learned_tokens
                 at the end:  update.<parameter>, final minus initial
"""
import argparse
import json
import math
import shutil
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, get_scheduler

GOLDEN = Path(__file__).parent / "golden"

# The recipe, shared with the tests: written to golden/recipe.json.
RECIPE = dict(n_step=8, batch_size=2, accumulation=2, learning_rate=1e-3, warmup_steps=2, schedule="cosine",
              weight_decay=0.1, beta1=0.9, beta2=0.999, epsilon=1e-8, max_grad_norm=1.0)
ROWS_A_STEP = RECIPE["batch_size"] * RECIPE["accumulation"]
N_STEP = RECIPE["n_step"]
IGNORED = -100

# Rows past ORIGINAL positions test what a scaled rope does there.
ORIGINAL = 24
BASE = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=96, max_position_embeddings=128, hidden_act="silu", rms_norm_eps=1e-6, initializer_range=0.02,
            tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, torch_dtype="bfloat16", use_cache=True)

# Both spellings of each rope type.  Thetas and ranges are chosen so that the few frequencies of a small head fall on
# every branch: kept, smoothed, and fully scaled.  Where keys have a bias theta stays small: a key's bias that turns
# hardly at all has, softmax being blind to a shift, a gradient of nothing but rounding, which Adam would blow up.
LINEAR = dict(factor=2.5)
DYNAMIC = dict(factor=4.0)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL)
YARN = dict(factor=4.0, original_max_position_embeddings=ORIGINAL, beta_fast=1.5, beta_slow=0.1)


def scaling(rope_type, theta, keys, type_key="rope_type"):
    """The older spelling: rope_scaling beside rope_theta."""
    return dict(rope_theta=theta, rope_scaling={type_key: rope_type, **keys})


def parameters(rope_type, theta, keys):
    """The newer spelling: everything in rope_parameters."""
    return dict(rope_parameters={"rope_type": rope_type, "rope_theta": theta, **keys})


# Every family with every rope type; the rest of a family's switches are spread over its cases.
CASES = {
    # Llama 2: as many key-value heads as heads, no rope key at all (theta 10000).
    "llama-default": dict(model_type="llama", num_key_value_heads=4, rms_norm_eps=1e-5),
    # As SmolLM2 spells it: tied, keys that other tools put there.
    "llama-tied": dict(model_type="llama", tie_word_embeddings=True, num_hidden_layers=3, intermediate_size=48,
                       rope_theta=100000, rope_scaling=None, rope_interleaved=False, is_llama_config=True,
                       pretraining_tp=1, attention_bias=False, attention_dropout=0.0, mlp_bias=False),
    "llama-bias": dict(model_type="llama", attention_bias=True, mlp_bias=True, head_dim=16, rope_theta=500.0),
    "llama-f16-shards": dict(model_type="llama", hidden_size=48, num_hidden_layers=2, num_key_value_heads=1,
                             torch_dtype="float16", rope_theta=10000.0),
    "llama-linear": dict(model_type="llama", **scaling("linear", 10000.0, LINEAR, type_key="type")),
    "llama-dynamic": dict(model_type="llama", tie_word_embeddings=True, max_position_embeddings=ORIGINAL,
                          **scaling("dynamic", 10000.0, DYNAMIC, type_key="type")),
    "llama-llama3": dict(model_type="llama", tie_word_embeddings=True, head_dim=16,
                         **scaling("llama3", 500.0, LLAMA3)),
    "llama-yarn": dict(model_type="llama", head_dim=16,
                       **parameters("yarn", 1000.0, dict(YARN, attention_factor=1.25, truncate=False))),
    # The window is shorter than most rows.
    "mistral-default": dict(model_type="mistral", sliding_window=7, **parameters("default", 2000.0, {})),
    "mistral-linear": dict(model_type="mistral", sliding_window=None, head_dim=12,
                           **parameters("linear", 10000.0, LINEAR)),
    "mistral-dynamic": dict(model_type="mistral", sliding_window=16, max_position_embeddings=ORIGINAL,
                            **parameters("dynamic", 10000.0, DYNAMIC)),
    "mistral-llama3": dict(model_type="mistral", sliding_window=None, head_dim=16, torch_dtype="float32",
                           **parameters("llama3", 500.0, LLAMA3)),
    "mistral-yarn": dict(model_type="mistral", sliding_window=11, head_dim=16,
                         **scaling("yarn", 1000.0, dict(YARN, mscale=1.0, mscale_all_dim=0.5))),
    # sliding_window without use_sliding_window is no window.
    "qwen2-default": dict(model_type="qwen2", tie_word_embeddings=True, use_sliding_window=False, sliding_window=5,
                          max_window_layers=0, rope_theta=100.0),
    "qwen2-linear": dict(model_type="qwen2", num_hidden_layers=3, use_sliding_window=True, sliding_window=6,
                         max_window_layers=1, **parameters("linear", 100.0, LINEAR)),
    "qwen2-dynamic": dict(model_type="qwen2", max_position_embeddings=ORIGINAL,
                          **parameters("dynamic", 50.0, DYNAMIC)),
    "qwen2-llama3": dict(model_type="qwen2", hidden_size=48, num_attention_heads=3, num_key_value_heads=1,
                         **scaling("llama3", 100.0, LLAMA3)),
    # As the Qwen2.5 model cards ask for it.
    "qwen2-yarn": dict(model_type="qwen2", max_position_embeddings=4 * ORIGINAL,
                       **scaling("yarn", 100.0, dict(factor=4.0, original_max_position_embeddings=ORIGINAL),
                                 type_key="type")),
    "qwen3-default": dict(model_type="qwen3", head_dim=16, tie_word_embeddings=True, rope_scaling=None,
                          rope_theta=1000000, sliding_window=None, use_sliding_window=False, max_window_layers=2,
                          attention_bias=False),
    "qwen3-linear": dict(model_type="qwen3", head_dim=8, attention_bias=True,
                         **scaling("linear", 10000.0, LINEAR)),
    "qwen3-dynamic": dict(model_type="qwen3", head_dim=16, max_position_embeddings=ORIGINAL,
                          **scaling("dynamic", 10000.0, DYNAMIC)),
    "qwen3-llama3": dict(model_type="qwen3", head_dim=16, num_hidden_layers=3, use_sliding_window=True,
                         sliding_window=9, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                         **parameters("llama3", 500.0, LLAMA3)),
    "qwen3-yarn": dict(model_type="qwen3", head_dim=16, **parameters("yarn", 1000.0, YARN)),
}
CLASSES = dict(llama="LlamaForCausalLM", mistral="MistralForCausalLM", qwen2="Qwen2ForCausalLM",
               qwen3="Qwen3ForCausalLM")
SHARDED = {"llama-f16-shards": 2}
# Scale of the final norm's weight, elsewhere 1: it brings the gradient's norm to both sides of the clip.
FINAL_NORM = {"llama-bias": 0.6, "qwen3-linear": 0.55}


def seed_of(name):
    return zlib.crc32(name.encode())


def write_model(folder, name):
    """config.json and random weights, every one of them away from 0 and 1, so that a forgotten bias or norm shows."""
    config = dict(architectures=[CLASSES[CASES[name]["model_type"]]], **{**BASE, **CASES[name]})
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    dtype = getattr(torch, config["torch_dtype"])
    rng = torch.Generator().manual_seed(seed_of(name))
    shapes = AutoModelForCausalLM.from_config(load_config(folder))
    weights = {}
    for key, tensor in shapes.named_parameters():       # a tied head appears once, as the embedding
        noise = torch.randn(tensor.shape, generator=rng)
        if key.endswith("norm.weight"):
            value = 1 + 0.2 * noise
        elif tensor.ndim == 1:
            value = 0.3 * noise
        elif "embed" in key:
            value = 0.5 * noise
        else:
            value = noise / math.sqrt(tensor.shape[1])
        if key == "model.norm.weight":
            value *= FINAL_NORM.get(name, 1)
        weights[key] = value.to(torch.bfloat16).to(dtype).contiguous()   # the same values whatever the dtype

    n_shard = SHARDED.get(name, 1)
    if n_shard == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    place = {key: f"model-{1 + i * n_shard // len(weights):05}-of-{n_shard:05}.safetensors"
             for i, key in enumerate(weights)}
    for file in sorted(set(place.values())):
        save_file({k: v for k, v in weights.items() if place[k] == file}, folder / file, metadata={"format": "pt"})
    index = dict(metadata=dict(total_size=sum(v.nbytes for v in weights.values())), weight_map=place)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def load_config(folder):
    from transformers import AutoConfig
    return AutoConfig.from_pretrained(folder)


def load_model(folder, attention):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return model.train()    # no family here has dropout by default


def write_rows(path, name):
    """Rows in pairs (one pair a micro-batch).  The longer lengths walk through every turn of the dynamic rope: below
    the original context, above it, further up, back under it (reset), exactly at it, above but below the peak."""
    rng = np.random.default_rng(seed_of(name))
    longer = [20, 33, 44, 27, 15, ORIGINAL, 30, 41] * (N_STEP * ROWS_A_STEP // 16)
    rows = []
    for length in longer:
        pair = [length, int(rng.integers(3, length))]
        rng.shuffle(pair)
        for n in pair:
            ids = rng.integers(0, BASE["vocab_size"], n)
            labels = ids.copy()
            kind = rng.integers(4)
            if kind == 0:                           # a prompt that is not learned
                labels[:rng.integers(1, n)] = IGNORED
            elif kind == 1:                         # holes
                labels[rng.random(n) < 0.3] = IGNORED
            elif kind == 2:                         # labels need not repeat the input
                labels[n - 1] = rng.integers(0, BASE["vocab_size"])
            labels[-1] = labels[-1] if labels[-1] != IGNORED else ids[-1]   # something is learned in every row
            row = dict(input_ids=ids.tolist())
            if kind != 3:                           # without labels everything is learned
                row["labels"] = labels.tolist()
            rows.append(row)
    path.write_text("".join(json.dumps(r, separators=(",", ":")) + "\n" for r in rows))


def read_rows(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(r["input_ids"], r.get("labels", r["input_ids"])) for r in rows]


def micro_batches(rows):
    """Pairs of rows, padded on the right."""
    for first in range(0, len(rows), RECIPE["batch_size"]):
        pair = rows[first:first + RECIPE["batch_size"]]
        size = (len(pair), max(len(ids) for ids, _ in pair))
        ids = torch.zeros(size, dtype=torch.long)
        mask = torch.zeros(size, dtype=torch.long)
        labels = torch.full(size, IGNORED)
        for i, (row, row_labels) in enumerate(pair):
            ids[i, :len(row)] = torch.tensor(row)
            mask[i, :len(row)] = 1
            labels[i, :len(row)] = torch.tensor(row_labels)
        yield ids, mask, labels


def learned(rows):
    """A row's first token follows nothing, so it is never learned."""
    return sum(label != IGNORED for _, labels in rows for label in labels[1:])


def backward(model, rows):
    """Gradients of the token mean over all rows.  Returns the mean and the rows' logits, padding dropped."""
    n, total, logits = learned(rows), 0.0, []
    for ids, mask, labels in micro_batches(rows):
        out = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        nll = torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), labels[:, 1:].flatten(),
                                                ignore_index=IGNORED, reduction="none")
        (nll.sum() / n).backward()
        total += nll.detach().double().sum().item()
        logits += [out[i, :mask[i].sum()].detach() for i in range(len(ids))]
    return total / n, torch.cat(logits)


def first_step(folder, rows, attention):
    model = load_model(folder, attention)
    loss, logits = backward(model, rows[:ROWS_A_STEP])
    out = {"loss": np.float64(loss), "logits": logits.numpy()}
    out.update({"grad." + name: p.grad.numpy() for name, p in model.named_parameters()})
    return out


def training(folder, rows, attention):
    model = load_model(folder, attention)       # one object for all steps: the dynamic rope remembers
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = [dict(params=[p for p in model.parameters() if p.ndim > 1], weight_decay=RECIPE["weight_decay"]),
              dict(params=[p for p in model.parameters() if p.ndim == 1], weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=RECIPE["learning_rate"], betas=(RECIPE["beta1"], RECIPE["beta2"]),
                                  eps=RECIPE["epsilon"], foreach=False, fused=False)
    schedule = get_scheduler(RECIPE["schedule"], optimizer, RECIPE["warmup_steps"], N_STEP)

    log = dict(losses=[], grad_norms=[], learning_rates=[], learned_tokens=[])
    for step in range(N_STEP):
        batch = rows[step * ROWS_A_STEP:(step + 1) * ROWS_A_STEP]
        loss, _ = backward(model, batch)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE["max_grad_norm"])
        log["losses"].append(loss)
        log["grad_norms"].append(norm.item())
        log["learning_rates"].append(schedule.get_last_lr()[0])
        log["learned_tokens"].append(learned(batch))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    out = {key: np.array(values) for key, values in log.items()}
    for name, p in model.named_parameters():
        out["update." + name] = (p.detach().double() - before[name].double()).float().numpy()
    return out


def keep_bits(a, n):
    """a float32 array with n mantissa bits (of 23), to nearest: the rest compresses away."""
    bits = np.ascontiguousarray(a, np.float32).view(np.uint32).astype(np.uint64)
    drop = 23 - n
    bits = (bits + (1 << (drop - 1))) >> drop << drop
    return bits.astype(np.uint32).view(np.float32)


# Mantissa bits kept: the rounding stays more than 10 times under the tolerance that a test gives the array.
STORED_BITS = {"update.": 13, "grad.": 19}


def compute(name, attention):
    folder, rows = GOLDEN / name / "model", read_rows(GOLDEN / name / "rows.jsonl")
    return {**first_step(folder, rows, attention), **training(folder, rows, attention)}


def write_case(name):
    case = GOLDEN / name
    shutil.rmtree(case, ignore_errors=True)
    write_model(case / "model", name)
    write_rows(case / "rows.jsonl", name)
    arrays = compute(name, "eager")
    for key in arrays:
        for prefix, n in STORED_BITS.items():
            if key.startswith(prefix):
                arrays[key] = keep_bits(arrays[key], n)
    np.savez_compressed(case / "golden.npz", **arrays)
    print(f"{name:18} loss {arrays['losses'][0]:.4f} -> {arrays['losses'][-1]:.4f}  "
          f"norm {arrays['grad_norms'].min():.2f}..{arrays['grad_norms'].max():.2f}")


def distance(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def print_sdpa(name):
    stored, other = np.load(GOLDEN / name / "golden.npz"), compute(name, "sdpa")
    worst = {}
    for key in stored.files:
        if key in ("losses", "grad_norms"):
            worst[key] = np.max(np.abs(other[key] / stored[key] - 1))
        elif key == "logits" or "." in key:
            kind = key.split(".")[0]
            worst[kind] = max(worst.get(kind, 0), distance(other[key], stored[key]))
    print(f"{name:18} " + "  ".join(f"{kind} {value:.1e}" for kind, value in worst.items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sdpa", action="store_true")
    parser.add_argument("names", nargs="*", choices=[*CASES, []], metavar="NAME")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name in args.names or CASES:
        print_sdpa(name) if args.sdpa else write_case(name)
    if not args.sdpa:
        (GOLDEN / "recipe.json").write_text(json.dumps(RECIPE, indent=2) + "\n")


if __name__ == "__main__":
    main()
