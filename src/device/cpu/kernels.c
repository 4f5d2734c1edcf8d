/* kernels.c - the CPU device's table: each entry puts its kernel on the compute stream. */
#include "device/cpu/stream.h"

#define DEFINE_ENTRY(name)                                                                              \
    static void run_##name(fb_cpu *c, void *args)                                                       \
    {                                                                                                   \
        fb_cpu_##name(fb_cpu_scratch_get(c), args);                                                     \
    }                                                                                                   \
    static fb_status enqueue_##name(fb_device *d, const fb_##name *a, fb_error *err)                    \
    {                                                                                                   \
        (void)err;                                                                                      \
        return fb_cpu_enqueue(d, FB_STREAM_COMPUTE, run_##name, a, sizeof *a);                          \
    }
FB_KERNEL_MAP(DEFINE_ENTRY)

#define TABLE_ENTRY(name) .name = enqueue_##name,
const fb_kernels fb_cpu_kernels = { FB_KERNEL_MAP(TABLE_ENTRY) .attention_scratch = fb_cpu_attention_scratch };
