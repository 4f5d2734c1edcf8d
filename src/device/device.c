#include "device/device.h"

#include <string.h>

#include "device/cpu/cpu.h"
#include "device/fault/fault.h"
#include "device/plugin.h"

fb_status fb_device_open(fb_device **out, const fb_device_options *o, fb_error *err)
{
    const char *name = o->backend ? o->backend : "auto";
    bool any = !strcmp(name, "auto"), absent;
    if (!strncmp(name, "fault:", 6))
        return fb_fault_open(out, o, name + 6, err);
    if (!strcmp(name, "cpu"))
        return fb_cpu_open(out, o, err);
    if (!any && strcmp(name, "cuda") != 0)
        return fb_fail(err, FB_CONFIG, "backend '%s' is unknown; use auto, cpu, cuda or fault:<spec>", name);
    fb_status st = fb_plugin_open_cuda(out, o, &absent, err);
    /* A GPU that is there but cannot be used is an error, not a reason to be a hundred times slower in silence. */
    return st != FB_OK && any && absent ? fb_cpu_open(out, o, err) : st;
}
