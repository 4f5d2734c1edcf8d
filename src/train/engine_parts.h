/* engine_parts.h - the engine's struct, and what its files offer one another.
 *
 *   engine.c            passes and steps, opening and closing
 *   engine_weights.c    slots: which block is on the device, and what is sent ahead
 *   engine_batch.c      what goes down before the first layer: batch, rope tables, embedding rows
 *   engine_layers.c     the visits of decoder layers
 *   engine_head.c       the visit of final norm, head and loss
 *   engine_gradients.c  accumulators, and the way home; the visit of the embedding's gradient
 *   engine_update.c     updates of the blocks that live on the device
 *
 * Only these files include it. */
#ifndef FB_TRAIN_ENGINE_PARTS_H
#define FB_TRAIN_ENGINE_PARTS_H

#include "train/engine.h"
#include "base/align.h"
#include "sched/schedule.h"
#include "train/inputs.h"
#include "train/layer.h"
#include "train/update.h"

enum { N_STAGING = 2, N_ACC_MAX = 2 };

typedef enum { MODE_TRAIN, MODE_EVAL, MODE_LOGITS } engine_mode;

typedef struct device_slot {
    unsigned char *mem;
    fb_event *loaded; /* h2d: the weights are there */
    fb_event *used;   /* compute: the last kernel that reads them is enqueued before it */
} device_slot;

/* A gradient piece on its way to a slab; one for each slab, since a slab carries one piece at a time. */
typedef struct landing {
    fb_engine *engine;
    uint32_t   block;
    uint64_t   first, n;
    void      *slab;
} landing;

/* A gradient, or its last piece, that waits on the device for its download to be enqueued. */
typedef struct leaving {
    uint32_t             block;
    uint64_t             first, n;
    const unsigned char *src;        /* NULL: none */
    fb_event            *downloaded; /* d2h: src may be written again */
} leaving;

struct fb_engine {
    fb_engine_options o;
    fb_plan           plan;
    fb_device        *d;
    const fb_device_ops *ops;
    const fb_kernels *k;
    fb_trace         *trace;
    const fb_manifest *m;
    fb_layer_shape    shape;
    unsigned char    *arena;        /* device; not ours */
    fb_host_memory    host;         /* pinned: staging, batch, rope, slabs, sums */

    fb_visit         *visits[2];    /* with and without backward */
    uint32_t          n_visit[2];
    bool              backward;     /* which list the slots' next_use speaks of */
    fb_slot          *slots;
    device_slot      *device_slots;
    uint8_t          *layer_state;  /* [n_layer] fb_block_state */
    uint32_t          n_slot;
    device_slot       head;
    bool              head_valid, head_awaited;

    unsigned char    *staging[N_STAGING];
    fb_event         *staging_free[N_STAGING];
    fb_micro         *micros;
    unsigned char    *host_inputs, *host_saved, *host_rows; /* in host: what is kept; gradients of embedding rows between passes */
    unsigned char    *meta, *rope;  /* host; one a micro-batch, one a table */
    fb_rope_state     rope_state, rope_next;
    bool              rope_uploaded;
    double           *sums;         /* host: [n_block] squared norms, then the loss */
    fb_inputs         inputs;
    fb_pool           slabs;
    landing          *landings;
    leaving           leaving;
    bool              loss_finite;  /* written by the d2h stream before any landing of the step */
    fb_updater       *updater;
    fb_engine_hooks   hooks;
    fb_adamw          adamw;        /* of the step in hand */

    fb_event *batch_ready, *embed_ready, *pass_done, *gradient_ready, *loss_ready;
    fb_event *acc_free[N_ACC_MAX], *table_free, *final_free, *out_free, *restored, *rows_kept, *state_read;

    /* of the call in hand */
    engine_mode       mode;
    float             grad_scale;
    uint32_t          pass, n_pass, first, count; /* this pass's micro-batches */
    uint32_t          cache_row;
    float            *logits_out;
};

static inline unsigned char *fb_engine_region(const fb_engine *e, fb_plan_device_region r)
{
    return e->arena + e->plan.device[r].offset;
}

static inline fb_micro_arrays fb_engine_meta_at(const fb_engine *e, uint32_t i)
{
    return fb_micro_at(fb_engine_region(e, FB_DEV_META) + i * e->plan.meta_size, e->plan.t_max);
}

/* Whether the block lives on the device. */
static inline bool fb_engine_at_home(const fb_engine *e, uint32_t block)
{
    return fb_plan_at_home(&e->plan, e->m, block);
}

static inline const fb_block_desc *fb_engine_block_of_layer(const fb_engine *e, uint32_t layer)
{
    return &e->m->blocks[layer + 1];
}

static inline double *fb_engine_sum_at(const fb_engine *e, uint32_t block) /* block n_block: the loss */
{
    return (double *)(void *)fb_engine_region(e, FB_DEV_SUMS) + block;
}

/* waiter waits for what `done` has been given so far; event is the one to do it with. */
static inline fb_status fb_engine_after(fb_engine *e, fb_stream waiter, fb_stream done, fb_event *event, fb_error *err)
{
    fb_status st = e->ops->record(e->d, done, event, err);
    return st != FB_OK ? st : e->ops->wait(e->d, waiter, event, err);
}

static inline fb_status fb_engine_compute_after(fb_engine *e, fb_trace_label why, fb_stream done, fb_event *event, fb_error *err)
{
    fb_status st = e->ops->record(e->d, done, event, err);
    return st != FB_OK ? st : fb_traced_wait(e->d, e->trace, why, event, err);
}

/* ---- engine_weights.c ---- */

/* Waits until the block may be sent, or gathered from. */
void fb_engine_await_update(fb_engine *e, uint32_t block);
const unsigned char *fb_engine_head_weights(const fb_engine *e, uint32_t block);
fb_status fb_engine_load_head(fb_engine *e, fb_error *err);
fb_status fb_engine_prefetch(fb_engine *e, uint32_t v, fb_error *err);
fb_status fb_engine_enter_layer(fb_engine *e, uint32_t v, uint32_t layer, uint32_t *slot, const unsigned char **weights,
                                fb_error *err);
fb_status fb_engine_leave_layer(fb_engine *e, const fb_visit *visit, uint32_t slot, fb_error *err);

/* ---- engine_batch.c ---- */

bool fb_engine_rope_is_dynamic(const fb_engine *e);
void fb_engine_bind_rope(const fb_engine *e, uint32_t i, const float **cos, const float **sin);
const void *fb_engine_make_rope(const fb_engine *e, uint32_t i, uint32_t n_position, const fb_rope_state *s);
fb_status fb_engine_upload_batch(fb_engine *e, fb_error *err);

/* ---- engine_gradients.c ---- */

/* The block's fp32 accumulator: its own, or one that blocks share in turns. */
float *fb_engine_accumulator(const fb_engine *e, uint32_t block);
fb_status fb_engine_open_accumulator(fb_engine *e, uint32_t block, bool zero, fb_error *err);
fb_status fb_engine_close_accumulator(fb_engine *e, uint32_t block, fb_error *err);
fb_status fb_engine_send_leaving(fb_engine *e, fb_error *err);
void fb_engine_look_at_loss(void *arg, bool failed);
/* Before the gradients of the rows that an earlier pass kept are written over. */
fb_status fb_engine_await_kept_rows(fb_engine *e, fb_error *err);

/* ---- engine_update.c ---- */

/* Enqueues the update of a block that lives on the device.  guard as in fb_update. */
fb_status fb_engine_update_at_home(fb_engine *e, uint32_t block, const double *guard, fb_error *err);

/* ---- visits ---- */

fb_status fb_engine_visit_embed(fb_engine *e, fb_error *err);
fb_status fb_engine_visit_forward(fb_engine *e, uint32_t v, const fb_visit *visit, fb_error *err);
fb_status fb_engine_visit_head(fb_engine *e, fb_error *err);
fb_status fb_engine_visit_backward(fb_engine *e, uint32_t v, const fb_visit *visit, fb_error *err);
fb_status fb_engine_visit_embed_backward(fb_engine *e, fb_error *err);

#endif
