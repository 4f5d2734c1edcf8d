/* cause.h - why the device's compute stream did not compute: what a trace saw, and what a plan foresees. */
#ifndef FB_SCHED_CAUSE_H
#define FB_SCHED_CAUSE_H

#define FB_CAUSE_MAP(X)                                                                                     \
    X(WEIGHTS, "weights")       /* a block's weights are on their way */                                    \
    X(GRADIENTS, "gradients")   /* no free accumulator, gradient buffer or slab; at the end, the last ones */ \
    X(UPDATE, "update")         /* the host waits for one before it sends the weights; or it waits for a checkpoint */ \
    X(INPUTS, "block inputs")   /* on their way to or from the host */                                      \
    X(DATA, "data")             /* the batch, embedding rows */                                             \
    X(HOST, "host")             /* nothing was enqueued */

#define FB_CAUSE_ENUM(name, text) FB_CAUSE_##name,
typedef enum { FB_CAUSE_MAP(FB_CAUSE_ENUM) FB_CAUSE_COUNT, FB_CAUSE_WORK, FB_CAUSE_COPY, FB_CAUSE_UPDATING } fb_cause;
#undef FB_CAUSE_ENUM

const char *fb_cause_str(fb_cause c);

#endif
