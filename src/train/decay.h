/* decay.h - which stretches of a block take weight decay: matrices do, norms and biases do not.
 *
 * Neighbouring parameters of one kind are one range; padding belongs to the parameter before it (zero stays zero). */
#ifndef FB_TRAIN_DECAY_H
#define FB_TRAIN_DECAY_H

#include "model/manifest.h"

typedef struct fb_decay_range {
    uint64_t first, n; /* elements of the block */
    bool     decay;
} fb_decay_range;

typedef struct fb_decay {
    fb_decay_range *ranges;
    uint32_t       *first; /* [n_block + 1] into ranges */
} fb_decay;

fb_status fb_decay_init(fb_decay *d, const fb_manifest *m, fb_error *err);
void      fb_decay_deinit(fb_decay *d); /* a zeroed struct is fine */

#endif
