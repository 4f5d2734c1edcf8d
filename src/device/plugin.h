/* plugin.h - back ends that are shared libraries, loaded when they are wanted: one build serves machines with and
 * without a GPU. */
#ifndef FB_DEVICE_PLUGIN_H
#define FB_DEVICE_PLUGIN_H

#include "device/device.h"

/* What libforebay_cuda.so exports, under the name FB_PLUGIN_CUDA.  It has its own copy of the base functions it uses. */
typedef struct fb_plugin {
    const char *version; /* of the sources it was built from: must be ours, as headers are shared */
    fb_status (*open)(fb_device **out, const fb_device_options *o, fb_error *err);
} fb_plugin;

#define FB_PLUGIN_CUDA "fb_plugin_cuda"

/* *absent: there is no GPU, no driver or no plug-in, so that `auto` may go on without; err says which. */
fb_status fb_plugin_open_cuda(fb_device **out, const fb_device_options *o, bool *absent, fb_error *err);

#endif
