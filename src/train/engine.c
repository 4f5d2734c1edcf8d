#include "train/engine.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>

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

struct fb_engine {
    fb_engine_options o;
    fb_plan           plan;
    fb_device        *d;
    const fb_device_ops *ops;
    const fb_kernels *k;
    fb_trace         *trace;
    const fb_manifest *m;
    fb_layer_shape    shape;
    unsigned char    *arena;        /* device */
    unsigned char    *host;         /* pinned: staging, batch, rope, slabs, sums */
    uint64_t          host_size;

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
    unsigned char    *host_inputs, *host_rows; /* in host: block inputs; gradients of embedding rows between passes */
    unsigned char    *meta, *rope;  /* host; one a micro-batch, one a table */
    fb_rope_state     rope_state, rope_next;
    bool              rope_uploaded;
    double           *sums;         /* host: [n_block] squared norms, then the loss */
    fb_inputs         inputs;
    fb_pool           slabs;
    landing          *landings;
    bool              loss_finite;  /* written by the d2h stream before any landing of the step */
    fb_updater       *updater;

    fb_event *batch_ready, *embed_ready, *pass_done, *gradient_ready, *loss_ready;
    fb_event *acc_free[N_ACC_MAX], *table_free, *final_free, *out_free, *restored;

    /* of the call in hand */
    engine_mode       mode;
    float             grad_scale;
    uint32_t          pass, n_pass, first, count; /* this pass's micro-batches */
    uint32_t          cache_row;
    float            *logits_out;
};

/* ---- addresses ---- */

static unsigned char *region(const fb_engine *e, fb_plan_device_region r)
{
    return e->arena + e->plan.device[r].offset;
}

static fb_micro_arrays meta_at(const fb_engine *e, uint32_t i)
{
    return fb_micro_at(region(e, FB_DEV_META) + i * e->plan.meta_size, e->plan.t_max);
}

static const fb_block_desc *block_of_layer(const fb_engine *e, uint32_t layer)
{
    return &e->m->blocks[layer + 1];
}

static double *sum_at(const fb_engine *e, uint32_t block) /* block n_block: the loss */
{
    return (double *)(void *)region(e, FB_DEV_SUMS) + block;
}

/* ---- events: a stream waits for what another has done so far ---- */

static fb_status after(fb_engine *e, fb_stream waiter, fb_stream done, fb_event *event, fb_error *err)
{
    fb_status st = e->ops->record(e->d, done, event, err);
    return st != FB_OK ? st : e->ops->wait(e->d, waiter, event, err);
}

static fb_status compute_after(fb_engine *e, fb_trace_label why, fb_stream done, fb_event *event, fb_error *err)
{
    fb_status st = e->ops->record(e->d, done, event, err);
    return st != FB_OK ? st : fb_traced_wait(e->d, e->trace, why, event, err);
}

/* ---- weights ---- */

/* Weights may be sent, and rows gathered, once their update is done. */
static void await_update(fb_engine *e, uint32_t block)
{
    double since = fb_trace_now(e->trace);
    if (e->updater)
        fb_updater_wait(e->updater, block);
    fb_trace_host(e->trace, FB_LABEL(HOST_UPDATE, block, FB_NO_PART), since);
}

static fb_status load_layer(fb_engine *e, uint32_t slot, uint32_t layer, uint32_t when, fb_error *err)
{
    fb_status st = FB_OK;
    device_slot *s = &e->device_slots[slot];
    uint32_t old = e->slots[slot].layer;
    if (old != FB_NEVER) {
        fb_block_move(&e->layer_state[old], FB_BLOCK_RELEASED);
        fb_block_move(&e->layer_state[old], FB_BLOCK_HOST);
    }
    e->slots[slot] = (fb_slot){ layer, when };
    fb_block_move(&e->layer_state[layer], FB_BLOCK_PREFETCHING);
    await_update(e, layer + 1);
    /* The kernels that read what was in the slot are enqueued, but the streams run apart. */
    FB_TRY(e->ops->wait(e->d, FB_STREAM_H2D, s->used, err));
    FB_TRY(fb_traced_upload(e->d, e->trace, FB_LABEL(SEND_WEIGHTS, layer + 1, slot), s->mem,
                            fb_state_at(e->o.state, FB_HOST_WEIGHTS, layer + 1, 0),
                            block_of_layer(e, layer)->extent * fb_dtype_size(e->o.act), err));
    FB_TRY(e->ops->record(e->d, FB_STREAM_H2D, s->loaded, err));
done:
    return st;
}

/* The head's slot: the last block's extent, then, when tied, the embedding's. */
static uint64_t head_extent_size(const fb_engine *e)
{
    return (e->m->blocks[e->m->n_block - 1].extent * fb_dtype_size(e->o.act) + 255) / 256 * 256;
}

static fb_status load_head(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    uint32_t last = e->m->n_block - 1;
    uint64_t size = fb_dtype_size(e->o.act);
    await_update(e, last);
    FB_TRY(e->ops->wait(e->d, FB_STREAM_H2D, e->head.used, err));
    FB_TRY(fb_traced_upload(e->d, e->trace, FB_LABEL(SEND_WEIGHTS, last, e->n_slot), e->head.mem,
                            fb_state_at(e->o.state, FB_HOST_WEIGHTS, last, 0), e->m->blocks[last].extent * size, err));
    if (e->m->cfg.tied) {
        await_update(e, 0);
        FB_TRY(fb_traced_upload(e->d, e->trace, FB_LABEL(SEND_WEIGHTS, 0, e->n_slot), e->head.mem + head_extent_size(e),
                                fb_state_at(e->o.state, FB_HOST_WEIGHTS, 0, 0), e->m->blocks[0].extent * size, err));
    }
    FB_TRY(e->ops->record(e->d, FB_STREAM_H2D, e->head.loaded, err));
    e->head_valid = true;
    e->head_awaited = false;
done:
    return st;
}

/* Sends ahead what the visits after v want, as far as slots go.  Only the very next visit is worth waiting for an
 * update: the kernels of this one are enqueued already, those of the next must not be held up by a later block. */
static fb_status prefetch(fb_engine *e, uint32_t v, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_visit *visits = e->visits[e->backward];
    bool next_wanted = true;
    for (uint32_t q = v + 1; q < e->n_visit[e->backward]; q++) {
        const fb_visit *visit = &visits[q];
        if (visit->kind == FB_VISIT_HEAD) {
            if (e->head_valid)
                continue;
            if (!next_wanted && e->updater && (!fb_updater_is_clean(e->updater, e->m->n_block - 1) || !fb_updater_is_clean(e->updater, 0)))
                break;
            FB_TRY(load_head(e, err));
        } else if (visit->kind == FB_VISIT_FORWARD || visit->kind == FB_VISIT_BACKWARD) {
            if (fb_slots_find(e->slots, e->n_slot, visit->layer) == FB_NEVER) {
                uint32_t slot = fb_slots_victim(e->slots, e->n_slot, q);
                if (slot == FB_NEVER || (!next_wanted && e->updater && !fb_updater_is_clean(e->updater, visit->layer + 1)))
                    break;
                FB_TRY(load_layer(e, slot, visit->layer, q, err));
            }
        }
        next_wanted = false;
    }
done:
    return st;
}

/* The slot of a layer whose kernels are about to be enqueued. */
static fb_status enter_layer(fb_engine *e, uint32_t v, uint32_t layer, uint32_t *slot, fb_error *err)
{
    fb_status st = FB_OK;
    *slot = fb_slots_find(e->slots, e->n_slot, layer);
    if (*slot == FB_NEVER) {
        *slot = fb_slots_victim(e->slots, e->n_slot, v);
        assert(*slot != FB_NEVER); /* before its own visit every other block is wanted later */
        FB_TRY(load_layer(e, *slot, layer, v, err));
    }
    if (e->layer_state[layer] == FB_BLOCK_PREFETCHING) {
        FB_TRY(fb_traced_wait(e->d, e->trace, FB_LABEL(WAIT_WEIGHTS, layer + 1, FB_NO_PART), e->device_slots[*slot].loaded, err));
        fb_block_move(&e->layer_state[layer], FB_BLOCK_RESIDENT);
    }
    fb_block_move(&e->layer_state[layer], FB_BLOCK_COMPUTING);
done:
    return st;
}

static fb_status leave_layer(fb_engine *e, const fb_visit *visit, uint32_t slot, fb_error *err)
{
    fb_block_move(&e->layer_state[visit->layer], FB_BLOCK_RESIDENT);
    e->slots[slot].next_use = visit->next;
    return e->ops->record(e->d, FB_STREAM_COMPUTE, e->device_slots[slot].used, err);
}

void fb_engine_forget(fb_engine *e)
{
    for (uint32_t i = 0; i < e->n_slot; i++) {
        uint32_t layer = e->slots[i].layer;
        if (layer == FB_NEVER)
            continue;
        if (e->layer_state[layer] == FB_BLOCK_PREFETCHING) /* sent ahead, then not visited: the upload is awaited by */
            fb_block_move(&e->layer_state[layer], FB_BLOCK_RESIDENT); /* whatever is uploaded next: h2d is in order */
        fb_block_move(&e->layer_state[layer], FB_BLOCK_RELEASED);
        fb_block_move(&e->layer_state[layer], FB_BLOCK_HOST);
        e->slots[i] = (fb_slot){ FB_NEVER, 0 };
    }
    e->head_valid = false;
}

/* ---- the batch ---- */

static bool rope_is_dynamic(const fb_engine *e)
{
    return e->m->cfg.rope.type == FB_ROPE_DYNAMIC;
}

/* One table serves all, unless it depends on the micro-batch. */
static unsigned char *rope_device(const fb_engine *e, uint32_t i)
{
    return region(e, FB_DEV_ROPE) + (rope_is_dynamic(e) ? i : 0) * e->plan.rope_size;
}

static void bind_rope(const fb_engine *e, uint32_t i, const float **cos, const float **sin)
{
    *cos = (const float *)(const void *)rope_device(e, i);
    *sin = (const float *)(const void *)(rope_device(e, i) + e->plan.rope_size / 2);
}

/* Writes host table i and returns it. */
static const void *make_rope(const fb_engine *e, uint32_t i, uint32_t n_position, const fb_rope_state *s)
{
    unsigned char *table = e->rope + i * e->plan.rope_size;
    fb_rope_table((float *)(void *)table, (float *)(void *)(table + e->plan.rope_size / 2), n_position, &e->m->cfg, s);
    return table;
}

static fb_status upload_batch(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    for (uint32_t i = 0; i < e->count; i++) {
        uint32_t micro = e->first + i;
        FB_TRY(fb_traced_upload(e->d, e->trace, FB_LABEL(SEND_BATCH, 0, micro), region(e, FB_DEV_META) + i * e->plan.meta_size,
                                e->meta + micro * e->plan.meta_size, e->plan.meta_size, err));
        if (rope_is_dynamic(e)) {
            uint32_t len = e->micros[micro].len_max + e->cache_row;
            fb_rope_advance(&e->rope_next, &e->m->cfg, len);
            FB_TRY(fb_traced_upload(e->d, e->trace, FB_LABEL(SEND_BATCH, 0, micro), rope_device(e, i),
                                    make_rope(e, micro, len, &e->rope_next), e->plan.rope_size, err));
        }
    }
    if (!rope_is_dynamic(e) && !e->rope_uploaded) {
        FB_TRY(e->ops->upload(e->d, FB_STREAM_H2D, region(e, FB_DEV_ROPE), e->rope, e->plan.rope_size, err));
        e->rope_uploaded = true;
    }
    FB_TRY(compute_after(e, FB_LABEL(WAIT_DATA, 0, FB_NO_PART), FB_STREAM_H2D, e->batch_ready, err));
done:
    return st;
}

/* ---- embedding ---- */

typedef struct gather {
    unsigned char       *out;
    const unsigned char *table;
    const uint32_t      *id;
    uint64_t             row_size;
    uint32_t             n;
} gather;

enum { GATHER_ROWS = 256 };

static void gather_task(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const gather *g = ctx;
    uint64_t end = (task + 1) * GATHER_ROWS < g->n ? (task + 1) * GATHER_ROWS : g->n;
    for (uint64_t i = task * GATHER_ROWS; i < end; i++)
        memcpy(g->out + i * g->row_size, g->table + g->id[i] * g->row_size, g->row_size);
}

/* The table need not travel: the host gathers the rows in use. */
static fb_status visit_embed(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    uint64_t row_size = e->m->cfg.hidden * fb_dtype_size(e->o.act);
    await_update(e, 0);
    for (uint32_t i = 0; i < e->count; i++) {
        const fb_micro *micro = &e->micros[e->first + i];
        uint32_t s = i % N_STAGING;
        double since = fb_trace_now(e->trace);
        FB_TRY(e->ops->event_wait_host(e->d, e->staging_free[s], err));
        fb_trace_host(e->trace, FB_LABEL(HOST_STAGING, 0, e->first + i), since);
        since = fb_trace_now(e->trace);
        gather g = { e->staging[s], fb_state_at(e->o.state, FB_HOST_WEIGHTS, 0, 0), micro->host.id, row_size, micro->t };
        fb_team_run(e->o.team, (micro->t + GATHER_ROWS - 1) / GATHER_ROWS, gather_task, &g);
        fb_trace_host(e->trace, FB_LABEL(HOST_GATHER, 0, e->first + i), since);
        fb_inputs_set_used(&e->inputs, i, micro->t * row_size);
        FB_TRY(fb_traced_upload(e->d, e->trace, FB_LABEL(SEND_ROWS, 0, e->first + i), fb_inputs_first(&e->inputs, i),
                                e->staging[s], micro->t * row_size, err));
        FB_TRY(e->ops->record(e->d, FB_STREAM_H2D, e->staging_free[s], err));
    }
    FB_TRY(compute_after(e, FB_LABEL(WAIT_DATA, 0, FB_NO_PART), FB_STREAM_H2D, e->embed_ready, err));
done:
    return st;
}

/* ---- gradients on their way home ---- */

static void land(void *arg, bool failed)
{
    landing *l = arg;
    if (failed || !l->engine->loss_finite)
        fb_updater_drop(l->engine->updater, l->block, l->first, l->n, l->slab, true);
    else
        fb_updater_submit(l->engine->updater, l->block, l->first, l->n, l->slab, true);
}

static void look_at_loss(void *arg, bool failed)
{
    fb_engine *e = arg;
    e->loss_finite = !failed && isfinite(e->sums[e->m->n_block]);
}

/* src holds elements [first, first + n) of the block's gradient, in the dtype that travels. */
static fb_status download_gradient(fb_engine *e, uint32_t block, uint64_t first, uint64_t n, const unsigned char *src, fb_error *err)
{
    fb_status st = FB_OK;
    uint64_t size = fb_dtype_size(e->o.act);
    if (e->o.clip)
        return fb_traced_download(e->d, e->trace, FB_LABEL(FETCH_GRADIENT, block, FB_NO_PART),
                                  fb_state_at(e->o.state, FB_HOST_GRADIENTS, block, first), src, n * size, err);
    for (uint64_t at = 0; at < n;) {
        uint64_t piece = n - at < e->plan.slab_elems ? n - at : e->plan.slab_elems;
        double since = fb_trace_now(e->trace);
        unsigned char *slab = fb_pool_take(&e->slabs);
        fb_trace_host(e->trace, FB_LABEL(HOST_SLAB, block, FB_NO_PART), since);
        landing *l = &e->landings[(uint64_t)(slab - e->slabs.base) / e->slabs.slab_size];
        *l = (landing){ e, block, first + at, piece, slab };
        FB_TRY(fb_traced_download(e->d, e->trace, FB_LABEL(FETCH_GRADIENT, block, FB_NO_PART), slab, src + at * size, piece * size, err));
        FB_TRY(e->ops->call(e->d, FB_STREAM_D2H, land, l, err));
        at += piece;
    }
done:
    return st;
}

/* Rounds the block's accumulator once, adds up its norm, sends it.  free: recorded when the accumulator may be
 * written again. */
static fb_status send_gradient(fb_engine *e, uint32_t block, float *acc, fb_event *free_event, fb_error *err)
{
    fb_status st = FB_OK;
    uint64_t extent = e->m->blocks[block].extent;
    bool copied = fb_plan_grad_copied(e->o.act);
    uint64_t piece_max = copied ? e->plan.out_elems : extent;
    fb_updater_expect(e->updater, block);
    for (uint64_t first = 0; first < extent; first += piece_max) {
        uint64_t n = extent - first < piece_max ? extent - first : piece_max;
        unsigned char *out = copied ? region(e, FB_DEV_GRAD_OUT) : (unsigned char *)acc;
        if (copied)
            FB_TRY(fb_traced_wait(e->d, e->trace, FB_LABEL(WAIT_GRADIENT, block, FB_NO_PART), e->out_free, err));
        FB_TRY(fb_trace_begin(e->trace, FB_STREAM_COMPUTE, FB_LABEL(GRAD_OUT, block, FB_NO_PART), 0, err));
        FB_TRY(e->k->grad_out(e->d, &(fb_grad_out){ .out_dtype = e->o.act, .n = n, .acc = acc + first, .out = out,
            .sq = sum_at(e, block), .accumulate = first > 0 }, err));
        FB_TRY(fb_trace_end(e->trace, FB_STREAM_COMPUTE, err));
        FB_TRY(after(e, FB_STREAM_D2H, FB_STREAM_COMPUTE, e->gradient_ready, err));
        FB_TRY(download_gradient(e, block, first, n, out, err));
        if (copied)
            FB_TRY(e->ops->record(e->d, FB_STREAM_D2H, e->out_free, err));
    }
    /* A copy leaves the accumulator free at once; else it is what is being downloaded. */
    FB_TRY(e->ops->record(e->d, copied ? FB_STREAM_COMPUTE : FB_STREAM_D2H, free_event, err));
done:
    return st;
}

/* Between passes accumulators rest on the host, in fp32. */
static float *resting_place(const fb_engine *e, uint32_t block)
{
    bool shared = e->o.clip && e->o.act == FB_F32;
    return fb_state_at(e->o.state, shared ? FB_HOST_GRADIENTS : FB_HOST_ACCUMULATORS, block, 0);
}

/* Before a block's first backward of a pass.  Returns with compute ordered behind it. */
static fb_status open_accumulator(fb_engine *e, uint32_t block, float *acc, fb_event *free_event, bool zero, fb_error *err)
{
    fb_status st = FB_OK;
    uint64_t size = e->m->blocks[block].extent * sizeof(float);
    FB_TRY(fb_traced_wait(e->d, e->trace, FB_LABEL(WAIT_GRADIENT, block, FB_NO_PART), free_event, err));
    if (e->pass == 0) {
        if (zero)
            FB_TRY(e->ops->fill_zero(e->d, FB_STREAM_COMPUTE, acc, size, err));
        return FB_OK;
    }
    FB_TRY(after(e, FB_STREAM_H2D, FB_STREAM_COMPUTE, e->restored, err));
    FB_TRY(fb_traced_upload(e->d, e->trace, FB_LABEL(SEND_ACC, block, FB_NO_PART), acc, resting_place(e, block), size, err));
    FB_TRY(compute_after(e, FB_LABEL(WAIT_GRADIENT, block, FB_NO_PART), FB_STREAM_H2D, e->restored, err));
done:
    return st;
}

/* After a block's last backward of a pass. */
static fb_status close_accumulator(fb_engine *e, uint32_t block, float *acc, fb_event *free_event, fb_error *err)
{
    fb_status st = FB_OK;
    if (e->pass + 1 == e->n_pass)
        return send_gradient(e, block, acc, free_event, err);
    FB_TRY(after(e, FB_STREAM_D2H, FB_STREAM_COMPUTE, e->gradient_ready, err));
    FB_TRY(fb_traced_download(e->d, e->trace, FB_LABEL(FETCH_ACC, block, FB_NO_PART), resting_place(e, block), acc,
                              e->m->blocks[block].extent * sizeof(float), err));
    FB_TRY(e->ops->record(e->d, FB_STREAM_D2H, free_event, err));
    /* The next pass's restore goes by h2d, which does not wait for d2h by itself. */
    FB_TRY(e->ops->wait(e->d, FB_STREAM_H2D, free_event, err));
done:
    return st;
}

/* ---- decoder layers ---- */

static fb_layer_binding bind_layer(const fb_engine *e, uint32_t layer, uint32_t slot, uint32_t i, void *x)
{
    const fb_micro *micro = &e->micros[e->first + i];
    fb_micro_arrays meta = meta_at(e, i);
    uint32_t keep = e->mode == MODE_TRAIN ? layer : 0; /* without a backward, one layer's room serves all */
    fb_layer_binding b = {
        .device = e->d, .shape = &e->shape, .desc = block_of_layer(e, layer),
        .window = fb_model_config_window(&e->m->cfg, layer), .policy = e->o.train ? e->o.recompute : FB_RECOMPUTE_FULL,
        .t = micro->t, .t_max = e->plan.t_max, .weights = e->device_slots[slot].mem,
        .position = meta.position, .span = meta.span, .n_span = micro->n_span,
        .q_len_max = micro->len_max, .k_len_max = micro->len_max + e->cache_row,
        .x = x, .scratch = region(e, FB_DEV_SCRATCH),
        .saved = region(e, FB_DEV_SAVED) + (keep * e->plan.micro_per_pass + i) * e->plan.saved_size,
    };
    bind_rope(e, i, &b.cos, &b.sin);
    if (e->plan.cache_size) {
        b.cache_qkv = region(e, FB_DEV_CACHE) + layer * e->plan.cache_size;
        b.cache_k = b.cache_qkv + e->plan.cache_k_offset;
        b.cache_row = e->cache_row;
    }
    return b;
}

static fb_status visit_forward(fb_engine *e, uint32_t v, const fb_visit *visit, fb_error *err)
{
    fb_status st = FB_OK;
    uint32_t slot;
    FB_TRY(enter_layer(e, v, visit->layer, &slot, err));
    for (uint32_t i = 0; i < e->count; i++) {
        void *x, *y;
        FB_TRY(fb_inputs_forward(&e->inputs, visit->layer, i, &x, &y, err));
        fb_layer_binding b = bind_layer(e, visit->layer, slot, i, x);
        FB_TRY(fb_trace_begin(e->trace, FB_STREAM_COMPUTE, FB_LABEL(FORWARD, visit->layer + 1, e->first + i), 0, err));
        FB_TRY(fb_layer_forward(&b, y, err));
        FB_TRY(fb_trace_end(e->trace, FB_STREAM_COMPUTE, err));
        FB_TRY(fb_inputs_forward_done(&e->inputs, visit->layer, i, err));
    }
    FB_TRY(leave_layer(e, visit, slot, err));
done:
    return st;
}

static fb_status visit_backward(fb_engine *e, uint32_t v, const fb_visit *visit, fb_error *err)
{
    fb_status st = FB_OK;
    uint32_t slot, a = visit->layer % e->plan.n_acc;
    float *acc = (float *)(void *)(region(e, FB_DEV_ACC) + a * e->plan.acc_size);
    FB_TRY(enter_layer(e, v, visit->layer, &slot, err));
    /* Not zeroed: the first micro-batch overwrites, and the padding between tensors has been zero from the start. */
    FB_TRY(open_accumulator(e, visit->layer + 1, acc, e->acc_free[a], false, err));
    for (uint32_t i = 0; i < e->count; i++) {
        void *x;
        FB_TRY(fb_inputs_backward(&e->inputs, visit->layer, i, &x, err));
        fb_layer_binding b = bind_layer(e, visit->layer, slot, i, x);
        b.gradients = acc;
        FB_TRY(fb_trace_begin(e->trace, FB_STREAM_COMPUTE, FB_LABEL(BACKWARD, visit->layer + 1, e->first + i), 0, err));
        FB_TRY(fb_layer_backward(&b, fb_inputs_dx(&e->inputs, i), e->pass > 0 || i > 0, err));
        FB_TRY(fb_trace_end(e->trace, FB_STREAM_COMPUTE, err));
        FB_TRY(fb_inputs_backward_done(&e->inputs, err));
    }
    FB_TRY(leave_layer(e, visit, slot, err));
    FB_TRY(close_accumulator(e, visit->layer + 1, acc, e->acc_free[a], err));
done:
    return st;
}

/* ---- final norm, head and loss: only for the positions that are learned ---- */

typedef struct head_place {
    const unsigned char *norm, *table;
    float *d_norm, *d_table;
    unsigned char *logits, *d_logits, *x, *h, *dh; /* x: gathered inputs; h: normed; dh: gradient of h */
    float *rstd;
} head_place;

static head_place place_head(const fb_engine *e)
{
    const fb_block_desc *last = &e->m->blocks[e->m->n_block - 1], *embed = &e->m->blocks[0];
    uint64_t size = fb_dtype_size(e->o.act);
    bool tied = e->m->cfg.tied, copied = fb_plan_grad_copied(e->o.act) && e->o.train;
    float *table_acc = (float *)(void *)region(e, FB_DEV_TABLE_ACC), *final_acc = (float *)(void *)region(e, FB_DEV_FINAL_ACC);
    head_place p = {
        .norm = e->head.mem + (uint64_t)last->offset[FB_ROLE_FINAL_NORM] * size,
        .table = tied ? e->head.mem + head_extent_size(e) + (uint64_t)embed->offset[FB_ROLE_EMBED] * size
                      : e->head.mem + (uint64_t)last->offset[FB_ROLE_HEAD] * size,
        .d_norm = (tied ? final_acc : table_acc) + last->offset[FB_ROLE_FINAL_NORM],
        .d_table = tied ? table_acc + embed->offset[FB_ROLE_EMBED] : table_acc + last->offset[FB_ROLE_HEAD],
        .logits = e->arena + e->plan.loss_offset,
    };
    uint64_t logits = ((uint64_t)e->plan.loss_rows * e->m->cfg.vocab * sizeof(float) + 255) / 256 * 256;
    uint64_t d_logits = ((uint64_t)e->plan.loss_rows * e->m->cfg.vocab * size + 255) / 256 * 256;
    p.d_logits = copied ? p.logits + logits : p.logits;
    p.x = p.logits + logits + (copied ? d_logits : 0);
    p.h = p.x + e->plan.input_size;
    p.dh = p.h + e->plan.input_size;
    p.rstd = (float *)(void *)(p.h + e->plan.input_size * (e->o.train ? 2 : 1));
    return p;
}

static fb_status head_rows(fb_engine *e, const head_place *p, const fb_micro_arrays *meta, uint32_t first, uint32_t n, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_model_config *c = &e->m->cfg;
    uint64_t at = (uint64_t)first * c->hidden * fb_dtype_size(e->o.act);
    FB_TRY(e->k->matmul_nt(e->d, &(fb_matmul_nt){ .act = e->o.act, .y_dtype = FB_F32, .m = n, .n = c->vocab, .k = c->hidden,
        .x = p->h + at, .x_ld = c->hidden, .w = p->table, .w_ld = c->hidden, .y = p->logits, .y_ld = c->vocab }, err));
    if (e->mode == MODE_LOGITS) {
        FB_TRY(after(e, FB_STREAM_D2H, FB_STREAM_COMPUTE, e->loss_ready, err));
        FB_TRY(e->ops->download(e->d, FB_STREAM_D2H, e->logits_out + (uint64_t)first * c->vocab, p->logits,
                                (uint64_t)n * c->vocab * sizeof(float), err));
        return after(e, FB_STREAM_COMPUTE, FB_STREAM_D2H, e->loss_ready, err);
    }
    bool train = e->mode == MODE_TRAIN;
    FB_TRY(e->k->cross_entropy(e->d, &(fb_cross_entropy){ .act = e->o.act, .n = n, .v = c->vocab,
        .logits = (const float *)(const void *)p->logits, .target = meta->target + first, .grad_scale = e->grad_scale,
        .d_logits = train ? p->d_logits : NULL, .loss_sum = sum_at(e, e->m->n_block) }, err));
    if (!train)
        return FB_OK;
    FB_TRY(e->k->matmul_tn(e->d, &(fb_matmul_tn){ .act = e->o.act, .m = n, .n = c->vocab, .k = c->hidden, .dy = p->d_logits,
        .dy_ld = c->vocab, .x = p->h + at, .x_ld = c->hidden, .dw = p->d_table, .accumulate = true }, err));
    FB_TRY(e->k->matmul_nn(e->d, &(fb_matmul_nn){ .act = e->o.act, .m = n, .n = c->vocab, .k = c->hidden, .dy = p->d_logits,
        .dy_ld = c->vocab, .w = p->table, .w_ld = c->hidden, .dx = p->dh + at, .dx_ld = c->hidden }, err));
done:
    return st;
}

static fb_status head_micro(fb_engine *e, const head_place *p, uint32_t i, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_model_config *c = &e->m->cfg;
    const fb_micro *micro = &e->micros[e->first + i];
    fb_micro_arrays meta = meta_at(e, i);
    uint32_t n = micro->n_learned;
    bool train = e->mode == MODE_TRAIN;
    if (n) {
        FB_TRY(e->k->gather_rows(e->d, &(fb_gather_rows){ .act = e->o.act, .n = n, .c = c->hidden,
            .x = fb_inputs_last(&e->inputs, i), .index = meta.learn_index, .y = p->x }, err));
        FB_TRY(e->k->rms_norm(e->d, &(fb_rms_norm){ .act = e->o.act, .t = n, .c = c->hidden, .eps = c->norm_eps,
            .x = p->x, .w = p->norm, .y = p->h, .rstd = p->rstd }, err));
        for (uint32_t first = 0; first < n; first += e->plan.loss_rows)
            FB_TRY(head_rows(e, p, &meta, first, n - first < e->plan.loss_rows ? n - first : e->plan.loss_rows, err));
    }
    if (!train)
        return FB_OK;
    if (n)
        FB_TRY(e->k->rms_norm_bwd(e->d, &(fb_rms_norm_bwd){ .act = e->o.act, .t = n, .c = c->hidden, .x = p->x, .w = p->norm,
            .dy = p->dh, .rstd = p->rstd, .dx = p->h, .dw = p->d_norm, .accumulate = true }, err));
    FB_TRY(e->k->scatter_rows(e->d, &(fb_scatter_rows){ .act = e->o.act, .n = n, .t = micro->t, .c = c->hidden, .x = p->h,
        .index = meta.learn_index, .y = fb_inputs_dx(&e->inputs, i) }, err));
done:
    return st;
}

static fb_status visit_head(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    uint32_t last = e->m->n_block - 1;
    bool train = e->mode == MODE_TRAIN, tied = e->m->cfg.tied;
    float *table_acc = (float *)(void *)region(e, FB_DEV_TABLE_ACC), *final_acc = (float *)(void *)region(e, FB_DEV_FINAL_ACC);
    if (!e->head_valid)
        FB_TRY(load_head(e, err));
    if (!e->head_awaited)
        FB_TRY(fb_traced_wait(e->d, e->trace, FB_LABEL(WAIT_WEIGHTS, last, FB_NO_PART), e->head.loaded, err));
    e->head_awaited = true;
    if (train) {
        FB_TRY(open_accumulator(e, tied ? 0 : last, table_acc, e->table_free, true, err));
        if (tied)
            FB_TRY(open_accumulator(e, last, final_acc, e->final_free, true, err));
    }
    head_place p = place_head(e);
    if (train)
        FB_TRY(fb_inputs_turn(&e->inputs, err));
    for (uint32_t i = 0; i < e->count; i++) {
        FB_TRY(fb_trace_begin(e->trace, FB_STREAM_COMPUTE, FB_LABEL(LOSS, last, e->first + i), 0, err));
        FB_TRY(head_micro(e, &p, i, err));
        FB_TRY(fb_trace_end(e->trace, FB_STREAM_COMPUTE, err));
    }
    FB_TRY(e->ops->record(e->d, FB_STREAM_COMPUTE, e->head.used, err));
    if (!train)
        return FB_OK;
    if (e->pass + 1 == e->n_pass) {
        /* Before any gradient: with clipping off, nothing is updated under a loss that is not finite. */
        FB_TRY(after(e, FB_STREAM_D2H, FB_STREAM_COMPUTE, e->loss_ready, err));
        FB_TRY(fb_traced_download(e->d, e->trace, FB_LABEL(FETCH_SUMS, last, FB_NO_PART), &e->sums[e->m->n_block],
                                  sum_at(e, e->m->n_block), sizeof(double), err));
        FB_TRY(e->ops->call(e->d, FB_STREAM_D2H, look_at_loss, e, err));
    }
    FB_TRY(close_accumulator(e, last, tied ? final_acc : table_acc, tied ? e->final_free : e->table_free, err));
done:
    return st;
}

/* ---- the embedding's gradient ----
 *
 * The table's turn comes last: a tied one has waited on the device since the head.  Its rows are added in the order of
 * micro-batches, after the head's part of them all, whatever the passes: another order would be other bits.  So in all
 * passes but the last the gradients of the rows go to the host, and in the last they come back first. */

static fb_status add_rows(fb_engine *e, uint32_t micro, const void *dx, fb_micro_arrays meta, float *acc, fb_error *err)
{
    fb_status st = FB_OK;
    FB_TRY(fb_trace_begin(e->trace, FB_STREAM_COMPUTE, FB_LABEL(EMBED_GRAD, 0, micro), 0, err));
    FB_TRY(e->k->embed_grad(e->d, &(fb_embed_grad){ .act = e->o.act, .c = e->m->cfg.hidden,
        .n_unique = e->micros[micro].n_unique, .dx = dx, .id = meta.embed_id, .start = meta.embed_start,
        .order = meta.embed_order, .d_table = acc + e->m->blocks[0].offset[FB_ROLE_EMBED] }, err));
    FB_TRY(fb_trace_end(e->trace, FB_STREAM_COMPUTE, err));
done:
    return st;
}

static uint64_t rows_size(const fb_engine *e, uint32_t micro)
{
    return (uint64_t)e->micros[micro].t * e->m->cfg.hidden * fb_dtype_size(e->o.act);
}

static fb_status keep_rows(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    FB_TRY(after(e, FB_STREAM_D2H, FB_STREAM_COMPUTE, e->gradient_ready, err));
    for (uint32_t i = 0; i < e->count; i++)
        FB_TRY(fb_traced_download(e->d, e->trace, FB_LABEL(FETCH_ROWS, 0, e->first + i),
                                  e->host_rows + (e->first + i) * e->plan.input_size, fb_inputs_dx(&e->inputs, i),
                                  rows_size(e, e->first + i), err));
    /* The next pass writes where these are read. */
    FB_TRY(compute_after(e, FB_LABEL(WAIT_GRADIENT, 0, FB_NO_PART), FB_STREAM_D2H, e->restored, err));
done:
    return st;
}

/* No layer runs: its scratch takes one micro-batch's rows, and what describes them. */
static fb_status add_kept_rows(fb_engine *e, float *acc, fb_error *err)
{
    fb_status st = FB_OK;
    unsigned char *dx = region(e, FB_DEV_SCRATCH), *meta = dx + e->plan.input_size;
    for (uint32_t micro = 0; micro < e->first; micro++) {
        FB_TRY(after(e, FB_STREAM_H2D, FB_STREAM_COMPUTE, e->restored, err));
        FB_TRY(fb_traced_upload(e->d, e->trace, FB_LABEL(SEND_ROW_GRADIENTS, 0, micro), dx,
                                e->host_rows + micro * e->plan.input_size, rows_size(e, micro), err));
        FB_TRY(fb_traced_upload(e->d, e->trace, FB_LABEL(SEND_BATCH, 0, micro), meta, e->meta + micro * e->plan.meta_size,
                                e->plan.meta_size, err));
        FB_TRY(compute_after(e, FB_LABEL(WAIT_GRADIENT, 0, micro), FB_STREAM_H2D, e->restored, err));
        FB_TRY(add_rows(e, micro, dx, fb_micro_at(meta, e->plan.t_max), acc, err));
    }
done:
    return st;
}

static fb_status visit_embed_backward(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    float *acc = (float *)(void *)region(e, FB_DEV_TABLE_ACC);
    bool tied = e->m->cfg.tied;
    if (e->pass + 1 < e->n_pass) {
        FB_TRY(keep_rows(e, err));
        return tied ? close_accumulator(e, 0, acc, e->table_free, err) : FB_OK;
    }
    if (!tied) {
        FB_TRY(fb_traced_wait(e->d, e->trace, FB_LABEL(WAIT_GRADIENT, 0, FB_NO_PART), e->table_free, err));
        FB_TRY(e->ops->fill_zero(e->d, FB_STREAM_COMPUTE, acc, e->m->blocks[0].extent * sizeof(float), err));
    }
    FB_TRY(add_kept_rows(e, acc, err));
    for (uint32_t i = 0; i < e->count; i++)
        FB_TRY(add_rows(e, e->first + i, fb_inputs_dx(&e->inputs, i), meta_at(e, i), acc, err));
    FB_TRY(close_accumulator(e, 0, acc, e->table_free, err));
done:
    return st;
}

/* ---- passes and steps ---- */

static fb_status sync_all(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    for (int s = 0; s < FB_STREAM_COUNT; s++) {
        fb_status one = e->ops->sync(e->d, (fb_stream)s, st == FB_OK ? err : NULL);
        if (st == FB_OK)
            st = one;
    }
    return st;
}

static fb_status run_visit(fb_engine *e, uint32_t v, fb_error *err)
{
    const fb_visit *visit = &e->visits[e->backward][v];
    switch (visit->kind) {
    case FB_VISIT_EMBED:    return visit_embed(e, err);
    case FB_VISIT_FORWARD:  return visit_forward(e, v, visit, err);
    case FB_VISIT_HEAD:     return visit_head(e, err);
    case FB_VISIT_BACKWARD: return visit_backward(e, v, visit, err);
    default:                return visit_embed_backward(e, err);
    }
}

static fb_status run_pass(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    /* The previous pass's kernels still read the batch and the inputs that are about to be sent. */
    FB_TRY(e->ops->wait(e->d, FB_STREAM_H2D, e->pass_done, err));
    FB_TRY(upload_batch(e, err));
    fb_inputs_begin(&e->inputs, e->count, e->backward);
    for (uint32_t i = 0; i < e->n_slot; i++) /* the list begins again */
        if (e->slots[i].layer != FB_NEVER && e->slots[i].next_use >= e->n_visit[e->backward])
            e->slots[i].next_use -= e->n_visit[e->backward];
    for (uint32_t v = 0; v < e->n_visit[e->backward]; v++) {
        FB_TRY(run_visit(e, v, err));
        FB_TRY(prefetch(e, v, err));
        if (!e->o.overlap)
            FB_TRY(sync_all(e, err));
    }
    FB_TRY(e->ops->record(e->d, FB_STREAM_COMPUTE, e->pass_done, err));
done:
    return st;
}

/* Runs all passes of n micro-batches and leaves sums[] on the host. */
static fb_status run(fb_engine *e, engine_mode mode, uint32_t n, fb_step_result *out, fb_error *err)
{
    fb_status st = FB_OK;
    assert(n >= 1 && n <= e->o.n_micro);
    *out = (fb_step_result){ 0 };
    for (uint32_t i = 0; i < n; i++) {
        out->n_learned += e->micros[i].n_learned;
        out->n_token += e->micros[i].t;
    }
    if (mode == MODE_TRAIN && !out->n_learned)
        return FB_OK;
    bool backward = mode == MODE_TRAIN;
    if (backward != e->backward)
        fb_engine_forget(e);
    e->backward = backward;
    e->mode = mode;
    e->grad_scale = out->n_learned ? (float)(1.0 / (double)out->n_learned) : 0.0f;
    e->n_pass = (n + e->plan.micro_per_pass - 1) / e->plan.micro_per_pass;
    FB_TRY(e->ops->fill_zero(e->d, FB_STREAM_COMPUTE, region(e, FB_DEV_SUMS), e->plan.device[FB_DEV_SUMS].size, err));
    for (e->pass = 0; e->pass < e->n_pass; e->pass++) {
        e->first = e->pass * e->plan.micro_per_pass;
        e->count = n - e->first < e->plan.micro_per_pass ? n - e->first : e->plan.micro_per_pass;
        FB_TRY(run_pass(e, err));
    }
    FB_TRY(after(e, FB_STREAM_D2H, FB_STREAM_COMPUTE, e->loss_ready, err));
    FB_TRY(fb_traced_download(e->d, e->trace, FB_LABEL(FETCH_SUMS, e->m->n_block - 1, FB_NO_PART), e->sums, sum_at(e, 0),
                              (e->m->n_block + 1) * sizeof(double), err));
    double since = fb_trace_now(e->trace);
    FB_TRY(sync_all(e, err));
    fb_trace_host(e->trace, FB_LABEL(HOST_END, e->m->n_block - 1, FB_NO_PART), since);
    out->loss_sum = e->sums[e->m->n_block];
done:
    return st;
}

static double norm_of(const fb_engine *e)
{
    double sum = 0;
    for (uint32_t b = 0; b < e->m->n_block; b++)
        sum += e->sums[b];
    return sqrt(sum);
}

fb_status fb_engine_step(fb_engine *e, uint32_t n, const fb_adamw *a, double max_grad_norm, fb_step_result *out, fb_error *err)
{
    fb_status st = FB_OK;
    fb_adamw adamw = *a;
    adamw.clip = 1;
    assert(e->o.clip || max_grad_norm == 0);
    e->cache_row = 0;
    e->rope_next = e->rope_state;
    if (!e->o.clip) {
        fb_updater_wait_all(e->updater);
        fb_updater_begin(e->updater, &adamw);
    }
    FB_TRY(run(e, MODE_TRAIN, n, out, err));
    if (!out->n_learned)
        return FB_OK;
    e->rope_state = e->rope_next;
    out->grad_norm = norm_of(e);
    out->clip_factor = max_grad_norm > 0 ? fmin(1.0, max_grad_norm / (out->grad_norm + 1e-6)) : 1.0;
    bool finite = isfinite(out->loss_sum) && isfinite(out->grad_norm);
    out->updated = finite;
    if (e->o.clip) {
        adamw.clip = out->clip_factor;
        fb_updater_begin(e->updater, &adamw);
        for (uint32_t b = 0; b < e->m->n_block; b++) {
            void *g = fb_state_at(e->o.state, FB_HOST_GRADIENTS, b, 0);
            if (finite)
                fb_updater_submit(e->updater, b, 0, e->m->blocks[b].extent, g, false);
            else
                fb_updater_drop(e->updater, b, 0, e->m->blocks[b].extent, g, false);
        }
    } else if (!finite && isfinite(out->loss_sum))
        FB_TRY(fb_fail(err, FB_NONFINITE, "the gradient is not finite (norm %g) with clipping off, and updates had begun; nothing "
                       "is saved, set max_grad_norm above 0 to have such steps passed over", out->grad_norm));
    fb_engine_forget(e); /* the weights on the device are those before the update */
    if (!e->o.overlap)
        fb_updater_wait_all(e->updater);
    FB_TRY(fb_trace_step(e->trace, err));
done:
    return st;
}

fb_status fb_engine_eval(fb_engine *e, uint32_t n, fb_step_result *out, fb_error *err)
{
    e->cache_row = 0;
    e->rope_next = e->rope_state; /* evaluation leaves no trace in the training's */
    fb_status st = run(e, MODE_EVAL, n, out, err);
    return st != FB_OK ? st : fb_trace_step(e->trace, err);
}

fb_status fb_engine_logits(fb_engine *e, uint32_t cache_row, float *logits, fb_error *err)
{
    fb_step_result unused;
    e->cache_row = cache_row;
    e->logits_out = logits;
    e->rope_next = e->rope_state;
    fb_status st = run(e, MODE_LOGITS, 1, &unused, err);
    e->rope_state = e->rope_next;
    return st;
}

void fb_engine_settle(fb_engine *e)
{
    if (e->updater)
        fb_updater_wait_all(e->updater);
}

fb_micro *fb_engine_micro(fb_engine *e, uint32_t i)
{
    assert(i < e->o.n_micro);
    return &e->micros[i];
}

fb_rope_state *fb_engine_rope(fb_engine *e)
{
    return &e->rope_state;
}

/* A visit has a few spans of its own and a few a micro-batch; a gradient, a few a piece. */
uint32_t fb_engine_trace_spans(const fb_plan *plan, const fb_manifest *m)
{
    uint64_t visits = 2 * (uint64_t)m->cfg.n_layer + 3, k = plan->micro_per_pass;
    uint64_t piece = plan->out_elems < plan->slab_elems ? plan->out_elems : plan->slab_elems;
    uint64_t pieces = m->extent / piece + 2 * (uint64_t)m->n_block;
    uint64_t n = plan->n_pass * (visits * (3 * k + 8) + 4 * k) + 4 * pieces;
    return n < UINT32_MAX / 4 ? (uint32_t)n : UINT32_MAX / 4;
}

/* ---- new, free ---- */

static fb_status new_events(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    fb_event **const all[] = {
        &e->batch_ready, &e->embed_ready, &e->pass_done, &e->gradient_ready, &e->loss_ready, &e->acc_free[0],
        &e->acc_free[1], &e->table_free, &e->final_free, &e->out_free, &e->restored, &e->staging_free[0],
        &e->staging_free[1], &e->head.loaded, &e->head.used,
    };
    for (size_t i = 0; i < FB_COUNT(all); i++)
        FB_TRY(e->ops->event_new(e->d, all[i], err));
    for (uint32_t i = 0; i < e->n_slot; i++) {
        FB_TRY(e->ops->event_new(e->d, &e->device_slots[i].loaded, err));
        FB_TRY(e->ops->event_new(e->d, &e->device_slots[i].used, err));
    }
done:
    return st;
}

static fb_status new_host_buffers(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_plan *p = &e->plan;
    uint32_t n_rope = rope_is_dynamic(e) ? e->o.n_micro : 1;
    uint64_t slab_size = (p->slab_elems * fb_dtype_size(e->o.act) + 255) / 256 * 256;
    uint64_t slabs = p->host[FB_HOST_SLABS].size, inputs = p->host[FB_HOST_INPUTS].size, rows = p->host[FB_HOST_ROWS].size, sums = (e->m->n_block + 1) * sizeof(double);
    uint64_t size = N_STAGING * p->input_size + e->o.n_micro * p->meta_size + n_rope * p->rope_size + slabs + inputs + rows + sums;
    void *mem = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mem == MAP_FAILED)
        return fb_fail(err, FB_NOMEM, "host memory: the system has no %.1f MiB for the batch", (double)size / 0x1p20);
    unsigned char *at = e->host = mem;
    e->host_size = size;
    FB_TRY(e->ops->pin(e->d, mem, size, err));
    for (int i = 0; i < N_STAGING; i++, at += p->input_size)
        e->staging[i] = at;
    e->meta = at, at += e->o.n_micro * p->meta_size;
    e->rope = at, at += n_rope * p->rope_size;
    if (slabs)
        fb_pool_init(&e->slabs, at, slab_size, p->n_slab);
    at += slabs;
    e->host_inputs = at, at += inputs;
    e->host_rows = at, at += rows;
    e->sums = (double *)(void *)at;
    for (uint32_t i = 0; i < e->o.n_micro; i++)
        fb_micro_init(&e->micros[i], e->meta + i * p->meta_size, p->t_max, e->m->cfg.pad);
    if (!rope_is_dynamic(e))
        make_rope(e, 0, (uint32_t)(p->rope_size / 2 / (e->m->cfg.head_dim / 2 * sizeof(float))), &e->rope_state);
done:
    return st;
}

fb_status fb_engine_new(fb_engine **out, const fb_engine_options *o, fb_error *err)
{
    fb_status st = FB_OK;
    fb_engine *e = calloc(1, sizeof *e);
    if (!e)
        return fb_fail(err, FB_NOMEM, "engine: no memory");
    e->o = *o;
    e->plan = *o->plan;
    e->d = o->device;
    e->ops = e->d->ops;
    e->k = e->d->kernels;
    e->m = o->state->manifest;
    e->trace = o->trace;
    const fb_model_config *c = &e->m->cfg;
    e->shape = (fb_layer_shape){ c, o->act, e->k->attention_scratch(e->plan.t_max, c->n_head, c->head_dim) };
    e->n_slot = e->plan.slots;
    e->slots = calloc(e->n_slot, sizeof *e->slots);
    e->device_slots = calloc(e->n_slot, sizeof *e->device_slots);
    e->layer_state = calloc(c->n_layer, sizeof *e->layer_state);
    e->micros = calloc(o->n_micro, sizeof *e->micros);
    e->landings = calloc(e->plan.n_slab, sizeof *e->landings);
    for (int i = 0; i < 2; i++)
        e->visits[i] = calloc(2 * (size_t)c->n_layer + 3, sizeof **e->visits);
    if (!e->slots || !e->device_slots || !e->layer_state || !e->micros || !e->landings || !e->visits[0] || !e->visits[1])
        FB_TRY(fb_fail(err, FB_NOMEM, "engine: no memory for %u slots and %u layers", e->n_slot, c->n_layer));
    for (int i = 0; i < 2; i++)
        e->n_visit[i] = fb_schedule_build(e->visits[i], c->n_layer, i == 1);
    for (uint32_t i = 0; i < e->n_slot; i++)
        e->slots[i].layer = FB_NEVER;
    FB_TRY(new_events(e, err));
    FB_TRY(new_host_buffers(e, err));
    void *arena;
    FB_TRY(e->ops->alloc(e->d, e->plan.device_bytes, &arena, err));
    e->arena = arena;
    for (uint32_t i = 0; i < e->n_slot; i++)
        e->device_slots[i].mem = region(e, FB_DEV_SLOTS) + i * e->plan.slot_size;
    e->head.mem = region(e, FB_DEV_HEAD_SLOT);
    FB_TRY(fb_inputs_init(&e->inputs, &e->plan, e->d, e->arena, e->host_inputs, c->n_layer, err));
    e->inputs.trace = o->trace;
    FB_TRY(e->ops->fill_zero(e->d, FB_STREAM_COMPUTE, region(e, FB_DEV_ACC), e->plan.device[FB_DEV_ACC].size, err));
    if (o->train)
        FB_TRY(fb_updater_new(&e->updater, o->state, &e->slabs, o->update_threads, err));
    if (o->train)
        fb_updater_set_trace(e->updater, o->trace);
    *out = e;
    e = NULL;
done:
    fb_engine_free(e);
    return st;
}

void fb_engine_free(fb_engine *e)
{
    if (!e)
        return;
    sync_all(e, NULL); /* nothing may still run that uses what is freed below */
    fb_updater_free(e->updater);
    fb_event *const all[] = {
        e->batch_ready, e->embed_ready, e->pass_done, e->gradient_ready, e->loss_ready, e->acc_free[0], e->acc_free[1],
        e->table_free, e->final_free, e->out_free, e->restored, e->staging_free[0], e->staging_free[1], e->head.loaded, e->head.used,
    };
    for (size_t i = 0; i < FB_COUNT(all); i++)
        if (all[i])
            e->ops->event_free(e->d, all[i]);
    for (uint32_t i = 0; e->device_slots && i < e->n_slot; i++) {
        if (e->device_slots[i].loaded)
            e->ops->event_free(e->d, e->device_slots[i].loaded);
        if (e->device_slots[i].used)
            e->ops->event_free(e->d, e->device_slots[i].used);
    }
    if (e->arena)
        e->ops->free(e->d, e->arena);
    fb_inputs_deinit(&e->inputs);
    fb_pool_deinit(&e->slabs);
    if (e->host) {
        e->ops->unpin(e->d, e->host);
        munmap(e->host, e->host_size);
    }
    free(e->slots);
    free(e->device_slots);
    free(e->layer_state);
    free(e->micros);
    free(e->landings);
    free(e->visits[0]);
    free(e->visits[1]);
    free(e);
}
