#include "plan/flow.h"

#include <assert.h>

void fb_flow_init(fb_flow *f, fb_timeline *t, const fb_manifest *m, const fb_costs *c, uint32_t n_slab)
{
    assert(m->n_block <= FB_FLOW_BLOCKS);
    f->c = c, f->m = m, f->t = t;
    f->now = f->host_left = f->job_begun = 0;
    f->host_cause = FB_CAUSE_HOST;
    for (int i = 0; i < FB_FLOW_STREAMS; i++) { /* the rings need no zeros */
        fb_flow_stream *q = &f->streams[i];
        q->head = q->tail = 0;
        q->begun = -1;
        for (int k = 0; k < FB_FLOW_STREAMS; k++)
            q->wait[k] = 0, q->cause[k] = FB_CAUSE_HOST;
    }
    f->job_head = f->job_tail = f->n_dirty = 0;
    f->n_slab_free = n_slab;
    for (uint32_t b = 0; b < m->n_block; b++)
        f->remaining[b] = 0;
}

/* ---- time ---- */

static bool reached(const fb_flow *f, fb_mark e)
{
    return f->streams[e.stream].head >= e.seq;
}

static bool is_ready(const fb_flow *f, const fb_flow_stream *q)
{
    if (q->head == q->tail)
        return false;
    const fb_flow_op *o = &q->ring[q->head % FB_FLOW_QUEUE];
    for (int i = 0; i < FB_FLOW_STREAMS; i++)
        if (f->streams[i].head < o->wait[i])
            return false;
    return true;
}

static bool holds(const fb_flow *f, fb_until what, uint32_t arg, fb_mark e)
{
    switch (what) {
    case FB_UNTIL_CLEAN:     return f->remaining[arg] == 0;
    case FB_UNTIL_ALL_CLEAN: return f->n_dirty == 0;
    case FB_UNTIL_MARK:      return reached(f, e);
    case FB_UNTIL_SLAB:      return f->n_slab_free > 0;
    case FB_UNTIL_TIME:      return f->host_left <= 0;
    case FB_UNTIL_ROOM:      return f->streams[arg].tail - f->streams[arg].head < FB_FLOW_QUEUE;
    case FB_UNTIL_REST:      break;
    }
    for (int i = 0; i < FB_FLOW_STREAMS; i++)
        if (f->streams[i].head != f->streams[i].tail)
            return false;
    return true;
}

static double at_most(double x, double most)
{
    return x < most ? x : most;
}

/* Speeds against running alone; of the update, elements a second. */
static void set_rates(const fb_flow *f, const bool *active, bool updating, double *rate, double *update)
{
    const fb_costs *c = f->c;
    const fb_machine *m = c->machine;
    for (int i = 0; i < FB_FLOW_STREAMS; i++)
        rate[i] = 1;
    *update = c->update_rate;
    if (m->unified) {
        double wanted = m->cores * (double)(active[FB_FLOW_COMPUTE] + updating) + active[FB_FLOW_H2D] + active[FB_FLOW_D2H];
        double share = wanted > m->cores ? m->cores / wanted : 1;
        for (int i = 0; i < FB_FLOW_STREAMS; i++)
            rate[i] = share;
        *update *= share;
        return;
    }
    for (int way = 0; way < 2; way++)
        if (active[FB_FLOW_H2D] && active[FB_FLOW_D2H] && c->copy_rate[way] > 0 && c->copy_rate_both[way] > 0)
            rate[FB_FLOW_H2D + way] = at_most(c->copy_rate_both[way] / c->copy_rate[way], 1);
    if (!updating || m->dram <= 0)
        return;
    double update_bytes = at_most(c->update_rate * c->element, m->dram);
    double copies = 0;
    for (int way = 0; way < 2; way++)
        copies += active[FB_FLOW_H2D + way] * rate[FB_FLOW_H2D + way] * c->copy_rate[way];
    double most = m->dram_dma + m->h2d_both + m->d2h_both;
    most = most > m->dram ? most : m->dram;
    double share = update_bytes + copies > most ? most / (update_bytes + copies) : 1;
    *update = update_bytes * share / c->element;
    rate[FB_FLOW_H2D] *= share;
    rate[FB_FLOW_D2H] *= share;
}

static void record_span(fb_flow *f, fb_resource resource, fb_work work, uint32_t block, double begin)
{
    fb_timeline *t = f->t;
    if (!t->spans)
        return;
    if (t->n_span < t->n_span_max)
        t->spans[t->n_span++] = (fb_time_span){ resource, work, block, begin, f->now };
    else
        t->n_lost++;
}

void fb_flow_submit(fb_flow *f, uint32_t block, uint64_t n, bool slab)
{
    assert(f->job_tail - f->job_head < FB_FLOW_QUEUE);
    if (f->job_head == f->job_tail)
        f->job_begun = f->now;
    f->jobs[f->job_tail++ % FB_FLOW_QUEUE] = (fb_flow_job){ block, slab, (double)n, n };
}

void fb_flow_expect(fb_flow *f, uint32_t block)
{
    f->remaining[block] = f->m->blocks[block].extent;
    f->n_dirty++;
}

static void end_job(fb_flow *f)
{
    fb_flow_job *j = &f->jobs[f->job_head++ % FB_FLOW_QUEUE];
    record_span(f, FB_RESOURCE_UPDATE, FB_WORK_HOST_UPDATE, j->block, f->job_begun);
    f->job_begun = f->now;
    f->t->n_updated[0] += j->n;
    f->n_slab_free += j->slab;
    f->remaining[j->block] -= j->n;
    f->n_dirty -= f->remaining[j->block] == 0;
}

static void end_op(fb_flow *f, int i)
{
    static const fb_resource resources[] = { FB_RESOURCE_COMPUTE, FB_RESOURCE_H2D, FB_RESOURCE_D2H };
    fb_flow_stream *q = &f->streams[i];
    fb_flow_op *o = &q->ring[q->head++ % FB_FLOW_QUEUE];
    record_span(f, resources[i], (fb_work)o->work, o->block, q->begun);
    q->begun = -1;
    if (o->lands)
        fb_flow_submit(f, o->block, o->n, true);
}

/* Why compute stands still: at an event, or because the host has given it nothing. */
static fb_cause cause_of_idling(const fb_flow *f)
{
    const fb_flow_stream *q = &f->streams[FB_FLOW_COMPUTE];
    if (q->head == q->tail)
        return f->host_cause;
    const fb_flow_op *o = &q->ring[q->head % FB_FLOW_QUEUE];
    for (int i = FB_FLOW_H2D; i < FB_FLOW_STREAMS; i++)
        if (f->streams[i].head < o->wait[i])
            return (fb_cause)o->cause[i];
    return FB_CAUSE_HOST;
}

/* Goes on to the next moment at which something ends. */
static void go_on(fb_flow *f)
{
    bool active[FB_FLOW_STREAMS], updating = f->job_head != f->job_tail;
    double rate[FB_FLOW_STREAMS], update, dt = f->host_left > 0 ? f->host_left : 1e300;
    for (int i = 0; i < FB_FLOW_STREAMS; i++) {
        active[i] = is_ready(f, &f->streams[i]);
        if (active[i] && f->streams[i].begun < 0)
            f->streams[i].begun = f->now;
    }
    set_rates(f, active, updating, rate, &update);
    double ends[FB_FLOW_STREAMS], job_end = 1e300;
    for (int i = 0; i < FB_FLOW_STREAMS; i++) {
        ends[i] = active[i] ? f->streams[i].ring[f->streams[i].head % FB_FLOW_QUEUE].left / rate[i] : 1e300;
        dt = at_most(dt, ends[i]);
    }
    if (updating) {
        job_end = update > 0 ? f->jobs[f->job_head % FB_FLOW_QUEUE].left / update : 0;
        dt = at_most(dt, job_end);
    }
    assert(dt < 1e300); /* else everything waits for something else */
    f->now += dt;
    f->t->busy[FB_RESOURCE_COMPUTE] += active[FB_FLOW_COMPUTE] ? dt : 0;
    f->t->busy[FB_RESOURCE_H2D] += active[FB_FLOW_H2D] ? dt : 0;
    f->t->busy[FB_RESOURCE_D2H] += active[FB_FLOW_D2H] ? dt : 0;
    f->t->busy[FB_RESOURCE_UPDATE] += updating ? dt : 0;
    f->t->busy[FB_RESOURCE_HOST] += f->host_left > 0 ? dt : 0;
    if (!active[FB_FLOW_COMPUTE])
        f->t->idle[cause_of_idling(f)] += dt;
    if (f->host_left > 0)
        f->host_left = f->host_left - dt > 0 ? f->host_left - dt : 0;
    double close = dt * (1 + 1e-12); /* what ends together is rounded apart */
    for (int i = 0; i < FB_FLOW_STREAMS; i++) {
        if (!active[i])
            continue;
        f->streams[i].ring[f->streams[i].head % FB_FLOW_QUEUE].left -= dt * rate[i];
        if (ends[i] <= close)
            end_op(f, i);
    }
    if (updating) {
        f->jobs[f->job_head % FB_FLOW_QUEUE].left -= dt * update;
        if (job_end <= close)
            end_job(f);
    }
}

void fb_flow_host_waits(fb_flow *f, fb_until what, uint32_t arg, fb_mark e, fb_cause cause)
{
    fb_cause before = f->host_cause;
    f->host_cause = cause;
    while (!holds(f, what, arg, e))
        go_on(f);
    f->host_cause = before;
}

void fb_flow_host_works(fb_flow *f, double seconds, fb_work work, fb_cause cause)
{
    double since = f->now;
    f->host_left = seconds;
    fb_flow_host_waits(f, FB_UNTIL_TIME, 0, (fb_mark){ 0 }, cause);
    record_span(f, FB_RESOURCE_HOST, work, 0, since);
}

/* ---- streams ---- */

fb_mark fb_flow_mark(const fb_flow *f, int i)
{
    return (fb_mark){ (uint32_t)i, f->streams[i].tail };
}

void fb_flow_after(fb_flow *f, int i, fb_mark e, fb_cause cause)
{
    fb_flow_stream *q = &f->streams[i];
    if (e.seq > q->wait[e.stream]) {
        q->wait[e.stream] = e.seq;
        q->cause[e.stream] = (uint8_t)cause;
    }
}

fb_flow_op *fb_flow_enqueue(fb_flow *f, int i, double seconds, fb_work work, uint32_t block)
{
    fb_flow_stream *q = &f->streams[i];
    fb_flow_host_waits(f, FB_UNTIL_ROOM, (uint32_t)i, (fb_mark){ 0 }, FB_CAUSE_HOST);
    fb_flow_op *o = &q->ring[q->tail++ % FB_FLOW_QUEUE];
    *o = (fb_flow_op){ .left = seconds, .work = (uint8_t)work, .block = block };
    for (int k = 0; k < FB_FLOW_STREAMS; k++) {
        o->wait[k] = k == i ? 0 : q->wait[k]; /* its own are before it anyway */
        o->cause[k] = q->cause[k];
    }
    return o;
}

void fb_flow_upload(fb_flow *f, uint64_t size, fb_work work, uint32_t block)
{
    fb_flow_enqueue(f, FB_FLOW_H2D, fb_cost_h2d(f->c->machine, size), work, block);
    f->t->h2d_size += size;
}

fb_flow_op *fb_flow_download(fb_flow *f, uint64_t size, fb_work work, uint32_t block)
{
    fb_flow_op *o = fb_flow_enqueue(f, FB_FLOW_D2H, fb_cost_d2h(f->c->machine, size), work, block);
    f->t->d2h_size += size;
    return o;
}
