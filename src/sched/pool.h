/* pool.h - a fixed number of equal slabs cut from one buffer.
 *
 * Taken by the thread that enqueues, given back by whoever is done with the contents.  Empty is back-pressure, not
 * failure: take waits.  Nothing allocates after init. */
#ifndef FB_SCHED_POOL_H
#define FB_SCHED_POOL_H

#include <pthread.h>

#include "base/error.h"

typedef struct fb_pool {
    unsigned char  *base;
    uint64_t        slab_size; /* bytes */
    uint64_t        here;      /* bit i set: slab i is in the pool */
    uint32_t        count;     /* 1..64, so that one word is the whole state */
    pthread_mutex_t lock;
    pthread_cond_t  given;
} fb_pool;

void  fb_pool_init(fb_pool *p, void *base, uint64_t slab_size, uint32_t count);
void  fb_pool_deinit(fb_pool *p);
void *fb_pool_take(fb_pool *p); /* waits for one */
void  fb_pool_give(fb_pool *p, void *slab);

#endif
