#include "plan/timeline.h"

#include <stdio.h>

const char *fb_resource_str(fb_resource r)
{
#define TEXT(name, text) text,
    static const char *const names[] = { FB_RESOURCE_MAP(TEXT) };
    return names[r];
}

const char *fb_work_str(fb_work w)
{
    static const char *const names[] = { FB_WORK_MAP(TEXT) };
    return names[w];
}

void fb_timeline_explain(char *buf, size_t size, const fb_timeline *t)
{
    static const char *const why[] = {
        [FB_CAUSE_WEIGHTS] = "it waits for weights to come over the link: more slots, more blocks at home or more tokens "
                             "a step would hide them",
        [FB_CAUSE_GRADIENTS] = "it waits for gradients to leave: more blocks at home or more tokens a step would hide them",
        [FB_CAUSE_UPDATE] = "it waits for the host's update, which hides under the next forward: more blocks at home or "
                            "more tokens a step would shorten the wait",
        [FB_CAUSE_INPUTS] = "it waits for what is kept on the host: more device memory would keep it there",
        [FB_CAUSE_DATA] = "it waits for the batch and the embedding's rows",
        [FB_CAUSE_HOST] = "the host gives it nothing to do",
    };
    double work = t->busy[FB_RESOURCE_COMPUTE], idle = t->seconds - work;
    fb_cause most = FB_CAUSE_WEIGHTS;
    for (fb_cause i = FB_CAUSE_WEIGHTS; i < FB_CAUSE_COUNT; i++)
        most = t->idle[i] > t->idle[most] ? i : most;
    if (idle < 0.02 * t->seconds)
        snprintf(buf, size, "the device's arithmetic bounds the step: it computes %.1f%% of the time", 100 * work / t->seconds);
    else if (idle < 0.5 * t->seconds)
        snprintf(buf, size, "the device computes %.1f%% of the step; most of the rest (%.1f%%) %s", 100 * work / t->seconds,
                 100 * t->idle[most] / t->seconds, why[most]);
    else
        snprintf(buf, size, "the device computes only %.1f%% of the step; most of the rest (%.1f%%) %s", 100 * work / t->seconds,
                 100 * t->idle[most] / t->seconds, why[most]);
}
