/* The update, sixteen elements at a time.  Compiled for AVX-512 F, BW, VL, DQ and FMA; called only where the processor
 * has them all. */
#include "optim/adamw_impl.h"

#if defined(__x86_64__)
#include <immintrin.h>

typedef struct vec_scalars {
    __m512 clip, beta1, beta1_rest, beta2, beta2_rest, inv_sqrt_c2, eps, shrink, minus_step_size;
} vec_scalars;

static inline vec_scalars spread(const fb_adamw_scalars *s)
{
    return (vec_scalars){
        _mm512_set1_ps(s->clip), _mm512_set1_ps(s->beta1), _mm512_set1_ps(s->beta1_rest), _mm512_set1_ps(s->beta2),
        _mm512_set1_ps(s->beta2_rest), _mm512_set1_ps(s->inv_sqrt_c2), _mm512_set1_ps(s->eps),
        _mm512_set1_ps(s->shrink), _mm512_set1_ps(s->minus_step_size),
    };
}

/* x where size is not below tiny (a NaN is not), else +0. */
static inline __m512 keep(__m512 x, __m512 size, float tiny)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(size, _mm512_set1_ps(tiny), _CMP_NLT_UQ), x);
}

/* adamw_element of adamw.c, operation for operation; only the lanes of here are read or written. */
static inline __m512 update(__m512 p, __m512 g, float *m_io, float *v_io, __mmask16 here, const vec_scalars *s)
{
    g = _mm512_mul_ps(g, s->clip);
    g = keep(g, _mm512_abs_ps(g), FB_ADAMW_G_TINY);
    __m512 m = _mm512_fmadd_ps(s->beta1, _mm512_maskz_loadu_ps(here, m_io), _mm512_mul_ps(s->beta1_rest, g));
    m = keep(m, _mm512_abs_ps(m), FB_ADAMW_M_TINY);
    __m512 v = _mm512_fmadd_ps(s->beta2, _mm512_maskz_loadu_ps(here, v_io),
                               _mm512_mul_ps(_mm512_mul_ps(s->beta2_rest, g), g));
    v = keep(v, v, FB_ADAMW_V_TINY);
    __m512 d = _mm512_add_ps(_mm512_mul_ps(_mm512_sqrt_ps(v), s->inv_sqrt_c2), s->eps);
    _mm512_mask_storeu_ps(m_io, here, m);
    _mm512_mask_storeu_ps(v_io, here, v);
    return _mm512_fmadd_ps(s->minus_step_size, _mm512_div_ps(m, d), _mm512_mul_ps(p, s->shrink));
}

static inline void update_f32(float *p, const float *g, float *m, float *v, __mmask16 here, const vec_scalars *s)
{
    __m512 updated = update(_mm512_maskz_loadu_ps(here, p), _mm512_maskz_loadu_ps(here, g), m, v, here, s);
    _mm512_mask_storeu_ps(p, here, updated);
}

static inline __m512i widen_high(const uint16_t *from, __mmask16 here)
{
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, from)), 16);
}

static inline void update_split(uint16_t *hi, int16_t *lo, const uint16_t *g, float *m, float *v, __mmask16 here,
                                const vec_scalars *s)
{
    __m512i low = _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(here, lo));
    __m512 p = _mm512_castsi512_ps(_mm512_add_epi32(widen_high(hi, here), low));
    __m512i bits = _mm512_castps_si512(update(p, _mm512_castsi512_ps(widen_high(g, here)), m, v, here, s));
    __m512i high = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
    _mm256_mask_storeu_epi16(hi, here, _mm512_cvtepi32_epi16(high));
    _mm256_mask_storeu_epi16(lo, here, _mm512_cvtepi32_epi16(bits));
}

static inline void fetch(const void *p)
{
    _mm_prefetch((const char *)p + FB_ADAMW_AHEAD, _MM_HINT_T0);
}

static inline __mmask16 first(uint64_t n)
{
    return (__mmask16)((1u << n) - 1);
}

void fb_adamw_f32_avx512(float *p, const float *g, float *m, float *v, uint64_t n, const fb_adamw_scalars *s)
{
    const vec_scalars vs = spread(s);
    uint64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        fetch(p + i);
        fetch(g + i);
        fetch(m + i);
        fetch(v + i);
        update_f32(p + i, g + i, m + i, v + i, first(16), &vs);
    }
    update_f32(p + i, g + i, m + i, v + i, first(n - i), &vs);
}

void fb_adamw_split_avx512(uint16_t *hi, int16_t *lo, const uint16_t *g, float *m, float *v, uint64_t n,
                           const fb_adamw_scalars *s)
{
    const vec_scalars vs = spread(s);
    uint64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        fetch(hi + i);
        fetch(lo + i);
        fetch(g + i);
        fetch(m + i);
        fetch(v + i);
        update_split(hi + i, lo + i, g + i, m + i, v + i, first(16), &vs);
    }
    update_split(hi + i, lo + i, g + i, m + i, v + i, first(n - i), &vs);
}
#endif
