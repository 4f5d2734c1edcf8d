/* trace.h - when everything ran, and what the device waited for.
 *
 * Spans on the three streams lie between two events of the device; spans of the host and of the update workers are
 * taken from the host's clock.  At the end of a step, when the streams have been synced, fb_trace_cut ends it; fb_trace_step
 * then turns its spans into entries on one clock (seconds since fb_trace_new) and accounts for the step's time, under what
 * has been enqueued meanwhile.  Each moment in which the compute stream did not compute has exactly one cause.
 *   - it stood at an event: the cause of that wait, as its label says;
 *   - else it had nothing to do, because the host had not enqueued it: what the host waited for meanwhile, or HOST.
 * Every function takes a NULL trace, and then only does what it would do untraced.
 * Nothing allocates after new: what no longer fits is not recorded, and counted.
 * Threads: the engine's, except fb_trace_now and fb_trace_update. */
#ifndef FB_SCHED_TRACE_H
#define FB_SCHED_TRACE_H

#include "device/device.h"
#include "sched/cause.h"

/* name, text, what a moment of it counts as: computing, copying, updating, or a cause */
#define FB_TRACE_KIND_MAP(X)                                              \
    X(FORWARD, "forward", WORK)         X(BACKWARD, "backward", WORK)     \
    X(LOSS, "head and loss", WORK)      X(EMBED_GRAD, "embedding gradient", WORK) \
    X(GRAD_OUT, "round and norm", WORK) X(UPDATE_AT_HOME, "update", WORK) \
    X(WAIT_WEIGHTS, "wait for weights", WEIGHTS)                          \
    X(WAIT_GRADIENT, "wait for a gradient buffer", GRADIENTS)             \
    X(WAIT_INPUT, "wait for a block input", INPUTS)                       \
    X(WAIT_DATA, "wait for the batch", DATA)                              \
    X(WAIT_SAVER, "wait for a checkpoint to have the state", UPDATE)      \
    X(SEND_WEIGHTS, "weights", COPY)    X(SEND_BATCH, "batch", COPY)      \
    X(SEND_ROWS, "embedding rows", COPY) X(SEND_INPUT, "block input", COPY) \
    X(SEND_ACC, "accumulator", COPY)    X(SEND_ROW_GRADIENTS, "row gradients", COPY) \
    X(FETCH_GRADIENT, "gradient", COPY) X(FETCH_INPUT, "block input", COPY) \
    X(FETCH_ACC, "accumulator", COPY)   X(FETCH_ROWS, "row gradients", COPY) \
    X(FETCH_SUMS, "loss and norms", COPY) X(FETCH_STATE, "state for a checkpoint", COPY) \
    X(UPDATE, "update", UPDATING)                                         \
    X(HOST_UPDATE, "wait for an update", UPDATE)                          \
    X(HOST_SLAB, "wait for a slab", GRADIENTS)                            \
    X(HOST_STAGING, "wait for a row buffer", DATA)                        \
    X(HOST_GATHER, "gather rows", DATA)                                   \
    X(HOST_SAVER, "wait for room in the save buffer", UPDATE)             \
    X(HOST_END, "wait for the end of the step", GRADIENTS)

#define FB_TRACE_ENUM(name, text, means) FB_TRACE_##name,
typedef enum { FB_TRACE_KIND_MAP(FB_TRACE_ENUM) FB_TRACE_KIND_COUNT } fb_trace_kind;
#undef FB_TRACE_ENUM

#define FB_NO_PART UINT32_MAX

typedef struct fb_trace_label {
    fb_trace_kind kind;
    uint32_t      block; /* as in the manifest */
    uint32_t      part;  /* micro-batch; of SEND_WEIGHTS the slot; or FB_NO_PART */
} fb_trace_label;

#define FB_LABEL(kind, block, part) ((fb_trace_label){ FB_TRACE_##kind, block, part })

typedef struct fb_trace fb_trace;

typedef struct fb_trace_options {
    fb_device *device;
    uint32_t   n_span;   /* on the streams, in one step, at most */
    uint32_t   n_block, n_slot, n_worker;
    uint32_t   n_step;   /* newest steps to be kept for fb_trace_write */
} fb_trace_options;

fb_status fb_trace_new(fb_trace **out, const fb_trace_options *o, fb_error *err);
void      fb_trace_free(fb_trace *t); /* before its device is closed */

/* ---- what is recorded ---- */

/* Around what is enqueued on s; spans of one stream do not nest.  size: bytes moved, else 0. */
fb_status fb_trace_begin(fb_trace *t, fb_stream s, fb_trace_label l, uint64_t size, fb_error *err);
fb_status fb_trace_end(fb_trace *t, fb_stream s, fb_error *err);
/* A copy, or a wait of the compute stream, with its span. */
fb_status fb_traced_upload(fb_device *d, fb_trace *t, fb_trace_label l, void *dst, const void *src, uint64_t size, fb_error *err);
fb_status fb_traced_download(fb_device *d, fb_trace *t, fb_trace_label l, void *dst, const void *src, uint64_t size, fb_error *err);
fb_status fb_traced_wait(fb_device *d, fb_trace *t, fb_trace_label l, fb_event *e, fb_error *err);

double    fb_trace_now(const fb_trace *t);
/* The host did what the label says from `since` until now.  Less than a microsecond is nothing. */
void      fb_trace_host(fb_trace *t, fb_trace_label l, double since);
/* A worker's thread, for itself alone: it has updated n elements of the block from `since` until now. */
void      fb_trace_update(fb_trace *t, uint32_t worker, uint32_t block, uint64_t n, double since);

/* ---- what comes of it ---- */

typedef struct fb_trace_account {
    double   begin, end;             /* the step: from the end of the one before; they lie on fb_trace_now's clock */
    double   work;                   /* seconds in which the compute stream computed */
    double   idle[FB_CAUSE_COUNT];   /* work + sum of idle == end - begin */
    double   h2d, d2h, update;       /* seconds of copying; of updating, summed over workers */
    uint64_t h2d_size, d2h_size, n_updated; /* bytes, bytes, elements */
    uint64_t n_lost;                 /* spans that did not fit, so far: the account is short of them */
} fb_trace_account;

/* The first step begins now, not with new. */
void      fb_trace_start(fb_trace *t);
/* Every stream is synced: the step ends here, and what is recorded from now on is the next one's. */
fb_status fb_trace_cut(fb_trace *t, fb_error *err);
/* After the cut, once: the account.  Waits for no stream. */
fb_status fb_trace_step(fb_trace *t, fb_error *err);
/* Of the last step. */
const fb_trace_account *fb_trace_account_of(const fb_trace *t);
/* The steps that are kept, as JSON that Perfetto and chrome://tracing read: one track a stream, worker, slot, and the
 * host.  Source: "Trace Event Format", complete events and metadata events. */
fb_status fb_trace_write(const fb_trace *t, const char *path, fb_error *err);

#endif
