#include "optim/adamw.h"

#include <assert.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/dtype.h"
#include "base/error.h"
#include "optim/adamw_impl.h"

fb_adamw_scalars fb_adamw_scalars_of(const fb_adamw *a, bool decay)
{
    assert(a->step >= 1);
    double t = (double)a->step;
    return (fb_adamw_scalars){
        .clip = (float)a->clip,
        .beta1 = (float)a->beta1,
        .beta1_rest = (float)(1 - a->beta1),
        .beta2 = (float)a->beta2,
        .beta2_rest = (float)(1 - a->beta2),
        .inv_sqrt_c2 = (float)(1 / sqrt(1 - pow(a->beta2, t))),
        .eps = (float)a->eps,
        .shrink = decay ? (float)(1 - a->lr * a->weight_decay) : 1.0f,
        .minus_step_size = (float)(-a->lr / (1 - pow(a->beta1, t))),
    };
}

/* The definition: one element.  Multiplying by a shrink of 1 is exact, so that decay needs no second loop. */
static inline float adamw_element(float p, float g, float *m_io, float *v_io, const fb_adamw_scalars *s)
{
    g *= s->clip;
    g = fabsf(g) < FB_ADAMW_G_TINY ? 0.0f : g;
    float m = fmaf(s->beta1, *m_io, s->beta1_rest * g);
    m = fabsf(m) < FB_ADAMW_M_TINY ? 0.0f : m;
    float v = fmaf(s->beta2, *v_io, s->beta2_rest * g * g);
    v = v < FB_ADAMW_V_TINY ? 0.0f : v;
    float d = sqrtf(v) * s->inv_sqrt_c2 + s->eps;
    *m_io = m;
    *v_io = v;
    return fmaf(s->minus_step_size, m / d, p * s->shrink);
}

static inline float join(uint16_t hi, int16_t lo)
{
    return fb_bits_f32(((uint32_t)hi << 16) + (uint32_t)(int32_t)lo);
}

/* Adding half a unit of hi to sign and magnitude rounds ties away from zero.  lo is what is left of the bits, which
 * as a signed number undoes the carry; modulo 2^32 that holds for every pattern. */
static inline void split(float f, uint16_t *hi, int16_t *lo)
{
    uint32_t bits = fb_f32_bits(f);
    *hi = (uint16_t)((bits + 0x8000u) >> 16);
    *lo = (int16_t)(uint16_t)bits;
}

void fb_adamw_f32_scalar(float *p, const float *g, float *m, float *v, uint64_t n, const fb_adamw_scalars *s)
{
    for (uint64_t i = 0; i < n; i++)
        p[i] = adamw_element(p[i], g[i], &m[i], &v[i], s);
}

void fb_adamw_split_scalar(uint16_t *hi, int16_t *lo, const uint16_t *g, float *m, float *v, uint64_t n,
                           const fb_adamw_scalars *s)
{
    for (uint64_t i = 0; i < n; i++)
        split(adamw_element(join(hi[i], lo[i]), fb_bf16_f32(g[i]), &m[i], &v[i], s), &hi[i], &lo[i]);
}

void fb_split_f32(uint16_t *hi, int16_t *lo, const float *p, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        split(p[i], &hi[i], &lo[i]);
}

void fb_join_f32(float *p, const uint16_t *hi, const int16_t *lo, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        p[i] = join(hi[i], lo[i]);
}

typedef struct adamw_kernel {
    const char        *name;
    bool             (*runs_here)(void);
    fb_adamw_f32_fn   *f32;
    fb_adamw_split_fn *split;
} adamw_kernel;

static bool runs_anywhere(void)
{
    return true;
}

#if defined(__x86_64__)
static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static bool has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
}
#endif

/* Fastest first. */
static const adamw_kernel kernels[] = {
#if defined(__x86_64__)
    { "avx512", has_avx512, fb_adamw_f32_avx512, fb_adamw_split_avx512 },
    { "avx2", has_avx2, fb_adamw_f32_avx2, fb_adamw_split_avx2 },
#endif
    { "scalar", runs_anywhere, fb_adamw_f32_scalar, fb_adamw_split_scalar },
};

/* NULL until the first use.  Two threads that choose at once choose the same. */
static const adamw_kernel *_Atomic selected;

static const adamw_kernel *adamw_kernel_now(void)
{
    const adamw_kernel *k = atomic_load_explicit(&selected, memory_order_relaxed);
    if (!k) {
        for (k = kernels; !k->runs_here(); k++)
            ;
        atomic_store_explicit(&selected, k, memory_order_relaxed);
    }
    return k;
}

bool fb_adamw_select(const char *name)
{
    if (strcmp(name, "auto") == 0) {
        atomic_store_explicit(&selected, NULL, memory_order_relaxed); /* chosen at the next use */
        return true;
    }
    for (size_t i = 0; i < FB_COUNT(kernels); i++) {
        if (strcmp(kernels[i].name, name) == 0 && kernels[i].runs_here()) {
            atomic_store_explicit(&selected, &kernels[i], memory_order_relaxed);
            return true;
        }
    }
    return false;
}

const char *fb_adamw_selected(void)
{
    return adamw_kernel_now()->name;
}

void fb_adamw_f32_with(float *p, const float *g, float *m, float *v, uint64_t n, const fb_adamw_scalars *s)
{
    adamw_kernel_now()->f32(p, g, m, v, n, s);
}

void fb_adamw_split_with(uint16_t *hi, int16_t *lo, const uint16_t *g, float *m, float *v, uint64_t n, const fb_adamw_scalars *s)
{
    adamw_kernel_now()->split(hi, lo, g, m, v, n, s);
}

void fb_adamw_f32(float *p, const float *g, float *m, float *v, uint64_t n, const fb_adamw *a, bool decay)
{
    fb_adamw_scalars s = fb_adamw_scalars_of(a, decay);
    fb_adamw_f32_with(p, g, m, v, n, &s);
}

void fb_adamw_split(uint16_t *hi, int16_t *lo, const uint16_t *g, float *m, float *v, uint64_t n, const fb_adamw *a,
                    bool decay)
{
    fb_adamw_scalars s = fb_adamw_scalars_of(a, decay);
    fb_adamw_split_with(hi, lo, g, m, v, n, &s);
}
