/* kernel_matmul.c - the three products of a linear layer, and the gradient of its bias.
 *
 * All three are C[rows,cols] = A B, summed over `depth`, with either operand stored transposed.  C is cut into tiles by
 * its shape alone; the team shares the tiles, and each is one single-threaded sgemm (or several in sequence, below), so
 * the number of threads changes no bit.  sgemm packs its operands at every call: tiles are as large as they may be while
 * leaving enough of them for a team.
 * Element (r,c) is summed over depth in an order that the shapes fix, from row r of A and column c of B alone: rows do
 * not see one another.
 *
 * float32 operands are read in place.  bfloat16 operands are widened into the worker's scratch, a piece of depth at a
 * time, and sgemm adds the pieces up in float32. */
#include <assert.h>
#include <cblas.h>

#include "device/cpu/cpu.h"
#include "device/cpu/vec.h"

enum {
    TILE_DIM_MAX = 1536,
    TILE_AREA_MAX = 1 << 19,     /* elements: 2 MiB of float */
    TILE_DIM_MIN = 64,
    TILE_COUNT = 8,              /* no further cuts once there are so many tiles */
    DEPTH_STEP = 64,
    BIAS_COLUMNS = 64, BIAS_ROWS = 64,
};
static_assert(TILE_AREA_MAX * sizeof(float) < FB_CPU_SCRATCH_SIZE, "the sum of a tile has no room");
static_assert((uint64_t)FB_CPU_SCRATCH_SIZE - TILE_AREA_MAX * sizeof(float)
              >= 2ull * TILE_DIM_MAX * DEPTH_STEP * sizeof(float), "no room for one step of widened operands");

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

void fb_cpu_blas_init(void)
{
    scipy_openblas_set_num_threads(1);
}

static uint32_t ceil_div(uint32_t n, uint32_t d)
{
    return n / d + (n % d != 0);
}

/* An n-th of size, rounded up to whole vectors of the matrix kernels. */
static uint32_t piece(uint32_t size, uint32_t n)
{
    uint32_t p = ceil_div(size, n);
    p = (p + 15) / 16 * 16;
    return p < size ? p : size;
}

static uint64_t product_cut(product *p)
{
    uint32_t row_cuts = 1, col_cuts = 1;
    for (;;) {
        p->tile_rows = piece(p->rows, row_cuts);
        p->tile_cols = piece(p->cols, col_cuts);
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

static void sgemm(uint32_t rows, uint32_t cols, uint32_t depth, const float *a, uint64_t a_ld, bool a_transposed,
                  const float *b, uint64_t b_ld, bool b_transposed, bool add, float *c, uint64_t c_ld)
{
    scipy_cblas_sgemm(CblasRowMajor, a_transposed ? CblasTrans : CblasNoTrans, b_transposed ? CblasTrans : CblasNoTrans,
                      (blasint)rows, (blasint)cols, (blasint)depth, 1.0f, a, (blasint)a_ld, b, (blasint)b_ld,
                      add ? 1.0f : 0.0f, c, (blasint)c_ld);
}

/* The stored rectangle of o that holds `outer` of its rows (A) or columns (B) from first, and `depth` steps from d. */
FB_VECTOR static const float *widen(const operand *o, bool depth_outside, uint32_t first, uint32_t outer, uint32_t d,
                                    uint32_t depth, float *dst, uint64_t *ld)
{
    uint32_t n_row = depth_outside ? depth : outer, n_col = depth_outside ? outer : depth;
    uint32_t row = depth_outside ? d : first, col = depth_outside ? first : d;
    for (uint32_t i = 0; i < n_row; i++)
        fb_row_load(dst + (uint64_t)i * n_col, fb_at(o->base, FB_BF16, (row + (uint64_t)i) * o->ld + col), FB_BF16, n_col);
    *ld = n_col;
    return dst;
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
            for (uint32_t c = 0; c < cols; c++)
                fb_put(y, y_dtype, c, from[c] + fb_get(bias, act, c) + fb_get(add, act, c));
        } else if (bias) {
#pragma GCC ivdep
            for (uint32_t c = 0; c < cols; c++)
                fb_put(y, y_dtype, c, from[c] + fb_get(bias, act, c));
        } else if (add) {
#pragma GCC ivdep
            for (uint32_t c = 0; c < cols; c++)
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
    float *scratch = fb_cpu_scratch_of(p->s, worker);

    /* The sum is made in place when nothing is left to do to it. */
    bool in_place = p->y_dtype == FB_F32 && !p->bias && !p->add;
    float *sum = in_place ? (float *)p->y + row * p->y_ld + col : scratch;
    uint64_t sum_ld = in_place ? p->y_ld : cols;

    if (p->act == FB_F32) {
        const float *a = (const float *)p->a.base + (p->a.transposed ? row : row * p->a.ld);
        const float *b = (const float *)p->b.base + (p->b.transposed ? col * p->b.ld : col);
        sgemm(rows, cols, p->depth, a, p->a.ld, p->a.transposed, b, p->b.ld, p->b.transposed, p->accumulate, sum, sum_ld);
    } else {
        /* From the full tile, not from what the last one has: each row is cut the same way wherever it lies. */
        float *room = scratch + (uint64_t)p->tile_rows * p->tile_cols;
        uint64_t n_room = FB_CPU_SCRATCH_SIZE / sizeof(float) - (uint64_t)p->tile_rows * p->tile_cols;
        uint64_t step = n_room / ((uint64_t)p->tile_rows + p->tile_cols) / DEPTH_STEP * DEPTH_STEP;
        for (uint64_t d = 0; d < p->depth; d += step) {
            uint32_t depth = (uint32_t)(p->depth - d < step ? p->depth - d : step);
            uint64_t a_ld, b_ld;
            const float *a = widen(&p->a, p->a.transposed, row, rows, (uint32_t)d, depth, room, &a_ld);
            const float *b = widen(&p->b, !p->b.transposed, col, cols, (uint32_t)d, depth, room + (uint64_t)rows * depth, &b_ld);
            sgemm(rows, cols, depth, a, a_ld, p->a.transposed, b, b_ld, p->b.transposed, p->accumulate || d > 0, sum, sum_ld);
        }
    }
    if (!in_place)
        tile_store(p, row, col, rows, cols, sum);
}

static void product_run(product *p)
{
    if (p->rows == 0 || p->cols == 0)
        return;
    assert(p->depth > 0);
    assert(p->rows <= INT32_MAX && p->cols <= INT32_MAX && p->depth <= INT32_MAX); /* OpenBLAS counts in int */
    assert(p->a.ld <= INT32_MAX && p->b.ld <= INT32_MAX && p->y_ld <= INT32_MAX);
    fb_team_run(p->s->team, product_cut(p), product_tile, p);
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
            for (uint32_t c = 0; c < cols; c++)
                part[c] += fb_get(dy, act, c);
        }
        for (uint32_t c = 0; c < cols; c++)
            total[c] += part[c];
    }
    for (uint32_t c = 0; c < cols; c++)
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
