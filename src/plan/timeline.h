/* timeline.h - a step, foreseen: when everything runs, and why the device stands still meanwhile. */
#ifndef FB_PLAN_TIMELINE_H
#define FB_PLAN_TIMELINE_H

#include <stddef.h>
#include <stdint.h>

#include "sched/cause.h"

#define FB_RESOURCE_MAP(X) X(COMPUTE, "compute") X(H2D, "host to device") X(D2H, "device to host") X(UPDATE, "host update") \
                           X(HOST, "host")
#define FB_RESOURCE_ENUM(name, text) FB_RESOURCE_##name,
typedef enum { FB_RESOURCE_MAP(FB_RESOURCE_ENUM) FB_RESOURCE_COUNT } fb_resource;
#undef FB_RESOURCE_ENUM

#define FB_WORK_MAP(X)                                                                            \
    X(FORWARD, "forward")       X(BACKWARD, "backward")      X(LOSS, "head and loss")             \
    X(EMBED, "embedding")       X(GRAD_OUT, "round and norm") X(DEVICE_UPDATE, "update on the device") \
    X(WEIGHTS, "weights")       X(BATCH, "batch, embedding rows") X(KEPT, "kept activations")     \
    X(ACCUMULATOR, "accumulators") X(GRADIENT, "gradients")  X(HOST_UPDATE, "update")             \
    X(GATHER, "gather rows")
#define FB_WORK_ENUM(name, text) FB_WORK_##name,
typedef enum { FB_WORK_MAP(FB_WORK_ENUM) FB_WORK_COUNT } fb_work;
#undef FB_WORK_ENUM

const char *fb_resource_str(fb_resource r);
const char *fb_work_str(fb_work w);

typedef struct fb_time_span {
    fb_resource resource;
    fb_work     work;
    uint32_t    block;
    double      begin, end; /* seconds since the step began */
} fb_time_span;

typedef struct fb_timeline {
    fb_time_span *spans;             /* the caller's; NULL: none wanted */
    uint32_t n_span_max;             /* room in it */
    uint32_t n_span, n_lost;         /* recorded; no longer fitted */
    double   seconds;                /* of a step */
    double   busy[FB_RESOURCE_COUNT];
    double   idle[FB_CAUSE_COUNT];   /* of compute: busy + their sum == seconds */
    uint64_t h2d_size, d2h_size;     /* bytes moved */
    uint64_t n_updated[2];           /* elements updated by the host, by the device */
} fb_timeline;

enum { FB_TIMELINE_SPANS = 1 << 16 };

/* One sentence: what bounds the step, and why. */
void fb_timeline_explain(char *buf, size_t size, const fb_timeline *t);

#endif
