/* update.h - the update workers: AdamW over the host state, under whatever the device is doing.
 *
 * Jobs are pieces of blocks whose gradient is on the host.  Workers take chunks of the oldest job first, so that
 * blocks become clean in the order of submission; elements are independent, so neither the number of workers nor the
 * cut changes a bit.  The updater alone moves a block's host state (sched/block.h).
 * Threads: begin, expect, wait by the engine's thread; submit also from a device's stream (fb_device_ops.call).
 * Nothing allocates after new. */
#ifndef FB_TRAIN_UPDATE_H
#define FB_TRAIN_UPDATE_H

#include "base/activity.h"
#include "optim/adamw.h"
#include "sched/pool.h"
#include "sched/trace.h"
#include "train/decay.h"
#include "train/state.h"

typedef struct fb_updater fb_updater;

/* Elements a worker takes at a time: large against the lock, small against a block.  A checkpoint takes as many, so that what it
 * copies is still in the cache when the worker updates it. */
enum { FB_UPDATE_CHUNK = 1 << 17 };

/* slabs: given back when a job that came in one is done; may be NULL. */
fb_status fb_updater_new(fb_updater **out, fb_state *state, fb_pool *slabs, uint32_t n_thread, fb_error *err);
void      fb_updater_free(fb_updater *u); /* waits for the jobs in hand; NULL is fine */
/* Before the first job.  The trace has as many workers, and outlives the updater; NULL: none. */
void      fb_updater_set_trace(fb_updater *u, fb_trace *trace);

/* As with the trace; wait_all says there which block it waits for. */
void      fb_updater_set_activity(fb_updater *u, fb_activity *activity);
/* Any thread: how many blocks are in which state, to go on a line. */
void      fb_updater_describe(const fb_updater *u, char *text, size_t size);
/* Called before elements of a block are changed, by the worker that is to change them; it may wait.  Before the first job. */
typedef void (*fb_before_update)(void *ctx, uint32_t block, uint64_t first, uint64_t n);
void      fb_updater_set_before(fb_updater *u, fb_before_update fn, void *ctx);

/* The next jobs' hyperparameters.  No job may be in hand. */
void fb_updater_begin(fb_updater *u, const fb_adamw *a);
/* CLEAN -> LANDING: a download of the block's gradient has been enqueued. */
void fb_updater_expect(fb_updater *u, uint32_t block);
/* Elements [first, first + n) of the block have their gradient at g.  slab: whether g is one to give back. */
void fb_updater_submit(fb_updater *u, uint32_t block, uint64_t first, uint64_t n, void *g, bool slab);
/* The same, without an update: the piece counts as done. */
void fb_updater_drop(fb_updater *u, uint32_t block, uint64_t first, uint64_t n, void *g, bool slab);

/* Which stretches of blocks decay; of the updater's life. */
const fb_decay *fb_updater_decay(const fb_updater *u);

bool fb_updater_is_clean(fb_updater *u, uint32_t block);
void fb_updater_wait(fb_updater *u, uint32_t block); /* until it is clean */
void fb_updater_wait_all(fb_updater *u);

#endif
