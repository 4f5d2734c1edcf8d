/* Head norm and rotary embedding, forward and backward, against the equations in float64 with rotations as complex
 * products, and the gradients against central differences.  Each case runs on 1, 2 and 5 threads, which must agree bit
 * for bit, with outputs and scratch filled with NaN. */
#include <complex.h>
#undef I /* test headers and cases use the name */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../../src/device/cpu/kernel_rope.c"

enum { TEAM_COUNT = 3, POSITIONS = 50 };

static const uint32_t team_size[TEAM_COUNT] = { 1, 2, 5 };
static fb_cpu_scratch rig[TEAM_COUNT];

typedef struct problem {
    fb_dtype act;
    uint32_t t, n_head, n_kv_head, head_dim;
    bool     norm, accumulate;
    float    eps;
    void    *qkv, *q_norm, *k_norm, *dq, *dk;
    uint32_t *position;
    float    *cos, *sin;
} problem;

typedef struct result {
    void  *q, *k, *dqkv;
    float *dq_norm, *dk_norm;
} result;

typedef struct truth {
    double *q, *k, *dqkv, *dq_norm, *dk_norm;
} truth;

static int rig_open(void **state)
{
    (void)state;
    for (int i = 0; i < TEAM_COUNT; i++) {
        uint64_t size = (uint64_t)team_size[i] * FB_CPU_SCRATCH_SIZE;
        if (fb_team_new(&rig[i].team, team_size[i], "test", NULL))
            return -1;
        rig[i].base = aligned_alloc(64, size);
        memset(rig[i].base, 0xff, size);
    }
    return 0;
}

static int rig_close(void **state)
{
    (void)state;
    for (int i = 0; i < TEAM_COUNT; i++) {
        fb_team_free(rig[i].team);
        free(rig[i].base);
    }
    return 0;
}

static uint32_t random_state = 1;

static float random_value(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return ((float)(random_state >> 8) * 0x1p-23f - 1.0f) * 2.0f;
}

static void *new_bytes(uint64_t size, int fill)
{
    void *p = aligned_alloc(64, (size + 63) / 64 * 64);
    assert_non_null(p);
    memset(p, fill, size);
    return p;
}

static void *new_random(fb_dtype act, uint64_t n)
{
    void *p = new_bytes(n * fb_dtype_size(act), 0);
    for (uint64_t i = 0; i < n; i++) {
        float f = random_value();
        fb_from_f32(fb_at(p, act, i), act, &f, 1);
    }
    return p;
}

static double value(const void *base, fb_dtype act, uint64_t i)
{
    float f;
    fb_to_f32(&f, fb_at(base, act, i), act, 1);
    return f;
}

static double rounded(fb_dtype act, double x)
{
    return act == FB_F32 ? x : (double)fb_bf16_f32(fb_f32_bf16((float)x));
}

static uint64_t qkv_row(const problem *p)
{
    return ((uint64_t)p->n_head + 2 * p->n_kv_head) * p->head_dim;
}

static problem problem_of(fb_dtype act, uint32_t t, uint32_t n_head, uint32_t n_kv_head, uint32_t head_dim, bool norm)
{
    problem p = { .act = act, .t = t, .n_head = n_head, .n_kv_head = n_kv_head, .head_dim = head_dim, .norm = norm,
                  .eps = 1e-6f };
    uint32_t half = head_dim / 2;
    p.qkv = new_random(act, t * qkv_row(&p));
    p.dq = new_random(act, (uint64_t)t * n_head * head_dim);
    p.dk = new_random(act, (uint64_t)t * n_kv_head * head_dim);
    p.q_norm = norm ? new_random(act, head_dim) : NULL;
    p.k_norm = norm ? new_random(act, head_dim) : NULL;
    p.position = new_bytes(t * sizeof *p.position, 0);
    for (uint32_t i = 0; i < t; i++)
        p.position[i] = i * 7 % POSITIONS;
    p.cos = new_bytes(POSITIONS * half * sizeof *p.cos, 0);
    p.sin = new_bytes(POSITIONS * half * sizeof *p.sin, 0);
    for (uint32_t i = 0; i < POSITIONS; i++)
        for (uint32_t c = 0; c < half; c++) {
            double angle = i * pow(10000.0, -2.0 * c / head_dim);
            p.cos[i * half + c] = (float)(1.25 * cos(angle)); /* scaled, as yarn does */
            p.sin[i * half + c] = (float)(1.25 * sin(angle));
        }
    return p;
}

static void problem_free(problem *p)
{
    void *const all[] = { p->qkv, p->dq, p->dk, p->q_norm, p->k_norm, p->position, p->cos, p->sin };
    for (size_t i = 0; i < FB_COUNT(all); i++)
        free(all[i]);
}

static const float dw_before = 0.5f;

static result run(const problem *p, fb_cpu_scratch *s)
{
    uint64_t size = fb_dtype_size(p->act), d = p->head_dim;
    result r = { new_bytes(p->t * p->n_head * d * size, 0xff), new_bytes(p->t * p->n_kv_head * d * size, 0xff),
                 new_bytes(p->t * qkv_row(p) * size, 0xff), new_bytes(d * sizeof(float), 0xff),
                 new_bytes(d * sizeof(float), 0xff) };
    for (uint64_t i = 0; i < d && p->accumulate; i++)
        r.dq_norm[i] = r.dk_norm[i] = dw_before;
    fb_rope_qk_bwd b = {
        .fwd = { .act = p->act, .t = p->t, .n_head = p->n_head, .n_kv_head = p->n_kv_head, .head_dim = p->head_dim,
                 .eps = p->eps, .qkv = p->qkv, .q_norm = p->q_norm, .k_norm = p->k_norm, .position = p->position,
                 .cos = p->cos, .sin = p->sin, .q = r.q, .k = r.k },
        .dq = p->dq, .dk = p->dk, .dqkv = r.dqkv, .dq_norm = r.dq_norm, .dk_norm = r.dk_norm,
        .accumulate = p->accumulate,
    };
    fb_cpu_rope_qk(s, &b.fwd);
    fb_cpu_rope_qk_bwd(s, &b);
    return r;
}

static void result_free(result *r)
{
    free(r->q);
    free(r->k);
    free(r->dqkv);
    free(r->dq_norm);
    free(r->dk_norm);
}

/* With z = a + ib the halves as one complex number: y = z (cos + i sin), dz = dy conj(cos + i sin). */
static void truth_head(const problem *p, uint32_t t, uint64_t at, const void *weight, const void *dy_base,
                       uint64_t apart, double *y, double *dx, double *dw)
{
    uint32_t d = p->head_dim, half = d / 2;
    double x[ROPE_HEAD_DIM_MAX], n[ROPE_HEAD_DIM_MAX], dy[ROPE_HEAD_DIM_MAX], squares = 0, mean = 0, rstd = 1;
    for (uint32_t i = 0; i < d; i++) {
        x[i] = value(p->qkv, p->act, at + i);
        squares += x[i] * x[i];
    }
    if (weight)
        rstd = 1.0 / sqrt(squares / d + (double)p->eps);
    for (uint32_t i = 0; i < d; i++)
        n[i] = weight ? rounded(p->act, rounded(p->act, x[i] * rstd) * value(weight, p->act, i)) : x[i];
    for (uint32_t i = 0; i < half; i++) {
        uint32_t at_angle = p->position[t] * half + i;
        double complex turn = CMPLX(p->cos[at_angle], p->sin[at_angle]), z = CMPLX(n[i], n[half + i]) * turn;
        double complex dz = CMPLX(value(dy_base, p->act, apart + i), value(dy_base, p->act, apart + half + i));
        dz *= conj(turn);
        y[i] = creal(z);
        y[half + i] = cimag(z);
        dy[i] = creal(dz);
        dy[half + i] = cimag(dz);
    }
    for (uint32_t i = 0; i < d && weight; i++) {
        dw[i] += dy[i] * rounded(p->act, x[i] * rstd);
        dy[i] *= value(weight, p->act, i);
        mean += dy[i] * x[i] * rstd / d;
    }
    for (uint32_t i = 0; i < d; i++)
        dx[i] = weight ? rstd * (dy[i] - x[i] * rstd * mean) : dy[i];
}

static truth truth_of(const problem *p)
{
    uint64_t d = p->head_dim, h_count = p->n_head, g_count = p->n_kv_head;
    truth w = { calloc(p->t * h_count * d, sizeof(double)), calloc(p->t * g_count * d, sizeof(double)),
                calloc(p->t * (h_count + g_count) * d, sizeof(double)), calloc(d, sizeof(double)),
                calloc(d, sizeof(double)) };
    for (uint64_t i = 0; i < d && p->accumulate; i++)
        w.dq_norm[i] = w.dk_norm[i] = dw_before;
    for (uint32_t t = 0; t < p->t; t++) {
        for (uint64_t h = 0; h < h_count; h++)
            truth_head(p, t, t * qkv_row(p) + h * d, p->q_norm, p->dq, (t * h_count + h) * d,
                       w.q + (t * h_count + h) * d, w.dqkv + (t * (h_count + g_count) + h) * d, w.dq_norm);
        for (uint64_t g = 0; g < g_count; g++)
            truth_head(p, t, t * qkv_row(p) + (h_count + g) * d, p->k_norm, p->dk, (t * g_count + g) * d,
                       w.k + (t * g_count + g) * d, w.dqkv + (t * (h_count + g_count) + h_count + g) * d, w.dk_norm);
    }
    return w;
}

static void truth_free(truth *w)
{
    free(w->q);
    free(w->k);
    free(w->dqkv);
    free(w->dq_norm);
    free(w->dk_norm);
}

/* Norm of the difference over the norm; what lies between rows (n of each ld) must be untouched. */
static double error_of(const void *got, fb_dtype act, uint64_t ld, const double *want, uint64_t rows, uint64_t n)
{
    double off = 0, norm = 0;
    for (uint64_t i = 0; i < rows; i++) {
        for (uint64_t c = 0; c < n; c++) {
            double diff = value(got, act, i * ld + c) - want[i * n + c];
            off += diff * diff;
            norm += want[i * n + c] * want[i * n + c];
        }
        for (uint64_t c = n; c < ld; c++)
            assert_true(isnan(value(got, act, i * ld + c)));
    }
    return sqrt(off / norm);
}

/* Elements that are not the truth rounded to act. */
static double share_misrounded(const void *got, fb_dtype act, uint64_t ld, const double *want, uint64_t rows,
                               uint64_t n)
{
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < rows; i++)
        for (uint64_t c = 0; c < n; c++)
            wrong += value(got, act, i * ld + c) != rounded(act, want[i * n + c]);
    return (double)wrong / (double)(rows * n);
}

#define ASSERT_BELOW(error, bound)                                                                      \
    do {                                                                                                \
        double got_ = (error), most_ = (bound);                                                         \
        if (!(got_ <= most_))                                                                           \
            fail_msg("%s is %.3g, at most %.3g expected", #error, got_, most_);                         \
    } while (0)

static void check(problem p)
{
    result r = run(&p, &rig[0]);
    uint64_t size = fb_dtype_size(p.act), d = p.head_dim, q_row = p.n_head * d, k_row = p.n_kv_head * d;
    for (int i = 1; i < TEAM_COUNT; i++) {
        result again = run(&p, &rig[i]);
        assert_memory_equal(r.q, again.q, p.t * q_row * size);
        assert_memory_equal(r.k, again.k, p.t * k_row * size);
        assert_memory_equal(r.dqkv, again.dqkv, p.t * qkv_row(&p) * size);
        assert_memory_equal(r.dq_norm, again.dq_norm, d * sizeof(float));
        assert_memory_equal(r.dk_norm, again.dk_norm, d * sizeof(float));
        result_free(&again);
    }
    truth w = truth_of(&p);
    /* float32: a few roundings of 6e-8.  bfloat16: one of at most 2^-8; those before it are in the truth, and fall the
     * other way only where float32 and float64 lie on two sides of a tie. */
    double bound = p.act == FB_F32 ? 3e-7 : 0x1p-8;
    ASSERT_BELOW(error_of(r.q, p.act, q_row, w.q, p.t, q_row), bound);
    ASSERT_BELOW(error_of(r.k, p.act, k_row, w.k, p.t, k_row), bound);
    ASSERT_BELOW(error_of(r.dqkv, p.act, qkv_row(&p), w.dqkv, p.t, q_row + k_row), bound);
    if (p.act == FB_BF16) {
        ASSERT_BELOW(share_misrounded(r.q, p.act, q_row, w.q, p.t, q_row), 0.01);
        ASSERT_BELOW(share_misrounded(r.k, p.act, k_row, w.k, p.t, k_row), 0.01);
        ASSERT_BELOW(share_misrounded(r.dqkv, p.act, qkv_row(&p), w.dqkv, p.t, q_row + k_row), 0.01);
    }
    if (p.norm) {
        ASSERT_BELOW(error_of(r.dq_norm, FB_F32, d, w.dq_norm, 1, d), p.act == FB_F32 ? 1e-6 : 1e-4);
        ASSERT_BELOW(error_of(r.dk_norm, FB_F32, d, w.dk_norm, 1, d), p.act == FB_F32 ? 1e-6 : 1e-4);
    } else {
        float before = p.accumulate ? dw_before : NAN;
        for (uint64_t i = 0; i < d; i++)
            assert_true(r.dq_norm[i] == before || (isnan(before) && isnan(r.dq_norm[i])));
    }
    truth_free(&w);
    result_free(&r);
    problem_free(&p);
}

static void every_head_dim(void **state)
{
    (void)state;
    static const uint32_t head_dim[] = { 2, 6, 64, 80, 128, 256 };
    for (size_t i = 0; i < FB_COUNT(head_dim); i++)
        for (int act = 0; act < 2; act++)
            for (int norm = 0; norm < 2; norm++)
                check(problem_of(act ? FB_BF16 : FB_F32, 75, 6, 2, head_dim[i], norm));
}

static void one_token(void **state)
{
    (void)state;
    check(problem_of(FB_F32, 1, 1, 1, 64, true));
    check(problem_of(FB_F32, 1, 3, 3, 64, false));
}

/* Past 512 tiles of 16 tokens the tiles grow. */
static void many_tokens(void **state)
{
    (void)state;
    check(problem_of(FB_F32, ROPE_TILE_MAX * ROPE_TILE, 1, 1, 4, true));
    check(problem_of(FB_F32, ROPE_TILE_MAX * ROPE_TILE + 1, 1, 1, 4, true));
}

static void weight_gradients_accumulate(void **state)
{
    (void)state;
    for (int norm = 0; norm < 2; norm++) {
        problem p = problem_of(FB_F32, 40, 4, 2, 16, norm);
        p.accumulate = true;
        check(p);
    }
}

/* A row of zeros: rstd is 1 / sqrt(eps), and nothing is divided by zero. */
static void a_row_of_zeros(void **state)
{
    (void)state;
    problem p = problem_of(FB_F32, 3, 2, 1, 8, true);
    memset(p.qkv, 0, qkv_row(&p) * sizeof(float));
    check(p);
}

static double loss_of(const problem *p)
{
    truth w = truth_of(p);
    double loss = 0;
    for (uint64_t i = 0; i < (uint64_t)p->t * p->n_head * p->head_dim; i++)
        loss += w.q[i] * value(p->dq, p->act, i);
    for (uint64_t i = 0; i < (uint64_t)p->t * p->n_kv_head * p->head_dim; i++)
        loss += w.k[i] * value(p->dk, p->act, i);
    truth_free(&w);
    return loss;
}

/* d(loss)/dx by central differences, x moved by a step that float32 holds exactly; the error is third order. */
static double difference(const problem *p, float *x)
{
    float keep = *x, up = keep + 0x1p-10f, down = keep - 0x1p-10f;
    *x = up;
    double above = loss_of(p);
    *x = down;
    double below = loss_of(p);
    *x = keep;
    return (above - below) / ((double)up - down);
}

static void gradients_are_finite_differences(void **state)
{
    (void)state;
    for (int norm = 0; norm < 2; norm++) {
        problem p = problem_of(FB_F32, 5, 4, 2, 6, norm);
        result r = run(&p, &rig[1]);
        for (uint64_t t = 0; t < p.t; t++)
            for (uint64_t c = 0; c < (4 + 2) * 6; c++) {
                uint64_t at = t * qkv_row(&p) + c;
                ASSERT_BELOW(fabs(difference(&p, (float *)p.qkv + at) - ((float *)r.dqkv)[at]), 5e-5);
            }
        for (uint64_t c = 0; c < 6 && norm; c++) {
            ASSERT_BELOW(fabs(difference(&p, (float *)p.q_norm + c) - r.dq_norm[c]), 5e-5);
            ASSERT_BELOW(fabs(difference(&p, (float *)p.k_norm + c) - r.dk_norm[c]), 5e-5);
        }
        result_free(&r);
        problem_free(&p);
    }
}

static void a_token_does_not_see_the_others(void **state)
{
    (void)state;
    problem p = problem_of(FB_F32, 60, 4, 2, 64, true);
    result before = run(&p, &rig[1]);
    float *row = (float *)p.qkv + 20 * qkv_row(&p);
    for (uint64_t i = 0; i < qkv_row(&p); i++)
        row[i] = random_value();
    result after = run(&p, &rig[1]);
    for (uint64_t t = 0; t < p.t; t++) {
        bool same = !memcmp((float *)before.q + t * 256, (float *)after.q + t * 256, 256 * sizeof(float))
                    && !memcmp((float *)before.k + t * 128, (float *)after.k + t * 128, 128 * sizeof(float))
                    && !memcmp((float *)before.dqkv + t * qkv_row(&p), (float *)after.dqkv + t * qkv_row(&p),
                               (256 + 128) * sizeof(float));
        assert_int_equal(same, t != 20);
    }
    result_free(&before);
    result_free(&after);
    problem_free(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_head_dim),
        cmocka_unit_test(one_token),
        cmocka_unit_test(many_tokens),
        cmocka_unit_test(weight_gradients_accumulate),
        cmocka_unit_test(a_row_of_zeros),
        cmocka_unit_test(gradients_are_finite_differences),
        cmocka_unit_test(a_token_does_not_see_the_others),
    };
    return cmocka_run_group_tests(tests, rig_open, rig_close);
}
