#include "device/cuda/memory.h"

#include <dlfcn.h>

/* The few names that are used of NVML, which comes with the driver.  Source: NVML API reference, "Device queries".
 * Looked up at run time, so that a container without it still trains. */
typedef struct nvml_memory {
    unsigned long long total, free, used;
} nvml_memory;

typedef struct nvml {
    int (*init)(void);
    int (*by_pci)(const char *pci_bus_id, void **device);
    int (*memory)(void *device, nvml_memory *out);
    int (*shutdown)(void);
} nvml;

static bool nvml_find(void *library, nvml *n)
{
    *(void **)&n->init = dlsym(library, "nvmlInit_v2");
    *(void **)&n->by_pci = dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2");
    *(void **)&n->memory = dlsym(library, "nvmlDeviceGetMemoryInfo");
    *(void **)&n->shutdown = dlsym(library, "nvmlShutdown");
    return n->init && n->by_pci && n->memory && n->shutdown;
}

bool fb_cuda_memory_seen(const char *pci_bus_id, uint64_t *total, uint64_t *free)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL), *device;
    nvml n;
    nvml_memory m;
    bool seen = false;
    if (library && nvml_find(library, &n) && n.init() == 0) {
        seen = n.by_pci(pci_bus_id, &device) == 0 && n.memory(device, &m) == 0;
        n.shutdown();
    }
    if (library)
        dlclose(library);
    if (seen) {
        *total = m.total;
        *free = m.free;
    }
    return seen;
}
