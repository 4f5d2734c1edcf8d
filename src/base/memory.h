/* memory.h - what the system says about memory. */
#ifndef FB_BASE_MEMORY_H
#define FB_BASE_MEMORY_H

#include "base/error.h"

/* Bytes this process could still take, and what sets that limit, as a noun: "cgroup /a/b (memory.max)".  Considered: the
 * machine's MemAvailable (never swap: what streams must not), each cgroup limit on the way to the root (v2 and v1, pages of
 * files not counted), the limits on address space and data, the commit limit where the kernel overcommits nothing. */
typedef struct fb_memory_room {
    uint64_t bytes;
    char     limit[160];
} fb_memory_room;

bool     fb_memory_room_now(fb_memory_room *room); /* false: the system does not say */
uint64_t fb_memory_available(void);                /* its bytes; 0: the system does not say */
/* What taking so many bytes takes beside them, on the same accounts, unseen by a ledger of allocations: page tables (8 bytes
 * a page, twice where a driver pins them), thread stacks, the buffers of files being written. */
uint64_t fb_memory_unseen(uint64_t bytes);
/* Anonymous resident bytes of this process now. */
uint64_t fb_memory_resident(void);

#endif
