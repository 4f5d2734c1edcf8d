#include "plan/values.h"
#include "base/align.h"

typedef enum { W_HIDDEN, W_Q, W_KV, W_QKV, W_FFN, W_2FFN, W_HEADS, W_ONE } width;

typedef struct value_desc {
    const char  *name;
    width        width;
    bool         f32;  /* whatever act is */
    fb_recompute kept; /* the most thrifty policy that still keeps it */
} value_desc;

static const value_desc values[FB_V_COUNT] = {
    [FB_V_X]     = { "input",          W_HIDDEN, false, FB_RECOMPUTE_FULL },
    [FB_V_N1]    = { "attn_norm",      W_HIDDEN, false, FB_RECOMPUTE_NONE },
    [FB_V_RSTD1] = { "attn_norm_rstd", W_ONE,    true,  FB_RECOMPUTE_NONE },
    [FB_V_QKV]   = { "qkv",            W_QKV,    false, FB_RECOMPUTE_SELECTIVE },
    [FB_V_Q]     = { "q",              W_Q,      false, FB_RECOMPUTE_NONE },
    [FB_V_K]     = { "k",              W_KV,     false, FB_RECOMPUTE_NONE },
    [FB_V_O]     = { "attention",      W_Q,      false, FB_RECOMPUTE_SELECTIVE },
    [FB_V_LSE]   = { "attention_lse",  W_HEADS,  true,  FB_RECOMPUTE_SELECTIVE },
    [FB_V_H]     = { "attn_out",       W_HIDDEN, false, FB_RECOMPUTE_SELECTIVE },
    [FB_V_N2]    = { "mlp_norm",       W_HIDDEN, false, FB_RECOMPUTE_NONE },
    [FB_V_RSTD2] = { "mlp_norm_rstd",  W_ONE,    true,  FB_RECOMPUTE_NONE },
    [FB_V_GU]    = { "gate_up",        W_2FFN,   false, FB_RECOMPUTE_SELECTIVE },
    [FB_V_ACT]   = { "mlp_act",        W_FFN,    false, FB_RECOMPUTE_NONE },
};

static uint64_t width_of(const fb_model_config *c, width w)
{
    uint64_t q = (uint64_t)c->n_head * c->head_dim, kv = (uint64_t)c->n_kv_head * c->head_dim;
    switch (w) {
    case W_HIDDEN: return c->hidden;
    case W_Q:      return q;
    case W_KV:     return kv;
    case W_QKV:    return q + 2 * kv;
    case W_FFN:    return c->ffn_dim;
    case W_2FFN:   return 2 * (uint64_t)c->ffn_dim;
    case W_HEADS:  return c->n_head;
    case W_ONE:    break;
    }
    return 1;
}

const char *fb_value_str(fb_value v)
{
    return values[v].name;
}

static uint64_t act_size(const fb_layer_shape *s, width w, uint64_t t)
{
    return fb_align(t * width_of(s->cfg, w) * fb_dtype_size(s->act));
}

uint64_t fb_value_size(const fb_layer_shape *s, fb_value v, uint64_t t)
{
    return values[v].f32 ? fb_align(t * width_of(s->cfg, values[v].width) * sizeof(float)) : act_size(s, values[v].width, t);
}

bool fb_value_kept(fb_value v, fb_recompute policy)
{
    return policy <= values[v].kept;
}

/* Bytes of the values from FB_V_N1 up to (not including) end that are kept, or are not. */
static uint64_t values_size(const fb_layer_shape *s, fb_recompute policy, uint64_t t, fb_value end, bool kept)
{
    uint64_t size = 0;
    for (fb_value v = FB_V_N1; v < end; v++)
        if (fb_value_kept(v, policy) == kept)
            size += fb_value_size(s, v, t);
    return size;
}

uint64_t fb_layer_saved_size(const fb_layer_shape *s, fb_recompute policy, uint64_t t)
{
    return values_size(s, policy, t, FB_V_COUNT, true);
}

uint64_t fb_value_offset(const fb_layer_shape *s, fb_recompute policy, uint64_t t, fb_value v)
{
    return values_size(s, policy, t, v, fb_value_kept(v, policy));
}

fb_layer_temporaries fb_layer_temporaries_at(const fb_layer_shape *s, fb_recompute policy, uint64_t t)
{
    uint64_t base = values_size(s, policy, t, FB_V_COUNT, false);
    uint64_t c = act_size(s, W_HIDDEN, t), q = act_size(s, W_Q, t), kv = act_size(s, W_KV, t);
    uint64_t f = act_size(s, W_FFN, t), qkv = act_size(s, W_QKV, t), gu = act_size(s, W_2FFN, t);
    /* d_n2 lies where d_act was, d_n1 where d_o was: the one is dead when the other is written. */
    uint64_t first = f > c ? f : c, head = q > c ? q : c;
    uint64_t mlp = first + gu, attention = head + q + kv + qkv + fb_align(s->attention_scratch);
    return (fb_layer_temporaries){
        .d_act = base, .d_n2 = base, .d_gu = base + first,
        .d_o = base, .d_n1 = base, .d_q = base + head, .d_k = base + head + q, .d_qkv = base + head + q + kv,
        .attention = base + head + q + kv + qkv,
        .end = base + (mlp > attention ? mlp : attention),
    };
}

uint64_t fb_layer_scratch_size(const fb_layer_shape *s, fb_recompute policy, uint64_t t)
{
    return fb_layer_temporaries_at(s, policy, t).end;
}
