"""The training step of bench/cpu_vs_torch.py in PyTorch: what forebay's step is measured against.

    torch_step.py model DIR                                   the demo's shape with random weights, as a folder
    torch_step.py train MODEL_DIR ROWS.jsonl LOG.jsonl STEPS THREADS LR

`train` runs the plain float32 loop that one would write: transformers' Llama with SDPA attention, the mean loss over
all tokens, backward, the global gradient norm clipped to 1, AdamW.  After each step a line goes to LOG.jsonl.
"""
import json
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

IGNORED = -100


def make_model(folder):
    torch.manual_seed(42)
    config = LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def read_batch(path):
    """Rows of one length need no mask, which is PyTorch's fast path; others are padded to the longest and masked."""
    with open(path, encoding="utf-8") as lines:
        rows = [json.loads(line)["input_ids"] for line in lines]
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, IGNORED)}
    if not mask.all():
        batch["attention_mask"] = mask
    return batch


def faster_adamw(model, lr):
    """fused or foreach: each makes updates with a gradient of zeros, which change no weight."""
    best = None
    for how in ("fused", "foreach"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, **{how: True})
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        seconds = []
        for _ in range(4):
            begin = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
        if best is None or min(seconds[1:]) < best[0]:
            best = min(seconds[1:]), how
    return best[1], torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, **{best[1]: True})


def train(folder, rows, log_path, n_step, n_thread, lr):
    torch.set_num_threads(n_thread)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    batch = read_batch(rows)
    how, optimizer = faster_adamw(model, lr)
    with open(log_path, "w", encoding="utf-8") as log:
        for _ in range(n_step):
            begin = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            line = {"loss": loss.item(), "grad_norm": norm.item(), "step_time": time.perf_counter() - begin}
            print(json.dumps(line), file=log, flush=True)
    print(f"torch {torch.__version__}, AdamW {how}, {torch.get_num_threads()} threads")


def main(command, *arguments):
    if command == "model":
        make_model(*arguments)
    else:
        folder, rows, log, n_step, n_thread, lr = arguments
        train(folder, rows, log, int(n_step), int(n_thread), float(lr))


main(*sys.argv[1:])
