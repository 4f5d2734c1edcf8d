/* engine.h - runs steps: moves blocks through the device, collects gradients, starts the updates.
 *
 * Layer-major: each visit of the schedule (sched/schedule.h) computes one block for every micro-batch of the pass.
 * The host thread only enqueues; it waits for an update before it sends a block's weights, for a slab when all are
 * under way, and for loss and norm at the end of a step.
 * What defines the bits is the cut into micro-batches alone: slots, overlap, passes and threads change none.
 * Threads: one.  Nothing allocates after new. */
#ifndef FB_TRAIN_ENGINE_H
#define FB_TRAIN_ENGINE_H

#include "base/activity.h"
#include "model/rope.h"
#include "optim/adamw.h"
#include "plan/plan.h"
#include "sched/trace.h"
#include "train/micro.h"
#include "train/state.h"
#include "train/update.h"

typedef struct fb_engine fb_engine;

/* Who must see the state before a step changes it: the saver. */
typedef struct fb_engine_hooks {
    void *ctx;
    fb_before_update before_update; /* blocks on the host: train/update.h; any thread */
    /* Blocks at home on the device; the engine's thread.  A visit of a training step was enqueued, and n_left more come before the
     * first update can. */
    fb_status (*during_step)(void *ctx, uint32_t n_left, fb_error *err);
    /* *read: FB_STREAM_D2H has been given reads of the block, which its update must wait for. */
    fb_status (*before_update_at_home)(void *ctx, uint32_t block, bool *read, fb_error *err);
} fb_engine_hooks;

typedef struct fb_engine_options {
    const fb_plan    *plan;      /* copied */
    fb_device        *device;
    fb_state         *state;     /* of the same plan */
    unsigned char    *arena;     /* device, of the plan's size; outlives the engine */
    fb_team          *team;      /* of the host: gathers embedding rows */
    fb_dtype          act;
    bool              train;
    bool              clip;      /* exact clipping: updates under the next forward; false: under the backward */
    bool              overlap;
    uint32_t          n_micro;   /* micro-batches in a full step */
    uint32_t          update_threads;
    fb_trace         *trace;     /* NULL: none; outlives the engine */
    fb_activity      *activity;  /* what the host thread is doing, for reports; NULL: nobody asks */
} fb_engine_options;

/* Spans that the streams get in one step at most, for fb_trace_options. */
uint32_t fb_engine_trace_spans(const fb_plan *plan, const fb_manifest *m);

fb_status fb_engine_new(fb_engine **out, const fb_engine_options *o, fb_error *err);
void      fb_engine_free(fb_engine *e); /* after any failure too; NULL is fine */

/* Micro-batch i of the next call, to be filled between calls (i < n_micro). */
fb_micro *fb_engine_micro(fb_engine *e, uint32_t i);

typedef struct fb_step_result {
    double   loss_sum;    /* over learned tokens; divide for the mean */
    double   grad_norm;   /* of the mean loss, over all parameters, before clipping */
    double   clip_factor; /* applied: min(1, max_grad_norm / (grad_norm + 1e-6)) */
    uint64_t n_learned, n_token;
    bool     updated;     /* false: loss or norm is not finite, or nothing was to be learned; nothing was changed */
} fb_step_result;

/* Forward, backward, update of the first n micro-batches.  a->clip is set here.  max_grad_norm 0: no clipping.
 * FB_NONFINITE only when clipping is off and a gradient was found not finite after updates had begun: the state is
 * lost.  When the result says not updated, weights, moments and counters are as before. */
fb_status fb_engine_step(fb_engine *e, uint32_t n, const fb_adamw *a, double max_grad_norm, fb_step_result *out, fb_error *err);

/* Forward only: the loss. */
fb_status fb_engine_eval(fb_engine *e, uint32_t n, fb_step_result *out, fb_error *err);

/* Forward only of micro-batch 0; out[n_learned][V] float32: the logits at its learn_index positions.
 * cache_row: with a key-value cache, how many tokens came before. */
fb_status fb_engine_logits(fb_engine *e, uint32_t cache_row, float *out, fb_error *err);

/* Waits for every update: the state may be read and written. */
void           fb_engine_settle(fb_engine *e);
/* Of an engine that trains; the engine is settled. */
void           fb_engine_set_hooks(fb_engine *e, const fb_engine_hooks *h);
/* Weights were written from outside: nothing on the device is valid. */
void           fb_engine_forget(fb_engine *e);
fb_rope_state *fb_engine_rope(fb_engine *e);
/* Any thread, any time: how many blocks are in which state, as one line. */
void           fb_engine_describe(const fb_engine *e, char *text, size_t size);

#endif
