/* The update, eight elements at a time.  Compiled for AVX2 and FMA; called only where the processor has both. */
#include "optim/adamw_impl.h"

#if defined(__x86_64__)
#include <immintrin.h>

typedef struct vec_scalars {
    __m256 clip, beta1, beta1_rest, beta2, beta2_rest, inv_sqrt_c2, eps, shrink, minus_step_size;
} vec_scalars;

static inline vec_scalars spread(const fb_adamw_scalars *s)
{
    return (vec_scalars){
        _mm256_set1_ps(s->clip), _mm256_set1_ps(s->beta1), _mm256_set1_ps(s->beta1_rest), _mm256_set1_ps(s->beta2),
        _mm256_set1_ps(s->beta2_rest), _mm256_set1_ps(s->inv_sqrt_c2), _mm256_set1_ps(s->eps),
        _mm256_set1_ps(s->shrink), _mm256_set1_ps(s->minus_step_size),
    };
}

/* x where size is not below tiny (a NaN is not), else +0. */
static inline __m256 keep(__m256 x, __m256 size, float tiny)
{
    return _mm256_and_ps(x, _mm256_cmp_ps(size, _mm256_set1_ps(tiny), _CMP_NLT_UQ));
}

static inline __m256 magnitude(__m256 x)
{
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
}

/* adamw_element of adamw.c, operation for operation. */
static inline __m256 update(__m256 p, __m256 g, float *m_io, float *v_io, const vec_scalars *s)
{
    g = _mm256_mul_ps(g, s->clip);
    g = keep(g, magnitude(g), FB_ADAMW_G_TINY);
    __m256 m = _mm256_fmadd_ps(s->beta1, _mm256_loadu_ps(m_io), _mm256_mul_ps(s->beta1_rest, g));
    m = keep(m, magnitude(m), FB_ADAMW_M_TINY);
    __m256 v = _mm256_fmadd_ps(s->beta2, _mm256_loadu_ps(v_io), _mm256_mul_ps(_mm256_mul_ps(s->beta2_rest, g), g));
    v = keep(v, v, FB_ADAMW_V_TINY);
    __m256 d = _mm256_add_ps(_mm256_mul_ps(_mm256_sqrt_ps(v), s->inv_sqrt_c2), s->eps);
    _mm256_storeu_ps(m_io, m);
    _mm256_storeu_ps(v_io, v);
    return _mm256_fmadd_ps(s->minus_step_size, _mm256_div_ps(m, d), _mm256_mul_ps(p, s->shrink));
}

static inline void fetch(const void *p)
{
    _mm_prefetch((const char *)p + FB_ADAMW_AHEAD, _MM_HINT_T0);
}

void fb_adamw_f32_avx2(float *p, const float *g, float *m, float *v, uint64_t n, const fb_adamw_scalars *s)
{
    const vec_scalars vs = spread(s);
    uint64_t i = 0;
    for (; i + 16 <= n; i += 16) { /* a cache line of each array */
        fetch(p + i);
        fetch(g + i);
        fetch(m + i);
        fetch(v + i);
        for (uint64_t k = i; k < i + 16; k += 8)
            _mm256_storeu_ps(p + k, update(_mm256_loadu_ps(p + k), _mm256_loadu_ps(g + k), m + k, v + k, &vs));
    }
    fb_adamw_f32_scalar(p + i, g + i, m + i, v + i, n - i, s);
}

static inline __m256i widen_high(const uint16_t *from)
{
    return _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
}

static inline __m256 join(const uint16_t *hi, const int16_t *lo)
{
    __m256i low = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)lo));
    return _mm256_castsi256_ps(_mm256_add_epi32(widen_high(hi), low));
}

/* Two vectors of numbers below 2^16 as one of 16-bit numbers; the pack works within 128-bit lanes. */
static inline __m256i narrow(__m256i a, __m256i b)
{
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
}

void fb_adamw_split_avx2(uint16_t *hi, int16_t *lo, const uint16_t *g, float *m, float *v, uint64_t n,
                         const fb_adamw_scalars *s)
{
    const vec_scalars vs = spread(s);
    const __m256i half = _mm256_set1_epi32(0x8000), low = _mm256_set1_epi32(0xffff);
    uint64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        fetch(hi + i);
        fetch(lo + i);
        fetch(g + i);
        fetch(m + i);
        fetch(v + i);
        __m256 g0 = _mm256_castsi256_ps(widen_high(g + i)), g1 = _mm256_castsi256_ps(widen_high(g + i + 8));
        __m256i p0 = _mm256_castps_si256(update(join(hi + i, lo + i), g0, m + i, v + i, &vs));
        __m256i p1 = _mm256_castps_si256(update(join(hi + i + 8, lo + i + 8), g1, m + i + 8, v + i + 8, &vs));
        __m256i h = narrow(_mm256_srli_epi32(_mm256_add_epi32(p0, half), 16),
                           _mm256_srli_epi32(_mm256_add_epi32(p1, half), 16));
        _mm256_storeu_si256((__m256i *)(hi + i), h);
        _mm256_storeu_si256((__m256i *)(lo + i), narrow(_mm256_and_si256(p0, low), _mm256_and_si256(p1, low)));
    }
    fb_adamw_split_scalar(hi + i, lo + i, g + i, m + i, v + i, n - i, s);
}
#endif
