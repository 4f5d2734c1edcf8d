#include "run/sampler.h"

#include <math.h>
#include <stdlib.h>

#include "base/random.h"

fb_status fb_sampler_init(fb_sampler *s, uint32_t n_vocab, fb_error *err)
{
    s->n_vocab = n_vocab;
    s->order = calloc(n_vocab, sizeof *s->order);
    s->p = calloc(n_vocab, sizeof *s->p);
    return s->order && s->p ? FB_OK : fb_fail(err, FB_NOMEM, "generate: no memory to sample from %u tokens", n_vocab);
}

void fb_sampler_deinit(fb_sampler *s)
{
    free(s->order);
    free(s->p);
    s->order = NULL;
    s->p = NULL;
}

static uint32_t greedy(const float *logits, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

static int by_probability(const void *a, const void *b, void *ctx)
{
    const float *p = ctx;
    uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
    return p[i] != p[j] ? (p[i] < p[j] ? 1 : -1) : (i > j) - (i < j);
}

uint32_t fb_sampler_next(fb_sampler *s, const float *logits)
{
    uint32_t n = s->n_vocab, best = greedy(logits, n);
    if (s->temperature <= 0)
        return best;
    double total = 0;
    for (uint32_t i = 0; i < n; i++) {
        s->p[i] = (float)exp(((double)logits[i] - (double)logits[best]) / s->temperature);
        s->order[i] = i;
    }
    qsort_r(s->order, n, sizeof *s->order, by_probability, s->p);
    uint32_t kept = s->top_k && s->top_k < n ? s->top_k : n;
    for (uint32_t i = 0; i < kept; i++)
        total += s->p[s->order[i]];
    double reached = 0;
    uint32_t nucleus = 0;
    while (nucleus < kept && (nucleus == 0 || reached < s->top_p * total))
        reached += s->p[s->order[nucleus++]];
    double at = fb_random_uniform(&s->random) * reached;
    for (uint32_t i = 0; i + 1 < nucleus; i++)
        if ((at -= s->p[s->order[i]]) < 0)
            return s->order[i];
    return s->order[nucleus - 1];
}
