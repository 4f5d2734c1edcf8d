#include "run/preset.h"

#include "config/parse.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

/* Source: the config.json of each (base) model as published by its makers. */
typedef struct preset {
    const char *name, *family; /* of the table below */
    unsigned    hidden, ffn, layers, heads, kv_heads, vocab, max_position;
    const char *eps;
    bool        tied;
} preset;

static const preset presets[] = {
    /* name           family      hidden  ffn    L   H   G  vocab   positions eps     tied */
    { "qwen2.5-0.5b", "qwen2.5",   896,  4864,  24, 14,  2, 151936,  32768, "1e-6", true  },
    { "qwen2.5-1.5b", "qwen2.5",  1536,  8960,  28, 12,  2, 151936, 131072, "1e-6", true  },
    { "qwen2.5-7b",   "qwen2.5",  3584, 18944,  28, 28,  4, 152064, 131072, "1e-6", false },
    { "qwen2.5-14b",  "qwen2.5",  5120, 13824,  48, 40,  8, 152064, 131072, "1e-5", false },
    { "qwen2.5-32b",  "qwen2.5",  5120, 27648,  64, 40,  8, 152064, 131072, "1e-5", false },
    { "qwen2.5-72b",  "qwen2.5",  8192, 29568,  80, 64,  8, 152064, 131072, "1e-5", false },
    { "llama-3.1-8b", "llama3.1", 4096, 14336,  32, 32,  8, 128256, 131072, "1e-5", false },
    { "llama-3.1-70b", "llama3.1", 8192, 28672, 80, 64,  8, 128256, 131072, "1e-5", false },
    { "smollm2-135m", "smollm2",   576,  1536,  30,  9,  3,  49152,   8192, "1e-5", true  },
};

static const struct {
    const char *name, *members;
} families[] = {
    { "qwen2.5", "\"architectures\": [\"Qwen2ForCausalLM\"], \"model_type\": \"qwen2\", \"rope_theta\": 1000000.0, "
                 "\"use_sliding_window\": false, \"bos_token_id\": 151643, \"eos_token_id\": 151643" },
    { "llama3.1", "\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"rope_theta\": 500000.0, "
                  "\"rope_scaling\": {\"factor\": 8.0, \"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0, "
                  "\"original_max_position_embeddings\": 8192, \"rope_type\": \"llama3\"}, \"attention_bias\": false, "
                  "\"mlp_bias\": false, \"bos_token_id\": 128000, \"eos_token_id\": 128001" },
    { "smollm2", "\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"rope_theta\": 100000, "
                 "\"attention_bias\": false, \"mlp_bias\": false, \"bos_token_id\": 0, \"eos_token_id\": 0" },
};

enum { LAYERS_MAX = 10000 };

static const char *members_of(const char *family)
{
    for (size_t i = 0; i < FB_COUNT(families); i++)
        if (!strcmp(families[i].name, family))
            return families[i].members;
    assert(!"a preset without a family");
    return "";
}

void fb_preset_names(char *buf, size_t size)
{
    size_t n = 0;
    for (size_t i = 0; i < FB_COUNT(presets) && n < size; i++)
        n += (size_t)snprintf(buf + n, size - n, "%s%s", i ? ", " : "", presets[i].name);
}

fb_status fb_preset_config(char out[FB_PRESET_SIZE], const char *name, fb_error *err)
{
    size_t length = strcspn(name, ":");
    int64_t layers = 0;
    if (name[length] && (!fb_parse_int(name + length + 1, &layers) || layers < 1 || layers > LAYERS_MAX))
        return fb_fail(err, FB_CONFIG, "preset '%s': after the colon comes another number of layers, 1 to %d", name, LAYERS_MAX);
    for (size_t i = 0; i < FB_COUNT(presets); i++) {
        const preset *p = &presets[i];
        if (strlen(p->name) != length || strncmp(p->name, name, length) != 0)
            continue;
        int n = snprintf(out, FB_PRESET_SIZE, "{%s, \"hidden_size\": %u, \"intermediate_size\": %u, \"num_hidden_layers\": %u, "
            "\"num_attention_heads\": %u, \"num_key_value_heads\": %u, \"vocab_size\": %u, \"max_position_embeddings\": %u, "
            "\"rms_norm_eps\": %s, \"tie_word_embeddings\": %s, \"hidden_act\": \"silu\", \"attention_dropout\": 0.0, "
            "\"torch_dtype\": \"bfloat16\"}", members_of(p->family), p->hidden, p->ffn, layers ? (uint32_t)layers : p->layers,
            p->heads, p->kv_heads, p->vocab, p->max_position, p->eps, p->tied ? "true" : "false");
        assert(n > 0 && n < FB_PRESET_SIZE);
        return FB_OK;
    }
    char known[256];
    fb_preset_names(known, sizeof known);
    return fb_fail(err, FB_CONFIG, "preset '%s' is not known; known are: %s; another shape: --model DIR", name, known);
}
