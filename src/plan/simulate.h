/* simulate.h - a step, foreseen: when everything runs, and what the device waits for.
 *
 * A discrete-event simulation of what the engine (train/engine*.c) does: the host enqueues visit after visit and waits where the
 * engine waits; three streams run what they were given in order, behind their events; the update workers take blocks in the order
 * of submission.  Copies share the link, copies and updates the host's memory, and on a unified machine all share the cores.
 * One step is enough: every step begins as the one before it left off, with the streams at rest and (exact clipping) all updates
 * still to be done.  Pure and deterministic. */
#ifndef FB_PLAN_SIMULATE_H
#define FB_PLAN_SIMULATE_H

#include "plan/cost.h"
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

enum { FB_TIMELINE_SPANS = 4096 };

/* t: spans and n_span_max set.  p: training, as laid out for the request that the costs are of. */
void fb_simulate(fb_timeline *t, const fb_plan *p, const fb_manifest *m, const fb_costs *c);

/* No step of the layout can take less: the work of each resource, summed. */
double fb_simulate_bound(const fb_plan *p, const fb_manifest *m, const fb_costs *c);

/* One sentence: what bounds the step, and why. */
void fb_timeline_explain(char *buf, size_t size, const fb_timeline *t);

#endif
