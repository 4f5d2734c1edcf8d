/* device.h - the one interface to whatever computes.
 *
 * A device is one memory arena, three streams (compute and the two copy directions), events that order them, and a
 * table of kernels.  It never sees a model: it knows pointers, sizes, shapes.
 *
 * Streams run apart; order between them exists only through events, whatever order the host enqueued in.  A wait
 * refers to the most recent record of its event at the time of the call; an event never recorded does not block.
 * Threads: all calls on one fb_device come from one thread, except event_wait_host.  Calls that take a stream, and
 * kernels (which run on FB_STREAM_COMPUTE), only enqueue: their failure surfaces at the next sync or
 * event_wait_host, once, and every later one.  When the queue is full, enqueueing blocks until there is room.
 * Nothing allocates after open, alloc, event_new and reserve. */
#ifndef FB_DEVICE_DEVICE_H
#define FB_DEVICE_DEVICE_H

#include "base/dtype.h"
#include "base/error.h"

typedef enum { FB_STREAM_COMPUTE, FB_STREAM_H2D, FB_STREAM_D2H, FB_STREAM_COUNT } fb_stream;

typedef struct fb_device fb_device;
typedef struct fb_event  fb_event;
typedef struct fb_kernels fb_kernels;

typedef struct fb_device_info {
    char     name[96];        /* of the hardware */
    bool     unified;         /* device memory is host memory */
    fb_dtype dtype;           /* what compute_dtype: auto means here */
    uint64_t memory_total;    /* bytes; 0: the host's */
    uint64_t memory_free;     /* before this process took any */
    uint64_t memory_overhead; /* taken beside the arena: context, libraries, workspaces, kernels, all warm */
    double   peak_flops;      /* dense, in dtype; 0: not known */
    char     attention[160];  /* which kernels attention has used so far, and why not the fastest */
    uint64_t logits_size;     /* bytes of logits at a time at which the head's products run at their full rate */
} fb_device_info;

typedef struct fb_device_ops {
    const char *name;
    void (*info)(fb_device *d, fb_device_info *out);
    /* 256-byte aligned.  Counts against the budget given at open; FB_NOFIT when it is exceeded. */
    fb_status (*alloc)(fb_device *d, uint64_t size, void **out, fb_error *err);
    void      (*free)(fb_device *d, void *mem);
    /* Makes a host range a fast, asynchronous source or destination of copies. */
    fb_status (*pin)(fb_device *d, void *host, uint64_t size, fb_error *err);
    void      (*unpin)(fb_device *d, void *host);
    fb_status (*event_new)(fb_device *d, fb_event **out, fb_error *err);
    void      (*event_free)(fb_device *d, fb_event *e);

    fb_status (*upload)(fb_device *d, fb_stream s, void *dst, const void *pinned, uint64_t size, fb_error *err);
    fb_status (*download)(fb_device *d, fb_stream s, void *pinned, const void *src, uint64_t size, fb_error *err);
    fb_status (*fill_zero)(fb_device *d, fb_stream s, void *dst, uint64_t size, fb_error *err);
    fb_status (*record)(fb_device *d, fb_stream s, fb_event *e, fb_error *err);
    fb_status (*wait)(fb_device *d, fb_stream s, fb_event *e, fb_error *err); /* s waits, not the host */
    /* Runs fn on the host when the stream gets there; fn must be short, must not call the device, and is called
     * after a failure too (with failed = true), so that nobody waits for ever. */
    fb_status (*call)(fb_device *d, fb_stream s, void (*fn)(void *arg, bool failed), void *arg, fb_error *err);
    fb_status (*sync)(fb_device *d, fb_stream s, fb_error *err);
    /* Any thread.  Blocks the host until the most recent record of e has been reached. */
    fb_status (*event_wait_host)(fb_device *d, fb_event *e, fb_error *err);
    /* Seconds, on the device's own clock, at which the most recent record of e was reached; only after a sync has made
     * sure that it was. */
    fb_status (*event_time)(fb_device *d, fb_event *e, double *seconds, fb_error *err);
    /* Bytes of device memory in use now and at most so far, as this back end sees it. */
    void      (*memory)(fb_device *d, uint64_t *used, uint64_t *peak);
    void      (*close)(fb_device *d);
} fb_device_ops;

/* Back ends embed this as their first member. */
struct fb_device {
    const fb_device_ops *ops;
    const fb_kernels    *kernels;
};

typedef struct fb_device_options {
    const char *backend;      /* "auto", "cpu", "cuda", or "fault:<spec>" (fault/fault.h) around the default */
    uint32_t    index;        /* which GPU */
    uint32_t    n_thread;     /* cpu: threads that compute; 0: all cores */
    uint64_t    memory_max;   /* bytes the arena may hold; 0: no cap */
    /* the same bits from run to run at any cost (cuda: attention's backward, no timed choices; cpu always) */
    bool        deterministic;
    bool        inline_run;   /* cpu: no worker threads; every call runs at once (overlap: false) */
} fb_device_options;

/* FB_CONFIG: unknown or unavailable back end.  FB_DEVICE, FB_NOMEM. */
fb_status fb_device_open(fb_device **out, const fb_device_options *o, fb_error *err);

#endif
