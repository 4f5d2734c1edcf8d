/* vec.cuh - what the memory-bound kernels share on the device: pieces of rows, moved 16 bytes at a time, and fixed sums. */
#ifndef FB_DEVICE_CUDA_VEC_CUH
#define FB_DEVICE_CUDA_VEC_CUH

#include "device/cuda/cuda.h"

typedef __nv_bfloat16 fb_bf16;

__device__ inline float fb_widen(float x)
{
    return x;
}

__device__ inline float fb_widen(fb_bf16 x)
{
    return __bfloat162float(x);
}

/* N elements that are read and written at once; p[e] is element e, widened. */
template <typename T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) fb_piece {
    T at[N];
    __device__ float operator[](int e) const { return fb_widen(at[e]); }
};

/* bfloat16 stays in pairs: held apart, it would take twice the registers. */
template <int N>
    requires(N % 2 == 0)
struct alignas(N < 8 ? 2 * N : 16) fb_piece<fb_bf16, N> {
    uint32_t pair[N / 2];
    __device__ float operator[](int e) const
    {
        return __uint_as_float(e % 2 ? pair[e / 2] & 0xffff0000u : pair[e / 2] << 16);
    }
};

/* Elements of T in 16 bytes. */
template <typename T>
constexpr int fb_wide_piece = 16 / (int)sizeof(T);

/* The value after a trip through T: rounded to nearest even. */
template <typename T>
__device__ inline float fb_round_to(float x)
{
    if constexpr (sizeof(T) == 4)
        return x;
    else
        return __bfloat162float(__float2bfloat16_rn(x));
}

/* Rounded to nearest even. */
template <typename T, int N>
__device__ inline fb_piece<T, N> fb_narrow(const float (&v)[N])
{
    fb_piece<T, N> p;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int e = 0; e < N; e++)
            p.at[e] = v[e];
    } else if constexpr (N % 2 == 0) {
#pragma unroll
        for (int e = 0; e < N; e += 2) { /* one instruction rounds and packs two */
            __nv_bfloat162 two = __floats2bfloat162_rn(v[e], v[e + 1]);
            memcpy(&p.pair[e / 2], &two, sizeof two);
        }
    } else {
#pragma unroll
        for (int e = 0; e < N; e++)
            p.at[e] = __float2bfloat16_rn(v[e]);
    }
    return p;
}

/* Makes the compiler widen p again where it is used next, rather than hold the widened elements until then. */
template <typename T, int N>
__device__ inline void fb_keep_packed(fb_piece<T, N> &p)
{
    if constexpr (sizeof(T) == 2 && N % 2 == 0)
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            asm volatile("" : "+r"(p.pair[i]));
}

template <int N, typename T>
__device__ inline fb_piece<T, N> fb_load(const T *p)
{
    return *reinterpret_cast<const fb_piece<T, N> *>(p);
}

template <typename T, int N>
__device__ inline void fb_store(T *p, const fb_piece<T, N> &piece)
{
    *reinterpret_cast<fb_piece<T, N> *>(p) = piece;
}

/* Over groups of `lanes` (a power of two) neighbouring lanes; every lane gets the sum, all the same bits, because
 * a + b is b + a.  The whole warp takes part. */
__device__ inline float fb_lanes_sum(float x, int lanes)
{
    for (int step = lanes / 2; step > 0; step /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

/* Over the block (whole warps): all threads get it.  shared: 32 floats, which must not be those of the call before,
 * as slower threads may still be reading them. */
__device__ inline float fb_block_sum(float x, float *shared)
{
    x = fb_lanes_sum(x, 32);
    if (blockDim.x == 32)
        return x;
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0;
    for (unsigned i = 0; i < blockDim.x / 32; i++)
        sum += shared[i];
    return sum;
}

/* ---- host side ---- */

/* Threads for `work` pieces of work, `each` of them a thread: whole warps, at most max. */
static inline unsigned fb_cuda_threads(uint64_t work, unsigned each, unsigned max)
{
    uint64_t n = (fb_cuda_ceil_div(work, each) + 31) / 32 * 32;
    return n < 32 ? 32 : n > max ? max : (unsigned)n;
}

/* 16-byte pieces cover a row exactly, and with it every row of a packed matrix. */
template <typename T>
static inline bool fb_cuda_whole_pieces(uint64_t row)
{
    return row % fb_wide_piece<T> == 0;
}

/* Calls f<float>(..) or f<fb_bf16>(..). */
#define FB_CUDA_BY_DTYPE(act, f, ...) ((act) == FB_F32 ? f<float>(__VA_ARGS__) : f<fb_bf16>(__VA_ARGS__))

#endif
