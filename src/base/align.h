/* align.h - sizes on a device: everything starts at a multiple of 256 bytes, which suits every copy and kernel. */
#ifndef FB_BASE_ALIGN_H
#define FB_BASE_ALIGN_H

#include <stdint.h>

static inline uint64_t fb_align(uint64_t size)
{
    return (size + 255) / 256 * 256;
}

#endif
