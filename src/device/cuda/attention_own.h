/* attention_own.h - the own attention kernels, as attention.cu sees them.
 *
 * They take every shape that kernels.h allows, with any even head_dim up to 256, and write the same bits in every run.
 * Each function enqueues; the caller has checked the shapes. */
#ifndef FB_DEVICE_CUDA_ATTENTION_OWN_H
#define FB_DEVICE_CUDA_ATTENTION_OWN_H

#include <cuda_runtime.h>

extern "C" {
#include "device/kernels.h"
}

/* delta[H,T] = sum over head_dim of do * o.  Either dtype. */
cudaError_t fb_cuda_attention_delta(cudaStream_t stream, const fb_attention_bwd *b, float *delta);

cudaError_t fb_cuda_attention_bf16(cudaStream_t stream, const fb_attention *a);
cudaError_t fb_cuda_attention_bf16_bwd(cudaStream_t stream, const fb_attention_bwd *b, const float *delta);

cudaError_t fb_cuda_attention_f32(cudaStream_t stream, const fb_attention *a);
cudaError_t fb_cuda_attention_f32_bwd(cudaStream_t stream, const fb_attention_bwd *b, const float *delta);

/* Launches one of their kernels. */
template <typename Args>
cudaError_t att_start(void (*kernel)(Args), uint64_t n_block, uint32_t n_thread, uint32_t shared_size,
                      cudaStream_t stream, const Args &args)
{
    if (n_block == 0)
        return cudaSuccess;
    if (n_block > INT32_MAX)
        return cudaErrorInvalidConfiguration;
    /* More than 48 KiB a block must be asked for. */
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_size);
    if (e != cudaSuccess)
        return e;
    kernel<<<(uint32_t)n_block, n_thread, shared_size, stream>>>(args);
    return cudaGetLastError();
}

#endif
