#include "sched/schedule.h"

uint32_t fb_schedule_build(fb_visit *visits, uint32_t n_layer, bool backward)
{
    uint32_t n = 0;
    visits[n++] = (fb_visit){ FB_VISIT_EMBED, 0, FB_NEVER };
    for (uint32_t l = 0; l < n_layer; l++)
        visits[n++] = (fb_visit){ FB_VISIT_FORWARD, l, FB_NEVER };
    visits[n++] = (fb_visit){ FB_VISIT_HEAD, 0, FB_NEVER };
    for (uint32_t l = n_layer; backward && l-- > 0;)
        visits[n++] = (fb_visit){ FB_VISIT_BACKWARD, l, FB_NEVER };
    if (backward)
        visits[n++] = (fb_visit){ FB_VISIT_EMBED_BACKWARD, 0, FB_NEVER };
    for (uint32_t i = 0; i < n; i++) {
        if (visits[i].kind == FB_VISIT_FORWARD)
            visits[i].next = backward ? 2 * n_layer + 1 - visits[i].layer : i + n;
        else if (visits[i].kind == FB_VISIT_BACKWARD)
            visits[i].next = 1 + visits[i].layer + n;
    }
    return n;
}

uint32_t fb_slots_find(const fb_slot *slots, uint32_t n, uint32_t layer)
{
    for (uint32_t i = 0; i < n; i++)
        if (slots[i].layer == layer)
            return i;
    return FB_NEVER;
}

uint32_t fb_slots_victim(const fb_slot *slots, uint32_t n, uint32_t when)
{
    uint32_t best = FB_NEVER;
    for (uint32_t i = 0; i < n; i++) {
        if (slots[i].layer == FB_NEVER)
            return i;
        if (slots[i].next_use > when && (best == FB_NEVER || slots[i].next_use > slots[best].next_use))
            best = i;
    }
    return best;
}
