/* kernel_rows.c - moving rows by index, and the gradient of an embedding table. */
#include <assert.h>

#include "device/cpu/cpu.h"
#include "device/cpu/vec.h"

enum {
    ROWS_TASK = 16,       /* rows (of gather, scatter; ids of embed_grad) a task */
    EMBED_COLUMNS = 1024, /* summed at a time, in the task's frame */
};

static uint64_t row_tasks(uint32_t rows)
{
    return (rows + (uint64_t)ROWS_TASK - 1) / ROWS_TASK;
}

static uint64_t rows_end(uint64_t task, uint32_t rows)
{
    uint64_t end = (task + 1) * ROWS_TASK;
    return end < rows ? end : rows;
}

static void gather_task(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const fb_gather_rows *a = ctx;
    uint64_t row_size = a->c * fb_dtype_size(a->act);
    for (uint64_t i = task * ROWS_TASK; i < rows_end(task, a->n); i++)
        memcpy((char *)a->y + i * row_size, (const char *)a->x + a->index[i] * row_size, row_size);
}

void fb_cpu_gather_rows(fb_cpu_scratch *s, const fb_gather_rows *a)
{
    fb_gather_rows args = *a;
    fb_team_run(s->team, row_tasks(a->n), gather_task, &args);
}

static void zero_task(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const fb_scatter_rows *a = ctx;
    uint64_t row_size = a->c * fb_dtype_size(a->act), first = task * ROWS_TASK;
    memset((char *)a->y + first * row_size, 0, (rows_end(task, a->t) - first) * row_size);
}

static void scatter_task(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const fb_scatter_rows *a = ctx;
    uint64_t row_size = a->c * fb_dtype_size(a->act);
    for (uint64_t i = task * ROWS_TASK; i < rows_end(task, a->n); i++) {
        assert(a->index[i] < a->t);
        memcpy((char *)a->y + a->index[i] * row_size, (const char *)a->x + i * row_size, row_size);
    }
}

void fb_cpu_scatter_rows(fb_cpu_scratch *s, const fb_scatter_rows *a)
{
    fb_scatter_rows args = *a;
    fb_team_run(s->team, row_tasks(a->t), zero_task, &args);
    fb_team_run(s->team, row_tasks(a->n), scatter_task, &args);
}

FB_INLINE void embed_row(const fb_embed_grad *a, uint64_t u, fb_dtype act)
{
    float *table = a->d_table + (uint64_t)a->id[u] * a->c;
    for (uint32_t col = 0; col < a->c; col += EMBED_COLUMNS) {
        uint32_t cols = a->c - col < EMBED_COLUMNS ? a->c - col : EMBED_COLUMNS;
        float sum[EMBED_COLUMNS];
        memset(sum, 0, cols * sizeof *sum);
        for (uint32_t k = a->start[u]; k < a->start[u + 1]; k++) {
            const void *dx = fb_at(a->dx, act, (uint64_t)a->order[k] * a->c + col);
            for (uint64_t i = 0; i < cols; i++)
                sum[i] += fb_get(dx, act, i);
        }
#pragma GCC ivdep
        for (uint64_t i = 0; i < cols; i++)
            table[col + i] += sum[i];
    }
}

FB_VECTOR static void embed_task(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const fb_embed_grad *a = ctx;
    for (uint64_t u = task * ROWS_TASK; u < rows_end(task, a->n_unique); u++) {
        if (a->act == FB_F32)
            embed_row(a, u, FB_F32);
        else
            embed_row(a, u, FB_BF16);
    }
}

void fb_cpu_embed_grad(fb_cpu_scratch *s, const fb_embed_grad *a)
{
    fb_embed_grad args = *a;
    fb_team_run(s->team, row_tasks(a->n_unique), embed_task, &args);
}
