/* attention.h - what the attention kernels of the cpu back end share: tiles, masks, and single-threaded sgemm.
 *
 * Every document is cut by itself into tiles of ATT_TILE tokens, so that neither its bits nor the work on it depend on
 * its neighbours in the micro-batch.
 *
 * A tile of scores is 64 x 64, because OpenBLAS multiplies without packing its operands while rows x cols x depth
 * stays under a million, and then reaches its full rate at such sizes: 195 GFLOP/s a core (Xeon with AVX-512) against
 * 120-140 for tiles of 128 or 256, which it packs at every call.  It does so only if the right operand is not
 * transposed (else 100), hence one operand of each product of scores is transposed here, once, and used many times. */
#ifndef FB_DEVICE_CPU_ATTENTION_H
#define FB_DEVICE_CPU_ATTENTION_H

#include <assert.h>
#include <cblas.h>
#include <limits.h>

#include "device/cpu/cpu.h"
#include "device/cpu/vec.h"

enum {
    ATT_TILE = 64,
    ATT_LANES = 16,          /* columns of a score tile are computed in whole groups of so many */
    ATT_HEAD_DIM_MAX = 256,
    ATT_PANEL = ATT_TILE * ATT_HEAD_DIM_MAX, /* elements: a tile of tokens, one head */
    ATT_SCORES = ATT_TILE * ATT_TILE,
};
static_assert(ATT_TILE % ATT_LANES == 0, "a full tile has no padding");

/* Queries [first, first + n) of a document. */
typedef struct att_tile {
    fb_span  span;
    uint32_t index, first, n;
} att_tile;

/* One head's rows of a tile: n rows of head_dim floats. */
typedef struct att_rows {
    const float *at;
    uint64_t     ld;
} att_rows;

static inline uint32_t att_tile_count(uint32_t len)
{
    return len / ATT_TILE + (len % ATT_TILE != 0);
}

static inline uint32_t att_tile_len(uint32_t len, uint32_t tile)
{
    uint32_t left = len - tile * ATT_TILE;
    return left < ATT_TILE ? left : ATT_TILE;
}

static inline uint32_t att_lanes(uint32_t n)
{
    return (n + ATT_LANES - 1) / ATT_LANES * ATT_LANES;
}

/* Query tiles of all documents. */
static inline uint64_t att_query_tiles(const fb_attention *a)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < a->n_span; i++)
        n += att_tile_count(a->span[i].q_len);
    return n;
}

/* Query tile number `index` over all documents, a document's last tile first: under a causal mask it has the most
 * work.  The walk along the spans costs nothing beside a tile's work. */
static inline att_tile att_query_tile(const fb_attention *a, uint64_t index)
{
    const fb_span *s = a->span;
    while (index >= att_tile_count(s->q_len))
        index -= att_tile_count(s++->q_len);
    uint32_t tile = att_tile_count(s->q_len) - 1 - (uint32_t)index;
    return (att_tile){ *s, tile, tile * ATT_TILE, att_tile_len(s->q_len, tile) };
}

/* The first key that the query at `position` sees. */
static inline uint32_t att_first_key(uint32_t window, uint32_t position)
{
    return window != 0 && position >= window ? position - window + 1 : 0;
}

/* head_dim floats of each of n rows: in place, or bfloat16 widened into tmp. */
static inline att_rows att_view(const fb_attention *a, const void *base, uint64_t ld, uint64_t row, uint32_t head,
                                uint32_t n, float *tmp)
{
    uint64_t d = a->head_dim;
    const void *from = fb_at(base, a->act, row * ld + head * d);
    if (a->act == FB_F32)
        return (att_rows){ from, ld };
    for (uint32_t i = 0; i < n; i++)
        fb_row_load(tmp + i * d, fb_at(from, a->act, i * ld), a->act, d);
    return (att_rows){ tmp, d };
}

/* out[head_dim][ATT_TILE] = the n rows, transposed; columns up to the next whole group are zero, so that the lanes that
 * nobody reads compute on something defined (and never on stale denormals, which are slow). */
static inline void att_transpose(float *out, att_rows rows, uint32_t n, uint32_t head_dim)
{
    uint32_t lanes = att_lanes(n);
    scipy_cblas_somatcopy(CblasRowMajor, CblasTrans, (blasint)n, (blasint)head_dim, 1.0f, rows.at, (blasint)rows.ld,
                          out, ATT_TILE);
    if (lanes > n)
        for (uint32_t c = 0; c < head_dim; c++)
            memset(out + c * ATT_TILE + n, 0, (lanes - n) * sizeof *out);
}

/* c[m,n] = alpha a[m,k] b[k,n] + beta c; a_trans: a is stored [k,m].  beta 0: c is not read. */
static inline void att_gemm(bool a_trans, uint32_t m, uint32_t n, uint32_t k, float alpha, const float *a,
                            uint64_t a_ld, const float *b, uint64_t b_ld, float beta, float *c, uint64_t c_ld)
{
    scipy_cblas_sgemm(CblasRowMajor, a_trans ? CblasTrans : CblasNoTrans, CblasNoTrans, (blasint)m, (blasint)n,
                      (blasint)k, alpha, a, (blasint)a_ld, b, (blasint)b_ld, beta, c, (blasint)c_ld);
}

static inline void att_check(const fb_attention *a)
{
    assert(a->act == FB_F32 || a->act == FB_BF16);
    assert(a->head_dim > 0 && a->head_dim <= ATT_HEAD_DIM_MAX);
    assert(a->n_kv_head > 0 && a->n_head % a->n_kv_head == 0);
    assert(a->q_ld <= INT_MAX && a->k_ld <= INT_MAX && a->v_ld <= INT_MAX); /* blasint is int */
}

#endif
