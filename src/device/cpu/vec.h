/* vec.h - row arithmetic that the compiler turns into vector code, with the same bits on every processor.
 *
 * Plain C loops: products and sums are separate operations (contraction is off) and every sum has a fixed number of
 * lanes, so SSE2, AVX2 and AVX-512 code give identical results, and so would a scalar machine.  A function marked
 * FB_VECTOR is compiled once for each of these levels and chosen when the program is loaded; the helpers below are
 * inlined into it.  Sanitizer builds get one copy, because the choice runs before a sanitizer is ready. */
#ifndef FB_DEVICE_CPU_VEC_H
#define FB_DEVICE_CPU_VEC_H

#include <math.h>

#include "base/dtype.h"

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FB_VECTOR __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define FB_VECTOR
#endif
#define FB_INLINE static inline __attribute__((always_inline))

/* Lanes of every sum and maximum: four 512-bit registers, which hide the latency of an addition. */
enum { FB_LANES = 64 };

/* e^x within 1 ulp.  Results below 2^-126 are 0 (no denormals: they are slow), e^-inf = 0, e^NaN = NaN.
 * x = n ln 2 + r, |r| <= ln 2 / 2, with n ln 2 in two parts of which the first is exact (Cody & Waite 1980, ch. 6);
 * e^r by a polynomial.  Adding 1.5 * 2^23 rounds to the integer n and leaves it in the low bits of the mantissa. */
FB_INLINE float fb_expf(float x)
{
    const float to_int = 12582912.0f, ln2_hi = 0.693359375f, ln2_lo = -2.12194440e-4f;
    float t = x * 1.44269504f + to_int, n = t - to_int;
    float r = (x - n * ln2_hi) - n * ln2_lo;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * (r * r) + r) + 1.0f;
    float y = fb_bits_f32(fb_f32_bits(p) + (fb_f32_bits(t) << 23));
    y = x < -87.3365f ? 0.0f : y;
    y = x > 88.72283f ? INFINITY : y;
    return x == x ? y : x;
}

/* As fb_f32_bf16, without a branch. */
FB_INLINE uint16_t fb_round_bf16(float f)
{
    uint32_t u = fb_f32_bits(f), rounded = u + 0x7fffu + (u >> 16 & 1u);
    return (uint16_t)((f == f ? rounded : u | 0x400000u) >> 16);
}

/* The value after a trip through dtype. */
FB_INLINE float fb_round_to(fb_dtype t, float f)
{
    return t == FB_F32 ? f : fb_bf16_f32(fb_round_bf16(f));
}

/* Address of element i of an array of dtype t. */
FB_INLINE void *fb_at(const void *base, fb_dtype t, uint64_t i)
{
    return (unsigned char *)base + i * fb_dtype_size(t);
}

/* Element i of an array of dtype t (FB_F32 or FB_BF16), as a float, and back, rounded to nearest even.  With t a constant,
 * which an inlined function gets from `t == FB_F32 ? f(.., FB_F32) : f(.., FB_BF16)`, loops over these become vector
 * code without a buffer. */
FB_INLINE float fb_get(const void *base, fb_dtype t, uint64_t i)
{
    return t == FB_F32 ? ((const float *)base)[i] : fb_bf16_f32(((const uint16_t *)base)[i]);
}

FB_INLINE void fb_put(void *base, fb_dtype t, uint64_t i, float f)
{
    if (t == FB_F32)
        ((float *)base)[i] = f;
    else
        ((uint16_t *)base)[i] = fb_round_bf16(f);
}

/* n elements of dtype t (FB_F32 or FB_BF16) to float. */
FB_INLINE void fb_row_load(float *restrict dst, const void *restrict src, fb_dtype t, uint64_t n)
{
    if (t == FB_F32) {
        memcpy(dst, src, n * sizeof *dst);
    } else {
        const uint16_t *half = src;
        for (uint64_t i = 0; i < n; i++)
            dst[i] = fb_bf16_f32(half[i]);
    }
}

/* n floats to dtype t, rounded to nearest even.  dst may be src when t is FB_F32: then nothing is written. */
FB_INLINE void fb_row_store(void *dst, fb_dtype t, const float *src, uint64_t n)
{
    if (t != FB_F32) {
        uint16_t *restrict half = dst;
        const float *restrict from = src;
        for (uint64_t i = 0; i < n; i++)
            half[i] = fb_round_bf16(from[i]);
    } else if (dst != src) {
        memcpy(dst, src, n * sizeof *src);
    }
}

/* A row as floats: itself when it is float32, otherwise widened into tmp[n]. */
FB_INLINE const float *fb_row_view(const void *row, fb_dtype t, uint64_t n, float *tmp)
{
    if (t == FB_F32)
        return row;
    fb_row_load(tmp, row, t, n);
    return tmp;
}

/* Lanes are added pairwise, always in this order. */
FB_INLINE float fb_lanes_sum(float *lane)
{
    for (int half = FB_LANES / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++)
            lane[j] += lane[j + half];
    return lane[0];
}

FB_INLINE float fb_row_dot(const float *a, const float *b, uint64_t n)
{
    float lane[FB_LANES] = { 0 };
    uint64_t i = 0;
    for (; i + FB_LANES <= n; i += FB_LANES)
        for (int j = 0; j < FB_LANES; j++)
            lane[j] += a[i + j] * b[i + j];
    for (int j = 0; i + j < n; j++)
        lane[j] += a[i + j] * b[i + j];
    return fb_lanes_sum(lane);
}

/* The largest element that is a number; -inf when there is none. */
FB_INLINE float fb_row_max(const float *a, uint64_t n)
{
    float lane[FB_LANES];
    for (int j = 0; j < FB_LANES; j++)
        lane[j] = -INFINITY;
    uint64_t i = 0;
    for (; i + FB_LANES <= n; i += FB_LANES)
        for (int j = 0; j < FB_LANES; j++)
            lane[j] = a[i + j] > lane[j] ? a[i + j] : lane[j];
    for (int j = 0; i + j < n; j++)
        lane[j] = a[i + j] > lane[j] ? a[i + j] : lane[j];
    float max = lane[0];
    for (int j = 1; j < FB_LANES; j++)
        max = lane[j] > max ? lane[j] : max;
    return max;
}

/* y[i] = e^(x[i] - shift); returns their sum.  y may be x. */
FB_INLINE float fb_row_exp(float *y, const float *x, float shift, uint64_t n)
{
    float lane[FB_LANES] = { 0 }, block[FB_LANES];
    uint64_t i = 0;
    for (; i + FB_LANES <= n; i += FB_LANES) {
        for (int j = 0; j < FB_LANES; j++)
            block[j] = fb_expf(x[i + j] - shift);
        for (int j = 0; j < FB_LANES; j++)
            lane[j] += block[j];
        memcpy(y + i, block, sizeof block);
    }
    for (int j = 0; i + j < n; j++) {
        y[i + j] = fb_expf(x[i + j] - shift);
        lane[j] += y[i + j];
    }
    return fb_lanes_sum(lane);
}

/* The sum of e^(x[i] - shift), in the order of fb_row_exp. */
FB_INLINE float fb_row_exp_sum(const float *x, float shift, uint64_t n)
{
    float lane[FB_LANES] = { 0 };
    uint64_t i = 0;
    for (; i + FB_LANES <= n; i += FB_LANES)
        for (int j = 0; j < FB_LANES; j++)
            lane[j] += fb_expf(x[i + j] - shift);
    for (int j = 0; i + j < n; j++)
        lane[j] += fb_expf(x[i + j] - shift);
    return fb_lanes_sum(lane);
}

#endif
