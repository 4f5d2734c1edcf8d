/* planned.h - what a plan for a GPU that is not here has to know of this back end. */
#ifndef FB_DEVICE_CUDA_PLANNED_H
#define FB_DEVICE_CUDA_PLANNED_H

#include <stdint.h>

/* fb_device_info.logits_size.  Each piece of the head's gradient product reads and writes the whole float32 sum: 2048 rows of a
 * vocabulary of 152064 make that a small part of its time. */
static const uint64_t FB_CUDA_LOGITS_SIZE = UINT64_C(1280) << 20;

enum { FB_CUDA_TOKENS_MIN = 1024 };

/* The tokens that attention's kernels are built for: up to the next eighth of an octave. */
static inline uint64_t fb_cuda_token_bound(uint32_t t)
{
    uint64_t step = FB_CUDA_TOKENS_MIN / 8;
    while (t > step * 16)
        step *= 2;
    uint64_t bound = (t + step - 1) / step * step;
    return bound < FB_CUDA_TOKENS_MIN ? (uint32_t)FB_CUDA_TOKENS_MIN : bound;
}

/* Device memory that attention's backward wants for t_max tokens; UINT64_MAX: more than can be counted.  A token and query head: in
 * float32 dq's sum, and room for dk's and dv's before they are summed over their group; two bytes each for
 * packed v, dk and dv, three together, as such a group has at least two heads; lse, delta, and what is left for alignment.  16 MiB:
 * indices, and what the kernels want for themselves.  It covers the 4 bytes a token and head of our own kernels. */
static inline uint64_t fb_cuda_planned_attention(uint32_t t_max, uint32_t n_head, uint32_t head_dim)
{
    uint64_t a_head = 15 * (uint64_t)head_dim + 16, rows, size;
    if (__builtin_mul_overflow(fb_cuda_token_bound(t_max), (uint64_t)n_head, &rows)
        || __builtin_mul_overflow(rows, a_head, &size) || __builtin_add_overflow(size, UINT64_C(16) << 20, &size))
        return UINT64_MAX;
    return size;
}

#endif
