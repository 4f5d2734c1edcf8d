/* mma.cuh - the tensor core and copy instructions of compute capability 8.0 that the attention kernels use.
 *
 * Source: PTX ISA 8.x, "Warp-level matrix instructions" (ldmatrix; mma.m16n8k16, fragments for .bf16) and
 * "cp.async".  In a fragment lane l has g = l / 4, t = l % 4:
 *
 *   A, 16 x 16:   a[0] (g, 2t)   a[1] (g + 8, 2t)   a[2] (g, 2t + 8)   a[3] (g + 8, 2t + 8)   two columns each
 *   B, 16 x 8:    b[0] (2t, g)   b[1] (2t + 8, g)                                             two rows each
 *   C, 16 x 8:    c[0], c[1] (g, 2t), (g, 2t + 1)      c[2], c[3] (g + 8, 2t), (g + 8, 2t + 1)
 *
 * So two neighbouring C tiles, rounded to bfloat16, are an A tile of the next product: nothing moves between lanes. */
#ifndef FB_DEVICE_CUDA_MMA_CUH
#define FB_DEVICE_CUDA_MMA_CUH

#include <cuda_bf16.h>
#include <stdint.h>

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Four 8 x 8 matrices; the lanes of matrix i, 8i .. 8i + 7, give the addresses of its rows. */
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

/* c += a b */
__device__ __forceinline__ void mma_16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Copies size bytes, or, where not real, writes zeros: then nothing is read, and src may point anywhere. */
template <int size> __device__ __forceinline__ void copy_async(uint32_t dst, const void *src, bool real)
{
    if constexpr (size == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(dst), "l"(__cvta_generic_to_global(src)), "r"(real ? 16 : 0) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                     :: "r"(dst), "l"(__cvta_generic_to_global(src)), "r"(real ? 4 : 0) : "memory");
}

/* Closes a group of the thread's copies. */
__device__ __forceinline__ void copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most `left` of the thread's groups are still under way. */
template <int left> __device__ __forceinline__ void copy_wait()
{
    asm volatile("cp.async.wait_group %0;" :: "n"(left) : "memory");
}

/* 2^x, 2 ulp; results under 2^-126 are 0. */
__device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Two bfloat16, to nearest even, the first in the low half. */
__device__ __forceinline__ uint32_t pack_bf16(float first, float second)
{
    __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

#endif
