/* flow.h - what runs at once in a simulated step: three streams, the host, the update workers, and what they share.
 *
 * Streams run what they were given in order, each operation once the marks before it are reached.  Time goes on only while the
 * host waits or works; between two events everything goes at a constant rate: copies share the link, copies and updates the
 * host's memory, and on a unified machine all share the cores.  Nothing is allocated. */
#ifndef FB_PLAN_FLOW_H
#define FB_PLAN_FLOW_H

#include "plan/cost.h"
#include "plan/timeline.h"

enum { FB_FLOW_COMPUTE, FB_FLOW_H2D, FB_FLOW_D2H, FB_FLOW_STREAMS };
/* As many layers as a configuration may have, 512, and what is around them. */
enum { FB_FLOW_QUEUE = 1024, FB_FLOW_BLOCKS = 520 };

/* Reached when the stream has done its first `seq` operations. */
typedef struct fb_mark {
    uint32_t stream, seq;
} fb_mark;

typedef struct fb_flow_op {
    double   left;                /* seconds, alone */
    uint32_t wait[FB_FLOW_STREAMS];      /* how far each stream must have got */
    uint8_t  cause[FB_FLOW_STREAMS];     /* fb_cause of that wait */
    uint8_t  work;                /* fb_work */
    bool     lands;               /* a slab: an update follows */
    uint32_t block;
    uint64_t n;                   /* elements that land */
} fb_flow_op;

typedef struct fb_flow_stream {
    fb_flow_op ring[FB_FLOW_QUEUE];
    uint32_t head, tail;          /* counters: done, enqueued */
    uint32_t wait[FB_FLOW_STREAMS];      /* for the next operation */
    uint8_t  cause[FB_FLOW_STREAMS];
    double   begun;               /* of the head operation; < 0: it has not */
} fb_flow_stream;

typedef struct fb_flow_job {
    uint32_t block;
    bool     slab;
    double   left; /* elements */
    uint64_t n;
} fb_flow_job;

typedef enum {
    FB_UNTIL_CLEAN,     /* arg: the block */
    FB_UNTIL_ALL_CLEAN,
    FB_UNTIL_MARK,
    FB_UNTIL_SLAB,      /* one is free */
    FB_UNTIL_TIME,      /* the host has done its own work */
    FB_UNTIL_REST,      /* every stream has */
    FB_UNTIL_ROOM       /* in the queue of stream arg */
} fb_until;

typedef struct fb_flow {
    const fb_costs    *c;
    const fb_manifest *m;
    fb_timeline       *t;
    double         now, host_left;
    fb_cause       host_cause;                /* what the host is waiting for */
    fb_flow_stream streams[FB_FLOW_STREAMS];
    fb_flow_job    jobs[FB_FLOW_QUEUE];       /* of the update workers, the oldest first */
    uint32_t       job_head, job_tail;
    double         job_begun;
    uint64_t       remaining[FB_FLOW_BLOCKS]; /* elements of a block's update; 0: clean */
    uint32_t       n_dirty, n_slab_free;
} fb_flow;

void fb_flow_init(fb_flow *f, fb_timeline *t, const fb_manifest *m, const fb_costs *c, uint32_t n_slab);

/* Reached when the stream has done what it has been given so far. */
fb_mark fb_flow_mark(const fb_flow *f, int stream);
/* The stream's next operation waits for the mark; cause: what that wait counts as. */
void    fb_flow_after(fb_flow *f, int stream, fb_mark mark, fb_cause cause);
fb_flow_op *fb_flow_enqueue(fb_flow *f, int stream, double seconds, fb_work work, uint32_t block);
void    fb_flow_upload(fb_flow *f, uint64_t size, fb_work work, uint32_t block);
fb_flow_op *fb_flow_download(fb_flow *f, uint64_t size, fb_work work, uint32_t block);

/* The host does nothing until then. */
void    fb_flow_host_waits(fb_flow *f, fb_until what, uint32_t arg, fb_mark mark, fb_cause cause);
void    fb_flow_host_works(fb_flow *f, double seconds, fb_work work, fb_cause cause);

/* The block's update is still to come; a part of it can begin. */
void    fb_flow_expect(fb_flow *f, uint32_t block);
void    fb_flow_submit(fb_flow *f, uint32_t block, uint64_t n, bool slab);

#endif
