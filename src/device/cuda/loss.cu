/* loss.cu - cross entropy over rows of logits, and its gradient.
 *
 * A block takes a row.  The first pass finds maximum and sum of exponentials together (Milakov & Gimelshein 2018,
 * alg. 3); the second writes the gradient, from the row's end to its start: what was read last is still in
 * the L2 cache. */
#include <assert.h>

#include "device/cuda/vec.cuh"

enum { LOSS_THREADS = 1024, LOSS_PIECE = 8, TOTAL_THREADS = 1024 };

/* The sum of e^(x - max) over what was seen; nothing seen: max -inf, sum 0. */
struct softmax_part {
    float max, sum;
};

/* bfloat16 gradients do not see the last bits of an exponential. */
template <typename T>
__device__ inline float loss_exp(float x)
{
    if constexpr (sizeof(T) == 4)
        return expf(x);
    else
        return __expf(x);
}

/* -inf minus -inf would be NaN where e^-inf = 0 is meant. */
__device__ inline float shift_of(float max)
{
    return max == -INFINITY ? 0.0f : max;
}

template <typename T>
__device__ inline softmax_part merge(softmax_part a, softmax_part b)
{
    float max = fmaxf(a.max, b.max), shift = shift_of(max);
    return { max, a.sum * loss_exp<T>(a.max - shift) + b.sum * loss_exp<T>(b.max - shift) };
}

/* Lane 0 has the warp's: its lanes, by halves. */
template <typename T>
__device__ inline softmax_part warp_merge(softmax_part p)
{
    for (int step = 16; step > 0; step /= 2) {
        softmax_part other = { __shfl_down_sync(0xffffffffu, p.max, step), __shfl_down_sync(0xffffffffu, p.sum, step) };
        p = merge<T>(p, other);
    }
    return p;
}

/* The whole row's, in every thread. */
template <typename T>
__device__ inline softmax_part block_merge(softmax_part p)
{
    static_assert(LOSS_THREADS == 1024, "as many warps as a warp has lanes");
    __shared__ softmax_part warps[33];
    p = warp_merge<T>(p);
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = p;
    __syncthreads();
    if (threadIdx.x < 32) {
        p = warp_merge<T>(warps[threadIdx.x]);
        if (threadIdx.x == 0)
            warps[32] = p;
    }
    __syncthreads();
    return warps[32];
}

template <typename T, int N>
__global__ void __launch_bounds__(LOSS_THREADS)
loss_row(uint32_t v, const float *logits, const uint32_t *target_of, float grad_scale, T *d_logits, float *loss)
{
    uint64_t row = blockIdx.x;
    const float *x = logits + row * v;
    uint32_t target = target_of[row];
    /* A target past the vocabulary is a broken promise; it shows as a loss that is not finite, not as a stray read. */
    float at_target = target < v ? x[target] : NAN;

    softmax_part p = { -INFINITY, 0.0f };
#pragma unroll 2
    for (uint32_t i = threadIdx.x * N; i < v; i += LOSS_THREADS * N) {
        fb_piece<float, N> piece = fb_load<N>(x + i);
        float max = p.max, sum = 0;
#pragma unroll
        for (int e = 0; e < N; e++)
            max = fmaxf(max, piece[e]);
        float shift = shift_of(max);
#pragma unroll
        for (int e = 0; e < N; e++)
            sum += loss_exp<T>(piece[e] - shift);
        p = { max, p.sum * loss_exp<T>(p.max - shift) + sum };
    }
    p = block_merge<T>(p);
    if (threadIdx.x == 0)
        loss[row] = (float)(log((double)p.sum) + ((double)p.max - (double)at_target));
    if (!d_logits)
        return;

    /* d_logits may be the logits: each thread writes only what it alone has read, and the target was read by all
     * before the block met. */
    T *d = d_logits + row * v;
    float scale = grad_scale / p.sum, at_target_out = (loss_exp<T>(at_target - p.max) / p.sum - 1.0f) * grad_scale;
    uint32_t n_piece = v / N, rounds = (n_piece + LOSS_THREADS - 1) / LOSS_THREADS;
#pragma unroll 2
    for (uint32_t round = rounds; round-- > 0;) {
        uint32_t i = (round * LOSS_THREADS + threadIdx.x) * N;
        if (i >= v)
            continue;
        fb_piece<float, N> piece = fb_load<N>(x + i);
        float out[N];
#pragma unroll
        for (int e = 0; e < N; e++)
            out[e] = i + e == target ? at_target_out : loss_exp<T>(piece[e] - p.max) * scale;
        fb_store(d + i, fb_narrow<T>(out));
    }
}

/* total += the rows' losses, one after the other in double: however rows are cut into calls, the bits are the same. */
__global__ void __launch_bounds__(TOTAL_THREADS)
loss_total(uint32_t n, const float *loss, double *total)
{
    __shared__ float near[TOTAL_THREADS];
    double sum = *total;
    for (uint32_t first = 0; first < n; first += TOTAL_THREADS) {
        __syncthreads();
        if (first + threadIdx.x < n)
            near[threadIdx.x] = loss[first + threadIdx.x];
        __syncthreads();
        uint32_t rows = n - first < TOTAL_THREADS ? n - first : TOTAL_THREADS;
        if (threadIdx.x == 0)
            for (uint32_t i = 0; i < rows; i++)
                sum += (double)near[i];
    }
    if (threadIdx.x == 0)
        *total = sum;
}

template <typename T>
static void loss_launch(cudaStream_t s, const fb_cross_entropy *a, float *loss)
{
    /* Eight at a time when rows start on 16 bytes in both dtypes. */
    if (a->v % LOSS_PIECE == 0)
        loss_row<T, LOSS_PIECE><<<a->n, LOSS_THREADS, 0, s>>>(a->v, a->logits, a->target, a->grad_scale, (T *)a->d_logits, loss);
    else
        loss_row<T, 1><<<a->n, LOSS_THREADS, 0, s>>>(a->v, a->logits, a->target, a->grad_scale, (T *)a->d_logits, loss);
    loss_total<<<1, TOTAL_THREADS, 0, s>>>(a->n, loss, a->loss_sum);
}

fb_status fb_cuda_cross_entropy(fb_device *d, const fb_cross_entropy *a, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    assert(a->v > 0 && a->v < 1u << 31);
    assert(a->act == FB_F32 || a->d_logits != (const void *)a->logits); /* half a row written, half to be read */
    assert(a->loss || a->n <= FB_CUDA_WORKSPACE_SIZE / sizeof(float));
    if (a->n == 0)
        return FB_OK;
    FB_CUDA_BY_DTYPE(a->act, loss_launch, fb_cuda_compute(c), a, a->loss ? a->loss : (float *)c->workspace);
    return fb_cuda_launched(c, "cross_entropy", err);
}
