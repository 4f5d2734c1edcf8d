/* kernel_update.c - AdamW over blocks that live on the device: the host's own update, shared over the team. */
#include <math.h>

#include "device/cpu/cpu.h"

enum { UPDATE_TASK = 1 << 16, ROUNDED = 4096 }; /* elements: of a task; rounded at a time, in the task's frame */

static void update_split(const fb_update *a, uint64_t first, uint64_t n)
{
    uint16_t rounded[ROUNDED];
    for (uint64_t i = first; i < first + n; i += ROUNDED) {
        uint64_t k = first + n - i < ROUNDED ? first + n - i : ROUNDED;
        const uint16_t *g = (const uint16_t *)a->g + i;
        if (a->g_dtype == FB_F32) {
            fb_from_f32(rounded, FB_BF16, (const float *)a->g + i, k);
            g = rounded;
        }
        fb_adamw_split_with((uint16_t *)a->w + i, a->low + i, g, a->m + i, a->v + i, k, &a->adamw);
    }
}

static void update_task(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const fb_update *a = ctx;
    uint64_t first = task * UPDATE_TASK, n = a->n - first < UPDATE_TASK ? a->n - first : UPDATE_TASK;
    if (a->act == FB_F32)
        fb_adamw_f32_with((float *)a->w + first, (const float *)a->g + first, a->m + first, a->v + first, n, &a->adamw);
    else
        update_split(a, first, n);
}

void fb_cpu_update(fb_cpu_scratch *s, const fb_update *a)
{
    fb_update args = *a;
    if (!a->guard || isfinite(*a->guard))
        fb_team_run(s->team, (a->n + UPDATE_TASK - 1) / UPDATE_TASK, update_task, &args);
}
