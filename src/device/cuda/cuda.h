/* cuda.h - what the files of the CUDA back end share.
 *
 * device.cu owns the device: context, streams, events, arena, the sticky error.  kernels.cu is the table.  matmul.cu
 * (cuBLASLt) and attention*.cu (cuDNN, own) bring their own state, made and warmed by their init at open.  The other
 * files hold our own kernels, all of them memory-bound.
 *
 * Everything here is deterministic (without full_determinism up to cuDNN's backward, and to which algorithms matmul.cu finds
 * fastest at a start): no floating-point atomics; a sum that crosses thread blocks goes through partial sums in the
 * workspace, cut by the shapes alone and added in a fixed tree.
 * Nothing allocates after open.  The workspace serves one kernel entry at a time: entries run on the compute
 * stream in call order, and what one leaves there means nothing to the next. */
#ifndef FB_DEVICE_CUDA_CUDA_H
#define FB_DEVICE_CUDA_CUDA_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

extern "C" {
#include "base/error.h"
#include "device/kernels.h"
}

typedef struct fb_cuda_matmul_state    fb_cuda_matmul_state;    /* matmul.cu */
typedef struct fb_cuda_attention_state fb_cuda_attention_state; /* attention.cu */
/* device.cu: arena, pending host calls, memory as the driver sees it */
typedef struct fb_cuda_host            fb_cuda_host;

enum { FB_CUDA_WORKSPACE_SIZE = 64 << 20 };

typedef struct fb_cuda {
    fb_device    device;      /* first: a fb_device * is a fb_cuda * */
    int          index;       /* CUDA's, after CUDA_VISIBLE_DEVICES */
    int          cc;          /* compute capability: 80, 90, ... */
    uint32_t     n_sm;
    size_t       shared_max;  /* dynamic shared memory that a block may opt in to, bytes */
    bool         deterministic; /* full_determinism: attention's backward repeats its bits, at half the speed; no timed choices */
    cudaStream_t stream[FB_STREAM_COUNT];
    void        *workspace;   /* FB_CUDA_WORKSPACE_SIZE bytes, 256-byte aligned; see above */
    fb_cuda_matmul_state    *matmul;
    fb_cuda_attention_state *attention;
    fb_cuda_host            *host;
} fb_cuda;

/* The device behind the interface, made the calling thread's current one.  First line of every entry. */
static inline fb_cuda *fb_cuda_enter(fb_device *d)
{
    fb_cuda *c = (fb_cuda *)d;
    cudaSetDevice(c->index); /* cheap when it is current already; its failure shows in the next call's */
    return c;
}

static inline cudaStream_t fb_cuda_compute(const fb_cuda *c)
{
    return c->stream[FB_STREAM_COMPUTE];
}

/* Notes a failure (the first one stays: every later sync reports it) and returns FB_DEVICE.
 * what: the operation, for the sentence. */
fb_status fb_cuda_fail(fb_cuda *c, cudaError_t e, const char *what, fb_error *err);
/* The same for a library's own status; text is its name for it. */
fb_status fb_cuda_fail_text(fb_cuda *c, const char *text, const char *what, fb_error *err);

/* Returns from the function.  Not FB_TRY: C++ does not let goto pass an initialisation. */
#define FB_CUDA_TRY(c, call, what, err)                                 \
    do {                                                                \
        cudaError_t fb_cuda_try_ = (call);                              \
        if (fb_cuda_try_ != cudaSuccess)                                \
            return fb_cuda_fail(c, fb_cuda_try_, what, err);            \
    } while (0)
#define FB_CUDA_OK(call)                                                \
    do {                                                                \
        fb_status fb_cuda_ok_ = (call);                                 \
        if (fb_cuda_ok_ != FB_OK)                                       \
            return fb_cuda_ok_;                                         \
    } while (0)

/* Last line of an entry that launched with <<<grid, block, shared, fb_cuda_compute(c)>>>. */
static inline fb_status fb_cuda_launched(fb_cuda *c, const char *what, fb_error *err)
{
    cudaError_t e = cudaGetLastError();
    return e == cudaSuccess ? FB_OK : fb_cuda_fail(c, e, what, err);
}

/* Called at open, after streams and workspace are there and before the memory taken is measured: make handles,
 * plans and buffers, then run whatever will be run later once, so that its code is loaded and its memory is counted.
 * On failure init leaves nothing behind; deinit takes a device whose init was never called. */
fb_status fb_cuda_matmul_init(fb_cuda *c, fb_error *err);
void      fb_cuda_matmul_deinit(fb_cuda *c);
fb_status fb_cuda_attention_init(fb_cuda *c, fb_error *err);
void      fb_cuda_attention_deinit(fb_cuda *c);
uint64_t  fb_cuda_attention_scratch(uint32_t t_max, uint32_t n_head, uint32_t head_dim);
/* Which attention has run since open, for the run to say: "cuDNN forward, own backward; cuDNN 9.19.0 (own: ...)". */
void      fb_cuda_attention_describe(const fb_cuda *c, char *text, size_t size);
/* Loads the code of our own memory-bound kernels. */
fb_status fb_cuda_kernels_init(fb_cuda *c, fb_error *err);

#define FB_CUDA_DECLARE(name) fb_status fb_cuda_##name(fb_device *d, const fb_##name *a, fb_error *err);
FB_KERNEL_MAP(FB_CUDA_DECLARE)
#undef FB_CUDA_DECLARE
extern const fb_kernels fb_cuda_kernels;

/* out[i] (+)= sum over p < n_partial of partial[p * ld + i], i < n: a fixed tree over p.  partial lies in the workspace. */
fb_status fb_cuda_sum_partials(fb_cuda *c, const float *partial, uint32_t n_partial, uint64_t ld, uint32_t n, float *out,
                               bool accumulate, const char *what, fb_error *err);

static inline uint64_t fb_cuda_ceil_div(uint64_t n, uint64_t d)
{
    return n / d + (n % d != 0);
}

#endif
