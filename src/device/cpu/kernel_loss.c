/* kernel_loss.c - cross entropy over rows of logits, and its gradient. */
#include <assert.h>

#include "device/cpu/cpu.h"
#include "device/cpu/vec.h"

/* Rows whose losses are added up at a time. */
enum { LOSS_ROWS = 4096 };

typedef struct loss_rows {
    const fb_cross_entropy *a;
    uint32_t first;
    float   *loss; /* of rows first.. */
} loss_rows;

/* A row stays in cache through its passes: the maximum, the sum of exponentials, the gradient.  The exponentials are
 * kept where the float32 gradient goes; a bfloat16 gradient has no room for them, so they are made twice. */
FB_VECTOR static void loss_task(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const loss_rows *l = ctx;
    const fb_cross_entropy *a = l->a;
    uint64_t row = l->first + task, v = a->v;
    const float *x = a->logits + row * v;
    uint32_t target = a->target[row];
    assert(target < v);

    float at_target = x[target], max = fb_row_max(x, v), sum;
    if (a->d_logits && a->act == FB_F32) {
        float *d = (float *)a->d_logits + row * v;
        sum = fb_row_exp(d, x, max, v);
        float scale = a->grad_scale / sum, probability = d[target] / sum;
        for (uint64_t i = 0; i < v; i++)
            d[i] *= scale;
        d[target] = (probability - 1.0f) * a->grad_scale;
    } else {
        sum = fb_row_exp_sum(x, max, v);
        if (a->d_logits) {
            uint16_t *restrict d = (uint16_t *)a->d_logits + row * v;
            float scale = a->grad_scale / sum, probability = fb_expf(at_target - max) / sum;
            for (uint64_t i = 0; i < v; i++)
                d[i] = fb_round_bf16(fb_expf(x[i] - max) * scale);
            d[target] = fb_round_bf16((probability - 1.0f) * a->grad_scale);
        }
    }
    l->loss[task] = (float)(log((double)sum) + ((double)max - (double)at_target));
}

void fb_cpu_cross_entropy(fb_cpu_scratch *s, const fb_cross_entropy *a)
{
    assert(a->v > 0);
    assert(a->act == FB_F32 || a->d_logits != (const void *)a->logits); /* half a row written, half to be read */
    float own[LOSS_ROWS];
    for (uint32_t first = 0; first < a->n;) {
        uint32_t rows = a->n - first < LOSS_ROWS ? a->n - first : LOSS_ROWS;
        loss_rows l = { .a = a, .first = first, .loss = a->loss ? a->loss + first : own };
        fb_team_run(s->team, rows, loss_task, &l);
        for (uint32_t i = 0; i < rows; i++)
            *a->loss_sum += (double)l.loss[i];
        first += rows;
    }
}
