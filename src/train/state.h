/* state.h - the model's truth: masters, moments, gradients, in host memory or at home on the device.
 *
 * One mapping a component, with huge pages, first touched by the team that will update it; a block's share is
 * contiguous, at base[block] elements, in the manifest's order.  In bfloat16 the master is split: WEIGHTS holds hi,
 * which is what travels, REMAINDERS lo.  In float32 WEIGHTS is the master itself.
 * Blocks that the plan puts at home on the device have all this there, in the arena's HOME regions, and nothing here.
 * Threads: create, load, destroy by one; afterwards disjoint ranges by any. */
#ifndef FB_TRAIN_STATE_H
#define FB_TRAIN_STATE_H

#include <signal.h>

#include "io/shard.h"
#include "model/manifest.h"
#include "plan/plan.h"
#include "train/host_memory.h"

typedef struct fb_state {
    const fb_manifest *manifest;
    fb_dtype           act;
    fb_plan            plan;
    unsigned char     *arena;                     /* device; not ours */
    uint64_t          *base;                      /* [n_block + 1] elements; blocks that are not on the host take none */
    uint64_t          *owned[3];                  /* by fb_own: [n_block + 1] elements on the device, likewise */
    fb_host_memory     window;                    /* pinned: where elements of blocks on the device are read and written */
    fb_host_memory     component[FB_HOST_COUNT];  /* WEIGHTS .. ACCUMULATORS; not mapped: not wanted */
    fb_device         *device;                    /* that the mappings are pinned for */
    const volatile sig_atomic_t *stop;            /* not zero: loading ends with FB_STOPPED; NULL: never */
} fb_state;

/* Maps the components that the plan sizes, touches them (zero), pins what travels; zeroes what is at home in the arena, which
 * is the plan's (NULL: nothing is at home there). */
fb_status fb_state_init(fb_state *s, const fb_manifest *m, const fb_plan *plan, unsigned char *arena, fb_device *device,
                        fb_team *team, fb_error *err);
void      fb_state_deinit(fb_state *s); /* a zeroed struct is fine */

/* Reads every parameter from the set.  FB_INPUT: a weight is not finite (named, with its place).  FB_IO: a file of the set became
 * shorter, or cannot be read. */
fb_status fb_state_load(fb_state *s, const fb_shard_set *set, fb_team *team, fb_error *err);

/* Instead of a checkpoint: norms 1, biases 0, matrices random with deviation 0.02, the same for the same seed whatever the
 * team. */
fb_status fb_state_randomize(fb_state *s, uint64_t seed, fb_team *team, fb_error *err);

/* Host address of element `first` of a block that lives on the host. */
void *fb_state_at(const fb_state *s, fb_plan_host_region component, uint32_t block, uint64_t first);
/* Device address of element `first` of what a block owns there: HOME_WEIGHTS .. BLOCK_ACC. */
void *fb_state_device_at(const fb_state *s, fb_plan_device_region region, uint32_t block, uint64_t first);

/* Whether the block's state lives on the device; it then has no host address. */
bool fb_state_on_device(const fb_state *s, uint32_t block);

/* n elements of a block, wherever it lives: FB_HOST_WEIGHTS is the exact float32 master, FB_HOST_M and _V are the moments; and
 * back.  The state is settled, and the thread is the one that calls the device. */
fb_status fb_state_get(const fb_state *s, fb_plan_host_region part, uint32_t block, uint64_t first, uint64_t n, float *out,
                       fb_error *err);
fb_status fb_state_put(fb_state *s, fb_plan_host_region part, uint32_t block, uint64_t first, uint64_t n, const float *in,
                       fb_error *err);

/* Of a block that lives on the device: enqueues on FB_STREAM_D2H, and does not wait for, the downloads of n elements as they lie
 * there: working weights, low halves (bfloat16; else NULL), moments.  To pinned memory. */
fb_status fb_state_download(const fb_state *s, uint32_t block, uint64_t first, uint64_t n, void *weights, int16_t *low, float *m,
                            float *v, fb_error *err);

/* Of a block that lives on the host: n master weights from element first, as exact float32; and back.  Any thread. */
void fb_state_read(const fb_state *s, uint32_t block, uint64_t first, uint64_t n, float *out);
void fb_state_write(fb_state *s, uint32_t block, uint64_t first, uint64_t n, const float *in);

#endif
