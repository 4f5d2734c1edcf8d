/* lr.h - learning-rate schedules, as transformers 5.17 optimization.py defines them. */
#ifndef FB_OPTIM_LR_H
#define FB_OPTIM_LR_H

#include <stdint.h>

typedef enum {
    FB_LR_LINEAR, FB_LR_COSINE, FB_LR_COSINE_WITH_MIN_LR, FB_LR_CONSTANT, FB_LR_CONSTANT_WITH_WARMUP,
    FB_LR_WARMUP_STABLE_DECAY, FB_LR_COUNT
} fb_lr_type;

typedef struct fb_lr {
    fb_lr_type type;
    double     base;
    uint64_t   n_warmup, n_total;
    double     n_cycle;                 /* cosine: 0.5 */
    double     min_lr;                  /* cosine_with_min_lr: absolute; min_lr_rate is resolved by the caller */
    uint64_t   n_stable, n_decay;       /* warmup_stable_decay */
    double     min_ratio;               /* warmup_stable_decay: min_lr_ratio */
    int        warmup_shape, decay_shape; /* warmup_stable_decay: fb_lr_shape */
} fb_lr;

typedef enum { FB_LR_SHAPE_LINEAR, FB_LR_SHAPE_COSINE, FB_LR_SHAPE_1_SQRT, FB_LR_SHAPE_COUNT } fb_lr_shape;

/* The rate used in update `step`, 0 for the first: base * lambda(step). */
double fb_lr_at(const fb_lr *s, uint64_t step);
/* Names as in the config; -1 when unknown. */
int         fb_lr_type_find(const char *name);
const char *fb_lr_type_str(fb_lr_type t);

#endif
