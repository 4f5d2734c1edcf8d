/* layer_cases.h - matmul and attention: the layers of SmolLM2-135M and Qwen2.5-7B with few tokens, and odd shapes. */
#ifndef FB_TESTS_GPU_LAYER_CASES_H
#define FB_TESTS_GPU_LAYER_CASES_H

#include "compare.h"
#include "kernel_cases.h"

/* ---- matmul ---- */

typedef struct matmul_case {
    fb_dtype act, y_dtype;
    uint32_t m, n, k, gap; /* elements between rows of what is not contiguous */
    int x, w, bias, add, y;
    bool accumulate;
} matmul_case;

static fb_status launch_nt(fb_device *d, const void *args)
{
    const matmul_case *k = args;
    return d->kernels->matmul_nt(d, &(fb_matmul_nt){ .act = k->act, .y_dtype = k->y_dtype, .m = k->m, .n = k->n, .k = k->k,
        .x = at(k->x), .x_ld = k->k + k->gap, .w = at(k->w), .w_ld = k->k, .bias = at(k->bias), .add = at(k->add),
        .add_ld = k->n + k->gap, .y = at(k->y), .y_ld = k->n + k->gap }, &t.err);
}

static fb_status launch_nn(fb_device *d, const void *args)
{
    const matmul_case *k = args;
    return d->kernels->matmul_nn(d, &(fb_matmul_nn){ .act = k->act, .m = k->m, .n = k->n, .k = k->k, .dy = at(k->x),
        .dy_ld = k->n + k->gap, .w = at(k->w), .w_ld = k->k, .dx = at(k->y), .dx_ld = k->k + k->gap }, &t.err);
}

static fb_status launch_tn(fb_device *d, const void *args)
{
    const matmul_case *k = args;
    return d->kernels->matmul_tn(d, &(fb_matmul_tn){ .act = k->act, .m = k->m, .n = k->n, .k = k->k, .dy = at(k->x),
        .dy_ld = k->n + k->gap, .x = at(k->w), .x_ld = k->k + k->gap, .dw = at(k->y), .accumulate = k->accumulate }, &t.err);
}

typedef enum { Y_PLAIN, Y_BIAS, Y_ADD, Y_BIAS_ADD, Y_ADD_IN_PLACE, Y_COUNT } y_kind;

/* Rows of `width` elements, gap apart; the gaps of an output are nobody's. */
static int matrix(const char *name, fb_dtype type, uint64_t rows, uint64_t width, uint32_t gap)
{
    return input(name, (element)type, rows * (width + gap), 0, 1);
}

static void nt_case(fb_dtype act, fb_dtype y_dtype, uint32_t m, uint32_t n, uint32_t kk, uint32_t gap, y_kind kind)
{
    static const char *const kinds[] = { "", " +bias", " +add", " +bias +add", " +add in place" };
    matmul_case k = { .act = act, .y_dtype = y_dtype, .m = m, .n = n, .k = kk, .gap = gap, .bias = -1, .add = -1 };
    /* cuBLASLt rounds the product to bfloat16 before it adds, as a model in PyTorch does, whose layers end before the
     * residual sum: once more than kernels.h says, and up to half an ulp in every element. */
    double tol = y_dtype == FB_BF16 && kind >= Y_ADD ? 3 * 0x1p-9 : tolerance(y_dtype, kk);
    begin();
    k.x = matrix("x", act, m, kk, gap), k.w = matrix("w", act, n, kk, 0);
    if (kind == Y_BIAS || kind == Y_BIAS_ADD)
        k.bias = input("bias", (element)act, n, 0, 4);
    if (kind == Y_ADD || kind == Y_BIAS_ADD)
        k.add = input("add", (element)act, (uint64_t)m * (n + gap), 0, 4);
    if (kind == Y_ADD_IN_PLACE)
        k.add = k.y = in_out("y", (element)y_dtype, (uint64_t)m * (n + gap), 4, tol);
    else
        k.y = output("y", (element)y_dtype, (uint64_t)m * (n + gap), tol);
    compare(NAME("matmul_nt %s -> %s %u x %u x %u gap %u%s", fb_dtype_str(act), fb_dtype_str(y_dtype), m, n, kk, gap, kinds[kind]),
            launch_nt, &k);
}

static void nn_case(fb_dtype act, uint32_t m, uint32_t n, uint32_t kk, uint32_t gap)
{
    matmul_case k = { .act = act, .m = m, .n = n, .k = kk, .gap = gap };
    begin();
    k.x = matrix("dy", act, m, n, gap), k.w = matrix("w", act, n, kk, 0);
    k.y = output("dx", (element)act, (uint64_t)m * (kk + gap), tolerance(act, n));
    compare(NAME("matmul_nn %s %u x %u x %u gap %u", fb_dtype_str(act), m, n, kk, gap), launch_nn, &k);
}

static void tn_case(fb_dtype act, uint32_t m, uint32_t n, uint32_t kk, uint32_t gap, bool accumulate)
{
    matmul_case k = { .act = act, .m = m, .n = n, .k = kk, .gap = gap, .accumulate = accumulate };
    double tol = tolerance(FB_F32, m);
    begin();
    k.x = matrix("dy", act, m, n, gap), k.w = matrix("x", act, m, kk, gap);
    k.y = accumulate ? in_out("dw", T_F32, (uint64_t)n * kk, 4, tol) : output("dw", T_F32, (uint64_t)n * kk, tol);
    compare(NAME("matmul_tn %s %u x %u x %u gap %u%s", fb_dtype_str(act), m, n, kk, gap, accumulate ? " +=" : ""), launch_tn, &k);
}

static void matmul_cases(void)
{
    /* tokens, outputs, inputs, gap */
    static const uint32_t shapes[][4] = {
        { 1, 1, 1, 0 }, { 5, 7, 11, 0 }, { 5, 7, 11, 3 }, { 33, 24, 40, 8 }, { 1, 960, 576, 0 },
        { 37, 960, 576, 0 }, { 37, 576, 576, 0 }, { 130, 3072, 576, 0 }, { 37, 576, 1536, 0 },             /* SmolLM2-135M */
        { 24, 4608, 3584, 0 }, { 24, 3584, 3584, 0 }, { 17, 4736, 3584, 0 }, { 24, 3584, 4736, 0 },        /* Qwen2.5-7B, MLP / 4 */
    };
    for (size_t i = 0; i < FB_COUNT(shapes); i++)
        EACH_DTYPE(act) {
            const uint32_t *s = shapes[i];
            for (int kind = 0; kind < Y_COUNT; kind++)
                nt_case(act, act, s[0], s[1], s[2], s[3], (y_kind)kind);
            nn_case(act, s[0], s[1], s[2], s[3]);
            for (int accumulate = 0; accumulate < 2; accumulate++)
                tn_case(act, s[0], s[1], s[2], s[3], accumulate);
        }
    nt_case(FB_BF16, FB_BF16, 17, 37888, 3584, 0, Y_PLAIN);
    nn_case(FB_BF16, 17, 37888, 3584, 0);
    tn_case(FB_BF16, 17, 18944, 3584, 0, true);
    /* The heads: float32 logits. */
    nt_case(FB_BF16, FB_F32, 9, 49152, 576, 0, Y_PLAIN);
    nt_case(FB_BF16, FB_F32, 5, 7, 11, 0, Y_PLAIN);
    nt_case(FB_BF16, FB_F32, 8, 152064, 512, 0, Y_PLAIN);
    tn_case(FB_BF16, 2048, 960, 576, 0, true);
}

/* Without full_determinism: products that are large enough to be measured, then more of their class.  The first of the two
 * runs on cuda holds the trials, the second does not: that their bits agree says that no trial has left anything in a sum. */
static void measured_matmul_cases(void)
{
    static const uint32_t tokens[] = { 2304, 4000, 1000 }; /* a class, measured by its first; too few */
    EACH_DTYPE(act)
        for (size_t i = 0; i < FB_COUNT(tokens); i++) {
            uint32_t m = tokens[i], n = 2048, k = 2080;
            if (i == 0)
                tn_case(act, m, n, k, 0, true); /* nothing to take over yet */
            for (int kind = 0; kind < Y_COUNT; kind++)
                nt_case(act, act, m, n, k, 0, (y_kind)kind);
            nn_case(act, m, n, k, 0);
            tn_case(act, m, n, k, 0, false);
            tn_case(act, m, n, k, 0, true);
        }
    nt_case(FB_BF16, FB_BF16, 2305, 2051, 2085, 3, Y_BIAS_ADD);
    nt_case(FB_BF16, FB_BF16, 2307, 2051, 2085, 3, Y_ADD_IN_PLACE);
    nt_case(FB_BF16, FB_F32, 2304, 2048, 2080, 0, Y_PLAIN);
    nt_case(FB_BF16, FB_F32, 2304, 2048, 2080, 0, Y_BIAS_ADD);
}

/* ---- attention ---- */

typedef struct attention_case {
    fb_dtype act;
    uint32_t t, keys, h, g, d, window, n_span, q_max, k_max;
    int span, q, k, v, o, lse, d_o, dq, dk, dv, scratch;
} attention_case;

static fb_attention attention_args(const attention_case *c)
{
    /* v lies in qkv, as in a layer. */
    uint32_t qkv_ld = (c->h + 2 * c->g) * c->d;
    return (fb_attention){ .act = c->act, .t = c->t, .n_head = c->h, .n_kv_head = c->g, .head_dim = c->d, .window = c->window,
        .scale = 1.0f / sqrtf((float)c->d), .span = at(c->span), .n_span = c->n_span, .q_len_max = c->q_max, .k_len_max = c->k_max,
        .q = at(c->q), .q_ld = c->h * c->d, .k = at(c->k), .k_ld = c->g * c->d,
        .v = (unsigned char *)at(c->v) + (c->h + c->g) * c->d * fb_dtype_size(c->act), .v_ld = qkv_ld,
        .o = at(c->o), .o_ld = c->h * c->d, .lse = at(c->lse) };
}

static fb_status launch_attention(fb_device *d, const void *args)
{
    fb_attention a = attention_args(args);
    return d->kernels->attention(d, &a, &t.err);
}

/* o and lse of each side's own forward: the backward belongs to it. */
static fb_status launch_attention_bwd(fb_device *d, const void *args)
{
    const attention_case *c = args;
    fb_attention a = attention_args(c);
    fb_status st = d->kernels->attention(d, &a, &t.err);
    if (st != FB_OK)
        return st;
    return d->kernels->attention_bwd(d, &(fb_attention_bwd){ .fwd = a, .d_o = at(c->d_o), .do_ld = a.q_ld, .dq = at(c->dq),
        .dq_ld = a.q_ld, .dk = at(c->dk), .dk_ld = a.k_ld,
        .dv = (unsigned char *)at(c->dv) + (c->h + c->g) * c->d * fb_dtype_size(c->act), .dv_ld = a.v_ld,
        .scratch = at(c->scratch) }, &t.err);
}

/* In bfloat16 probabilities and score gradients pass through the tensor cores rounded (2^-9 each, at random), where the cpu
 * keeps float32: that, the forward's rounded o in the backward, and the results' own rounding (2^-9). */
static double attention_tolerance(fb_dtype act, uint32_t keys, bool backward)
{
    return act == FB_F32 ? tolerance(FB_F32, keys) + (backward ? 64 : 16) * 0x1p-24 : backward ? 0x1p-6 : 0x1p-7;
}

/* Scores are sums of head_dim products, in bfloat16 by tensor cores, which cut off where float32 rounds. */
static double lse_tolerance(const attention_case *c)
{
    return tolerance(FB_F32, c->k_max) + (c->act == FB_F32 ? 16 : 128) * 0x1p-24;
}

/* Documents of len[] tokens, 0 ends them; cached: the keys of all come with so many more before them. */
static void attention_inputs(attention_case *c, const uint32_t *len, uint32_t cached)
{
    begin();
    c->t = c->keys = c->n_span = c->q_max = c->k_max = 0;
    for (; len[c->n_span]; c->n_span++)
        ;
    c->span = carve("span", T_U32, 4 * c->n_span);
    for (uint32_t i = 0; i < c->n_span; i++) {
        uint32_t span[] = { c->t, len[i], c->keys, len[i] + cached };
        for (int j = 0; j < 4; j++)
            set(c->span, 4 * i + j, span[j]);
        c->t += span[1], c->keys += span[3];
        c->q_max = span[1] > c->q_max ? span[1] : c->q_max;
        c->k_max = span[3] > c->k_max ? span[3] : c->k_max;
    }
    c->q = input("q", (element)c->act, (uint64_t)c->t * c->h * c->d, 0, 3);
    c->k = input("k", (element)c->act, (uint64_t)c->keys * c->g * c->d, 0, 3);
    c->v = input("qkv", (element)c->act, (uint64_t)c->keys * (c->h + 2 * c->g) * c->d, 0, 1);
}

static void attention_case_run(attention_case c, const uint32_t *len, uint32_t cached)
{
    char name[128];
    attention_inputs(&c, len, cached);
    snprintf(name, sizeof name, "%s H %u G %u D %u window %u, %u documents, T %u, cached %u", fb_dtype_str(c.act), c.h, c.g, c.d,
             c.window, c.n_span, c.t, cached);
    uint64_t n_q = (uint64_t)c.t * c.h * c.d, n_k = (uint64_t)c.t * c.g * c.d;
    c.o = output("o", (element)c.act, n_q, attention_tolerance(c.act, c.k_max, false));
    c.lse = output("lse", T_F32, (uint64_t)c.h * c.t, lse_tolerance(&c));
    compare(NAME("attention %s", name), launch_attention, &c);
    if (cached)
        return;
    attention_inputs(&c, len, 0);
    c.d_o = input("d_o", (element)c.act, n_q, 0, 1);
    c.o = output("o", (element)c.act, n_q, attention_tolerance(c.act, c.k_max, false));
    c.lse = output("lse", T_F32, (uint64_t)c.h * c.t, lse_tolerance(&c));
    double tol = attention_tolerance(c.act, c.k_max, true);
    c.dq = output("dq", (element)c.act, n_q, tol), c.dk = output("dk", (element)c.act, n_k, tol);
    c.dv = output("dqkv", (element)c.act, n_q + 2 * n_k, tol);
    /* A query that sees one key has no gradient: what is left is rounding, to be held against what others have. */
    t.regions[c.dq].floor = t.regions[c.dk].floor = 0.1;
    uint64_t scratch = 0;
    for (int i = 0; i < 2; i++) {
        uint64_t size = t.device[i]->kernels->attention_scratch(c.t, c.h, c.d);
        scratch = size > scratch ? size : scratch;
    }
    c.scratch = output("scratch", T_U32, (scratch + 3) / 4, INFINITY);
    compare(NAME("attention_bwd %s", name), launch_attention_bwd, &c);
}

static void attention_cases(void)
{
    static const uint32_t heads[][3] = { { 1, 1, 64 }, { 9, 3, 64 }, { 28, 4, 128 }, { 2, 2, 256 }, { 8, 1, 128 } };
    static const uint32_t documents[][6] = { { 257 }, { 5, 1, 130, 64, 3 }, { 1 }, { 128, 128 } };
    static const uint32_t windows[] = { 0, 1, 100 };
    for (size_t h = 0; h < FB_COUNT(heads); h++)
        for (size_t i = 0; i < FB_COUNT(documents); i++)
            for (size_t w = 0; w < FB_COUNT(windows); w++)
                EACH_DTYPE(act)
                    if (w == 0 || (i < 2 && (h == 1 || h == 2))) /* a new shape costs cuDNN a second */
                        attention_case_run((attention_case){ .act = act, .h = heads[h][0], .g = heads[h][1], .d = heads[h][2],
                                                             .window = windows[w] }, documents[i], 0);
    static const uint32_t one[] = { 1, 0 }, several[] = { 70, 0 }, long_one[] = { 1100, 0 };
    EACH_DTYPE(act) {
        attention_case smol = { .act = act, .h = 9, .g = 3, .d = 64 },
            qwen = { .act = act, .h = 28, .g = 4, .d = 128, .window = 512 };
        attention_case_run(smol, one, 300);
        attention_case_run(smol, several, 100);
        attention_case_run(qwen, one, 700);
        attention_case_run(qwen, long_one, 0);
        attention_case_run((attention_case){ .act = act, .h = 4, .g = 2, .d = 80 }, several, 0);
        attention_case_run((attention_case){ .act = act, .h = 4, .g = 2, .d = 16 }, several, 0);
    }
}

/* What runs without full_determinism, in bfloat16; its bits need not repeat. */
static void fast_attention_cases(void)
{
    static const uint32_t one[] = { 257, 0 }, packed[] = { 5, 1, 130, 64, 3, 0 };
    attention_case smol = { .act = FB_BF16, .h = 9, .g = 3, .d = 64 }, qwen = { .act = FB_BF16, .h = 28, .g = 4, .d = 128 };
    attention_case_run(smol, packed, 0);
    attention_case_run(qwen, one, 0);
    attention_case_run(qwen, packed, 0);
    qwen.window = 100;
    attention_case_run(qwen, packed, 0);
}

static void layer_cases(void)
{
    matmul_cases();
    attention_cases();
}

#endif
