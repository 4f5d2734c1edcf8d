/* layer.h - the decoder layer's template: what it computes, saves and needs, for every family of the tables.
 *
 * Stateless: weights, gradients and activations are bound at each call, and no graph survives one.  Families differ
 * in the manifest's offsets (a role that is absent costs nothing) and in the attributes bound here.
 * What it computes and keeps is the table of plan/values.h. */
#ifndef FB_TRAIN_LAYER_H
#define FB_TRAIN_LAYER_H

#include "device/kernels.h"
#include "model/manifest.h"
#include "plan/values.h"

typedef struct fb_layer_binding {
    fb_device             *device;
    const fb_layer_shape  *shape;
    const fb_block_desc   *desc;
    uint32_t               window;
    fb_recompute           policy;
    uint32_t               t, t_max;
    /* device memory */
    const unsigned char   *weights;   /* the block's working weights */
    float                 *gradients; /* the block's fp32 accumulators; backward only */
    const uint32_t        *position;
    const fb_span         *span;
    uint32_t               n_span, q_len_max, k_len_max;
    const float           *cos, *sin;
    void                  *x;         /* input [T,C] */
    unsigned char         *saved, *scratch; /* as the sizes above, for t_max tokens */
    /* A key-value cache replaces QKV and K: rows appended at cache_row, attention reads from row 0.  NULL: none. */
    unsigned char         *cache_qkv, *cache_k;
    uint32_t               cache_row;
} fb_layer_binding;

/* y[T,C]; may not be x. */
fb_status fb_layer_forward(const fb_layer_binding *b, void *y, fb_error *err);
/* dy[T,C] becomes dx; gradients (+)= (accumulate false: overwritten). */
fb_status fb_layer_backward(const fb_layer_binding *b, void *dy, bool accumulate, fb_error *err);

#endif
