/* dtype.h - element types of checkpoints and of device buffers, and the exact conversions between them. */
#ifndef FB_BASE_DTYPE_H
#define FB_BASE_DTYPE_H

#include <stdint.h>
#include <string.h>

/* FB_I16 is no type of weights: a checkpoint's remainders are in it. */
typedef enum { FB_F32, FB_F16, FB_BF16, FB_DTYPE_COUNT, FB_I16 = FB_DTYPE_COUNT } fb_dtype;

static inline uint64_t fb_dtype_size(fb_dtype t)
{
    return t == FB_F32 ? 4 : 2;
}

/* The safetensors spelling: "F32", "F16", "BF16", "I16". */
const char *fb_dtype_str(fb_dtype t);
/* The Hugging Face spelling: "float32", "float16", "bfloat16". */
const char *fb_dtype_hf_str(fb_dtype t);

static inline uint32_t fb_f32_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static inline float fb_bits_f32(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline float fb_bf16_f32(uint16_t h)
{
    return fb_bits_f32((uint32_t)h << 16);
}

/* Rounds to nearest, ties to even: IEEE 754's default, used for activations, gradients and export.
 * (The split master rounds ties away, so that its remainder always fits 16 signed bits.)  NaN stays NaN. */
static inline uint16_t fb_f32_bf16(float f)
{
    uint32_t u = fb_f32_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

float    fb_f16_f32(uint16_t h); /* exact */
uint16_t fb_f32_f16(float f);    /* to nearest, ties to even; overflow gives infinity */

/* n elements of any dtype to float32, exact. */
void fb_to_f32(float *dst, const void *src, fb_dtype from, uint64_t n);
/* n float32 to any dtype, to nearest even. */
void fb_from_f32(void *dst, fb_dtype to, const float *src, uint64_t n);

/* Index of the first of n that is not finite; n: all are. */
uint64_t fb_find_nonfinite(const float *f, uint64_t n);

#endif
