/* kernel_attention.c - causal attention, forward: streaming softmax over tiles of 64 queries x 64 keys.
 *
 * A task is one query tile of one head; it alone writes its rows of o and lse, and takes the keys from first to last.
 * The mask decides which key tiles it visits: none to the right of the diagonal, none left of the window.
 *
 * Scores are held transposed, s_t[key][query], so that maximum and sum over keys run down the columns: lanes are
 * queries, nothing is added across a vector, and the sums' order is the keys' order on every processor. */
#include "device/cpu/attention.h"

typedef struct forward_work {
    _Alignas(64) float s_t[ATT_SCORES];
    float o[ATT_PANEL], q_t[ATT_PANEL];
    float q[ATT_PANEL], k[ATT_PANEL], v[ATT_PANEL]; /* bfloat16 only: widened */
    float max[ATT_TILE], sum[ATT_TILE], shrink[ATT_TILE];
} forward_work;
static_assert(sizeof(forward_work) <= FB_CPU_SCRATCH_SIZE, "a worker's scratch holds a task's tiles");

typedef struct forward {
    const fb_cpu_scratch *s;
    const fb_attention   *a;
} forward;

/* For each key row of a tile of scores the queries that see it: [from, to). */
typedef struct key_mask {
    uint8_t from[ATT_TILE], to[ATT_TILE];
} key_mask;

/* key, query: position of the tile's first key and first query. */
static void mask_fill(key_mask *mask, uint32_t window, uint32_t key, uint32_t n_key, uint32_t query, uint32_t lanes)
{
    for (uint32_t i = 0; i < n_key; i++) {
        int64_t from = (int64_t)key + i - query, to = window ? from + window : lanes;
        from = from < 0 ? 0 : from > lanes ? lanes : from;
        to = to < from ? from : to > lanes ? lanes : to;
        mask->from[i] = (uint8_t)from;
        mask->to[i] = (uint8_t)to;
    }
}

/* Widens [from, to) to whole groups of lanes and hides what came in: e^-inf = 0. */
static void mask_apply(key_mask *mask, float *s_t, uint32_t n_key)
{
    for (uint32_t i = 0; i < n_key; i++) {
        float *row = s_t + i * ATT_TILE;
        uint32_t from = mask->from[i], to = mask->to[i];
        uint32_t first = from / ATT_LANES * ATT_LANES, end = from < to ? att_lanes(to) : first;
        for (uint32_t j = first; j < from && j < end; j++)
            row[j] = -INFINITY;
        for (uint32_t j = to; j < end; j++)
            row[j] = -INFINITY;
        mask->from[i] = (uint8_t)first;
        mask->to[i] = (uint8_t)end;
    }
}

/* One step of the streaming softmax (Milakov & Gimelshein 2018, alg. 3), lane by lane: max and sum advance over the
 * tile's keys, s_t becomes e^(s_t - max), 0 outside the mask, and what was summed before must be multiplied by shrink.
 * A lane that has seen no key yet keeps max -inf and sum 0. */
FB_VECTOR static void softmax_step(forward_work *w, const key_mask *mask, uint32_t n_key, uint32_t lanes)
{
    float top[ATT_TILE], shift[ATT_TILE], part[ATT_TILE];
    memcpy(top, w->max, sizeof top);
    for (uint32_t i = 0; i < n_key; i++) {
        const float *row = w->s_t + i * ATT_TILE;
        for (uint32_t b = mask->from[i]; b < mask->to[i]; b += ATT_LANES)
            for (uint32_t j = b; j < b + ATT_LANES; j++)
                top[j] = row[j] > top[j] ? row[j] : top[j];
    }
    for (uint32_t j = 0; j < lanes; j++) {
        shift[j] = top[j] == -INFINITY ? 0.0f : top[j];
        w->shrink[j] = fb_expf(w->max[j] - shift[j]);
        w->max[j] = top[j];
        part[j] = 0.0f;
    }
    for (uint32_t i = 0; i < n_key; i++) {
        float *row = w->s_t + i * ATT_TILE;
        for (uint32_t j = 0; j < mask->from[i]; j++)
            row[j] = 0.0f;
        for (uint32_t b = mask->from[i]; b < mask->to[i]; b += ATT_LANES)
            for (uint32_t j = b; j < b + ATT_LANES; j++) {
                float e = fb_expf(row[j] - shift[j]);
                row[j] = e;
                part[j] += e;
            }
        for (uint32_t j = mask->to[i]; j < lanes; j++)
            row[j] = 0.0f;
    }
    for (uint32_t j = 0; j < lanes; j++)
        w->sum[j] = w->sum[j] * w->shrink[j] + part[j];
}

FB_VECTOR static void rows_scale(float *rows, const float *factor, uint32_t n, uint32_t d)
{
    for (uint32_t i = 0; i < n; i++, rows += d) {
        float f = factor[i];
        if (f != 1.0f)
            for (uint32_t c = 0; c < d; c++)
                rows[c] *= f;
    }
}

/* Takes the keys [key, key + n_key) into the sums.  first: w->o holds nothing yet, and is not read. */
static void key_tile_add(forward_work *w, const fb_attention *a, const att_tile *t, uint32_t kv_head, uint32_t key,
                         uint32_t n_key, bool first)
{
    uint32_t d = a->head_dim, lanes = att_lanes(t->n), query = t->span.k_len - t->span.q_len + t->first;
    uint64_t row = (uint64_t)t->span.k_start + key;
    att_rows k = att_view(a, a->k, a->k_ld, row, kv_head, n_key, w->k);
    att_rows v = att_view(a, a->v, a->v_ld, row, kv_head, n_key, w->v);

    att_gemm(false, n_key, lanes, d, a->scale, k.at, k.ld, w->q_t, ATT_TILE, 0.0f, w->s_t, ATT_TILE);
    key_mask mask;
    mask_fill(&mask, a->window, key, n_key, query, lanes);
    mask_apply(&mask, w->s_t, n_key);
    softmax_step(w, &mask, n_key, lanes);
    if (!first)
        rows_scale(w->o, w->shrink, t->n, d);
    att_gemm(true, t->n, d, n_key, 1.0f, w->s_t, ATT_TILE, v.at, v.ld, first ? 0.0f : 1.0f, w->o, d);
}

static void forward_task(void *ctx, uint64_t task, uint32_t worker)
{
    const forward *f = ctx;
    const fb_attention *a = f->a;
    forward_work *w = fb_cpu_scratch_of(f->s, worker);
    att_tile t = att_query_tile(a, task / a->n_head);
    uint32_t head = (uint32_t)(task % a->n_head), kv_head = head / (a->n_head / a->n_kv_head), d = a->head_dim;
    uint64_t row = (uint64_t)t.span.q_start + t.first;
    uint32_t query = t.span.k_len - t.span.q_len + t.first, end = query + t.n;

    att_transpose(w->q_t, att_view(a, a->q, a->q_ld, row, head, t.n, w->q), t.n, d);
    for (uint32_t j = 0; j < ATT_TILE; j++) {
        w->max[j] = -INFINITY;
        w->sum[j] = 0.0f;
    }
    uint32_t begin = att_first_key(a->window, query) / ATT_TILE * ATT_TILE;
    for (uint32_t key = begin; key < end; key += ATT_TILE)
        key_tile_add(w, a, &t, kv_head, key, end - key < ATT_TILE ? end - key : ATT_TILE, key == begin);

    float *lse = a->lse + (uint64_t)head * a->t + row;
    for (uint32_t i = 0; i < t.n; i++) {
        lse[i] = w->max[i] + logf(w->sum[i]);
        w->sum[i] = 1.0f / w->sum[i];
    }
    rows_scale(w->o, w->sum, t.n, d);
    for (uint32_t i = 0; i < t.n; i++)
        fb_row_store(fb_at(a->o, a->act, (row + i) * a->o_ld + (uint64_t)head * d), a->act, w->o + i * d, d);
}

void fb_cpu_attention(fb_cpu_scratch *s, const fb_attention *a)
{
    att_check(a);
    forward f = { s, a };
    fb_team_run(s->team, att_query_tiles(a) * a->n_head, forward_task, &f);
}
