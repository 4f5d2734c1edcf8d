/* plan.h - how a run lies in memory: every byte on either side, under a name, before anything is allocated.
 *
 * A pure function of the model, the batch and the budgets: no I/O, no device, no clock.  The run allocates one
 * arena on the device and carves it by these offsets; what the ledger says is what is taken. */
#ifndef FB_PLAN_PLAN_H
#define FB_PLAN_PLAN_H

#include "model/manifest.h"
#include "plan/values.h"

/* What a plan may choose freely: no bit of the result depends on it. */
typedef struct fb_layout {
    uint32_t     n_pass;
    uint32_t     slots;         /* for the layers that stream; FB_SLOTS_ALL; never more than there are of these */
    /* Blocks at home on the device: weights, low halves, moments and gradient live there, and the device updates them.  The
     * first layers, because the update of the others then has the longest time to hide under the next forward. */
    uint32_t     home_layers;
    bool         home_embed, home_head; /* the same when tied */
    fb_recompute recompute;     /* of all layers but the last n_rich, */
    fb_recompute rich;          /* whose policy this is */
    uint32_t     n_rich;
    bool         kept_on_host;  /* what the forward keeps, block inputs included, lives on the host until the backward */
    bool         acc_on_device; /* between passes the fp32 accumulators of streamed blocks rest on the device */
} fb_layout;

typedef struct fb_plan_request {
    const fb_manifest *manifest;
    fb_dtype     act;                 /* compute dtype */
    bool         train;               /* false: forward only (eval, generate) */
    bool         clip;                /* exact clipping: all gradients wait on the host for the norm */
    uint32_t     row_len;             /* tokens a row holds at most */
    uint32_t     micro_rows;          /* rows in a micro-batch */
    uint32_t     n_micro;             /* micro-batches in a full step */
    uint32_t     cache_len;           /* generate: tokens of the key-value cache, else 0 */
    bool         unified;             /* device memory is host memory (cpu back end) */
    uint64_t     logits_size;         /* bytes of logits at a time; with the vocabulary it decides the cut of the head */
    uint64_t     (*attention_scratch)(uint32_t t_max, uint32_t n_head, uint32_t head_dim); /* bytes, as the device says */
    uint64_t     (*meta_size)(uint32_t t_max); /* bytes that describe a micro-batch of so many tokens */
    uint64_t     runtime_bytes;       /* host bytes that the back end and libraries take whatever the model */
    uint64_t     save_bytes;          /* host bytes of the save buffer, if auto the least; 0: no checkpoints */
    uint64_t     hbm_budget, ram_budget; /* bytes; 0: not limited */
    const char  *ram_limit;           /* what sets ram_budget, for the refusal; NULL: the user */
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
    X(CACHE, "key-value cache")        X(SUMS, "loss and norms")                      \
    X(HOME_WEIGHTS, "resident weights") X(HOME_REMAINDERS, "resident weights, low halves") \
    X(HOME_M, "resident first moments") X(HOME_V, "resident second moments")          \
    X(HOME_GRADIENTS, "resident gradients") X(BLOCK_ACC, "resident accumulators, fp32")
#define FB_PLAN_HOST_MAP(X)                                                           \
    X(WEIGHTS, "weights")              X(REMAINDERS, "weights, low halves")           \
    X(M, "first moments")              X(V, "second moments")                         \
    X(GRADIENTS, "gradients")          X(ACCUMULATORS, "gradients between passes, fp32") \
    X(SLABS, "gradient slabs")         X(STAGING, "embedding rows")                   \
    X(INPUTS, "block inputs")          X(SAVED, "saved activations")                  \
    X(ROWS, "embedding gradients between passes")                                     \
    X(BATCH, "batch")                  X(WINDOW, "window onto resident state")        \
    X(SAVE_BUFFER, "save buffer")      X(RUNTIME, "runtime and libraries")

#define FB_PLAN_ENUM_D(name, text) FB_DEV_##name,
#define FB_PLAN_ENUM_H(name, text) FB_HOST_##name,
typedef enum { FB_PLAN_DEVICE_MAP(FB_PLAN_ENUM_D) FB_DEV_COUNT } fb_plan_device_region;
typedef enum { FB_PLAN_HOST_MAP(FB_PLAN_ENUM_H) FB_HOST_COUNT } fb_plan_host_region;
#undef FB_PLAN_ENUM_D
#undef FB_PLAN_ENUM_H

/* Buffers that go round when what is kept lives on the host (train/inputs.h): one being written, one leaving or arriving,
 * one to be ahead by. */
enum { FB_INPUT_SPARES = 3 };
/* Elements of a resident block that the host reads or writes at a time. */
enum { FB_WINDOW_ELEMS = 4 << 20 };

typedef struct fb_region {
    const char *name;
    uint64_t    offset, size; /* bytes; host regions have no offset */
} fb_region;

typedef struct fb_plan {
    fb_region device[FB_DEV_COUNT], host[FB_HOST_COUNT];
    uint64_t  device_bytes, host_bytes;
    bool      host_aliased;     /* set by whoever wants it, after planning: all layers share one layer's host memory, so that
                                 * the speed of a model can be measured whose state no host here holds; what it learns means
                                 * nothing */
    fb_layout layout;           /* slots, n_pass, n_rich as they came out */
    fb_dtype  act;
    bool      train, clip;
    uint32_t  t_max;            /* tokens a micro-batch holds at most */
    uint32_t  micro_per_pass;
    uint32_t  loss_rows;        /* rows of logits at a time: a function of vocabulary and back end alone */
    uint32_t  n_acc;            /* layer gradient accumulators */
    uint32_t  n_slab;
    uint32_t  n_input;          /* buffers on the device for block inputs */
    uint64_t  slot_size, head_size, input_size, acc_size, slab_elems, out_elems;
    uint64_t  saved_size, rich_size; /* what a layer keeps for a micro-batch beside its input, in either policy */
    uint64_t  meta_size, rope_size; /* of one micro-batch / one table */
    uint64_t  loss_offset;      /* of the head's scratch: it shares the layers' */
    uint64_t  cache_size, cache_k_offset; /* of one layer; 0: no cache */
    uint32_t  n_rope;           /* tables: one, or one a micro-batch when the type is dynamic */
} fb_plan;

/* FB_CONFIG: a batch that no machine holds.  Below, requests are taken to have passed. */
fb_status fb_plan_check(const fb_plan_request *r, fb_error *err);
/* Every size and offset of a layout.  Whether it fits is another question. */
void      fb_plan_lay_out(fb_plan *out, const fb_plan_request *r, const fb_layout *l);
/* Bytes that a side needs beyond its budget. */
uint64_t  fb_plan_device_short(const fb_plan *p, const fb_plan_request *r);
uint64_t  fb_plan_host_short(const fb_plan *p, const fb_plan_request *r);
bool      fb_plan_fits(const fb_plan *p, const fb_plan_request *r);
/* FB_NOFIT: which side is short, or both, by how much, and which key to change; FB_OK: it fits. */
fb_status fb_plan_refuse(const fb_plan *p, const fb_plan_request *r, fb_error *err);
/* The layout asked for, if need be with what is kept on the host, and if that does not do, with more passes.  FB_NOFIT as
 * above; *out is then the last one tried. */
fb_status fb_plan_build(fb_plan *out, const fb_plan_request *r, const fb_layout *asked, fb_error *err);

/* Of layer `layer`. */
static inline fb_recompute fb_plan_policy(const fb_plan *p, uint32_t n_layer, uint32_t layer)
{
    return layer + p->layout.n_rich >= n_layer ? p->layout.rich : p->layout.recompute;
}

/* Where blocks live: embedding, layers, last block. */
static inline bool fb_plan_at_home(const fb_plan *p, const fb_manifest *m, uint32_t block)
{
    return block == 0 ? p->layout.home_embed : block + 1 == m->n_block ? p->layout.home_head : block <= p->layout.home_layers;
}

/* What blocks own on the device for the whole run. */
typedef enum {
    FB_OWN_STATE,       /* at home there: HOME_WEIGHTS, HOME_REMAINDERS, HOME_M, HOME_V */
    FB_OWN_GRADIENT,    /* at home, the gradient waiting for the norm, rounded: HOME_GRADIENTS */
    FB_OWN_ACCUMULATOR  /* an fp32 accumulator that others do not share: BLOCK_ACC */
} fb_own;

bool     fb_plan_owns(const fb_plan *p, const fb_manifest *m, fb_own what, uint32_t block);
/* Elements that the blocks before this one own; of block n_block: all of them. */
uint64_t fb_plan_owned_before(const fb_plan *p, const fb_manifest *m, fb_own what, uint32_t block);
/* Where a layer's kept values lie among those of the pass (kept_on_host: on the host), bytes. */
uint64_t fb_plan_saved_offset(const fb_plan *p, uint32_t n_layer, uint32_t layer, uint32_t micro);

/* The gradient element that leaves the device, and whether it is a copy of the accumulator. */
static inline bool fb_plan_grad_copied(fb_dtype act)
{
    return act == FB_BF16;
}

#endif
