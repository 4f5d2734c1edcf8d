/* Attention, forward and backward, against the equations in float64, written here as plain loops over single scores;
 * the gradients against central differences of that forward too.  Every case runs on 1, 2 and 5 threads, which must
 * agree bit for bit, and on outputs and scratch filled with NaN. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../../src/device/cpu/kernel_attention.c"
#include "../../src/device/cpu/kernel_attention_bwd.c"

enum { SPAN_MAX = 8, TEAM_COUNT = 3, PAD = 3 /* rows are further apart than they are long */ };

static const uint32_t team_size[TEAM_COUNT] = { 1, 2, 5 };
static fb_cpu_scratch rig[TEAM_COUNT];

typedef struct problem {
    fb_dtype act;
    uint32_t n_head, n_kv_head, head_dim, window, n_span;
    float    scale;
    fb_span  span[SPAN_MAX];
    uint32_t t, n_key; /* rows of q, o; rows of k, v */
    uint64_t q_ld, k_ld, v_ld;
    void    *q, *k, *v, *d_o;
} problem;

typedef struct result {
    void   *o, *dq, *dk, *dv;
    float  *lse;
    uint64_t o_size, dk_size, dv_size, lse_size; /* bytes; dq as o */
} result;

/* The equations' values in float64, dense rows. */
typedef struct truth {
    double *o, *lse, *dq, *dk, *dv;
} truth;

static int rig_open(void **state)
{
    (void)state;
    fb_cpu_blas_init();
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

/* Near normal, variance 1: the sum of three uniform numbers on [-1, 1]. */
static float random_value(void)
{
    float sum = 0;
    for (int i = 0; i < 3; i++) {
        random_state = random_state * 1664525u + 1013904223u;
        sum += (float)(random_state >> 8) * 0x1p-23f - 1.0f;
    }
    return sum;
}

static void *new_bytes(uint64_t size, int fill)
{
    void *p = aligned_alloc(64, (size + 63) / 64 * 64);
    assert_non_null(p);
    memset(p, fill, size);
    return p;
}

static void randomize(void *base, fb_dtype act, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        float f = random_value();
        fb_from_f32(fb_at(base, act, i), act, &f, 1);
    }
}

static void *new_random(fb_dtype act, uint64_t n)
{
    void *p = new_bytes(n * fb_dtype_size(act), 0);
    randomize(p, act, n);
    return p;
}

static double value(const void *base, fb_dtype act, uint64_t i)
{
    float f;
    fb_to_f32(&f, fb_at(base, act, i), act, 1);
    return f;
}

/* Fills in what follows from the heads and spans. */
static problem problem_new(problem p)
{
    for (uint32_t i = 0; i < p.n_span; i++) {
        uint32_t q_end = p.span[i].q_start + p.span[i].q_len, k_end = p.span[i].k_start + p.span[i].k_len;
        p.t = q_end > p.t ? q_end : p.t;
        p.n_key = k_end > p.n_key ? k_end : p.n_key;
    }
    if (p.scale == 0)
        p.scale = 1.0f / sqrtf((float)p.head_dim);
    p.q_ld = (uint64_t)p.n_head * p.head_dim + PAD;
    p.k_ld = (uint64_t)p.n_kv_head * p.head_dim + 2 * PAD;
    p.v_ld = ((uint64_t)p.n_head + 2 * p.n_kv_head) * p.head_dim;
    p.q = new_random(p.act, p.t * p.q_ld);
    p.d_o = new_random(p.act, p.t * p.q_ld);
    p.k = new_random(p.act, p.n_key * p.k_ld);
    p.v = new_random(p.act, p.n_key * p.v_ld);
    return p;
}

static void problem_free(problem *p)
{
    free(p->q);
    free(p->k);
    free(p->v);
    free(p->d_o);
}

/* Documents of these lengths, end to end. */
static problem problem_of(fb_dtype act, uint32_t n_head, uint32_t n_kv_head, uint32_t head_dim, uint32_t window,
                          uint32_t n_span, const uint32_t *len)
{
    problem p = { .act = act, .n_head = n_head, .n_kv_head = n_kv_head, .head_dim = head_dim, .window = window,
                  .n_span = n_span };
    uint32_t start = 0;
    for (uint32_t i = 0; i < n_span; i++) {
        p.span[i] = (fb_span){ start, len[i], start, len[i] };
        start += len[i];
    }
    return problem_new(p);
}

static result run(const problem *p, fb_cpu_scratch *s, bool with_backward)
{
    uint64_t size = fb_dtype_size(p->act);
    result r = { .o_size = p->t * p->q_ld * size, .dk_size = p->n_key * p->k_ld * size,
                 .dv_size = p->n_key * p->v_ld * size, .lse_size = (uint64_t)p->n_head * p->t * sizeof(float) };
    r.o = new_bytes(r.o_size, 0xff);
    r.dq = new_bytes(r.o_size, 0xff);
    r.dk = new_bytes(r.dk_size, 0xff);
    r.dv = new_bytes(r.dv_size, 0xff);
    r.lse = new_bytes(r.lse_size, 0xff);
    fb_attention_bwd b = {
        .fwd = { .act = p->act, .t = p->t, .n_head = p->n_head, .n_kv_head = p->n_kv_head, .head_dim = p->head_dim,
                 .window = p->window, .scale = p->scale, .span = p->span, .n_span = p->n_span, .q = p->q,
                 .q_ld = p->q_ld, .k = p->k, .k_ld = p->k_ld, .v = p->v, .v_ld = p->v_ld, .o = r.o, .o_ld = p->q_ld,
                 .lse = r.lse },
        .d_o = p->d_o, .do_ld = p->q_ld, .dq = r.dq, .dq_ld = p->q_ld, .dk = r.dk, .dk_ld = p->k_ld,
        .dv = r.dv, .dv_ld = p->v_ld,
    };
    fb_cpu_attention(s, &b.fwd);
    if (with_backward) {
        b.scratch = new_bytes(fb_cpu_attention_scratch(p->t, p->n_head, p->head_dim), 0xff);
        fb_cpu_attention_bwd(s, &b);
        free(b.scratch);
    }
    return r;
}

static void result_free(result *r)
{
    free(r->o);
    free(r->dq);
    free(r->dk);
    free(r->dv);
    free(r->lse);
}

/* Vaswani et al. 2017, eq. 1, and its derivative (Dao et al. 2022, appendix B.2), one query at a time.
 * o_stored: where not NULL, delta = do . o is taken from it, since that is what the kernel is given. */
static truth truth_of(const problem *p, bool with_backward, const void *o_stored)
{
    uint64_t d = p->head_dim, q_count = (uint64_t)p->t * p->n_head * d, k_count = (uint64_t)p->n_key * p->n_kv_head * d;
    truth w = { calloc(q_count, sizeof(double)), calloc((uint64_t)p->t * p->n_head, sizeof(double)),
                calloc(q_count, sizeof(double)), calloc(k_count, sizeof(double)), calloc(k_count, sizeof(double)) };
    double *score = calloc(p->n_key, sizeof *score), *dp = calloc(p->n_key, sizeof *dp);
    double *k = calloc(k_count, sizeof *k), *v = calloc(k_count, sizeof *v), q[ATT_HEAD_DIM_MAX], d_o[ATT_HEAD_DIM_MAX];
    for (uint64_t i = 0; i < p->n_key; i++)
        for (uint64_t c = 0; c < p->n_kv_head * d; c++) {
            k[i * p->n_kv_head * d + c] = value(p->k, p->act, i * p->k_ld + c);
            v[i * p->n_kv_head * d + c] = value(p->v, p->act, i * p->v_ld + c);
        }

    for (uint32_t x = 0; x < p->n_span; x++)
        for (uint64_t i = 0; i < p->span[x].q_len; i++)
            for (uint64_t h = 0; h < p->n_head; h++) {
                fb_span s = p->span[x];
                int64_t position = (int64_t)s.k_len - s.q_len + (int64_t)i;
                int64_t first = p->window && position - p->window + 1 > 0 ? position - p->window + 1 : 0;
                uint64_t row = s.q_start + i, out = (row * p->n_head + h) * d, kv = h / (p->n_head / p->n_kv_head);
                double top = -INFINITY, sum = 0, delta = 0;
                for (uint64_t c = 0; c < d; c++) {
                    q[c] = value(p->q, p->act, row * p->q_ld + h * d + c);
                    d_o[c] = value(p->d_o, p->act, row * p->q_ld + h * d + c);
                }
                for (int64_t j = first; j <= position; j++) {
                    const double *key = k + ((uint64_t)(s.k_start + j) * p->n_kv_head + kv) * d;
                    score[j] = 0;
                    for (uint64_t c = 0; c < d; c++)
                        score[j] += q[c] * key[c];
                    score[j] *= p->scale;
                    top = fmax(top, score[j]);
                }
                for (int64_t j = first; j <= position; j++)
                    sum += exp(score[j] - top);
                w.lse[h * p->t + row] = top + log(sum);
                for (int64_t j = first; j <= position; j++) {
                    const double *val = v + ((uint64_t)(s.k_start + j) * p->n_kv_head + kv) * d;
                    score[j] = exp(score[j] - top) / sum;
                    dp[j] = 0;
                    for (uint64_t c = 0; c < d; c++) {
                        w.o[out + c] += score[j] * val[c];
                        dp[j] += d_o[c] * val[c];
                    }
                    delta += score[j] * dp[j];
                }
                if (!with_backward)
                    continue;
                if (o_stored) {
                    delta = 0;
                    for (uint64_t c = 0; c < d; c++)
                        delta += d_o[c] * value(o_stored, p->act, row * p->q_ld + h * d + c);
                }
                for (int64_t j = first; j <= position; j++) {
                    uint64_t at = ((uint64_t)(s.k_start + j) * p->n_kv_head + kv) * d;
                    double ds = p->scale * score[j] * (dp[j] - delta);
                    for (uint64_t c = 0; c < d; c++) {
                        w.dv[at + c] += score[j] * d_o[c];
                        w.dk[at + c] += ds * q[c];
                        w.dq[out + c] += ds * k[at + c];
                    }
                }
            }
    free(score);
    free(dp);
    free(k);
    free(v);
    return w;
}

static void truth_free(truth *w)
{
    free(w->o);
    free(w->lse);
    free(w->dq);
    free(w->dk);
    free(w->dv);
}

/* Norm of the difference over the norm, on rows of n of which each is ld apart; what lies between must be untouched. */
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
    return norm > 0 ? sqrt(off / norm) : sqrt(off);
}

/* Elements of act bfloat16 that are not the truth rounded. */
static double share_misrounded(const void *got, fb_dtype act, uint64_t ld, const double *want, uint64_t rows,
                               uint64_t n)
{
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < rows; i++)
        for (uint64_t c = 0; c < n; c++)
            wrong += value(got, act, i * ld + c) != (double)fb_bf16_f32(fb_f32_bf16((float)want[i * n + c]));
    return (double)wrong / (double)(rows * n);
}

#define ASSERT_BELOW(error, bound)                                                                      \
    do {                                                                                                \
        double got_ = (error), most_ = (bound);                                                         \
        if (!(got_ <= most_))                                                                           \
            fail_msg("%s is %.3g, at most %.3g expected", #error, got_, most_);                         \
    } while (0)

/* Runs on every team, compares the teams' bits, then the values with the truth. */
static void check(problem p, bool with_backward, double forward_bound, double backward_bound)
{
    result r = run(&p, &rig[0], with_backward);
    for (int i = 1; i < TEAM_COUNT; i++) {
        result again = run(&p, &rig[i], with_backward);
        assert_memory_equal(r.o, again.o, r.o_size);
        assert_memory_equal(r.lse, again.lse, r.lse_size);
        assert_memory_equal(r.dq, again.dq, r.o_size);
        assert_memory_equal(r.dk, again.dk, r.dk_size);
        assert_memory_equal(r.dv, again.dv, r.dv_size);
        result_free(&again);
    }
    truth w = truth_of(&p, with_backward, p.act == FB_F32 ? NULL : r.o);
    uint64_t q_row = (uint64_t)p.n_head * p.head_dim, k_row = (uint64_t)p.n_kv_head * p.head_dim;
    ASSERT_BELOW(error_of(r.o, p.act, p.q_ld, w.o, p.t, q_row), forward_bound);
    ASSERT_BELOW(error_of(r.lse, FB_F32, p.t, w.lse, p.n_head, p.t), 1e-6);
    double flipped = 0.03; /* next to a tie, or 0 but for rounding, as dq of a document's first query */
    if (p.act == FB_BF16)
        ASSERT_BELOW(share_misrounded(r.o, p.act, p.q_ld, w.o, p.t, q_row), flipped);
    if (with_backward && p.act == FB_BF16) {
        ASSERT_BELOW(share_misrounded(r.dv, p.act, p.v_ld, w.dv, p.n_key, k_row), flipped);
        ASSERT_BELOW(share_misrounded(r.dq, p.act, p.q_ld, w.dq, p.t, q_row), flipped);
        ASSERT_BELOW(share_misrounded(r.dk, p.act, p.k_ld, w.dk, p.n_key, k_row), flipped);
    }
    if (with_backward) {
        /* Where every query has a single key, dq and dk are 0 and the error is absolute: rounding of delta. */
        bool zero = p.t == p.n_span || p.window == 1;
        double score_bound = zero ? 1e-4 : backward_bound;
        ASSERT_BELOW(error_of(r.dv, p.act, p.v_ld, w.dv, p.n_key, k_row), backward_bound);
        ASSERT_BELOW(error_of(r.dq, p.act, p.q_ld, w.dq, p.t, q_row), score_bound);
        ASSERT_BELOW(error_of(r.dk, p.act, p.k_ld, w.dk, p.n_key, k_row), score_bound);
    }
    truth_free(&w);
    result_free(&r);
    problem_free(&p);
}

static const uint32_t ragged[] = { 1, 63, 64, 65, 7, 130 };

static void every_head_dim_on_ragged_documents(void **state)
{
    (void)state;
    static const uint32_t head_dim[] = { 2, 6, 64, 80, 128, 256 };
    for (size_t i = 0; i < FB_COUNT(head_dim); i++)
        check(problem_of(FB_F32, 4, 2, head_dim[i], 0, FB_COUNT(ragged), ragged), true, 2e-6, 5e-6);
}

static void one_document_of_512(void **state)
{
    (void)state;
    check(problem_of(FB_F32, 3, 1, 64, 0, 1, (uint32_t[]){ 512 }), true, 2e-6, 5e-6);
}

static void groups_from_one_to_all_heads(void **state)
{
    (void)state;
    static const uint32_t n_kv_head[] = { 1, 2, 3, 6 };
    for (size_t i = 0; i < FB_COUNT(n_kv_head); i++)
        check(problem_of(FB_F32, 6, n_kv_head[i], 16, 0, 2, (uint32_t[]){ 150, 70 }), true, 2e-6, 5e-6);
}

/* Windows within a tile, just around a tile, across tiles and segments, and longer than the document. */
static void sliding_windows(void **state)
{
    (void)state;
    static const uint32_t window[] = { 1, 2, 5, 63, 64, 65, 66, 100, 128, 129, 200, 399, 400, 401, UINT32_MAX };
    for (size_t i = 0; i < FB_COUNT(window); i++)
        check(problem_of(FB_F32, 2, 1, 8, window[i], 3, (uint32_t[]){ 400, 1, 90 }), true, 2e-6, 5e-6);
}

/* Lengths around the points where the number of tiles and segments changes. */
static void lengths_around_tile_borders(void **state)
{
    (void)state;
    static const uint32_t len[] = { 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 384, 385, 513, 700 };
    for (size_t i = 0; i < FB_COUNT(len); i++)
        check(problem_of(FB_F32, 1, 1, 4, 0, 1, &len[i]), true, 2e-6, 5e-6);
}

/* Queries are the last ones of their document; the rows of the cache start elsewhere. */
static void key_value_cache(void **state)
{
    (void)state;
    static const uint32_t window[] = { 0, 1, 50, 64, 1000 };
    for (size_t i = 0; i < FB_COUNT(window); i++)
        check(problem_new((problem){ .act = FB_F32, .n_head = 4, .n_kv_head = 2, .head_dim = 32, .window = window[i],
                                     .n_span = 5, .span = { { 0, 1, 0, 1 }, { 1, 1, 10, 200 }, { 2, 3, 210, 64 },
                                                            { 5, 70, 300, 131 }, { 75, 65, 431, 65 } } }),
              false, 2e-6, 0);
}

/* Scores of up to +-90, whose maximum moves from tile to tile.  A score of 64 is known to 4e-6 in float32, and so are
 * the weights that come of it; several of them add up. */
static void large_scores(void **state)
{
    (void)state;
    problem p = problem_of(FB_F32, 2, 1, 64, 0, 1, (uint32_t[]){ 300 });
    p.scale = 2.0f;
    check(p, true, 2e-5, 4e-5);
}

/* The largest score comes last, or first: sums so far must shrink to nothing, or later ones count for nothing.  The
 * backward's weights come from lse, of which float32 knows 300 to half of 3.1e-5. */
static void scores_that_run_away(void **state)
{
    (void)state;
    for (int falling = 0; falling < 2; falling++) {
        problem p = problem_of(FB_F32, 1, 1, 2, 0, 1, (uint32_t[]){ 300 });
        float *q = p.q, *k = p.k;
        for (uint32_t i = 0; i < 300; i++) {
            q[i * p.q_ld] = 1;
            q[i * p.q_ld + 1] = 0;
            k[i * p.k_ld] = falling ? -(float)i : (float)i;
        }
        p.scale = 1;
        check(p, true, 2e-6, 4e-5);
    }
}

/* bfloat16 in, float32 within, rounded once: by 2^-8 of the value at most, nearly always to the truth's neighbour. */
static void bfloat16_is_rounded_once(void **state)
{
    (void)state;
    static const uint32_t head_dim[] = { 6, 64, 256 };
    for (size_t i = 0; i < FB_COUNT(head_dim); i++)
        check(problem_of(FB_BF16, 4, 2, head_dim[i], i == 1 ? 40 : 0, FB_COUNT(ragged), ragged), true, 0x1p-8, 0x1p-8);
}

static double loss_of(const problem *p)
{
    truth w = truth_of(p, false, NULL);
    double loss = 0;
    for (uint64_t i = 0; i < p->t; i++)
        for (uint64_t c = 0; c < (uint64_t)p->n_head * p->head_dim; c++)
            loss += w.o[i * p->n_head * p->head_dim + c] * value(p->d_o, p->act, i * p->q_ld + c);
    truth_free(&w);
    return loss;
}

/* d(loss)/dx for loss = sum(do * o), each x moved by itself.  The step is 2^-10 and exact in float32 for |x| < 4, its
 * error is third order: 2^-20 / 6 times a derivative of order 10. */
static void differences_match(const problem *p, float *x, const float *dx, uint64_t ld, uint64_t rows, uint64_t n)
{
    for (uint64_t i = 0; i < rows; i++)
        for (uint64_t c = 0; c < n; c++) {
            float keep = x[i * ld + c], up = keep + 0x1p-10f, down = keep - 0x1p-10f;
            x[i * ld + c] = up;
            double above = loss_of(p);
            x[i * ld + c] = down;
            double below = loss_of(p);
            x[i * ld + c] = keep;
            ASSERT_BELOW(fabs((above - below) / ((double)up - down) - dx[i * ld + c]), 2e-5);
        }
}

static void gradients_are_finite_differences(void **state)
{
    (void)state;
    for (uint32_t window = 0; window <= 3; window += 3) {
        problem p = problem_of(FB_F32, 4, 2, 6, window, 2, (uint32_t[]){ 7, 4 });
        result r = run(&p, &rig[1], true);
        differences_match(&p, p.q, r.dq, p.q_ld, p.t, 4 * 6);
        differences_match(&p, p.k, r.dk, p.k_ld, p.n_key, 2 * 6);
        differences_match(&p, p.v, r.dv, p.v_ld, p.n_key, 2 * 6);
        result_free(&r);
        problem_free(&p);
    }
}

static void rows_equal(const void *a, const void *b, fb_dtype act, uint64_t ld, uint64_t a_row, uint64_t b_row,
                       uint64_t n)
{
    assert_memory_equal(fb_at(a, act, a_row * ld), fb_at(b, act, b_row * ld), n * ld * fb_dtype_size(act));
}

/* b_start: where document `span` of a begins in b, which has b_t tokens. */
static void documents_equal(const problem *p, const result *a, const result *b, fb_span span, uint32_t b_start,
                            uint32_t b_t)
{
    rows_equal(a->o, b->o, p->act, p->q_ld, span.q_start, b_start, span.q_len);
    rows_equal(a->dq, b->dq, p->act, p->q_ld, span.q_start, b_start, span.q_len);
    rows_equal(a->dk, b->dk, p->act, p->k_ld, span.q_start, b_start, span.q_len);
    rows_equal(a->dv, b->dv, p->act, p->v_ld, span.q_start, b_start, span.q_len);
    for (uint64_t h = 0; h < p->n_head; h++)
        assert_memory_equal(a->lse + h * p->t + span.q_start, b->lse + h * b_t + b_start, span.q_len * sizeof(float));
}

static void a_document_does_not_see_the_others_tokens(void **state)
{
    (void)state;
    problem p = problem_of(FB_F32, 4, 2, 64, 0, FB_COUNT(ragged), ragged);
    result before = run(&p, &rig[1], true);
    fb_span changed = p.span[3];
    randomize(fb_at(p.q, p.act, changed.q_start * p.q_ld), p.act, changed.q_len * p.q_ld);
    randomize(fb_at(p.d_o, p.act, changed.q_start * p.q_ld), p.act, changed.q_len * p.q_ld);
    randomize(fb_at(p.k, p.act, changed.q_start * p.k_ld), p.act, changed.q_len * p.k_ld);
    randomize(fb_at(p.v, p.act, changed.q_start * p.v_ld), p.act, changed.q_len * p.v_ld);
    result after = run(&p, &rig[1], true);
    for (uint32_t i = 0; i < p.n_span; i++)
        if (i != 3)
            documents_equal(&p, &before, &after, p.span[i], p.span[i].q_start, p.t);
    assert_memory_not_equal(fb_at(before.o, p.act, changed.q_start * p.q_ld),
                            fb_at(after.o, p.act, changed.q_start * p.q_ld), p.q_ld * sizeof(float));
    result_free(&before);
    result_free(&after);
    problem_free(&p);
}

/* The same document by itself, hence at another address and with other tasks around it. */
static void a_document_alone_has_the_same_bits(void **state)
{
    (void)state;
    for (int act = 0; act < 2; act++) {
        problem p = problem_of(act ? FB_BF16 : FB_F32, 4, 2, 64, 0, FB_COUNT(ragged), ragged);
        result together = run(&p, &rig[1], true);
        for (uint32_t i = 0; i < p.n_span; i++) {
            problem one = p;
            uint64_t start = p.span[i].q_start;
            one.n_span = 1;
            one.t = one.n_key = p.span[i].q_len;
            one.span[0] = (fb_span){ 0, one.t, 0, one.t };
            one.q = fb_at(p.q, p.act, start * p.q_ld);
            one.k = fb_at(p.k, p.act, start * p.k_ld);
            one.v = fb_at(p.v, p.act, start * p.v_ld);
            one.d_o = fb_at(p.d_o, p.act, start * p.q_ld);
            result alone = run(&one, &rig[1], true);
            documents_equal(&p, &together, &alone, p.span[i], 0, one.t);
            result_free(&alone);
        }
        result_free(&together);
        problem_free(&p);
    }
}

/* What is not finite must show, in its own rows, and stay in its own document. */
static void nan_spreads_within_the_document_only(void **state)
{
    (void)state;
    problem p = problem_of(FB_F32, 2, 1, 16, 0, 2, (uint32_t[]){ 100, 100 });
    ((float *)p.k)[80 * p.k_ld] = NAN;
    result r = run(&p, &rig[1], true);
    const float *o = r.o, *dq = r.dq;
    for (uint64_t i = 0; i < 200; i++) {
        assert_int_equal(isnan(o[i * p.q_ld]) != 0, i >= 80 && i < 100);
        if (i >= 80)
            assert_int_equal(isnan(dq[i * p.q_ld]) != 0, i < 100);
    }
    result_free(&r);
    problem_free(&p);
}

static void every_key_tile_has_one_segment(void **state)
{
    (void)state;
    static const uint32_t window[] = { 0, 1, 64, 65, 300 };
    for (size_t w = 0; w < FB_COUNT(window); w++)
        for (uint32_t n_tile = 1; n_tile < 70; n_tile++) {
            fb_attention a = { .window = window[w] };
            uint32_t next = 0, n = segment_count(n_tile);
            for (uint32_t i = 0; i < n; i++) {
                segment g = segment_at(&a, n_tile, i);
                if (g.first < g.end) {
                    assert_int_equal(g.first, next);
                    next = g.end;
                }
            }
            assert_int_equal(next, n_tile);
        }
}

static void scratch_size_saturates(void **state)
{
    (void)state;
    assert_int_equal(fb_cpu_attention_scratch(10, 3, 4), (4 * 10 * 3 * 4 + 10 * 3) * sizeof(float));
    assert_true(fb_cpu_attention_scratch(UINT32_MAX, UINT32_MAX, UINT32_MAX) == UINT64_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_head_dim_on_ragged_documents),
        cmocka_unit_test(one_document_of_512),
        cmocka_unit_test(groups_from_one_to_all_heads),
        cmocka_unit_test(sliding_windows),
        cmocka_unit_test(lengths_around_tile_borders),
        cmocka_unit_test(key_value_cache),
        cmocka_unit_test(large_scores),
        cmocka_unit_test(scores_that_run_away),
        cmocka_unit_test(bfloat16_is_rounded_once),
        cmocka_unit_test(gradients_are_finite_differences),
        cmocka_unit_test(a_document_does_not_see_the_others_tokens),
        cmocka_unit_test(a_document_alone_has_the_same_bits),
        cmocka_unit_test(nan_spreads_within_the_document_only),
        cmocka_unit_test(every_key_tile_has_one_segment),
        cmocka_unit_test(scratch_size_saturates),
    };
    return cmocka_run_group_tests(tests, rig_open, rig_close);
}
