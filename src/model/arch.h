/* arch.h - a model family is a table.
 *
 * Loader, planner, optimizer and exporter walk the same table; an `if (family == ...)` elsewhere means that the
 * table lacks a column.  A new dense family is one file with a table, one line in arch.c, and a tiny fixture. */
#ifndef FB_MODEL_ARCH_H
#define FB_MODEL_ARCH_H

#include "model/config.h"

typedef enum {
    FB_ROLE_EMBED,
    FB_ROLE_ATTN_NORM, FB_ROLE_Q, FB_ROLE_K, FB_ROLE_V, FB_ROLE_Q_BIAS, FB_ROLE_K_BIAS, FB_ROLE_V_BIAS,
    FB_ROLE_Q_NORM, FB_ROLE_K_NORM, FB_ROLE_O, FB_ROLE_O_BIAS,
    FB_ROLE_MLP_NORM, FB_ROLE_GATE, FB_ROLE_UP, FB_ROLE_GATE_BIAS, FB_ROLE_UP_BIAS, FB_ROLE_DOWN, FB_ROLE_DOWN_BIAS,
    FB_ROLE_FINAL_NORM, FB_ROLE_HEAD,
    FB_ROLE_COUNT
} fb_role;

/* A dimension by name; fb_dim_size gives its size for a config. */
typedef enum { FB_D_ONE, FB_D_HIDDEN, FB_D_Q, FB_D_KV, FB_D_HEAD, FB_D_FFN, FB_D_VOCAB } fb_dim;

/* When a tensor is present. */
typedef enum { FB_IF_ALWAYS, FB_IF_QKV_BIAS, FB_IF_O_BIAS, FB_IF_MLP_BIAS, FB_IF_QK_NORM, FB_IF_UNTIED } fb_presence;

enum {
    FB_P_NO_DECAY = 1, /* norms and biases: no weight decay */
    FB_P_JOIN = 2,     /* follows the tensor before it without padding, so that the two are one matrix */
};

typedef struct fb_weight_desc {
    const char *name;     /* in the checkpoint, after the layer prefix */
    fb_role     role;
    fb_dim      rows, cols; /* cols FB_D_ONE: a vector, rank 1 */
    fb_presence when;
    uint32_t    flags;
} fb_weight_desc;

struct fb_arch {
    const char *model_type;   /* config.json: "qwen3" */
    const char *hf_name;      /* architectures[0]: "Qwen3ForCausalLM" */
    const char *layer_prefix; /* "model.layers.%u." */
    const fb_weight_desc *embed, *layer, *final; /* in extent order */
    uint32_t n_embed, n_layer, n_final;
    /* What config.json's silence means in this family, and which keys it has. */
    bool        qkv_bias_default;   /* true: always biased (qwen2) */
    const char *qkv_bias_key;       /* "attention_bias", or NULL: the default cannot be changed */
    bool        o_bias_follows_key; /* llama: attention_bias covers o_proj too; qwen3 too; qwen2 never */
    const char *mlp_bias_key;       /* "mlp_bias" or NULL */
    bool        qk_norm;
    bool        window_by_flag;     /* qwen2/3: sliding_window counts only with use_sliding_window */
    bool        has_window;         /* mistral, qwen2, qwen3 */
    double      rope_theta_default;
    double      norm_eps_default;
    uint32_t    n_kv_head_default;  /* 0: as many as n_head */
    uint32_t    head_dim_default;   /* 0: hidden / n_head */
    uint32_t    window_default;     /* sliding_window where the key is absent; null always means none */
    uint32_t    window_layer_default; /* max_window_layers where the key is absent */
    int64_t     bos_default, eos_default; /* -1: none */
};

/* NULL when unknown.  fb_arch_names writes "llama, mistral, ..." for the message. */
const fb_arch *fb_arch_find(const char *model_type);
void           fb_arch_names(char *buf, size_t size);
uint64_t       fb_dim_size(const fb_model_config *c, fb_dim d);
bool           fb_weight_present(const fb_model_config *c, fb_presence when);
const char    *fb_role_str(fb_role r);

#endif
