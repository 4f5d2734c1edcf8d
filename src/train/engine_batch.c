/* engine_batch.c - what goes down before the first layer: the batch, rope tables, embedding rows. */
#include "train/engine_parts.h"

#include <string.h>

/* ---- the batch ---- */

bool fb_engine_rope_is_dynamic(const fb_engine *e)
{
    return e->m->cfg.rope.type == FB_ROPE_DYNAMIC;
}

/* One table serves all, unless it depends on the micro-batch. */
static unsigned char *rope_device(const fb_engine *e, uint32_t i)
{
    return fb_engine_region(e, FB_DEV_ROPE) + (fb_engine_rope_is_dynamic(e) ? i : 0) * e->plan.rope_size;
}

void fb_engine_bind_rope(const fb_engine *e, uint32_t i, const float **cos, const float **sin)
{
    *cos = (const float *)(const void *)rope_device(e, i);
    *sin = (const float *)(const void *)(rope_device(e, i) + e->plan.rope_size / 2);
}

/* Writes host table i and returns it. */
const void *fb_engine_make_rope(const fb_engine *e, uint32_t i, uint32_t n_position, const fb_rope_state *s)
{
    unsigned char *table = e->rope + i * e->plan.rope_size;
    fb_rope_table((float *)(void *)table, (float *)(void *)(table + e->plan.rope_size / 2), n_position, &e->m->cfg, s);
    return table;
}

fb_status fb_engine_upload_batch(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    for (uint32_t i = 0; i < e->count; i++) {
        uint32_t micro = e->first + i;
        FB_TRY(fb_traced_upload(e->d, e->trace, FB_LABEL(SEND_BATCH, 0, micro),
                                fb_engine_region(e, FB_DEV_META) + i * e->plan.meta_size,
                                e->meta + micro * e->plan.meta_size, e->plan.meta_size, err));
        if (fb_engine_rope_is_dynamic(e)) {
            uint32_t len = e->micros[micro].len_max + e->cache_row;
            fb_rope_advance(&e->rope_next, &e->m->cfg, len);
            FB_TRY(fb_traced_upload(e->d, e->trace, FB_LABEL(SEND_BATCH, 0, micro), rope_device(e, i),
                                    fb_engine_make_rope(e, micro, len, &e->rope_next), e->plan.rope_size, err));
        }
    }
    if (!fb_engine_rope_is_dynamic(e) && !e->rope_uploaded) {
        FB_TRY(e->ops->upload(e->d, FB_STREAM_H2D, fb_engine_region(e, FB_DEV_ROPE), e->rope, e->plan.rope_size, err));
        e->rope_uploaded = true;
    }
    FB_TRY(fb_engine_compute_after(e, FB_LABEL(WAIT_DATA, 0, FB_NO_PART), FB_STREAM_H2D, e->batch_ready, err));
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

static fb_status gather_at_home(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    const unsigned char *table = fb_state_device_at(e->o.state, FB_DEV_HOME_WEIGHTS, 0, e->m->blocks[0].offset[FB_ROLE_EMBED]);
    for (uint32_t i = 0; i < e->count; i++) {
        const fb_micro *micro = &e->micros[e->first + i];
        fb_inputs_set_used(&e->inputs, i, micro->t * e->m->cfg.hidden * fb_dtype_size(e->o.act));
        FB_TRY(e->k->gather_rows(e->d, &(fb_gather_rows){ .act = e->o.act, .n = micro->t, .c = e->m->cfg.hidden, .x = table,
            .index = fb_engine_meta_at(e, i).id, .y = fb_inputs_first(&e->inputs, i) }, err));
    }
done:
    return st;
}

/* A table on the host need not travel: the host gathers the rows in use. */
fb_status fb_engine_visit_embed(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    uint64_t row_size = e->m->cfg.hidden * fb_dtype_size(e->o.act);
    if (fb_engine_at_home(e, 0))
        return gather_at_home(e, err);
    fb_engine_await_update(e, 0);
    for (uint32_t i = 0; i < e->count; i++) {
        const fb_micro *micro = &e->micros[e->first + i];
        uint32_t s = i % N_STAGING;
        double since = fb_trace_now(e->trace);
        fb_activity_wait(e->o.activity, FB_WAIT_STAGING, 0);
        FB_TRY(e->ops->event_wait_host(e->d, e->staging_free[s], err));
        fb_activity_wait(e->o.activity, FB_WAIT_NOTHING, 0);
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
    FB_TRY(fb_engine_compute_after(e, FB_LABEL(WAIT_DATA, 0, FB_NO_PART), FB_STREAM_H2D, e->embed_ready, err));
done:
    return st;
}
