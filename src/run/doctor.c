/* doctor.c - `forebay doctor`: what this machine and this installation can do, and what is missing. */
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "base/memory.h"
#include "base/thread.h"
#include "device/device.h"
#include "io/python.h"
#include "optim/adamw.h"
#include "run/sink.h"

static void processor(char *name, size_t size)
{
    char line[512];
    snprintf(name, size, "unknown processor");
    FILE *f = fopen("/proc/cpuinfo", "re");
    while (f && fgets(line, sizeof line, f)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) || !colon)
            continue;
        colon[strcspn(colon, "\n")] = 0;
        snprintf(name, size, "%s", colon + 2);
        break;
    }
    if (f)
        fclose(f);
}

/* A device that cannot be opened is a finding, not a failure of the command. */
static bool check_backend(const char *backend, const fb_sink *sink)
{
    fb_device *d;
    fb_error err;
    if (fb_device_open(&d, &(fb_device_options){ .backend = backend, .n_thread = 1 }, &err) != FB_OK) {
        fb_say(sink, FB_SAY_RESULT, "backend %-5s not usable: %s", backend, err.msg);
        return false;
    }
    fb_say(sink, FB_SAY_RESULT, "backend %-5s ok", backend);
    d->ops->close(d);
    return true;
}

static bool check_python(const fb_sink *sink)
{
    fb_python *p;
    fb_error err;
    const char *line;
    json_t *reply = NULL;
    bool ok = false;
    fb_status st = fb_python_start(&p, "forebay.doctor", (const char *const[]){ NULL }, &err);
    if (st == FB_OK) {
        fb_error ended;
        fb_status asked = fb_python_ask(p, "{}", &line, &err);
        if (asked == FB_OK)
            reply = json_loads(line, 0, NULL);
        st = fb_python_finish(p, &ended);
        if (st != FB_OK)
            err = ended;
        else
            st = asked;
    }
    if (st == FB_OK && reply) {
        const char *key;
        json_t *value;
        ok = true;
        json_object_foreach(reply, key, value) {
            fb_say(sink, FB_SAY_RESULT, "python  %-12s %s", key, json_is_string(value) ? json_string_value(value) : "missing");
            ok &= json_is_string(value);
        }
    } else
        fb_say(sink, FB_SAY_RESULT, "python  not usable: %s",
               st == FB_OK ? "it answered with something that is not JSON" : err.msg);
    json_decref(reply);
    return ok;
}

fb_status fb_doctor(const fb_sink *sink, fb_error *err)
{
    static const char *const kernels[] = { "scalar", "avx2", "avx512" };
    char cpu[256], usable[64] = "";
    processor(cpu, sizeof cpu);
    for (size_t i = 0; i < FB_COUNT(kernels); i++)
        if (fb_adamw_select(kernels[i]))
            snprintf(usable + strlen(usable), sizeof usable - strlen(usable), "%s%s", *usable ? ", " : "", kernels[i]);
    fb_adamw_select("auto");
    fb_say(sink, FB_SAY_RESULT, "forebay %s", fb_version());
    fb_say(sink, FB_SAY_RESULT, "cpu     %s, %u cores to use; update kernels: %s (auto: %s)", cpu, fb_core_count(), usable,
           fb_adamw_selected());
    fb_say(sink, FB_SAY_RESULT, "memory  %.1f GiB available", (double)fb_memory_available() / 0x1p30);
    bool cpu_ok = check_backend("cpu", sink);
    check_backend("cuda", sink); /* its absence is no fault */
    bool python_ok = check_python(sink);
    if (!cpu_ok)
        return fb_fail(err, FB_FAILED, "doctor: no back end is usable");
    if (!python_ok)
        return fb_fail(err, FB_FAILED, "doctor: the Python side is not usable, so only pre-made token shards train; run `make "
                       "setup`, or set FOREBAY_PYTHON");
    fb_say(sink, FB_SAY_RESULT, "all that training needs is here");
    return FB_OK;
}
