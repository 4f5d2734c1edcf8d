/* The decoder layer against one written here in float64 from the papers' equations, and its backward against central
 * differences of that one: every weight, every bias, every norm and the input.  Then identities, bit for bit: what is
 * recomputed is what was kept; a second micro-batch adds to the first. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "temp_dir.h"
#include "tiny_model.h"
#include "train/layer.h"

enum { T_MAX = 13, SIZE_MAX_ELEMS = 4096 };

static const struct {
    const char *name;
    tiny_model  model;
    uint32_t    window;
} cases[] = {
    { "plain", { "llama", 10, 14, 1, 2, 2, 6, 20, false, NULL, 0 }, 0 },
    { "grouped", { "mistral", 12, 10, 1, 6, 2, 4, 20, false, NULL, 0 }, 0 },
    { "window", { "mistral", 12, 10, 1, 4, 1, 4, 20, false, NULL, 0 }, 3 },
    { "qkv bias", { "qwen2", 12, 14, 1, 4, 2, 4, 20, true, NULL, 0 }, 0 },
    { "all biases", { "llama", 12, 10, 1, 4, 2, 4, 20, false, ", \"attention_bias\": true, \"mlp_bias\": true", 0 }, 0 },
    { "qk norm", { "qwen3", 12, 14, 1, 4, 2, 8, 20, false, NULL, 0 }, 0 },
};

/* ---- the rig: one layer on the CPU device ---- */

typedef struct rig {
    fb_manifest   m;
    const fb_block_desc *desc;
    fb_layer_shape shape;
    uint32_t      window, t, n_span;
    fb_span       span[4];
    uint32_t      position[T_MAX];
    float         cos[T_MAX * 8], sin[T_MAX * 8];
    float         weights[SIZE_MAX_ELEMS], x[T_MAX * 16], dy[T_MAX * 16]; /* float32; rounded to act */
} rig;

static fb_device *device;

static int open_device(void **state)
{
    (void)state;
    return fb_device_open(&device, &(fb_device_options){ .backend = "cpu", .n_thread = 2 }, NULL);
}

static int close_device(void **state)
{
    (void)state;
    device->ops->close(device);
    return 0;
}

static float rounded(fb_dtype act, double v)
{
    float f = (float)v;
    return act == FB_F32 ? f : fb_bf16_f32(fb_f32_bf16(f));
}

/* Documents of these lengths, random everything. */
static void make_rig(rig *r, size_t which, fb_dtype act, const uint32_t *lens, uint32_t n_len, uint64_t seed)
{
    memset(r, 0, sizeof *r);
    tiny_manifest(&r->m, &cases[which].model);
    const fb_model_config *c = &r->m.cfg;
    r->desc = &r->m.blocks[1];
    r->window = cases[which].window;
    r->shape = (fb_layer_shape){ c, act, device->kernels->attention_scratch(T_MAX, c->n_head, c->head_dim) };
    for (uint32_t i = 0; i < n_len; i++) {
        r->span[r->n_span++] = (fb_span){ r->t, lens[i], r->t, lens[i] };
        for (uint32_t k = 0; k < lens[i]; k++)
            r->position[r->t++] = k;
    }
    assert_true(r->t <= T_MAX && r->desc->extent <= SIZE_MAX_ELEMS && c->hidden <= 16 && c->head_dim <= 16);
    for (uint32_t p = 0; p < T_MAX; p++)
        for (uint32_t i = 0; i < c->head_dim / 2; i++) {
            double angle = p * pow(30.0, -2.0 * i / c->head_dim);
            r->cos[p * (c->head_dim / 2) + i] = (float)cos(angle);
            r->sin[p * (c->head_dim / 2) + i] = (float)sin(angle);
        }
    for (uint32_t i = 0; i < r->desc->n_param; i++) {
        const fb_param *p = &r->m.params[r->desc->param_first + i];
        float *w = r->weights + p->offset;
        tiny_weights(p, &seed, w);
        for (uint64_t k = 0; k < p->rows * p->cols; k++)
            w[k] = rounded(act, w[k]);
    }
    for (uint32_t i = 0; i < r->t * c->hidden; i++) {
        r->x[i] = rounded(act, 1.5 * random_real(&seed));
        r->dy[i] = rounded(act, random_real(&seed));
    }
}

/* What one call leaves: float32 copies of y, dx and the gradients' bits. */
typedef struct outcome {
    float y[T_MAX * 16], dx[T_MAX * 16], gradients[SIZE_MAX_ELEMS];
} outcome;

typedef struct carver {
    unsigned char *at;
} carver;

static void *carve(carver *c, uint64_t size)
{
    void *mem = c->at;
    c->at += (size + 255) / 256 * 256;
    return mem;
}

static void *on_device(carver *c, const void *data, uint64_t size)
{
    void *mem = carve(c, size);
    device->ops->upload(device, FB_STREAM_COMPUTE, mem, data, size, NULL);
    device->ops->sync(device, FB_STREAM_COMPUTE, NULL);
    return mem;
}

static void *in_act(carver *c, fb_dtype act, const float *data, uint64_t n)
{
    unsigned char tmp[SIZE_MAX_ELEMS * 4];
    fb_from_f32(tmp, act, data, n);
    return on_device(c, tmp, n * fb_dtype_size(act));
}

/* Forward and backward.  gradients go in as well when accumulate is set.  Scratch and saved values start as NaN. */
static void run(const rig *r, fb_recompute policy, bool accumulate, outcome *out)
{
    enum { ARENA = 1 << 20 };
    fb_error err;
    void *arena;
    fb_dtype act = r->shape.act;
    uint64_t n = (uint64_t)r->t * r->m.cfg.hidden;
    assert_int_equal(device->ops->alloc(device, ARENA, &arena, &err), FB_OK);
    memset(arena, 0xff, ARENA);
    carver at = { arena };
    fb_layer_binding b = { .device = device, .shape = &r->shape, .desc = r->desc, .window = r->window, .policy = policy,
        .t = r->t, .t_max = T_MAX, .weights = in_act(&at, act, r->weights, r->desc->extent),
        .gradients = on_device(&at, out->gradients, r->desc->extent * sizeof(float)),
        .position = on_device(&at, r->position, sizeof r->position), .span = on_device(&at, r->span, sizeof r->span),
        .n_span = r->n_span, .q_len_max = T_MAX, .k_len_max = T_MAX, .cos = on_device(&at, r->cos, sizeof r->cos),
        .sin = on_device(&at, r->sin, sizeof r->sin), .x = in_act(&at, act, r->x, n),
        .saved = carve(&at, fb_layer_saved_size(&r->shape, policy, T_MAX)),
        .scratch = carve(&at, fb_layer_scratch_size(&r->shape, policy, T_MAX)) };
    void *guard = on_device(&at, r->x, 256), *y = carve(&at, n * 4), *dy = in_act(&at, act, r->dy, n);
    assert_true((uint64_t)(at.at - (unsigned char *)arena) <= ARENA);
    assert_int_equal(fb_layer_forward(&b, y, &err), FB_OK);
    device->ops->sync(device, FB_STREAM_COMPUTE, NULL);
    memset(b.scratch, 0xff, fb_layer_scratch_size(&r->shape, policy, T_MAX)); /* other layers have used it meanwhile */
    assert_int_equal(fb_layer_backward(&b, dy, accumulate, &err), FB_OK);
    device->ops->sync(device, FB_STREAM_COMPUTE, NULL);
    fb_to_f32(out->y, y, act, n);
    fb_to_f32(out->dx, dy, act, n);
    memcpy(out->gradients, b.gradients, r->desc->extent * sizeof(float));
    assert_memory_equal(guard, r->x, 256); /* nothing ran past the scratch */
    device->ops->free(device, arena);
}

/* ---- the layer in float64 ---- */

typedef struct truth {
    const rig *r;
    double w[SIZE_MAX_ELEMS], x[T_MAX * 16];
} truth;

static const double *role(const truth *s, fb_role role)
{
    int64_t at = s->r->desc->offset[role];
    return at < 0 ? NULL : s->w + at;
}

/* Zhang & Sennrich 2019, eq. 4 */
static void norm(double *y, const double *x, const double *w, uint32_t n, double eps)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    for (uint32_t i = 0; i < n; i++)
        y[i] = x[i] / sqrt(sum / n + eps) * w[i];
}

static void linear(double *y, const double *x, const double *w, const double *bias, uint32_t n, uint32_t k)
{
    for (uint32_t i = 0; i < n; i++) {
        y[i] = bias ? bias[i] : 0;
        for (uint32_t j = 0; j < k; j++)
            y[i] += w[(uint64_t)i * k + j] * x[j];
    }
}

/* Su et al. 2021, by halves, as Llama's checkpoints want it. */
static void rotate(double *v, const rig *r, uint32_t position, uint32_t d)
{
    for (uint32_t i = 0; i < d / 2; i++) {
        double a = v[i], b = v[i + d / 2], c = r->cos[position * (d / 2) + i], s = r->sin[position * (d / 2) + i];
        v[i] = a * c - b * s;
        v[i + d / 2] = b * c + a * s;
    }
}

enum { HEADS_WIDTH_MAX = 64, FFN_MAX = 16 };

static void head_of(double *out, const truth *s, const double *n1, fb_role w, fb_role bias, fb_role head_norm, uint32_t head,
                    uint32_t t)
{
    const fb_model_config *c = &s->r->m.cfg;
    uint32_t d = c->head_dim;
    double tmp[16];
    const double *b = role(s, bias);
    linear(tmp, n1, role(s, w) + (uint64_t)head * d * c->hidden, b ? b + head * d : NULL, d, c->hidden);
    if (head_norm != FB_ROLE_COUNT && role(s, head_norm))
        norm(out, tmp, role(s, head_norm), d, c->norm_eps);
    else
        memcpy(out, tmp, d * sizeof *out);
    if (w != FB_ROLE_V)
        rotate(out, s->r, s->r->position[t], d);
}

/* Vaswani et al. 2017, eq. 1, causal within the document; heads share key-value heads in groups. */
static void attend(double *o, const truth *s, double (*n1)[16], const fb_span *span, uint32_t t, uint32_t h)
{
    const fb_model_config *c = &s->r->m.cfg;
    uint32_t d = c->head_dim, g = h / (c->n_head / c->n_kv_head);
    double q[16], k[16], v[16], score[T_MAX], sum = 0;
    head_of(q, s, n1[t], FB_ROLE_Q, FB_ROLE_Q_BIAS, FB_ROLE_Q_NORM, h, t);
    memset(o, 0, d * sizeof *o);
    for (uint32_t j = span->q_start; j <= t; j++) {
        if (s->r->window && t - j >= s->r->window)
            continue;
        head_of(k, s, n1[j], FB_ROLE_K, FB_ROLE_K_BIAS, FB_ROLE_K_NORM, g, j);
        head_of(v, s, n1[j], FB_ROLE_V, FB_ROLE_V_BIAS, FB_ROLE_COUNT, g, j);
        score[j] = 0;
        for (uint32_t i = 0; i < d; i++)
            score[j] += q[i] * k[i];
        score[j] = exp(score[j] / sqrt(d));
        sum += score[j];
        for (uint32_t i = 0; i < d; i++)
            o[i] += score[j] * v[i];
    }
    for (uint32_t i = 0; i < d; i++)
        o[i] /= sum;
}

static void forward(const truth *s, double *y)
{
    const rig *r = s->r;
    const fb_model_config *c = &r->m.cfg;
    uint32_t hidden = c->hidden, d = c->head_dim;
    double n1[T_MAX][16], o[HEADS_WIDTH_MAX], h[16], n2[16], gate[FFN_MAX], up[FFN_MAX], down[16];
    for (uint32_t t = 0; t < r->t; t++)
        norm(n1[t], s->x + t * hidden, role(s, FB_ROLE_ATTN_NORM), hidden, c->norm_eps);
    for (uint32_t k = 0; k < r->n_span; k++)
        for (uint32_t t = r->span[k].q_start; t < r->span[k].q_start + r->span[k].q_len; t++) {
            for (uint32_t head = 0; head < c->n_head; head++)
                attend(o + head * d, s, n1, &r->span[k], t, head);
            linear(h, o, role(s, FB_ROLE_O), role(s, FB_ROLE_O_BIAS), hidden, c->n_head * d);
            for (uint32_t i = 0; i < hidden; i++)
                h[i] += s->x[t * hidden + i];
            norm(n2, h, role(s, FB_ROLE_MLP_NORM), hidden, c->norm_eps);
            linear(gate, n2, role(s, FB_ROLE_GATE), role(s, FB_ROLE_GATE_BIAS), c->ffn_dim, hidden);
            linear(up, n2, role(s, FB_ROLE_UP), role(s, FB_ROLE_UP_BIAS), c->ffn_dim, hidden);
            for (uint32_t i = 0; i < c->ffn_dim; i++) /* Shazeer 2020, eq. 5 */
                up[i] *= gate[i] / (1 + exp(-gate[i]));
            linear(down, up, role(s, FB_ROLE_DOWN), role(s, FB_ROLE_DOWN_BIAS), hidden, c->ffn_dim);
            for (uint32_t i = 0; i < hidden; i++)
                y[t * hidden + i] = h[i] + down[i];
        }
}

static truth truth_of(const rig *r)
{
    truth s = { .r = r };
    for (uint64_t i = 0; i < r->desc->extent; i++)
        s.w[i] = r->weights[i];
    for (uint32_t i = 0; i < r->t * r->m.cfg.hidden; i++)
        s.x[i] = r->x[i];
    return s;
}

/* d(sum dy y) / d(*v), by a difference whose error is about 1e-10. */
static double slope(truth *s, double *v)
{
    double y[2][T_MAX * 16], at = *v, step = 1e-5, sum = 0;
    for (int side = 0; side < 2; side++) {
        *v = at + (side ? step : -step);
        forward(s, y[side]);
    }
    *v = at;
    for (uint32_t i = 0; i < s->r->t * s->r->m.cfg.hidden; i++)
        sum += s->r->dy[i] * (y[1][i] - y[0][i]);
    return sum / (2 * step);
}

/* |got - want| over |want|, as vectors. */
static double off_by(const float *got, const double *want, uint64_t n)
{
    double diff = 0, size = 0;
    for (uint64_t i = 0; i < n; i++) {
        diff += (got[i] - want[i]) * (got[i] - want[i]);
        size += want[i] * want[i];
    }
    return sqrt(diff / size);
}

static void check(size_t which, const char *what, double off, double most)
{
    if (!(off <= most))
        fail_msg("%s: %s is off by %.2e of its norm, at most %.1e", cases[which].name, what, off, most);
}

/* ---- tests ---- */

static const uint32_t lens[] = { 5, 1, 4 };

/* float32: a chain of some ten operations, each of 2^-24, over sums of a few dozen terms: 2^-19.  bfloat16 rounds at
 * about as many places to 2^-9: 2^-5, which only says that nothing is missing. */
static void agrees_with_the_equations(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < FB_COUNT(cases); i++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            rig r;
            outcome got = { .gradients = { 0 } };
            double most = bf16 ? 0x1p-5 : 0x1p-19, want[SIZE_MAX_ELEMS];
            make_rig(&r, i, bf16 ? FB_BF16 : FB_F32, lens, 3, 100 + i);
            run(&r, FB_RECOMPUTE_NONE, false, &got);
            truth s = truth_of(&r);
            uint32_t n = r.t * r.m.cfg.hidden;
            forward(&s, want);
            check(i, "y", off_by(got.y, want, n), most);
            for (uint32_t k = 0; k < n; k++)
                want[k] = slope(&s, &s.x[k]);
            check(i, "dx", off_by(got.dx, want, n), most);
            for (uint32_t p = 0; p < r.desc->n_param; p++) {
                const fb_param *q = &r.m.params[r.desc->param_first + p];
                uint64_t size = q->rows * q->cols;
                for (uint64_t k = 0; k < size; k++)
                    want[k] = slope(&s, &s.w[q->offset + k]);
                check(i, q->name, off_by(got.gradients + q->offset, want, size), most);
            }
            fb_manifest_free(&r.m);
        }
}

static bool same(const rig *r, const outcome *a, const outcome *b)
{
    uint64_t n = r->t * r->m.cfg.hidden * sizeof(float);
    return !memcmp(a->y, b->y, n) && !memcmp(a->dx, b->dx, n)
        && !memcmp(a->gradients, b->gradients, r->desc->extent * sizeof(float));
}

static void recomputing_is_keeping(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < FB_COUNT(cases); i++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            rig r;
            outcome kept = { .gradients = { 0 } }, got;
            make_rig(&r, i, bf16 ? FB_BF16 : FB_F32, lens, 3, 200 + i);
            run(&r, FB_RECOMPUTE_NONE, false, &kept);
            for (int policy = FB_RECOMPUTE_SELECTIVE; policy <= FB_RECOMPUTE_FULL; policy++) {
                memset(&got, 0, sizeof got);
                run(&r, (fb_recompute)policy, false, &got);
                assert_true(same(&r, &kept, &got));
            }
            fb_manifest_free(&r.m);
        }
}

/* Overwriting leaves nothing of what was there, padding apart; accumulating leaves the sum, to one rounding an addition. */
static void gradients_are_overwritten_or_added_to(void **unused)
{
    (void)unused;
    static const uint32_t other_lens[] = { 2, 7 };
    for (size_t i = 0; i < FB_COUNT(cases); i++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            rig a, b;
            outcome first = { .gradients = { 0 } }, second = first, again, both;
            fb_dtype act = bf16 ? FB_BF16 : FB_F32;
            make_rig(&a, i, act, lens, 3, 300 + i);
            make_rig(&b, i, act, other_lens, 2, 300 + i);
            uint64_t extent = a.desc->extent;
            run(&a, FB_RECOMPUTE_SELECTIVE, false, &first);
            run(&b, FB_RECOMPUTE_SELECTIVE, false, &second);
            again = second; /* full of another batch's gradients */
            run(&a, FB_RECOMPUTE_SELECTIVE, false, &again);
            assert_true(same(&a, &first, &again));
            both = first;
            run(&b, FB_RECOMPUTE_SELECTIVE, true, &both);
            assert_memory_equal(both.dx, second.dx, b.t * b.m.cfg.hidden * sizeof(float));
            for (uint64_t k = 0; k < extent; k++) {
                double sum = (double)first.gradients[k] + second.gradients[k];
                double size = fabs(first.gradients[k]) + fabs(second.gradients[k]);
                assert_true(fabs(both.gradients[k] - sum) <= 0x1p-20 * size + 1e-7);
            }
            fb_manifest_free(&a.m);
            fb_manifest_free(&b.m);
        }
}

/* A document's outcome is its own: beside others or alone, the same bits. */
static void documents_do_not_see_one_another(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < FB_COUNT(cases); i++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            rig all, alone;
            outcome want = { .gradients = { 0 } }, got = want;
            make_rig(&all, i, bf16 ? FB_BF16 : FB_F32, lens, 3, 400 + i);
            run(&all, FB_RECOMPUTE_FULL, false, &want);
            alone = all;
            for (uint32_t k = 0; k < all.t * all.m.cfg.hidden; k++)
                if (k / all.m.cfg.hidden >= lens[0]) { /* the other documents become others */
                    alone.x[k] = rounded(all.shape.act, -2.0f * all.x[k] + 0.25);
                    alone.dy[k] = 0;
                }
            run(&alone, FB_RECOMPUTE_FULL, false, &got);
            uint64_t own = lens[0] * all.m.cfg.hidden * sizeof(float);
            assert_memory_equal(want.y, got.y, own);
            assert_memory_equal(want.dx, got.dx, own);
            fb_manifest_free(&all.m);
        }
}

/* A device that fails at any operation of the layer fails the layer. */
static void failures_come_out(void **unused)
{
    (void)unused;
    static const char *const forward_ops[] = { "rms_norm:2", "matmul_nt:4", "rope_qk:1", "attention:1", "swiglu:1" };
    static const char *const backward_ops[] = { "rms_norm_bwd:2", "matmul_tn:4", "matmul_nn:4", "attention_bwd:1", "swiglu_bwd:1",
                                                "rope_qk_bwd:1", "rms_norm:3", "bias_grad:1" };
    fb_device *good = device;
    for (size_t i = 0; i < FB_COUNT(forward_ops) + FB_COUNT(backward_ops); i++) {
        bool in_forward = i < FB_COUNT(forward_ops);
        char backend[64];
        rig r;
        fb_error err;
        void *arena;
        snprintf(backend, sizeof backend, "fault:fail=%s", in_forward ? forward_ops[i] : backward_ops[i - FB_COUNT(forward_ops)]);
        assert_int_equal(fb_device_open(&device, &(fb_device_options){ .backend = backend, .n_thread = 1 }, NULL), FB_OK);
        make_rig(&r, 4, FB_F32, lens, 3, 1);
        assert_int_equal(device->ops->alloc(device, 1 << 20, &arena, &err), FB_OK);
        carver at = { arena };
        fb_layer_binding b = { .device = device, .shape = &r.shape, .desc = r.desc, .policy = FB_RECOMPUTE_FULL, .t = r.t,
                               .t_max = T_MAX,
            .weights = carve(&at, r.desc->extent * 4), .gradients = carve(&at, r.desc->extent * 4),
            .position = carve(&at, sizeof r.position),
            .span = carve(&at, sizeof r.span), .n_span = 0, .q_len_max = T_MAX, .k_len_max = T_MAX, .cos = carve(&at, sizeof r.cos),
            .sin = carve(&at, sizeof r.sin), .x = carve(&at, sizeof r.x),
            .scratch = carve(&at, fb_layer_scratch_size(&r.shape, FB_RECOMPUTE_FULL, T_MAX)) };
        void *y = carve(&at, sizeof r.x);
        fb_status st = fb_layer_forward(&b, y, &err);
        assert_int_equal(st, in_forward ? FB_DEVICE : FB_OK);
        if (!in_forward)
            assert_int_equal(fb_layer_backward(&b, y, false, &err), FB_DEVICE);
        assert_non_null(strstr(err.msg, "injected failure"));
        fb_manifest_free(&r.m);
        device->ops->close(device);
    }
    device = good;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(agrees_with_the_equations),
        cmocka_unit_test(recomputing_is_keeping),
        cmocka_unit_test(gradients_are_overwritten_or_added_to),
        cmocka_unit_test(documents_do_not_see_one_another),
        cmocka_unit_test(failures_come_out),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
