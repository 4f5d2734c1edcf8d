/* norm.cu - RMS norm over rows and its gradients.
 *
 * A row belongs to one thread block, which holds it in registers between the sum and the result, so that memory is
 * read once.  Rows that 16-byte pieces do not cover, or that are longer than a block holds, are walked element by
 * element and read again: no model of note has any. */
#include <assert.h>

#include "device/cuda/vec.cuh"

enum {
    NORM_HELD = 4,            /* pieces a thread, forward */
    NORM_THREADS_MAX = 1024,
    BWD_THREADS = 256,        /* aimed at; with 4 pieces a thread up to BWD_THREADS_MAX */
    BWD_THREADS_MAX = 512,
    WALK_THREADS = 256,
    DW_PARTIALS = 528,        /* tiles of rows, each a block: four for each of 132 multiprocessors */
    DW_ROWS_MIN = 4,          /* rows worth a tile */
};

__device__ inline float norm_rstd(float square_sum, uint32_t c, float eps)
{
    return 1.0f / sqrtf(square_sum / (float)c + eps);
}

template <typename T, int HELD>
__global__ void __launch_bounds__(NORM_THREADS_MAX)
norm_row_held(uint32_t c, float eps, const T *x, const T *w, T *y, float *rstd_out)
{
    constexpr int N = fb_wide_piece<T>;
    __shared__ float shared[32];
    uint64_t row = blockIdx.x;
    x += row * c;
    y += row * c;
    fb_piece<T, N> held[HELD];
    float sum = 0;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        uint32_t i = (threadIdx.x + k * blockDim.x) * N;
        if (i < c)
            held[k] = fb_load<N>(x + i);
    }
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        uint32_t i = (threadIdx.x + k * blockDim.x) * N;
        if (i < c)
#pragma unroll
            for (int e = 0; e < N; e++)
                sum += held[k][e] * held[k][e];
    }
    float rstd = norm_rstd(fb_block_sum(sum, shared), c, eps);
    if (threadIdx.x == 0)
        rstd_out[row] = rstd;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        fb_keep_packed(held[k]);
        uint32_t i = (threadIdx.x + k * blockDim.x) * N;
        if (i >= c)
            continue;
        fb_piece<T, N> wk = fb_load<N>(w + i);
        float out[N];
#pragma unroll
        for (int e = 0; e < N; e++)
            out[e] = fb_round_to<T>(held[k][e] * rstd) * wk[e];
        fb_store(y + i, fb_narrow<T>(out));
    }
}

template <typename T>
__global__ void __launch_bounds__(WALK_THREADS)
norm_row_walked(uint32_t c, float eps, const T *x, const T *w, T *y, float *rstd_out)
{
    __shared__ float shared[32];
    uint64_t row = blockIdx.x;
    x += row * c;
    y += row * c;
    float sum = 0;
    for (uint32_t i = threadIdx.x; i < c; i += blockDim.x)
        sum += fb_widen(x[i]) * fb_widen(x[i]);
    float rstd = norm_rstd(fb_block_sum(sum, shared), c, eps);
    if (threadIdx.x == 0)
        rstd_out[row] = rstd;
    for (uint32_t i = threadIdx.x; i < c; i += blockDim.x)
        fb_store(y + i, fb_narrow<T, 1>({ fb_round_to<T>(fb_widen(x[i]) * rstd) * fb_widen(w[i]) }));
}

template <typename T>
static void norm_launch(cudaStream_t s, const fb_rms_norm *a)
{
    uint64_t n_piece = a->c / fb_wide_piece<T>;
    const T *x = (const T *)a->x, *w = (const T *)a->w;
    T *y = (T *)a->y;
    if (!fb_cuda_whole_pieces<T>(a->c) || n_piece > NORM_HELD * NORM_THREADS_MAX)
        norm_row_walked<T><<<a->t, WALK_THREADS, 0, s>>>(a->c, a->eps, x, w, y, a->rstd);
    else
        norm_row_held<T, NORM_HELD><<<a->t, fb_cuda_threads(n_piece, NORM_HELD, NORM_THREADS_MAX), 0, s>>>(a->c, a->eps, x, w,
                                                                                                           y, a->rstd);
}

fb_status fb_cuda_rms_norm(fb_device *d, const fb_rms_norm *a, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    if (a->t == 0)
        return FB_OK;
    FB_CUDA_BY_DTYPE(a->act, norm_launch, fb_cuda_compute(c), a);
    return fb_cuda_launched(c, "rms_norm", err);
}

/* ---- backward ---- */

/* With u = dy * w and x^ = x * rstd:  dx = rstd * (u - x^ * mean(u * x^)),  dw += dy * x^.
 * A block takes the rows of one tile in order and keeps its share of dw in registers until the end. */
template <typename T>
struct norm_bwd_args {
    uint32_t     t, c;
    const T     *x, *w, *dy, *add; /* add: NULL, or may be dx */
    const float *rstd;
    T           *dx;
    float       *partial;          /* [gridDim.x, c] */
};

__device__ inline uint32_t tile_edge(uint32_t t, uint32_t tile)
{
    return (uint32_t)((uint64_t)t * tile / gridDim.x);
}

template <typename T, int HELD, bool ADD>
__global__ void __launch_bounds__(HELD < 4 ? BWD_THREADS : BWD_THREADS_MAX)
norm_bwd_held(norm_bwd_args<T> a)
{
    constexpr int N = fb_wide_piece<T>;
    __shared__ float shared[2][32];
    fb_piece<T, N> w[HELD];
    float dw[HELD][N] = {};
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        uint32_t i = (threadIdx.x + k * blockDim.x) * N;
        if (i < a.c)
            w[k] = fb_load<N>(a.w + i);
    }
    uint32_t end = tile_edge(a.t, blockIdx.x + 1);
    for (uint32_t t = tile_edge(a.t, blockIdx.x); t < end; t++) {
        uint64_t row = (uint64_t)t * a.c;
        fb_piece<T, N> x[HELD], dy[HELD], add[HELD];
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            uint32_t i = (threadIdx.x + k * blockDim.x) * N;
            if (i < a.c) {
                x[k] = fb_load<N>(a.x + row + i);
                dy[k] = fb_load<N>(a.dy + row + i);
                if constexpr (ADD)
                    add[k] = fb_load<N>(a.add + row + i);
            }
        }
        float rstd = a.rstd[t], sum = 0;
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            uint32_t i = (threadIdx.x + k * blockDim.x) * N;
            if (i < a.c)
#pragma unroll
                for (int e = 0; e < N; e++)
                    sum += dy[k][e] * w[k][e] * x[k][e];
        }
        float mean = fb_block_sum(sum, shared[t & 1]) * rstd / (float)a.c;
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            fb_keep_packed(x[k]);
            fb_keep_packed(dy[k]);
            fb_keep_packed(w[k]);
            uint32_t i = (threadIdx.x + k * blockDim.x) * N;
            if (i >= a.c)
                continue;
            float out[N];
#pragma unroll
            for (int e = 0; e < N; e++) {
                float g = dy[k][e], x_hat = x[k][e] * rstd;
                out[e] = rstd * (g * w[k][e] - x_hat * mean);
                if constexpr (ADD)
                    out[e] += add[k][e];
                dw[k][e] += g * x_hat;
            }
            fb_store(a.dx + row + i, fb_narrow<T>(out));
        }
    }
    float *partial = a.partial + (uint64_t)blockIdx.x * a.c;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        uint32_t i = (threadIdx.x + k * blockDim.x) * N;
        if (i < a.c)
            fb_store(partial + i, fb_narrow<float>(dw[k]));
    }
}

/* Each thread adds to its own elements of the partial sum, in memory. */
template <typename T>
__global__ void __launch_bounds__(WALK_THREADS)
norm_bwd_walked(norm_bwd_args<T> a)
{
    __shared__ float shared[2][32];
    float *partial = a.partial + (uint64_t)blockIdx.x * a.c;
    for (uint32_t i = threadIdx.x; i < a.c; i += blockDim.x)
        partial[i] = 0;
    uint32_t end = tile_edge(a.t, blockIdx.x + 1);
    for (uint32_t t = tile_edge(a.t, blockIdx.x); t < end; t++) {
        uint64_t row = (uint64_t)t * a.c;
        const T *x = a.x + row, *dy = a.dy + row;
        float rstd = a.rstd[t], sum = 0;
        for (uint32_t i = threadIdx.x; i < a.c; i += blockDim.x)
            sum += fb_widen(dy[i]) * fb_widen(a.w[i]) * fb_widen(x[i]);
        float mean = fb_block_sum(sum, shared[t & 1]) * rstd / (float)a.c;
        for (uint32_t i = threadIdx.x; i < a.c; i += blockDim.x) {
            float g = fb_widen(dy[i]), x_hat = fb_widen(x[i]) * rstd;
            float out = rstd * (g * fb_widen(a.w[i]) - x_hat * mean) + (a.add ? fb_widen(a.add[row + i]) : 0.0f);
            partial[i] += g * x_hat;
            fb_store(a.dx + row + i, fb_narrow<T, 1>({ out }));
        }
    }
}

template <typename T, int HELD>
static void norm_bwd_launch_held(cudaStream_t s, const norm_bwd_args<T> &n, uint32_t tiles, unsigned threads)
{
    if (n.add)
        norm_bwd_held<T, HELD, true><<<tiles, threads, 0, s>>>(n);
    else
        norm_bwd_held<T, HELD, false><<<tiles, threads, 0, s>>>(n);
}

template <typename T>
static void norm_bwd_launch(cudaStream_t s, const fb_rms_norm_bwd *a, float *partial, uint32_t tiles)
{
    uint64_t n_piece = a->c / fb_wide_piece<T>;
    norm_bwd_args<T> n = { a->t, a->c, (const T *)a->x, (const T *)a->w, (const T *)a->dy, (const T *)a->add, a->rstd,
                           (T *)a->dx, partial };
    if (!fb_cuda_whole_pieces<T>(a->c) || n_piece > 4 * BWD_THREADS_MAX)
        norm_bwd_walked<T><<<tiles, WALK_THREADS, 0, s>>>(n);
    else if (n_piece <= BWD_THREADS)
        norm_bwd_launch_held<T, 1>(s, n, tiles, fb_cuda_threads(n_piece, 1, BWD_THREADS));
    else if (n_piece <= 2 * BWD_THREADS)
        norm_bwd_launch_held<T, 2>(s, n, tiles, fb_cuda_threads(n_piece, 2, BWD_THREADS));
    else
        norm_bwd_launch_held<T, 4>(s, n, tiles, fb_cuda_threads(n_piece, 4, BWD_THREADS_MAX));
}

/* As many tiles as fill the device, fewer when rows or the workspace are short; more when blocks are small. */
static uint32_t norm_bwd_tiles(uint32_t t, uint32_t c, uint64_t n_piece)
{
    uint64_t room = FB_CUDA_WORKSPACE_SIZE / (c * sizeof(float)), rows = fb_cuda_ceil_div(t, DW_ROWS_MIN);
    uint64_t tiles = n_piece <= BWD_THREADS / 2 ? 2 * DW_PARTIALS : DW_PARTIALS;
    tiles = tiles < room ? tiles : room;
    return (uint32_t)(tiles < rows ? tiles : rows);
}

fb_status fb_cuda_rms_norm_bwd(fb_device *d, const fb_rms_norm_bwd *a, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    assert(a->c > 0 && a->c <= FB_CUDA_WORKSPACE_SIZE / sizeof(float));
    uint32_t tiles = norm_bwd_tiles(a->t, a->c, a->c * fb_dtype_size(a->act) / 16);
    float *partial = (float *)c->workspace;
    if (tiles)
        FB_CUDA_BY_DTYPE(a->act, norm_bwd_launch, fb_cuda_compute(c), a, partial, tiles);
    return fb_cuda_sum_partials(c, partial, tiles, a->c, a->c, a->dw, a->accumulate, "rms_norm_bwd", err);
}
