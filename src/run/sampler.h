/* sampler.h - the next token from a row of logits: greedy, or by temperature, top-k and top-p. */
#ifndef FB_RUN_SAMPLER_H
#define FB_RUN_SAMPLER_H

#include "base/error.h"

typedef struct fb_sampler {
    double   temperature;  /* 0: greedy */
    double   top_p;        /* keep the fewest most likely tokens whose probability reaches it; 1: all */
    uint32_t top_k;        /* 0: all */
    uint64_t random;       /* state; the seed at first */
    uint32_t n_vocab;
    uint32_t *order;       /* [n_vocab] scratch */
    float    *p;           /* [n_vocab] scratch */
} fb_sampler;

fb_status fb_sampler_init(fb_sampler *s, uint32_t n_vocab, fb_error *err);
void      fb_sampler_deinit(fb_sampler *s);
/* Greedy takes the first of equal maxima.  Order as transformers: temperature, then top-k, then top-p (Holtzman et
 * al. 2020). */
uint32_t  fb_sampler_next(fb_sampler *s, const float *logits);

#endif
