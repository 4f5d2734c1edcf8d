/* attention_f32.cu - own attention for float32: plain fused multiply-adds, in the same passes as attention_bf16.cu.
 *
 * Exists for parity: float32 on a GPU is the mode in which results are compared, not the one in which models are trained.
 * A tile is R tokens, a block 256 threads as 16 x 16: thread (y, x) owns rows y + 16 i of its block's tile, and of the
 * scores columns x + 16 j, of the head x + 16 j too.  Rows in shared memory are padded by 4 floats: the eight rows that a
 * quarter of a warp reads at once, 16 bytes of each, then lie in different banks. */
#include <cuda_bf16.h>

#include "device/cuda/attention.cuh"
#include "device/cuda/attention_own.h"

namespace {

constexpr int SIDE = 16, THREADS = SIDE * SIDE;

typedef struct forward_args {
    fb_attention a;
    uint32_t n_tile;
} forward_args;

typedef struct backward_args {
    fb_attention_bwd b;
    const float *delta; /* [H, T] */
    uint32_t n_tile;
} backward_args;

/* Shared memory: tiles of R rows, then one or two tiles of scores, then rows. */
template <int D, int R> struct tiles {
    static constexpr int ld = D + 4, size = R * ld, score_ld = R + 1, score_size = R * score_ld;
};

/* Copies n rows of a head; what is beyond them, or beyond head_dim, becomes 0. */
template <int D, int R>
__device__ void tile_load(float *tile, const float *from, uint64_t ld, uint32_t n, uint32_t head_dim)
{
    for (uint32_t at = threadIdx.x; at < R * D; at += THREADS) {
        uint32_t row = at / D, c = at % D;
        tile[row * tiles<D, R>::ld + c] = row < n && c < head_dim ? from[row * ld + c] : 0.0f;
    }
}

/* c = rows of tile a times rows of tile b, transposed. */
template <int D, int R>
__device__ __forceinline__ void product_scores(float (&c)[R / SIDE][R / SIDE], const float *a, const float *b)
{
    constexpr int n = R / SIDE, ld = tiles<D, R>::ld;
    int x = (int)threadIdx.x % SIDE, y = (int)threadIdx.x / SIDE;
#pragma unroll
    for (int i = 0; i < n; i++)
#pragma unroll
        for (int j = 0; j < n; j++)
            c[i][j] = 0.0f;
#pragma unroll 4
    for (int k = 0; k < D; k += 4) {
        float4 va[n], vb[n];
#pragma unroll
        for (int i = 0; i < n; i++) {
            va[i] = *reinterpret_cast<const float4 *>(a + (y + SIDE * i) * ld + k);
            vb[i] = *reinterpret_cast<const float4 *>(b + (x + SIDE * i) * ld + k);
        }
#pragma unroll
        for (int i = 0; i < n; i++)
#pragma unroll
            for (int j = 0; j < n; j++)
                c[i][j] = fmaf(va[i].w, vb[j].w, fmaf(va[i].z, vb[j].z, fmaf(va[i].y, vb[j].y, fmaf(va[i].x, vb[j].x, c[i][j]))));
    }
}

/* c += scores a times the rows of tile b. */
template <int D, int R>
__device__ __forceinline__ void product_values(float (&c)[R / SIDE][D / SIDE], const float *a, const float *b)
{
    int x = (int)threadIdx.x % SIDE, y = (int)threadIdx.x / SIDE;
#pragma unroll 2
    for (int k = 0; k < R; k++) {
        float va[R / SIDE];
#pragma unroll
        for (int i = 0; i < R / SIDE; i++)
            va[i] = a[(y + SIDE * i) * tiles<D, R>::score_ld + k];
#pragma unroll
        for (int j = 0; j < D / SIDE; j++) {
            float vb = b[k * tiles<D, R>::ld + x + SIDE * j];
#pragma unroll
            for (int i = 0; i < R / SIDE; i++)
                c[i][j] = fmaf(va[i], vb, c[i][j]);
        }
    }
}

template <int D, int R>
__device__ __forceinline__ void rows_store(float *to, uint64_t ld, const float (&c)[R / SIDE][D / SIDE], uint32_t n,
                                           uint32_t head_dim, float factor)
{
    uint32_t x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
#pragma unroll
    for (int i = 0; i < R / SIDE; i++)
#pragma unroll
        for (int j = 0; j < D / SIDE; j++)
            if (y + SIDE * i < n && x + SIDE * j < head_dim)
                to[(y + SIDE * i) * ld + x + SIDE * j] = c[i][j] * factor;
}

/* Over the 16 threads of a row, which are half a warp; all get the result. */
__device__ __forceinline__ float row_max(float v)
{
#pragma unroll
    for (int i = SIDE / 2; i > 0; i /= 2)
        v = fmaxf(v, __shfl_xor_sync(~0u, v, i));
    return v;
}

__device__ __forceinline__ float row_sum(float v)
{
#pragma unroll
    for (int i = SIDE / 2; i > 0; i /= 2)
        v += __shfl_xor_sync(~0u, v, i);
    return v;
}

template <int D, int R> constexpr uint32_t forward_size()
{
    return (uint32_t)sizeof(float) * (3 * tiles<D, R>::size + tiles<D, R>::score_size);
}

template <int D, int R> __global__ __launch_bounds__(THREADS) void forward_kernel(forward_args f)
{
    constexpr int n = R / SIDE;
    extern __shared__ __align__(128) unsigned char shared[];
    const fb_attention &a = f.a;
    uint32_t head = blockIdx.x % a.n_head, kv_head = head / (a.n_head / a.n_kv_head);
    att_tile tile = att_find_tile(a, f.n_tile - 1 - blockIdx.x / a.n_head, R);
    if (tile.n == 0)
        return;

    float *q = (float *)shared, *k = q + tiles<D, R>::size, *v = k + tiles<D, R>::size, *p = v + tiles<D, R>::size;
    uint32_t d = a.head_dim, x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    uint64_t row = (uint64_t)tile.span.q_start + tile.first;
    uint32_t position = tile.span.k_len - tile.span.q_len + tile.first, end = position + tile.n;
    float o[n][D / SIDE] = {}, top[n], sum[n];
#pragma unroll
    for (int i = 0; i < n; i++) {
        top[i] = -INFINITY;
        sum[i] = 0.0f;
    }

    tile_load<D, R>(q, (const float *)a.q + row * a.q_ld + head * d, a.q_ld, tile.n, d);
    for (uint32_t key = att_first_key(a.window, position) / R * R; key < end; key += R) {
        uint64_t at = (uint64_t)tile.span.k_start + key;
        __syncthreads(); /* nobody reads the tiles before any more */
        tile_load<D, R>(k, (const float *)a.k + at * a.k_ld + kv_head * d, a.k_ld, end - key, d);
        tile_load<D, R>(v, (const float *)a.v + at * a.v_ld + kv_head * d, a.v_ld, end - key, d);
        __syncthreads();
        float s[n][n];
        product_scores<D, R>(s, q, k);
#pragma unroll
        for (int i = 0; i < n; i++) {
            float high = -INFINITY, part = 0.0f;
#pragma unroll
            for (int j = 0; j < n; j++) {
                bool seen = att_sees(a.window, position + y + SIDE * i, key + x + SIDE * j);
                s[i][j] = seen ? s[i][j] * a.scale : -INFINITY;
                high = fmaxf(high, s[i][j]);
            }
            high = fmaxf(top[i], row_max(high));
            float shift = high == -INFINITY ? 0.0f : high, shrink = expf(top[i] - shift);
            top[i] = high;
#pragma unroll
            for (int j = 0; j < n; j++) {
                float e = expf(s[i][j] - shift);
                part += e;
                p[(y + SIDE * i) * tiles<D, R>::score_ld + x + SIDE * j] = e;
            }
            sum[i] = sum[i] * shrink + row_sum(part);
#pragma unroll
            for (int j = 0; j < D / SIDE; j++)
                o[i][j] *= shrink;
        }
        __syncwarp(); /* a row of p is written and read by the same half of a warp */
        product_values<D, R>(o, p, v);
    }

    float *lse = a.lse + (uint64_t)head * a.t + row;
#pragma unroll
    for (int i = 0; i < n; i++) {
#pragma unroll
        for (int j = 0; j < D / SIDE; j++)
            o[i][j] /= sum[i];
        if (x == 0 && y + SIDE * i < tile.n)
            lse[y + SIDE * i] = top[i] + logf(sum[i]);
    }
    rows_store<D, R>((float *)a.o + row * a.o_ld + head * d, a.o_ld, o, tile.n, d, 1.0f);
}

/* p = e^(scale s - lse) where the query sees the key, else 0;  ds = p (dp - delta). */
typedef struct gradient {
    float p, ds;
} gradient;

__device__ __forceinline__ gradient score_gradient(const fb_attention &a, float s, float dp, float lse, float delta,
                                                   uint32_t query, uint32_t key, uint32_t len)
{
    float p = query < len && att_sees(a.window, query, key) ? expf(s * a.scale - lse) : 0.0f;
    return { p, p * (dp - delta) };
}

template <int D, int R> constexpr uint32_t keys_size()
{
    return (uint32_t)sizeof(float) * (4 * tiles<D, R>::size + 2 * tiles<D, R>::score_size);
}

template <int D, int R> __global__ __launch_bounds__(THREADS) void keys_kernel(backward_args f)
{
    constexpr int n = R / SIDE;
    extern __shared__ __align__(128) unsigned char shared[];
    const fb_attention &a = f.b.fwd;
    uint32_t kv_head = blockIdx.x % a.n_kv_head, group = a.n_head / a.n_kv_head;
    att_tile tile = att_find_tile(a, blockIdx.x / a.n_kv_head, R);
    if (tile.n == 0)
        return;

    float *k = (float *)shared, *v = k + tiles<D, R>::size, *q = v + tiles<D, R>::size, *d_o = q + tiles<D, R>::size;
    float *p = d_o + tiles<D, R>::size, *ds = p + tiles<D, R>::score_size;
    uint32_t d = a.head_dim, x = threadIdx.x % SIDE, y = threadIdx.x / SIDE, len = tile.span.q_len;
    uint64_t start = tile.span.q_start, row = start + tile.first;
    uint32_t end = att_query_end(a.window, tile.first + tile.n - 1, len);
    float dk[n][D / SIDE] = {}, dv[n][D / SIDE] = {};

    tile_load<D, R>(k, (const float *)a.k + row * a.k_ld + kv_head * d, a.k_ld, tile.n, d);
    tile_load<D, R>(v, (const float *)a.v + row * a.v_ld + kv_head * d, a.v_ld, tile.n, d);
    for (uint32_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        const float *lse = a.lse + (uint64_t)head * a.t + start, *delta = f.delta + (uint64_t)head * a.t + start;
        for (uint32_t query = tile.first; query < end; query += R) {
            uint64_t at = start + query;
            __syncthreads();
            tile_load<D, R>(q, (const float *)a.q + at * a.q_ld + head * d, a.q_ld, len - query, d);
            tile_load<D, R>(d_o, (const float *)f.b.d_o + at * f.b.do_ld + head * d, f.b.do_ld, len - query, d);
            __syncthreads();
            float s[n][n], dp[n][n]; /* [keys][queries] */
            product_scores<D, R>(s, k, q);
            product_scores<D, R>(dp, v, d_o);
#pragma unroll
            for (int j = 0; j < n; j++) {
                uint32_t column = query + x + SIDE * j, known = min(column, len - 1);
#pragma unroll
                for (int i = 0; i < n; i++) {
                    gradient g = score_gradient(a, s[i][j], dp[i][j], lse[known], delta[known], column,
                                                tile.first + y + SIDE * i, len);
                    uint32_t place = (y + SIDE * i) * tiles<D, R>::score_ld + x + SIDE * j;
                    p[place] = g.p;
                    ds[place] = g.ds;
                }
            }
            __syncwarp();
            product_values<D, R>(dv, p, d_o);
            product_values<D, R>(dk, ds, q);
        }
    }
    rows_store<D, R>((float *)f.b.dk + row * f.b.dk_ld + kv_head * d, f.b.dk_ld, dk, tile.n, d, a.scale);
    rows_store<D, R>((float *)f.b.dv + row * f.b.dv_ld + kv_head * d, f.b.dv_ld, dv, tile.n, d, 1.0f);
}

template <int D, int R> constexpr uint32_t queries_size()
{
    return (uint32_t)sizeof(float) * (4 * tiles<D, R>::size + tiles<D, R>::score_size);
}

template <int D, int R> __global__ __launch_bounds__(THREADS) void queries_kernel(backward_args f)
{
    constexpr int n = R / SIDE;
    extern __shared__ __align__(128) unsigned char shared[];
    const fb_attention &a = f.b.fwd;
    uint32_t head = blockIdx.x % a.n_head, kv_head = head / (a.n_head / a.n_kv_head);
    att_tile tile = att_find_tile(a, f.n_tile - 1 - blockIdx.x / a.n_head, R);
    if (tile.n == 0)
        return;

    float *q = (float *)shared, *d_o = q + tiles<D, R>::size, *k = d_o + tiles<D, R>::size, *v = k + tiles<D, R>::size;
    float *ds = v + tiles<D, R>::size;
    uint32_t d = a.head_dim, x = threadIdx.x % SIDE, y = threadIdx.x / SIDE, len = tile.span.q_len;
    uint64_t start = tile.span.q_start, row = start + tile.first;
    const float *lse = a.lse + (uint64_t)head * a.t + start, *delta = f.delta + (uint64_t)head * a.t + start;
    float dq[n][D / SIDE] = {};

    tile_load<D, R>(q, (const float *)a.q + row * a.q_ld + head * d, a.q_ld, tile.n, d);
    tile_load<D, R>(d_o, (const float *)f.b.d_o + row * f.b.do_ld + head * d, f.b.do_ld, tile.n, d);
    uint32_t end = tile.first + tile.n;
    for (uint32_t key = att_first_key(a.window, tile.first) / R * R; key < end; key += R) {
        uint64_t at = start + key;
        __syncthreads();
        tile_load<D, R>(k, (const float *)a.k + at * a.k_ld + kv_head * d, a.k_ld, end - key, d);
        tile_load<D, R>(v, (const float *)a.v + at * a.v_ld + kv_head * d, a.v_ld, end - key, d);
        __syncthreads();
        float s[n][n], dp[n][n]; /* [queries][keys] */
        product_scores<D, R>(s, q, k);
        product_scores<D, R>(dp, d_o, v);
#pragma unroll
        for (int i = 0; i < n; i++) {
            uint32_t query = tile.first + y + SIDE * i, known = min(query, len - 1);
#pragma unroll
            for (int j = 0; j < n; j++)
                ds[(y + SIDE * i) * tiles<D, R>::score_ld + x + SIDE * j] =
                    score_gradient(a, s[i][j], dp[i][j], lse[known], delta[known], query, key + x + SIDE * j, len).ds;
        }
        __syncwarp();
        product_values<D, R>(dq, ds, k);
    }
    rows_store<D, R>((float *)f.b.dq + row * f.b.dq_ld + head * d, f.b.dq_ld, dq, tile.n, d, a.scale);
}

template <int D, int R> cudaError_t forward_with(cudaStream_t stream, const fb_attention *a)
{
    uint64_t n_tile = att_tile_count(a->t, a->n_span, R);
    return att_start(forward_kernel<D, R>, n_tile * a->n_head, THREADS, forward_size<D, R>(), stream,
                     forward_args{ *a, (uint32_t)n_tile });
}

template <int D, int R>
cudaError_t backward_with(cudaStream_t stream, const fb_attention_bwd *b, const float *delta)
{
    uint64_t n_tile = att_tile_count(b->fwd.t, b->fwd.n_span, R);
    backward_args f = { *b, delta, (uint32_t)n_tile };
    cudaError_t e = att_start(keys_kernel<D, R>, n_tile * b->fwd.n_kv_head, THREADS, keys_size<D, R>(), stream, f);
    if (e != cudaSuccess)
        return e;
    return att_start(queries_kernel<D, R>, n_tile * b->fwd.n_head, THREADS, queries_size<D, R>(), stream, f);
}

/* ---- delta: the same for both dtypes ---- */

typedef struct delta_args {
    fb_attention_bwd b;
    float *delta;
} delta_args;

__device__ __forceinline__ float widen(float v)
{
    return v;
}

__device__ __forceinline__ float widen(__nv_bfloat16 v)
{
    return __bfloat162float(v);
}

/* A warp sums one head of one token. */
template <typename T> __global__ __launch_bounds__(THREADS) void delta_kernel(delta_args f)
{
    const fb_attention &a = f.b.fwd;
    uint64_t index = (uint64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (index >= (uint64_t)a.t * a.n_head)
        return;
    uint64_t row = index / a.n_head;
    uint32_t head = (uint32_t)(index % a.n_head), d = a.head_dim;
    const T *o = (const T *)a.o + row * a.o_ld + head * d, *d_o = (const T *)f.b.d_o + row * f.b.do_ld + head * d;
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x % 32; i < d; i += 32)
        sum = fmaf(widen(d_o[i]), widen(o[i]), sum);
#pragma unroll
    for (int i = 16; i > 0; i /= 2)
        sum += __shfl_xor_sync(~0u, sum, i);
    if (threadIdx.x % 32 == 0)
        f.delta[(uint64_t)head * a.t + row] = sum;
}

} // namespace

cudaError_t fb_cuda_attention_delta(cudaStream_t stream, const fb_attention_bwd *b, float *delta)
{
    uint64_t n_warp = (uint64_t)b->fwd.t * b->fwd.n_head, n_block = (n_warp + THREADS / 32 - 1) / (THREADS / 32);
    return att_start(b->fwd.act == FB_F32 ? delta_kernel<float> : delta_kernel<__nv_bfloat16>, n_block, THREADS, 0,
                     stream, delta_args{ *b, delta });
}

cudaError_t fb_cuda_attention_f32(cudaStream_t stream, const fb_attention *a)
{
    uint32_t d = a->head_dim;
    return d <= 64    ? forward_with<64, 32>(stream, a)
           : d <= 128 ? forward_with<128, 32>(stream, a)
                      : forward_with<256, 16>(stream, a);
}

cudaError_t fb_cuda_attention_f32_bwd(cudaStream_t stream, const fb_attention_bwd *b, const float *delta)
{
    uint32_t d = b->fwd.head_dim;
    return d <= 64    ? backward_with<64, 32>(stream, b, delta)
           : d <= 128 ? backward_with<128, 32>(stream, b, delta)
                      : backward_with<256, 16>(stream, b, delta);
}
