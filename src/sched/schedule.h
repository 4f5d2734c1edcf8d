/* schedule.h - a pass as a list of visits, and the slots that the visits share.
 *
 * The list is made once: forward in order, the head, backward in reverse.  Each visit knows when its block is visited
 * next, so that the slot to give up is always the one whose block is wanted last (Belady 1966: optimal, and here the
 * future is known).  The last blocks of the forward are thereby still in their slots when the backward begins.
 * The head has a slot of its own: its size is another. */
#ifndef FB_SCHED_SCHEDULE_H
#define FB_SCHED_SCHEDULE_H

#include "sched/block.h"

typedef enum { FB_VISIT_EMBED, FB_VISIT_FORWARD, FB_VISIT_HEAD, FB_VISIT_BACKWARD, FB_VISIT_EMBED_BACKWARD } fb_visit_kind;

#define FB_NEVER UINT32_MAX

typedef struct fb_visit {
    fb_visit_kind kind;
    uint32_t      layer; /* of FORWARD and BACKWARD */
    uint32_t      next;  /* index of the next visit of this layer, in this pass or (+ n) the one after it */
} fb_visit;

/* Writes at most 2 * n_layer + 3 visits; returns how many.  backward false: a forward-only pass. */
uint32_t fb_schedule_build(fb_visit *visits, uint32_t n_layer, bool backward);

typedef struct fb_slot {
    uint32_t layer;     /* FB_NEVER: empty */
    uint32_t next_use;  /* visit index */
} fb_slot;

/* The slot that holds layer, or FB_NEVER. */
uint32_t fb_slots_find(const fb_slot *slots, uint32_t n, uint32_t layer);
/* The slot that a layer wanted at visit `when` may take: an empty one, else the one wanted last, but only if it is
 * wanted after `when`.  FB_NEVER: none, ask again after the next visit. */
uint32_t fb_slots_victim(const fb_slot *slots, uint32_t n, uint32_t when);

#endif
