/* engine_gradients.c - from the fp32 accumulators home to the host. */
#include "train/engine_parts.h"

#include <math.h>

/* ---- gradients on their way home ---- */

static void land(void *arg, bool failed)
{
    landing *l = arg;
    if (failed || !l->engine->loss_finite)
        fb_updater_drop(l->engine->updater, l->block, l->first, l->n, l->slab, true);
    else
        fb_updater_submit(l->engine->updater, l->block, l->first, l->n, l->slab, true);
}

void fb_engine_look_at_loss(void *arg, bool failed)
{
    fb_engine *e = arg;
    e->loss_finite = !failed && isfinite(e->sums[e->m->n_block]);
}

/* src holds elements [first, first + n) of the block's gradient, in the dtype that travels. */
static fb_status download_gradient(fb_engine *e, uint32_t block, uint64_t first, uint64_t n, const unsigned char *src,
                                   fb_error *err)
{
    fb_status st = FB_OK;
    uint64_t size = fb_dtype_size(e->o.act);
    if (e->o.clip)
        return fb_traced_download(e->d, e->trace, FB_LABEL(FETCH_GRADIENT, block, FB_NO_PART),
                                  fb_state_at(e->o.state, FB_HOST_GRADIENTS, block, first), src, n * size, err);
    for (uint64_t at = 0; at < n;) {
        uint64_t piece = n - at < e->plan.slab_elems ? n - at : e->plan.slab_elems;
        double since = fb_trace_now(e->trace);
        fb_activity_wait(e->o.activity, FB_WAIT_SLAB, block);
        unsigned char *slab = fb_pool_take(&e->slabs);
        fb_activity_wait(e->o.activity, FB_WAIT_NOTHING, 0);
        fb_trace_host(e->trace, FB_LABEL(HOST_SLAB, block, FB_NO_PART), since);
        landing *l = &e->landings[(uint64_t)(slab - e->slabs.base) / e->slabs.slab_size];
        *l = (landing){ e, block, first + at, piece, slab };
        FB_TRY(fb_traced_download(e->d, e->trace, FB_LABEL(FETCH_GRADIENT, block, FB_NO_PART), slab, src + at * size, piece * size,
                                  err));
        FB_TRY(e->ops->call(e->d, FB_STREAM_D2H, land, l, err));
        at += piece;
    }
done:
    return st;
}

/* The download of a gradient is enqueued once the kernels of the block after it are: it may have to wait for slabs, and the
 * compute stream would have nothing to do meanwhile. */
fb_status fb_engine_send_leaving(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    leaving l = e->leaving;
    e->leaving.src = NULL;
    if (!l.src)
        return FB_OK;
    if (l.first == 0)
        fb_updater_expect(e->updater, l.block);
    FB_TRY(download_gradient(e, l.block, l.first, l.n, l.src, err));
    if (l.downloaded)
        FB_TRY(e->ops->record(e->d, FB_STREAM_D2H, l.downloaded, err));
done:
    return st;
}

static bool has_own_accumulator(const fb_engine *e, uint32_t block)
{
    return fb_plan_owns(&e->plan, e->m, FB_OWN_ACCUMULATOR, block);
}

float *fb_engine_accumulator(const fb_engine *e, uint32_t block)
{
    bool last = block + 1 == e->m->n_block;
    if (has_own_accumulator(e, block))
        return fb_state_device_at(e->o.state, FB_DEV_BLOCK_ACC, block, 0);
    if (block > 0 && !last)
        return (float *)(void *)(fb_engine_region(e, FB_DEV_ACC) + (block - 1) % e->plan.n_acc * e->plan.acc_size);
    return (float *)(void *)fb_engine_region(e, last && e->m->cfg.tied ? FB_DEV_FINAL_ACC : FB_DEV_TABLE_ACC);
}

/* Reached when the accumulator may be written again.  NULL: it is the block's own, which is next written in another step,
 * and a step ends with every stream idle. */
static fb_event *accumulator_free(const fb_engine *e, uint32_t block)
{
    bool last = block + 1 == e->m->n_block;
    return has_own_accumulator(e, block) ? NULL
         : block > 0 && !last ? e->acc_free[(block - 1) % e->plan.n_acc]
         : last && e->m->cfg.tied ? e->final_free : e->table_free;
}

/* Elements [first, first + n) of the accumulator: rounded once to out, squares added to the block's norm. */
static fb_status round_gradient(fb_engine *e, uint32_t block, uint64_t first, uint64_t n, void *out, fb_error *err)
{
    fb_status st = FB_OK;
    FB_TRY(fb_trace_begin(e->trace, FB_STREAM_COMPUTE, FB_LABEL(GRAD_OUT, block, FB_NO_PART), 0, err));
    FB_TRY(e->k->grad_out(e->d, &(fb_grad_out){ .out_dtype = e->o.act, .n = n, .acc = fb_engine_accumulator(e, block) + first,
        .out = out, .sq = fb_engine_sum_at(e, block), .accumulate = first > 0 }, err));
    FB_TRY(fb_trace_end(e->trace, FB_STREAM_COMPUTE, err));
done:
    return st;
}

/* A block that lives on the device: its gradient waits there for the norm, or is used at once. */
static fb_status keep_gradient(fb_engine *e, uint32_t block, fb_error *err)
{
    fb_status st = FB_OK;
    bool stored = fb_plan_owns(&e->plan, e->m, FB_OWN_GRADIENT, block);
    void *out = stored ? fb_state_device_at(e->o.state, FB_DEV_HOME_GRADIENTS, block, 0) : NULL;
    FB_TRY(fb_engine_send_leaving(e, err)); /* whose accumulator may be the next block's */
    FB_TRY(round_gradient(e, block, 0, e->m->blocks[block].extent, out, err));
    if (!e->o.clip) /* not under a loss that is not finite */
        FB_TRY(fb_engine_update_at_home(e, block, fb_engine_sum_at(e, e->m->n_block), err));
    if (!has_own_accumulator(e, block))
        FB_TRY(e->ops->record(e->d, FB_STREAM_COMPUTE, accumulator_free(e, block), err));
done:
    return st;
}

/* Rounds the block's accumulator once, adds up its norm, leaves it to be sent. */
static fb_status send_gradient(fb_engine *e, uint32_t block, fb_error *err)
{
    fb_status st = FB_OK;
    uint64_t extent = e->m->blocks[block].extent;
    bool copied = fb_plan_grad_copied(e->o.act);
    uint64_t piece_max = copied ? e->plan.out_elems : extent;
    for (uint64_t first = 0; first < extent; first += piece_max) {
        uint64_t n = extent - first < piece_max ? extent - first : piece_max;
        FB_TRY(fb_engine_send_leaving(e, err));
        unsigned char *out = copied ? fb_engine_region(e, FB_DEV_GRAD_OUT) : (unsigned char *)fb_engine_accumulator(e, block);
        if (copied)
            FB_TRY(fb_traced_wait(e->d, e->trace, FB_LABEL(WAIT_GRADIENT, block, FB_NO_PART), e->out_free, err));
        FB_TRY(round_gradient(e, block, first, n, out, err));
        FB_TRY(fb_engine_after(e, FB_STREAM_D2H, FB_STREAM_COMPUTE, e->gradient_ready, err));
        e->leaving = (leaving){ block, first, n, out, copied ? e->out_free : accumulator_free(e, block) };
    }
    /* A copy leaves the accumulator free at once; else it is what is being downloaded. */
    if (copied && !has_own_accumulator(e, block))
        FB_TRY(e->ops->record(e->d, FB_STREAM_COMPUTE, accumulator_free(e, block), err));
done:
    return st;
}

/* Between passes shared accumulators rest on the host, in fp32. */
static float *resting_place(const fb_engine *e, uint32_t block)
{
    bool shared = e->o.clip && e->o.act == FB_F32;
    return fb_state_at(e->o.state, shared ? FB_HOST_GRADIENTS : FB_HOST_ACCUMULATORS, block, 0);
}

/* Before a block's first backward of a pass.  Returns with compute ordered behind it. */
fb_status fb_engine_open_accumulator(fb_engine *e, uint32_t block, bool zero, fb_error *err)
{
    fb_status st = FB_OK;
    float *acc = fb_engine_accumulator(e, block);
    uint64_t size = e->m->blocks[block].extent * sizeof(float);
    if (!has_own_accumulator(e, block))
        FB_TRY(fb_traced_wait(e->d, e->trace, FB_LABEL(WAIT_GRADIENT, block, FB_NO_PART), accumulator_free(e, block), err));
    if (e->pass == 0)
        return zero ? e->ops->fill_zero(e->d, FB_STREAM_COMPUTE, acc, size, err) : FB_OK;
    if (has_own_accumulator(e, block))
        return FB_OK;
    FB_TRY(fb_engine_after(e, FB_STREAM_H2D, FB_STREAM_COMPUTE, e->restored, err));
    FB_TRY(fb_traced_upload(e->d, e->trace, FB_LABEL(SEND_ACC, block, FB_NO_PART), acc, resting_place(e, block), size, err));
    FB_TRY(fb_engine_compute_after(e, FB_LABEL(WAIT_GRADIENT, block, FB_NO_PART), FB_STREAM_H2D, e->restored, err));
done:
    return st;
}

/* After a block's last backward of a pass. */
fb_status fb_engine_close_accumulator(fb_engine *e, uint32_t block, fb_error *err)
{
    fb_status st = FB_OK;
    fb_event *free_event = accumulator_free(e, block);
    if (e->pass + 1 == e->n_pass)
        return fb_engine_at_home(e, block) ? keep_gradient(e, block, err) : send_gradient(e, block, err);
    if (has_own_accumulator(e, block))
        return FB_OK;
    FB_TRY(fb_engine_after(e, FB_STREAM_D2H, FB_STREAM_COMPUTE, e->gradient_ready, err));
    FB_TRY(fb_traced_download(e->d, e->trace, FB_LABEL(FETCH_ACC, block, FB_NO_PART), resting_place(e, block),
                              fb_engine_accumulator(e, block), e->m->blocks[block].extent * sizeof(float), err));
    FB_TRY(e->ops->record(e->d, FB_STREAM_D2H, free_event, err));
    /* The next pass's restore goes by h2d, which does not wait for d2h by itself. */
    FB_TRY(e->ops->wait(e->d, FB_STREAM_H2D, free_event, err));
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
    FB_TRY(fb_engine_after(e, FB_STREAM_D2H, FB_STREAM_COMPUTE, e->gradient_ready, err));
    for (uint32_t i = 0; i < e->count; i++)
        FB_TRY(fb_traced_download(e->d, e->trace, FB_LABEL(FETCH_ROWS, 0, e->first + i),
                                  e->host_rows + (e->first + i) * e->plan.input_size, fb_inputs_dx(&e->inputs, i),
                                  rows_size(e, e->first + i), err));
    FB_TRY(e->ops->record(e->d, FB_STREAM_D2H, e->rows_kept, err));
done:
    return st;
}

fb_status fb_engine_await_kept_rows(fb_engine *e, fb_error *err)
{
    return e->pass == 0 ? FB_OK : fb_traced_wait(e->d, e->trace, FB_LABEL(WAIT_GRADIENT, 0, FB_NO_PART), e->rows_kept, err);
}

/* No layer runs: its scratch takes one micro-batch's rows, and what describes them. */
static fb_status add_kept_rows(fb_engine *e, float *acc, fb_error *err)
{
    fb_status st = FB_OK;
    unsigned char *dx = fb_engine_region(e, FB_DEV_SCRATCH), *meta = dx + e->plan.input_size;
    for (uint32_t micro = 0; micro < e->first; micro++) {
        FB_TRY(fb_engine_after(e, FB_STREAM_H2D, FB_STREAM_COMPUTE, e->restored, err));
        FB_TRY(fb_traced_upload(e->d, e->trace, FB_LABEL(SEND_ROW_GRADIENTS, 0, micro), dx,
                                e->host_rows + micro * e->plan.input_size, rows_size(e, micro), err));
        FB_TRY(fb_traced_upload(e->d, e->trace, FB_LABEL(SEND_BATCH, 0, micro), meta, e->meta + micro * e->plan.meta_size,
                                e->plan.meta_size, err));
        FB_TRY(fb_engine_compute_after(e, FB_LABEL(WAIT_GRADIENT, 0, micro), FB_STREAM_H2D, e->restored, err));
        FB_TRY(add_rows(e, micro, dx, fb_micro_at(meta, e->plan.t_max), acc, err));
    }
done:
    return st;
}

fb_status fb_engine_visit_embed_backward(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    bool tied = e->m->cfg.tied;
    if (e->pass + 1 < e->n_pass) {
        FB_TRY(keep_rows(e, err));
        return tied ? fb_engine_close_accumulator(e, 0, err) : FB_OK;
    }
    float *acc = fb_engine_accumulator(e, 0);
    if (!tied) { /* a tied one was opened by the head */
        if (!has_own_accumulator(e, 0))
            FB_TRY(fb_traced_wait(e->d, e->trace, FB_LABEL(WAIT_GRADIENT, 0, FB_NO_PART), accumulator_free(e, 0), err));
        FB_TRY(e->ops->fill_zero(e->d, FB_STREAM_COMPUTE, acc, e->m->blocks[0].extent * sizeof(float), err));
    }
    FB_TRY(add_kept_rows(e, acc, err));
    for (uint32_t i = 0; i < e->count; i++)
        FB_TRY(add_rows(e, e->first + i, fb_inputs_dx(&e->inputs, i), fb_engine_meta_at(e, i), acc, err));
    FB_TRY(fb_engine_close_accumulator(e, 0, err));
    FB_TRY(fb_engine_send_leaving(e, err));
done:
    return st;
}
