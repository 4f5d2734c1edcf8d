/* kernel_norm.c - RMS norm over rows and its gradients. */
#include <assert.h>

#include "device/cpu/cpu.h"
#include "device/cpu/vec.h"

enum {
    NORM_ROWS = 16,     /* rows a task; in the backward at least so many */
    DW_COLUMNS = 256,
};

typedef struct norm_bwd {
    const fb_rms_norm_bwd *a;
    float    *partial;   /* [n_tile, C] */
    uint32_t  tile_rows, n_tile;
} norm_bwd;

FB_INLINE void norm_row(const fb_rms_norm *a, uint64_t t, fb_dtype act)
{
    const void *x = fb_at(a->x, act, t * a->c);
    const void *w = a->w;
    void *y = fb_at(a->y, act, t * a->c);
    uint64_t c = a->c, i = 0;
    float lane[FB_LANES] = { 0 };
    for (; i + FB_LANES <= c; i += FB_LANES)
        for (uint64_t j = 0; j < FB_LANES; j++)
            lane[j] += fb_get(x, act, i + j) * fb_get(x, act, i + j);
    for (uint64_t j = 0; i + j < c; j++)
        lane[j] += fb_get(x, act, i + j) * fb_get(x, act, i + j);

    float rstd = 1.0f / sqrtf(fb_lanes_sum(lane) / (float)c + a->eps);
    a->rstd[t] = rstd;
#pragma GCC ivdep
    for (i = 0; i < c; i++)
        fb_put(y, act, i, fb_round_to(act, fb_get(x, act, i) * rstd) * fb_get(w, act, i));
}

FB_VECTOR static void norm_task(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const fb_rms_norm *a = ctx;
    uint64_t first = task * NORM_ROWS, end = first + NORM_ROWS < a->t ? first + NORM_ROWS : a->t;
    for (uint64_t t = first; t < end; t++) {
        if (a->act == FB_F32)
            norm_row(a, t, FB_F32);
        else
            norm_row(a, t, FB_BF16);
    }
}

void fb_cpu_rms_norm(fb_cpu_scratch *s, const fb_rms_norm *a)
{
    fb_rms_norm args = *a;
    fb_team_run(s->team, (a->t + (uint64_t)NORM_ROWS - 1) / NORM_ROWS, norm_task, &args);
}

/* With u = dy * w and x^ = x * rstd:  dx = rstd * (u - x^ * mean(u * x^)),  dw += dy * x^. */
FB_INLINE void norm_bwd_row(const fb_rms_norm_bwd *a, uint64_t t, float *restrict dw, fb_dtype act)
{
    const void *x = fb_at(a->x, act, t * a->c), *dy = fb_at(a->dy, act, t * a->c);
    const void *w = a->w, *add = a->add ? fb_at(a->add, act, t * a->c) : NULL;
    void *dx = fb_at(a->dx, act, t * a->c);
    uint64_t c = a->c, i = 0;
    float lane[FB_LANES] = { 0 };
    for (; i + FB_LANES <= c; i += FB_LANES)
        for (uint64_t j = 0; j < FB_LANES; j++)
            lane[j] += fb_get(dy, act, i + j) * fb_get(w, act, i + j) * fb_get(x, act, i + j);
    for (uint64_t j = 0; i + j < c; j++)
        lane[j] += fb_get(dy, act, i + j) * fb_get(w, act, i + j) * fb_get(x, act, i + j);

    float rstd = a->rstd[t], mean = fb_lanes_sum(lane) * rstd / (float)c;
#pragma GCC ivdep
    for (i = 0; i < c; i++)
        dw[i] += fb_get(dy, act, i) * (fb_get(x, act, i) * rstd);
    if (add) {
#pragma GCC ivdep
        for (i = 0; i < c; i++) {
            float u = fb_get(dy, act, i) * fb_get(w, act, i), x_hat = fb_get(x, act, i) * rstd;
            fb_put(dx, act, i, fb_get(add, act, i) + rstd * (u - x_hat * mean));
        }
    } else {
#pragma GCC ivdep
        for (i = 0; i < c; i++) {
            float u = fb_get(dy, act, i) * fb_get(w, act, i), x_hat = fb_get(x, act, i) * rstd;
            fb_put(dx, act, i, rstd * (u - x_hat * mean));
        }
    }
}

FB_VECTOR static void norm_bwd_task(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const norm_bwd *n = ctx;
    const fb_rms_norm_bwd *a = n->a;
    float *dw = n->partial + task * a->c;
    uint64_t first = task * n->tile_rows, end = first + n->tile_rows < a->t ? first + n->tile_rows : a->t;
    memset(dw, 0, a->c * sizeof *dw);
    for (uint64_t t = first; t < end; t++) {
        if (a->act == FB_F32)
            norm_bwd_row(a, t, dw, FB_F32);
        else
            norm_bwd_row(a, t, dw, FB_BF16);
    }
}

/* The partial sums of DW_COLUMNS columns, in tile order. */
FB_VECTOR static void norm_dw_task(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const norm_bwd *n = ctx;
    const fb_rms_norm_bwd *a = n->a;
    uint64_t col = task * DW_COLUMNS, cols = a->c - col < DW_COLUMNS ? a->c - col : DW_COLUMNS;
    float sum[DW_COLUMNS] = { 0 };
    for (uint64_t tile = 0; tile < n->n_tile; tile++)
        for (uint64_t i = 0; i < cols; i++)
            sum[i] += n->partial[tile * a->c + col + i];
    for (uint64_t i = 0; i < cols; i++)
        a->dw[col + i] = a->accumulate ? a->dw[col + i] + sum[i] : sum[i];
}

/* dw crosses the rows that the tasks share.  Each tile of rows has a partial sum of its own, added up in tile order
 * afterwards.  They lie in the first worker's scratch, which every team has and no task uses otherwise; so the number
 * of tiles depends on T and C, never on the team. */
void fb_cpu_rms_norm_bwd(fb_cpu_scratch *s, const fb_rms_norm_bwd *a)
{
    uint64_t row_size = a->c * sizeof(float);
    assert(row_size > 0 && row_size <= FB_CPU_SCRATCH_SIZE);
    uint64_t n_tile_max = FB_CPU_SCRATCH_SIZE / row_size, tile_rows = (a->t + n_tile_max - 1) / n_tile_max;
    if (tile_rows < NORM_ROWS)
        tile_rows = NORM_ROWS;
    norm_bwd n = { .a = a, .partial = fb_cpu_scratch_of(s, 0), .tile_rows = (uint32_t)tile_rows,
                   .n_tile = (uint32_t)((a->t + tile_rows - 1) / tile_rows) };
    fb_team_run(s->team, n.n_tile, norm_bwd_task, &n);
    fb_team_run(s->team, (a->c + (uint64_t)DW_COLUMNS - 1) / DW_COLUMNS, norm_dw_task, &n);
}
