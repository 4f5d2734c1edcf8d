/* update.cu - AdamW over blocks that live on the device, to the bit what the host's workers compute (optim/adamw.h): every
 * operation is rounded once, by name, so that no compiler fuses what is not written as fma. */
#include <assert.h>

#include "device/cuda/vec.cuh"

enum { UPDATE_THREADS = 256, UPDATE_PIECE = 8 };

/* The constants of optim/adamw.h are hexadecimal floats, which C++20 reads. */
__device__ inline float adamw_element(float p, float g, float &m, float &v, const fb_adamw_scalars &s)
{
    g = __fmul_rn(g, s.clip);
    g = fabsf(g) < FB_ADAMW_G_TINY ? 0.0f : g;
    m = __fmaf_rn(s.beta1, m, __fmul_rn(s.beta1_rest, g));
    m = fabsf(m) < FB_ADAMW_M_TINY ? 0.0f : m;
    v = __fmaf_rn(s.beta2, v, __fmul_rn(__fmul_rn(s.beta2_rest, g), g));
    v = v < FB_ADAMW_V_TINY ? 0.0f : v;
    float d = __fadd_rn(__fmul_rn(__fsqrt_rn(v), s.inv_sqrt_c2), s.eps);
    return __fmaf_rn(s.minus_step_size, __fdiv_rn(m, d), __fmul_rn(p, s.shrink));
}

template <int N>
__device__ inline void update_master(float *w, int16_t *, const fb_piece<float, N> &g, fb_piece<float, N> &m, fb_piece<float, N> &v,
                                     const fb_adamw_scalars &s)
{
    fb_piece<float, N> p = fb_load<N>((const float *)w);
#pragma unroll
    for (int e = 0; e < N; e++)
        p.at[e] = adamw_element(p.at[e], g.at[e], m.at[e], v.at[e], s);
    fb_store(w, p);
}

/* A split master is put together from its halves and cut again.  The gradient's trip through bfloat16 is exact where it was
 * rounded before. */
template <int N>
__device__ inline void update_master(uint16_t *w, int16_t *low, const fb_piece<float, N> &g, fb_piece<float, N> &m,
                                     fb_piece<float, N> &v, const fb_adamw_scalars &s)
{
    fb_piece<uint16_t, N> hi = fb_load<N>((const uint16_t *)w);
    fb_piece<int16_t, N> lo = fb_load<N>((const int16_t *)low);
#pragma unroll
    for (int e = 0; e < N; e++) {
        float p = __uint_as_float(((uint32_t)hi.at[e] << 16) + (uint32_t)(int32_t)lo.at[e]);
        uint32_t bits = __float_as_uint(adamw_element(p, fb_round_to<fb_bf16>(g.at[e]), m.at[e], v.at[e], s));
        hi.at[e] = (uint16_t)((bits + 0x8000u) >> 16);
        lo.at[e] = (int16_t)(uint16_t)bits;
    }
    fb_store(w, hi);
    fb_store(low, lo);
}

template <typename W, typename G, int N>
__device__ inline void update_piece(const fb_update &a, uint64_t i)
{
    fb_piece<G, N> narrow = fb_load<N>((const G *)a.g + i);
    fb_piece<float, N> g, m = fb_load<N>((const float *)a.m + i), v = fb_load<N>((const float *)a.v + i);
#pragma unroll
    for (int e = 0; e < N; e++)
        g.at[e] = narrow[e];
    update_master<N>((W *)a.w + i, a.low + i, g, m, v, a.adamw);
    fb_store(a.m + i, m);
    fb_store(a.v + i, v);
}

template <typename W, typename G>
__global__ void __launch_bounds__(UPDATE_THREADS)
update(fb_update a)
{
    uint64_t i = ((uint64_t)blockIdx.x * UPDATE_THREADS + threadIdx.x) * UPDATE_PIECE;
    if (a.guard && !isfinite(*a.guard))
        return;
    if (i + UPDATE_PIECE <= a.n)
        update_piece<W, G, UPDATE_PIECE>(a, i);
    else
        for (; i < a.n; i++)
            update_piece<W, G, 1>(a, i);
}

fb_status fb_cuda_update(fb_device *d, const fb_update *a, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    uint64_t blocks = fb_cuda_ceil_div(a->n, (uint64_t)UPDATE_THREADS * UPDATE_PIECE);
    assert(blocks <= INT32_MAX);
    if (!a->n)
        return FB_OK;
    if (a->act == FB_F32)
        update<float, float><<<(unsigned)blocks, UPDATE_THREADS, 0, fb_cuda_compute(c)>>>(*a);
    else if (a->g_dtype == FB_F32)
        update<uint16_t, float><<<(unsigned)blocks, UPDATE_THREADS, 0, fb_cuda_compute(c)>>>(*a);
    else
        update<uint16_t, fb_bf16><<<(unsigned)blocks, UPDATE_THREADS, 0, fb_cuda_compute(c)>>>(*a);
    return fb_cuda_launched(c, "update", err);
}
