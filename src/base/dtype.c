#include "base/dtype.h"

#include <math.h>

const char *fb_dtype_str(fb_dtype t)
{
    static const char *const names[] = { [FB_F32] = "F32", [FB_F16] = "F16", [FB_BF16] = "BF16", [FB_I16] = "I16" };
    return names[t];
}

const char *fb_dtype_hf_str(fb_dtype t)
{
    static const char *const names[] = { [FB_F32] = "float32", [FB_F16] = "float16", [FB_BF16] = "bfloat16" };
    return names[t];
}

float fb_f16_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 0x3ffu;
    if (exponent == 31)
        return fb_bits_f32(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) { /* zero or subnormal: mantissa * 2^-24, exact in float32 */
        float f = (float)mantissa * 0x1p-24f;
        return sign ? -f : f;
    }
    return fb_bits_f32(sign | (exponent + 112u) << 23 | mantissa << 13);
}

uint16_t fb_f32_f16(float f)
{
    uint32_t u = fb_f32_bits(f), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u);
    if (a >= 0x477ff000u) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (a < 0x38800000u) /* below 2^-14: the result is a multiple of 2^-24; the default mode rounds to even */
        return (uint16_t)(sign | (uint32_t)nearbyintf(fb_bits_f32(a) * 0x1p24f));
    a += 0xfffu + (a >> 13 & 1u);
    return (uint16_t)(sign | (a - (112u << 23)) >> 13);
}

void fb_to_f32(float *dst, const void *src, fb_dtype from, uint64_t n)
{
    const uint16_t *half = src;
    switch (from) {
    case FB_F32:
        memcpy(dst, src, n * sizeof *dst);
        break;
    case FB_BF16:
        for (uint64_t i = 0; i < n; i++)
            dst[i] = fb_bf16_f32(half[i]);
        break;
    default:
        for (uint64_t i = 0; i < n; i++)
            dst[i] = fb_f16_f32(half[i]);
    }
}

void fb_from_f32(void *dst, fb_dtype to, const float *src, uint64_t n)
{
    uint16_t *half = dst;
    switch (to) {
    case FB_F32:
        memcpy(dst, src, n * sizeof *src);
        break;
    case FB_BF16:
        for (uint64_t i = 0; i < n; i++)
            half[i] = fb_f32_bf16(src[i]);
        break;
    default:
        for (uint64_t i = 0; i < n; i++)
            half[i] = fb_f32_f16(src[i]);
    }
}

uint64_t fb_find_nonfinite(const float *f, uint64_t n)
{
    uint64_t first = 0;
    uint32_t bad = 0;
    for (uint64_t i = 0; i < n; i++) /* no branch, so that it runs in vectors: nearly always this is all there is to see */
        bad |= (fb_f32_bits(f[i]) & 0x7f800000u) == 0x7f800000u;
    if (!bad)
        return n;
    while (isfinite(f[first]))
        first++;
    return first;
}
