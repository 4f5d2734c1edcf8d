#include "train/state.h"

#include <assert.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/random.h"
#include "optim/adamw.h"

enum { CHUNK = 1 << 18, READ = 1 << 14 }; /* elements a task converts; and reads at a time */

static uint64_t element_size(const fb_state *s, fb_plan_host_region c)
{
    switch (c) {
    case FB_HOST_WEIGHTS:
    case FB_HOST_GRADIENTS:  return fb_dtype_size(s->act);
    case FB_HOST_REMAINDERS: return sizeof(int16_t);
    default:                 return sizeof(float);
    }
}

bool fb_state_on_device(const fb_state *s, uint32_t block)
{
    return fb_plan_at_home(&s->plan, s->manifest, block);
}

void *fb_state_device_at(const fb_state *s, fb_plan_device_region region, uint32_t block, uint64_t first)
{
    fb_own own = region == FB_DEV_BLOCK_ACC ? FB_OWN_ACCUMULATOR : region == FB_DEV_HOME_GRADIENTS ? FB_OWN_GRADIENT : FB_OWN_STATE;
    uint64_t size = region == FB_DEV_HOME_WEIGHTS || region == FB_DEV_HOME_GRADIENTS ? fb_dtype_size(s->act)
                    : region == FB_DEV_HOME_REMAINDERS ? sizeof(int16_t) : sizeof(float);
    assert(fb_plan_owns(&s->plan, s->manifest, own, block));
    return s->arena + s->plan.device[region].offset + (s->owned[own][block] + first) * size;
}

void *fb_state_at(const fb_state *s, fb_plan_host_region component, uint32_t block, uint64_t first)
{
    assert(s->component[component].at && !fb_state_on_device(s, block));
    return s->component[component].at + (s->base[block] + first) * element_size(s, component);
}

/* ---- mapping ---- */

static fb_status map(fb_state *s, fb_plan_host_region c, const fb_region *region, fb_team *team, fb_error *err)
{
    uint64_t size = region->size;
    bool travels = c == FB_HOST_WEIGHTS || c == FB_HOST_GRADIENTS || c == FB_HOST_ACCUMULATORS;
    if (!size)
        return FB_OK;
    if (s->plan.host_aliased)
        size = s->base[s->manifest->n_block] * element_size(s, c);
    return fb_host_memory_map(&s->component[c], size, region->name, team, travels ? s->device : NULL, err);
}

/* Embedding and last block keep their own places. */
static void alias_layers(fb_state *s)
{
    const fb_manifest *m = s->manifest;
    uint32_t last = m->n_block - 1;
    uint64_t n_last = s->base[last + 1] - s->base[last];
    for (uint32_t b = 2; b < last; b++)
        s->base[b] = s->base[1];
    s->base[last] = s->base[1] + m->extent_max_layer;
    s->base[last + 1] = s->base[last] + n_last;
}

static fb_status lay_out_home(fb_state *s, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_manifest *m = s->manifest;
    const fb_device_ops *ops = s->device->ops;
    const fb_region *first = &s->plan.device[FB_DEV_HOME_WEIGHTS], *last = &s->plan.device[FB_DEV_BLOCK_ACC];
    uint64_t size = last->offset + last->size - first->offset, window = s->plan.host[FB_HOST_WINDOW].size;
    if (!size)
        return FB_OK;
    for (fb_own own = FB_OWN_STATE; own <= FB_OWN_ACCUMULATOR; own++) {
        s->owned[own] = calloc(m->n_block + 1, sizeof *s->owned[own]);
        if (!s->owned[own])
            FB_TRY(fb_fail(err, FB_NOMEM, "host memory: no room for the table of %u blocks", m->n_block));
        for (uint32_t b = 0; b <= m->n_block; b++)
            s->owned[own][b] = fb_plan_owned_before(&s->plan, m, own, b);
    }
    FB_TRY(ops->fill_zero(s->device, FB_STREAM_COMPUTE, s->arena + first->offset, size, err));
    FB_TRY(ops->sync(s->device, FB_STREAM_COMPUTE, err));
    if (!window)
        return FB_OK;
    FB_TRY(fb_host_memory_map(&s->window, window, s->plan.host[FB_HOST_WINDOW].name, NULL, s->device, err));
done:
    return st;
}

fb_status fb_state_init(fb_state *s, const fb_manifest *m, const fb_plan *plan, unsigned char *arena, fb_device *device,
                        fb_team *team, fb_error *err)
{
    fb_status st = FB_OK;
    *s = (fb_state){ .manifest = m, .act = plan->act, .device = device, .plan = *plan, .arena = arena };
    s->base = calloc(m->n_block + 1, sizeof *s->base);
    if (!s->base)
        FB_TRY(fb_fail(err, FB_NOMEM, "host memory: no room for the table of %u blocks", m->n_block));
    for (uint32_t b = 0; b < m->n_block; b++)
        s->base[b + 1] = s->base[b] + (fb_state_on_device(s, b) ? 0 : m->blocks[b].extent);
    if (plan->host_aliased)
        alias_layers(s);
    for (fb_plan_host_region c = FB_HOST_WEIGHTS; c <= FB_HOST_ACCUMULATORS; c++)
        FB_TRY(map(s, c, &plan->host[c], team, err));
    FB_TRY(lay_out_home(s, err));
done:
    if (st != FB_OK)
        fb_state_deinit(s);
    return st;
}

void fb_state_deinit(fb_state *s)
{
    for (int stream = 0; s->device && stream < FB_STREAM_COUNT; stream++) /* copies that were under way when something failed */
        (void)s->device->ops->sync(s->device, (fb_stream)stream, NULL);
    for (int c = 0; c < FB_HOST_COUNT; c++)
        fb_host_memory_unmap(&s->component[c]);
    fb_host_memory_unmap(&s->window);
    for (int own = 0; own < 3; own++)
        free(s->owned[own]);
    free(s->base);
    *s = (fb_state){ 0 };
}

/* ---- masters ---- */

/* Where master weights can be reached by the host. */
typedef struct masters {
    fb_dtype act;
    void    *weights;
    int16_t *low; /* NULL: not split, or forward only */
} masters;

static masters masters_on_host(const fb_state *s, uint32_t block, uint64_t first)
{
    return (masters){ s->act, fb_state_at(s, FB_HOST_WEIGHTS, block, first),
                      s->component[FB_HOST_REMAINDERS].at ? fb_state_at(s, FB_HOST_REMAINDERS, block, first) : NULL };
}

static masters masters_in_window(const fb_state *s)
{
    bool split = s->plan.device[FB_DEV_HOME_REMAINDERS].size > 0;
    return (masters){ s->act, s->window.at, split ? (int16_t *)(void *)(s->window.at + 2 * FB_WINDOW_ELEMS) : NULL };
}

static void masters_read(const masters *at, uint64_t n, float *out)
{
    if (at->act == FB_F32)
        memcpy(out, at->weights, n * sizeof *out);
    else if (at->low)
        fb_join_f32(out, at->weights, at->low, n);
    else
        fb_to_f32(out, at->weights, FB_BF16, n);
}

static void masters_write(const masters *at, uint64_t first, uint64_t n, const float *in)
{
    if (at->act == FB_F32)
        memcpy((float *)at->weights + first, in, n * sizeof *in);
    else if (at->low)
        fb_split_f32((uint16_t *)at->weights + first, at->low + first, in, n);
    else { /* forward only: the working weight is hi of the same split, so that eval sees what training would */
        int16_t unused[256];
        for (uint64_t i = 0; i < n; i += FB_COUNT(unused)) {
            uint64_t k = n - i < FB_COUNT(unused) ? n - i : FB_COUNT(unused);
            fb_split_f32((uint16_t *)at->weights + first + i, unused, in + i, k);
        }
    }
}

void fb_state_read(const fb_state *s, uint32_t block, uint64_t first, uint64_t n, float *out)
{
    masters at = masters_on_host(s, block, first);
    masters_read(&at, n, out);
}

void fb_state_write(fb_state *s, uint32_t block, uint64_t first, uint64_t n, const float *in)
{
    masters at = masters_on_host(s, block, first);
    masters_write(&at, 0, n, in);
}

/* ---- the window onto blocks that live on the device ---- */

typedef enum { FROM_DEVICE, TO_DEVICE } direction;

/* Moves n elements, at most the window's, and waits for them. */
static fb_status move(const fb_state *s, direction way, fb_plan_host_region part, uint32_t block, uint64_t first, uint64_t n,
                      fb_error *err)
{
    fb_status st = FB_OK;
    const fb_device_ops *ops = s->device->ops;
    masters at = masters_in_window(s);
    struct {
        fb_plan_device_region region;
        void    *host;
        uint64_t size;
    } what[2] = { { part == FB_HOST_M ? FB_DEV_HOME_M : FB_DEV_HOME_V, s->window.at, sizeof(float) } };
    int n_what = 1;
    if (part == FB_HOST_WEIGHTS) {
        what[0].region = FB_DEV_HOME_WEIGHTS, what[0].size = fb_dtype_size(s->act);
        what[1].region = FB_DEV_HOME_REMAINDERS, what[1].host = at.low, what[1].size = sizeof(int16_t);
        n_what += at.low != NULL;
    }
    fb_stream stream = way == FROM_DEVICE ? FB_STREAM_D2H : FB_STREAM_H2D;
    for (int i = 0; i < n_what; i++) {
        void *there = fb_state_device_at(s, what[i].region, block, first);
        FB_TRY(way == FROM_DEVICE ? ops->download(s->device, stream, what[i].host, there, n * what[i].size, err)
                                  : ops->upload(s->device, stream, there, what[i].host, n * what[i].size, err));
    }
    FB_TRY(ops->sync(s->device, stream, err));
done:
    return st;
}

fb_status fb_state_get(const fb_state *s, fb_plan_host_region part, uint32_t block, uint64_t first, uint64_t n, float *out,
                       fb_error *err)
{
    fb_status st = FB_OK;
    if (!fb_state_on_device(s, block)) {
        if (part == FB_HOST_WEIGHTS)
            fb_state_read(s, block, first, n, out);
        else
            memcpy(out, fb_state_at(s, part, block, first), n * sizeof *out);
        return FB_OK;
    }
    masters at = masters_in_window(s);
    for (uint64_t i = 0, k; i < n; i += k) {
        k = n - i < FB_WINDOW_ELEMS ? n - i : FB_WINDOW_ELEMS;
        FB_TRY(move(s, FROM_DEVICE, part, block, first + i, k, err));
        if (part == FB_HOST_WEIGHTS)
            masters_read(&at, k, out + i);
        else
            memcpy(out + i, s->window.at, k * sizeof *out);
    }
done:
    return st;
}

fb_status fb_state_put(fb_state *s, fb_plan_host_region part, uint32_t block, uint64_t first, uint64_t n, const float *in,
                       fb_error *err)
{
    fb_status st = FB_OK;
    if (!fb_state_on_device(s, block)) {
        if (part == FB_HOST_WEIGHTS)
            fb_state_write(s, block, first, n, in);
        else
            memcpy(fb_state_at(s, part, block, first), in, n * sizeof *in);
        return FB_OK;
    }
    masters at = masters_in_window(s);
    for (uint64_t i = 0, k; i < n; i += k) {
        k = n - i < FB_WINDOW_ELEMS ? n - i : FB_WINDOW_ELEMS;
        if (part == FB_HOST_WEIGHTS)
            masters_write(&at, 0, k, in + i);
        else
            memcpy(s->window.at, in + i, k * sizeof *in);
        FB_TRY(move(s, TO_DEVICE, part, block, first + i, k, err));
    }
done:
    return st;
}

fb_status fb_state_download(const fb_state *s, uint32_t block, uint64_t first, uint64_t n, void *weights, int16_t *low, float *m,
                            float *v, fb_error *err)
{
    fb_status st = FB_OK;
    const struct {
        fb_plan_device_region region;
        void    *to;
        uint64_t size;
    } parts[] = { { FB_DEV_HOME_WEIGHTS, weights, fb_dtype_size(s->act) }, { FB_DEV_HOME_M, m, sizeof *m },
                  { FB_DEV_HOME_V, v, sizeof *v }, { FB_DEV_HOME_REMAINDERS, low, sizeof *low } };
    for (size_t i = 0; i < FB_COUNT(parts) - !low; i++)
        FB_TRY(s->device->ops->download(s->device, FB_STREAM_D2H, parts[i].to, fb_state_device_at(s, parts[i].region, block, first),
                                        n * parts[i].size, err));
done:
    return st;
}

/* ---- filling it ---- */

/* A parameter's masters in pieces, which the team fills: task by task of CHUNK elements, relative to the piece. */
typedef struct piece {
    masters  to;
    uint64_t first, n; /* elements of the parameter */
} piece;

static fb_status fill_parameter(fb_state *s, const fb_param *p, fb_team *team, fb_task fill, void *ctx, piece *at, fb_error *err)
{
    fb_status st = FB_OK;
    bool device = fb_state_on_device(s, p->block);
    uint64_t n = p->rows * p->cols, most = device ? FB_WINDOW_ELEMS : n;
    for (uint64_t first = 0; first < n; first += most) {
        *at = (piece){ device ? masters_in_window(s) : masters_on_host(s, p->block, p->offset + first), first,
                       n - first < most ? n - first : most };
        fb_team_run(team, (at->n + CHUNK - 1) / CHUNK, fill, ctx);
        if (device)
            FB_TRY(move(s, TO_DEVICE, FB_HOST_WEIGHTS, p->block, p->offset + first, at->n, err));
    }
done:
    return st;
}

typedef struct load {
    piece            at;
    const fb_tensor *tensor;
    uint64_t         bad;   /* smallest index of a weight that is not finite; UINT64_MAX: none */
    bool             fails; /* a chunk could not be read: err is that of the first */
    fb_error         err;
} load;

static void note_bad(load *l, uint64_t index)
{
    uint64_t bad = __atomic_load_n(&l->bad, __ATOMIC_RELAXED);
    while (index < bad && !__atomic_compare_exchange_n(&l->bad, &bad, index, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

static void load_chunk(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    load *l = ctx;
    float f[READ];
    fb_error err;
    uint64_t end = (task + 1) * CHUNK < l->at.n ? (task + 1) * CHUNK : l->at.n;
    for (uint64_t i = task * CHUNK; i < end && !__atomic_load_n(&l->fails, __ATOMIC_RELAXED); i += READ) {
        uint64_t k = end - i < READ ? end - i : READ, index = l->at.first + i;
        if (fb_tensor_read_f32(l->tensor, index, k, f, &err) != FB_OK) {
            if (!__atomic_exchange_n(&l->fails, true, __ATOMIC_RELAXED))
                l->err = err;
            return;
        }
        uint64_t bad = fb_find_nonfinite(f, k);
        if (bad < k)
            note_bad(l, index + bad);
        masters_write(&l->at.to, i, k, f);
    }
}

fb_status fb_state_load(fb_state *s, const fb_shard_set *set, fb_team *team, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_manifest *m = s->manifest;
    for (uint32_t i = 0; i < m->n_param; i++) {
        const fb_param *p = &m->params[i];
        const fb_tensor *t = fb_shard_set_find(set, p->name);
        if (s->stop && *s->stop)
            return fb_fail(err, FB_STOPPED, "stopped while the weights were loaded");
        assert(t); /* fb_manifest_check has been passed */
        load l = { .tensor = t, .bad = UINT64_MAX };
        FB_TRY(fill_parameter(s, p, team, load_chunk, &l, &l.at, err));
        if (l.fails) {
            if (err)
                *err = l.err;
            return l.err.status;
        }
        if (l.bad != UINT64_MAX)
            return fb_fail(err, FB_INPUT, "%s: '%s' is not finite at element %llu; the checkpoint is damaged",
                           fb_shard_path(t->shard), p->name, (unsigned long long)l.bad);
    }
done:
    return st;
}

/* ---- random weights ---- */

typedef struct fill {
    piece           at;
    const fb_param *param;
    uint64_t        key;
} fill;

/* Counter-based: any element without the ones before it.  The sum of four uniform numbers: near normal, mean 0, and scaled to
 * deviation 0.02. */
static float random_weight(uint64_t key, uint64_t i)
{
    uint64_t bits = fb_random_mix(key + (i + 1) * FB_RANDOM_STEP);
    int32_t sum = (int32_t)(bits & 0xffff) + (int32_t)(bits >> 16 & 0xffff) + (int32_t)(bits >> 32 & 0xffff)
                  + (int32_t)(bits >> 48);
    const float deviation_of_sum = 65536.0f * 0.57735027f; /* four times the variance 2^32 / 12 */
    return (float)(sum - 131070) * (0.02f / deviation_of_sum);
}

static void fill_chunk(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const fill *l = ctx;
    const fb_param *p = l->param;
    uint64_t end = (task + 1) * CHUNK < l->at.n ? (task + 1) * CHUNK : l->at.n;
    bool norm = p->role == FB_ROLE_ATTN_NORM || p->role == FB_ROLE_MLP_NORM || p->role == FB_ROLE_FINAL_NORM
                || p->role == FB_ROLE_Q_NORM || p->role == FB_ROLE_K_NORM;
    float f[4096];
    for (uint64_t i = task * CHUNK; i < end; i += FB_COUNT(f)) {
        uint64_t k = end - i < FB_COUNT(f) ? end - i : FB_COUNT(f);
        for (uint64_t j = 0; j < k; j++)
            f[j] = norm ? 1.0f : p->rank == 1 ? 0.0f : random_weight(l->key, l->at.first + i + j);
        masters_write(&l->at.to, i, k, f);
    }
}

fb_status fb_state_randomize(fb_state *s, uint64_t seed, fb_team *team, fb_error *err)
{
    fb_status st = FB_OK;
    for (uint32_t i = 0; i < s->manifest->n_param; i++) {
        fill l = { .param = &s->manifest->params[i], .key = fb_random_mix(fb_random_mix(seed) + i) };
        FB_TRY(fill_parameter(s, l.param, team, fill_chunk, &l, &l.at, err));
    }
done:
    return st;
}
