/* values.h - what a decoder layer computes in its forward, and what of it a backward finds kept.
 *
 * One table, declared once: name, width per token, dtype, and the most thrifty recompute policy that still keeps the
 * value.  Which operations a backward runs again, how many bytes a policy saves, and where each value lies all follow
 * from it.  Pure: sizes and offsets, no device. */
#ifndef FB_PLAN_VALUES_H
#define FB_PLAN_VALUES_H

#include "config/options.h"
#include "model/config.h"

typedef enum {
    FB_V_X,                     /* the block's input; always kept, elsewhere */
    FB_V_N1, FB_V_RSTD1,        /* attention norm */
    FB_V_QKV,                   /* one matrix: q, k, v side by side */
    FB_V_Q, FB_V_K,             /* after (norm and) rope */
    FB_V_O, FB_V_LSE,           /* attention */
    FB_V_H,                     /* x + attention's output projection */
    FB_V_N2, FB_V_RSTD2,        /* MLP norm */
    FB_V_GU,                    /* gate, up side by side */
    FB_V_ACT,                   /* silu(gate) * up */
    FB_V_COUNT
} fb_value;

typedef struct fb_layer_shape {
    const fb_model_config *cfg;
    fb_dtype act;
    uint64_t attention_scratch; /* bytes for t_max tokens, as the device says */
} fb_layer_shape;

const char *fb_value_str(fb_value v);
uint64_t fb_value_size(const fb_layer_shape *s, fb_value v, uint64_t t); /* bytes for t tokens, a multiple of 256 */
bool     fb_value_kept(fb_value v, fb_recompute policy);
/* Bytes that one layer saves for t tokens, beside its input. */
uint64_t fb_layer_saved_size(const fb_layer_shape *s, fb_recompute policy, uint64_t t);
/* Where value v lies: its offset among the kept ones, or among those in scratch. */
uint64_t fb_value_offset(const fb_layer_shape *s, fb_recompute policy, uint64_t t, fb_value v);
/* Bytes of scratch for the values that are not kept, and for the backward's temporaries. */
uint64_t fb_layer_scratch_size(const fb_layer_shape *s, fb_recompute policy, uint64_t t);

/* The backward's temporaries, as offsets into the scratch.  The MLP's are dead before the attention's are born. */
typedef struct fb_layer_temporaries {
    uint64_t d_act, d_gu, d_n2;                        /* MLP */
    uint64_t d_o, d_q, d_k, d_qkv, d_n1, attention;    /* attention */
    uint64_t end;
} fb_layer_temporaries;

fb_layer_temporaries fb_layer_temporaries_at(const fb_layer_shape *s, fb_recompute policy, uint64_t t);

#endif
