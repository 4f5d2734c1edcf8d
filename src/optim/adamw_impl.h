/* adamw_impl.h - what the implementations of the update share.  For adamw*.c and bench/adamw.c only. */
#ifndef FB_OPTIM_ADAMW_IMPL_H
#define FB_OPTIM_ADAMW_IMPL_H

#include "optim/adamw.h"

/* Below these a value is set to zero.  Each is far under what can move a weight, and far enough above the smallest
 * normal float (2^-126) that no operation on a value that was kept meets denormals, which cost over ten times more. */
#define FB_ADAMW_G_TINY 0x1p-60f
#define FB_ADAMW_M_TINY 0x1p-100f
#define FB_ADAMW_V_TINY 0x1p-120f

/* The update's scalars: computed once in double, rounded once to float. */
typedef struct fb_adamw_scalars {
    float clip, beta1, beta1_rest, beta2, beta2_rest; /* rest: 1 - beta */
    float inv_sqrt_c2, eps, shrink, minus_step_size;  /* shrink: 1 - lr * weight_decay, or exactly 1 */
} fb_adamw_scalars;

typedef void fb_adamw_f32_fn(float *p, const float *g, float *m, float *v, uint64_t n, const fb_adamw_scalars *s);
typedef void fb_adamw_split_fn(uint16_t *hi, int16_t *lo, const uint16_t *g, float *m, float *v, uint64_t n,
                               const fb_adamw_scalars *s);

fb_adamw_f32_fn   fb_adamw_f32_scalar;
fb_adamw_split_fn fb_adamw_split_scalar;

#if defined(__x86_64__)
fb_adamw_f32_fn   fb_adamw_f32_avx2, fb_adamw_f32_avx512;
fb_adamw_split_fn fb_adamw_split_avx2, fb_adamw_split_avx512;

/* How far ahead of the arithmetic each array is fetched, in bytes.  The processor's own prefetcher stops at every
 * 4 KiB boundary, and seven streams meet one all the time. */
#define FB_ADAMW_AHEAD 1024
#endif

#endif
