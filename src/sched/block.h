/* block.h - the states of a block on either side of the link; legal moves are data, one function makes them. */
#ifndef FB_SCHED_BLOCK_H
#define FB_SCHED_BLOCK_H

#include "base/error.h"

/* Where a block's working weights are, in the order in which the host enqueues.
 *
 *   HOST --upload enqueued--> PREFETCHING --compute waits for it--> RESIDENT --launch--> COMPUTING
 *    ^                                                                 ^                    |
 *    |                                                                 +-- kept in its slot-+
 *    +------------------------------ RELEASED <---- its slot is wanted, or its weights changed
 *
 * PREFETCHING: h2d owns the slot.  COMPUTING: kernels are being enqueued on it.  RELEASED: the slot is free again. */
#define FB_DEVICE_STATE_MAP(X) X(HOST) X(PREFETCHING) X(RESIDENT) X(COMPUTING) X(RELEASED)

/* What a block's host state is waiting for.
 *
 *   CLEAN --download enqueued--> LANDING --all on the host--> PENDING --a worker takes it--> UPDATING --> CLEAN
 *                                   |                            |                              ^
 *                                   |                            +-- dropped (not finite) -> CLEAN
 *                                   +-- clipping off: pieces are updated while others land -----+
 *
 * An upload of the block's weights needs CLEAN. */
#define FB_HOST_STATE_MAP(X) X(CLEAN) X(LANDING) X(PENDING) X(UPDATING)

#define FB_STATE_ENUM_D(name) FB_BLOCK_##name,
#define FB_STATE_ENUM_H(name) FB_STATE_##name,
typedef enum { FB_DEVICE_STATE_MAP(FB_STATE_ENUM_D) FB_BLOCK_STATE_COUNT } fb_block_state;
typedef enum { FB_HOST_STATE_MAP(FB_STATE_ENUM_H) FB_STATE_COUNT } fb_host_block_state;
#undef FB_STATE_ENUM_D
#undef FB_STATE_ENUM_H

/* The only writers of a state.  An illegal move is a broken promise between our own functions: assert. */
void fb_block_move(uint8_t *state, fb_block_state to);
void fb_host_block_move(uint8_t *state, fb_host_block_state to);

const char *fb_block_state_str(uint8_t state);
const char *fb_host_block_state_str(uint8_t state);

#endif
