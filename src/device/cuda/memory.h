/* memory.h - device memory as the driver sees it, for all processes together. */
#ifndef FB_DEVICE_CUDA_MEMORY_H
#define FB_DEVICE_CUDA_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

/* By the GPU's PCI address, through the driver's management library; needs no context, and makes none.
 * false: the library is not there, or does not know the GPU. */
bool fb_cuda_memory_seen(const char *pci_bus_id, uint64_t *total, uint64_t *free);

#endif
