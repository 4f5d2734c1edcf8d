#include "model/rope.h"

#include <math.h>

/* The reference computes in float32, operation by operation; so do we, in the same order, since a frequency that is
 * off by one unit in the last place turns position 100,000 by 0.006.  Only the power is taken in double and rounded:
 * that is the correctly rounded value, which a good float32 power function gives too. */
static float power(float base, float exponent)
{
    return (float)pow((double)base, (double)exponent);
}

/* base^(2i / head_dim), the wavelength over 2 pi. */
static float wave(float base, uint32_t i, uint32_t head_dim)
{
    return power(base, (float)(2 * i) / (float)head_dim);
}

bool fb_rope_advance(fb_rope_state *s, const fb_model_config *c, uint32_t len)
{
    uint32_t original = c->max_position, cached = s->len_cached ? s->len_cached : original;
    if (c->rope.type != FB_ROPE_DYNAMIC)
        return false;
    if (len > cached) {
        s->len_cached = len;
        return true;
    }
    if (len < original && cached > original) { /* a row of exactly the original length leaves the grown table */
        s->len_cached = original;
        return true;
    }
    return false;
}

/* NTK-aware base: the slowest frequency is stretched by the factor, the fastest is kept.  At the original length the
 * reference computes in double; beyond, the length is a tensor and everything is float32. */
static float dynamic_base(const fb_model_config *c, const fb_rope_state *s)
{
    double   factor = c->rope.factor, exponent = (double)c->head_dim / (c->head_dim - 2);
    uint32_t len = s ? s->len_cached : 0;
    if (len <= c->max_position)
        return (float)(c->rope.theta * pow(factor * c->max_position / c->max_position - (factor - 1), exponent));
    float stretch = (float)factor * (float)len / (float)c->max_position - (float)(factor - 1);
    return (float)c->rope.theta * (float)pow((double)stretch, exponent); /* the exponent stays a double there */
}

/* Wavelengths above low are divided by the factor, below high kept, between them blended. */
static float llama3_frequency(float f, const fb_rope *r)
{
    float low = (float)(r->original_max / r->low_freq_factor), high = (float)(r->original_max / r->high_freq_factor);
    float length = 1 / f * (float)(2 * M_PI), factor = (float)r->factor;
    if (length > low)
        return f / factor;
    if (length < high)
        return f;
    float smooth = (1 / length * (float)r->original_max - (float)r->low_freq_factor) /
                   (float)(r->high_freq_factor - r->low_freq_factor);
    return (1 - smooth) * f / factor + smooth * f;
}

/* Peng et al. 2023, eq. 17-18 and 23: the dimension that turns n_turn times over the original context. */
static double yarn_dim(double n_turn, const fb_model_config *c)
{
    return c->head_dim * log(c->rope.original_max / (n_turn * 2 * M_PI)) / (2 * log(c->rope.theta));
}

static void yarn_range(double *low, double *high, const fb_model_config *c)
{
    *low = yarn_dim(c->rope.beta_fast, c);
    *high = yarn_dim(c->rope.beta_slow, c);
    if (c->rope.truncate) {
        *low = floor(*low);
        *high = ceil(*high);
    }
    *low = fmax(*low, 0);
    *high = fmin(*high, c->head_dim - 1);
    if (*low == *high)
        *high += 0.001;
}

static float yarn_frequency(float w, uint32_t i, double low, double high, const fb_rope *r)
{
    float ramp = fminf(fmaxf(((float)i - (float)low) / (float)(high - low), 0), 1), keep = 1 - ramp;
    return 1 / ((float)r->factor * w) * (1 - keep) + 1 / w * keep;
}

void fb_rope_frequencies(float *inv_freq, float *scale, const fb_model_config *c, const fb_rope_state *s)
{
    const fb_rope *r = &c->rope;
    double         low = 0, high = 0;
    float          base = r->type == FB_ROPE_DYNAMIC ? dynamic_base(c, s) : (float)r->theta;
    if (r->type == FB_ROPE_YARN)
        yarn_range(&low, &high, c);
    for (uint32_t i = 0; i < c->head_dim / 2; i++) {
        float w = wave(base, i, c->head_dim);
        switch (r->type) {
        case FB_ROPE_LINEAR: inv_freq[i] = 1 / w / (float)r->factor; break;
        case FB_ROPE_LLAMA3: inv_freq[i] = llama3_frequency(1 / w, r); break;
        case FB_ROPE_YARN:   inv_freq[i] = yarn_frequency(w, i, low, high, r); break;
        default:             inv_freq[i] = 1 / w;
        }
    }
    *scale = (float)r->attention_factor;
}

void fb_rope_table(float *cos_out, float *sin_out, uint32_t n_position, const fb_model_config *c, const fb_rope_state *s)
{
    uint32_t half = c->head_dim / 2;
    float    scale;
    if (n_position == 0)
        return;
    /* The first row's angles are zero, so it can hold the frequencies until it is written last. */
    fb_rope_frequencies(cos_out, &scale, c, s);
    for (uint32_t t = n_position; t-- > 0;)
        for (uint32_t i = 0; i < half; i++) {
            float    angle = (float)t * cos_out[i];
            uint64_t at = (uint64_t)t * half + i;
            cos_out[at] = (float)cos((double)angle) * scale;
            sin_out[at] = (float)sin((double)angle) * scale;
        }
}
