/* config.h - a checkpoint's config.json, understood.
 *
 * Strict: an unknown model_type, rope type or activation, a field of the wrong type, a value that makes no sense
 * is FB_INPUT with a sentence that names the file, the key and what was expected.  Fields that change no arithmetic
 * are kept in the text for export, and otherwise passed over.
 * Source: transformers 5.17 configuration classes; both `rope_scaling` (+ `rope_theta`) and the newer
 * `rope_parameters` are read. */
#ifndef FB_MODEL_CONFIG_H
#define FB_MODEL_CONFIG_H

#include "base/dtype.h"
#include "base/error.h"

typedef struct fb_arch fb_arch;

typedef enum { FB_ROPE_DEFAULT, FB_ROPE_LINEAR, FB_ROPE_DYNAMIC, FB_ROPE_YARN, FB_ROPE_LLAMA3, FB_ROPE_COUNT } fb_rope_type;

typedef struct fb_rope {
    fb_rope_type type;
    double       theta;
    double       factor;             /* all but default */
    uint32_t     original_max;       /* llama3, yarn: positions of the pretraining; else max_position */
    double       low_freq_factor, high_freq_factor;        /* llama3 */
    double       beta_fast, beta_slow, attention_factor;   /* yarn; attention_factor already resolved (mscale too) */
    bool         truncate;                                 /* yarn: round the correction range to whole dims */
} fb_rope;

enum { FB_EOS_MAX = 8 };

typedef struct fb_model_config {
    const fb_arch *arch;
    uint32_t hidden, n_layer, n_head, n_kv_head, head_dim, ffn_dim, vocab, max_position;
    float    norm_eps;
    bool     tied;                    /* the head is the embedding table */
    bool     qkv_bias, o_bias, mlp_bias, qk_norm;
    uint32_t sliding_window;          /* 0: none; else keys at distance < window are seen */
    uint32_t first_window_layer;      /* layers below it attend fully (qwen2's max_window_layers) */
    fb_rope  rope;
    fb_dtype dtype;                   /* of the checkpoint, as config.json says; F32 when it does not */
    uint32_t eos[FB_EOS_MAX], n_eos;
    int64_t  bos, pad;                /* -1: none */
    uint64_t layer_window_bits[8];    /* bit l set: layer l slides (from layer_types or the rule above); <= 512 layers */
    char    *json;                    /* the text of config.json, owned */
} fb_model_config;

/* Reads DIR/config.json. */
fb_status fb_model_config_read(fb_model_config *out, const char *dir, fb_error *err);
fb_status fb_model_config_parse(fb_model_config *out, const char *json, const char *path, fb_error *err);
void      fb_model_config_free(fb_model_config *c); /* a zeroed struct is fine */

/* Window of layer l: 0 when it attends fully. */
uint32_t fb_model_config_window(const fb_model_config *c, uint32_t layer);

#endif
