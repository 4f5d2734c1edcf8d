/* kernel_swiglu.c - the gated activation of the MLP: silu(gate) * up, and its gradient. */
#include "device/cpu/cpu.h"
#include "device/cpu/vec.h"

/* A task is a run of whole rows, about this many elements. */
enum { SWIGLU_TASK_SIZE = 1 << 14 };

typedef struct swiglu_rows {
    const void *args;
    uint64_t rows;
} swiglu_rows;

FB_INLINE void swiglu_row(const fb_swiglu *a, uint64_t t, fb_dtype act)
{
    const void *gate = fb_at(a->gu, act, t * 2 * a->f), *up = fb_at(gate, act, a->f);
    void *y = fb_at(a->y, act, t * a->f);
    uint64_t f = a->f;
#pragma GCC ivdep
    for (uint64_t i = 0; i < f; i++) {
        float g = fb_get(gate, act, i);
        fb_put(y, act, i, fb_round_to(act, g / (1.0f + fb_expf(-g))) * fb_get(up, act, i));
    }
}

FB_VECTOR static void swiglu_task(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const swiglu_rows *s = ctx;
    const fb_swiglu *a = s->args;
    uint64_t first = task * s->rows, end = first + s->rows < a->t ? first + s->rows : a->t;
    for (uint64_t t = first; t < end; t++) {
        if (a->act == FB_F32)
            swiglu_row(a, t, FB_F32);
        else
            swiglu_row(a, t, FB_BF16);
    }
}

/* With s = sigmoid(g):  dgate = dy * up * s * (1 + g * (1 - s)),  dup = dy * g * s.
 * s and 1 - s both come from e^-|g|, so that neither cancels nor overflows. */
FB_INLINE void swiglu_bwd_row(const fb_swiglu_bwd *a, uint64_t t, fb_dtype act)
{
    const void *gate = fb_at(a->gu, act, t * 2 * a->f), *up = fb_at(gate, act, a->f);
    const void *dy = fb_at(a->dy, act, t * a->f);
    void *dgate = fb_at(a->dgu, act, t * 2 * a->f), *dup = fb_at(dgate, act, a->f);
    uint64_t f = a->f;
#pragma GCC ivdep
    for (uint64_t i = 0; i < f; i++) {
        float g = fb_get(gate, act, i), d = fb_get(dy, act, i);
        float e = fb_expf(-fabsf(g)), large = 1.0f / (1.0f + e), small = e * large;
        float sig = g < 0.0f ? small : large, rest = g < 0.0f ? large : small;
        fb_put(dgate, act, i, d * fb_get(up, act, i) * (sig * (1.0f + g * rest)));
        fb_put(dup, act, i, d * (g * sig));
    }
}

FB_VECTOR static void swiglu_bwd_task(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const swiglu_rows *s = ctx;
    const fb_swiglu_bwd *a = s->args;
    uint64_t first = task * s->rows, end = first + s->rows < a->t ? first + s->rows : a->t;
    for (uint64_t t = first; t < end; t++) {
        if (a->act == FB_F32)
            swiglu_bwd_row(a, t, FB_F32);
        else
            swiglu_bwd_row(a, t, FB_BF16);
    }
}

static void swiglu_run(fb_cpu_scratch *s, fb_task fn, const void *args, uint64_t t, uint64_t f)
{
    swiglu_rows r = { .args = args, .rows = f < SWIGLU_TASK_SIZE ? SWIGLU_TASK_SIZE / (f + !f) : 1 };
    fb_team_run(s->team, (t + r.rows - 1) / r.rows, fn, &r);
}

void fb_cpu_swiglu(fb_cpu_scratch *s, const fb_swiglu *a)
{
    swiglu_run(s, swiglu_task, a, a->t, a->f);
}

void fb_cpu_swiglu_bwd(fb_cpu_scratch *s, const fb_swiglu_bwd *a)
{
    swiglu_run(s, swiglu_bwd_task, a, a->t, a->f);
}
