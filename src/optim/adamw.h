/* adamw.h - AdamW over flat arrays (Kingma & Ba 2015, alg. 1; decoupled decay: Loshchilov & Hutter 2019, alg. 2).
 *
 * Per element, every operation rounded once to float32, contraction only where fma is written:
 *   g  = g * clip;                       |g| < 2^-60 -> 0
 *   m  = fma(beta1, m, (1 - beta1) * g); |m| < 2^-100 -> 0
 *   v  = fma(beta2, v, ((1 - beta2) * g) * g);  v < 2^-120 -> 0
 *   d  = sqrt(v) * inv_sqrt_c2 + eps            (a multiply, then an add)
 *   p  = p * (1 - lr * weight_decay)            (skipped when decay is off: factor exactly 1)
 *   p  = fma(-step_size, m / d, p)
 * with the scalars computed once in double and rounded: step_size = lr / (1 - beta1^step),
 * inv_sqrt_c2 = 1 / sqrt(1 - beta2^step).  Scalar, AVX2 and AVX-512 give the same bits: division and square root are
 * correctly rounded, and the zeroing is a comparison, not a processor mode.
 * Any range may be cut anywhere: elements are independent.  Threads: any, on disjoint ranges. */
#ifndef FB_OPTIM_ADAMW_H
#define FB_OPTIM_ADAMW_H

#include <stdbool.h>
#include <stdint.h>

typedef struct fb_adamw {
    double   lr, beta1, beta2, eps, weight_decay;
    double   clip; /* factor on every gradient; 1 when nothing is clipped */
    uint64_t step; /* 1 for the first update */
} fb_adamw;

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

fb_adamw_scalars fb_adamw_scalars_of(const fb_adamw *a, bool decay);

/* fp32 masters: p, m, v updated in place, g read. */
void fb_adamw_f32(float *p, const float *g, float *m, float *v, uint64_t n, const fb_adamw *a, bool decay);

/* Split masters: the fp32 bits are ((uint32_t)hi << 16) + (int32_t)lo; g is bf16.  hi is rounded to nearest, ties
 * away, so that lo always fits. */
void fb_adamw_split(uint16_t *hi, int16_t *lo, const uint16_t *g, float *m, float *v, uint64_t n, const fb_adamw *a,
                    bool decay);

/* The same with scalars that are at hand. */
void fb_adamw_f32_with(float *p, const float *g, float *m, float *v, uint64_t n, const fb_adamw_scalars *s);
void fb_adamw_split_with(uint16_t *hi, int16_t *lo, const uint16_t *g, float *m, float *v, uint64_t n, const fb_adamw_scalars *s);

/* The exact split of finite floats, and back. */
void fb_split_f32(uint16_t *hi, int16_t *lo, const float *p, uint64_t n);
void fb_join_f32(float *p, const uint16_t *hi, const int16_t *lo, uint64_t n);

/* Which code runs: chosen once from the processor, or forced ("scalar", "avx2", "avx512"; "auto" undoes it; config key
 * `update_kernel`).  false: unknown here or not supported by this processor. */
bool        fb_adamw_select(const char *name);
const char *fb_adamw_selected(void);

#endif
