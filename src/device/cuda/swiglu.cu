/* swiglu.cu - the gated activation of the MLP: silu(gate) * up, and its gradient.
 *
 * One piece a thread.  Blocks are numbered along a row, then down the rows: no division by a run-time width in a thread. */
#include "device/cuda/vec.cuh"

enum { SWIGLU_THREADS = 256 };

/* bfloat16 results do not see the last bits, and the fast forms keep the kernel bound by memory. */
template <typename T>
__device__ inline float swiglu_exp(float x)
{
    if constexpr (sizeof(T) == 4)
        return expf(x);
    else
        return __expf(x);
}

template <typename T>
__device__ inline float swiglu_divide(float x, float y)
{
    if constexpr (sizeof(T) == 4)
        return x / y;
    else
        return __fdividef(x, y);
}

/* This thread's piece: its row and column. */
template <int N>
__device__ inline bool swiglu_place(uint32_t f, uint32_t blocks_a_row, uint64_t *row, uint32_t *column)
{
    *row = blockIdx.x / blocks_a_row;
    *column = (blockIdx.x % blocks_a_row * SWIGLU_THREADS + threadIdx.x) * N;
    return *column < f;
}

template <typename T, int N>
__global__ void __launch_bounds__(SWIGLU_THREADS)
swiglu_forward(uint32_t f, uint32_t blocks_a_row, const T *gu, T *y)
{
    uint64_t row;
    uint32_t column;
    if (!swiglu_place<N>(f, blocks_a_row, &row, &column))
        return;
    const T *gate = gu + row * 2 * f + column;
    fb_piece<T, N> g = fb_load<N>(gate), up = fb_load<N>(gate + f);
    float out[N];
#pragma unroll
    for (int e = 0; e < N; e++)
        out[e] = fb_round_to<T>(swiglu_divide<T>(g[e], 1.0f + swiglu_exp<T>(-g[e]))) * up[e];
    fb_store(y + row * f + column, fb_narrow<T>(out));
}

/* With s = sigmoid(g):  dgate = dy * up * s * (1 + g * (1 - s)),  dup = dy * g * s.
 * s and 1 - s both come from e^-|g|, so that neither cancels nor overflows. */
template <typename T, int N>
__global__ void __launch_bounds__(SWIGLU_THREADS)
swiglu_backward(uint32_t f, uint32_t blocks_a_row, const T *gu, const T *dy, T *dgu)
{
    uint64_t row;
    uint32_t column;
    if (!swiglu_place<N>(f, blocks_a_row, &row, &column))
        return;
    const T *gate = gu + row * 2 * f + column;
    fb_piece<T, N> gates = fb_load<N>(gate), up = fb_load<N>(gate + f), d = fb_load<N>(dy + row * f + column);
    float dgate[N], dup[N];
#pragma unroll
    for (int e = 0; e < N; e++) {
        float g = gates[e], x = swiglu_exp<T>(-fabsf(g)), large = swiglu_divide<T>(1.0f, 1.0f + x), small = x * large;
        float sig = g < 0.0f ? small : large, rest = g < 0.0f ? large : small;
        dgate[e] = d[e] * up[e] * (sig * (1.0f + g * rest));
        dup[e] = d[e] * (g * sig);
    }
    T *to = dgu + row * 2 * f + column;
    fb_store(to, fb_narrow<T>(dgate));
    fb_store(to + f, fb_narrow<T>(dup));
}

template <typename T, int N>
static void swiglu_launch(cudaStream_t s, uint32_t t, uint32_t f, const void *gu, const void *dy, void *out)
{
    uint32_t blocks_a_row = (uint32_t)fb_cuda_ceil_div(f / N, SWIGLU_THREADS);
    if (dy)
        swiglu_backward<T, N><<<t * blocks_a_row, SWIGLU_THREADS, 0, s>>>(f, blocks_a_row, (const T *)gu, (const T *)dy, (T *)out);
    else
        swiglu_forward<T, N><<<t * blocks_a_row, SWIGLU_THREADS, 0, s>>>(f, blocks_a_row, (const T *)gu, (T *)out);
}

template <typename T>
static void swiglu_run(cudaStream_t s, uint32_t t, uint32_t f, const void *gu, const void *dy, void *out)
{
    if (fb_cuda_whole_pieces<T>(f))
        swiglu_launch<T, fb_wide_piece<T>>(s, t, f, gu, dy, out);
    else
        swiglu_launch<T, 1>(s, t, f, gu, dy, out);
}

fb_status fb_cuda_swiglu(fb_device *d, const fb_swiglu *a, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    if (a->t && a->f)
        FB_CUDA_BY_DTYPE(a->act, swiglu_run, fb_cuda_compute(c), a->t, a->f, a->gu, nullptr, a->y);
    return fb_cuda_launched(c, "swiglu", err);
}

fb_status fb_cuda_swiglu_bwd(fb_device *d, const fb_swiglu_bwd *a, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    if (a->t && a->f)
        FB_CUDA_BY_DTYPE(a->act, swiglu_run, fb_cuda_compute(c), a->t, a->f, a->gu, a->dy, a->dgu);
    return fb_cuda_launched(c, "swiglu_bwd", err);
}
