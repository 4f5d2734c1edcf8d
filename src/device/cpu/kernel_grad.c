/* kernel_grad.c - a finished gradient: rounded once into the dtype that travels, and its share of the squared norm. */
#include <assert.h>

#include "device/cpu/cpu.h"
#include "device/cpu/vec.h"

enum {
    GRAD_TILE = 1 << 16, /* elements: what the header promises */
    GRAD_STEP = 1024,    /* rounded, then squared, while in the first-level cache */
    SQ_LANES = 32,
};

typedef struct grad_tiles {
    const fb_grad_out *a;
    double *sq; /* one a tile */
} grad_tiles;

/* The norm is that of the rounded values: they are what the optimizer sees. */
FB_INLINE double grad_tile(const fb_grad_out *a, uint64_t first, uint64_t n, fb_dtype out)
{
    double lane[SQ_LANES] = { 0 };
    for (uint64_t i = 0; i < n; i += GRAD_STEP) {
        uint64_t steps = n - i < GRAD_STEP ? n - i : GRAD_STEP, k = 0;
        float widened[GRAD_STEP], unsaved[GRAD_STEP];
        void *to = a->out ? fb_at(a->out, out, first + i) : unsaved;
        fb_row_store(to, out, a->acc + first + i, steps);
        const float *v = fb_row_view(to, out, steps, widened);
        for (; k + SQ_LANES <= steps; k += SQ_LANES)
            for (uint64_t j = 0; j < SQ_LANES; j++)
                lane[j] += (double)v[k + j] * (double)v[k + j];
        for (uint64_t j = 0; k + j < steps; j++)
            lane[j] += (double)v[k + j] * (double)v[k + j];
    }
    for (int half = SQ_LANES / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++)
            lane[j] += lane[j + half];
    return lane[0];
}

FB_VECTOR static void grad_task(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const grad_tiles *g = ctx;
    const fb_grad_out *a = g->a;
    uint64_t first = task * GRAD_TILE, n = a->n - first < GRAD_TILE ? a->n - first : GRAD_TILE;
    g->sq[task] = a->out_dtype == FB_F32 ? grad_tile(a, first, n, FB_F32) : grad_tile(a, first, n, FB_BF16);
}

/* The tiles' sums lie in the first worker's scratch, which every team has: room for 2^36 elements. */
void fb_cpu_grad_out(fb_cpu_scratch *s, const fb_grad_out *a)
{
    uint64_t n_tile = a->n / GRAD_TILE + (a->n % GRAD_TILE != 0);
    assert(n_tile <= FB_CPU_SCRATCH_SIZE / sizeof(double));
    grad_tiles g = { .a = a, .sq = fb_cpu_scratch_of(s, 0) };
    fb_team_run(s->team, n_tile, grad_task, &g);
    double sum = a->accumulate ? *a->sq : 0; /* one after the other: where a gradient is cut changes no bit */
    for (uint64_t i = 0; i < n_tile; i++)
        sum += g.sq[i];
    *a->sq = sum;
}
