#include "device/plugin.h"

#include "base/beside.h"

#include <dlfcn.h>
#include <string.h>

enum { PATH_SIZE = 4096 };

#define LIBRARY "libforebay_cuda.so"

/* Whether the driver is there and sees a GPU.  Asked of the driver itself before anything of ours is loaded, because the
 * plug-in needs libraries that a machine without a GPU has no reason to have.  Source: CUDA driver API, CUresult. */
static fb_status find_gpu(bool *absent, fb_error *err)
{
    enum { STUB_LIBRARY = 34, NO_DEVICE = 100 };
    int (*init)(unsigned), (*count)(int *);
    int n = 0, e;
    *absent = true;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL); /* stays loaded: the plug-in uses it */
    if (!driver)
        return fb_fail(err, FB_CONFIG, "backend 'cuda': there is no NVIDIA driver here (libcuda.so.1 is missing); install it, "
                       "or use backend: cpu");
    *(void **)&init = dlsym(driver, "cuInit");
    *(void **)&count = dlsym(driver, "cuDeviceGetCount");
    e = init && count ? init(0) : STUB_LIBRARY;
    if (e == STUB_LIBRARY)
        return fb_fail(err, FB_CONFIG, "backend 'cuda': the libcuda.so.1 found is not an NVIDIA driver but a stand-in for linking; "
                       "install the driver, or use backend: cpu");
    if (e == 0)
        e = count(&n);
    if (e == NO_DEVICE || (e == 0 && n == 0))
        return fb_fail(err, FB_CONFIG, "backend 'cuda': the driver sees no GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES, or use "
                       "backend: cpu");
    *absent = false;
    if (e != 0)
        return fb_fail(err, FB_CONFIG, "backend 'cuda': the NVIDIA driver does not start (CUDA error %d); see nvidia-smi, or use "
                       "backend: cpu", e);
    return FB_OK;
}

/* The first of the places where the plug-in may lie. */
static bool find_library(char *out)
{
    static const char *const places[] = { "", "/forebay", "/../lib", "/../lib/forebay", "/..",
#ifdef FB_PRIVATE_LIBDIR
                                          "/../" FB_PRIVATE_LIBDIR,
#endif
    };
    return fb_find_beside(out, PATH_SIZE, places, FB_COUNT(places), LIBRARY);
}

/* The loader's sentence, as one about what is missing. */
static fb_status explain(const char *path, const char *why, fb_error *err)
{
    const char *what = strstr(why, "libcudnn")    ? "cuDNN 9 for CUDA 13"
                       : strstr(why, "libcublas") ? "cuBLAS of CUDA 13"
                                                  : NULL;
    if (what)
        return fb_fail(err, FB_CONFIG, "backend 'cuda': %s is missing or too old (%s); install it or put its folder into "
                       "LD_LIBRARY_PATH, or use backend: cpu", what, why);
    return fb_fail(err, FB_CONFIG, "backend 'cuda': %s does not load (%s); use backend: cpu", path, why);
}

fb_status fb_plugin_open_cuda(fb_device **out, const fb_device_options *o, bool *absent, fb_error *err)
{
    fb_status st = FB_OK;
    char path[PATH_SIZE];
    FB_TRY(find_gpu(absent, err));
    *absent = !find_library(path);
    if (*absent)
        FB_TRY(fb_fail(err, FB_CONFIG, "backend 'cuda': the plug-in " LIBRARY " lies neither beside the program nor in "
                       "../lib/forebay; build it (FB_CUDA=ON), or use backend: cpu"));
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* never closed: CUDA's libraries do not like to be */
    if (!library)
        FB_TRY(explain(path, dlerror(), err));
    const fb_plugin *plugin = dlsym(library, FB_PLUGIN_CUDA);
    if (!plugin)
        FB_TRY(fb_fail(err, FB_CONFIG, "backend 'cuda': %s is not a plug-in of forebay; remove it", path));
    if (strcmp(plugin->version, fb_version()) != 0)
        FB_TRY(fb_fail(err, FB_CONFIG, "backend 'cuda': %s is of version %s, this is %s; install both from one build", path,
                       plugin->version, fb_version()));
    FB_TRY(plugin->open(out, o, err));
done:
    return st;
}
