/* test_kernels_dense.c - the CPU back end's kernels for everything but attention and rope.
 *
 * Oracles: the equations of device/kernels.h in double; finite differences in double for gradients.  In float32 an
 * element may err by the bound that rounding analysis gives for any order of summation (Higham 2002, ch. 3: a sum of k
 * products by k * 2^-24 times the sum of magnitudes).  In bfloat16 the error against exact arithmetic on exact inputs
 * may be twice what rounding inputs and result alone already costs.
 * Every output is poisoned with NaN before, and what lies between rows must survive. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device/cpu/cpu.h"
#include "device/cpu/sgemm.h"
#include "device/cpu/vec.h"

enum { N_TEAM = 3 };
static const uint32_t team_size[N_TEAM] = { 1, 2, 5 };
static fb_cpu_scratch team[N_TEAM];

static int teams_open(void **state)
{
    (void)state;
    fb_cpu_blas_init();
    for (int i = 0; i < N_TEAM; i++) {
        if (fb_team_new(&team[i].team, team_size[i], "test", NULL))
            return -1;
        team[i].base = aligned_alloc(64, (uint64_t)team_size[i] * FB_CPU_SCRATCH_SIZE);
        memset(team[i].base, 0xff, (uint64_t)team_size[i] * FB_CPU_SCRATCH_SIZE);
    }
    return 0;
}

static int teams_close(void **state)
{
    (void)state;
    for (int i = 0; i < N_TEAM; i++) {
        fb_team_free(team[i].team);
        free(team[i].base);
    }
    return 0;
}

/* Uniform in [-1, 1). */
static double rnd(void)
{
    static uint64_t state = 42;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int32_t)(state >> 32) * 0x1p-31;
}

static double rounded(fb_dtype t, double v)
{
    return t == FB_F32 ? (double)(float)v : (double)fb_bf16_f32(fb_f32_bf16((float)v));
}

/* ---- matrices ---- */

typedef struct mat {
    fb_dtype type;
    uint32_t rows, cols;
    uint64_t ld;
    void    *data;   /* rows * ld elements */
    double  *exact;  /* rows * cols: the values before they were rounded to bfloat16 */
    double  *stored; /* rows * cols: after */
} mat;

static double mat_get(const mat *m, uint32_t r, uint32_t c)
{
    return fb_get(m->data, m->type, r * m->ld + c);
}

static uint64_t mat_size(const mat *m)
{
    return m->rows * m->ld * fb_dtype_size(m->type);
}

static void mat_poison(mat *m)
{
    memset(m->data, 0xff, mat_size(m)); /* NaN in either type */
}

static mat mat_new(fb_dtype type, uint32_t rows, uint32_t cols, uint32_t pad)
{
    mat m = { .type = type, .rows = rows, .cols = cols, .ld = (uint64_t)cols + pad };
    m.data = malloc(mat_size(&m));
    m.exact = malloc((uint64_t)rows * cols * sizeof *m.exact);
    m.stored = malloc((uint64_t)rows * cols * sizeof *m.stored);
    assert_true(m.data && m.exact && m.stored);
    mat_poison(&m);
    return m;
}

static void mat_set(mat *m, uint32_t r, uint32_t c, double v)
{
    uint64_t i = (uint64_t)r * m->cols + c;
    m->exact[i] = (float)v;
    m->stored[i] = rounded(m->type, v);
    fb_put(m->data, m->type, r * m->ld + c, (float)v);
}

static mat mat_random(fb_dtype type, uint32_t rows, uint32_t cols, uint32_t pad, double scale)
{
    mat m = mat_new(type, rows, cols, pad);
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t c = 0; c < cols; c++)
            mat_set(&m, r, c, scale * rnd());
    return m;
}

static void mat_free(mat *m)
{
    free(m->data), free(m->exact), free(m->stored);
}

static double *doubles(uint64_t n)
{
    double *d = calloc(n, sizeof *d);
    assert_non_null(d);
    return d;
}

/* Runs `call` with each team on a fresh copy of out; all copies must agree to the bit.  s names the team in call. */
#define RUN_ON_ALL_TEAMS(out, call)                                   \
    do {                                                              \
        void *before_ = malloc(mat_size(out)), *first_ = malloc(mat_size(out)); \
        memcpy(before_, (out)->data, mat_size(out));                  \
        for (int team_ = 0; team_ < N_TEAM; team_++) {                \
            fb_cpu_scratch *s = &team[team_];                         \
            memcpy((out)->data, before_, mat_size(out));              \
            call;                                                     \
            if (team_ == 0)                                           \
                memcpy(first_, (out)->data, mat_size(out));           \
            assert_memory_equal(first_, (out)->data, mat_size(out));  \
        }                                                             \
        free(before_), free(first_);                                  \
    } while (0)

/* exact: the result of exact inputs; stored: of the inputs as the kernel sees them; bound: see the top, NULL for
 * bfloat16 results. */
static void mat_check(const mat *got, const double *exact, const double *stored, const double *bound)
{
    double error = 0, naive = 0;
    for (uint32_t r = 0; r < got->rows; r++) {
        for (uint32_t c = 0; c < got->cols; c++) {
            uint64_t i = (uint64_t)r * got->cols + c;
            double v = mat_get(got, r, c);
            if (bound && !(fabs(v - stored[i]) <= bound[i]))
                fail_msg("[%u,%u] is %.9g, expected %.9g within %.3g", r, c, v, stored[i], bound[i]);
            error += (v - exact[i]) * (v - exact[i]);
            naive += (rounded(got->type, stored[i]) - exact[i]) * (rounded(got->type, stored[i]) - exact[i]);
        }
        for (uint64_t c = got->cols; c < got->ld; c++)
            assert_true(isnan(fb_get(got->data, got->type, r * got->ld + c)));
    }
    if (!bound && !(error <= 4 * naive)) /* squares */
        fail_msg("error %.3g, naive rounding has %.3g", sqrt(error), sqrt(naive));
}

/* ---- matmul ---- */

/* c[m,n] = sum over k of a(i,k) b(k,j); strides in elements.  magnitude (or NULL) gets the sum of |a b|. */
static void ref_product(double *c, double *magnitude, const double *a, uint64_t a_i, uint64_t a_k, const double *b, uint64_t b_k,
                        uint64_t b_j, uint32_t m, uint32_t n, uint32_t k)
{
    for (uint32_t i = 0; i < m; i++)
        for (uint32_t j = 0; j < n; j++) {
            double sum = 0, size = 0;
            for (uint32_t l = 0; l < k; l++) {
                double p = a[i * a_i + l * a_k] * b[l * b_k + j * b_j];
                sum += p;
                size += fabs(p);
            }
            c[(uint64_t)i * n + j] = sum;
            if (magnitude)
                magnitude[(uint64_t)i * n + j] = size;
        }
}

static const struct { uint32_t m, n, k; } matmul_shape[] = {
    { 1, 1, 1 }, { 1, 300, 70 }, { 3, 5, 7 }, { 65, 131, 97 }, { 129, 640, 33 }, { 300, 190, 211 },
    { 17, 20, 9000 },    /* float32 sums of many steps */
    { 127, 16, 15000 }, /* bfloat16: more depth than fits in scratch */
};

static void nt_case(fb_dtype act, fb_dtype y_dtype, uint32_t m, uint32_t n, uint32_t k, bool with_bias, bool with_add,
                    bool add_is_y)
{
    uint64_t size = (uint64_t)m * n;
    mat x = mat_random(act, m, k, 3, 1), w = mat_random(act, n, k, 5, 1), bias = mat_random(act, 1, n, 0, 4);
    mat add = mat_random(act, m, n, 2, 4), y = mat_new(y_dtype, m, n, 7);
    double *exact = doubles(size), *stored = doubles(size), *bound = doubles(size);
    ref_product(exact, NULL, x.exact, k, 1, w.exact, 1, k, m, n, k);
    ref_product(stored, bound, x.stored, k, 1, w.stored, 1, k, m, n, k);
    for (uint64_t i = 0; i < size; i++) {
        double e = (with_bias ? bias.exact[i % n] : 0) + (with_add ? add.exact[i] : 0);
        double t = (with_bias ? bias.stored[i % n] : 0) + (with_add ? add.stored[i] : 0);
        exact[i] += e;
        stored[i] += t;
        bound[i] = (k + 2) * 0x1p-24 * (bound[i] + 8);
    }
    mat *out = add_is_y ? &add : &y;
    fb_matmul_nt a = { .act = act, .y_dtype = y_dtype, .m = m, .n = n, .k = k, .x = x.data, .x_ld = x.ld, .w = w.data,
                       .w_ld = w.ld, .bias = with_bias ? bias.data : NULL, .add = with_add ? add.data : NULL,
                       .add_ld = add.ld, .y = out->data, .y_ld = out->ld };
    RUN_ON_ALL_TEAMS(out, fb_cpu_matmul_nt(s, &a));
    mat_check(out, exact, stored, y_dtype == FB_F32 ? bound : NULL);
    mat_free(&x), mat_free(&w), mat_free(&bias), mat_free(&add), mat_free(&y);
    free(exact), free(stored), free(bound);
}

/* Both products behind the kernels, whichever of them this processor would choose. */
static void sgemm_is_the_equation(void **state)
{
    (void)state;
    static const struct { uint32_t rows, cols, depth; } shape[] = {
        { 1, 1, 1 }, { 13, 15, 17 }, { 14, 32, 384 }, { 15, 33, 385 }, { 29, 48, 769 }, { 70, 81, 40 },
    };
    for (size_t i = 0; i < 8 * FB_COUNT(shape); i++) {
        uint32_t m = shape[i / 8].rows, n = shape[i / 8].cols, k = shape[i / 8].depth;
        bool a_transposed = i & 1, b_transposed = i & 2, add = i & 4;
        uint64_t size = (uint64_t)m * n;
        mat a = mat_random(FB_F32, a_transposed ? k : m, a_transposed ? m : k, 3, 1);
        mat b = mat_random(FB_F32, b_transposed ? n : k, b_transposed ? k : n, 2, 1);
        double *want = doubles(size), *bound = doubles(size);
        ref_product(want, bound, a.stored, a_transposed ? 1 : k, a_transposed ? m : 1, b.stored, b_transposed ? 1 : n,
                    b_transposed ? k : 1, m, n, k);
        mat start = mat_random(FB_F32, m, n, 5, 4);
        for (uint64_t j = 0; j < size; j++) {
            want[j] += add ? start.stored[j] : 0;
            bound[j] = (k + 1) * 0x1p-24 * (bound[j] + 4);
        }
        float *room = aligned_alloc(64, fb_sgemm_room(m, n) * sizeof *room);
        for (int own = 0; own < 1 + fb_sgemm_avx512_runs_here(); own++) {
            mat c = mat_new(FB_F32, m, n, 5);
            if (add)
                memcpy(c.data, start.data, mat_size(&c));
            fb_sgemm_operand x = { a.data, a.ld, a_transposed }, y = { b.data, b.ld, b_transposed };
            if (own)
                fb_sgemm_avx512(m, n, k, x, y, add, c.data, c.ld, room);
            else
                fb_sgemm_openblas(m, n, k, x, y, add, c.data, c.ld);
            mat_check(&c, want, want, bound);
            mat_free(&c);
        }
        mat_free(&a), mat_free(&b), mat_free(&start);
        free(want), free(bound), free(room);
    }
}

static void matmul_nt_is_the_equation(void **state)
{
    (void)state;
    for (size_t i = 0; i < FB_COUNT(matmul_shape); i++) {
        uint32_t m = matmul_shape[i].m, n = matmul_shape[i].n, k = matmul_shape[i].k;
        nt_case(FB_F32, FB_F32, m, n, k, i % 2, i / 2 % 2, false);
        nt_case(FB_BF16, FB_BF16, m, n, k, i / 2 % 2, i % 2, false);
    }
    for (int bias = 0; bias < 2; bias++)
        for (int add = 0; add < 3; add++) {
            nt_case(FB_F32, FB_F32, 70, 90, 40, bias, add > 0, add == 2);
            nt_case(FB_BF16, FB_BF16, 70, 90, 40, bias, add > 0, add == 2);
            nt_case(FB_BF16, FB_F32, 70, 90, 40, bias, add == 1, false);
        }
}

static void matmul_nn_is_the_equation(void **state)
{
    (void)state;
    for (size_t i = 0; i < 2 * FB_COUNT(matmul_shape); i++) {
        fb_dtype act = i % 2 ? FB_BF16 : FB_F32;
        uint32_t m = matmul_shape[i / 2].m, n = matmul_shape[i / 2].k, k = matmul_shape[i / 2].n;
        uint64_t size = (uint64_t)m * k;
        mat dy = mat_random(act, m, n, 1, 1), w = mat_random(act, n, k, 4, 1), dx = mat_new(act, m, k, 3);
        double *exact = doubles(size), *stored = doubles(size), *bound = doubles(size);
        ref_product(exact, NULL, dy.exact, n, 1, w.exact, k, 1, m, k, n);
        ref_product(stored, bound, dy.stored, n, 1, w.stored, k, 1, m, k, n);
        for (uint64_t j = 0; j < size; j++)
            bound[j] *= n * 0x1p-24;
        fb_matmul_nn a = { .act = act, .m = m, .n = n, .k = k, .dy = dy.data, .dy_ld = dy.ld, .w = w.data, .w_ld = w.ld,
                           .dx = dx.data, .dx_ld = dx.ld };
        RUN_ON_ALL_TEAMS(&dx, fb_cpu_matmul_nn(s, &a));
        mat_check(&dx, exact, stored, act == FB_F32 ? bound : NULL);
        mat_free(&dy), mat_free(&w), mat_free(&dx);
        free(exact), free(stored), free(bound);
    }
}

static void matmul_tn_is_the_equation(void **state)
{
    (void)state;
    for (size_t i = 0; i < 4 * FB_COUNT(matmul_shape); i++) {
        fb_dtype act = i % 2 ? FB_BF16 : FB_F32;
        bool accumulate = i / 2 % 2;
        uint32_t m = matmul_shape[i / 4].k, n = matmul_shape[i / 4].m, k = matmul_shape[i / 4].n;
        uint64_t size = (uint64_t)n * k;
        mat dy = mat_random(act, m, n, 1, 1), x = mat_random(act, m, k, 4, 1);
        mat dw = accumulate ? mat_random(FB_F32, n, k, 0, 4) : mat_new(FB_F32, n, k, 0);
        double *stored = doubles(size), *bound = doubles(size);
        ref_product(stored, bound, dy.stored, 1, n, x.stored, k, 1, n, k, m);
        for (uint64_t j = 0; j < size; j++) {
            stored[j] += accumulate ? dw.stored[j] : 0;
            bound[j] = (m + 1) * 0x1p-24 * (bound[j] + 4);
        }
        fb_matmul_tn a = { .act = act, .m = m, .n = n, .k = k, .dy = dy.data, .dy_ld = dy.ld, .x = x.data, .x_ld = x.ld,
                           .dw = dw.data, .accumulate = accumulate };
        RUN_ON_ALL_TEAMS(&dw, fb_cpu_matmul_tn(s, &a));
        mat_check(&dw, stored, stored, bound);
        mat_free(&dy), mat_free(&x), mat_free(&dw);
        free(stored), free(bound);
    }
}

/* Packed documents must not see one another: with every other row replaced, some by NaN, a row keeps its bits. */
static void a_row_depends_on_no_other_row(void **state)
{
    (void)state;
    enum { M = 531, N = 601, K = 413, ROW = 263 };
    for (int i = 0; i < 4; i++) {
        fb_dtype act = i % 2 ? FB_BF16 : FB_F32;
        bool nn = i / 2;
        uint32_t cols = nn ? K : N, depth = nn ? N : K;
        mat x = mat_random(act, M, depth, 0, 1), w = mat_random(act, N, K, 0, 1), y = mat_new(act, M, cols, 0);
        uint64_t row_size = y.ld * fb_dtype_size(act);
        unsigned char *row = (unsigned char *)y.data + ROW * row_size, *before = malloc(row_size);
        fb_matmul_nt nt = { .act = act, .y_dtype = act, .m = M, .n = N, .k = K, .x = x.data, .x_ld = depth, .w = w.data,
                            .w_ld = K, .y = y.data, .y_ld = cols };
        fb_matmul_nn n_n = { .act = act, .m = M, .n = N, .k = K, .dy = x.data, .dy_ld = depth, .w = w.data, .w_ld = K,
                             .dx = y.data, .dx_ld = cols };
        for (int pass = 0; pass < 2; pass++) {
            if (nn)
                fb_cpu_matmul_nn(&team[1], &n_n);
            else
                fb_cpu_matmul_nt(&team[1], &nt);
            if (pass == 0)
                memcpy(before, row, row_size);
            for (uint32_t r = 0; r < M; r++)
                for (uint32_t c = 0; c < depth && r != ROW; c++)
                    mat_set(&x, r, c, r % 3 == 1 ? (double)NAN : 100 * rnd());
        }
        assert_memory_equal(before, row, row_size);
        mat_free(&x), mat_free(&w), mat_free(&y);
        free(before);
    }
}

static void bias_grad_sums_columns(void **state)
{
    (void)state;
    static const struct { uint32_t m, n; } shape[] = { { 1, 1 }, { 1, 130 }, { 200, 64 }, { 333, 67 } };
    for (size_t i = 0; i < 4 * FB_COUNT(shape); i++) {
        fb_dtype act = i % 2 ? FB_BF16 : FB_F32;
        bool accumulate = i / 2 % 2;
        uint32_t m = shape[i / 4].m, n = shape[i / 4].n;
        mat dy = mat_random(act, m, n, 3, 1), db = accumulate ? mat_random(FB_F32, 1, n, 0, 4) : mat_new(FB_F32, 1, n, 0);
        double *want = doubles(n), *bound = doubles(n);
        for (uint32_t c = 0; c < n; c++) {
            want[c] = accumulate ? db.stored[c] : 0;
            bound[c] = (m + 1) * 0x1p-24 * (fabs(want[c]) + m);
            for (uint32_t r = 0; r < m; r++)
                want[c] += dy.stored[r * n + c];
        }
        fb_bias_grad a = { .act = act, .m = m, .n = n, .dy = dy.data, .dy_ld = dy.ld, .db = db.data, .accumulate = accumulate };
        RUN_ON_ALL_TEAMS(&db, fb_cpu_bias_grad(s, &a));
        mat_check(&db, want, want, bound);
        mat_free(&dy), mat_free(&db);
        free(want), free(bound);
    }
}

/* ---- rms norm ---- */

static const struct { uint32_t t, c; } norm_shape[] = { { 1, 1 }, { 1, 576 }, { 17, 63 }, { 40, 64 }, { 33, 301 } };

static void ref_norm(double *y, double *rstd, const double *x, const double *w, uint32_t t, uint32_t c, double eps)
{
    for (uint32_t r = 0; r < t; r++) {
        double sq = 0;
        for (uint32_t i = 0; i < c; i++)
            sq += x[r * c + i] * x[r * c + i];
        rstd[r] = 1 / sqrt(sq / c + eps);
        for (uint32_t i = 0; i < c; i++)
            y[r * c + i] = x[r * c + i] * rstd[r] * w[i];
    }
}

static void rms_norm_is_the_equation(void **state)
{
    (void)state;
    for (size_t i = 0; i < 2 * FB_COUNT(norm_shape); i++) {
        fb_dtype act = i % 2 ? FB_BF16 : FB_F32;
        uint32_t t = norm_shape[i / 2].t, c = norm_shape[i / 2].c;
        double eps = 1e-5;
        mat x = mat_random(act, t, c, 0, 3), w = mat_random(act, 1, c, 0, 2), y = mat_new(act, t, c, 0),
            rstd = mat_new(FB_F32, t, 1, 0);
        double *exact = doubles(t * c), *stored = doubles(t * c), *bound = doubles(t * c), *want_rstd = doubles(t);
        ref_norm(exact, want_rstd, x.exact, w.exact, t, c, eps);
        ref_norm(stored, want_rstd, x.stored, w.stored, t, c, eps);
        for (uint32_t j = 0; j < t * c; j++)
            bound[j] = fabs(stored[j]) * (c / 2 + 6) * 0x1p-24;
        fb_rms_norm a = { .act = act, .t = t, .c = c, .eps = (float)eps, .x = x.data, .w = w.data, .y = y.data, .rstd = rstd.data };
        RUN_ON_ALL_TEAMS(&y, fb_cpu_rms_norm(s, &a));
        mat_check(&y, exact, stored, act == FB_F32 ? bound : NULL);
        for (uint32_t r = 0; r < t; r++)
            bound[r] = want_rstd[r] * (c / 2 + 4) * 0x1p-24;
        mat_check(&rstd, want_rstd, want_rstd, bound);
        mat_free(&x), mat_free(&w), mat_free(&y), mat_free(&rstd);
        free(exact), free(stored), free(bound), free(want_rstd);
    }
}

/* transformers: hidden_states.to(bfloat16) comes before weight *.  x = (1, 1 + 2^-7), rstd = 1 up to float32 rounding of
 * the mean, so both roundings can be followed by hand. */
static void rms_norm_rounds_twice_in_bf16(void **state)
{
    (void)state;
    enum { COLS = 2 };
    uint16_t x[COLS] = { fb_f32_bf16(1.0f), fb_f32_bf16(1.0f + 0x1p-7f) },
        w[COLS] = { fb_f32_bf16(1.0f + 0x1p-7f), fb_f32_bf16(1.5f) };
    uint16_t y[COLS];
    float rstd;
    fb_rms_norm a = { .act = FB_BF16, .t = 1, .c = COLS, .eps = 0, .x = x, .w = w, .y = y, .rstd = &rstd };
    fb_cpu_rms_norm(&team[0], &a);
    bool differs_from_one_rounding = false;
    for (int i = 0; i < COLS; i++) {
        float once = fb_bf16_f32(x[i]) * rstd, weight = fb_bf16_f32(w[i]);
        assert_int_equal(y[i], fb_f32_bf16(fb_bf16_f32(fb_f32_bf16(once)) * weight));
        differs_from_one_rounding |= y[i] != fb_f32_bf16(once * weight);
    }
    assert_true(differs_from_one_rounding);
}

static double norm_objective(const double *x, const double *w, const double *dy, uint32_t t, uint32_t c, double eps)
{
    double *y = doubles(t * c), *rstd = doubles(t), sum = 0;
    ref_norm(y, rstd, x, w, t, c, eps);
    for (uint32_t i = 0; i < t * c; i++)
        sum += y[i] * dy[i];
    free(y), free(rstd);
    return sum;
}

/* df/dv by central differences, v one of the objective's arguments; the error is of order h^2 = 1e-10. */
#define DIFFERENCE(v, f) (keep = (v), (v) = keep + 1e-5, up = (f), (v) = keep - 1e-5, down = (f), (v) = keep, (up - down) / 2e-5)

static void rms_norm_bwd_case(fb_dtype act, uint32_t t, uint32_t c, bool with_add, bool add_is_dx, bool accumulate)
{
    double eps = 1e-5, keep, up, down;
    mat x = mat_random(act, t, c, 0, 3), w = mat_random(act, 1, c, 0, 2), dy = mat_random(act, t, c, 0, 1);
    mat add = mat_random(act, t, c, 0, 1), dx = mat_new(act, t, c, 0), rstd = mat_new(FB_F32, t, 1, 0);
    mat dw = accumulate ? mat_random(FB_F32, 1, c, 0, 1) : mat_new(FB_F32, 1, c, 0);
    double *y = doubles(t * c), *r = doubles(t), *exact = doubles(t * c), *stored = doubles(t * c), *bound = doubles(t * c);
    double *want_dw = doubles(c), *bound_dw = doubles(c);
    ref_norm(y, r, x.stored, w.stored, t, c, eps);
    for (uint32_t i = 0; i < t; i++)
        mat_set(&rstd, i, 0, r[i]);
    for (uint32_t i = 0; i < t * c; i++) {
        exact[i] = DIFFERENCE(x.exact[i], norm_objective(x.exact, w.exact, dy.exact, t, c, eps)) + (with_add ? add.exact[i] : 0);
        stored[i] = DIFFERENCE(x.stored[i], norm_objective(x.stored, w.stored, dy.stored, t, c, eps))
            + (with_add ? add.stored[i] : 0);
        /* rstd * u and rstd * x^ * mean(u x^) are each at most rstd * 2 * c in size, rounded a few times; add is at most 1 */
        bound[i] = (c + 10) * 0x1p-24 * (4 * r[i / c] + 1) + 1e-8;
    }
    for (uint32_t i = 0; i < c; i++) {
        want_dw[i] = DIFFERENCE(w.stored[i], norm_objective(x.stored, w.stored, dy.stored, t, c, eps))
            + (accumulate ? dw.stored[i] : 0);
        bound_dw[i] = (t + 4) * 0x1p-24 * (sqrt(c) * t + 1) + 1e-8; /* |x^| <= sqrt(C) */
    }
    mat *out = add_is_dx ? &add : &dx;
    fb_rms_norm_bwd a = { .act = act, .t = t, .c = c, .x = x.data, .w = w.data, .dy = dy.data, .rstd = rstd.data,
                          .add = with_add ? add.data : NULL, .dx = out->data, .dw = dw.data, .accumulate = accumulate };
    mat dw_before = mat_new(FB_F32, 1, c, 0);
    memcpy(dw_before.data, dw.data, mat_size(&dw));
    RUN_ON_ALL_TEAMS(out, (memcpy(dw.data, dw_before.data, mat_size(&dw)), fb_cpu_rms_norm_bwd(s, &a)));
    mat_check(out, exact, stored, act == FB_F32 ? bound : NULL);
    mat_check(&dw, want_dw, want_dw, bound_dw);
    mat_free(&x), mat_free(&w), mat_free(&dy), mat_free(&add), mat_free(&dx), mat_free(&rstd), mat_free(&dw), mat_free(&dw_before);
    free(y), free(r), free(exact), free(stored), free(bound), free(want_dw), free(bound_dw);
}

static void rms_norm_bwd_is_the_difference_quotient(void **state)
{
    (void)state;
    for (int act = 0; act < 2; act++)
        for (int add = 0; add < 3; add++) {
            rms_norm_bwd_case(act ? FB_BF16 : FB_F32, 37, 21, add > 0, add == 2, add != 1);
            rms_norm_bwd_case(act ? FB_BF16 : FB_F32, 3, 131, add > 0, add == 2, add == 1);
            rms_norm_bwd_case(act ? FB_BF16 : FB_F32, 1, 65, add > 0, add == 2, false);
        }
}

/* Wide rows and many of them: the partial sums of dw must share what scratch one worker has. */
static void rms_norm_bwd_dw_has_the_same_bits_on_any_team(void **state)
{
    (void)state;
    enum { ROWS = 300, COLS = 120000 };
    mat x = mat_random(FB_BF16, 1, COLS, 0, 1), dw = mat_new(FB_F32, 1, COLS, 0);
    float *rstd = malloc(ROWS * sizeof *rstd);
    uint16_t *rows = malloc((size_t)ROWS * COLS * sizeof *rows), *dx = malloc((size_t)ROWS * COLS * sizeof *dx);
    for (uint32_t r = 0; r < ROWS; r++) {
        rstd[r] = 1.0f + (float)r / ROWS;
        memcpy(rows + (size_t)r * COLS, x.data, COLS * sizeof *rows);
    }
    fb_rms_norm_bwd a = { .act = FB_BF16, .t = ROWS, .c = COLS, .x = rows, .w = x.data, .dy = rows, .rstd = rstd, .dx = dx,
                          .dw = dw.data };
    RUN_ON_ALL_TEAMS(&dw, fb_cpu_rms_norm_bwd(s, &a));
    double sum_rstd = ROWS + (ROWS - 1) / 2.0;
    for (uint32_t c = 0; c < COLS; c += 997) {
        double want = x.stored[c] * x.stored[c] * sum_rstd;
        assert_true(fabs(mat_get(&dw, 0, c) - want) <= (ROWS + 2) * 0x1p-24 * want);
    }
    mat_free(&x), mat_free(&dw);
    free(rstd), free(rows), free(dx);
}

/* ---- swiglu ---- */

static double silu(double x)
{
    return x / (1 + exp(-x));
}

static void ref_swiglu(double *y, const double *gu, uint32_t t, uint32_t f)
{
    for (uint32_t i = 0; i < t * f; i++)
        y[i] = silu(gu[i / f * 2 * f + i % f]) * gu[i / f * 2 * f + f + i % f];
}

static const struct { uint32_t t, f; } swiglu_shape[] = { { 1, 1 }, { 1, 20000 }, { 7, 65 }, { 50, 1000 } };

static void swiglu_is_the_equation(void **state)
{
    (void)state;
    for (size_t i = 0; i < 2 * FB_COUNT(swiglu_shape); i++) {
        fb_dtype act = i % 2 ? FB_BF16 : FB_F32;
        uint32_t t = swiglu_shape[i / 2].t, f = swiglu_shape[i / 2].f;
        mat gu = mat_random(act, t, 2 * f, 0, 12), y = mat_new(act, t, f, 0);
        double *exact = doubles(t * f), *stored = doubles(t * f), *bound = doubles(t * f);
        ref_swiglu(exact, gu.exact, t, f);
        ref_swiglu(stored, gu.stored, t, f);
        for (uint32_t j = 0; j < t * f; j++)
            bound[j] = 8 * 0x1p-24 * fabs(stored[j]);
        fb_swiglu a = { .act = act, .t = t, .f = f, .gu = gu.data, .y = y.data };
        RUN_ON_ALL_TEAMS(&y, fb_cpu_swiglu(s, &a));
        mat_check(&y, exact, stored, act == FB_F32 ? bound : NULL);
        mat_free(&gu), mat_free(&y);
        free(exact), free(stored), free(bound);
    }
}

static void swiglu_bwd_is_the_difference_quotient(void **state)
{
    (void)state;
    for (size_t i = 0; i < 2 * FB_COUNT(swiglu_shape); i++) {
        fb_dtype act = i % 2 ? FB_BF16 : FB_F32;
        uint32_t t = swiglu_shape[i / 2].t, f = swiglu_shape[i / 2].f, n = t * 2 * f;
        mat gu = mat_random(act, t, 2 * f, 0, 12), dy = mat_random(act, t, f, 0, 1), dgu = mat_new(act, t, 2 * f, 0);
        double *exact = doubles(n), *stored = doubles(n), *bound = doubles(n);
        for (uint32_t r = 0; r < t; r++)
            for (uint32_t j = 0; j < f; j++) {
                uint32_t g = r * 2 * f + j, u = g + f, y = r * f + j;
                for (int pass = 0; pass < 2; pass++) {
                    const double *in = pass ? gu.stored : gu.exact, d = pass ? dy.stored[y] : dy.exact[y];
                    double *out = pass ? stored : exact;
                    out[g] = d * in[u] * (silu(in[g] + 1e-5) - silu(in[g] - 1e-5)) / 2e-5;
                    out[u] = d * silu(in[g]);
                }
                /* the quotient itself errs by 1e-10 + 12 * 2^-53 / 1e-5, times u */
                bound[g] = 16 * 0x1p-24 * fabs(dy.stored[y] * gu.stored[u]) + 1e-8;
                bound[u] = 8 * 0x1p-24 * fabs(stored[u]);
            }
        fb_swiglu_bwd a = { .act = act, .t = t, .f = f, .gu = gu.data, .dy = dy.data, .dgu = dgu.data };
        RUN_ON_ALL_TEAMS(&dgu, fb_cpu_swiglu_bwd(s, &a));
        mat_check(&dgu, exact, stored, act == FB_F32 ? bound : NULL);
        mat_free(&gu), mat_free(&dy), mat_free(&dgu);
        free(exact), free(stored), free(bound);
    }
}

/* Where e^-x overflows, silu is 0 or x, its slope 0 or 1, and nothing is NaN. */
static void swiglu_saturates(void **state)
{
    (void)state;
    const float gu[2 * 4] = { -500, 500, -89, 0, 2, 2, 2, 2 }, dy[4] = { 1, 1, 1, 1 };
    float y[4], dgu[8];
    fb_cpu_swiglu(&team[0], &(fb_swiglu){ .act = FB_F32, .t = 1, .f = 4, .gu = gu, .y = y });
    fb_cpu_swiglu_bwd(&team[0], &(fb_swiglu_bwd){ .act = FB_F32, .t = 1, .f = 4, .gu = gu, .dy = dy, .dgu = dgu });
    const float want_y[4] = { 0, 1000, 0, 0 }, want_dgu[8] = { 0, 2, 0, 1, 0, 500, 0, 0 };
    for (int i = 0; i < 4; i++)
        assert_true(fabsf(y[i] - want_y[i]) < 1e-35f);
    for (int i = 0; i < 8; i++)
        assert_true(fabsf(dgu[i] - want_dgu[i]) < 1e-35f);
}

/* ---- rows ---- */

static void gather_and_scatter_are_inverse(void **state)
{
    (void)state;
    enum { ROWS = 83, COLS = 31, N = 57 };
    for (int i = 0; i < 2; i++) {
        fb_dtype act = i ? FB_BF16 : FB_F32;
        uint32_t index[N];
        for (uint32_t j = 0; j < N; j++)
            index[j] = j * 29 % ROWS; /* distinct: 83 is a prime */
        mat x = mat_random(act, ROWS, COLS, 0, 1), y = mat_new(act, N, COLS, 0), z = mat_new(act, ROWS, COLS, 0);
        RUN_ON_ALL_TEAMS(&y, fb_cpu_gather_rows(s, &(fb_gather_rows){ .act = act, .n = N, .c = COLS, .x = x.data, .index = index,
                                                                      .y = y.data }));
        RUN_ON_ALL_TEAMS(&z, fb_cpu_scatter_rows(s, &(fb_scatter_rows){ .act = act, .n = N, .t = ROWS, .c = COLS, .x = y.data,
                                                                        .index = index, .y = z.data }));
        bool hit[ROWS] = { false };
        for (uint32_t j = 0; j < N; j++) {
            hit[index[j]] = true;
            for (uint32_t c = 0; c < COLS; c++)
                assert_true(mat_get(&y, j, c) == x.stored[index[j] * COLS + c]);
        }
        for (uint32_t r = 0; r < ROWS; r++)
            for (uint32_t c = 0; c < COLS; c++)
                assert_true(mat_get(&z, r, c) == (hit[r] ? x.stored[r * COLS + c] : 0));
        mat_free(&x), mat_free(&y), mat_free(&z);
    }
}

static void embed_grad_sums_repeated_ids(void **state)
{
    (void)state;
    enum { ROWS = 90, COLS = 1100, VOCAB = 50, UNIQUE = 23 };
    for (int i = 0; i < 2; i++) {
        fb_dtype act = i ? FB_BF16 : FB_F32;
        /* row t has id t * t mod 47: the squares modulo a prime repeat, 1 + 46 / 2 of them */
        uint32_t id[UNIQUE + 1], start[UNIQUE + 2], order[ROWS], n = 0, used = 0;
        for (uint32_t v = 0; v < VOCAB; v++) {
            uint32_t first = used;
            for (uint32_t t = 0; t < ROWS; t++)
                if (t * t % 47 == v)
                    order[used++] = t;
            if (used > first) {
                id[n] = v;
                start[n++] = first;
            }
        }
        start[n] = used;
        assert_int_equal(n, UNIQUE + 1);
        assert_int_equal(used, ROWS);
        mat dx = mat_random(act, ROWS, COLS, 0, 1), table = mat_random(FB_F32, VOCAB, COLS, 0, 1);
        double *want = doubles(VOCAB * COLS), *bound = doubles(VOCAB * COLS);
        memcpy(want, table.stored, VOCAB * COLS * sizeof *want);
        for (uint32_t t = 0; t < ROWS; t++)
            for (uint32_t c = 0; c < COLS; c++) {
                want[t * t % 47 * COLS + c] += dx.stored[t * COLS + c];
                bound[t * t % 47 * COLS + c] = 8 * 8 * 0x1p-24; /* an id's rows here, and itself: fewer than 8, each below 1 */
            }
        fb_embed_grad a = { .act = act, .c = COLS, .n_unique = n, .dx = dx.data, .id = id, .start = start, .order = order,
                            .d_table = table.data };
        RUN_ON_ALL_TEAMS(&table, fb_cpu_embed_grad(s, &a));
        mat_check(&table, want, want, bound); /* rows without tokens: to the bit */
        mat_free(&dx), mat_free(&table);
        free(want), free(bound);
    }
}

/* ---- cross entropy ---- */

static double ref_loss(const double *x, uint32_t v, uint32_t target)
{
    double max = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < v; i++)
        max = x[i] > max ? x[i] : max;
    for (uint32_t i = 0; i < v; i++)
        sum += exp(x[i] - max);
    return log(sum) + max - x[target];
}

static const struct { uint32_t n, v; } loss_shape[] = { { 1, 1 }, { 1, 4099 }, { 13, 64 }, { 21, 333 } };

static void cross_entropy_case(fb_dtype act, bool in_place, uint32_t n, uint32_t v)
{
    mat logits = mat_random(FB_F32, n, v, 0, 20), d = mat_new(act, n, v, 0), loss = mat_new(FB_F32, n, 1, 0),
        sum = mat_new(FB_F32, 1, 2, 0);
    double *want = doubles(n), *bound = doubles(n), *want_d = doubles((uint64_t)n * v), *bound_d = doubles((uint64_t)n * v);
    uint32_t *target = calloc(n, sizeof *target);
    double scale = 0.125, want_sum = 1000, keep, up, down;
    for (uint32_t r = 0; r < n; r++) {
        double *x = logits.stored + (uint64_t)r * v;
        target[r] = (r * 131 + v - 1) % v;
        want[r] = ref_loss(x, v, target[r]);
        bound[r] = 16 * 0x1p-24 * fmax(1, want[r]);
        want_sum += want[r];
        for (uint32_t i = 0; i < v; i++) {
            want_d[(uint64_t)r * v + i] = scale * DIFFERENCE(x[i], ref_loss(x, v, target[r]));
            /* x - max is exact to 40 * 2^-24, which e^ turns into a relative error */
            bound_d[(uint64_t)r * v + i] = scale * (60 * 0x1p-24 + 1e-8);
        }
    }
    *(double *)sum.data = 1000;
    fb_cross_entropy a = { .act = act, .n = n, .v = v, .logits = logits.data, .target = target, .grad_scale = (float)scale,
                           .d_logits = NULL, .loss_sum = sum.data, .loss = loss.data };
    RUN_ON_ALL_TEAMS(&loss, fb_cpu_cross_entropy(s, (*(double *)sum.data = 1000, &a)));
    mat_check(&loss, want, want, bound);
    assert_true(fabs(*(double *)sum.data - want_sum) <= n * 16 * 0x1p-24 * (want_sum - 1000 + n));

    double loss_alone = *(double *)sum.data;
    mat *out = in_place ? &logits : &d;
    a.d_logits = out->data;
    a.loss = NULL;
    RUN_ON_ALL_TEAMS(out, fb_cpu_cross_entropy(s, (*(double *)sum.data = 1000, &a)));
    assert_true(*(double *)sum.data == loss_alone);
    mat_check(out, want_d, want_d, act == FB_F32 ? bound_d : NULL);
    mat_free(&logits), mat_free(&d), mat_free(&loss), mat_free(&sum);
    free(want), free(bound), free(want_d), free(bound_d), free(target);
}

static void cross_entropy_is_the_difference_quotient(void **state)
{
    (void)state;
    for (size_t i = 0; i < FB_COUNT(loss_shape); i++) {
        cross_entropy_case(FB_F32, false, loss_shape[i].n, loss_shape[i].v);
        cross_entropy_case(FB_F32, true, loss_shape[i].n, loss_shape[i].v);
        cross_entropy_case(FB_BF16, false, loss_shape[i].n, loss_shape[i].v);
    }
    cross_entropy_case(FB_F32, true, 4100, 3); /* more rows than are added up at a time */
}

/* Huge logits are no problem, -inf is a forbidden token, and what is not finite must show in the loss. */
static void cross_entropy_extremes(void **state)
{
    (void)state;
    const uint32_t target[4] = { 0, 1, 0, 0 };
    float logits[4 * 3] = { 3e38f, -3e38f, 0, -INFINITY, 5, 5, 1, NAN, 2, 1, INFINITY, 2 }, loss[4], d[4 * 3];
    double sum = 0;
    fb_cpu_cross_entropy(&team[0],
                         &(fb_cross_entropy){ .act = FB_F32, .n = 4, .v = 3, .logits = logits, .target = target, .grad_scale = 1,
                                                        .d_logits = d, .loss_sum = &sum, .loss = loss });
    assert_true(loss[0] == 0 && d[0] == 0 && d[1] == 0 && d[2] == 0);
    assert_true(fabs(loss[1] - log(2)) < 1e-7 && d[3] == 0 && d[4] == -0.5f && d[5] == 0.5f);
    assert_true(isnan(loss[2]) && isnan(loss[3]) && isnan(sum));
}

/* ---- grad_out ---- */

static void grad_out_rounds_and_sums_squares(void **state)
{
    (void)state;
    static const uint32_t size[] = { 1, 33, 65536, 65537, 300001 };
    for (size_t i = 0; i < FB_COUNT(size); i++)
        for (int act = 0; act < 2; act++) {
            fb_dtype type = act ? FB_BF16 : FB_F32;
            uint32_t n = size[i];
            mat acc = mat_random(FB_F32, 1, n, 0, 1), out = mat_new(type, 1, n, 0);
            double want = 0, sq[N_TEAM] = { 7, 7, 7 };
            for (uint32_t j = 0; j < n; j++)
                want += rounded(type, acc.stored[j]) * rounded(type, acc.stored[j]);
            for (int t = 0; t < N_TEAM; t++) {
                fb_grad_out a = { .out_dtype = type, .n = n, .acc = acc.data, .out = out.data, .sq = &sq[t], .accumulate = false };
                mat_poison(&out);
                fb_cpu_grad_out(&team[t], &a);
                for (uint32_t j = 0; j < n; j++)
                    assert_true(mat_get(&out, 0, j) == rounded(type, acc.stored[j]));
                assert_true(fabs(sq[t] - want) <= n * 0x1p-53 * want);
                assert_true(sq[t] == sq[0]);
            }
            double once = sq[0];
            fb_grad_out again = { .out_dtype = FB_F32, .n = n, .acc = acc.data, .out = acc.data, .sq = &sq[0], .accumulate = true };
            fb_cpu_grad_out(&team[1], &again);
            for (uint32_t j = 0; j < n; j++)
                assert_true(mat_get(&acc, 0, j) == acc.stored[j]);
            if (type == FB_F32)
                assert_true(fabs(sq[0] - 2 * once) <= n * 0x1p-52 * once);
            /* Cut at the end of any tile, a gradient has the norm of the whole, to the bit. */
            for (uint32_t cut = 65536; cut < n && type == FB_F32; cut += 65536) {
                double pieces;
                fb_cpu_grad_out(&team[1],
                                &(fb_grad_out){ .out_dtype = FB_F32, .n = cut, .acc = acc.data, .out = acc.data, .sq = &pieces });
                fb_cpu_grad_out(&team[1], &(fb_grad_out){ .out_dtype = FB_F32, .n = n - cut, .acc = (float *)acc.data + cut,
                    .out = (float *)acc.data + cut, .sq = &pieces, .accumulate = true });
                assert_true(pieces == once);
            }
            mat_free(&acc), mat_free(&out);
        }
}

/* ---- vec.h ---- */

static void expf_is_within_an_ulp(void **state)
{
    (void)state;
    float before = 0;
    for (uint32_t i = 0; i <= 1760000; i++) {
        float x = -87.3f + (float)i * 1e-4f, y = fb_expf(x);
        double want = exp((double)x), ulp = (double)nextafterf((float)want, INFINITY) - (double)(float)want;
        assert_true(fabs(y - want) <= ulp);
        assert_true(y >= before);
        before = y;
    }
    assert_true(fb_expf(0) == 1 && fb_expf(-INFINITY) == 0 && fb_expf(-1e30f) == 0 && fb_expf(-88) == 0);
    assert_true(fb_expf(INFINITY) == INFINITY && fb_expf(1e30f) == INFINITY && isnan(fb_expf(NAN)));
}

static void round_bf16_agrees_with_dtype_h(void **state)
{
    (void)state;
    for (uint64_t u = 0; u <= UINT32_MAX; u += 4099) {
        float f = fb_bits_f32((uint32_t)u);
        assert_int_equal(fb_round_bf16(f), fb_f32_bf16(f));
    }
    assert_int_equal(fb_round_bf16(fb_bits_f32(0x7f800001u)), 0x7fc0);
    assert_int_equal(fb_round_bf16(fb_bits_f32(0x3f808000u)), 0x3f80);
    assert_int_equal(fb_round_bf16(fb_bits_f32(0x3f818000u)), 0x3f82);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sgemm_is_the_equation),
        cmocka_unit_test(matmul_nt_is_the_equation),
        cmocka_unit_test(matmul_nn_is_the_equation),
        cmocka_unit_test(matmul_tn_is_the_equation),
        cmocka_unit_test(a_row_depends_on_no_other_row),
        cmocka_unit_test(bias_grad_sums_columns),
        cmocka_unit_test(rms_norm_is_the_equation),
        cmocka_unit_test(rms_norm_rounds_twice_in_bf16),
        cmocka_unit_test(rms_norm_bwd_is_the_difference_quotient),
        cmocka_unit_test(rms_norm_bwd_dw_has_the_same_bits_on_any_team),
        cmocka_unit_test(swiglu_is_the_equation),
        cmocka_unit_test(swiglu_bwd_is_the_difference_quotient),
        cmocka_unit_test(swiglu_saturates),
        cmocka_unit_test(gather_and_scatter_are_inverse),
        cmocka_unit_test(embed_grad_sums_repeated_ids),
        cmocka_unit_test(cross_entropy_is_the_difference_quotient),
        cmocka_unit_test(cross_entropy_extremes),
        cmocka_unit_test(grad_out_rounds_and_sums_squares),
        cmocka_unit_test(expf_is_within_an_ulp),
        cmocka_unit_test(round_bf16_agrees_with_dtype_h),
    };
    return cmocka_run_group_tests(tests, teams_open, teams_close);
}
