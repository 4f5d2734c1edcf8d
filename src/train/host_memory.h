/* host_memory.h - a mapping of host memory: huge pages where the system gives them, zero, pinned for a device if it is to travel.
 *
 * Threads: as whoever holds it says. */
#ifndef FB_TRAIN_HOST_MEMORY_H
#define FB_TRAIN_HOST_MEMORY_H

#include "base/thread.h"
#include "device/device.h"

typedef struct fb_host_memory {
    unsigned char *at;         /* NULL: nothing is mapped */
    uint64_t       size;       /* whole pages */
    fb_device     *pinned_for; /* NULL: not pinned */
} fb_host_memory;

/* what: for the sentence when there is none.  The team touches the pages, so that they lie near those who use them; NULL: they come
 * at first use.  device NULL: not pinned. */
fb_status fb_host_memory_map(fb_host_memory *out, uint64_t size, const char *what, fb_team *team, fb_device *device, fb_error *err);
void      fb_host_memory_unmap(fb_host_memory *m); /* a zeroed struct is fine */

#endif
