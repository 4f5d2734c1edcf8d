#include "device/device.h"

#include <string.h>

#include "device/cpu/cpu.h"
#include "device/fault/fault.h"

fb_status fb_device_open(fb_device **out, const fb_device_options *o, fb_error *err)
{
    const char *name = o->backend ? o->backend : "auto";
    if (!strncmp(name, "fault:", 6))
        return fb_fault_open(out, o, name + 6, err);
    if (!strcmp(name, "cpu") || !strcmp(name, "auto"))
        return fb_cpu_open(out, o, err);
    if (!strcmp(name, "cuda"))
        return fb_fail(err, FB_CONFIG, "backend 'cuda': this build has no CUDA back end; use cpu or auto");
    return fb_fail(err, FB_CONFIG, "backend '%s' is unknown; use auto, cpu or fault:<spec>", name);
}
