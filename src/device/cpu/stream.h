/* stream.h - what kernels.c needs of the CPU device. */
#ifndef FB_DEVICE_CPU_STREAM_H
#define FB_DEVICE_CPU_STREAM_H

#include <pthread.h>

#include "device/cpu/cpu.h"

typedef struct fb_cpu fb_cpu;
typedef void (*fb_cpu_command_fn)(fb_cpu *c, void *args);

/* Copies size bytes of args; blocks while the stream's ring is full. */
fb_status fb_cpu_enqueue(fb_device *d, fb_stream which, fb_cpu_command_fn run, const void *args, size_t size);
fb_cpu_scratch *fb_cpu_scratch_get(fb_cpu *c);

extern const fb_kernels fb_cpu_kernels;

#endif
