/* Each function computes transformers' factor in its order of operations, in double as Python does. */
#include "optim/lr.h"

#include <math.h>
#include <string.h>

#include "base/error.h"

static const char *const type_names[] = {
    [FB_LR_LINEAR] = "linear",
    [FB_LR_COSINE] = "cosine",
    [FB_LR_COSINE_WITH_MIN_LR] = "cosine_with_min_lr",
    [FB_LR_CONSTANT] = "constant",
    [FB_LR_CONSTANT_WITH_WARMUP] = "constant_with_warmup",
    [FB_LR_WARMUP_STABLE_DECAY] = "warmup_stable_decay",
};
_Static_assert(FB_COUNT(type_names) == FB_LR_COUNT, "a schedule without a name");

static double at_least_1(uint64_t n)
{
    return n ? (double)n : 1.0;
}

static double past(uint64_t to, uint64_t from)
{
    return (double)to - (double)from;
}

static double steps_after_warmup(const fb_lr *s)
{
    return at_least_1(s->n_total > s->n_warmup ? s->n_total - s->n_warmup : 0);
}

/* Not held at the end: beyond n_total the wave goes on, as there. */
static double cosine(const fb_lr *s, double progress)
{
    return 0.5 * (1.0 + cos(M_PI * s->n_cycle * 2.0 * progress));
}

/* From 1 at progress 0 to 0 at progress 1. */
static double falling(const fb_lr *s, int shape, double progress)
{
    switch (shape) {
    case FB_LR_SHAPE_LINEAR:
        return 1.0 - progress;
    case FB_LR_SHAPE_COSINE:
        return cosine(s, progress);
    default:
        return 1.0 - sqrt(progress);
    }
}

/* From 0 to 1.  Its cosine is always half a wave; n_cycle is the decay's. */
static double rising(int shape, double progress)
{
    switch (shape) {
    case FB_LR_SHAPE_LINEAR:
        return progress;
    case FB_LR_SHAPE_COSINE:
        return 0.5 * (1.0 - cos(M_PI * progress));
    default:
        return 1.0 - sqrt(1.0 - progress);
    }
}

static double above(double factor, double floor_ratio)
{
    return fmax(0.0, factor * (1.0 - floor_ratio) + floor_ratio);
}

static double warmup_stable_decay(const fb_lr *s, uint64_t step)
{
    if (step < s->n_warmup)
        return above(rising(s->warmup_shape, (double)step / at_least_1(s->n_warmup)), s->min_ratio);
    uint64_t since = step - s->n_warmup;
    if (since < s->n_stable)
        return 1.0;
    since -= s->n_stable;
    if (since < s->n_decay)
        return above(falling(s, s->decay_shape, (double)since / at_least_1(s->n_decay)), s->min_ratio);
    return s->min_ratio;
}

static double factor_at(const fb_lr *s, uint64_t step)
{
    if (s->type == FB_LR_CONSTANT)
        return 1.0;
    if (s->type == FB_LR_WARMUP_STABLE_DECAY)
        return warmup_stable_decay(s, step);
    if (step < s->n_warmup)
        return (double)step / at_least_1(s->n_warmup);
    switch (s->type) {
    case FB_LR_LINEAR:
        return fmax(0.0, past(s->n_total, step) / steps_after_warmup(s));
    case FB_LR_COSINE:
        return fmax(0.0, cosine(s, past(step, s->n_warmup) / steps_after_warmup(s)));
    case FB_LR_COSINE_WITH_MIN_LR: /* a base of 0 has no ratio to its floor, and stays 0 */
        return above(cosine(s, past(step, s->n_warmup) / steps_after_warmup(s)), s->base > 0 ? s->min_lr / s->base : 0);
    default:
        return 1.0; /* constant_with_warmup, warmed up */
    }
}

double fb_lr_at(const fb_lr *s, uint64_t step)
{
    return s->base * factor_at(s, step);
}

int fb_lr_type_find(const char *name)
{
    for (int t = 0; t < FB_LR_COUNT; t++)
        if (strcmp(type_names[t], name) == 0)
            return t;
    return -1;
}

const char *fb_lr_type_str(fb_lr_type t)
{
    return type_names[t];
}
