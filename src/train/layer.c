#include "train/layer.h"

#include <math.h>

/* ---- where everything is, for one call ---- */

typedef struct place {
    const fb_layer_binding *b;
    fb_device              *d;
    const fb_kernels       *k;
    const fb_model_config  *c;
    fb_dtype                act;
    uint32_t                t, n_q, n_kv, n_qkv;
    void                   *v[FB_V_COUNT];
    void                   *d_act, *d_gu, *d_n2, *d_o, *d_q, *d_k, *d_qkv, *d_n1, *attention; /* temporaries */
} place;

static place place_of(const fb_layer_binding *b)
{
    const fb_model_config *c = b->shape->cfg;
    place p = { .b = b, .d = b->device, .k = b->device->kernels, .c = c, .act = b->shape->act, .t = b->t,
                .n_q = c->n_head * c->head_dim, .n_kv = c->n_kv_head * c->head_dim };
    p.n_qkv = p.n_q + 2 * p.n_kv;
    p.v[FB_V_X] = b->x;
    for (fb_value v = FB_V_N1; v < FB_V_COUNT; v++) {
        bool kept = fb_value_kept(v, b->policy);
        p.v[v] = (kept ? b->saved : b->scratch) + fb_value_offset(b->shape, b->policy, b->t_max, v);
    }
    fb_layer_temporaries x = fb_layer_temporaries_at(b->shape, b->policy, b->t_max);
    p.d_act = b->scratch + x.d_act, p.d_gu = b->scratch + x.d_gu, p.d_n2 = b->scratch + x.d_n2;
    p.d_o = b->scratch + x.d_o, p.d_q = b->scratch + x.d_q, p.d_k = b->scratch + x.d_k;
    p.d_qkv = b->scratch + x.d_qkv, p.d_n1 = b->scratch + x.d_n1, p.attention = b->scratch + x.attention;
    if (b->cache_qkv) {
        p.v[FB_V_QKV] = b->cache_qkv + (uint64_t)b->cache_row * p.n_qkv * fb_dtype_size(p.act);
        p.v[FB_V_K] = b->cache_k + (uint64_t)b->cache_row * p.n_kv * fb_dtype_size(p.act);
    }
    return p;
}

static const void *weight(const place *p, fb_role role)
{
    int64_t offset = p->b->desc->offset[role];
    return offset < 0 ? NULL : p->b->weights + (uint64_t)offset * fb_dtype_size(p->act);
}

static float *gradient(const place *p, fb_role role)
{
    int64_t offset = p->b->desc->offset[role];
    return offset < 0 ? NULL : p->b->gradients + offset;
}

static const void *columns(const place *p, const void *base, uint64_t n)
{
    return (const unsigned char *)base + n * fb_dtype_size(p->act);
}

/* ---- the forward's operations ---- */

static fb_status norm(const place *p, fb_value x, fb_role w, fb_value y, fb_value rstd, fb_error *err)
{
    return p->k->rms_norm(p->d, &(fb_rms_norm){ .act = p->act, .t = p->t, .c = p->c->hidden, .eps = p->c->norm_eps,
        .x = p->v[x], .w = weight(p, w), .y = p->v[y], .rstd = p->v[rstd] }, err);
}

/* y[T,n] = x[T,k] w^T (+ bias) (+ add) */
static fb_status linear(const place *p, const void *x, uint32_t k, fb_role w, fb_role bias, const void *add,
                        void *y, uint32_t n, fb_error *err)
{
    return p->k->matmul_nt(p->d, &(fb_matmul_nt){ .act = p->act, .y_dtype = p->act, .m = p->t, .n = n, .k = k,
        .x = x, .x_ld = k, .w = weight(p, w), .w_ld = k, .bias = weight(p, bias),
        .add = add, .add_ld = n, .y = y, .y_ld = n }, err);
}

static fb_status run_norm1(const place *p, fb_error *err)
{
    return norm(p, FB_V_X, FB_ROLE_ATTN_NORM, FB_V_N1, FB_V_RSTD1, err);
}

static fb_status run_qkv(const place *p, fb_error *err)
{
    return linear(p, p->v[FB_V_N1], p->c->hidden, FB_ROLE_Q, FB_ROLE_Q_BIAS, NULL, p->v[FB_V_QKV], p->n_qkv, err);
}

static fb_rope_qk rope_args(const place *p)
{
    return (fb_rope_qk){ .act = p->act, .t = p->t, .n_head = p->c->n_head, .n_kv_head = p->c->n_kv_head,
        .head_dim = p->c->head_dim, .eps = p->c->norm_eps, .qkv = p->v[FB_V_QKV],
        .q_norm = weight(p, FB_ROLE_Q_NORM), .k_norm = weight(p, FB_ROLE_K_NORM),
        .position = p->b->position, .cos = p->b->cos, .sin = p->b->sin, .q = p->v[FB_V_Q], .k = p->v[FB_V_K] };
}

static fb_status run_rope(const place *p, fb_error *err)
{
    fb_rope_qk a = rope_args(p);
    return p->k->rope_qk(p->d, &a, err);
}

static fb_attention attention_args(const place *p)
{
    const void *k = p->b->cache_k ? p->b->cache_k : p->v[FB_V_K];
    const void *qkv = p->b->cache_qkv ? p->b->cache_qkv : p->v[FB_V_QKV];
    return (fb_attention){ .act = p->act, .t = p->t, .n_head = p->c->n_head, .n_kv_head = p->c->n_kv_head,
        .head_dim = p->c->head_dim, .window = p->b->window, .scale = 1.0f / sqrtf((float)p->c->head_dim),
        .span = p->b->span, .n_span = p->b->n_span, .q_len_max = p->b->q_len_max, .k_len_max = p->b->k_len_max,
        .q = p->v[FB_V_Q], .q_ld = p->n_q, .k = k, .k_ld = p->n_kv,
        .v = columns(p, qkv, p->n_q + p->n_kv), .v_ld = p->n_qkv,
        .o = p->v[FB_V_O], .o_ld = p->n_q, .lse = p->v[FB_V_LSE] };
}

static fb_status run_attention(const place *p, fb_error *err)
{
    fb_attention a = attention_args(p);
    return p->k->attention(p->d, &a, err);
}

static fb_status run_attn_out(const place *p, fb_error *err)
{
    return linear(p, p->v[FB_V_O], p->n_q, FB_ROLE_O, FB_ROLE_O_BIAS, p->v[FB_V_X], p->v[FB_V_H], p->c->hidden, err);
}

static fb_status run_norm2(const place *p, fb_error *err)
{
    return norm(p, FB_V_H, FB_ROLE_MLP_NORM, FB_V_N2, FB_V_RSTD2, err);
}

static fb_status run_gate_up(const place *p, fb_error *err)
{
    return linear(p, p->v[FB_V_N2], p->c->hidden, FB_ROLE_GATE, FB_ROLE_GATE_BIAS, NULL, p->v[FB_V_GU],
                  2 * p->c->ffn_dim, err);
}

static fb_status run_act(const place *p, fb_error *err)
{
    return p->k->swiglu(p->d, &(fb_swiglu){ .act = p->act, .t = p->t, .f = p->c->ffn_dim, .gu = p->v[FB_V_GU],
        .y = p->v[FB_V_ACT] }, err);
}

/* In forward order; the down projection, whose result is the next block's input, stands apart. */
static const struct {
    fb_status (*run)(const place *p, fb_error *err);
    fb_value makes[2];
} operations[] = {
    { run_norm1,     { FB_V_N1, FB_V_RSTD1 } },
    { run_qkv,       { FB_V_QKV, FB_V_QKV } },
    { run_rope,      { FB_V_Q, FB_V_K } },
    { run_attention, { FB_V_O, FB_V_LSE } },
    { run_attn_out,  { FB_V_H, FB_V_H } },
    { run_norm2,     { FB_V_N2, FB_V_RSTD2 } },
    { run_gate_up,   { FB_V_GU, FB_V_GU } },
    { run_act,       { FB_V_ACT, FB_V_ACT } },
};

fb_status fb_layer_forward(const fb_layer_binding *b, void *y, fb_error *err)
{
    fb_status st = FB_OK;
    place p = place_of(b);
    for (size_t i = 0; i < FB_COUNT(operations); i++)
        FB_TRY(operations[i].run(&p, err));
    FB_TRY(linear(&p, p.v[FB_V_ACT], p.c->ffn_dim, FB_ROLE_DOWN, FB_ROLE_DOWN_BIAS, p.v[FB_V_H], y, p.c->hidden, err));
done:
    return st;
}

/* ---- the backward ---- */

static fb_status recompute(const place *p, fb_error *err)
{
    fb_status st = FB_OK;
    for (size_t i = 0; i < FB_COUNT(operations); i++)
        if (!fb_value_kept(operations[i].makes[0], p->b->policy) || !fb_value_kept(operations[i].makes[1], p->b->policy))
            FB_TRY(operations[i].run(p, err));
done:
    return st;
}

/* Of y[T,n] = x[T,k] w^T + bias: dw (+)= dy^T x, dbias (+)= sum dy, dx = dy w. */
static fb_status linear_bwd(const place *p, const void *dy, uint32_t n, const void *x, uint32_t k, fb_role w,
                            fb_role bias, void *dx, bool accumulate, fb_error *err)
{
    fb_status st = FB_OK;
    FB_TRY(p->k->matmul_tn(p->d, &(fb_matmul_tn){ .act = p->act, .m = p->t, .n = n, .k = k, .dy = dy, .dy_ld = n,
        .x = x, .x_ld = k, .dw = gradient(p, w), .accumulate = accumulate }, err));
    if (gradient(p, bias))
        FB_TRY(p->k->bias_grad(p->d, &(fb_bias_grad){ .act = p->act, .m = p->t, .n = n, .dy = dy, .dy_ld = n,
            .db = gradient(p, bias), .accumulate = accumulate }, err));
    FB_TRY(p->k->matmul_nn(p->d, &(fb_matmul_nn){ .act = p->act, .m = p->t, .n = n, .k = k, .dy = dy, .dy_ld = n,
        .w = weight(p, w), .w_ld = k, .dx = dx, .dx_ld = k }, err));
done:
    return st;
}

/* dx = add + norm's backward of dy, in place of add. */
static fb_status norm_bwd(const place *p, fb_value x, fb_role w, fb_value rstd, const void *dy, void *dx,
                          bool accumulate, fb_error *err)
{
    return p->k->rms_norm_bwd(p->d, &(fb_rms_norm_bwd){ .act = p->act, .t = p->t, .c = p->c->hidden, .x = p->v[x],
        .w = weight(p, w), .dy = dy, .rstd = p->v[rstd], .add = dx, .dx = dx, .dw = gradient(p, w),
        .accumulate = accumulate }, err);
}

fb_status fb_layer_backward(const fb_layer_binding *b, void *dy, bool accumulate, fb_error *err)
{
    fb_status st = FB_OK;
    place p = place_of(b);
    uint32_t hidden = p.c->hidden, ffn = p.c->ffn_dim;
    FB_TRY(recompute(&p, err));

    FB_TRY(linear_bwd(&p, dy, hidden, p.v[FB_V_ACT], ffn, FB_ROLE_DOWN, FB_ROLE_DOWN_BIAS, p.d_act, accumulate, err));
    FB_TRY(p.k->swiglu_bwd(p.d, &(fb_swiglu_bwd){ .act = p.act, .t = p.t, .f = ffn, .gu = p.v[FB_V_GU],
        .dy = p.d_act, .dgu = p.d_gu }, err));
    FB_TRY(linear_bwd(&p, p.d_gu, 2 * ffn, p.v[FB_V_N2], hidden, FB_ROLE_GATE, FB_ROLE_GATE_BIAS, p.d_n2, accumulate, err));
    FB_TRY(norm_bwd(&p, FB_V_H, FB_ROLE_MLP_NORM, FB_V_RSTD2, p.d_n2, dy, accumulate, err));

    FB_TRY(linear_bwd(&p, dy, hidden, p.v[FB_V_O], p.n_q, FB_ROLE_O, FB_ROLE_O_BIAS, p.d_o, accumulate, err));
    void *d_v = (unsigned char *)p.d_qkv + (uint64_t)(p.n_q + p.n_kv) * fb_dtype_size(p.act);
    FB_TRY(p.k->attention_bwd(p.d, &(fb_attention_bwd){ .fwd = attention_args(&p), .d_o = p.d_o, .do_ld = p.n_q,
        .dq = p.d_q, .dq_ld = p.n_q, .dk = p.d_k, .dk_ld = p.n_kv, .dv = d_v, .dv_ld = p.n_qkv,
        .scratch = p.attention }, err));
    FB_TRY(p.k->rope_qk_bwd(p.d, &(fb_rope_qk_bwd){ .fwd = rope_args(&p), .dq = p.d_q, .dk = p.d_k, .dqkv = p.d_qkv,
        .dq_norm = gradient(&p, FB_ROLE_Q_NORM), .dk_norm = gradient(&p, FB_ROLE_K_NORM), .accumulate = accumulate }, err));
    FB_TRY(linear_bwd(&p, p.d_qkv, p.n_qkv, p.v[FB_V_N1], hidden, FB_ROLE_Q, FB_ROLE_Q_BIAS, p.d_n1, accumulate, err));
    FB_TRY(norm_bwd(&p, FB_V_X, FB_ROLE_ATTN_NORM, FB_V_RSTD1, p.d_n1, dy, accumulate, err));
done:
    return st;
}
