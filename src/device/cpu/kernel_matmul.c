/* kernel_matmul.c - the three products of a linear layer, and the gradient of its bias.
 *
 * All three are C[rows,cols] = A B, summed over `depth`, with either operand stored transposed.  C is cut into tiles by
 * its shape alone; the team shares the tiles, and each is one single-threaded product (or several in sequence, below),
 * so the number of threads changes no bit.  Operands are packed once a tile: tiles are as large as they may be while
 * there are enough of them for a team.
 * Element (r,c) is summed over depth in an order that the shapes fix, from row r of A and column c of B alone: rows do
 * not see one another.
 *
 * float32 operands are read in place.  bfloat16 operands are widened into the worker's scratch, a piece of depth at a
 * time, and the pieces are added up in float32. */
#include <assert.h>

#include "device/cpu/cpu.h"
#include "device/cpu/sgemm.h"
#include "device/cpu/vec.h"

enum {
    TILE_DIM_MAX = 1536,
    TILE_AREA_MAX = 1 << 19,     /* elements: 2 MiB of float */
    TILE_DIM_MIN = 64,
    TILE_COUNT = 8,              /* no further cuts once there are so many tiles */
    DEPTH_STEP = 64,             /* pieces of depth are multiples of it */
    BIAS_COLUMNS = 64, BIAS_ROWS = 64,
};

/* A matrix as stored: [rows, depth] for A and [depth, cols] for B, or transposed. */
typedef struct operand {
    const void *base;
    uint64_t    ld;
    bool        transposed;
} operand;

typedef struct product {
    fb_cpu_scratch *s;
    fb_dtype act, y_dtype;
    uint32_t rows, cols, depth;
    operand  a, b;
    const void *bias, *add; /* act; NULL: none */
    uint64_t add_ld;
    void    *y;
    uint64_t y_ld;
    bool     accumulate;    /* float32 y only */
    uint32_t tile_rows, tile_cols, n_tile_cols;
} product;

static uint32_t ceil_div(uint32_t n, uint32_t d)
{
    return n / d + (n % d != 0);
}

/* An n-th of size, rounded up to a multiple of step. */
static uint32_t piece(uint32_t size, uint32_t n, uint32_t step)
{
    uint64_t p = (uint64_t)ceil_div(ceil_div(size, n), step) * step;
    return p < size ? (uint32_t)p : size;
}

static uint64_t product_cut(product *p)
{
    uint32_t row_cuts = 1, col_cuts = 1;
    for (;;) {
        p->tile_rows = piece(p->rows, row_cuts, FB_SGEMM_ROWS);
        p->tile_cols = piece(p->cols, col_cuts, FB_SGEMM_COLS);
        bool fits = p->tile_rows <= TILE_DIM_MAX && p->tile_cols <= TILE_DIM_MAX
                    && (uint64_t)p->tile_rows * p->tile_cols <= TILE_AREA_MAX;
        bool enough = (uint64_t)row_cuts * col_cuts >= TILE_COUNT;
        bool can_rows = p->tile_rows >= 2 * TILE_DIM_MIN, can_cols = p->tile_cols >= 2 * TILE_DIM_MIN;
        if (fits && (enough || !(can_rows || can_cols)))
            break;
        if (can_rows && (p->tile_rows >= p->tile_cols || !can_cols))
            row_cuts *= 2;
        else
            col_cuts *= 2;
    }
    p->n_tile_cols = ceil_div(p->cols, p->tile_cols);
    return (uint64_t)ceil_div(p->rows, p->tile_rows) * p->n_tile_cols;
}

/* Part of an operand as float32: `outer` of its rows (A) or columns (B) from first, `depth` steps from d.  In place or
 * widened into room, always less than room's n_outer * n_depth floats. */
FB_VECTOR static fb_sgemm_operand part(const operand *o, fb_dtype act, bool depth_outside, uint32_t first, uint32_t outer,
                                       uint64_t d, uint32_t depth, float *room)
{
    uint64_t row = depth_outside ? d : first, col = depth_outside ? first : d, at = row * o->ld + col;
    if (act == FB_F32)
        return (fb_sgemm_operand){ (const float *)o->base + at, o->ld, o->transposed };
    uint32_t n_row = depth_outside ? depth : outer, n_col = depth_outside ? outer : depth;
    for (uint64_t i = 0; i < n_row; i++)
        fb_row_load(room + i * n_col, fb_at(o->base, act, at + i * o->ld), act, n_col);
    return (fb_sgemm_operand){ room, n_col, o->transposed };
}

/* y = sum + bias + add, in this order, rounded once. */
FB_INLINE void tile_store_as(const product *p, uint32_t row, uint32_t col, uint32_t rows, uint32_t cols,
                             const float *sum, fb_dtype act, fb_dtype y_dtype)
{
    const void *bias = p->bias ? fb_at(p->bias, act, col) : NULL;
    for (uint32_t r = 0; r < rows; r++) {
        const float *restrict from = sum + (uint64_t)r * cols;
        const void *add = p->add ? fb_at(p->add, act, (row + (uint64_t)r) * p->add_ld + col) : NULL;
        void *y = fb_at(p->y, y_dtype, (row + (uint64_t)r) * p->y_ld + col);
        if (bias && add) {
#pragma GCC ivdep
            for (uint64_t c = 0; c < cols; c++)
                fb_put(y, y_dtype, c, from[c] + fb_get(bias, act, c) + fb_get(add, act, c));
        } else if (bias) {
#pragma GCC ivdep
            for (uint64_t c = 0; c < cols; c++)
                fb_put(y, y_dtype, c, from[c] + fb_get(bias, act, c));
        } else if (add) {
#pragma GCC ivdep
            for (uint64_t c = 0; c < cols; c++)
                fb_put(y, y_dtype, c, from[c] + fb_get(add, act, c));
        } else {
            fb_row_store(y, y_dtype, from, cols);
        }
    }
}

FB_VECTOR static void tile_store(const product *p, uint32_t row, uint32_t col, uint32_t rows, uint32_t cols,
                                 const float *sum)
{
    if (p->act == FB_F32)
        tile_store_as(p, row, col, rows, cols, sum, FB_F32, FB_F32);
    else if (p->y_dtype == FB_F32)
        tile_store_as(p, row, col, rows, cols, sum, FB_BF16, FB_F32);
    else
        tile_store_as(p, row, col, rows, cols, sum, FB_BF16, FB_BF16);
}

static void product_tile(void *ctx, uint64_t task, uint32_t worker)
{
    const product *p = ctx;
    uint32_t row = (uint32_t)(task / p->n_tile_cols) * p->tile_rows, col = (uint32_t)(task % p->n_tile_cols) * p->tile_cols;
    uint32_t rows = p->rows - row < p->tile_rows ? p->rows - row : p->tile_rows;
    uint32_t cols = p->cols - col < p->tile_cols ? p->cols - col : p->tile_cols;

    /* Scratch: room for packing, the tile's sum, widened operands.  The sum is made in place when nothing is left to do
     * to it.  Sizes are those of a full tile, so that depth is cut the same way in all. */
    float *room = fb_cpu_scratch_of(p->s, worker), *own_sum = room + fb_sgemm_room(p->tile_rows, p->tile_cols);
    float *wide = own_sum + (uint64_t)p->tile_rows * p->tile_cols;
    bool in_place = p->y_dtype == FB_F32 && !p->bias && !p->add;
    float *sum = in_place ? (float *)p->y + row * p->y_ld + col : own_sum;
    uint64_t sum_ld = in_place ? p->y_ld : cols;

    uint64_t step = p->depth;
    if (p->act != FB_F32) {
        uint64_t n_wide = FB_CPU_SCRATCH_SIZE / sizeof(float) - (uint64_t)(wide - room);
        step = n_wide / ((uint64_t)p->tile_rows + p->tile_cols) / DEPTH_STEP * DEPTH_STEP;
    }
    for (uint64_t d = 0; d < p->depth; d += step) {
        uint32_t depth = (uint32_t)(p->depth - d < step ? p->depth - d : step);
        fb_sgemm_operand a = part(&p->a, p->act, p->a.transposed, row, rows, d, depth, wide);
        fb_sgemm_operand b = part(&p->b, p->act, !p->b.transposed, col, cols, d, depth, wide + (uint64_t)rows * depth);
        fb_sgemm(rows, cols, depth, a, b, p->accumulate || d > 0, sum, sum_ld, room);
    }
    if (!in_place)
        tile_store(p, row, col, rows, cols, sum);
}

static void product_run(product *p)
{
    if (p->rows == 0 || p->cols == 0)
        return;
    assert(p->depth > 0);
    uint64_t n_tile = product_cut(p);
    uint64_t n_float = fb_sgemm_room(p->tile_rows, p->tile_cols) + (uint64_t)p->tile_rows * p->tile_cols
                       + DEPTH_STEP * ((uint64_t)p->tile_rows + p->tile_cols);
    assert(n_float <= FB_CPU_SCRATCH_SIZE / sizeof(float)); /* the limits on a tile see to it */
    fb_team_run(p->s->team, n_tile, product_tile, p);
}

void fb_cpu_matmul_nt(fb_cpu_scratch *s, const fb_matmul_nt *a)
{
    assert(a->act == FB_BF16 || a->y_dtype == FB_F32);
    product_run(&(product){ .s = s, .act = a->act, .y_dtype = a->y_dtype, .rows = a->m, .cols = a->n, .depth = a->k,
                            .a = { a->x, a->x_ld, false }, .b = { a->w, a->w_ld, true },
                            .bias = a->bias, .add = a->add, .add_ld = a->add_ld, .y = a->y, .y_ld = a->y_ld });
}

void fb_cpu_matmul_nn(fb_cpu_scratch *s, const fb_matmul_nn *a)
{
    product_run(&(product){ .s = s, .act = a->act, .y_dtype = a->act, .rows = a->m, .cols = a->k, .depth = a->n,
                            .a = { a->dy, a->dy_ld, false }, .b = { a->w, a->w_ld, false },
                            .y = a->dx, .y_ld = a->dx_ld });
}

void fb_cpu_matmul_tn(fb_cpu_scratch *s, const fb_matmul_tn *a)
{
    product_run(&(product){ .s = s, .act = a->act, .y_dtype = FB_F32, .rows = a->n, .cols = a->k, .depth = a->m,
                            .a = { a->dy, a->dy_ld, true }, .b = { a->x, a->x_ld, false },
                            .y = a->dw, .y_ld = a->k, .accumulate = a->accumulate });
}

/* One task sums BIAS_COLUMNS columns: BIAS_ROWS rows into a partial sum, the partial sums one after the other. */
FB_INLINE void bias_columns(const fb_bias_grad *a, uint32_t col, uint32_t cols, fb_dtype act)
{
    float total[BIAS_COLUMNS] = { 0 };
    for (uint32_t first = 0; first < a->m; first += BIAS_ROWS) {
        float part[BIAS_COLUMNS] = { 0 };
        uint32_t rows = a->m - first < BIAS_ROWS ? a->m - first : BIAS_ROWS;
        for (uint32_t r = 0; r < rows; r++) {
            const void *dy = fb_at(a->dy, act, (first + (uint64_t)r) * a->dy_ld + col);
            for (uint64_t c = 0; c < cols; c++)
                part[c] += fb_get(dy, act, c);
        }
        for (uint64_t c = 0; c < cols; c++)
            total[c] += part[c];
    }
    for (uint64_t c = 0; c < cols; c++)
        a->db[col + c] = a->accumulate ? a->db[col + c] + total[c] : total[c];
}

FB_VECTOR static void bias_task(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const fb_bias_grad *a = ctx;
    uint32_t col = (uint32_t)task * BIAS_COLUMNS, cols = a->n - col < BIAS_COLUMNS ? a->n - col : BIAS_COLUMNS;
    /* The full width as a constant: the sums then stay in registers. */
    if (a->act == FB_F32 && cols == BIAS_COLUMNS)
        bias_columns(a, col, BIAS_COLUMNS, FB_F32);
    else if (a->act == FB_F32)
        bias_columns(a, col, cols, FB_F32);
    else if (cols == BIAS_COLUMNS)
        bias_columns(a, col, BIAS_COLUMNS, FB_BF16);
    else
        bias_columns(a, col, cols, FB_BF16);
}

void fb_cpu_bias_grad(fb_cpu_scratch *s, const fb_bias_grad *a)
{
    fb_bias_grad args = *a;
    fb_team_run(s->team, ceil_div(a->n, BIAS_COLUMNS), bias_task, &args);
}
