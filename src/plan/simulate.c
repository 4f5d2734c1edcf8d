#include "plan/simulate.h"

#include <assert.h>
#include <stdio.h>

#include "sched/schedule.h"

enum { COMPUTE, H2D, D2H, N_STREAM };
enum { QUEUE_MAX = 1024, BLOCKS_MAX = 520, N_ACC_MAX = 2 }; /* as many layers as a configuration may have, 512 */
enum { SLABS_MANY = 12, N_STAGING = 2, GROUPS_MAX = 8 }; /* micro-batches of a visit are simulated in so many groups at most */

const char *fb_resource_str(fb_resource r)
{
#define TEXT(name, text) text,
    static const char *const names[] = { FB_RESOURCE_MAP(TEXT) };
    return names[r];
}

const char *fb_work_str(fb_work w)
{
    static const char *const names[] = { FB_WORK_MAP(TEXT) };
    return names[w];
}

/* Reached when the stream has done its first `seq` operations. */
typedef struct event {
    uint32_t stream, seq;
} event;

typedef struct op {
    double   left;                /* seconds, alone */
    uint32_t wait[N_STREAM];      /* how far each stream must have got */
    uint8_t  cause[N_STREAM];     /* fb_cause of that wait */
    uint8_t  work;                /* fb_work */
    bool     lands;               /* a slab: an update follows */
    uint32_t block;
    uint64_t n;                   /* elements that land */
} op;

typedef struct stream {
    op       ring[QUEUE_MAX];
    uint32_t head, tail;          /* counters: done, enqueued */
    uint32_t wait[N_STREAM];      /* for the next operation */
    uint8_t  cause[N_STREAM];
    double   begun;               /* of the head operation; < 0: it has not */
} stream;

typedef struct job {
    uint32_t block;
    bool     slab;
    double   left; /* elements */
    uint64_t n;
} job;

typedef enum { UNTIL_CLEAN, UNTIL_ALL_CLEAN, UNTIL_EVENT, UNTIL_SLAB, UNTIL_TIME, UNTIL_REST, UNTIL_ROOM } until;

/* A gradient that waits on the device for its download to be enqueued. */
typedef struct leaving {
    bool     there;
    uint32_t block;
    uint64_t first, n;
    event   *downloaded;
} leaving;

typedef struct sim {
    const fb_plan     *p;
    const fb_manifest *m;
    const fb_costs    *c;
    fb_timeline       *t;
    double   now, host_left;
    fb_cause host_cause;
    stream   streams[N_STREAM];
    job      jobs[QUEUE_MAX];
    uint32_t job_head, job_tail;
    double   job_begun;
    uint64_t remaining[BLOCKS_MAX]; /* elements of a block's update; 0: clean */
    uint32_t n_dirty, n_slab_free;
    uint64_t slab_elems;
    /* the engine's */
    fb_visit visits[2 * BLOCKS_MAX];
    uint32_t n_visit, n_slot;
    fb_slot  slots[BLOCKS_MAX];
    uint32_t slot_of[BLOCKS_MAX];   /* of a layer; FB_NEVER: none */
    uint32_t ahead_until;           /* visits before this one have what they want */
    event    loaded[BLOCKS_MAX], used[BLOCKS_MAX], head_loaded;
    bool     awaited[BLOCKS_MAX], head_valid;
    event    staging_free[N_STAGING], acc_free[N_ACC_MAX], table_free, final_free, out_free, pass_done;
    leaving  leaving;
    /* kept on the host */
    event    spare[FB_INPUT_SPARES], ahead[FB_INPUT_SPARES];
    uint32_t n_spare, n_ahead, n_group;
    uint64_t next_kept;
    uint32_t pass, first, count;
} sim;

/* ---- time ---- */

static bool reached(const sim *s, event e)
{
    return s->streams[e.stream].head >= e.seq;
}

static bool is_ready(const sim *s, const stream *q)
{
    if (q->head == q->tail)
        return false;
    const op *o = &q->ring[q->head % QUEUE_MAX];
    return s->streams[COMPUTE].head >= o->wait[COMPUTE] && s->streams[H2D].head >= o->wait[H2D] && s->streams[D2H].head >= o->wait[D2H];
}

static bool holds(const sim *s, until what, uint32_t arg, event e)
{
    switch (what) {
    case UNTIL_CLEAN:     return s->remaining[arg] == 0;
    case UNTIL_ALL_CLEAN: return s->n_dirty == 0;
    case UNTIL_EVENT:     return reached(s, e);
    case UNTIL_SLAB:      return s->n_slab_free > 0;
    case UNTIL_TIME:      return s->host_left <= 0;
    case UNTIL_ROOM:      return s->streams[arg].tail - s->streams[arg].head < QUEUE_MAX;
    case UNTIL_REST:      break;
    }
    for (int i = 0; i < N_STREAM; i++)
        if (s->streams[i].head != s->streams[i].tail)
            return false;
    return true;
}

static double at_most(double x, double most)
{
    return x < most ? x : most;
}

/* Speeds against running alone; of the update, elements a second. */
static void set_rates(const sim *s, const bool *active, bool updating, double *rate, double *update)
{
    const fb_costs *c = s->c;
    const fb_machine *m = c->machine;
    for (int i = 0; i < N_STREAM; i++)
        rate[i] = 1;
    *update = c->update_rate;
    if (m->unified) {
        double wanted = m->cores * (double)(active[COMPUTE] + updating) + active[H2D] + active[D2H];
        double share = wanted > m->cores ? m->cores / wanted : 1;
        for (int i = 0; i < N_STREAM; i++)
            rate[i] = share;
        *update *= share;
        return;
    }
    for (int way = 0; way < 2; way++)
        if (active[H2D] && active[D2H] && c->copy_rate[way] > 0 && c->copy_rate_both[way] > 0)
            rate[H2D + way] = at_most(c->copy_rate_both[way] / c->copy_rate[way], 1);
    if (!updating || m->dram <= 0)
        return;
    double update_bytes = at_most(c->update_rate * c->element, m->dram);
    double copies = active[H2D] * rate[H2D] * c->copy_rate[0] + active[D2H] * rate[D2H] * c->copy_rate[1];
    double most = m->dram_dma + m->h2d_both + m->d2h_both;
    most = most > m->dram ? most : m->dram;
    double share = update_bytes + copies > most ? most / (update_bytes + copies) : 1;
    *update = update_bytes * share / c->element;
    rate[H2D] *= share;
    rate[D2H] *= share;
}

static void record_span(sim *s, fb_resource resource, fb_work work, uint32_t block, double begin)
{
    fb_timeline *t = s->t;
    if (!t->spans)
        return;
    if (t->n_span < t->n_span_max)
        t->spans[t->n_span++] = (fb_time_span){ resource, work, block, begin, s->now };
    else
        t->n_lost++;
}

static void submit(sim *s, uint32_t block, uint64_t n, bool slab)
{
    assert(s->job_tail - s->job_head < QUEUE_MAX);
    if (s->job_head == s->job_tail)
        s->job_begun = s->now;
    s->jobs[s->job_tail++ % QUEUE_MAX] = (job){ block, slab, (double)n, n };
}

static void expect_update(sim *s, uint32_t block)
{
    s->remaining[block] = s->m->blocks[block].extent;
    s->n_dirty++;
}

static void end_job(sim *s)
{
    job *j = &s->jobs[s->job_head++ % QUEUE_MAX];
    record_span(s, FB_RESOURCE_UPDATE, FB_WORK_HOST_UPDATE, j->block, s->job_begun);
    s->job_begun = s->now;
    s->t->n_updated[0] += j->n;
    s->n_slab_free += j->slab;
    s->remaining[j->block] -= j->n;
    s->n_dirty -= s->remaining[j->block] == 0;
}

static void end_op(sim *s, int i)
{
    static const fb_resource resources[] = { FB_RESOURCE_COMPUTE, FB_RESOURCE_H2D, FB_RESOURCE_D2H };
    stream *q = &s->streams[i];
    op *o = &q->ring[q->head++ % QUEUE_MAX];
    record_span(s, resources[i], (fb_work)o->work, o->block, q->begun);
    q->begun = -1;
    if (o->lands)
        submit(s, o->block, o->n, true);
}

/* Why compute stands still: at an event, or because the host has given it nothing. */
static fb_cause cause_of_idling(const sim *s)
{
    const stream *q = &s->streams[COMPUTE];
    if (q->head == q->tail)
        return s->host_cause;
    const op *o = &q->ring[q->head % QUEUE_MAX];
    for (int i = H2D; i < N_STREAM; i++)
        if (s->streams[i].head < o->wait[i])
            return (fb_cause)o->cause[i];
    return FB_CAUSE_HOST;
}

/* Goes on to the next moment at which something ends. */
static void go_on(sim *s)
{
    bool active[N_STREAM], updating = s->job_head != s->job_tail;
    double rate[N_STREAM], update, dt = s->host_left > 0 ? s->host_left : 1e300;
    for (int i = 0; i < N_STREAM; i++) {
        active[i] = is_ready(s, &s->streams[i]);
        if (active[i] && s->streams[i].begun < 0)
            s->streams[i].begun = s->now;
    }
    set_rates(s, active, updating, rate, &update);
    double ends[N_STREAM], job_end = 1e300;
    for (int i = 0; i < N_STREAM; i++) {
        ends[i] = active[i] ? s->streams[i].ring[s->streams[i].head % QUEUE_MAX].left / rate[i] : 1e300;
        dt = at_most(dt, ends[i]);
    }
    if (updating) {
        job_end = update > 0 ? s->jobs[s->job_head % QUEUE_MAX].left / update : 0;
        dt = at_most(dt, job_end);
    }
    assert(dt < 1e300); /* else everything waits for something else */
    s->now += dt;
    s->t->busy[FB_RESOURCE_COMPUTE] += active[COMPUTE] ? dt : 0;
    s->t->busy[FB_RESOURCE_H2D] += active[H2D] ? dt : 0;
    s->t->busy[FB_RESOURCE_D2H] += active[D2H] ? dt : 0;
    s->t->busy[FB_RESOURCE_UPDATE] += updating ? dt : 0;
    s->t->busy[FB_RESOURCE_HOST] += s->host_left > 0 ? dt : 0;
    if (!active[COMPUTE])
        s->t->idle[cause_of_idling(s)] += dt;
    if (s->host_left > 0)
        s->host_left = s->host_left - dt > 0 ? s->host_left - dt : 0;
    double close = dt * (1 + 1e-12); /* what ends together is rounded apart */
    for (int i = 0; i < N_STREAM; i++) {
        if (!active[i])
            continue;
        s->streams[i].ring[s->streams[i].head % QUEUE_MAX].left -= dt * rate[i];
        if (ends[i] <= close)
            end_op(s, i);
    }
    if (updating) {
        s->jobs[s->job_head % QUEUE_MAX].left -= dt * update;
        if (job_end <= close)
            end_job(s);
    }
}

static void host_waits(sim *s, until what, uint32_t arg, event e, fb_cause cause)
{
    fb_cause before = s->host_cause;
    s->host_cause = cause;
    while (!holds(s, what, arg, e))
        go_on(s);
    s->host_cause = before;
}

static void host_works(sim *s, double seconds, fb_work work, fb_cause cause)
{
    double since = s->now;
    s->host_left = seconds;
    host_waits(s, UNTIL_TIME, 0, (event){ 0 }, cause);
    record_span(s, FB_RESOURCE_HOST, work, 0, since);
}

/* ---- streams ---- */

static event event_of(const sim *s, int i)
{
    return (event){ (uint32_t)i, s->streams[i].tail };
}

static void waits(sim *s, int i, event e, fb_cause cause)
{
    stream *q = &s->streams[i];
    if (e.seq > q->wait[e.stream]) {
        q->wait[e.stream] = e.seq;
        q->cause[e.stream] = (uint8_t)cause;
    }
}

static op *enqueue(sim *s, int i, double seconds, fb_work work, uint32_t block)
{
    stream *q = &s->streams[i];
    host_waits(s, UNTIL_ROOM, (uint32_t)i, (event){ 0 }, FB_CAUSE_HOST);
    op *o = &q->ring[q->tail++ % QUEUE_MAX];
    *o = (op){ .left = seconds, .work = (uint8_t)work, .block = block };
    for (int k = 0; k < N_STREAM; k++) {
        o->wait[k] = k == i ? 0 : q->wait[k]; /* its own are before it anyway */
        o->cause[k] = q->cause[k];
    }
    return o;
}

static void upload(sim *s, uint64_t size, fb_work work, uint32_t block)
{
    enqueue(s, H2D, fb_cost_h2d(s->c->machine, size), work, block);
    s->t->h2d_size += size;
}

static op *download(sim *s, uint64_t size, fb_work work, uint32_t block)
{
    op *o = enqueue(s, D2H, fb_cost_d2h(s->c->machine, size), work, block);
    s->t->d2h_size += size;
    return o;
}

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
    host_waits(s, UNTIL_CLEAN, block, (event){ 0 }, FB_CAUSE_UPDATE);
}

/* ---- weights (engine_weights.c) ---- */

static void load_layer(sim *s, uint32_t slot, uint32_t layer, uint32_t when)
{
    if (s->slots[slot].layer != FB_NEVER)
        s->slot_of[s->slots[slot].layer] = FB_NEVER;
    s->slots[slot] = (fb_slot){ layer, when };
    s->slot_of[layer] = slot;
    await_update(s, layer + 1);
    waits(s, H2D, s->used[slot], FB_CAUSE_HOST);
    upload(s, extent(s, layer + 1) * act_size(s), FB_WORK_WEIGHTS, layer + 1);
    s->loaded[slot] = event_of(s, H2D);
    s->awaited[slot] = false;
}

static void load_head(sim *s)
{
    uint32_t last = s->m->n_block - 1;
    await_update(s, last);
    upload(s, extent(s, last) * act_size(s), FB_WORK_WEIGHTS, last);
    if (s->m->cfg.tied) {
        await_update(s, 0);
        upload(s, extent(s, 0) * act_size(s), FB_WORK_WEIGHTS, 0);
    }
    s->head_loaded = event_of(s, H2D);
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
            if (!next_wanted && (s->remaining[last] || s->remaining[0]))
                break;
            load_head(s);
        } else if ((visit->kind == FB_VISIT_FORWARD || visit->kind == FB_VISIT_BACKWARD) && !at_home(s, visit->layer + 1)
                   && s->slot_of[visit->layer] == FB_NEVER) {
            uint32_t slot = fb_slots_victim(s->slots, s->n_slot, q);
            if (slot == FB_NEVER || (!next_wanted && s->remaining[visit->layer + 1]))
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
        waits(s, COMPUTE, s->loaded[slot], FB_CAUSE_WEIGHTS);
    s->awaited[slot] = true;
    return slot;
}

static void leave_layer(sim *s, const fb_visit *visit, uint32_t slot)
{
    if (slot == FB_NEVER)
        return;
    s->slots[slot].next_use = visit->next;
    s->used[slot] = event_of(s, COMPUTE);
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

static uint64_t kept_size(const sim *s, uint32_t layer, uint32_t g)
{
    uint64_t saved = layer + s->p->layout.n_rich >= n_layer(s) ? s->p->rich_size : s->p->saved_size, n = group_count(s, g);
    return (uint64_t)over_micros(s->c, group_first(s, g), (uint32_t)n, (double)s->c->whole.rows_size, (double)s->c->last.rows_size) + n * saved;
}

static event take_spare(sim *s)
{
    event e = s->spare[0];
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
        waits(s, H2D, take_spare(s), FB_CAUSE_INPUTS);
        upload(s, kept_size(s, layer, g), FB_WORK_KEPT, layer + 1);
        s->ahead[s->n_ahead++] = event_of(s, H2D);
        s->next_kept++;
    }
}

static void run_group(sim *s, double seconds, fb_work work, uint32_t layer, uint32_t g)
{
    if (!s->p->layout.kept_on_host) {
        enqueue(s, COMPUTE, seconds, work, layer + 1);
        return;
    }
    if (work == FB_WORK_FORWARD) {
        waits(s, COMPUTE, take_spare(s), FB_CAUSE_INPUTS);
        enqueue(s, COMPUTE, seconds, work, layer + 1);
        waits(s, D2H, event_of(s, COMPUTE), FB_CAUSE_HOST);
        download(s, kept_size(s, layer, g), FB_WORK_KEPT, layer + 1);
        s->spare[s->n_spare++] = event_of(s, D2H);
        return;
    }
    waits(s, COMPUTE, s->ahead[0], FB_CAUSE_INPUTS);
    s->n_ahead--;
    for (uint32_t i = 0; i < s->n_ahead; i++)
        s->ahead[i] = s->ahead[i + 1];
    enqueue(s, COMPUTE, seconds, work, layer + 1);
    s->spare[s->n_spare++] = event_of(s, COMPUTE);
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
        download(s, l.n * act_size(s), FB_WORK_GRADIENT, l.block);
    else {
        if (l.first == 0)
            expect_update(s, l.block);
        for (uint64_t at = 0; at < l.n;) {
            uint64_t n = l.n - at < s->slab_elems ? l.n - at : s->slab_elems;
            host_waits(s, UNTIL_SLAB, 0, (event){ 0 }, FB_CAUSE_GRADIENTS);
            s->n_slab_free--;
            op *o = download(s, n * act_size(s), FB_WORK_GRADIENT, l.block);
            o->lands = true;
            o->n = n;
            at += n;
        }
    }
    *l.downloaded = event_of(s, D2H);
}

static void update_on_device(sim *s, uint32_t block)
{
    enqueue(s, COMPUTE, fb_cost_update(s->c->machine, s->p->act, extent(s, block)), FB_WORK_DEVICE_UPDATE, block);
    s->t->n_updated[1] += extent(s, block);
}

static void send_gradient(sim *s, uint32_t block, event *free_event)
{
    const fb_machine *m = s->c->machine;
    bool copied = fb_plan_grad_copied(s->p->act);
    if (at_home(s, block)) {
        enqueue(s, COMPUTE, fb_cost_grad_out(m, s->p->act, extent(s, block)), FB_WORK_GRAD_OUT, block);
        if (!s->p->clip)
            update_on_device(s, block);
        *free_event = event_of(s, COMPUTE);
        return;
    }
    uint64_t piece = copied ? s->p->out_elems : extent(s, block);
    for (uint64_t first = 0; first < extent(s, block); first += piece) {
        uint64_t n = extent(s, block) - first < piece ? extent(s, block) - first : piece;
        send_leaving(s);
        if (copied)
            waits(s, COMPUTE, s->out_free, FB_CAUSE_GRADIENTS);
        enqueue(s, COMPUTE, fb_cost_grad_out(m, s->p->act, n), FB_WORK_GRAD_OUT, block);
        waits(s, D2H, event_of(s, COMPUTE), FB_CAUSE_HOST);
        s->leaving = (leaving){ true, block, first, n, copied ? &s->out_free : free_event };
    }
    if (copied)
        *free_event = event_of(s, COMPUTE);
}

static void open_accumulator(sim *s, uint32_t block, event *free_event, bool zero)
{
    bool owned = fb_plan_owns(s->p, s->m, FB_OWN_ACCUMULATOR, block);
    if (!owned)
        waits(s, COMPUTE, *free_event, FB_CAUSE_GRADIENTS);
    if (s->pass == 0) {
        if (zero)
            enqueue(s, COMPUTE, fb_cost_zero(s->c->machine, extent(s, block)), FB_WORK_GRAD_OUT, block);
        return;
    }
    if (owned)
        return;
    waits(s, H2D, event_of(s, COMPUTE), FB_CAUSE_HOST);
    upload(s, extent(s, block) * sizeof(float), FB_WORK_ACCUMULATOR, block);
    waits(s, COMPUTE, event_of(s, H2D), FB_CAUSE_GRADIENTS);
}

static void close_accumulator(sim *s, uint32_t block, event *free_event)
{
    if (s->pass + 1 == s->p->layout.n_pass) {
        send_gradient(s, block, free_event);
        return;
    }
    if (fb_plan_owns(s->p, s->m, FB_OWN_ACCUMULATOR, block))
        return;
    waits(s, D2H, event_of(s, COMPUTE), FB_CAUSE_HOST);
    download(s, extent(s, block) * sizeof(float), FB_WORK_ACCUMULATOR, block);
    *free_event = event_of(s, D2H);
    waits(s, H2D, *free_event, FB_CAUSE_GRADIENTS);
}

/* ---- visits ---- */

static void visit_embed(sim *s)
{
    if (at_home(s, 0)) {
        enqueue(s, COMPUTE, OVER_MICROS(s->c, s->first, s->count, look_up), FB_WORK_EMBED, 0);
        return;
    }
    await_update(s, 0);
    for (uint32_t g = 0; g < s->n_group; g++) {
        uint32_t first = group_first(s, g), n = group_count(s, g);
        event *staging = &s->staging_free[g % N_STAGING];
        host_waits(s, UNTIL_EVENT, 0, *staging, FB_CAUSE_DATA);
        host_works(s, OVER_MICROS(s->c, first, n, gather), FB_WORK_GATHER, FB_CAUSE_DATA);
        upload(s, (uint64_t)over_micros(s->c, first, n, (double)s->c->whole.rows_size, (double)s->c->last.rows_size), FB_WORK_BATCH, 0);
        *staging = event_of(s, H2D);
    }
    waits(s, COMPUTE, event_of(s, H2D), FB_CAUSE_DATA);
}

static void visit_forward(sim *s, uint32_t v, const fb_visit *visit)
{
    int w = window(s, visit->layer);
    uint32_t slot = enter_layer(s, v, visit->layer);
    uint32_t n = s->p->layout.kept_on_host ? s->n_group : 1;
    for (uint32_t g = 0; g < n; g++)
        run_group(s, n == 1 ? OVER_MICROS(s->c, s->first, s->count, forward[w]) : OVER_MICROS(s->c, group_first(s, g), group_count(s, g), forward[w]),
                  FB_WORK_FORWARD, visit->layer, g);
    leave_layer(s, visit, slot);
}

static void visit_backward(sim *s, uint32_t v, const fb_visit *visit)
{
    int w = window(s, visit->layer);
    fb_recompute policy = fb_plan_policy(s->p, n_layer(s), visit->layer);
    event *free_event = &s->acc_free[visit->layer % s->p->n_acc];
    uint32_t slot = enter_layer(s, v, visit->layer);
    open_accumulator(s, visit->layer + 1, free_event, false);
    uint32_t n = s->p->layout.kept_on_host ? s->n_group : 1;
    for (uint32_t g = 0; g < n; g++)
        run_group(s, n == 1 ? OVER_MICROS(s->c, s->first, s->count, backward[w][policy])
                            : OVER_MICROS(s->c, group_first(s, g), group_count(s, g), backward[w][policy]),
                  FB_WORK_BACKWARD, visit->layer, g);
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
        waits(s, COMPUTE, s->head_loaded, FB_CAUSE_WEIGHTS);
    }
    open_accumulator(s, tied ? 0 : last, &s->table_free, true);
    if (tied)
        open_accumulator(s, last, &s->final_free, true);
    if (s->p->layout.kept_on_host) {
        waits(s, H2D, event_of(s, D2H), FB_CAUSE_INPUTS);
        send_for_kept(s);
    }
    enqueue(s, COMPUTE, OVER_MICROS(s->c, s->first, s->count, head), FB_WORK_LOSS, last);
    close_accumulator(s, last, tied ? &s->final_free : &s->table_free);
}

static void visit_embed_backward(sim *s)
{
    bool tied = s->m->cfg.tied;
    if (s->pass + 1 < s->p->layout.n_pass) {
        waits(s, D2H, event_of(s, COMPUTE), FB_CAUSE_HOST);
        download(s, s->count * s->c->whole.rows_size, FB_WORK_ACCUMULATOR, 0);
        waits(s, COMPUTE, event_of(s, D2H), FB_CAUSE_GRADIENTS);
        if (tied)
            close_accumulator(s, 0, &s->table_free);
        return;
    }
    if (!tied) {
        waits(s, COMPUTE, s->table_free, FB_CAUSE_GRADIENTS);
        enqueue(s, COMPUTE, fb_cost_zero(s->c->machine, extent(s, 0)), FB_WORK_GRAD_OUT, 0);
    }
    if (s->first) { /* one at a time, so the sum is the time */
        waits(s, H2D, event_of(s, COMPUTE), FB_CAUSE_HOST);
        upload(s, s->first * s->c->whole.rows_size, FB_WORK_ACCUMULATOR, 0);
        waits(s, COMPUTE, event_of(s, H2D), FB_CAUSE_GRADIENTS);
        enqueue(s, COMPUTE, s->first * s->c->whole.embed_grad, FB_WORK_EMBED, 0);
    }
    enqueue(s, COMPUTE, OVER_MICROS(s->c, s->first, s->count, embed_grad), FB_WORK_EMBED, 0);
    close_accumulator(s, 0, &s->table_free);
    send_leaving(s);
}

/* ---- passes and the step (engine.c) ---- */

static void run_pass(sim *s)
{
    s->n_group = s->count < GROUPS_MAX ? s->count : GROUPS_MAX;
    waits(s, H2D, s->pass_done, FB_CAUSE_HOST);
    upload(s, s->count * s->p->meta_size, FB_WORK_BATCH, 0);
    waits(s, COMPUTE, event_of(s, H2D), FB_CAUSE_DATA);
    for (uint32_t i = 0; i < FB_INPUT_SPARES; i++)
        s->spare[i] = (event){ 0 };
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
            host_waits(s, UNTIL_REST, 0, (event){ 0 }, FB_CAUSE_HOST);
    }
    s->pass_done = event_of(s, COMPUTE);
}

/* All passes but the first and the last are alike, and between passes compute waits for what leaves: one stands for all. */
static void run_middle_passes(sim *s)
{
    fb_timeline *t = s->t;
    host_waits(s, UNTIL_REST, 0, (event){ 0 }, FB_CAUSE_GRADIENTS);
    fb_timeline before = *t;
    double begun = s->now, more = s->p->layout.n_pass - 3;
    run_pass(s);
    host_waits(s, UNTIL_REST, 0, (event){ 0 }, FB_CAUSE_GRADIENTS);
    for (int i = 0; i < FB_RESOURCE_COUNT; i++)
        t->busy[i] += more * (t->busy[i] - before.busy[i]);
    for (int i = 0; i < FB_CAUSE_COUNT; i++)
        t->idle[i] += more * (t->idle[i] - before.idle[i]);
    t->h2d_size += (s->p->layout.n_pass - 3) * (t->h2d_size - before.h2d_size);
    t->d2h_size += (s->p->layout.n_pass - 3) * (t->d2h_size - before.d2h_size);
    s->now += more * (s->now - begun);
    s->job_begun = s->now;
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
            expect_update(s, b);
            submit(s, b, extent(s, b), false);
        }
    if (s->c->no_overlap)
        host_waits(s, UNTIL_ALL_CLEAN, 0, (event){ 0 }, FB_CAUSE_UPDATE);
}

void fb_simulate(fb_timeline *t, const fb_plan *p, const fb_manifest *m, const fb_costs *c)
{
    sim s; /* the rings need no zeros */
    assert(p->train && m->n_block <= BLOCKS_MAX);
    *t = (fb_timeline){ .spans = t->spans, .n_span_max = t->n_span_max };
    s.p = p, s.m = m, s.c = c, s.t = t;
    s.now = s.host_left = s.job_begun = 0;
    s.host_cause = FB_CAUSE_HOST;
    for (int i = 0; i < N_STREAM; i++) {
        stream *q = &s.streams[i];
        q->head = q->tail = 0;
        q->begun = -1;
        for (int k = 0; k < N_STREAM; k++)
            q->wait[k] = 0, q->cause[k] = FB_CAUSE_HOST;
    }
    s.job_head = s.job_tail = s.n_dirty = 0;
    /* Where blocks are many times larger than slabs, two count as one: the same bytes are under way, in half the events. */
    bool coarse = m->extent_max_layer > SLABS_MANY * p->slab_elems && p->n_slab % 2 == 0;
    s.n_slab_free = coarse ? p->n_slab / 2 : p->n_slab;
    s.slab_elems = coarse ? 2 * p->slab_elems : p->slab_elems;
    for (uint32_t b = 0; b < m->n_block; b++)
        s.remaining[b] = 0;
    s.n_visit = fb_schedule_build(s.visits, m->cfg.n_layer, true);
    s.n_slot = p->layout.slots;
    for (uint32_t i = 0; i < s.n_slot; i++) {
        s.slots[i] = (fb_slot){ FB_NEVER, 0 };
        s.loaded[i] = s.used[i] = (event){ 0 };
        s.awaited[i] = false;
    }
    for (uint32_t i = 0; i < m->cfg.n_layer; i++)
        s.slot_of[i] = FB_NEVER;
    s.head_valid = false;
    s.head_loaded = s.table_free = s.final_free = s.out_free = s.pass_done = (event){ 0 };
    for (int i = 0; i < N_STAGING; i++)
        s.staging_free[i] = (event){ 0 };
    for (int i = 0; i < N_ACC_MAX; i++)
        s.acc_free[i] = (event){ 0 };
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
    host_waits(&s, UNTIL_REST, 0, (event){ 0 }, FB_CAUSE_GRADIENTS);
    host_waits(&s, UNTIL_ALL_CLEAN, 0, (event){ 0 }, FB_CAUSE_UPDATE); /* clipping off: the next step waits for it */
    t->seconds = s.now;
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
        compute += OVER_MICROS(c, 0, c->n_micro, forward[w]) + OVER_MICROS(c, 0, c->n_micro, backward[w][fb_plan_policy(p, n_layer, i)]);
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
        double kept = (double)c->n_micro * ((n_layer - l->n_rich) * (double)(p->saved_size + p->input_size) + l->n_rich * (double)(p->rich_size + p->input_size));
        kept -= n_layer * (double)(p->input_size - c->last.rows_size) + n_layer * (c->n_micro - 1.0) * (double)(p->input_size - c->whole.rows_size);
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

/* ---- in words ---- */

void fb_timeline_explain(char *buf, size_t size, const fb_timeline *t)
{
    static const char *const why[] = {
        [FB_CAUSE_WEIGHTS] = "it waits for weights to come over the link: more slots, more blocks at home or more tokens a step would hide them",
        [FB_CAUSE_GRADIENTS] = "it waits for gradients to leave: more blocks at home or more tokens a step would hide them",
        [FB_CAUSE_UPDATE] = "it waits for the host's update, which hides under the next forward: more blocks at home or more tokens a step would shorten the wait",
        [FB_CAUSE_INPUTS] = "it waits for what is kept on the host: more device memory would keep it there",
        [FB_CAUSE_DATA] = "it waits for the batch and the embedding's rows",
        [FB_CAUSE_HOST] = "the host gives it nothing to do",
    };
    double work = t->busy[FB_RESOURCE_COMPUTE], idle = t->seconds - work;
    fb_cause most = FB_CAUSE_WEIGHTS;
    for (fb_cause i = FB_CAUSE_WEIGHTS; i < FB_CAUSE_COUNT; i++)
        most = t->idle[i] > t->idle[most] ? i : most;
    if (idle < 0.02 * t->seconds)
        snprintf(buf, size, "the device's arithmetic bounds the step: it computes %.1f%% of the time", 100 * work / t->seconds);
    else if (idle < 0.5 * t->seconds)
        snprintf(buf, size, "the device computes %.1f%% of the step; most of the rest (%.1f%%) %s", 100 * work / t->seconds,
                 100 * t->idle[most] / t->seconds, why[most]);
    else
        snprintf(buf, size, "the device computes only %.1f%% of the step; most of the rest (%.1f%%) %s", 100 * work / t->seconds,
                 100 * t->idle[most] / t->seconds, why[most]);
}
