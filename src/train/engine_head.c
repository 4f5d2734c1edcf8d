/* engine_head.c - final norm, head and loss, forward and backward together, only for the positions that are learned. */
#include "train/engine_parts.h"

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
    uint32_t final = e->m->n_block - 1, table = tied ? 0 : final;
    uint64_t table_first = tied ? embed->offset[FB_ROLE_EMBED] : last->offset[FB_ROLE_HEAD];
    head_place p = {
        .norm = fb_engine_head_weights(e, final) + (uint64_t)last->offset[FB_ROLE_FINAL_NORM] * size,
        .table = fb_engine_head_weights(e, table) + table_first * size,
        .d_norm = e->o.train ? fb_engine_accumulator(e, final) + last->offset[FB_ROLE_FINAL_NORM] : NULL,
        .d_table = e->o.train ? fb_engine_accumulator(e, table) + table_first : NULL,
        .logits = e->arena + e->plan.loss_offset,
    };
    uint64_t logits = fb_align((uint64_t)e->plan.loss_rows * e->m->cfg.vocab * sizeof(float));
    uint64_t d_logits = fb_align((uint64_t)e->plan.loss_rows * e->m->cfg.vocab * size);
    p.d_logits = copied ? p.logits + logits : p.logits;
    p.x = p.logits + logits + (copied ? d_logits : 0);
    p.h = p.x + e->plan.input_size;
    p.dh = p.h + e->plan.input_size;
    p.rstd = (float *)(void *)(p.h + e->plan.input_size * (e->o.train ? 2 : 1));
    return p;
}

/* fresh: nothing has been added to the table's gradient yet in this step. */
static fb_status head_rows(fb_engine *e, const head_place *p, const fb_micro_arrays *meta, uint32_t first, uint32_t n, bool fresh,
                           fb_error *err)
{
    fb_status st = FB_OK;
    const fb_model_config *c = &e->m->cfg;
    uint64_t at = (uint64_t)first * c->hidden * fb_dtype_size(e->o.act);
    FB_TRY(e->k->matmul_nt(e->d, &(fb_matmul_nt){ .act = e->o.act, .y_dtype = FB_F32, .m = n, .n = c->vocab, .k = c->hidden,
        .x = p->h + at, .x_ld = c->hidden, .w = p->table, .w_ld = c->hidden, .y = p->logits, .y_ld = c->vocab }, err));
    if (e->mode == MODE_LOGITS) {
        FB_TRY(fb_engine_after(e, FB_STREAM_D2H, FB_STREAM_COMPUTE, e->loss_ready, err));
        FB_TRY(e->ops->download(e->d, FB_STREAM_D2H, e->logits_out + (uint64_t)first * c->vocab, p->logits,
                                (uint64_t)n * c->vocab * sizeof(float), err));
        return fb_engine_after(e, FB_STREAM_COMPUTE, FB_STREAM_D2H, e->loss_ready, err);
    }
    bool train = e->mode == MODE_TRAIN;
    FB_TRY(e->k->cross_entropy(e->d, &(fb_cross_entropy){ .act = e->o.act, .n = n, .v = c->vocab,
        .logits = (const float *)(const void *)p->logits, .target = meta->target + first, .grad_scale = e->grad_scale,
        .d_logits = train ? p->d_logits : NULL, .loss_sum = fb_engine_sum_at(e, e->m->n_block) }, err));
    if (!train)
        return FB_OK;
    FB_TRY(e->k->matmul_tn(e->d, &(fb_matmul_tn){ .act = e->o.act, .m = n, .n = c->vocab, .k = c->hidden, .dy = p->d_logits,
        .dy_ld = c->vocab, .x = p->h + at, .x_ld = c->hidden, .dw = p->d_table, .accumulate = !fresh }, err));
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
    fb_micro_arrays meta = fb_engine_meta_at(e, i);
    uint32_t n = micro->n_learned;
    bool train = e->mode == MODE_TRAIN;
    if (n) {
        FB_TRY(e->k->gather_rows(e->d, &(fb_gather_rows){ .act = e->o.act, .n = n, .c = c->hidden,
            .x = fb_inputs_last(&e->inputs, i), .index = meta.learn_index, .y = p->x }, err));
        FB_TRY(e->k->rms_norm(e->d, &(fb_rms_norm){ .act = e->o.act, .t = n, .c = c->hidden, .eps = c->norm_eps,
            .x = p->x, .w = p->norm, .y = p->h, .rstd = p->rstd }, err));
        for (uint32_t first = 0; first < n; first += e->plan.loss_rows)
            FB_TRY(head_rows(e, p, &meta, first, n - first < e->plan.loss_rows ? n - first : e->plan.loss_rows,
                             e->pass == 0 && i == 0 && first == 0, err));
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

fb_status fb_engine_visit_head(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    uint32_t last = e->m->n_block - 1;
    bool train = e->mode == MODE_TRAIN, tied = e->m->cfg.tied;
    bool home = fb_engine_at_home(e, last);
    if (!home && !e->head_valid)
        FB_TRY(fb_engine_load_head(e, err));
    if (!home && !e->head_awaited)
        FB_TRY(fb_traced_wait(e->d, e->trace, FB_LABEL(WAIT_WEIGHTS, last, FB_NO_PART), e->head.loaded, err));
    e->head_awaited = true;
    if (train) {
        FB_TRY(fb_engine_open_accumulator(e, tied ? 0 : last, true, err));
        if (tied)
            FB_TRY(fb_engine_open_accumulator(e, last, true, err));
    }
    head_place p = place_head(e);
    if (train) {
        FB_TRY(fb_engine_await_kept_rows(e, err));
        FB_TRY(fb_inputs_turn(&e->inputs, err));
    }
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
        FB_TRY(fb_engine_after(e, FB_STREAM_D2H, FB_STREAM_COMPUTE, e->loss_ready, err));
        FB_TRY(fb_traced_download(e->d, e->trace, FB_LABEL(FETCH_SUMS, last, FB_NO_PART), &e->sums[e->m->n_block],
                                  fb_engine_sum_at(e, e->m->n_block), sizeof(double), err));
        FB_TRY(e->ops->call(e->d, FB_STREAM_D2H, fb_engine_look_at_loss, e, err));
    }
    FB_TRY(fb_engine_close_accumulator(e, last, err));
done:
    return st;
}
