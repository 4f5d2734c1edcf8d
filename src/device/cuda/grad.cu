/* grad.cu - sums across rows: partial sums of other kernels, the gradient of a bias; and finished gradients, rounded once
 * into the dtype that travels, with their share of the squared norm. */
#include <assert.h>

#include "device/cuda/vec.cuh"

enum {
    SUM_COLUMNS = 32, SUM_GROUPS = 32,
    BIAS_LANES = 32, BIAS_ROWS = 8,   /* a block: pieces side by side, rows at a time */
    BIAS_BLOCKS = 1056,               /* aimed at: eight for each of 132 multiprocessors */
    BIAS_TILE_ROWS_MIN = 4 * BIAS_ROWS,
    GRAD_TILE = 1 << 16, GRAD_THREADS = 512,
    SQ_THREADS = 1024,
};

/* ---- partial sums ---- */

/* Group g adds partials g, g + 32, ... in order; then the groups are added in order. */
__global__ void __launch_bounds__(SUM_COLUMNS * SUM_GROUPS)
sum_partials(const float *partial, uint32_t n_partial, uint64_t ld, uint32_t n, float *out, bool accumulate)
{
    __shared__ float groups[SUM_GROUPS][SUM_COLUMNS];
    uint32_t column = blockIdx.x * SUM_COLUMNS + threadIdx.x;
    float sum = 0;
    if (column < n)
        for (uint32_t p = threadIdx.y; p < n_partial; p += SUM_GROUPS)
            sum += partial[p * ld + column];
    groups[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= n)
        return;
    sum = 0;
    for (int g = 0; g < SUM_GROUPS; g++)
        sum += groups[g][threadIdx.x];
    out[column] = accumulate ? out[column] + sum : sum;
}

fb_status fb_cuda_sum_partials(fb_cuda *c, const float *partial, uint32_t n_partial, uint64_t ld, uint32_t n, float *out,
                               bool accumulate, const char *what, fb_error *err)
{
    if (n)
        sum_partials<<<(unsigned)fb_cuda_ceil_div(n, SUM_COLUMNS), dim3(SUM_COLUMNS, SUM_GROUPS), 0, fb_cuda_compute(c)>>>(
            partial, n_partial, ld, n, out, accumulate);
    return fb_cuda_launched(c, what, err);
}

/* ---- the gradient of a bias ---- */

/* Block (x, y): the columns of BIAS_LANES pieces, over the rows of tile y.  Each of BIAS_ROWS threads that share a piece
 * takes every BIAS_ROWS-th row; they are added in order. */
template <typename T, int N>
__global__ void __launch_bounds__(BIAS_LANES * BIAS_ROWS)
bias_grad(uint32_t m, uint32_t n, const T *dy, uint64_t ld, float *partial)
{
    __shared__ float rows[BIAS_ROWS][N][BIAS_LANES];
    uint32_t column = (blockIdx.x * BIAS_LANES + threadIdx.x) * N;
    uint32_t first = (uint32_t)((uint64_t)m * blockIdx.y / gridDim.y), end = (uint32_t)((uint64_t)m * (blockIdx.y + 1) / gridDim.y);
    float sum[N] = {};
    if (column < n)
#pragma unroll 4
        for (uint32_t row = first + threadIdx.y; row < end; row += BIAS_ROWS) {
            fb_piece<T, N> p = fb_load<N>(dy + row * ld + column);
#pragma unroll
            for (int e = 0; e < N; e++)
                sum[e] += p[e];
        }
#pragma unroll
    for (int e = 0; e < N; e++)
        rows[threadIdx.y][e][threadIdx.x] = sum[e];
    __syncthreads();
    if (threadIdx.y != 0 || column >= n)
        return;
#pragma unroll
    for (int e = 0; e < N; e++) {
        sum[e] = 0;
        for (int r = 0; r < BIAS_ROWS; r++)
            sum[e] += rows[r][e][threadIdx.x];
    }
    float *to = partial + (uint64_t)blockIdx.y * n + column;
    fb_store(to, fb_narrow<float>(sum));
}

template <typename T>
static void bias_launch(cudaStream_t s, const fb_bias_grad *a, float *partial, uint32_t *n_tile)
{
    bool whole = fb_cuda_whole_pieces<T>(a->n) && fb_cuda_whole_pieces<T>(a->dy_ld);
    uint64_t n_piece = whole ? a->n / fb_wide_piece<T> : a->n;
    uint64_t blocks = fb_cuda_ceil_div(n_piece, BIAS_LANES), room = FB_CUDA_WORKSPACE_SIZE / (a->n * sizeof(float));
    uint64_t tiles = fb_cuda_ceil_div(BIAS_BLOCKS, blocks), rows = fb_cuda_ceil_div(a->m, BIAS_TILE_ROWS_MIN);
    tiles = tiles < room ? tiles : room;
    tiles = tiles < rows ? tiles : rows;
    *n_tile = (uint32_t)tiles;
    if (tiles == 0)
        return;
    dim3 grid((unsigned)blocks, (unsigned)tiles), block(BIAS_LANES, BIAS_ROWS);
    if (whole)
        bias_grad<T, fb_wide_piece<T>><<<grid, block, 0, s>>>(a->m, a->n, (const T *)a->dy, a->dy_ld, partial);
    else
        bias_grad<T, 1><<<grid, block, 0, s>>>(a->m, a->n, (const T *)a->dy, a->dy_ld, partial);
}

fb_status fb_cuda_bias_grad(fb_device *d, const fb_bias_grad *a, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    assert(a->n > 0 && a->n <= FB_CUDA_WORKSPACE_SIZE / sizeof(float));
    float *partial = (float *)c->workspace;
    uint32_t n_tile;
    FB_CUDA_BY_DTYPE(a->act, bias_launch, fb_cuda_compute(c), a, partial, &n_tile);
    return fb_cuda_sum_partials(c, partial, n_tile, a->n, a->n, a->db, a->accumulate, "bias_grad", err);
}

/* ---- finished gradients ---- */

__device__ inline double lanes_sum_double(double x)
{
    for (int step = 16; step > 0; step /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

/* Block i: tile i.  The norm is that of the rounded values: they are what the optimizer sees. */
template <typename T, bool WRITE>
__global__ void __launch_bounds__(GRAD_THREADS)
grad_out(uint64_t n, const float *acc, T *out, double *tile_sq)
{
    __shared__ double warps[GRAD_THREADS / 32];
    constexpr int N = 8;
    uint64_t first = (uint64_t)blockIdx.x * GRAD_TILE;
    uint32_t len = (uint32_t)(n - first < GRAD_TILE ? n - first : GRAD_TILE), whole = len / N * N;
    acc += first;
    if constexpr (WRITE)
        out += first;
    double sum = 0;
#pragma unroll 2
    for (uint32_t i = threadIdx.x * N; i < whole; i += GRAD_THREADS * N) {
        fb_piece<float, N> a = fb_load<N>(acc + i);
        fb_piece<T, N> rounded = fb_narrow<T>(a.at);
        if constexpr (WRITE)
            fb_store(out + i, rounded);
#pragma unroll
        for (int e = 0; e < N; e++)
            sum += (double)rounded[e] * (double)rounded[e];
    }
    for (uint32_t i = whole + threadIdx.x; i < len; i += GRAD_THREADS) {
        fb_piece<T, 1> rounded = fb_narrow<T, 1>({ acc[i] });
        if constexpr (WRITE)
            fb_store(out + i, rounded);
        sum += (double)rounded[0] * (double)rounded[0];
    }
    sum = lanes_sum_double(sum);
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    sum = 0;
    for (int w = 0; w < GRAD_THREADS / 32; w++)
        sum += warps[w];
    tile_sq[blockIdx.x] = sum;
}

/* One after the other, however many launches share a gradient's tiles: where it was cut changes no bit. */
__global__ void __launch_bounds__(SQ_THREADS)
sum_tiles(const double *tile_sq, uint32_t n_tile, double *sq, bool accumulate)
{
    __shared__ double near[SQ_THREADS];
    double sum = accumulate ? *sq : 0;
    for (uint32_t first = 0; first < n_tile; first += SQ_THREADS) {
        uint32_t n = n_tile - first < SQ_THREADS ? n_tile - first : SQ_THREADS;
        __syncthreads();
        if (threadIdx.x < n)
            near[threadIdx.x] = tile_sq[first + threadIdx.x];
        __syncthreads();
        if (threadIdx.x == 0)
            for (uint32_t i = 0; i < n; i++)
                sum += near[i];
    }
    if (threadIdx.x == 0)
        *sq = sum;
}

template <typename T>
static void grad_launch(cudaStream_t s, const fb_grad_out *a, double *tile_sq, uint32_t n_tile)
{
    if (n_tile && (!a->out || a->out == (const void *)a->acc))
        grad_out<T, false><<<n_tile, GRAD_THREADS, 0, s>>>(a->n, a->acc, (T *)a->out, tile_sq);
    else if (n_tile)
        grad_out<T, true><<<n_tile, GRAD_THREADS, 0, s>>>(a->n, a->acc, (T *)a->out, tile_sq);
    sum_tiles<<<1, SQ_THREADS, 0, s>>>(tile_sq, n_tile, a->sq, a->accumulate);
}

fb_status fb_cuda_grad_out(fb_device *d, const fb_grad_out *a, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    uint64_t n_tile = fb_cuda_ceil_div(a->n, GRAD_TILE);
    assert(n_tile <= FB_CUDA_WORKSPACE_SIZE / sizeof(double)); /* 2^39 elements */
    assert(a->out_dtype == FB_F32 || a->out != (const void *)a->acc);
    FB_CUDA_BY_DTYPE(a->out_dtype, grad_launch, fb_cuda_compute(c), a, (double *)c->workspace, (uint32_t)n_tile);
    return fb_cuda_launched(c, "grad_out", err);
}
