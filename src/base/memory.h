/* memory.h - what the system says about memory. */
#ifndef FB_BASE_MEMORY_H
#define FB_BASE_MEMORY_H

#include <stdint.h>

/* Bytes this process could still take: the least of MemAvailable and the room under each cgroup limit (v2 and v1)
 * on the way to the root.  0: the system does not say. */
uint64_t fb_memory_available(void);
/* Anonymous resident bytes of this process now. */
uint64_t fb_memory_resident(void);

#endif
