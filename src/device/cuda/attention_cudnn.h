/* attention_cudnn.h - cuDNN's attention for bfloat16, where there is a cuDNN and it takes the shape.
 *
 * Everything that it does not take is refused, with a reason, before anything is enqueued; attention.cu then runs the own
 * kernels.  The backward adds to dq with atomics: fast, but not the same bits in every run. */
#ifndef FB_DEVICE_CUDA_ATTENTION_CUDNN_H
#define FB_DEVICE_CUDA_ATTENTION_CUDNN_H

#include <cuda_runtime.h>

extern "C" {
#include "device/kernels.h"
}

typedef struct fb_cudnn fb_cudnn;

typedef enum { FB_CUDNN_DONE, FB_CUDNN_REFUSED, FB_CUDNN_FAILED } fb_cudnn_result;

enum { FB_CUDNN_WHY_SIZE = 256 };

/* cc: compute capability, 90 for 9.0.  NULL when there is no cuDNN to use; why then says why. */
fb_cudnn *fb_cudnn_open(int cc, cudaStream_t stream, char why[FB_CUDNN_WHY_SIZE]);
void      fb_cudnn_close(fb_cudnn *n); /* NULL is fine */
const char *fb_cudnn_version(const fb_cudnn *n);
/* Of the latest refusal or failure. */
const char *fb_cudnn_why(const fb_cudnn *n);

/* Device memory that the backward wants for t_max tokens; UINT64_MAX: more than can be counted. */
uint64_t fb_cudnn_scratch(uint32_t t_max, uint32_t n_head, uint32_t head_dim);

fb_cudnn_result fb_cudnn_forward(fb_cudnn *n, const fb_attention *a, void *workspace, uint64_t workspace_size);
/* b->scratch holds at least fb_cudnn_scratch(b->fwd.t, ...) bytes. */
fb_cudnn_result fb_cudnn_backward(fb_cudnn *n, const fb_attention_bwd *b);

#endif
