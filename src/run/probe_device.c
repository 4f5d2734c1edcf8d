/* probe_device.c - what the device computes: products, attention, row kernels. */
#include <assert.h>
#include <math.h>

#include "base/clock.h"
#include "run/probe.h"

typedef fb_status (*kernel)(fb_device *d, const void *args, fb_error *err);

/* A wrapper a kernel, since a function pointer may not be called through another type. */
#define DEFINE_RUN(name)                                                                \
    static fb_status run_##name(fb_device *d, const void *args, fb_error *err)          \
    {                                                                                   \
        return d->kernels->name(d, args, err);                                          \
    }
DEFINE_RUN(matmul_nt)
DEFINE_RUN(matmul_tn)
DEFINE_RUN(attention)
DEFINE_RUN(attention_bwd)
DEFINE_RUN(rms_norm)
DEFINE_RUN(rms_norm_bwd)
DEFINE_RUN(swiglu)
DEFINE_RUN(swiglu_bwd)

typedef struct call {
    kernel      run;
    const void *args;
} call;

enum { CALLS_MAX = 256 };
static const double run_seconds = 0.04, patience = 1.0; /* of a repetition; of all of a figure's, after the third */

/* Runs the calls one after the other, `times` over; seconds on the device's clock. */
static fb_status time_once(fb_prober *p, const call *calls, uint32_t n, uint32_t times, double *seconds, fb_error *err)
{
    fb_status st = FB_OK;
    fb_device *d = p->d;
    double since, until;
    FB_TRY(d->ops->record(d, FB_STREAM_COMPUTE, p->since, err));
    for (uint32_t t = 0; t < times; t++)
        for (uint32_t i = 0; i < n; i++)
            FB_TRY(calls[i].run(d, calls[i].args, err));
    FB_TRY(d->ops->record(d, FB_STREAM_COMPUTE, p->until, err));
    FB_TRY(d->ops->sync(d, FB_STREAM_COMPUTE, err));
    FB_TRY(d->ops->event_time(d, p->since, &since, err));
    FB_TRY(d->ops->event_time(d, p->until, &until, err));
    *seconds = fmax(until - since, 1e-9) / times; /* a clock that has not moved is no rate */
done:
    return st;
}

/* Seconds that the calls take in a row: the median.  The first run, which may build plans, does not count. */
static fb_status time_calls(fb_prober *p, const call *calls, uint32_t n, double *seconds, fb_error *err)
{
    fb_status st = FB_OK;
    double samples[FB_PROBE_RUNS], once, start = fb_clock();
    int got = 0;
    FB_TRY(time_once(p, calls, n, 1, &once, err));
    FB_TRY(time_once(p, calls, n, 1, &once, err));
    uint32_t times = (uint32_t)fmin(CALLS_MAX / n, ceil(run_seconds / once));
    while (got < FB_PROBE_RUNS && (got < 3 || fb_clock() - start < patience))
        FB_TRY(time_once(p, calls, n, times, &samples[got++], err));
    *seconds = fb_prober_median(p, samples, got);
done:
    return st;
}

/* ---- products ---- */

enum { PRODUCT_MIN = 128, PRODUCT_MAX = 8192 };
static const double product_seconds = 0.015;

typedef struct product {
    uint64_t size; /* rows and columns of the operands */
    void *x, *w, *y;
    fb_matmul_nt nt;
    fb_matmul_tn tn; /* accumulates */
} product;

static void product_close(fb_prober *p, product *q)
{
    fb_prober_settle(p);
    p->d->ops->free(p->d, q->x);
    p->d->ops->free(p->d, q->w);
    p->d->ops->free(p->d, q->y);
    *q = (product){ 0 };
}

static fb_status product_open(fb_prober *p, uint32_t size, product *q, fb_error *err)
{
    fb_status st = FB_OK;
    uint64_t n = (uint64_t)size * size;
    *q = (product){ .size = size };
    FB_TRY(fb_prober_alloc(p, n * fb_dtype_size(p->act), &q->x, err));
    FB_TRY(fb_prober_alloc(p, n * fb_dtype_size(p->act), &q->w, err));
    FB_TRY(p->d->ops->alloc(p->d, n * sizeof(float), &q->y, err));
    FB_TRY(p->d->ops->fill_zero(p->d, FB_STREAM_COMPUTE, q->y, n * sizeof(float), err)); /* the accumulator of tn too */
    q->nt = (fb_matmul_nt){ .act = p->act, .y_dtype = p->act, .m = size, .n = size, .k = size, .x = q->x, .x_ld = size,
                            .w = q->w, .w_ld = size, .y = q->y, .y_ld = size };
    q->tn = (fb_matmul_tn){ .act = p->act, .m = size, .n = size, .k = size, .dy = q->x, .dy_ld = size, .x = q->w, .x_ld = size,
                            .dw = q->y, .accumulate = true };
done:
    if (st != FB_OK)
        product_close(p, q);
    return st;
}

/* The largest cube, up to PRODUCT_MAX, that still takes a moment only. */
static fb_status choose_size(fb_prober *p, product *q, fb_error *err)
{
    fb_status st = FB_OK;
    double seconds = 0;
    for (uint32_t size = 2 * PRODUCT_MIN;; size *= 2) {
        FB_TRY(product_open(p, size, q, err));
        call c = { run_matmul_nt, &q->nt };
        for (int i = 0; i < 3; i++) /* the first ones warm up */
            FB_TRY(time_once(p, &c, 1, 1, &seconds, err));
        if (size == PRODUCT_MAX || 4 * seconds > product_seconds)
            break;
        product_close(p, q);
    }
done:
    if (st != FB_OK)
        product_close(p, q);
    return st;
}

/* A GPU runs at its power limit only after a while, and much faster before. */
static fb_status warm_up(fb_prober *p, const product *q, fb_error *err)
{
    fb_status st = FB_OK;
    const double wanted = p->info.unified ? 0.5 : 2.5;
    double ignored, start = fb_clock();
    while (fb_clock() - start < wanted)
        FB_TRY(time_once(p, &(call){ run_matmul_nt, &q->nt }, 1, 8, &ignored, err));
done:
    return st;
}

/* The curve: x[m, size] w[size, size]^T against m, as when few tokens meet whole weights. */
fb_status fb_probe_products(fb_prober *p, fb_error *err)
{
    fb_status st = FB_OK;
    product q = { 0 };
    fb_machine *m = &p->m;
    double seconds, square;
    FB_TRY(choose_size(p, &q, err));
    FB_TRY(warm_up(p, &q, err));
    m->matmul_rows = (fb_curve){ 0 };
    m->matmul_peak = 0;
    for (uint32_t rows = PRODUCT_MIN; rows <= q.size; rows *= 2) {
        fb_matmul_nt a = q.nt;
        a.m = rows;
        FB_TRY(time_calls(p, &(call){ run_matmul_nt, &a }, 1, &seconds, err));
        uint32_t i = m->matmul_rows.n++;
        m->matmul_rows.x[i] = rows;
        m->matmul_rows.y[i] = 2.0 * rows * (double)q.size * (double)q.size / seconds;
        m->matmul_peak = fmax(m->matmul_peak, m->matmul_rows.y[i]);
    }
    square = m->matmul_rows.y[m->matmul_rows.n - 1];
    for (uint32_t i = 0; i < m->matmul_rows.n; i++)
        m->matmul_rows.y[i] /= m->matmul_peak;
    FB_TRY(time_calls(p, &(call){ run_matmul_tn, &q.tn }, 1, &seconds, err));
    m->matmul_accumulate = fmin(1, 2.0 * (double)q.size * (double)q.size * (double)q.size / seconds / square);
done:
    product_close(p, &q);
    return st;
}

/* ---- attention ---- */

enum { HEADS = 16, KV_HEADS = 4, HEAD_DIM = 128, TOKENS_MAX = 16384, LENGTHS = 4 };
static const double attention_seconds = 0.05;

/* All tokens in documents of one length. */
typedef struct attention {
    void *qkv, *o, *d_o, *dqkv, *lse, *span, *scratch;
    fb_attention_bwd bwd; /* with the forward in it */
} attention;

static void attention_close(fb_prober *p, attention *a)
{
    fb_prober_settle(p);
    void *const all[] = { a->qkv, a->o, a->d_o, a->dqkv, a->lse, a->span, a->scratch };
    for (size_t i = 0; i < FB_COUNT(all); i++)
        p->d->ops->free(p->d, all[i]);
    *a = (attention){ 0 };
}

static fb_status attention_open(fb_prober *p, uint32_t t, attention *a, fb_error *err)
{
    fb_status st = FB_OK;
    fb_device *d = p->d;
    const uint64_t size = fb_dtype_size(p->act), width = (HEADS + 2 * KV_HEADS) * HEAD_DIM, q_width = HEADS * HEAD_DIM;
    FB_TRY(fb_prober_alloc(p, t * width * size, &a->qkv, err));
    FB_TRY(fb_prober_alloc(p, t * q_width * size, &a->o, err));
    FB_TRY(fb_prober_alloc(p, t * q_width * size, &a->d_o, err));
    FB_TRY(fb_prober_alloc(p, t * width * size, &a->dqkv, err));
    FB_TRY(d->ops->alloc(d, (uint64_t)HEADS * t * sizeof(float), &a->lse, err));
    FB_TRY(d->ops->alloc(d, t * sizeof(fb_span), &a->span, err));
    FB_TRY(d->ops->alloc(d, d->kernels->attention_scratch(t, HEADS, HEAD_DIM), &a->scratch, err));
    unsigned char *q = a->qkv, *dq = a->dqkv;
    const uint64_t k = q_width * size, v = k + KV_HEADS * HEAD_DIM * size;
    fb_attention fwd = { .act = p->act, .t = t, .n_head = HEADS, .n_kv_head = KV_HEADS, .head_dim = HEAD_DIM,
                         .scale = 1 / sqrtf(HEAD_DIM), .span = a->span, .q = q, .q_ld = width, .k = q + k, .k_ld = width,
                         .v = q + v, .v_ld = width, .o = a->o, .o_ld = q_width, .lse = a->lse };
    a->bwd = (fb_attention_bwd){ .fwd = fwd, .d_o = a->d_o, .do_ld = q_width, .dq = dq, .dq_ld = width, .dk = dq + k,
                                 .dk_ld = width, .dv = dq + v, .dv_ld = width, .scratch = a->scratch };
done:
    return st; /* whoever asked closes, either way */
}

static fb_status set_documents(fb_prober *p, attention *a, uint32_t length, fb_error *err)
{
    fb_attention *f = &a->bwd.fwd;
    fb_span *span = p->notes;
    f->n_span = f->t / length;
    f->q_len_max = f->k_len_max = length;
    assert(f->n_span * sizeof *span <= FB_PROBE_NOTES_SIZE);
    for (uint32_t i = 0; i < f->n_span; i++)
        span[i] = (fb_span){ i * length, length, i * length, length };
    fb_status st = p->d->ops->upload(p->d, FB_STREAM_COMPUTE, a->span, span, f->n_span * sizeof *span, err);
    return st != FB_OK ? st : p->d->ops->sync(p->d, FB_STREAM_COMPUTE, err); /* the notes are free again */
}

/* Two products over the causal half, five in the backward. */
static double attention_flop(double tokens, double length)
{
    return 2 * 2.0 * HEADS * HEAD_DIM * tokens * length / 2;
}

fb_status fb_probe_attention(fb_prober *p, fb_error *err)
{
    fb_status st = FB_OK;
    attention a = { 0 };
    double seconds;
    uint32_t tokens = TOKENS_MAX;
    while (tokens > 1024 && attention_flop(tokens, tokens) > attention_seconds * p->m.matmul_peak)
        tokens /= 4;
    FB_TRY(attention_open(p, tokens, &a, err));
    p->m.attention_fwd = p->m.attention_bwd = (fb_curve){ .n = LENGTHS };
    for (uint32_t i = 0; i < LENGTHS; i++) {
        uint32_t length = tokens >> 2 * (LENGTHS - 1 - i);
        double flop = attention_flop(tokens, length);
        FB_TRY(set_documents(p, &a, length, err));
        FB_TRY(time_calls(p, &(call){ run_attention, &a.bwd.fwd }, 1, &seconds, err));
        p->m.attention_fwd.x[i] = length;
        p->m.attention_fwd.y[i] = flop / seconds;
        FB_TRY(time_calls(p, &(call){ run_attention_bwd, &a.bwd }, 1, &seconds, err));
        p->m.attention_bwd.x[i] = length;
        p->m.attention_bwd.y[i] = 2.5 * flop / seconds;
    }
done:
    attention_close(p, &a);
    return st;
}

/* ---- row kernels ---- */

enum { WIDTH = 4096 };

/* The norms and the activation of a layer, forward and backward, on arrays that no cache holds. */
fb_status fb_probe_rows(fb_prober *p, fb_error *err)
{
    fb_status st = FB_OK;
    fb_device *d = p->d;
    const uint64_t size = (p->info.unified ? 32u : 128u) << 20; /* of an array [t, WIDTH] */
    const uint32_t t = (uint32_t)(size / WIDTH / fb_dtype_size(p->act));
    void *x = NULL, *y = NULL, *gu = NULL, *dgu = NULL, *w = NULL, *rstd = NULL, *dw = NULL;
    double seconds;
    FB_TRY(fb_prober_alloc(p, size, &x, err));
    FB_TRY(fb_prober_alloc(p, size, &y, err));
    FB_TRY(fb_prober_alloc(p, 2 * size, &gu, err));
    FB_TRY(fb_prober_alloc(p, 2 * size, &dgu, err));
    FB_TRY(fb_prober_alloc(p, WIDTH * sizeof(float), &w, err));
    FB_TRY(d->ops->alloc(d, t * sizeof(float), &rstd, err));
    FB_TRY(d->ops->alloc(d, WIDTH * sizeof(float), &dw, err));
    fb_rms_norm norm = { .act = p->act, .t = t, .c = WIDTH, .eps = 1e-5f, .x = x, .w = w, .y = y, .rstd = rstd };
    const call calls[] = {
        { run_rms_norm, &norm },
        { run_rms_norm_bwd, &(fb_rms_norm_bwd){ .act = p->act, .t = t, .c = WIDTH, .x = x, .w = w, .dy = y, .rstd = rstd,
                                                .add = gu, .dx = dgu, .dw = dw } },
        { run_swiglu, &(fb_swiglu){ .act = p->act, .t = t, .f = WIDTH, .gu = gu, .y = y } },
        { run_swiglu_bwd, &(fb_swiglu_bwd){ .act = p->act, .t = t, .f = WIDTH, .gu = gu, .dy = y, .dgu = dgu } },
    };
    const double moved = (2 + 4 + 3 + 5) * (double)size; /* each operand once, read or written */
    FB_TRY(time_calls(p, calls, FB_COUNT(calls), &seconds, err));
    p->m.memory_rate = moved / seconds;
    norm.t = 1;
    FB_TRY(time_calls(p, calls, 1, &seconds, err));
    p->m.launch = seconds;
done:
    fb_prober_settle(p);
    for (size_t i = 0; i < 7; i++)
        d->ops->free(d, (void *[]){ x, y, gu, dgu, w, rstd, dw }[i]);
    return st;
}
