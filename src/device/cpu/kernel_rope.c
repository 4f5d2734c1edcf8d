/* kernel_rope.c - RMS norm of each query and key head (where the model has it), then rotation by position.
 * Sources: Su et al. 2021, eq. 34, in the arrangement by halves that transformers uses; norm: Zhang & Sennrich 2019,
 * eq. 4, over head_dim.
 *
 * bfloat16: x * rstd and its product with the weight are rounded, as transformers rounds them; the rotation is float32
 * and its result is rounded where it is stored.
 *
 * Tokens are cut into tiles by their number alone.  Heads see only their own row.  The gradients of the norms' weights
 * are sums over tokens and heads: a tile adds up its own, and the tiles' sums are added in tile order, in double. */
#include <assert.h>

#include "device/cpu/cpu.h"
#include "device/cpu/vec.h"

enum {
    ROPE_HEAD_DIM_MAX = 256,
    ROPE_TILE = 16,      /* tokens, at least */
    ROPE_TILE_MAX = 512, /* tiles: then they grow instead */
};
static_assert(ROPE_TILE_MAX * 2 * ROPE_HEAD_DIM_MAX * sizeof(float) <= FB_CPU_SCRATCH_SIZE,
              "the tiles' sums fit one worker's scratch");

typedef struct rope {
    const fb_rope_qk     *f;
    const fb_rope_qk_bwd *b;    /* NULL: forward */
    uint32_t              tile; /* tokens */
    float                *sums; /* [tiles][2][head_dim]: the tile's dq_norm, dk_norm */
} rope;

static uint32_t tile_tokens(uint32_t t)
{
    uint32_t n = t / ROPE_TILE_MAX + (t % ROPE_TILE_MAX != 0);
    return n < ROPE_TILE ? ROPE_TILE : n;
}

static uint32_t tile_count(uint32_t t, uint32_t tile)
{
    return t / tile + (t % tile != 0);
}

FB_INLINE float inverse_rms(const float *x, uint32_t d, float eps)
{
    return 1.0f / sqrtf(fb_row_dot(x, x, d) / (float)d + eps);
}

/* out = rotate(norm(x)) for one head of one token. */
FB_VECTOR static void head_forward(const fb_rope_qk *f, const void *from, const void *weight, const float *cosine,
                                   const float *sine, void *to)
{
    uint32_t d = f->head_dim, half = d / 2;
    float x[ROPE_HEAD_DIM_MAX], y[ROPE_HEAD_DIM_MAX], w[ROPE_HEAD_DIM_MAX];
    fb_row_load(x, from, f->act, d);
    if (weight) {
        float rstd = inverse_rms(x, d, f->eps);
        fb_row_load(w, weight, f->act, d);
        for (uint32_t i = 0; i < d; i++)
            x[i] = fb_round_to(f->act, fb_round_to(f->act, x[i] * rstd) * w[i]);
    }
    for (uint32_t i = 0; i < half; i++) {
        y[i] = x[i] * cosine[i] - x[half + i] * sine[i];
        y[half + i] = x[half + i] * cosine[i] + x[i] * sine[i];
    }
    fb_row_store(to, f->act, y, d);
}

/* dx for one head of one token.  A rotation's gradient is rotated back; through y = x rstd w it is, with n = x rstd and
 * dn = w dy:  dx = rstd (dn - n mean(dn n)),  and dw += dy n, n as the forward rounded it. */
FB_VECTOR static void head_backward(const fb_rope_qk *f, const void *from, const void *weight, const float *cosine,
                                    const float *sine, const void *dy_from, void *dx_to, float *restrict dw)
{
    uint32_t d = f->head_dim, half = d / 2;
    float x[ROPE_HEAD_DIM_MAX], dy[ROPE_HEAD_DIM_MAX], dn[ROPE_HEAD_DIM_MAX], w[ROPE_HEAD_DIM_MAX];
    fb_row_load(x, dy_from, f->act, d);
    for (uint32_t i = 0; i < half; i++) {
        dy[i] = x[i] * cosine[i] + x[half + i] * sine[i];
        dy[half + i] = x[half + i] * cosine[i] - x[i] * sine[i];
    }
    if (!weight) {
        fb_row_store(dx_to, f->act, dy, d);
        return;
    }
    fb_row_load(x, from, f->act, d);
    fb_row_load(w, weight, f->act, d);
    float rstd = inverse_rms(x, d, f->eps);
    for (uint32_t i = 0; i < d; i++) {
        x[i] *= rstd;
        dw[i] += dy[i] * fb_round_to(f->act, x[i]);
        dn[i] = dy[i] * w[i];
    }
    float mean = fb_row_dot(dn, x, d) / (float)d;
    for (uint32_t i = 0; i < d; i++)
        dn[i] = rstd * (dn[i] - x[i] * mean);
    fb_row_store(dx_to, f->act, dn, d);
}

static void rope_task(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const rope *r = ctx;
    const fb_rope_qk *f = r->f;
    uint64_t d = f->head_dim, n_head = f->n_head, n_kv_head = f->n_kv_head;
    uint64_t qkv_ld = (n_head + 2 * n_kv_head) * d, first = task * r->tile, end = first + r->tile;
    float *sums = r->sums ? r->sums + task * 2 * d : NULL;
    if (sums)
        memset(sums, 0, 2 * d * sizeof *sums);
    for (uint64_t t = first; t < end && t < f->t; t++) {
        const float *cosine = f->cos + f->position[t] * (d / 2), *sine = f->sin + f->position[t] * (d / 2);
        for (uint64_t h = 0; h < n_head + n_kv_head; h++) {
            bool is_key = h >= n_head;
            const void *weight = is_key ? f->k_norm : f->q_norm;
            uint64_t packed = t * qkv_ld + h * d; /* k follows q in qkv */
            uint64_t apart = is_key ? (t * n_kv_head + h - n_head) * d : (t * n_head + h) * d;
            const void *x = fb_at(f->qkv, f->act, packed);
            if (r->b)
                head_backward(f, x, weight, cosine, sine, fb_at(is_key ? r->b->dk : r->b->dq, f->act, apart),
                              fb_at(r->b->dqkv, f->act, packed), sums ? sums + is_key * d : NULL);
            else
                head_forward(f, x, weight, cosine, sine, fb_at(is_key ? f->k : f->q, f->act, apart));
        }
    }
}

static void norm_grad(const rope *r, uint32_t is_key, float *dw)
{
    uint64_t d = r->f->head_dim, n = tile_count(r->f->t, r->tile);
    for (uint64_t i = 0; i < d; i++) {
        double sum = r->b->accumulate ? (double)dw[i] : 0.0;
        for (uint64_t tile = 0; tile < n; tile++)
            sum += (double)r->sums[(tile * 2 + is_key) * d + i];
        dw[i] = (float)sum;
    }
}

static void rope_check(const fb_rope_qk *f)
{
    assert(f->act == FB_F32 || f->act == FB_BF16);
    assert(f->head_dim % 2 == 0 && f->head_dim <= ROPE_HEAD_DIM_MAX);
    assert(!f->q_norm == !f->k_norm);
}

void fb_cpu_rope_qk(fb_cpu_scratch *s, const fb_rope_qk *f)
{
    rope_check(f);
    rope r = { .f = f, .tile = tile_tokens(f->t) };
    fb_team_run(s->team, tile_count(f->t, r.tile), rope_task, &r);
}

/* The tiles' sums lie in the first worker's scratch, each written by whoever has the tile: rows need none. */
void fb_cpu_rope_qk_bwd(fb_cpu_scratch *s, const fb_rope_qk_bwd *b)
{
    rope_check(&b->fwd);
    bool norm = b->fwd.q_norm != NULL;
    rope r = { .f = &b->fwd, .b = b, .tile = tile_tokens(b->fwd.t), .sums = norm ? fb_cpu_scratch_of(s, 0) : NULL };
    fb_team_run(s->team, tile_count(b->fwd.t, r.tile), rope_task, &r);
    if (norm) {
        norm_grad(&r, 0, b->dq_norm);
        norm_grad(&r, 1, b->dk_norm);
    }
}
