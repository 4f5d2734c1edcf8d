/* random.h - splitmix64: Steele, Lea, Flood 2014, figure 11.  Seeded, the same on every machine; not for secrets. */
#ifndef FB_BASE_RANDOM_H
#define FB_BASE_RANDOM_H

#include <stdint.h>

/* The finalizer: every bit of the result depends on every bit of z. */
static inline uint64_t fb_random_mix(uint64_t z)
{
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static const uint64_t FB_RANDOM_STEP = 0x9e3779b97f4a7c15u; /* 2^64 over the golden ratio, odd */

static inline uint64_t fb_random_next(uint64_t *state)
{
    return fb_random_mix(*state += FB_RANDOM_STEP);
}

/* [0, 1), 53 bits. */
static inline double fb_random_uniform(uint64_t *state)
{
    return (double)(fb_random_next(state) >> 11) * 0x1p-53;
}

#endif
