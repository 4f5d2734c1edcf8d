/* activity.h - what a run is doing, for those who ask from another thread.
 *
 * The host thread writes, with plain stores and no lock; anyone reads at any time.  Every write counts as movement, and so does
 * every piece of work that a worker ends: a run whose count stands still is waiting, and the record says for what.
 * All functions take NULL: nobody asks. */
#ifndef FB_BASE_ACTIVITY_H
#define FB_BASE_ACTIVITY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* name, text, whether it has a number (of a layer). */
#define FB_PHASE_MAP(X)                                                                             \
    X(START, "starting", 0)                    X(DATA, "preparing the data", 0)                     \
    X(CHECK, "looking at memory and disk", 0)  X(LOAD, "loading the weights", 0)                    \
    X(BATCH, "assembling the batch", 0)        X(EMBED, "embedding", 0)                             \
    X(FORWARD, "forward of layer", 1)          X(HEAD, "head and loss", 0)                          \
    X(BACKWARD, "backward of layer", 1)        X(EMBED_BACKWARD, "backward of the embedding", 0)    \
    X(STEP_END, "end of the step", 0)          X(EVAL, "evaluating", 0)                             \
    X(SAVE, "saving a checkpoint", 0)          X(FINISH, "writing the model", 0)

/* What the host thread stands at; a number is a block's, but a stream's for SYNC. */
#define FB_WAIT_MAP(X)                                                                                        \
    X(NOTHING, NULL, 0)                           X(UPDATE, "the update of block", 1)                         \
    X(SLAB, "a free slab for the gradient of block", 1) X(STAGING, "a staging buffer for embedding rows", 0)  \
    X(SYNC, "the device, stream", 1)              X(SAVER, "a checkpoint to be on the disk", 0)

#define FB_PHASE_ENUM(name, text, numbered) FB_PHASE_##name,
#define FB_WAIT_ENUM(name, text, numbered) FB_WAIT_##name,
typedef enum { FB_PHASE_MAP(FB_PHASE_ENUM) FB_PHASE_COUNT } fb_phase;
typedef enum { FB_WAIT_MAP(FB_WAIT_ENUM) FB_WAIT_COUNT } fb_wait;
#undef FB_PHASE_ENUM
#undef FB_WAIT_ENUM

typedef struct fb_activity {
    _Atomic uint64_t now;    /* phase, its number, wait, its number: one word, so that they always belong together */
    _Atomic uint64_t moved;  /* counts what the host thread said; one writer */
    _Atomic uint64_t step;   /* in hand, from 1; 0: none yet */
    _Alignas(64) _Atomic uint64_t worked; /* pieces of work ended, by any worker */
    _Atomic uint32_t n_busy; /* workers with a piece in hand */
    _Atomic uint32_t n_worker;
} fb_activity;

void fb_activity_step(fb_activity *a, uint64_t step);
/* A new phase waits for nothing yet. */
void fb_activity_enter(fb_activity *a, fb_phase phase, uint32_t number);
/* FB_WAIT_NOTHING when the wait is over. */
void fb_activity_wait(fb_activity *a, fb_wait wait, uint32_t number);
void fb_activity_workers(fb_activity *a, uint32_t n);
void fb_activity_work_begins(fb_activity *a);
void fb_activity_work_ends(fb_activity *a);

/* Changes whenever anything moves. */
uint64_t fb_activity_count(const fb_activity *a);
/* "step 7, backward of layer 3, waiting for the update of block 4 (2 of 16 workers busy)" */
void fb_activity_say(const fb_activity *a, char *text, size_t size);

#endif
