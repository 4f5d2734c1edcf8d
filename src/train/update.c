#include "train/update.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sched/block.h"

typedef struct job {
    uint32_t       block;
    uint64_t       first, n, taken, done;
    unsigned char *gradient;
    bool           slab;
} job;

struct fb_updater {
    fb_state       *state;
    fb_pool        *slabs;
    fb_adamw        adamw;
    fb_decay        decay;
    uint8_t        *block_state; /* [n_block] fb_host_block_state */
    uint64_t       *remaining;   /* [n_block] elements not yet updated */
    job            *ring;
    uint32_t        capacity, head, tail; /* oldest unfinished / next free; counters, modulo capacity */
    pthread_t      *threads;
    uint32_t        n_thread, n_running; /* a thread's number is how many ran before it */
    fb_trace       *trace;
    fb_activity    *activity;
    fb_before_update before;
    void           *before_ctx;
    bool            stop;
    pthread_mutex_t lock;
    pthread_cond_t  work, clean;
};

/* ---- workers ---- */

static void update_range(fb_updater *u, uint32_t block, uint64_t first, uint64_t n, const unsigned char *g, bool decay)
{
    fb_state *s = u->state;
    float *m = fb_state_at(s, FB_HOST_M, block, first), *v = fb_state_at(s, FB_HOST_V, block, first);
    void *w = fb_state_at(s, FB_HOST_WEIGHTS, block, first);
    if (s->act == FB_F32)
        fb_adamw_f32(w, (const float *)(const void *)g, m, v, n, &u->adamw, decay);
    else
        fb_adamw_split(w, fb_state_at(s, FB_HOST_REMAINDERS, block, first), (const uint16_t *)(const void *)g, m, v, n,
                       &u->adamw, decay);
}

static void update_chunk(fb_updater *u, const job *j, uint64_t first, uint64_t n)
{
    uint64_t end = first + n, size = fb_dtype_size(u->state->act);
    for (uint32_t r = u->decay.first[j->block]; r < u->decay.first[j->block + 1]; r++) {
        const fb_decay_range *d = &u->decay.ranges[r];
        uint64_t from = d->first > first ? d->first : first, to = d->first + d->n < end ? d->first + d->n : end;
        if (from < to)
            update_range(u, j->block, from, to - from, j->gradient + (from - j->first) * size, d->decay);
    }
}

/* A job's share is done; call with the lock held. */
static void account(fb_updater *u, job *j, uint64_t n)
{
    uint32_t b = j->block;
    j->done += n;
    u->remaining[b] -= n;
    if (j->done == j->n) {
        if (j->slab)
            fb_pool_give(u->slabs, j->gradient);
        while (u->head != u->tail && u->ring[u->head % u->capacity].done == u->ring[u->head % u->capacity].n)
            u->head++;
        pthread_cond_broadcast(&u->clean); /* submit may be waiting for room */
    }
    if (u->remaining[b] == 0) {
        fb_host_block_move(&u->block_state[b], FB_STATE_CLEAN);
        u->remaining[b] = u->state->manifest->blocks[b].extent;
        pthread_cond_broadcast(&u->clean);
    }
}

static job *oldest_open_job(fb_updater *u)
{
    for (uint32_t i = u->head; i != u->tail; i++)
        if (u->ring[i % u->capacity].taken < u->ring[i % u->capacity].n)
            return &u->ring[i % u->capacity];
    return NULL;
}

static void *worker_main(void *arg)
{
    fb_updater *u = arg;
    pthread_mutex_lock(&u->lock);
    uint32_t worker = u->n_running++;
    for (;;) {
        job *j = oldest_open_job(u);
        if (!j && u->stop)
            break;
        if (!j) {
            pthread_cond_wait(&u->work, &u->lock);
            continue;
        }
        uint64_t first = j->first + j->taken, n = j->n - j->taken < FB_UPDATE_CHUNK ? j->n - j->taken : FB_UPDATE_CHUNK;
        j->taken += n;
        if (u->block_state[j->block] != FB_STATE_UPDATING)
            fb_host_block_move(&u->block_state[j->block], FB_STATE_UPDATING);
        pthread_mutex_unlock(&u->lock);
        if (u->before)
            u->before(u->before_ctx, j->block, first, n);
        double since = fb_trace_now(u->trace);
        fb_activity_work_begins(u->activity);
        update_chunk(u, j, first, n);
        fb_activity_work_ends(u->activity);
        fb_trace_update(u->trace, worker, j->block, n, since);
        pthread_mutex_lock(&u->lock);
        account(u, j, n);
    }
    pthread_mutex_unlock(&u->lock);
    return NULL;
}

/* ---- the engine's side ---- */

void fb_updater_set_trace(fb_updater *u, fb_trace *trace)
{
    pthread_mutex_lock(&u->lock);
    assert(u->head == u->tail);
    u->trace = trace;
    pthread_mutex_unlock(&u->lock);
}

void fb_updater_set_activity(fb_updater *u, fb_activity *activity)
{
    pthread_mutex_lock(&u->lock);
    assert(u->head == u->tail);
    u->activity = activity;
    pthread_mutex_unlock(&u->lock);
    fb_activity_workers(activity, u->n_thread);
}

/* Without the lock: whoever holds it may be what is being asked about. */
void fb_updater_describe(const fb_updater *u, char *text, size_t size)
{
    uint32_t n[FB_STATE_COUNT] = { 0 };
    size_t at = (size_t)snprintf(text, size, "; updates:");
    for (uint32_t b = 0; b < u->state->manifest->n_block; b++)
        n[__atomic_load_n(&u->block_state[b], __ATOMIC_RELAXED)]++;
    for (uint8_t s = 0; s < FB_STATE_COUNT && at < size; s++)
        if (n[s])
            at += (size_t)snprintf(text + at, size - at, " %u %s", n[s], fb_host_block_state_str(s));
}

void fb_updater_set_before(fb_updater *u, fb_before_update fn, void *ctx)
{
    pthread_mutex_lock(&u->lock);
    assert(u->head == u->tail);
    u->before = fn;
    u->before_ctx = ctx;
    pthread_mutex_unlock(&u->lock);
}

void fb_updater_begin(fb_updater *u, const fb_adamw *a)
{
    pthread_mutex_lock(&u->lock);
    assert(u->head == u->tail);
    u->head = u->tail = 0; /* far from 2^32, where a remainder would jump */
    u->adamw = *a;
    pthread_mutex_unlock(&u->lock);
}

void fb_updater_expect(fb_updater *u, uint32_t block)
{
    pthread_mutex_lock(&u->lock);
    fb_host_block_move(&u->block_state[block], FB_STATE_LANDING);
    pthread_mutex_unlock(&u->lock);
}

void fb_updater_submit(fb_updater *u, uint32_t block, uint64_t first, uint64_t n, void *g, bool slab)
{
    pthread_mutex_lock(&u->lock);
    /* One slow worker on the oldest job holds its entry while any number of later ones come and go. */
    while (u->tail - u->head == u->capacity)
        pthread_cond_wait(&u->clean, &u->lock);
    assert(u->block_state[block] == FB_STATE_LANDING || u->block_state[block] == FB_STATE_UPDATING);
    if (n == u->remaining[block] && u->block_state[block] == FB_STATE_LANDING)
        fb_host_block_move(&u->block_state[block], FB_STATE_PENDING);
    u->ring[u->tail++ % u->capacity] = (job){ .block = block, .first = first, .n = n, .gradient = g, .slab = slab };
    pthread_cond_broadcast(&u->work);
    pthread_mutex_unlock(&u->lock);
}

void fb_updater_drop(fb_updater *u, uint32_t block, uint64_t first, uint64_t n, void *g, bool slab)
{
    pthread_mutex_lock(&u->lock);
    job j = { .block = block, .first = first, .n = n, .taken = n, .gradient = g, .slab = slab };
    if (u->remaining[block] == n && u->block_state[block] == FB_STATE_LANDING)
        fb_host_block_move(&u->block_state[block], FB_STATE_PENDING);
    account(u, &j, n);
    pthread_mutex_unlock(&u->lock);
}

const fb_decay *fb_updater_decay(const fb_updater *u)
{
    return &u->decay;
}

bool fb_updater_is_clean(fb_updater *u, uint32_t block)
{
    pthread_mutex_lock(&u->lock);
    bool clean = u->block_state[block] == FB_STATE_CLEAN;
    pthread_mutex_unlock(&u->lock);
    return clean;
}

void fb_updater_wait(fb_updater *u, uint32_t block)
{
    pthread_mutex_lock(&u->lock);
    while (u->block_state[block] != FB_STATE_CLEAN)
        pthread_cond_wait(&u->clean, &u->lock);
    pthread_mutex_unlock(&u->lock);
}

void fb_updater_wait_all(fb_updater *u)
{
    for (uint32_t b = 0; b < u->state->manifest->n_block; b++) {
        fb_activity_wait(u->activity, FB_WAIT_UPDATE, b);
        fb_updater_wait(u, b);
    }
    fb_activity_wait(u->activity, FB_WAIT_NOTHING, 0);
}

/* ---- new, free ---- */

fb_status fb_updater_new(fb_updater **out, fb_state *state, fb_pool *slabs, uint32_t n_thread, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_manifest *m = state->manifest;
    fb_updater *u = calloc(1, sizeof *u);
    if (!u)
        return fb_fail(err, FB_NOMEM, "update workers: no memory");
    u->state = state;
    u->slabs = slabs;
    u->capacity = m->n_block + 64 + 1; /* every block whole, or every slab */
    pthread_mutex_init(&u->lock, NULL);
    pthread_cond_init(&u->work, NULL);
    pthread_cond_init(&u->clean, NULL);
    u->block_state = calloc(m->n_block, sizeof *u->block_state);
    u->remaining = calloc(m->n_block, sizeof *u->remaining);
    u->ring = calloc(u->capacity, sizeof *u->ring);
    u->threads = calloc(n_thread, sizeof *u->threads);
    if (!u->block_state || !u->remaining || !u->ring || !u->threads)
        FB_TRY(fb_fail(err, FB_NOMEM, "update workers: no memory for %u blocks", m->n_block));
    FB_TRY(fb_decay_init(&u->decay, m, err));
    for (uint32_t b = 0; b < m->n_block; b++)
        u->remaining[b] = m->blocks[b].extent;
    for (; u->n_thread < n_thread; u->n_thread++)
        if (pthread_create(&u->threads[u->n_thread], NULL, worker_main, u) != 0)
            FB_TRY(fb_fail(err, FB_FAILED, "update workers: the system refuses thread %u of %u", u->n_thread + 1, n_thread));
    *out = u;
    u = NULL;
done:
    fb_updater_free(u);
    return st;
}

void fb_updater_free(fb_updater *u)
{
    if (!u)
        return;
    pthread_mutex_lock(&u->lock);
    u->stop = true;
    pthread_cond_broadcast(&u->work);
    pthread_mutex_unlock(&u->lock);
    for (uint32_t i = 0; i < u->n_thread; i++)
        pthread_join(u->threads[i], NULL);
    pthread_mutex_destroy(&u->lock);
    pthread_cond_destroy(&u->work);
    pthread_cond_destroy(&u->clean);
    fb_decay_deinit(&u->decay);
    free(u->block_state);
    free(u->remaining);
    free(u->ring);
    free(u->threads);
    free(u);
}
