#include "sched/pool.h"

#include <assert.h>

void fb_pool_init(fb_pool *p, void *base, uint64_t slab_size, uint32_t count)
{
    assert(count >= 1 && count <= 64);
    *p = (fb_pool){ .base = base, .slab_size = slab_size, .count = count, .here = ~UINT64_C(0) >> (64 - count) };
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->given, NULL);
}

void fb_pool_deinit(fb_pool *p)
{
    if (!p->count)
        return;
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->given);
}

void *fb_pool_take(fb_pool *p)
{
    pthread_mutex_lock(&p->lock);
    while (!p->here)
        pthread_cond_wait(&p->given, &p->lock);
    unsigned i = (unsigned)__builtin_ctzll(p->here);
    p->here &= p->here - 1;
    pthread_mutex_unlock(&p->lock);
    return p->base + i * p->slab_size;
}

void fb_pool_give(fb_pool *p, void *slab)
{
    uint64_t offset = (uint64_t)((uintptr_t)slab - (uintptr_t)p->base), i = offset / p->slab_size;
    assert(i < p->count);                 /* not ours: below base wraps, and is caught too */
    assert(offset % p->slab_size == 0);   /* not the start of a slab */
    pthread_mutex_lock(&p->lock);
    assert(!(p->here >> i & 1));          /* given twice */
    p->here |= UINT64_C(1) << i;
    pthread_cond_signal(&p->given);
    pthread_mutex_unlock(&p->lock);
}
