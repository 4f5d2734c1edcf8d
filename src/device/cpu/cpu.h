/* cpu.h - the reference back end: plain fp32, OpenBLAS on fixed tiles, threads that play streams.
 *
 * stream.c owns the device, its arena and the three stream threads; each kernel_*.c implements operations as
 * functions  void fb_cpu_NAME(fb_cpu_scratch *s, const fb_NAME *args)  that run to completion on the calling
 * (compute stream) thread and share work over s->team.  kernels.c wraps them into the enqueueing fb_kernels table.
 * A kernel allocates nothing: per-worker scratch comes from s. */
#ifndef FB_DEVICE_CPU_CPU_H
#define FB_DEVICE_CPU_CPU_H

#include "base/thread.h"
#include "device/kernels.h"

/* Host-side working memory of the CPU kernels: one equal piece a worker, made at open. */
enum { FB_CPU_SCRATCH_SIZE = 8 << 20 };
/* fb_device_info.logits_size */
enum { FB_CPU_LOGITS_SIZE = 64 << 20 };

typedef struct fb_cpu_scratch {
    fb_team        *team;
    unsigned char  *base;  /* fb_team_size(team) pieces of FB_CPU_SCRATCH_SIZE bytes, 64-byte aligned */
} fb_cpu_scratch;

static inline void *fb_cpu_scratch_of(const fb_cpu_scratch *s, uint32_t worker)
{
    return s->base + (uint64_t)worker * FB_CPU_SCRATCH_SIZE;
}

#define FB_CPU_DECLARE(name) void fb_cpu_##name(fb_cpu_scratch *s, const fb_##name *a);
FB_KERNEL_MAP(FB_CPU_DECLARE)
#undef FB_CPU_DECLARE
uint64_t fb_cpu_attention_scratch(uint32_t t_max, uint32_t n_head, uint32_t head_dim);

/* Keeps OpenBLAS to the calling thread: its own threading would change bits.  Once, before the first matmul. */
void fb_cpu_blas_init(void);

fb_status fb_cpu_open(fb_device **out, const fb_device_options *o, fb_error *err);

#endif
