/* rows.cu - moving rows by index, and the gradient of an embedding table. */
#include "device/cuda/vec.cuh"

enum { ROW_THREADS = 256, EMBED_THREADS = 128 };

/* A row is moved in units of U: 16 bytes, or one element. */
template <typename U, bool GATHER>
__global__ void __launch_bounds__(ROW_THREADS)
move_rows(uint32_t row_units, uint32_t blocks_a_row, const U *from, const uint32_t *index, U *to)
{
    uint64_t row = blockIdx.x / blocks_a_row, other = index[row];
    uint32_t i = blockIdx.x % blocks_a_row * blockDim.x + threadIdx.x;
    if (i >= row_units)
        return;
    if constexpr (GATHER)
        to[row * row_units + i] = from[other * row_units + i];
    else
        to[other * row_units + i] = from[row * row_units + i];
}

template <typename U, bool GATHER>
static void move_launch(cudaStream_t s, uint32_t n, uint64_t row_size, const void *from, const uint32_t *index, void *to)
{
    uint32_t row_units = (uint32_t)(row_size / sizeof(U));
    unsigned threads = fb_cuda_threads(row_units, 1, ROW_THREADS);
    uint32_t blocks_a_row = (uint32_t)fb_cuda_ceil_div(row_units, threads);
    move_rows<U, GATHER><<<n * blocks_a_row, threads, 0, s>>>(row_units, blocks_a_row, (const U *)from, index, (U *)to);
}

template <bool GATHER>
static void move_run(cudaStream_t s, fb_dtype act, uint32_t n, uint32_t c, const void *from, const uint32_t *index, void *to)
{
    uint64_t row_size = c * fb_dtype_size(act);
    if (n == 0 || c == 0)
        return;
    if (row_size % sizeof(uint4) == 0)
        move_launch<uint4, GATHER>(s, n, row_size, from, index, to);
    else if (act == FB_F32)
        move_launch<uint32_t, GATHER>(s, n, row_size, from, index, to);
    else
        move_launch<uint16_t, GATHER>(s, n, row_size, from, index, to);
}

fb_status fb_cuda_gather_rows(fb_device *d, const fb_gather_rows *a, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    move_run<true>(fb_cuda_compute(c), a->act, a->n, a->c, a->x, a->index, a->y);
    return fb_cuda_launched(c, "gather_rows", err);
}

fb_status fb_cuda_scatter_rows(fb_device *d, const fb_scatter_rows *a, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    uint64_t size = (uint64_t)a->t * a->c * fb_dtype_size(a->act);
    if (size)
        FB_CUDA_TRY(c, cudaMemsetAsync(a->y, 0, size, fb_cuda_compute(c)), "scatter_rows", err);
    move_run<false>(fb_cuda_compute(c), a->act, a->n, a->c, a->x, a->index, a->y);
    return fb_cuda_launched(c, "scatter_rows", err);
}

/* A thread sums one piece of the rows of one id, in their order: no two blocks write the same row of the table. */
template <typename T, int N>
__global__ void __launch_bounds__(EMBED_THREADS)
embed_grad(uint32_t c, uint32_t blocks_a_row, const T *dx, const uint32_t *id, const uint32_t *start, const uint32_t *order,
           float *d_table)
{
    uint32_t u = blockIdx.x / blocks_a_row, column = (blockIdx.x % blocks_a_row * blockDim.x + threadIdx.x) * N;
    if (column >= c)
        return;
    float sum[N] = {};
    uint32_t end = start[u + 1];
#pragma unroll 4
    for (uint32_t k = start[u]; k < end; k++) {
        fb_piece<T, N> p = fb_load<N>(dx + (uint64_t)order[k] * c + column);
#pragma unroll
        for (int e = 0; e < N; e++)
            sum[e] += p[e];
    }
    float *row = d_table + (uint64_t)id[u] * c + column;
    fb_piece<float, N> old = fb_load<N>(row);
#pragma unroll
    for (int e = 0; e < N; e++)
        sum[e] += old[e];
    fb_store(row, fb_narrow<float>(sum));
}

template <typename T, int N>
static void embed_launch(cudaStream_t s, const fb_embed_grad *a)
{
    unsigned threads = fb_cuda_threads(a->c / N, 1, EMBED_THREADS);
    uint32_t blocks_a_row = (uint32_t)fb_cuda_ceil_div(a->c / N, threads);
    embed_grad<T, N><<<a->n_unique * blocks_a_row, threads, 0, s>>>(a->c, blocks_a_row, (const T *)a->dx, a->id, a->start,
                                                                    a->order, a->d_table);
}

template <typename T>
static void embed_run(cudaStream_t s, const fb_embed_grad *a)
{
    if (fb_cuda_whole_pieces<T>(a->c))
        embed_launch<T, fb_wide_piece<T>>(s, a);
    else
        embed_launch<T, 1>(s, a);
}

fb_status fb_cuda_embed_grad(fb_device *d, const fb_embed_grad *a, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    if (a->n_unique && a->c)
        FB_CUDA_BY_DTYPE(a->act, embed_run, fb_cuda_compute(c), a);
    return fb_cuda_launched(c, "embed_grad", err);
}
