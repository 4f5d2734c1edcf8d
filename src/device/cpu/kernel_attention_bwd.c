/* kernel_attention_bwd.c - dq, dk, dv of causal attention.  Source: Dao et al. 2022 (FlashAttention), alg. 4:
 *
 *     p = e^(s - lse)         s = scale q k^T, recomputed tile by tile
 *     dv = p^T do             dp = do v^T
 *     ds = scale p (dp - delta)                delta[query] = sum over head_dim of do * o
 *     dk = ds^T q             dq = ds k
 *
 * dk and dv of a key tile are sums over queries and over the group's query heads, dq of a query tile a sum over keys.
 * To compute each score once, the work is cut by key tiles: a task owns a run of them (a segment) for one key-value
 * head, finishes their dk and dv by itself, and adds its share of dq into a partial sum of its own in the caller's
 * scratch.  The shares are then added in segment order.  So nothing is summed by two threads, and the order of every
 * sum follows from the document's length and window alone.  A document has at most four segments: enough tasks for a
 * team even where one document fills the micro-batch, at the price of four dq in scratch.  (One pass for dk, dv and
 * one for dq would need none, but recompute s and dp: 7 products a tile instead of 5.) */
#include "device/cpu/attention.h"

enum { SEGMENT_MAX = 4, SEGMENT_TILES = 2 /* at least, on average: half of the tiles of a short document */ };

typedef struct backward_work {
    _Alignas(64) float p[ATT_SCORES];
    float ds[ATT_SCORES];
    float k_t[ATT_PANEL], v_t[ATT_PANEL], dk[ATT_PANEL], dv[ATT_PANEL];
    float k[ATT_PANEL], v[ATT_PANEL], q[ATT_PANEL], d_o[ATT_PANEL]; /* bfloat16 only: widened */
} backward_work;
static_assert(sizeof(backward_work) <= FB_CPU_SCRATCH_SIZE, "a worker's scratch holds a task's tiles");

typedef struct backward {
    const fb_cpu_scratch   *s;
    const fb_attention_bwd *b;
    float *share; /* [SEGMENT_MAX][n_head][T][head_dim] */
    float *delta; /* [n_head][T] */
} backward;

/* Key tiles [first, end). */
typedef struct segment {
    uint32_t first, end;
} segment;

uint64_t fb_cpu_attention_scratch(uint32_t t_max, uint32_t n_head, uint32_t head_dim)
{
    uint64_t rows = (uint64_t)t_max * n_head, size;
    if (__builtin_mul_overflow(rows, (uint64_t)SEGMENT_MAX * head_dim + 1, &size)
        || __builtin_mul_overflow(size, sizeof(float), &size))
        return UINT64_MAX; /* more than any budget */
    return size;
}

/* The first key tile that a query tile sees; the last is its own. */
static uint32_t first_key_tile(const fb_attention *a, uint32_t query_tile)
{
    return att_first_key(a->window, query_tile * ATT_TILE) / ATT_TILE;
}

/* One past the last query tile that sees a key tile. */
static uint32_t query_tile_end(const fb_attention *a, uint32_t key_tile, uint32_t n_tile)
{
    uint64_t end = a->window ? key_tile + ((uint64_t)a->window + ATT_TILE - 2) / ATT_TILE + 1 : n_tile;
    return end < n_tile ? (uint32_t)end : n_tile;
}

static uint32_t segment_count(uint32_t n_tile)
{
    uint32_t n = n_tile / SEGMENT_TILES;
    return n < 1 ? 1 : n > SEGMENT_MAX ? SEGMENT_MAX : n;
}

/* Segment number i of a document: near equal counts of score tiles, which fall from the first key tile to the last. */
static segment segment_at(const fb_attention *a, uint32_t n_tile, uint32_t i)
{
    uint64_t total = 0, before = 0, n = segment_count(n_tile);
    for (uint32_t j = 0; j < n_tile; j++)
        total += query_tile_end(a, j, n_tile) - j;
    segment g = { n_tile, n_tile };
    for (uint32_t j = 0; j < n_tile; j++) {
        uint64_t owner = before * n / total;
        if (owner == i && g.first == n_tile)
            g.first = j;
        if (owner > i) {
            g.end = j;
            break;
        }
        before += query_tile_end(a, j, n_tile) - j;
    }
    return g.first < g.end ? g : (segment){ 0, 0 };
}

/* The first key tile of the segment that a query tile sees, or UINT32_MAX. */
static uint32_t segment_first_seen(const fb_attention *a, segment g, uint32_t query_tile)
{
    uint32_t first = first_key_tile(a, query_tile);
    first = first > g.first ? first : g.first;
    return first < g.end && first <= query_tile ? first : UINT32_MAX;
}

static float *share_at(const backward *r, uint32_t segment_index, uint32_t head, uint64_t row)
{
    const fb_attention *a = &r->b->fwd;
    return r->share + (((uint64_t)segment_index * a->n_head + head) * a->t + row) * a->head_dim;
}

FB_VECTOR static void delta_row(float *delta, const void *o, const void *d_o, fb_dtype act, uint32_t d)
{
    float wide_o[ATT_HEAD_DIM_MAX], wide_do[ATT_HEAD_DIM_MAX];
    *delta = fb_row_dot(fb_row_view(o, act, d, wide_o), fb_row_view(d_o, act, d, wide_do), d);
}

static void delta_task(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const backward *r = ctx;
    const fb_attention *a = &r->b->fwd;
    att_tile t = att_query_tile(a, task);
    uint64_t row = (uint64_t)t.span.q_start + t.first, d = a->head_dim;
    for (uint64_t i = row; i < row + t.n; i++)
        for (uint64_t h = 0; h < a->n_head; h++)
            delta_row(r->delta + h * a->t + i, fb_at(a->o, a->act, i * a->o_ld + h * d),
                      fb_at(r->b->d_o, a->act, i * r->b->do_ld + h * d), a->act, (uint32_t)d);
}

/* p holds s and becomes e^(s - lse); ds holds dp and becomes scale p (dp - delta).  Rows are queries, row i sees
 * columns [from[i], to[i]); elsewhere both are 0: e^(s - lse) may overflow there. */
FB_VECTOR static void scores_bwd(float *restrict p, float *restrict ds, const float *lse, const float *delta,
                                 const uint8_t *from, const uint8_t *to, uint32_t n, uint32_t lanes, float scale)
{
    for (uint32_t i = 0; i < n; i++) {
        float *restrict p_row = p + i * ATT_TILE, *restrict ds_row = ds + i * ATT_TILE;
        float row_lse = lse[i], row_delta = delta[i];
        for (uint32_t b = from[i] / ATT_LANES * ATT_LANES; b < to[i]; b += ATT_LANES)
            for (uint32_t j = b; j < b + ATT_LANES; j++) {
                float e = fb_expf(p_row[j] - row_lse);
                p_row[j] = e;
                ds_row[j] = e * (ds_row[j] - row_delta) * scale;
            }
        for (uint32_t j = 0; j < from[i]; j++)
            p_row[j] = ds_row[j] = 0.0f;
        for (uint32_t j = to[i]; j < lanes; j++)
            p_row[j] = ds_row[j] = 0.0f;
    }
}

/* One query head's tile against the key tile in w: adds to w->dk, w->dv and to the task's share of dq. */
static void tile_bwd(const backward *r, backward_work *w, att_rows k, const fb_span *span, uint32_t head,
                     uint32_t query_tile, uint32_t key_tile, float *dq, bool dq_first, bool dkv_first)
{
    const fb_attention_bwd *b = r->b;
    const fb_attention *a = &b->fwd;
    uint32_t d = a->head_dim, query = query_tile * ATT_TILE, key = key_tile * ATT_TILE;
    uint32_t n = att_tile_len(span->q_len, query_tile), n_key = att_tile_len(span->k_len, key_tile);
    uint32_t lanes = att_lanes(n_key);
    uint64_t row = (uint64_t)span->q_start + query, stat = (uint64_t)head * a->t + row;
    float keep = dkv_first ? 0.0f : 1.0f;

    att_rows q = att_view(a, a->q, a->q_ld, row, head, n, w->q);
    att_rows d_o = att_view(a, b->d_o, b->do_ld, row, head, n, w->d_o);
    att_gemm(false, n, lanes, d, a->scale, q.at, q.ld, w->k_t, ATT_TILE, 0.0f, w->p, ATT_TILE);
    att_gemm(false, n, lanes, d, 1.0f, d_o.at, d_o.ld, w->v_t, ATT_TILE, 0.0f, w->ds, ATT_TILE);

    uint8_t from[ATT_TILE], to[ATT_TILE];
    for (uint32_t i = 0; i < n; i++) {
        uint32_t low = att_first_key(a->window, query + i), high = query + i + 1;
        high = high < key + n_key ? high - key : n_key;
        low = low > key ? low - key : 0;
        from[i] = (uint8_t)(low < high ? low : high);
        to[i] = (uint8_t)high;
    }
    scores_bwd(w->p, w->ds, a->lse + stat, r->delta + stat, from, to, n, lanes, a->scale);

    att_gemm(true, n_key, d, n, 1.0f, w->p, ATT_TILE, d_o.at, d_o.ld, keep, w->dv, d);
    att_gemm(true, n_key, d, n, 1.0f, w->ds, ATT_TILE, q.at, q.ld, keep, w->dk, d);
    att_gemm(false, n, d, n_key, 1.0f, w->ds, ATT_TILE, k.at, k.ld, dq_first ? 0.0f : 1.0f, dq, d);
}

static void segment_task(void *ctx, uint64_t task, uint32_t worker)
{
    const backward *r = ctx;
    const fb_attention_bwd *b = r->b;
    const fb_attention *a = &b->fwd;
    backward_work *w = fb_cpu_scratch_of(r->s, worker);
    uint32_t index = (uint32_t)(task % SEGMENT_MAX), kv_head = (uint32_t)(task / SEGMENT_MAX % a->n_kv_head);
    const fb_span *span = &a->span[task / SEGMENT_MAX / a->n_kv_head];
    uint32_t n_tile = att_tile_count(span->k_len), d = a->head_dim, group = a->n_head / a->n_kv_head;
    if (index >= segment_count(n_tile))
        return;
    segment g = segment_at(a, n_tile, index);

    for (uint32_t j = g.first; j < g.end; j++) {
        uint32_t n_key = att_tile_len(span->k_len, j);
        uint64_t key_row = (uint64_t)span->k_start + (uint64_t)j * ATT_TILE;
        att_rows k = att_view(a, a->k, a->k_ld, key_row, kv_head, n_key, w->k);
        att_transpose(w->k_t, k, n_key, d);
        att_transpose(w->v_t, att_view(a, a->v, a->v_ld, key_row, kv_head, n_key, w->v), n_key, d);
        uint32_t end = query_tile_end(a, j, n_tile);
        for (uint32_t head = kv_head * group; head < (kv_head + 1) * group; head++)
            for (uint32_t i = j; i < end; i++)
                tile_bwd(r, w, k, span, head, i, j,
                         share_at(r, index, head, (uint64_t)span->q_start + (uint64_t)i * ATT_TILE),
                         segment_first_seen(a, g, i) == j, head == kv_head * group && i == j);
        for (uint32_t i = 0; i < n_key; i++) {
            uint64_t column = (uint64_t)kv_head * d;
            fb_row_store(fb_at(b->dk, a->act, (key_row + i) * b->dk_ld + column), a->act, w->dk + i * d, d);
            fb_row_store(fb_at(b->dv, a->act, (key_row + i) * b->dv_ld + column), a->act, w->dv + i * d, d);
        }
    }
}

FB_VECTOR static void add_into(float *restrict sum, const float *restrict x, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        sum[i] += x[i];
}

/* dq of one query tile and head: the shares of the segments that see it, in segment order. */
static void share_task(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const backward *r = ctx;
    const fb_attention *a = &r->b->fwd;
    att_tile t = att_query_tile(a, task / a->n_head);
    uint32_t head = (uint32_t)(task % a->n_head), n_tile = att_tile_count(t.span.k_len), n = segment_count(n_tile);
    uint64_t row = (uint64_t)t.span.q_start + t.first, d = a->head_dim;
    float *sum = NULL;
    for (uint32_t i = 0; i < n; i++) {
        if (segment_first_seen(a, segment_at(a, n_tile, i), t.index) == UINT32_MAX)
            continue;
        float *share = share_at(r, i, head, row);
        if (sum)
            add_into(sum, share, t.n * d);
        else
            sum = share;
    }
    for (uint32_t i = 0; i < t.n; i++)
        fb_row_store(fb_at(r->b->dq, a->act, (row + i) * r->b->dq_ld + head * d), a->act, sum + i * d, d);
}

void fb_cpu_attention_bwd(fb_cpu_scratch *s, const fb_attention_bwd *b)
{
    const fb_attention *a = &b->fwd;
    att_check(a);
    assert(b->do_ld <= INT_MAX);
    for (uint32_t i = 0; i < a->n_span; i++)
        assert(a->span[i].q_start == a->span[i].k_start && a->span[i].q_len == a->span[i].k_len);
    uint64_t share_count = (uint64_t)SEGMENT_MAX * a->n_head * a->t * a->head_dim;
    backward r = { s, b, b->scratch, (float *)b->scratch + share_count };
    uint64_t n_tile = att_query_tiles(a);
    fb_team_run(s->team, n_tile, delta_task, &r);
    fb_team_run(s->team, (uint64_t)a->n_span * a->n_kv_head * SEGMENT_MAX, segment_task, &r);
    fb_team_run(s->team, n_tile * a->n_head, share_task, &r);
}
