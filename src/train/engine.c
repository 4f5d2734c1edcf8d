#include "train/engine_parts.h"

#include <assert.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- passes and steps ---- */

static fb_status sync_all(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    for (int s = 0; s < FB_STREAM_COUNT; s++) {
        fb_activity_wait(e->o.activity, FB_WAIT_SYNC, (uint32_t)s);
        fb_status one = e->ops->sync(e->d, (fb_stream)s, st == FB_OK ? err : NULL);
        if (st == FB_OK)
            st = one;
    }
    fb_activity_wait(e->o.activity, FB_WAIT_NOTHING, 0);
    return st;
}

static fb_phase phase_of(fb_visit_kind kind)
{
    static const fb_phase phases[] = { [FB_VISIT_EMBED] = FB_PHASE_EMBED, [FB_VISIT_FORWARD] = FB_PHASE_FORWARD,
        [FB_VISIT_HEAD] = FB_PHASE_HEAD, [FB_VISIT_BACKWARD] = FB_PHASE_BACKWARD,
        [FB_VISIT_EMBED_BACKWARD] = FB_PHASE_EMBED_BACKWARD };
    return phases[kind];
}

static fb_status run_visit(fb_engine *e, uint32_t v, fb_error *err)
{
    const fb_visit *visit = &e->visits[e->backward][v];
    fb_activity_enter(e->o.activity, phase_of(visit->kind), visit->layer);
    switch (visit->kind) {
    case FB_VISIT_EMBED:    return fb_engine_visit_embed(e, err);
    case FB_VISIT_FORWARD:  return fb_engine_visit_forward(e, v, visit, err);
    case FB_VISIT_HEAD:     return fb_engine_visit_head(e, err);
    case FB_VISIT_BACKWARD: return fb_engine_visit_backward(e, v, visit, err);
    default:                return fb_engine_visit_embed_backward(e, err);
    }
}

/* Visits that come before the first update of the step can, after visit v: with clipping updates begin when all are done, without
 * it in the head's visit of the last pass. */
static uint32_t visits_left(const fb_engine *e, uint32_t v)
{
    uint32_t n = e->n_visit[1], head = 1 + e->m->cfg.n_layer, done = e->pass * n + v + 1;
    uint32_t end = (e->n_pass - 1) * n + (e->o.clip ? n : head);
    return done < end ? end - done : 0;
}

static fb_status run_pass(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    /* The previous pass's kernels still read the batch and the inputs that are about to be sent. */
    FB_TRY(e->ops->wait(e->d, FB_STREAM_H2D, e->pass_done, err));
    if (e->plan.layout.kept_on_host) { /* they lie where block inputs go */
        FB_TRY(e->ops->wait(e->d, FB_STREAM_H2D, e->rows_kept, err));
        FB_TRY(fb_engine_await_kept_rows(e, err));
    }
    FB_TRY(fb_engine_upload_batch(e, err));
    fb_inputs_begin(&e->inputs, e->count, e->backward);
    for (uint32_t i = 0; i < e->n_slot; i++) /* the list begins again */
        if (e->slots[i].layer != FB_NEVER && e->slots[i].next_use >= e->n_visit[e->backward])
            e->slots[i].next_use -= e->n_visit[e->backward];
    for (uint32_t v = 0; v < e->n_visit[e->backward]; v++) {
        FB_TRY(run_visit(e, v, err));
        FB_TRY(fb_engine_prefetch(e, v, err));
        if (e->mode == MODE_TRAIN)
            FB_TRY(e->hooks.during_step(e->hooks.ctx, visits_left(e, v), err));
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
    e->leaving.src = NULL; /* a step that failed may have left one */
    e->grad_scale = out->n_learned ? (float)(1.0 / (double)out->n_learned) : 0.0f;
    e->n_pass = (n + e->plan.micro_per_pass - 1) / e->plan.micro_per_pass;
    FB_TRY(e->ops->fill_zero(e->d, FB_STREAM_COMPUTE, fb_engine_region(e, FB_DEV_SUMS), e->plan.device[FB_DEV_SUMS].size, err));
    for (e->pass = 0; e->pass < e->n_pass; e->pass++) {
        e->first = e->pass * e->plan.micro_per_pass;
        e->count = n - e->first < e->plan.micro_per_pass ? n - e->first : e->plan.micro_per_pass;
        FB_TRY(run_pass(e, err));
    }
    FB_TRY(fb_engine_after(e, FB_STREAM_D2H, FB_STREAM_COMPUTE, e->loss_ready, err));
    FB_TRY(fb_traced_download(e->d, e->trace, FB_LABEL(FETCH_SUMS, e->m->n_block - 1, FB_NO_PART), e->sums, fb_engine_sum_at(e, 0),
                              (e->m->n_block + 1) * sizeof(double), err));
    double since = fb_trace_now(e->trace);
    fb_activity_enter(e->o.activity, FB_PHASE_STEP_END, 0);
    FB_TRY(sync_all(e, err));
    fb_trace_host(e->trace, FB_LABEL(HOST_END, e->m->n_block - 1, FB_NO_PART), since);
    FB_TRY(fb_trace_cut(e->trace, err));
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
    e->adamw = *a;
    e->adamw.clip = 1;
    assert(e->o.clip || max_grad_norm == 0);
    e->cache_row = 0;
    e->rope_next = e->rope_state;
    if (!e->o.clip) {
        fb_updater_wait_all(e->updater);
        fb_updater_begin(e->updater, &e->adamw);
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
        e->adamw.clip = out->clip_factor;
        fb_updater_begin(e->updater, &e->adamw);
        for (uint32_t b = 0; b < e->m->n_block; b++) {
            if (fb_engine_at_home(e, b))
                continue;
            void *g = fb_state_at(e->o.state, FB_HOST_GRADIENTS, b, 0);
            if (finite)
                fb_updater_submit(e->updater, b, 0, e->m->blocks[b].extent, g, false);
            else
                fb_updater_drop(e->updater, b, 0, e->m->blocks[b].extent, g, false);
        }
        for (uint32_t b = 0; finite && b < e->m->n_block; b++)
            if (fb_engine_at_home(e, b))
                FB_TRY(fb_engine_update_at_home(e, b, NULL, err));
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
    (void)e->ops->sync(e->d, FB_STREAM_COMPUTE, NULL); /* a failure shows again at the next call that can tell */
}

void fb_engine_describe(const fb_engine *e, char *text, size_t size)
{
    uint32_t n[FB_BLOCK_STATE_COUNT] = { 0 };
    size_t at = (size_t)snprintf(text, size, "layers on the device:");
    for (uint32_t i = 0; i < e->m->cfg.n_layer; i++)
        n[__atomic_load_n(&e->layer_state[i], __ATOMIC_RELAXED)]++;
    for (uint8_t s = 0; s < FB_BLOCK_STATE_COUNT && at < size; s++)
        if (n[s])
            at += (size_t)snprintf(text + at, size - at, " %u %s", n[s], fb_block_state_str(s));
    if (e->updater && at < size)
        fb_updater_describe(e->updater, text + at, size - at);
}

void fb_engine_set_hooks(fb_engine *e, const fb_engine_hooks *h)
{
    e->hooks = *h;
    fb_updater_set_before(e->updater, h->before_update, h->ctx);
}

/* As long as nobody must see anything. */
static fb_status nothing_during_step(void *ctx, uint32_t n_left, fb_error *err)
{
    (void)ctx, (void)n_left, (void)err;
    return FB_OK;
}

static fb_status nothing_before_update(void *ctx, uint32_t block, bool *read, fb_error *err)
{
    (void)ctx, (void)block, (void)err;
    *read = false;
    return FB_OK;
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

/* A visit has a few spans of its own and a few a micro-batch; a gradient, a few a piece; a block at home may be fetched for a
 * checkpoint in pieces, and its update waits for that. */
uint32_t fb_engine_trace_spans(const fb_plan *plan, const fb_manifest *m)
{
    uint64_t visits = 2 * (uint64_t)m->cfg.n_layer + 3, k = plan->micro_per_pass;
    uint64_t piece = plan->out_elems < plan->slab_elems ? plan->out_elems : plan->slab_elems;
    uint64_t pieces = m->extent / piece + 2 * (uint64_t)m->n_block;
    uint64_t n = plan->layout.n_pass * (visits * (6 * k + 8) + 4 * k) + 4 * pieces;
    for (uint32_t b = 0; b < m->n_block; b++)
        n += fb_plan_at_home(plan, m, b) ? m->blocks[b].extent / FB_UPDATE_CHUNK + 2 : 0;
    return n < UINT32_MAX / 4 ? (uint32_t)n : UINT32_MAX / 4;
}

/* ---- new, free ---- */

/* The engine's own events; the slots' follow them. */
static const size_t events[] = {
#define AT(member) offsetof(fb_engine, member)
    AT(batch_ready), AT(embed_ready), AT(pass_done), AT(gradient_ready), AT(loss_ready), AT(acc_free[0]), AT(acc_free[1]),
    AT(table_free), AT(final_free), AT(out_free), AT(restored), AT(rows_kept), AT(staging_free[0]), AT(staging_free[1]),
    AT(head.loaded), AT(head.used), AT(state_read),
#undef AT
};

static size_t n_event(const fb_engine *e)
{
    return FB_COUNT(events) + (e->device_slots ? 2 * (size_t)e->n_slot : 0);
}

static fb_event **event_at(fb_engine *e, size_t i)
{
    if (i < FB_COUNT(events))
        return (fb_event **)(void *)((unsigned char *)e + events[i]);
    device_slot *slot = &e->device_slots[(i - FB_COUNT(events)) / 2];
    return (i - FB_COUNT(events)) % 2 ? &slot->used : &slot->loaded;
}

static fb_status new_events(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    for (size_t i = 0; i < n_event(e); i++)
        FB_TRY(e->ops->event_new(e->d, event_at(e, i), err));
done:
    return st;
}

static void free_events(fb_engine *e)
{
    for (size_t i = 0; i < n_event(e); i++)
        if (*event_at(e, i))
            e->ops->event_free(e->d, *event_at(e, i));
}

static fb_status new_host_buffers(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_plan *p = &e->plan;
    uint32_t n_rope = fb_engine_rope_is_dynamic(e) ? e->o.n_micro : 1;
    uint64_t slab_size = fb_align(p->slab_elems * fb_dtype_size(e->o.act));
    uint64_t slabs = p->host[FB_HOST_SLABS].size, inputs = p->host[FB_HOST_INPUTS].size, saved = p->host[FB_HOST_SAVED].size;
    if (p->host_aliased) {
        inputs = inputs ? p->input_size * p->micro_per_pass : 0;
        saved = saved ? p->micro_per_pass * (p->saved_size > p->rich_size ? p->saved_size : p->rich_size) : 0;
    }
    uint64_t rows = p->host[FB_HOST_ROWS].size, sums = (e->m->n_block + 1) * sizeof(double);
    uint64_t staging = p->host[FB_HOST_STAGING].size;
    uint64_t size = staging + e->o.n_micro * p->meta_size + n_rope * p->rope_size + slabs + inputs + saved + rows + sums;
    FB_TRY(fb_host_memory_map(&e->host, size, "the batch", NULL, e->d, err));
    unsigned char *at = e->host.at;
    for (int i = 0; i < N_STAGING; i++, at += staging / N_STAGING)
        e->staging[i] = at;
    e->meta = at, at += e->o.n_micro * p->meta_size;
    e->rope = at, at += n_rope * p->rope_size;
    if (slabs)
        fb_pool_init(&e->slabs, at, slab_size, p->n_slab);
    at += slabs;
    e->host_inputs = at, at += inputs;
    e->host_saved = at, at += saved;
    e->host_rows = at, at += rows;
    e->sums = (double *)(void *)at;
    for (uint32_t i = 0; i < e->o.n_micro; i++)
        fb_micro_init(&e->micros[i], e->meta + i * p->meta_size, p->t_max, e->m->cfg.pad);
    if (!fb_engine_rope_is_dynamic(e))
        fb_engine_make_rope(e, 0, (uint32_t)(p->rope_size / 2 / (e->m->cfg.head_dim / 2 * sizeof(float))), &e->rope_state);
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
    e->hooks = (fb_engine_hooks){ .during_step = nothing_during_step, .before_update_at_home = nothing_before_update };
    const fb_model_config *c = &e->m->cfg;
    e->shape = (fb_layer_shape){ c, o->act, e->k->attention_scratch(e->plan.t_max, c->n_head, c->head_dim) };
    e->n_slot = e->plan.layout.slots;
    e->arena = o->arena;
    e->slots = calloc(e->n_slot + 1, sizeof *e->slots); /* every layer may be at home, and need none */
    e->device_slots = calloc(e->n_slot + 1, sizeof *e->device_slots);
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
    for (uint32_t i = 0; i < e->n_slot; i++)
        e->device_slots[i].mem = fb_engine_region(e, FB_DEV_SLOTS) + i * e->plan.slot_size;
    e->head.mem = fb_engine_region(e, FB_DEV_HEAD_SLOT);
    FB_TRY(fb_inputs_init(&e->inputs, &e->plan, e->d, e->arena, e->host_inputs, e->host_saved, c->n_layer, err));
    e->inputs.trace = o->trace;
    FB_TRY(e->ops->fill_zero(e->d, FB_STREAM_COMPUTE, fb_engine_region(e, FB_DEV_ACC), e->plan.device[FB_DEV_ACC].size, err));
    if (o->train)
        FB_TRY(fb_updater_new(&e->updater, o->state, &e->slabs, o->update_threads, err));
    for (uint32_t l = 0; l < e->plan.layout.home_layers; l++) {
        fb_block_move(&e->layer_state[l], FB_BLOCK_PREFETCHING);
        fb_block_move(&e->layer_state[l], FB_BLOCK_RESIDENT);
    }
    if (o->train)
        fb_updater_set_trace(e->updater, o->trace);
    if (o->train)
        fb_updater_set_activity(e->updater, o->activity);
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
    free_events(e);
    fb_inputs_deinit(&e->inputs);
    fb_pool_deinit(&e->slabs);
    fb_host_memory_unmap(&e->host);
    free(e->slots);
    free(e->device_slots);
    free(e->layer_state);
    free(e->micros);
    free(e->landings);
    free(e->visits[0]);
    free(e->visits[1]);
    free(e);
}
