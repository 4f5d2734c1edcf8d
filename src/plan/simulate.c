#include "plan/simulate.h"

#include <assert.h>

#include "plan/flow.h"
#include "sched/schedule.h"

enum { N_ACC_MAX = 2, N_STAGING = 2, SLABS_MANY = 12 };
enum { GROUPS_MAX = 8 }; /* a visit's micro-batches are simulated in so many groups at most */

/* A gradient that waits on the device for its download to be enqueued. */
typedef struct leaving {
    bool     there;
    uint32_t block;
    uint64_t first, n;
    fb_mark *downloaded;
} leaving;

typedef struct sim {
    const fb_plan     *p;
    const fb_manifest *m;
    const fb_costs    *c;
    fb_flow            f;
    uint64_t slab_elems;
    /* the engine's */
    fb_visit visits[2 * FB_FLOW_BLOCKS];
    uint32_t n_visit, n_slot;
    fb_slot  slots[FB_FLOW_BLOCKS];
    uint32_t slot_of[FB_FLOW_BLOCKS]; /* of a layer; FB_NEVER: none */
    uint32_t ahead_until; /* visits before this one have what they want */
    fb_mark  loaded[FB_FLOW_BLOCKS], used[FB_FLOW_BLOCKS], head_loaded;
    bool     awaited[FB_FLOW_BLOCKS], head_valid;
    fb_mark  staging_free[N_STAGING], acc_free[N_ACC_MAX], table_free, final_free, out_free, pass_done;
    leaving  leaving;
    /* kept on the host */
    fb_mark  spare[FB_INPUT_SPARES], ahead[FB_INPUT_SPARES];
    uint32_t n_spare, n_ahead, n_group;
    uint64_t next_kept;
    uint32_t pass, first, count;
} sim;

/* ---- what is known of blocks ---- */

static double over_micros(const fb_costs *c, uint32_t first, uint32_t count, double whole, double last)
{
    bool has_last = count && first + count == c->n_micro;
    return whole * (count - has_last) + last * has_last;
}

#define OVER_MICROS(c, first, count, field) over_micros(c, first, count, (c)->whole.field, (c)->last.field)

static uint32_t n_layer(const sim *s)
{
    return s->m->cfg.n_layer;
}

static int window(const sim *s, uint32_t layer)
{
    return fb_model_config_window(&s->m->cfg, layer) > 0;
}

static uint64_t act_size(const sim *s)
{
    return fb_dtype_size(s->p->act);
}

static uint64_t extent(const sim *s, uint32_t block)
{
    return s->m->blocks[block].extent;
}

static bool at_home(const sim *s, uint32_t block)
{
    return fb_plan_at_home(s->p, s->m, block);
}

static void await_update(sim *s, uint32_t block)
{
    fb_flow_host_waits(&s->f, FB_UNTIL_CLEAN, block, (fb_mark){ 0 }, FB_CAUSE_UPDATE);
}

/* ---- weights (engine_weights.c) ---- */

static void load_layer(sim *s, uint32_t slot, uint32_t layer, uint32_t when)
{
    if (s->slots[slot].layer != FB_NEVER)
        s->slot_of[s->slots[slot].layer] = FB_NEVER;
    s->slots[slot] = (fb_slot){ layer, when };
    s->slot_of[layer] = slot;
    await_update(s, layer + 1);
    fb_flow_after(&s->f, FB_FLOW_H2D, s->used[slot], FB_CAUSE_HOST);
    fb_flow_upload(&s->f, extent(s, layer + 1) * act_size(s), FB_WORK_WEIGHTS, layer + 1);
    s->loaded[slot] = fb_flow_mark(&s->f, FB_FLOW_H2D);
    s->awaited[slot] = false;
}

static void load_head(sim *s)
{
    uint32_t last = s->m->n_block - 1;
    await_update(s, last);
    fb_flow_upload(&s->f, extent(s, last) * act_size(s), FB_WORK_WEIGHTS, last);
    if (s->m->cfg.tied) {
        await_update(s, 0);
        fb_flow_upload(&s->f, extent(s, 0) * act_size(s), FB_WORK_WEIGHTS, 0);
    }
    s->head_loaded = fb_flow_mark(&s->f, FB_FLOW_H2D);
    s->head_valid = true;
}

/* What has been sent ahead is not given up before its visit: where the last look ended, the next one begins. */
static void prefetch(sim *s, uint32_t v)
{
    uint32_t last = s->m->n_block - 1, q = s->ahead_until > v + 1 ? s->ahead_until : v + 1;
    for (; q < s->n_visit; q++) {
        const fb_visit *visit = &s->visits[q];
        bool next_wanted = q == v + 1;
        if (visit->kind == FB_VISIT_HEAD && !at_home(s, last) && !s->head_valid) {
            if (!next_wanted && (s->f.remaining[last] || s->f.remaining[0]))
                break;
            load_head(s);
        } else if ((visit->kind == FB_VISIT_FORWARD || visit->kind == FB_VISIT_BACKWARD) && !at_home(s, visit->layer + 1)
                   && s->slot_of[visit->layer] == FB_NEVER) {
            uint32_t slot = fb_slots_victim(s->slots, s->n_slot, q);
            if (slot == FB_NEVER || (!next_wanted && s->f.remaining[visit->layer + 1]))
                break;
            load_layer(s, slot, visit->layer, q);
        }
    }
    s->ahead_until = q;
}

static uint32_t enter_layer(sim *s, uint32_t v, uint32_t layer)
{
    if (at_home(s, layer + 1))
        return FB_NEVER;
    uint32_t slot = s->slot_of[layer];
    if (slot == FB_NEVER) {
        slot = fb_slots_victim(s->slots, s->n_slot, v);
        assert(slot != FB_NEVER);
        load_layer(s, slot, layer, v);
    }
    if (!s->awaited[slot])
        fb_flow_after(&s->f, FB_FLOW_COMPUTE, s->loaded[slot], FB_CAUSE_WEIGHTS);
    s->awaited[slot] = true;
    return slot;
}

static void leave_layer(sim *s, const fb_visit *visit, uint32_t slot)
{
    if (slot == FB_NEVER)
        return;
    s->slots[slot].next_use = visit->next;
    s->used[slot] = fb_flow_mark(&s->f, FB_FLOW_COMPUTE);
}

/* ---- what the forward keeps, on the host (inputs.c) ---- */

static uint32_t group_first(const sim *s, uint32_t g)
{
    return s->first + (uint32_t)((uint64_t)g * s->count / s->n_group);
}

static uint32_t group_count(const sim *s, uint32_t g)
{
    return group_first(s, g + 1) - group_first(s, g);
}

/* Bytes of the embedding rows of so many micro-batches; of any block's input. */
static uint64_t rows_size(const sim *s, uint32_t first, uint32_t count)
{
    return (uint64_t)over_micros(s->c, first, count, (double)s->c->whole.rows_size, (double)s->c->last.rows_size);
}

static uint64_t kept_size(const sim *s, uint32_t layer, uint32_t g)
{
    uint64_t saved = layer + s->p->layout.n_rich >= n_layer(s) ? s->p->rich_size : s->p->saved_size;
    return rows_size(s, group_first(s, g), group_count(s, g)) + group_count(s, g) * saved;
}

static fb_mark take_spare(sim *s)
{
    fb_mark e = s->spare[0];
    assert(s->n_spare);
    s->n_spare--;
    for (uint32_t i = 0; i < s->n_spare; i++)
        s->spare[i] = s->spare[i + 1];
    return e;
}

static void send_for_kept(sim *s)
{
    while (s->n_spare && s->next_kept < (uint64_t)n_layer(s) * s->n_group) {
        uint32_t layer = n_layer(s) - 1 - (uint32_t)(s->next_kept / s->n_group), g = (uint32_t)(s->next_kept % s->n_group);
        fb_flow_after(&s->f, FB_FLOW_H2D, take_spare(s), FB_CAUSE_INPUTS);
        fb_flow_upload(&s->f, kept_size(s, layer, g), FB_WORK_KEPT, layer + 1);
        s->ahead[s->n_ahead++] = fb_flow_mark(&s->f, FB_FLOW_H2D);
        s->next_kept++;
    }
}

static void run_group(sim *s, double seconds, fb_work work, uint32_t layer, uint32_t g)
{
    if (!s->p->layout.kept_on_host) {
        fb_flow_enqueue(&s->f, FB_FLOW_COMPUTE, seconds, work, layer + 1);
        return;
    }
    if (work == FB_WORK_FORWARD) {
        fb_flow_after(&s->f, FB_FLOW_COMPUTE, take_spare(s), FB_CAUSE_INPUTS);
        fb_flow_enqueue(&s->f, FB_FLOW_COMPUTE, seconds, work, layer + 1);
        fb_flow_after(&s->f, FB_FLOW_D2H, fb_flow_mark(&s->f, FB_FLOW_COMPUTE), FB_CAUSE_HOST);
        fb_flow_download(&s->f, kept_size(s, layer, g), FB_WORK_KEPT, layer + 1);
        s->spare[s->n_spare++] = fb_flow_mark(&s->f, FB_FLOW_D2H);
        return;
    }
    fb_flow_after(&s->f, FB_FLOW_COMPUTE, s->ahead[0], FB_CAUSE_INPUTS);
    s->n_ahead--;
    for (uint32_t i = 0; i < s->n_ahead; i++)
        s->ahead[i] = s->ahead[i + 1];
    fb_flow_enqueue(&s->f, FB_FLOW_COMPUTE, seconds, work, layer + 1);
    s->spare[s->n_spare++] = fb_flow_mark(&s->f, FB_FLOW_COMPUTE);
    send_for_kept(s);
}

/* ---- gradients (engine_gradients.c) ---- */

static void send_leaving(sim *s)
{
    leaving l = s->leaving;
    s->leaving.there = false;
    if (!l.there)
        return;
    if (s->p->clip)
        fb_flow_download(&s->f, l.n * act_size(s), FB_WORK_GRADIENT, l.block);
    else {
        if (l.first == 0)
            fb_flow_expect(&s->f, l.block);
        for (uint64_t at = 0; at < l.n;) {
            uint64_t n = l.n - at < s->slab_elems ? l.n - at : s->slab_elems;
            fb_flow_host_waits(&s->f, FB_UNTIL_SLAB, 0, (fb_mark){ 0 }, FB_CAUSE_GRADIENTS);
            s->f.n_slab_free--;
            fb_flow_op *o = fb_flow_download(&s->f, n * act_size(s), FB_WORK_GRADIENT, l.block);
            o->lands = true;
            o->n = n;
            at += n;
        }
    }
    *l.downloaded = fb_flow_mark(&s->f, FB_FLOW_D2H);
}

static void update_on_device(sim *s, uint32_t block)
{
    double seconds = fb_cost_update(s->c->machine, s->p->act, extent(s, block));
    fb_flow_enqueue(&s->f, FB_FLOW_COMPUTE, seconds, FB_WORK_DEVICE_UPDATE, block);
    s->f.t->n_updated[1] += extent(s, block);
}

static void send_gradient(sim *s, uint32_t block, fb_mark *free_event)
{
    const fb_machine *m = s->c->machine;
    bool copied = fb_plan_grad_copied(s->p->act);
    if (at_home(s, block)) {
        fb_flow_enqueue(&s->f, FB_FLOW_COMPUTE, fb_cost_grad_out(m, s->p->act, extent(s, block)), FB_WORK_GRAD_OUT, block);
        if (!s->p->clip)
            update_on_device(s, block);
        *free_event = fb_flow_mark(&s->f, FB_FLOW_COMPUTE);
        return;
    }
    uint64_t piece = copied ? s->p->out_elems : extent(s, block);
    for (uint64_t first = 0; first < extent(s, block); first += piece) {
        uint64_t n = extent(s, block) - first < piece ? extent(s, block) - first : piece;
        send_leaving(s);
        if (copied)
            fb_flow_after(&s->f, FB_FLOW_COMPUTE, s->out_free, FB_CAUSE_GRADIENTS);
        fb_flow_enqueue(&s->f, FB_FLOW_COMPUTE, fb_cost_grad_out(m, s->p->act, n), FB_WORK_GRAD_OUT, block);
        fb_flow_after(&s->f, FB_FLOW_D2H, fb_flow_mark(&s->f, FB_FLOW_COMPUTE), FB_CAUSE_HOST);
        s->leaving = (leaving){ true, block, first, n, copied ? &s->out_free : free_event };
    }
    if (copied)
        *free_event = fb_flow_mark(&s->f, FB_FLOW_COMPUTE);
}

static void open_accumulator(sim *s, uint32_t block, fb_mark *free_event, bool zero)
{
    bool owned = fb_plan_owns(s->p, s->m, FB_OWN_ACCUMULATOR, block);
    if (!owned)
        fb_flow_after(&s->f, FB_FLOW_COMPUTE, *free_event, FB_CAUSE_GRADIENTS);
    if (s->pass == 0) {
        if (zero)
            fb_flow_enqueue(&s->f, FB_FLOW_COMPUTE, fb_cost_zero(s->c->machine, extent(s, block)), FB_WORK_GRAD_OUT, block);
        return;
    }
    if (owned)
        return;
    fb_flow_after(&s->f, FB_FLOW_H2D, fb_flow_mark(&s->f, FB_FLOW_COMPUTE), FB_CAUSE_HOST);
    fb_flow_upload(&s->f, extent(s, block) * sizeof(float), FB_WORK_ACCUMULATOR, block);
    fb_flow_after(&s->f, FB_FLOW_COMPUTE, fb_flow_mark(&s->f, FB_FLOW_H2D), FB_CAUSE_GRADIENTS);
}

static void close_accumulator(sim *s, uint32_t block, fb_mark *free_event)
{
    if (s->pass + 1 == s->p->layout.n_pass) {
        send_gradient(s, block, free_event);
        return;
    }
    if (fb_plan_owns(s->p, s->m, FB_OWN_ACCUMULATOR, block))
        return;
    fb_flow_after(&s->f, FB_FLOW_D2H, fb_flow_mark(&s->f, FB_FLOW_COMPUTE), FB_CAUSE_HOST);
    fb_flow_download(&s->f, extent(s, block) * sizeof(float), FB_WORK_ACCUMULATOR, block);
    *free_event = fb_flow_mark(&s->f, FB_FLOW_D2H);
    fb_flow_after(&s->f, FB_FLOW_H2D, *free_event, FB_CAUSE_GRADIENTS);
}

/* ---- visits ---- */

static void visit_embed(sim *s)
{
    if (at_home(s, 0)) {
        fb_flow_enqueue(&s->f, FB_FLOW_COMPUTE, OVER_MICROS(s->c, s->first, s->count, look_up), FB_WORK_EMBED, 0);
        return;
    }
    await_update(s, 0);
    for (uint32_t g = 0; g < s->n_group; g++) {
        uint32_t first = group_first(s, g), n = group_count(s, g);
        fb_mark *staging = &s->staging_free[g % N_STAGING];
        fb_flow_host_waits(&s->f, FB_UNTIL_MARK, 0, *staging, FB_CAUSE_DATA);
        fb_flow_host_works(&s->f, OVER_MICROS(s->c, first, n, gather), FB_WORK_GATHER, FB_CAUSE_DATA);
        fb_flow_upload(&s->f, rows_size(s, first, n), FB_WORK_BATCH, 0);
        *staging = fb_flow_mark(&s->f, FB_FLOW_H2D);
    }
    fb_flow_after(&s->f, FB_FLOW_COMPUTE, fb_flow_mark(&s->f, FB_FLOW_H2D), FB_CAUSE_DATA);
}

/* Nothing comes between the kernels of a visit, unless what is kept travels: then they run group by group. */
static uint32_t n_run(const sim *s)
{
    return s->p->layout.kept_on_host ? s->n_group : 1;
}

static uint32_t run_first(const sim *s, uint32_t g)
{
    return s->p->layout.kept_on_host ? group_first(s, g) : s->first;
}

static uint32_t run_count(const sim *s, uint32_t g)
{
    return s->p->layout.kept_on_host ? group_count(s, g) : s->count;
}

static void visit_forward(sim *s, uint32_t v, const fb_visit *visit)
{
    int w = window(s, visit->layer);
    uint32_t slot = enter_layer(s, v, visit->layer);
    for (uint32_t g = 0; g < n_run(s); g++)
        run_group(s, OVER_MICROS(s->c, run_first(s, g), run_count(s, g), forward[w]), FB_WORK_FORWARD, visit->layer, g);
    leave_layer(s, visit, slot);
}

static void visit_backward(sim *s, uint32_t v, const fb_visit *visit)
{
    int w = window(s, visit->layer);
    fb_recompute policy = fb_plan_policy(s->p, n_layer(s), visit->layer);
    fb_mark *free_event = &s->acc_free[visit->layer % s->p->n_acc];
    uint32_t slot = enter_layer(s, v, visit->layer);
    open_accumulator(s, visit->layer + 1, free_event, false);
    for (uint32_t g = 0; g < n_run(s); g++)
        run_group(s, OVER_MICROS(s->c, run_first(s, g), run_count(s, g), backward[w][policy]), FB_WORK_BACKWARD, visit->layer, g);
    leave_layer(s, visit, slot);
    close_accumulator(s, visit->layer + 1, free_event);
}

static void visit_head(sim *s)
{
    uint32_t last = s->m->n_block - 1;
    bool tied = s->m->cfg.tied;
    if (!at_home(s, last)) {
        if (!s->head_valid)
            load_head(s);
        fb_flow_after(&s->f, FB_FLOW_COMPUTE, s->head_loaded, FB_CAUSE_WEIGHTS);
    }
    open_accumulator(s, tied ? 0 : last, &s->table_free, true);
    if (tied)
        open_accumulator(s, last, &s->final_free, true);
    if (s->p->layout.kept_on_host) {
        fb_flow_after(&s->f, FB_FLOW_H2D, fb_flow_mark(&s->f, FB_FLOW_D2H), FB_CAUSE_INPUTS);
        send_for_kept(s);
    }
    fb_flow_enqueue(&s->f, FB_FLOW_COMPUTE, OVER_MICROS(s->c, s->first, s->count, head), FB_WORK_LOSS, last);
    close_accumulator(s, last, tied ? &s->final_free : &s->table_free);
}

static void visit_embed_backward(sim *s)
{
    bool tied = s->m->cfg.tied;
    if (s->pass + 1 < s->p->layout.n_pass) {
        fb_flow_after(&s->f, FB_FLOW_D2H, fb_flow_mark(&s->f, FB_FLOW_COMPUTE), FB_CAUSE_HOST);
        fb_flow_download(&s->f, s->count * s->c->whole.rows_size, FB_WORK_ACCUMULATOR, 0);
        fb_flow_after(&s->f, FB_FLOW_COMPUTE, fb_flow_mark(&s->f, FB_FLOW_D2H), FB_CAUSE_GRADIENTS);
        if (tied)
            close_accumulator(s, 0, &s->table_free);
        return;
    }
    if (!tied) {
        fb_flow_after(&s->f, FB_FLOW_COMPUTE, s->table_free, FB_CAUSE_GRADIENTS);
        fb_flow_enqueue(&s->f, FB_FLOW_COMPUTE, fb_cost_zero(s->c->machine, extent(s, 0)), FB_WORK_GRAD_OUT, 0);
    }
    if (s->first) { /* one at a time, so the sum is the time */
        fb_flow_after(&s->f, FB_FLOW_H2D, fb_flow_mark(&s->f, FB_FLOW_COMPUTE), FB_CAUSE_HOST);
        fb_flow_upload(&s->f, s->first * s->c->whole.rows_size, FB_WORK_ACCUMULATOR, 0);
        fb_flow_after(&s->f, FB_FLOW_COMPUTE, fb_flow_mark(&s->f, FB_FLOW_H2D), FB_CAUSE_GRADIENTS);
        fb_flow_enqueue(&s->f, FB_FLOW_COMPUTE, s->first * s->c->whole.embed_grad, FB_WORK_EMBED, 0);
    }
    fb_flow_enqueue(&s->f, FB_FLOW_COMPUTE, OVER_MICROS(s->c, s->first, s->count, embed_grad), FB_WORK_EMBED, 0);
    close_accumulator(s, 0, &s->table_free);
    send_leaving(s);
}

/* ---- passes and the step (engine.c) ---- */

static void run_pass(sim *s)
{
    s->n_group = s->count < GROUPS_MAX ? s->count : GROUPS_MAX;
    fb_flow_after(&s->f, FB_FLOW_H2D, s->pass_done, FB_CAUSE_HOST);
    fb_flow_upload(&s->f, s->count * s->p->meta_size, FB_WORK_BATCH, 0);
    fb_flow_after(&s->f, FB_FLOW_COMPUTE, fb_flow_mark(&s->f, FB_FLOW_H2D), FB_CAUSE_DATA);
    for (uint32_t i = 0; i < FB_INPUT_SPARES; i++)
        s->spare[i] = (fb_mark){ 0 };
    s->n_spare = FB_INPUT_SPARES;
    s->n_ahead = 0;
    s->next_kept = 0;
    for (uint32_t i = 0; i < s->n_slot; i++)
        if (s->slots[i].layer != FB_NEVER && s->slots[i].next_use >= s->n_visit)
            s->slots[i].next_use -= s->n_visit;
    s->ahead_until = 0;
    for (uint32_t v = 0; v < s->n_visit; v++) {
        const fb_visit *visit = &s->visits[v];
        switch (visit->kind) {
        case FB_VISIT_EMBED:          visit_embed(s); break;
        case FB_VISIT_FORWARD:        visit_forward(s, v, visit); break;
        case FB_VISIT_HEAD:           visit_head(s); break;
        case FB_VISIT_BACKWARD:       visit_backward(s, v, visit); break;
        case FB_VISIT_EMBED_BACKWARD: visit_embed_backward(s); break;
        }
        prefetch(s, v);
        if (s->c->no_overlap)
            fb_flow_host_waits(&s->f, FB_UNTIL_REST, 0, (fb_mark){ 0 }, FB_CAUSE_HOST);
    }
    s->pass_done = fb_flow_mark(&s->f, FB_FLOW_COMPUTE);
}

/* All passes but the first and the last are alike, and between passes compute waits for what leaves: one stands for all. */
static void run_middle_passes(sim *s)
{
    fb_timeline *t = s->f.t;
    fb_flow_host_waits(&s->f, FB_UNTIL_REST, 0, (fb_mark){ 0 }, FB_CAUSE_GRADIENTS);
    fb_timeline before = *t;
    double begun = s->f.now, more = s->p->layout.n_pass - 3;
    run_pass(s);
    fb_flow_host_waits(&s->f, FB_UNTIL_REST, 0, (fb_mark){ 0 }, FB_CAUSE_GRADIENTS);
    for (int i = 0; i < FB_RESOURCE_COUNT; i++)
        t->busy[i] += more * (t->busy[i] - before.busy[i]);
    for (int i = 0; i < FB_CAUSE_COUNT; i++)
        t->idle[i] += more * (t->idle[i] - before.idle[i]);
    t->h2d_size += (s->p->layout.n_pass - 3) * (t->h2d_size - before.h2d_size);
    t->d2h_size += (s->p->layout.n_pass - 3) * (t->d2h_size - before.d2h_size);
    s->f.now += more * (s->f.now - begun);
    s->f.job_begun = s->f.now;
    s->pass = s->p->layout.n_pass - 2;
}

/* What the step before has left to do. */
static void begin_step(sim *s)
{
    if (!s->p->clip)
        return;
    for (uint32_t b = 0; b < s->m->n_block; b++)
        if (at_home(s, b))
            update_on_device(s, b);
        else {
            fb_flow_expect(&s->f, b);
            fb_flow_submit(&s->f, b, extent(s, b), false);
        }
    if (s->c->no_overlap)
        fb_flow_host_waits(&s->f, FB_UNTIL_ALL_CLEAN, 0, (fb_mark){ 0 }, FB_CAUSE_UPDATE);
}

void fb_simulate(fb_timeline *t, const fb_plan *p, const fb_manifest *m, const fb_costs *c)
{
    sim s;
    assert(p->train);
    *t = (fb_timeline){ .spans = t->spans, .n_span_max = t->n_span_max };
    s.p = p, s.m = m, s.c = c;
    /* Where blocks are many times larger than slabs, two count as one: the same bytes are under way, in half the events. */
    bool coarse = m->extent_max_layer > SLABS_MANY * p->slab_elems && p->n_slab % 2 == 0;
    fb_flow_init(&s.f, t, m, c, coarse ? p->n_slab / 2 : p->n_slab);
    s.slab_elems = coarse ? 2 * p->slab_elems : p->slab_elems;
    s.n_visit = fb_schedule_build(s.visits, m->cfg.n_layer, true);
    s.n_slot = p->layout.slots;
    for (uint32_t i = 0; i < s.n_slot; i++) {
        s.slots[i] = (fb_slot){ FB_NEVER, 0 };
        s.loaded[i] = s.used[i] = (fb_mark){ 0 };
        s.awaited[i] = false;
    }
    for (uint32_t i = 0; i < m->cfg.n_layer; i++)
        s.slot_of[i] = FB_NEVER;
    s.head_valid = false;
    s.head_loaded = s.table_free = s.final_free = s.out_free = s.pass_done = (fb_mark){ 0 };
    for (int i = 0; i < N_STAGING; i++)
        s.staging_free[i] = (fb_mark){ 0 };
    for (int i = 0; i < N_ACC_MAX; i++)
        s.acc_free[i] = (fb_mark){ 0 };
    s.leaving = (leaving){ 0 };
    begin_step(&s);
    for (s.pass = 0; s.pass < p->layout.n_pass; s.pass++) {
        s.first = s.pass * p->micro_per_pass;
        s.count = c->n_micro - s.first < p->micro_per_pass ? c->n_micro - s.first : p->micro_per_pass;
        if (s.pass == 1 && p->layout.n_pass > 3)
            run_middle_passes(&s);
        else
            run_pass(&s);
    }
    fb_flow_host_waits(&s.f, FB_UNTIL_REST, 0, (fb_mark){ 0 }, FB_CAUSE_GRADIENTS);
    fb_flow_host_waits(&s.f, FB_UNTIL_ALL_CLEAN, 0, (fb_mark){ 0 }, FB_CAUSE_UPDATE); /* clipping off: the next step waits for it */
    t->seconds = s.f.now;
}

/* ---- without simulating ---- */

double fb_simulate_bound(const fb_plan *p, const fb_manifest *m, const fb_costs *c)
{
    const fb_layout *l = &p->layout;
    const fb_machine *machine = c->machine;
    uint32_t n_layer = m->cfg.n_layer, streamed = n_layer - l->home_layers;
    double compute = OVER_MICROS(c, 0, c->n_micro, head) + OVER_MICROS(c, 0, c->n_micro, embed_grad), up = 0, down = 0, update = 0;
    double act = (double)fb_dtype_size(p->act), rest = l->n_pass - 1;
    for (uint32_t i = 0; i < n_layer; i++) {
        int w = fb_model_config_window(&m->cfg, i) > 0;
        fb_recompute policy = fb_plan_policy(p, n_layer, i);
        compute += OVER_MICROS(c, 0, c->n_micro, forward[w]) + OVER_MICROS(c, 0, c->n_micro, backward[w][policy]);
    }
    for (uint32_t b = 0; b < m->n_block; b++) {
        uint64_t n = m->blocks[b].extent;
        compute += fb_cost_grad_out(machine, p->act, n);
        if (fb_plan_at_home(p, m, b)) {
            compute += fb_cost_update(machine, p->act, n);
            continue;
        }
        down += act * (double)n;
        update += (double)n;
        if (b > 0 && !fb_plan_owns(p, m, FB_OWN_ACCUMULATOR, b))
            up += rest * 4 * (double)n, down += rest * 4 * (double)n;
    }
    if (streamed) { /* each once a pass and way, but for what is still in a slot at the turns */
        double kept = l->slots < streamed ? l->slots : streamed;
        up += act * (double)m->extent_max_layer * ((2 * l->n_pass) * (double)streamed - (2 * l->n_pass - 1) * kept);
    }
    if (l->kept_on_host) {
        double saved = (n_layer - l->n_rich) * (double)p->saved_size + l->n_rich * (double)p->rich_size;
        double inputs = (double)c->last.rows_size + (c->n_micro - 1.0) * (double)c->whole.rows_size;
        double kept = c->n_micro * saved + n_layer * inputs;
        up += kept, down += kept;
    }
    double bound = compute;
    if (machine->unified)
        return bound;
    double ups = c->copy_rate[0] > 0 ? up / c->copy_rate[0] : 0, downs = c->copy_rate[1] > 0 ? down / c->copy_rate[1] : 0;
    double updates = c->update_rate > 0 ? update / c->update_rate : 0;
    bound = ups > bound ? ups : bound;
    bound = downs > bound ? downs : bound;
    return updates > bound ? updates : bound;
}
