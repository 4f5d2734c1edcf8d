/* adamw_impl.h - what the implementations of the update share.  For adamw*.c and bench/adamw.c only. */
#ifndef FB_OPTIM_ADAMW_IMPL_H
#define FB_OPTIM_ADAMW_IMPL_H

#include "optim/adamw.h"

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
