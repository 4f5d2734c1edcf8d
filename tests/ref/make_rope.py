"""Writes rope_fixture.h: rotary frequencies, cosines and sines as transformers computes them, for test_rope.c.

    python tests/ref/make_rope.py > tests/ref/rope_fixture.h

Made with transformers 5.17.0 and torch 2.11.0 on a CPU.  torch's vectorised float32 power is off by one unit in the
last place for about one frequency in 200, differently from processor to processor; its plain kernels are correctly
rounded in every case here, so those are the reference.
"""

import json
import os
import sys

os.environ["ATEN_CPU_CAPABILITY"] = "default"  # before torch is loaded

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoConfig  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: E402

SMALL = dict(model_type="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
             vocab_size=100, max_position_embeddings=64)
LARGE = dict(SMALL, hidden_size=512, max_position_embeddings=8192)  # head_dim 128

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
CASES = {
    "default": (dict(SMALL), []),
    "default_new_style": (dict(SMALL, rope_parameters=dict(rope_type="default", rope_theta=500000.0)), []),
    "default_theta_outside": (dict(SMALL, rope_theta=123456.789, rope_scaling=None), []),
    "default_large": (dict(LARGE, rope_theta=1000000), []),
    "head_dim_80": (dict(LARGE, head_dim=80), []),
    "linear_legacy": (dict(SMALL, rope_theta=10000.0, rope_scaling=dict(type="linear", factor=2.5)), []),
    "linear_large": (dict(LARGE, rope_parameters=dict(rope_type="linear", factor=4, rope_theta=10000.0)), []),
    "llama3": (dict(SMALL, rope_theta=10000.0,
                    rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                      original_max_position_embeddings=32)), []),
    "llama3_large": (dict(LARGE, max_position_embeddings=131072,
                          rope_parameters=dict(rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0,
                                               high_freq_factor=4.0, original_max_position_embeddings=8192)), []),
    "llama3_original_outside": (dict(SMALL, original_max_position_embeddings=16, rope_theta=10000.0,
                                     rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0,
                                                       high_freq_factor=4.0, original_max_position_embeddings=32)), []),
    "yarn": (dict(SMALL, rope_scaling=YARN), []),
    "yarn_large": (dict(LARGE, max_position_embeddings=32768, rope_theta=1000000.0,
                        rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=8192)), []),
    "yarn_no_truncate": (dict(SMALL, rope_scaling=dict(YARN, truncate=False)), []),
    "yarn_attention_factor": (dict(SMALL, rope_scaling=dict(YARN, attention_factor=0.75)), []),
    "yarn_mscale": (dict(SMALL, rope_scaling=dict(YARN, mscale=1.0, mscale_all_dim=0.7)), []),
    "yarn_mscale_alone": (dict(SMALL, rope_scaling=dict(YARN, mscale=0.7)), []),
    "yarn_betas": (dict(SMALL, rope_scaling=dict(YARN, beta_fast=4, beta_slow=0.5)), []),
    "yarn_no_original": (dict(SMALL, rope_scaling=dict(rope_type="yarn", factor=2.0)), []),
    "yarn_null_factor": (dict(SMALL, rope_scaling=dict(YARN, factor=None)), []),
    "dynamic": (dict(SMALL, rope_theta=10000.0, rope_scaling=dict(type="dynamic", factor=2.0)),
                [10, 64, 100, 80, 64, 256, 200, 63, 64, 65, 30]),
    "dynamic_fraction": (dict(SMALL, rope_parameters=dict(rope_type="dynamic", factor=2.7, rope_theta=10000.0)),
                         [65, 250, 12, 77]),
    "dynamic_large": (dict(LARGE, rope_parameters=dict(rope_type="dynamic", factor=4, rope_theta=10000.0)), [32768]),
}


def bits(tensor):
    values = [x & 0xFFFFFFFF for x in tensor.contiguous().view(torch.int32).flatten().tolist()]
    return ",".join(f"0x{v:08x}" for v in values)


def main():
    out = sys.stdout
    out.write("/* Written by make_rope.py with transformers %s and torch %s; do not edit.  Bits of float32 values. */\n"
              % (transformers.__version__, torch.__version__.split("+")[0]))
    table = []
    for name, (raw, lens) in CASES.items():
        fields = dict(raw)
        config = AutoConfig.for_model(fields.pop("model_type"), **json.loads(json.dumps(fields)))
        rope = LlamaRotaryEmbedding(config)
        context = config.rope_parameters.get("original_max_position_embeddings", config.max_position_embeddings)
        context = min(context, 8192)
        steps = lens or [4 * context]
        for k, length in enumerate(steps):
            picked = sorted({1, length // 2, length - 1})
            rows = torch.arange(length)[None] if lens else torch.tensor([picked])
            cos, sin = rope(torch.zeros(1), rows)
            at = picked if lens else range(len(picked))
            half = rope.inv_freq.numel()
            out.write(f"static const uint32_t {name}_{k}_freq[] = {{{bits(rope.inv_freq)}}};\n")
            out.write(f"static const uint32_t {name}_{k}_cos[] = {{{bits(cos[0, list(at), :half])}}};\n")
            out.write(f"static const uint32_t {name}_{k}_sin[] = {{{bits(sin[0, list(at), :half])}}};\n")
            text = json.dumps(json.dumps(raw))
            table.append(f'    {{ "{name}", {text}, {k}, {length}, {len(picked)}, {{ {", ".join(map(str, picked))} }},\n'
                         f"      {name}_{k}_freq, {name}_{k}_cos, {name}_{k}_sin }},\n")
    out.write("static const rope_case rope_cases[] = {\n" + "".join(table) + "};\n")


main()
