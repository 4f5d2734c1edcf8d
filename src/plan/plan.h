/* plan.h - how a run lies in memory: every byte on either side, under a name, before anything is allocated.
 *
 * A pure function of the model, the batch and the budgets: no I/O, no device, no clock.  The run allocates one
 * arena on the device and carves it by these offsets; what the ledger says is what is taken. */
#ifndef FB_PLAN_PLAN_H
#define FB_PLAN_PLAN_H

#include "model/manifest.h"
#include "plan/values.h"

typedef struct fb_plan_request {
    const fb_manifest *manifest;
    fb_dtype     act;                 /* compute dtype */
    bool         train;               /* false: forward only (eval, generate) */
    bool         clip;                /* exact clipping: all gradients wait on the host for the norm */
    fb_recompute recompute;
    uint32_t     slots;               /* layer slots wanted; FB_SLOTS_ALL */
    uint32_t     row_len;             /* tokens a row holds at most */
    uint32_t     micro_rows;          /* rows in a micro-batch */
    uint32_t     n_micro;             /* micro-batches in a full step */
    uint32_t     cache_len;           /* generate: tokens of the key-value cache, else 0 */
    bool         unified;             /* device memory is host memory (cpu back end) */
    uint64_t     logits_size;         /* bytes of logits at a time; with the vocabulary it decides the cut of the head */
    uint64_t     attention_scratch;   /* bytes, for micro_rows * row_len tokens */
    uint64_t     (*meta_size)(uint32_t t_max); /* bytes that describe a micro-batch of so many tokens */
    uint64_t     runtime_bytes;       /* host bytes that the back end and libraries take whatever the model */
    uint64_t     hbm_budget, ram_budget; /* bytes; 0: not limited */
} fb_plan_request;

/* Regions, in arena order. */
#define FB_PLAN_DEVICE_MAP(X)                                                         \
    X(SLOTS, "layer slots")            X(HEAD_SLOT, "head slot")                      \
    X(INPUTS, "block inputs")          X(SAVED, "saved activations")                  \
    X(SCRATCH, "layer scratch")        X(LOSS, "logits, beyond the scratch")          \
    X(DX, "activation gradients")                                                     \
    X(ACC, "layer gradients, fp32")    X(TABLE_ACC, "table gradient, fp32")           \
    X(FINAL_ACC, "final norm gradient") X(GRAD_OUT, "gradients to send")              \
    X(META, "batch")  X(ROPE, "rope tables")       \
    X(CACHE, "key-value cache")        X(SUMS, "loss and norms")
#define FB_PLAN_HOST_MAP(X)                                                           \
    X(WEIGHTS, "weights")              X(REMAINDERS, "weights, low halves")           \
    X(M, "first moments")              X(V, "second moments")                         \
    X(GRADIENTS, "gradients")          X(ACCUMULATORS, "gradients between passes, fp32") \
    X(SLABS, "gradient slabs")         X(STAGING, "embedding rows")                   \
    X(INPUTS, "block inputs")          X(ROWS, "embedding gradients between passes")  \
    X(BATCH, "batch")                  X(SAVE_BUFFER, "save buffer")                      \
    X(RUNTIME, "runtime and libraries")

#define FB_PLAN_ENUM_D(name, text) FB_DEV_##name,
#define FB_PLAN_ENUM_H(name, text) FB_HOST_##name,
typedef enum { FB_PLAN_DEVICE_MAP(FB_PLAN_ENUM_D) FB_DEV_COUNT } fb_plan_device_region;
typedef enum { FB_PLAN_HOST_MAP(FB_PLAN_ENUM_H) FB_HOST_COUNT } fb_plan_host_region;
#undef FB_PLAN_ENUM_D
#undef FB_PLAN_ENUM_H

/* Buffers that go round when block inputs live on the host (train/inputs.h): one being written, one leaving or
 * arriving, one to be ahead by. */
enum { FB_INPUT_SPARES = 3 };

typedef struct fb_region {
    const char *name;
    uint64_t    offset, size; /* bytes; host regions have no offset */
} fb_region;

typedef struct fb_plan {
    fb_region device[FB_DEV_COUNT], host[FB_HOST_COUNT];
    uint64_t  device_bytes, host_bytes;
    uint32_t  slots;            /* layer slots */
    uint32_t  t_max;            /* tokens a micro-batch holds at most */
    uint32_t  micro_per_pass, n_pass;
    uint32_t  loss_rows;        /* rows of logits at a time: a function of vocabulary and back end alone */
    uint32_t  n_acc;            /* layer gradient accumulators */
    uint32_t  n_slab;
    bool      inputs_on_host;   /* block inputs leave the device between forward and backward */
    uint32_t  n_input;          /* buffers for them on the device */
    uint64_t  slot_size, head_size, input_size, saved_size, acc_size, slab_elems, out_elems;
    uint64_t  meta_size, rope_size; /* of one micro-batch / one table */
    uint64_t  loss_offset;      /* of the head's scratch: it shares the layers' */
    uint64_t  cache_size, cache_k_offset; /* of one layer; 0: no cache */
    uint32_t  n_rope;           /* tables: one, or one a micro-batch when the type is dynamic */
} fb_plan;

/* FB_NOFIT: which side is short, by how much, and which key to change; *out is then the plan that does not fit. */
fb_status fb_plan_build(fb_plan *out, const fb_plan_request *r, fb_error *err);

/* Floating-point operations of a full step: 6 per weight and token (8 when the forward is run again), the same for
 * causal attention's products, rows being full. */
double fb_plan_step_flops(const fb_plan_request *r);

/* The gradient element that leaves the device, and whether it is a copy of the accumulator. */
static inline bool fb_plan_grad_copied(fb_dtype act)
{
    return act == FB_BF16;
}

#endif
