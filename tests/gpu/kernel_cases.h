/* kernel_cases.h - norm, rope, gated activation, rows, loss, gradients: widths that 16-byte pieces cover and others, from one
 * element to more than a block holds. */
#ifndef FB_TESTS_GPU_KERNEL_CASES_H
#define FB_TESTS_GPU_KERNEL_CASES_H

#include "compare.h"

#define EACH_DTYPE(act) for (fb_dtype act = FB_F32; act != FB_DTYPE_COUNT; act = act == FB_F32 ? FB_BF16 : FB_DTYPE_COUNT)
static char case_name[256];
#define NAME(...) (snprintf(case_name, sizeof case_name, __VA_ARGS__), case_name)

/* ---- RMS norm ---- */

typedef struct norm_case {
    fb_dtype act;
    uint32_t t, c;
    int x, w, y, rstd, dy, add, dx, dw;
    bool accumulate;
} norm_case;

static fb_status launch_norm(fb_device *d, const void *args)
{
    const norm_case *k = args;
    return d->kernels->rms_norm(d, &(fb_rms_norm){ .act = k->act, .t = k->t, .c = k->c, .eps = 1e-6f, .x = at(k->x), .w = at(k->w),
        .y = at(k->y), .rstd = at(k->rstd) }, &t.err);
}

static fb_status launch_norm_bwd(fb_device *d, const void *args)
{
    const norm_case *k = args;
    return d->kernels->rms_norm_bwd(d, &(fb_rms_norm_bwd){ .act = k->act, .t = k->t, .c = k->c, .x = at(k->x), .w = at(k->w),
        .dy = at(k->dy), .rstd = at(k->rstd), .add = at(k->add), .dx = at(k->dx), .dw = at(k->dw), .accumulate = k->accumulate },
        &t.err);
}

typedef enum { ADD_NONE, ADD_APART, ADD_IN_PLACE, ADD_COUNT } add_kind;

static void norm_cases(void)
{
    static const uint32_t shapes[][2] = { { 1, 1 }, { 3, 17 }, { 5, 64 }, { 70, 576 }, { 40, 3584 }, { 9, 5120 }, { 3, 8192 },
                                          { 2, 16384 },
                                          { 2, 40004 }, { 3000, 896 } };
    for (size_t i = 0; i < FB_COUNT(shapes); i++)
        EACH_DTYPE(act) {
            norm_case k = { .act = act, .t = shapes[i][0], .c = shapes[i][1] };
            uint64_t n = (uint64_t)k.t * k.c;
            begin();
            k.x = input("x", (element)act, n, 0, 2), k.w = input("w", (element)act, k.c, 1, 0.5);
            k.y = output("y", (element)act, n, tolerance(act, 4)), k.rstd = output("rstd", T_F32, k.t, tolerance(FB_F32, k.c));
            compare(NAME("rms_norm %s %u x %u", fb_dtype_str(act), k.t, k.c), launch_norm, &k);
            for (int add = 0; add < ADD_COUNT; add++) {
                begin();
                k.accumulate = add != ADD_NONE;
                k.x = input("x", (element)act, n, 0, 2), k.w = input("w", (element)act, k.c, 1, 0.5);
                k.dy = input("dy", (element)act, n, 0, 1), k.rstd = input("rstd", T_F32, k.t, 0.9, 0.1);
                k.add = add == ADD_APART ? input("add", (element)act, n, 0, 1) : -1;
                if (add == ADD_IN_PLACE)
                    k.add = k.dx = in_out("dx", (element)act, n, 1, tolerance(act, 16));
                else
                    k.dx = output("dx", (element)act, n, tolerance(act, 16));
                k.dw = k.accumulate ? in_out("dw", T_F32, k.c, 1, tolerance(FB_F32, k.t))
                    : output("dw", T_F32, k.c, tolerance(FB_F32, k.t));
                compare(NAME("rms_norm_bwd %s %u x %u add %d", fb_dtype_str(act), k.t, k.c, add), launch_norm_bwd, &k);
            }
        }
}

/* ---- rope ---- */

typedef struct rope_case {
    fb_dtype act;
    uint32_t t, h, g, d;
    int qkv, q_norm, k_norm, position, cos, sin, q, k, dqkv, dq_norm, dk_norm;
    bool accumulate;
} rope_case;

static fb_rope_qk rope_args(const rope_case *k)
{
    return (fb_rope_qk){ .act = k->act, .t = k->t, .n_head = k->h, .n_kv_head = k->g, .head_dim = k->d, .eps = 1e-6f,
        .qkv = at(k->qkv), .q_norm = at(k->q_norm), .k_norm = at(k->k_norm), .position = at(k->position), .cos = at(k->cos),
        .sin = at(k->sin), .q = at(k->q), .k = at(k->k) };
}

static fb_status launch_rope(fb_device *d, const void *args)
{
    fb_rope_qk a = rope_args(args);
    return d->kernels->rope_qk(d, &a, &t.err);
}

static fb_status launch_rope_bwd(fb_device *d, const void *args)
{
    const rope_case *k = args;
    return d->kernels->rope_qk_bwd(d, &(fb_rope_qk_bwd){ .fwd = rope_args(k), .dq = at(k->q), .dk = at(k->k), .dqkv = at(k->dqkv),
        .dq_norm = at(k->dq_norm), .dk_norm = at(k->dk_norm), .accumulate = k->accumulate }, &t.err);
}

static void rope_inputs(rope_case *k, bool norm)
{
    enum { POSITIONS = 50 };
    begin();
    k->qkv = input("qkv", (element)k->act, (uint64_t)k->t * (k->h + 2 * k->g) * k->d, 0, 2);
    k->q_norm = norm ? input("q_norm", (element)k->act, k->d, 1, 0.5) : -1;
    k->k_norm = norm ? input("k_norm", (element)k->act, k->d, 1, 0.5) : -1;
    k->position = carve("position", T_U32, k->t);
    for (uint32_t i = 0; i < k->t; i++)
        set(k->position, i, below(POSITIONS));
    k->cos = carve("cos", T_F32, POSITIONS * k->d / 2), k->sin = carve("sin", T_F32, POSITIONS * k->d / 2);
    for (uint32_t i = 0; i < POSITIONS * k->d / 2; i++) {
        double angle = 4 * uniform();
        set(k->cos, i, cos(angle));
        set(k->sin, i, sin(angle));
    }
}

static void rope_cases(void)
{
    static const uint32_t shapes[][4] = { { 1, 1, 1, 2 }, { 5, 3, 1, 64 }, { 333, 9, 3, 64 }, { 67, 28, 4, 128 }, { 7, 2, 2, 256 },
                                          { 6, 3, 1, 80 }, { 6, 3, 1, 6 }, { 9, 4, 2, 20 }, { 4, 2, 1, 250 },
                                          { 1200, 16, 8, 128 } };
    for (size_t i = 0; i < FB_COUNT(shapes); i++)
        for (int norm = 0; norm < 2; norm++)
            EACH_DTYPE(act) {
                rope_case k = { .act = act, .t = shapes[i][0], .h = shapes[i][1], .g = shapes[i][2], .d = shapes[i][3] };
                uint64_t n_q = (uint64_t)k.t * k.h * k.d, n_k = (uint64_t)k.t * k.g * k.d;
                rope_inputs(&k, norm);
                k.q = output("q", (element)act, n_q, tolerance(act, k.d)),
                    k.k = output("k", (element)act, n_k, tolerance(act, k.d));
                compare(NAME("rope_qk %s T %u H %u G %u D %u norm %d", fb_dtype_str(act), k.t, k.h, k.g, k.d, norm), launch_rope,
                        &k);
                rope_inputs(&k, norm);
                k.accumulate = i % 2;
                k.q = input("dq", (element)act, n_q, 0, 1), k.k = input("dk", (element)act, n_k, 0, 1);
                k.dqkv = output("dqkv", (element)act, n_q + 2 * n_k, tolerance(act, 4.0 * k.d));
                double tol_q = tolerance(FB_F32, (double)k.t * k.h) + (act == FB_BF16 ? 0x1p-11 : 0); /* n is rounded: may flip */
                k.dq_norm = !norm ? -1 : k.accumulate ? in_out("dq_norm", T_F32, k.d, 1, tol_q)
                    : output("dq_norm", T_F32, k.d, tol_q);
                k.dk_norm = !norm ? -1 : k.accumulate ? in_out("dk_norm", T_F32, k.d, 1, tol_q)
                    : output("dk_norm", T_F32, k.d, tol_q);
                compare(NAME("rope_qk_bwd %s T %u H %u G %u D %u norm %d", fb_dtype_str(act), k.t, k.h, k.g, k.d, norm),
                        launch_rope_bwd, &k);
            }
}

/* ---- gated activation ---- */

typedef struct swiglu_case {
    fb_dtype act;
    uint32_t t, f;
    int gu, y, dy, dgu;
} swiglu_case;

static fb_status launch_swiglu(fb_device *d, const void *args)
{
    const swiglu_case *k = args;
    return d->kernels->swiglu(d, &(fb_swiglu){ .act = k->act, .t = k->t, .f = k->f, .gu = at(k->gu), .y = at(k->y) }, &t.err);
}

static fb_status launch_swiglu_bwd(fb_device *d, const void *args)
{
    const swiglu_case *k = args;
    return d->kernels->swiglu_bwd(d, &(fb_swiglu_bwd){ .act = k->act, .t = k->t, .f = k->f, .gu = at(k->gu), .dy = at(k->dy),
        .dgu = at(k->dgu) }, &t.err);
}

static void swiglu_cases(void)
{
    static const uint32_t shapes[][2] = { { 1, 1 }, { 3, 5 }, { 2, 12 }, { 37, 1536 }, { 11, 18944 }, { 300, 2056 } };
    for (size_t i = 0; i < FB_COUNT(shapes); i++)
        EACH_DTYPE(act) {
            swiglu_case k = { .act = act, .t = shapes[i][0], .f = shapes[i][1] };
            uint64_t n = (uint64_t)k.t * k.f;
            begin();
            k.gu = input("gu", (element)act, 2 * n, 0, 12);
            for (uint64_t j = 0; j < n && k.f == 5; j++) /* where exponentials overflow and vanish */
                set(k.gu, j, (j % 2 ? -1 : 1) * (60 + 20 * (double)j));
            k.y = output("y", (element)act, n, tolerance(act, 4));
            compare(NAME("swiglu %s %u x %u", fb_dtype_str(act), k.t, k.f), launch_swiglu, &k);
            begin();
            k.gu = input("gu", (element)act, 2 * n, 0, 6), k.dy = input("dy", (element)act, n, 0, 1);
            for (uint64_t j = 0; j < n && k.f == 5; j++)
                set(k.gu, j, (j % 2 ? -1 : 1) * (60 + 20 * (double)j));
            k.dgu = output("dgu", (element)act, 2 * n, tolerance(act, 4));
            compare(NAME("swiglu_bwd %s %u x %u", fb_dtype_str(act), k.t, k.f), launch_swiglu_bwd, &k);
        }
}

/* ---- rows ---- */

typedef struct rows_case {
    fb_dtype act;
    uint32_t n, t, c;
    int x, index, y, id, start, order, table;
} rows_case;

static fb_status launch_gather(fb_device *d, const void *args)
{
    const rows_case *k = args;
    return d->kernels->gather_rows(d, &(fb_gather_rows){ .act = k->act, .n = k->n, .c = k->c, .x = at(k->x), .index = at(k->index),
        .y = at(k->y) }, &t.err);
}

static fb_status launch_scatter(fb_device *d, const void *args)
{
    const rows_case *k = args;
    return d->kernels->scatter_rows(d, &(fb_scatter_rows){ .act = k->act, .n = k->n, .t = k->t, .c = k->c, .x = at(k->x),
        .index = at(k->index), .y = at(k->y) }, &t.err);
}

static fb_status launch_embed(fb_device *d, const void *args)
{
    const rows_case *k = args;
    return d->kernels->embed_grad(d, &(fb_embed_grad){ .act = k->act, .c = k->c, .n_unique = k->n, .dx = at(k->x), .id = at(k->id),
        .start = at(k->start), .order = at(k->order), .d_table = at(k->table) }, &t.err);
}

static void rows_cases(void)
{
    static const uint32_t shapes[][3] = { { 1, 1, 1 }, { 3, 9, 5 }, { 200, 300, 576 }, { 0, 4, 64 }, { 33, 64, 3584 },
                                          { 7, 7, 20000 } };
    for (size_t i = 0; i < FB_COUNT(shapes); i++)
        EACH_DTYPE(act) {
            rows_case k = { .act = act, .n = shapes[i][0], .t = shapes[i][1], .c = shapes[i][2] };
            begin();
            k.x = input("x", (element)act, (uint64_t)k.t * k.c, 0, 1), k.index = carve("index", T_U32, k.n);
            for (uint32_t j = 0; j < k.n; j++)
                set(k.index, j, below(k.t));
            k.y = output("y", (element)act, (uint64_t)k.n * k.c, 0);
            compare(NAME("gather_rows %s %u of %u x %u", fb_dtype_str(act), k.n, k.t, k.c), launch_gather, &k);
            begin();
            k.x = input("x", (element)act, (uint64_t)k.n * k.c, 0, 1), k.index = carve("index", T_U32, k.n);
            for (uint32_t j = 0; j < k.n; j++)
                set(k.index, j, k.t - 1 - j);
            k.y = output("y", (element)act, (uint64_t)k.t * k.c, 0);
            compare(NAME("scatter_rows %s %u of %u x %u", fb_dtype_str(act), k.n, k.t, k.c), launch_scatter, &k);
        }
}

/* Token ids 0, 3, 6 ..: two of them have most rows. */
static void embed_cases(void)
{
    /* ids, rows, width */
    static const uint32_t shapes[][3] = { { 1, 1, 1 }, { 5, 40, 17 }, { 60, 700, 576 }, { 9, 64, 3584 }, { 4, 33, 2056 } };
    for (size_t i = 0; i < FB_COUNT(shapes); i++)
        EACH_DTYPE(act) {
            rows_case k = { .act = act, .n = shapes[i][0], .t = shapes[i][1], .c = shapes[i][2] };
            begin();
            k.x = input("dx", (element)act, (uint64_t)k.t * k.c, 0, 1);
            k.id = carve("id", T_U32, k.n), k.start = carve("start", T_U32, k.n + 1), k.order = carve("order", T_U32, k.t);
            uint32_t first = 0;
            for (uint32_t u = 0; u < k.n; u++) {
                set(k.id, u, 3 * u);
                set(k.start, u, first);
                first += u == k.n / 2 ? 1 + (k.t - k.n) / 2 : 1; /* the last id takes what is left */
            }
            set(k.start, k.n, k.t);
            for (uint32_t j = 0; j < k.t; j++)
                set(k.order, j, k.t - 1 - j);
            k.table = in_out("d_table", T_F32, (uint64_t)(3 * k.n) * k.c, 1, tolerance(FB_F32, k.t));
            compare(NAME("embed_grad %s %u ids, %u rows x %u", fb_dtype_str(act), k.n, k.t, k.c), launch_embed, &k);
        }
}

/* ---- loss ---- */

typedef struct loss_case {
    fb_dtype act;
    uint32_t n, v;
    int logits, target, d_logits, sum, loss;
} loss_case;

static fb_status launch_loss(fb_device *d, const void *args)
{
    const loss_case *k = args;
    return d->kernels->cross_entropy(d, &(fb_cross_entropy){ .act = k->act, .n = k->n, .v = k->v, .logits = at(k->logits),
        .target = at(k->target), .grad_scale = 0.037f, .d_logits = at(k->d_logits), .loss_sum = at(k->sum), .loss = at(k->loss) },
        &t.err);
}

typedef enum { LOSS_ONLY, LOSS_APART, LOSS_IN_PLACE, LOSS_COUNT } loss_kind;

static void loss_cases(void)
{
    static const uint32_t shapes[][2] = { { 1, 1 }, { 3, 7 }, { 5, 8 }, { 2100, 40 }, { 7, 49152 }, { 5, 50257 }, { 9, 152064 } };
    for (size_t i = 0; i < FB_COUNT(shapes); i++)
        for (int kind = 0; kind < LOSS_COUNT; kind++)
            EACH_DTYPE(act) {
                loss_case k = { .act = act, .n = shapes[i][0], .v = shapes[i][1] };
                uint64_t n = (uint64_t)k.n * k.v;
                if (kind == LOSS_IN_PLACE && act != FB_F32)
                    continue;
                begin();
                /* e^x in both sums is within 2 u |x|, |x| < 32; the fast one used for bfloat16 gradients as well. */
                double tol = tolerance(FB_F32, k.v) + 64 * 0x1p-24;
                if (kind == LOSS_IN_PLACE)
                    k.logits = k.d_logits = in_out("logits", T_F32, n, 8, tol);
                else
                    k.logits = input("logits", T_F32, n, 0, 8);
                for (uint32_t row = 0; row < k.n && k.v > 4; row++) {
                    set(k.logits, (uint64_t)row * k.v + below(k.v), 20); /* a peak, and a logit that is masked out */
                    if (row % 3 == 1)
                        set(k.logits, (uint64_t)row * k.v + 3, -INFINITY);
                }
                k.target = carve("target", T_U32, k.n);
                for (uint32_t row = 0; row < k.n; row++) {
                    uint32_t target = row == 0 ? k.v - 1 : row == 1 ? 0 : below(k.v);
                    set(k.target, row, target == 3 ? 0 : target);
                }
                if (kind == LOSS_APART)
                    k.d_logits = output("d_logits", (element)act, n, act == FB_F32 ? tol : 0x1p-11);
                else if (kind == LOSS_ONLY)
                    k.d_logits = -1;
                k.sum = in_out("loss_sum", T_F64, 1, 5, tol);
                k.loss = kind == LOSS_APART ? -1 : output("loss", T_F32, k.n, tol);
                compare(NAME("cross_entropy %s %u x %u kind %d", fb_dtype_str(act), k.n, k.v, kind), launch_loss, &k);
            }
}

/* ---- gradients ---- */

typedef struct grad_case {
    fb_dtype act;
    uint64_t m, n, ld;
    int in, out, sq;
    bool accumulate;
} grad_case;

static fb_status launch_bias(fb_device *d, const void *args)
{
    const grad_case *k = args;
    return d->kernels->bias_grad(d, &(fb_bias_grad){ .act = k->act, .m = (uint32_t)k->m, .n = (uint32_t)k->n, .dy = at(k->in),
        .dy_ld = k->ld, .db = at(k->out), .accumulate = k->accumulate }, &t.err);
}

static fb_status launch_grad_out(fb_device *d, const void *args)
{
    const grad_case *k = args;
    return d->kernels->grad_out(d, &(fb_grad_out){ .out_dtype = k->act, .n = k->n, .acc = at(k->in), .out = at(k->out),
                                                   .sq = at(k->sq), .accumulate = k->accumulate }, &t.err);
}

static void bias_cases(void)
{
    static const uint32_t shapes[][3] = { { 1, 1, 1 }, { 3, 7, 9 }, { 100, 8, 8 }, { 129, 4608, 4608 }, { 5000, 576, 584 },
                                          { 64, 37888, 37888 } };
    for (size_t i = 0; i < FB_COUNT(shapes); i++)
        EACH_DTYPE(act) {
            grad_case k = { .act = act, .m = shapes[i][0], .n = shapes[i][1], .ld = shapes[i][2], .accumulate = i % 2 };
            begin();
            k.in = input("dy", (element)act, k.m * k.ld, 0, 1);
            k.out = k.accumulate ? in_out("db", T_F32, k.n, 1, tolerance(FB_F32, (double)k.m))
                                 : output("db", T_F32, k.n, tolerance(FB_F32, (double)k.m));
            compare(NAME("bias_grad %s %u x %u", fb_dtype_str(act), shapes[i][0], shapes[i][1]), launch_bias, &k);
        }
}

/* The sum is made in double, of exact squares: only its last bits depend on the order. */
static void grad_out_cases(void)
{
    static const uint64_t sizes[] = { 1, 7, 8, 65535, 65536, 65537, 1000003, 20000008 };
    for (size_t i = 0; i < FB_COUNT(sizes); i++)
        for (int in_place = 0; in_place < 2; in_place++)
            EACH_DTYPE(act) {
                grad_case k = { .act = act, .n = sizes[i], .accumulate = i % 2 };
                if (in_place && act != FB_F32)
                    continue;
                begin();
                k.in = input("acc", T_F32, k.n, 0, 1);
                k.out = in_place ? k.in : output("out", (element)act, k.n, 0);
                k.sq = k.accumulate ? in_out("sq", T_F64, 1, 5, 1e-12) : output("sq", T_F64, 1, 1e-12);
                compare(NAME("grad_out %s %llu%s", fb_dtype_str(act), (unsigned long long)k.n, in_place ? " in place" : ""),
                        launch_grad_out, &k);
            }
}

typedef struct update_case {
    fb_dtype act, g_dtype;
    uint64_t n;
    int      w, low, g, m, v, guard;
} update_case;

static fb_status launch_update(fb_device *d, const void *args)
{
    const update_case *k = args;
    const fb_adamw a = { .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1, .clip = 0.37, .step = 7 };
    return d->kernels->update(d, &(fb_update){ .act = k->act, .g_dtype = k->g_dtype, .n = k->n, .w = at(k->w),
        .low = k->act == FB_BF16 ? at(k->low) : NULL, .g = at(k->g), .m = at(k->m), .v = at(k->v),
        .adamw = fb_adamw_scalars_of(&a, k->n % 2), .guard = k->guard >= 0 ? at(k->guard) : NULL }, &t.err);
}

/* The host's own bits.  Moments from tiny to large, so that each comparison with a threshold is met. */
static void update_cases(void)
{
    static const uint64_t sizes[] = { 1, 7, 8, 65537, 1000003 };
    for (size_t i = 0; i < FB_COUNT(sizes); i++)
        for (int narrow = 0; narrow < 2; narrow++)
            for (int guard = 0; guard < 3; guard++)
                EACH_DTYPE(act) {
                    update_case k = { .act = act, .g_dtype = narrow ? act : FB_F32, .n = sizes[i], .guard = -1 };
                    if (narrow && act == FB_F32)
                        continue;
                    begin();
                    k.w = in_out("w", (element)act, k.n, 0.02, 0);
                    k.low = in_out("low, in pairs", T_U32, (k.n + 1) / 2, 0, 0);
                    k.g = input("g", (element)k.g_dtype, k.n, 0, 1e-3);
                    k.m = in_out("m", T_F32, k.n, 1e-3, 0);
                    k.v = in_out("v", T_F32, k.n, 1e-6, 0);
                    for (uint64_t e = 0; e < (k.n + 1) / 2; e++)
                        set(k.low, e, below(UINT32_MAX));
                    for (uint64_t e = 0; e < k.n; e++) {
                        double scale = ldexp(1, -(int)(e % 140));
                        set(k.v, e, fabs(get(t.image, k.v, e)) * scale);
                        set(k.m, e, get(t.image, k.m, e) * scale);
                    }
                    if (guard) {
                        k.guard = input("guard", T_F64, 1, 1, 0);
                        set(k.guard, 0, guard == 1 ? 3.5 : INFINITY);
                    }
                    compare(NAME("update %s from %s %llu%s", fb_dtype_str(act), fb_dtype_str(k.g_dtype), (unsigned long long)k.n,
                                 guard == 2 ? ", guarded" : ""), launch_update, &k);
                }
}

static void kernel_cases(void)
{
    norm_cases();
    rope_cases();
    swiglu_cases();
    rows_cases();
    embed_cases();
    loss_cases();
    bias_cases();
    grad_out_cases();
    update_cases();
}

#endif
