#include "train/state.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/random.h"
#include "optim/adamw.h"

static const uint64_t HUGE_PAGE = 2u << 20;
enum { CHUNK = 1 << 18 }; /* elements a task converts or touches */

static uint64_t element_size(const fb_state *s, fb_plan_host_region c)
{
    switch (c) {
    case FB_HOST_WEIGHTS:
    case FB_HOST_GRADIENTS:  return fb_dtype_size(s->act);
    case FB_HOST_REMAINDERS: return sizeof(int16_t);
    default:                 return sizeof(float);
    }
}

void *fb_state_at(const fb_state *s, fb_plan_host_region component, uint32_t block, uint64_t first)
{
    assert(s->component[component]);
    return (unsigned char *)s->component[component] + (s->base[block] + first) * element_size(s, component);
}

/* ---- mapping ---- */

typedef struct touch {
    unsigned char *base;
    uint64_t       size;
} touch;

static void touch_pages(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    touch *t = ctx;
    uint64_t end = (task + 1) * HUGE_PAGE < t->size ? (task + 1) * HUGE_PAGE : t->size;
    for (uint64_t at = task * HUGE_PAGE; at < end; at += 4096)
        *(volatile unsigned char *)(t->base + at) = 0;
}

static fb_status map(fb_state *s, fb_plan_host_region c, const fb_region *region, fb_team *team, fb_error *err)
{
    uint64_t size = (region->size + 4095) / 4096 * 4096;
    if (!size)
        return FB_OK;
    void *mem = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mem == MAP_FAILED)
        return fb_fail(err, FB_NOMEM, "host memory: the system has no %.1f MiB for %s", (double)size / 0x1p20, region->name);
    s->component[c] = mem;
    s->mapped[c] = size;
    madvise(mem, size, MADV_HUGEPAGE); /* advice only */
    fb_team_run(team, (size + HUGE_PAGE - 1) / HUGE_PAGE, touch_pages, &(touch){ mem, size });
    if (c == FB_HOST_WEIGHTS || c == FB_HOST_GRADIENTS || c == FB_HOST_ACCUMULATORS)
        return s->device->ops->pin(s->device, mem, size, err);
    return FB_OK;
}

fb_status fb_state_init(fb_state *s, const fb_manifest *m, const fb_plan *plan, fb_dtype act, fb_device *device,
                        fb_team *team, fb_error *err)
{
    fb_status st = FB_OK;
    *s = (fb_state){ .manifest = m, .act = act, .device = device };
    s->base = calloc(m->n_block + 1, sizeof *s->base);
    if (!s->base)
        FB_TRY(fb_fail(err, FB_NOMEM, "host memory: no room for the table of %u blocks", m->n_block));
    for (uint32_t b = 0; b < m->n_block; b++)
        s->base[b + 1] = s->base[b] + m->blocks[b].extent;
    for (fb_plan_host_region c = FB_HOST_WEIGHTS; c <= FB_HOST_ACCUMULATORS; c++)
        FB_TRY(map(s, c, &plan->host[c], team, err));
done:
    if (st != FB_OK)
        fb_state_deinit(s);
    return st;
}

void fb_state_deinit(fb_state *s)
{
    for (int c = 0; c < FB_HOST_COUNT; c++) {
        if (!s->component[c])
            continue;
        if (c == FB_HOST_WEIGHTS || c == FB_HOST_GRADIENTS || c == FB_HOST_ACCUMULATORS)
            s->device->ops->unpin(s->device, s->component[c]);
        munmap(s->component[c], s->mapped[c]);
    }
    free(s->base);
    *s = (fb_state){ 0 };
}

/* ---- masters ---- */

void fb_state_read(const fb_state *s, uint32_t block, uint64_t first, uint64_t n, float *out)
{
    if (s->act == FB_F32)
        memcpy(out, fb_state_at(s, FB_HOST_WEIGHTS, block, first), n * sizeof *out);
    else if (s->component[FB_HOST_REMAINDERS])
        fb_join_f32(out, fb_state_at(s, FB_HOST_WEIGHTS, block, first), fb_state_at(s, FB_HOST_REMAINDERS, block, first), n);
    else
        fb_to_f32(out, fb_state_at(s, FB_HOST_WEIGHTS, block, first), FB_BF16, n);
}

void fb_state_write(fb_state *s, uint32_t block, uint64_t first, uint64_t n, const float *in)
{
    void *weights = fb_state_at(s, FB_HOST_WEIGHTS, block, first);
    if (s->act == FB_F32)
        memcpy(weights, in, n * sizeof *in);
    else if (s->component[FB_HOST_REMAINDERS])
        fb_split_f32(weights, fb_state_at(s, FB_HOST_REMAINDERS, block, first), in, n);
    else { /* forward only: the working weight is hi of the same split, so that eval sees what training would */
        int16_t unused[256];
        for (uint64_t i = 0; i < n; i += FB_COUNT(unused)) {
            uint64_t k = n - i < FB_COUNT(unused) ? n - i : FB_COUNT(unused);
            fb_split_f32((uint16_t *)weights + i, unused, in + i, k);
        }
    }
}

bool fb_state_on_device(const fb_state *s, uint32_t block)
{
    (void)s;
    (void)block;
    return false;
}

fb_status fb_state_get(const fb_state *s, fb_plan_host_region part, uint32_t block, uint64_t first, uint64_t n, float *out, fb_error *err)
{
    (void)err;
    if (part == FB_HOST_WEIGHTS)
        fb_state_read(s, block, first, n, out);
    else
        memcpy(out, fb_state_at(s, part, block, first), n * sizeof *out);
    return FB_OK;
}

fb_status fb_state_put(fb_state *s, fb_plan_host_region part, uint32_t block, uint64_t first, uint64_t n, const float *in, fb_error *err)
{
    (void)err;
    if (part == FB_HOST_WEIGHTS)
        fb_state_write(s, block, first, n, in);
    else
        memcpy(fb_state_at(s, part, block, first), in, n * sizeof *in);
    return FB_OK;
}

typedef struct load {
    fb_state        *state;
    const fb_param  *param;
    const fb_tensor *tensor;
    uint64_t         n;
    uint64_t         bad; /* smallest index of a weight that is not finite; UINT64_MAX: none */
} load;

static void load_chunk(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    load *l = ctx;
    float f[4096];
    uint64_t end = (task + 1) * CHUNK < l->n ? (task + 1) * CHUNK : l->n;
    for (uint64_t i = task * CHUNK; i < end; i += FB_COUNT(f)) {
        uint64_t k = end - i < FB_COUNT(f) ? end - i : FB_COUNT(f);
        fb_to_f32(f, (const unsigned char *)l->tensor->data + i * fb_dtype_size(l->tensor->dtype), l->tensor->dtype, k);
        for (uint64_t j = 0; j < k; j++) {
            if (isfinite(f[j]))
                continue;
            uint64_t bad = __atomic_load_n(&l->bad, __ATOMIC_RELAXED);
            while (i + j < bad && !__atomic_compare_exchange_n(&l->bad, &bad, i + j, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
        }
        fb_state_write(l->state, l->param->block, l->param->offset + i, k, f);
    }
}

/* The file's pages are not needed again: no moment of the load holds the model twice. */
static void drop_pages(const fb_tensor *t)
{
    uintptr_t first = ((uintptr_t)t->data + 4095) & ~(uintptr_t)4095, end = ((uintptr_t)t->data + t->size) & ~(uintptr_t)4095;
    if (end > first)
        madvise((void *)first, end - first, MADV_DONTNEED);
}

fb_status fb_state_load(fb_state *s, const fb_shard_set *set, fb_team *team, fb_error *err)
{
    const fb_manifest *m = s->manifest;
    for (uint32_t i = 0; i < m->n_param; i++) {
        const fb_param *p = &m->params[i];
        const fb_tensor *t = fb_shard_set_find(set, p->name);
        if (s->stop && *s->stop)
            return fb_fail(err, FB_STOPPED, "stopped while the weights were loaded");
        assert(t); /* fb_manifest_check has been passed */
        load l = { s, p, t, p->rows * p->cols, UINT64_MAX };
        fb_team_run(team, (l.n + CHUNK - 1) / CHUNK, load_chunk, &l);
        if (l.bad != UINT64_MAX)
            return fb_fail(err, FB_INPUT, "%s: '%s' is not finite at element %llu; the checkpoint is damaged",
                           fb_shard_set_file(set, t), p->name, (unsigned long long)l.bad);
        drop_pages(t);
    }
    return FB_OK;
}

/* ---- random weights ---- */

typedef struct fill {
    fb_state       *state;
    const fb_param *param;
    uint64_t        key;
} fill;

/* Counter-based: any element without the ones before it.  The sum of four uniform numbers: near normal, mean 0, and scaled to deviation 0.02. */
static float random_weight(uint64_t key, uint64_t i)
{
    uint64_t bits = fb_random_mix(key + (i + 1) * FB_RANDOM_STEP);
    int32_t sum = (int32_t)(bits & 0xffff) + (int32_t)(bits >> 16 & 0xffff) + (int32_t)(bits >> 32 & 0xffff) + (int32_t)(bits >> 48);
    const float deviation_of_sum = 65536.0f * 0.57735027f; /* four times the variance 2^32 / 12 */
    return (float)(sum - 131070) * (0.02f / deviation_of_sum);
}

static void fill_chunk(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const fill *l = ctx;
    const fb_param *p = l->param;
    uint64_t n = p->rows * p->cols, end = (task + 1) * CHUNK < n ? (task + 1) * CHUNK : n;
    bool norm = p->role == FB_ROLE_ATTN_NORM || p->role == FB_ROLE_MLP_NORM || p->role == FB_ROLE_FINAL_NORM
                || p->role == FB_ROLE_Q_NORM || p->role == FB_ROLE_K_NORM;
    float f[4096];
    for (uint64_t i = task * CHUNK; i < end; i += FB_COUNT(f)) {
        uint64_t k = end - i < FB_COUNT(f) ? end - i : FB_COUNT(f);
        for (uint64_t j = 0; j < k; j++)
            f[j] = norm ? 1.0f : p->rank == 1 ? 0.0f : random_weight(l->key, i + j);
        fb_state_write(l->state, p->block, p->offset + i, k, f);
    }
}

void fb_state_randomize(fb_state *s, uint64_t seed, fb_team *team)
{
    for (uint32_t i = 0; i < s->manifest->n_param; i++) {
        const fb_param *p = &s->manifest->params[i];
        fb_team_run(team, (p->rows * p->cols + CHUNK - 1) / CHUNK, fill_chunk, &(fill){ s, p, fb_random_mix(fb_random_mix(seed) + i) });
    }
}
