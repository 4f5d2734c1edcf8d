#include "run/host_rate.h"

#include <sys/mman.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/clock.h"
#include "base/dtype.h"
#include "optim/adamw_impl.h"

/* ---- arrays ---- */

/* Huge pages where the system allows; without them only the speed differs. */
static void *map_array(uint64_t size)
{
    void *mem = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mem == MAP_FAILED)
        return NULL;
    madvise(mem, size, MADV_HUGEPAGE);
    return mem;
}

/* First touch, by the threads that will use the pages.  The values stay ordinary over any number of updates and
 * triads: weights near 1, gradients of alternating sign. */
static void fill(void *ctx, uint64_t task, uint32_t worker)
{
    const fb_host_arrays *x = ctx;
    (void)worker;
    for (uint64_t i = task * FB_HOST_SPAN; i < (task + 1) * FB_HOST_SPAN; i++) {
        x->p[i] = 1.0f + 0x1p-10f * (float)(i % 64);
        x->g[i] = (i & 1 ? -1e-3f : 1e-3f) * (float)(1 + i % 7);
        x->m[i] = 0.0f;
        x->v[i] = 1e-6f;
        x->g16[i] = fb_f32_bf16(x->g[i]);
        fb_split_f32(&x->hi[i], &x->lo[i], &x->p[i], 1);
    }
}

fb_status fb_host_arrays_new(fb_host_arrays *x, uint64_t n, fb_team *team, fb_error *err)
{
    n = (n + FB_HOST_SPAN - 1) / FB_HOST_SPAN * FB_HOST_SPAN;
    *x = (fb_host_arrays){ .n = n, .p = map_array(4 * n), .g = map_array(4 * n), .m = map_array(4 * n), .v = map_array(4 * n),
                           .hi = map_array(2 * n), .lo = map_array(2 * n), .g16 = map_array(2 * n),
                           .hyper = { .lr = 1e-5, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01, .clip = 0.5 } };
    if (!x->p || !x->g || !x->m || !x->v || !x->hi || !x->lo || !x->g16) {
        fb_host_arrays_free(x);
        return fb_fail(err, FB_NOMEM, "no memory for %llu MiB of arrays to measure the host's memory with",
                       (unsigned long long)(FB_HOST_BYTES * n >> 20));
    }
    fb_team_run(team, n / FB_HOST_SPAN, fill, x);
    return FB_OK;
}

void fb_host_arrays_free(fb_host_arrays *x)
{
    void *const wide[] = { x->p, x->g, x->m, x->v }, *const narrow[] = { x->hi, x->lo, x->g16 };
    for (size_t i = 0; i < FB_COUNT(wide); i++)
        if (wide[i])
            munmap(wide[i], 4 * x->n);
    for (size_t i = 0; i < FB_COUNT(narrow); i++)
        if (narrow[i])
            munmap(narrow[i], 2 * x->n);
    *x = (fb_host_arrays){ 0 };
}

/* ---- tasks ---- */

static void triad_plain(void *ctx, uint64_t task, uint32_t worker)
{
    const fb_host_arrays *x = ctx;
    (void)worker;
    float *restrict a = x->g + task * FB_HOST_SPAN;
    const float *restrict b = x->m + task * FB_HOST_SPAN, *restrict c = x->v + task * FB_HOST_SPAN;
    for (uint64_t i = 0; i < FB_HOST_SPAN; i++)
        a[i] = b[i] + 0.5f * c[i];
}

#if defined(__x86_64__)
/* Fetches ahead as the update does: the mark gets every help that the measured code gets. */
__attribute__((target("avx"))) static void triad_streaming(void *ctx, uint64_t task, uint32_t worker)
{
    const fb_host_arrays *x = ctx;
    (void)worker;
    float *a = x->g + task * FB_HOST_SPAN;
    const float *b = x->m + task * FB_HOST_SPAN, *c = x->v + task * FB_HOST_SPAN;
    const __m256 s = _mm256_set1_ps(0.5f);
    for (uint64_t i = 0; i < FB_HOST_SPAN; i += 16) { /* a cache line of each; arrays begin on a page */
        _mm_prefetch((const char *)(b + i) + FB_ADAMW_AHEAD, _MM_HINT_T0);
        _mm_prefetch((const char *)(c + i) + FB_ADAMW_AHEAD, _MM_HINT_T0);
        for (uint64_t k = i; k < i + 16; k += 8)
            _mm256_stream_ps(a + k, _mm256_add_ps(_mm256_load_ps(b + k), _mm256_mul_ps(s, _mm256_load_ps(c + k))));
    }
    _mm_sfence();
}
#endif

static void update_f32(void *ctx, uint64_t task, uint32_t worker)
{
    const fb_host_arrays *x = ctx;
    (void)worker;
    uint64_t i = task * FB_HOST_SPAN;
    fb_adamw_f32(x->p + i, x->g + i, x->m + i, x->v + i, FB_HOST_SPAN, &x->hyper, true);
}

static void update_split(void *ctx, uint64_t task, uint32_t worker)
{
    const fb_host_arrays *x = ctx;
    (void)worker;
    uint64_t i = task * FB_HOST_SPAN;
    fb_adamw_split(x->hi + i, x->lo + i, x->g16 + i, x->m + i, x->v + i, FB_HOST_SPAN, &x->hyper, true);
}

fb_task fb_host_triad_plain(void) { return triad_plain; }
fb_task fb_host_update_f32(void) { return update_f32; }
fb_task fb_host_update_split(void) { return update_split; }

fb_task fb_host_triad_streaming(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx"))
        return triad_streaming;
#endif
    return NULL;
}

double fb_host_pass(fb_team *team, fb_host_arrays *x, fb_task task)
{
    x->hyper.step++;
    double start = fb_clock();
    fb_team_run(team, x->n / FB_HOST_SPAN, task, x);
    return fb_clock() - start;
}
