"""Run by a Python that has torch: load a folder with transformers, write the logits of a row file.

    python torch_logits.py MODEL_DIR ROWS.jsonl OUT.npy"""
import json
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

folder, rows, out = sys.argv[1:]
torch.set_num_threads(1)
model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                   output_loading_info=True)
assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
with torch.no_grad():
    logits = [model(torch.tensor([json.loads(line)["input_ids"]])).logits[0].numpy() for line in open(rows)]
np.save(out, np.concatenate(logits))
