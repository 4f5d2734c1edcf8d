/* tiny_model.h - a random checkpoint of a few thousand weights in the test's temp_dir.  Include after temp_dir.h. */
#ifndef FB_TEST_TINY_MODEL_H
#define FB_TEST_TINY_MODEL_H

#include <math.h>

#include "io/shard_write.h"
#include "model/manifest.h"
#include "test_kit.h"

typedef struct tiny_model {
    const char *type; /* llama, mistral, qwen2, qwen3 */
    uint32_t    hidden, ffn_dim, n_layer, n_head, n_kv_head, head_dim, vocab;
    bool        tied;
    const char *extra; /* further members of config.json, ", \"key\": value"; NULL: none */
    uint32_t    max_position; /* 0: 64 */
} tiny_model;

static inline const char *tiny_architecture(const char *type)
{
    return !strcmp(type, "llama") ? "LlamaForCausalLM" : !strcmp(type, "mistral") ? "MistralForCausalLM"
         : !strcmp(type, "qwen2") ? "Qwen2ForCausalLM" : "Qwen3ForCausalLM";
}

/* The text of config.json; lives until the next call. */
static inline const char *tiny_config(const tiny_model *t)
{
    static char text[2048];
    snprintf(text, sizeof text, "{\"architectures\": [\"%s\"], \"model_type\": \"%s\", \"hidden_size\": %u, "
             "\"intermediate_size\": %u, \"num_hidden_layers\": %u, \"num_attention_heads\": %u, \"num_key_value_heads\": %u, "
             "\"head_dim\": %u, \"vocab_size\": %u, \"max_position_embeddings\": %u, \"hidden_act\": \"silu\", "
             "\"rms_norm_eps\": 1e-6, \"rope_theta\": 1000.0, \"tie_word_embeddings\": %s, \"torch_dtype\": \"float32\"%s}",
             tiny_architecture(t->type), t->type, t->hidden, t->ffn_dim, t->n_layer, t->n_head, t->n_kv_head, t->head_dim,
             t->vocab, t->max_position ? t->max_position : 64, t->tied ? "true" : "false", t->extra ? t->extra : "");
    return text;
}

static inline void tiny_manifest(fb_manifest *m, const tiny_model *t)
{
    fb_error err;
    fb_model_config cfg;
    *m = (fb_manifest){ 0 };
    if (fb_model_config_parse(&cfg, tiny_config(t), "config.json", &err) != FB_OK || fb_manifest_build(m, &cfg, &err) != FB_OK)
        fail_msg("%s", err.msg);
}

/* Weights of a size that keeps activations near 1; norms near 1. */
static inline void tiny_weights(const fb_param *p, uint64_t *seed, float *out)
{
    double scale = p->rank == 2 ? sqrt(3.0 / (double)p->cols) : 0.2;
    for (uint64_t i = 0; i < p->rows * p->cols; i++)
        out[i] = (float)((strstr(p->name, "norm.weight") ? 1.0 : 0.0) + scale * random_real(seed));
}

static inline void tiny_write(const tiny_model *t, uint64_t seed)
{
    fb_error err;
    fb_manifest m;
    fb_shard_writer *w;
    tiny_manifest(&m, t);
    temp_write_text("config.json", tiny_config(t));
    assert_int_equal(fb_shard_writer_new(&w, temp_dir, "model", UINT64_MAX / 2, &err), FB_OK);
    for (uint32_t i = 0; i < m.n_param; i++)
        assert_int_equal(fb_shard_writer_declare(w, m.params[i].name, FB_F32, m.params[i].rank,
                                                 (uint64_t[]){ m.params[i].rows, m.params[i].cols }, &err), FB_OK);
    for (uint32_t i = 0; i < m.n_param; i++) {
        uint64_t n = m.params[i].rows * m.params[i].cols;
        float *f = malloc(n * sizeof *f);
        tiny_weights(&m.params[i], &seed, f);
        assert_int_equal(fb_shard_writer_append(w, f, n * sizeof *f, &err), FB_OK);
        free(f);
    }
    assert_int_equal(fb_shard_writer_finish(w, &err), FB_OK);
    fb_manifest_free(&m);
}

#endif
