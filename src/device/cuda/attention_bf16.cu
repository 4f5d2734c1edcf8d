/* attention_bf16.cu - own attention for bfloat16, on tensor cores: forward, and a backward in two passes.
 * Sources: Milakov & Gimelshein 2018, alg. 3 (streaming softmax); Dao 2023 (FlashAttention-2), alg. 1 and 2.
 *
 *     forward:   a block owns a tile of queries of one head and takes the keys from first to last
 *     backward:  p = e^(s - lse), ds = p (dp - delta), dp = do v^T, delta = row sum of do * o
 *       pass 1:  a block owns a tile of keys of one key-value head: dv = p^T do, dk = scale ds^T q, over the query
 *                heads of the group and their queries, in this order
 *       pass 2:  a block owns a tile of queries of one head: dq = scale ds k, over the keys
 *
 * Scores are computed three times instead of two (7 products a tile instead of 5), but nothing is summed by two blocks:
 * no atomics, no partial sums, and the order of every sum follows from the document alone.
 *
 * Each warp owns 16 (forward, small heads: 32) rows of its block's tile and all columns of the streamed one, so rows'
 * maxima and sums stay within four lanes.  Pass 1 computes the scores transposed, s^T = k q^T: then p^T and ds^T too come
 * out as left operands of the products that follow.  p and ds are rounded to bfloat16 for those, sums are float32.
 *
 * Tiles lie in shared memory as rows of D elements (head_dim padded with zeros to a multiple of 64).  Chunk c of 16
 * bytes of row r is stored at c xor (r mod 8): the 8 rows that ldmatrix reads at once then lie in different banks.
 * No configuration takes more than the 99 KiB that every device since 8.0 grants a block. */
#include "device/cuda/attention.cuh"
#include "device/cuda/attention_own.h"
#include "device/cuda/mma.cuh"

typedef __nv_bfloat16 bf16;

namespace {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr int WARP = 32, BWD_ROWS = 64; /* rows that a block of the backward owns: 4 warps of 16 */

typedef struct forward_args {
    fb_attention a;
    uint32_t n_tile;
    bool     wide; /* every row of every operand can be copied by 16 bytes */
} forward_args;

typedef struct backward_args {
    fb_attention_bwd b;
    const float *delta; /* [H, T] */
    uint32_t n_tile;
    bool     wide;
} backward_args;

template <int D> __host__ __device__ constexpr uint32_t tile_size(int rows)
{
    return (uint32_t)rows * D * sizeof(bf16);
}

template <int D> __device__ __forceinline__ uint32_t chunk_at(uint32_t tile, int row, int chunk)
{
    return tile + (uint32_t)(row * D * (int)sizeof(bf16) + ((chunk ^ (row & 7)) << 4));
}

/* Starts to copy n rows of a head; what is beyond them, or beyond head_dim, becomes 0.  Eight lanes copy 128 bytes of a
 * row; a lane's rows are a multiple of 8 apart, so its place in the swizzle stays the same. */
template <int D, int rows, int threads>
__device__ __forceinline__ void tile_load(uint32_t tile, const bf16 *from, uint64_t ld, uint32_t n, uint32_t head_dim,
                                          bool wide)
{
    if (wide) {
        constexpr int step = threads / 8;
        static_assert(rows % step == 0 && step % 8 == 0, "every thread copies as many chunks");
        uint32_t row = threadIdx.x / 8, c = threadIdx.x % 8, to = chunk_at<D>(tile, (int)row, (int)c);
        from += row * ld + c * 8;
#pragma unroll
        for (int i = 0; i < rows / step; i++, from += step * ld)
#pragma unroll
            for (int j = 0; j < D / 64; j++)
                copy_async<16>(to + tile_size<D>(i * step) + j * 128, from + j * 64,
                               row + i * step < n && c * 8 + j * 64 < head_dim);
    } else {
        constexpr int pairs = D / 2;
        for (int at = (int)threadIdx.x; at < rows * pairs; at += threads) {
            int row = at / pairs, c = at % pairs;
            copy_async<4>(chunk_at<D>(tile, row, c / 4) + c % 4 * 4, from + row * ld + c * 2,
                          (uint32_t)row < n && (uint32_t)c * 2 < head_dim);
        }
    }
}

template <int threads>
__device__ __forceinline__ void row_load(float *to, const float *from, uint32_t n, uint32_t rows)
{
    for (uint32_t i = threadIdx.x; i < rows; i += threads)
        copy_async<4>(shared_address(to + i), from + i, i < n);
}

/* c = rows [a_row, a_row + 16 M) of tile a times the first N rows of tile b, transposed. */
template <int D, int M, int N>
__device__ __forceinline__ void product_scores(float (&c)[M][N / 8][4], uint32_t a, int a_row, uint32_t b)
{
    int lane = (int)threadIdx.x % WARP;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int j = 0; j < N / 8; j++)
            c[m][j][0] = c[m][j][1] = c[m][j][2] = c[m][j][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t fa[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
            ldmatrix_x4(fa[m], chunk_at<D>(a, a_row + 16 * m + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int j = 0; j < N / 16; j++) {
            uint32_t fb[4];
            ldmatrix_x4(fb, chunk_at<D>(b, 16 * j + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_16816(c[m][2 * j], fa[m], fb[0], fb[1]);
                mma_16816(c[m][2 * j + 1], fa[m], fb[2], fb[3]);
            }
        }
    }
}

/* c += a times columns [8 first, 8 first + N) of the first K rows of tile b; a is rounded to bfloat16. */
template <int D, int M, int K, int N>
__device__ __forceinline__ void product_values(float (&c)[M][N / 8][4], const float (&a)[M][K / 8][4], uint32_t b,
                                               int first)
{
    int lane = (int)threadIdx.x % WARP;
#pragma unroll
    for (int k = 0; k < K / 16; k++) {
        uint32_t fa[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                fa[m][i] = pack_bf16(a[m][2 * k + i / 2][i % 2 * 2], a[m][2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int j = 0; j < N / 16; j++) {
            uint32_t fb[4];
            ldmatrix_x4_trans(fb, chunk_at<D>(b, 16 * k + lane % 16, first + 2 * j + lane / 16));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_16816(c[m][2 * j], fa[m], fb[0], fb[1]);
                mma_16816(c[m][2 * j + 1], fa[m], fb[2], fb[3]);
            }
        }
    }
}

/* Stores two neighbouring elements of a row. */
__device__ __forceinline__ void pair_store(bf16 *at, float first, float second)
{
    *reinterpret_cast<__nv_bfloat162 *>(at) = __floats2bfloat162_rn(first, second);
}

/* Rows `row` and row + 8 of a warp's fragments, columns from 8 first; only rows under n and columns under head_dim. */
template <int N>
__device__ __forceinline__ void rows_store(bf16 *to, uint64_t ld, const float (&c)[N / 8][4], uint32_t row, int first,
                                           uint32_t n, uint32_t head_dim, float low, float high)
{
    uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        uint32_t column = 8 * (first + j) + 2 * t;
        if (column >= head_dim)
            continue;
        if (row < n)
            pair_store(to + row * ld + column, c[j][0] * low, c[j][1] * low);
        if (row + 8 < n)
            pair_store(to + (row + 8) * ld + column, c[j][2] * high, c[j][3] * high);
    }
}

/* ---- forward ---- */

/* One step of the streaming softmax on a warp's scores of 16 rows: s becomes 2^(factor s - max), the sums and the output
 * so far shrink to the new maximum.  sum is the lane's part of the row's sum. */
template <int D, int N>
__device__ __forceinline__ void softmax_step(float (&s)[N / 8][4], float (&o)[D / 8][4], float (&top)[2],
                                             float (&sum)[2], float factor)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float high = top[r];
#pragma unroll
        for (int j = 0; j < N / 8; j++)
            high = fmaxf(high, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
        /* A row that has seen no key keeps -inf, and shifts by 0: -inf - -inf is not a number. */
        float shift = high == -INFINITY ? 0.0f : high * factor;
        float shrink = exp2_fast(top[r] * factor - shift), part = 0.0f;
        top[r] = high;
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++) {
                s[j][i] = exp2_fast(fmaf(s[j][i], factor, -shift));
                part += s[j][i];
            }
        sum[r] = sum[r] * shrink + part;
#pragma unroll
        for (int j = 0; j < D / 8; j++) {
            o[j][2 * r] *= shrink;
            o[j][2 * r + 1] *= shrink;
        }
    }
}

/* Hides the scores outside the mask: rows are queries from `position`, columns keys from `key`. */
template <int N>
__device__ __forceinline__ void scores_mask(float (&s)[N / 8][4], uint32_t window, uint32_t position, uint32_t key)
{
    uint32_t g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (!att_sees(window, position + g + (uint32_t)i / 2 * 8, key + 8 * (uint32_t)j + 2 * t + (uint32_t)i % 2))
                s[j][i] = -INFINITY;
}

template <int D, int M, int N>
__global__ __launch_bounds__(128, 2) void forward_kernel(forward_args f)
{
    constexpr int rows = 64 * M, threads = 128;
    extern __shared__ __align__(128) unsigned char shared[];
    const fb_attention &a = f.a;
    uint32_t head = blockIdx.x % a.n_head, kv_head = head / (a.n_head / a.n_kv_head);
    att_tile tile = att_find_tile(a, f.n_tile - 1 - blockIdx.x / a.n_head, rows); /* late tiles have the most work */
    if (tile.n == 0)
        return;

    uint32_t d = a.head_dim, lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP * 16 * M;
    uint32_t q_tile = shared_address(shared), k_tile = q_tile + tile_size<D>(rows), v_tile = k_tile + tile_size<D>(N);
    uint64_t row = (uint64_t)tile.span.q_start + tile.first;
    const bf16 *q = (const bf16 *)a.q + row * a.q_ld + head * d;
    const bf16 *k = (const bf16 *)a.k + tile.span.k_start * a.k_ld + kv_head * d;
    const bf16 *v = (const bf16 *)a.v + tile.span.k_start * a.v_ld + kv_head * d;
    uint32_t position = tile.span.k_len - tile.span.q_len + tile.first; /* of the tile's first query */
    uint32_t end = position + tile.n, begin = att_first_key(a.window, position) / N * N;
    uint32_t low = position + warp_row, high = low + 16 * M - 1; /* the warp's queries */
    float factor = a.scale * LOG2_E;

    float o[M][D / 8][4], top[M][2], sum[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) {
        top[m][0] = top[m][1] = -INFINITY;
        sum[m][0] = sum[m][1] = 0.0f;
#pragma unroll
        for (int j = 0; j < D / 8; j++)
            o[m][j][0] = o[m][j][1] = o[m][j][2] = o[m][j][3] = 0.0f;
    }

    tile_load<D, rows, threads>(q_tile, q, a.q_ld, tile.n, d, f.wide);
    tile_load<D, N, threads>(k_tile, k + begin * a.k_ld, a.k_ld, end - begin, d, f.wide);
    copy_commit();
    for (uint32_t key = begin; key < end; key += N) {
        copy_wait<0>();
        __syncthreads(); /* the keys have landed, and nobody reads the values before them any more */
        tile_load<D, N, threads>(v_tile, v + key * a.v_ld, a.v_ld, end - key, d, f.wide);
        copy_commit();

        bool seen = key <= high; /* by some query of the warp */
        float s[M][N / 8][4];
        if (seen) {
            product_scores<D, M, N>(s, q_tile, (int)warp_row, k_tile);
            bool whole = key + N - 1 <= low && (a.window == 0 || high - key < a.window);
#pragma unroll
            for (int m = 0; m < M; m++) {
                if (!whole)
                    scores_mask<N>(s[m], a.window, low + 16 * m, key);
                softmax_step<D, N>(s[m], o[m], top[m], sum[m], factor);
            }
        }

        copy_wait<0>();
        __syncthreads(); /* the values have landed, and nobody reads these keys any more */
        if (key + N < end)
            tile_load<D, N, threads>(k_tile, k + (key + N) * a.k_ld, a.k_ld, end - key - N, d, f.wide);
        copy_commit();
        if (seen)
            product_values<D, M, N, D>(o, s, v_tile, 0);
    }

    bf16 *to = (bf16 *)a.o + row * a.o_ld + head * d;
    float *lse = a.lse + (uint64_t)head * a.t + row;
#pragma unroll
    for (int m = 0; m < M; m++) {
        uint32_t r = warp_row + 16 * m + lane / 4;
        float inverse[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            sum[m][i] += __shfl_xor_sync(~0u, sum[m][i], 1);
            sum[m][i] += __shfl_xor_sync(~0u, sum[m][i], 2);
            inverse[i] = 1.0f / sum[m][i];
            if (lane % 4 == 0 && r + 8 * i < tile.n)
                lse[r + 8 * i] = top[m][i] * a.scale + logf(sum[m][i]);
        }
        rows_store<D>(to, a.o_ld, o[m], r, 0, tile.n, d, inverse[0], inverse[1]);
    }
}

/* ---- backward ---- */

/* s becomes p, then dp becomes ds; all are scores or their gradients, [keys][queries]. */
template <int N>
__device__ __forceinline__ void keys_probabilities(float (&s)[N / 8][4], const float *lse, float factor)
{
    uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            s[j][i] = exp2_fast(fmaf(s[j][i], factor, -lse[8 * j + 2 * t + i % 2] * LOG2_E));
}

template <int N>
__device__ __forceinline__ void keys_gradient(float (&dp)[N / 8][4], const float (&p)[N / 8][4], const float *delta)
{
    uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            dp[j][i] = p[j][i] * (dp[j][i] - delta[8 * j + 2 * t + i % 2]);
}

/* Shared memory of pass 1: the keys and values, then `stages` times queries, do, lse, delta of N queries. */
template <int D, int N> __host__ __device__ constexpr uint32_t query_stage_size()
{
    return 2 * tile_size<D>(N) + 2 * N * (uint32_t)sizeof(float);
}

/* Pass 1.  split: so many warps share 16 keys, each with its part of the columns of dk and dv, which would not all fit
 * in one warp's registers. */
template <int D, int N, int split, int stages>
__global__ __launch_bounds__(128 * split) void keys_kernel(backward_args f)
{
    constexpr int threads = 128 * split, columns = D / split;
    constexpr uint32_t stage_size = query_stage_size<D, N>();
    extern __shared__ __align__(128) unsigned char shared[];
    const fb_attention &a = f.b.fwd;
    uint32_t kv_head = blockIdx.x % a.n_kv_head, group = a.n_head / a.n_kv_head;
    att_tile tile = att_find_tile(a, blockIdx.x / a.n_kv_head, BWD_ROWS);
    if (tile.n == 0)
        return;

    uint32_t d = a.head_dim, lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP % 4 * 16;
    int first = (int)threadIdx.x / 128 * (columns / 8);
    uint64_t start = tile.span.q_start;
    uint32_t len = tile.span.q_len, key = tile.first + warp_row; /* the warp's first key */
    uint32_t begin = tile.first / N * N, end = att_query_end(a.window, tile.first + tile.n - 1, len);
    uint32_t n_step = (end - begin + N - 1) / N, n = n_step * group;
    float factor = a.scale * LOG2_E;

    uint32_t k_tile = shared_address(shared), v_tile = k_tile + tile_size<D>(BWD_ROWS);
    unsigned char *ring = shared + 2 * tile_size<D>(BWD_ROWS);

    auto load = [&](uint32_t i) {
        unsigned char *stage = ring + i % stages * stage_size;
        uint32_t head = kv_head * group + i / n_step, query = begin + i % n_step * N, tile_at = shared_address(stage);
        uint64_t at = start + query;
        tile_load<D, N, threads>(tile_at, (const bf16 *)a.q + at * a.q_ld + head * d, a.q_ld, len - query, d, f.wide);
        tile_load<D, N, threads>(tile_at + tile_size<D>(N), (const bf16 *)f.b.d_o + at * f.b.do_ld + head * d,
                                 f.b.do_ld, len - query, d, f.wide);
        float *row = (float *)(stage + 2 * tile_size<D>(N));
        row_load<threads>(row, a.lse + (uint64_t)head * a.t + at, len - query, N);
        row_load<threads>(row + N, f.delta + (uint64_t)head * a.t + at, len - query, N);
    };

    uint64_t row = start + tile.first;
    tile_load<D, BWD_ROWS, threads>(k_tile, (const bf16 *)a.k + row * a.k_ld + kv_head * d, a.k_ld, tile.n, d, f.wide);
    tile_load<D, BWD_ROWS, threads>(v_tile, (const bf16 *)a.v + row * a.v_ld + kv_head * d, a.v_ld, tile.n, d, f.wide);
    load(0);
    copy_commit();

    float dk[1][columns / 8][4] = {}, dv[1][columns / 8][4] = {};
    for (uint32_t i = 0; i < n; i++) {
        if (stages > 1 && i + 1 < n)
            load(i + 1);
        copy_commit(); /* an empty group too, so that all but the newest is always what this step needs */
        copy_wait<(stages > 1 ? 1 : 0)>();
        __syncthreads();

        const unsigned char *stage = ring + i % stages * stage_size;
        uint32_t q_tile = shared_address(stage), do_tile = q_tile + tile_size<D>(N), query = begin + i % n_step * N;
        const float *lse = (const float *)(stage + 2 * tile_size<D>(N)), *delta = lse + N;
        if (query + N > key) { /* some query sees some key of the warp */
            float s[1][N / 8][4], dp[1][N / 8][4];
            product_scores<D, 1, N>(s, k_tile, (int)warp_row, q_tile);
            keys_probabilities<N>(s[0], lse, factor);
            bool whole = query >= key + 15 && query + N <= end && (a.window == 0 || query + N - 1 - key < a.window);
            if (!whole) {
                uint32_t g = lane / 4, t = lane % 4;
#pragma unroll
                for (int j = 0; j < N / 8; j++)
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        uint32_t position = query + 8 * (uint32_t)j + 2 * t + (uint32_t)c % 2;
                        if (position >= len || !att_sees(a.window, position, key + g + (uint32_t)c / 2 * 8))
                            s[0][j][c] = 0.0f;
                    }
            }
            product_values<D, 1, N, columns>(dv, s, do_tile, first);
            product_scores<D, 1, N>(dp, v_tile, (int)warp_row, do_tile);
            keys_gradient<N>(dp[0], s[0], delta);
            product_values<D, 1, N, columns>(dk, dp, q_tile, first);
        }
        __syncthreads(); /* nobody reads this stage any more */
        if (stages == 1 && i + 1 < n)
            load(i + 1);
    }

    uint32_t r = warp_row + lane / 4;
    rows_store<columns>((bf16 *)f.b.dk + row * f.b.dk_ld + kv_head * d, f.b.dk_ld, dk[0], r, first, tile.n, d, a.scale,
                        a.scale);
    rows_store<columns>((bf16 *)f.b.dv + row * f.b.dv_ld + kv_head * d, f.b.dv_ld, dv[0], r, first, tile.n, d, 1.0f, 1.0f);
}

/* Pass 2. */
template <int D, int N, int stages>
__global__ __launch_bounds__(128, 2) void queries_kernel(backward_args f)
{
    constexpr int threads = 128;
    constexpr uint32_t stage_size = 2 * tile_size<D>(N);
    extern __shared__ __align__(128) unsigned char shared[];
    const fb_attention &a = f.b.fwd;
    uint32_t head = blockIdx.x % a.n_head, kv_head = head / (a.n_head / a.n_kv_head);
    att_tile tile = att_find_tile(a, f.n_tile - 1 - blockIdx.x / a.n_head, BWD_ROWS);
    if (tile.n == 0)
        return;

    uint32_t d = a.head_dim, lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP * 16;
    uint32_t low = tile.first + warp_row, high = low + 15; /* the warp's queries */
    uint32_t begin = att_first_key(a.window, tile.first) / N * N, end = tile.first + tile.n;
    uint32_t n = (end - begin + N - 1) / N;
    float factor = a.scale * LOG2_E;

    uint32_t q_tile = shared_address(shared), do_tile = q_tile + tile_size<D>(BWD_ROWS);
    uint32_t ring = do_tile + tile_size<D>(BWD_ROWS);
    uint64_t row = (uint64_t)tile.span.q_start + tile.first;

    auto load = [&](uint32_t i) {
        uint32_t key = begin + i * N, stage = ring + i % stages * stage_size;
        uint64_t at = (uint64_t)tile.span.k_start + key;
        tile_load<D, N, threads>(stage, (const bf16 *)a.k + at * a.k_ld + kv_head * d, a.k_ld, end - key, d, f.wide);
        tile_load<D, N, threads>(stage + tile_size<D>(N), (const bf16 *)a.v + at * a.v_ld + kv_head * d, a.v_ld, end - key,
                                 d, f.wide);
    };

    tile_load<D, BWD_ROWS, threads>(q_tile, (const bf16 *)a.q + row * a.q_ld + head * d, a.q_ld, tile.n, d, f.wide);
    tile_load<D, BWD_ROWS, threads>(do_tile, (const bf16 *)f.b.d_o + row * f.b.do_ld + head * d, f.b.do_ld, tile.n, d,
                                    f.wide);
    load(0);
    copy_commit();

    float shift[2], delta[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t i = warp_row + lane / 4 + 8 * (uint32_t)r;
        uint64_t at = (uint64_t)head * a.t + row + i;
        shift[r] = i < tile.n ? a.lse[at] * LOG2_E : 0.0f;
        delta[r] = i < tile.n ? f.delta[at] : 0.0f;
    }
    float dq[1][D / 8][4] = {};
    for (uint32_t i = 0; i < n; i++) {
        if (stages > 1 && i + 1 < n)
            load(i + 1);
        copy_commit();
        copy_wait<(stages > 1 ? 1 : 0)>();
        __syncthreads();

        uint32_t key = begin + i * N, k_tile = ring + i % stages * stage_size, v_tile = k_tile + tile_size<D>(N);
        if (key <= high) {
            float s[1][N / 8][4], dp[1][N / 8][4];
            product_scores<D, 1, N>(s, q_tile, (int)warp_row, k_tile);
            product_scores<D, 1, N>(dp, do_tile, (int)warp_row, v_tile);
            if (!(key + N - 1 <= low && (a.window == 0 || high - key < a.window)))
                scores_mask<N>(s[0], a.window, low, key);
#pragma unroll
            for (int j = 0; j < N / 8; j++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    dp[0][j][c] = exp2_fast(fmaf(s[0][j][c], factor, -shift[c / 2])) * (dp[0][j][c] - delta[c / 2]);
            product_values<D, 1, N, D>(dq, dp, k_tile, 0);
        }
        __syncthreads();
        if (stages == 1 && i + 1 < n)
            load(i + 1);
    }
    rows_store<D>((bf16 *)f.b.dq + row * f.b.dq_ld + head * d, f.b.dq_ld, dq[0], warp_row + lane / 4, 0, tile.n, d, a.scale,
                  a.scale);
}

bool is_wide(const void *at, uint64_t ld)
{
    return (uintptr_t)at % 16 == 0 && ld % 8 == 0;
}

bool is_wide(const fb_attention *a)
{
    return a->head_dim % 8 == 0 && is_wide(a->q, a->q_ld) && is_wide(a->k, a->k_ld) && is_wide(a->v, a->v_ld);
}

template <int D, int M, int N> cudaError_t forward_with(cudaStream_t stream, const fb_attention *a)
{
    constexpr int rows = 64 * M;
    constexpr uint32_t shared = tile_size<D>(rows) + 2 * tile_size<D>(N);
    uint64_t n_tile = att_tile_count(a->t, a->n_span, rows);
    return att_start(forward_kernel<D, M, N>, n_tile * a->n_head, 128, shared, stream,
                     forward_args{ *a, (uint32_t)n_tile, is_wide(a) });
}

template <int D, int N, int split, int stages> cudaError_t backward_with(cudaStream_t stream, const backward_args &f)
{
    constexpr uint32_t own = 2 * tile_size<D>(BWD_ROWS);
    uint64_t n_tile = f.n_tile;
    cudaError_t e = att_start(keys_kernel<D, N, split, stages>, n_tile * f.b.fwd.n_kv_head, 128 * split,
                                   own + stages * query_stage_size<D, N>(), stream, f);
    if (e != cudaSuccess)
        return e;
    return att_start(queries_kernel<D, N, stages>, n_tile * f.b.fwd.n_head, 128, own + stages * 2 * tile_size<D>(N),
                     stream, f);
}

} // namespace

cudaError_t fb_cuda_attention_bf16(cudaStream_t stream, const fb_attention *a)
{
    uint32_t d = a->head_dim;
    return d <= 64    ? forward_with<64, 2, 64>(stream, a)
           : d <= 128 ? forward_with<128, 2, 64>(stream, a)
           : d <= 192 ? forward_with<192, 1, 64>(stream, a)
                      : forward_with<256, 1, 64>(stream, a);
}

cudaError_t fb_cuda_attention_bf16_bwd(cudaStream_t stream, const fb_attention_bwd *b, const float *delta)
{
    uint32_t d = b->fwd.head_dim;
    backward_args f = { *b, delta, (uint32_t)att_tile_count(b->fwd.t, b->fwd.n_span, BWD_ROWS),
                        is_wide(&b->fwd) && is_wide(b->d_o, b->do_ld) };
    return d <= 64    ? backward_with<64, 64, 1, 2>(stream, f)
           : d <= 128 ? backward_with<128, 64, 1, 2>(stream, f)
           : d <= 192 ? backward_with<192, 32, 2, 2>(stream, f)
                      : backward_with<256, 32, 2, 1>(stream, f);
}
