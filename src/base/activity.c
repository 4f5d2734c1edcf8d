#include "base/activity.h"

#include <stdio.h>

/* now: phase 8 bits, its number 24, wait 8, its number 24. */
enum { NUMBER_BITS = 24, NUMBER_MASK = (1 << NUMBER_BITS) - 1, HALF = 32 };

static uint64_t half(unsigned kind, uint32_t number)
{
    return (uint64_t)kind << NUMBER_BITS | (number & NUMBER_MASK);
}

static uint64_t load(const _Atomic uint64_t *at)
{
    return atomic_load_explicit(at, memory_order_relaxed);
}

/* One writer: no read-modify-write is needed. */
static void put(fb_activity *a, uint64_t now)
{
    atomic_store_explicit(&a->now, now, memory_order_relaxed);
    atomic_store_explicit(&a->moved, load(&a->moved) + 1, memory_order_relaxed);
}

void fb_activity_step(fb_activity *a, uint64_t step)
{
    if (a)
        atomic_store_explicit(&a->step, step, memory_order_relaxed);
}

void fb_activity_enter(fb_activity *a, fb_phase phase, uint32_t number)
{
    if (a)
        put(a, half(phase, number) << HALF);
}

void fb_activity_wait(fb_activity *a, fb_wait wait, uint32_t number)
{
    if (a)
        put(a, (load(&a->now) >> HALF << HALF) | half(wait, number));
}

void fb_activity_workers(fb_activity *a, uint32_t n)
{
    if (a)
        atomic_store_explicit(&a->n_worker, n, memory_order_relaxed);
}

void fb_activity_work_begins(fb_activity *a)
{
    if (a)
        atomic_fetch_add_explicit(&a->n_busy, 1, memory_order_relaxed);
}

void fb_activity_work_ends(fb_activity *a)
{
    if (!a)
        return;
    atomic_fetch_sub_explicit(&a->n_busy, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&a->worked, 1, memory_order_relaxed);
}

uint64_t fb_activity_count(const fb_activity *a)
{
    return load(&a->moved) + load(&a->worked);
}

#define TEXT(name, text, numbered) { text, numbered },
typedef struct words {
    const char *text;
    bool        numbered;
} words;

void fb_activity_say(const fb_activity *a, char *text, size_t size)
{
    static const words phases[] = { FB_PHASE_MAP(TEXT) }, waits[] = { FB_WAIT_MAP(TEXT) };
    uint64_t now = load(&a->now), step = load(&a->step);
    unsigned phase = (unsigned)(now >> (HALF + NUMBER_BITS)), wait = (unsigned)(now >> NUMBER_BITS & 0xff);
    uint32_t n_worker = atomic_load_explicit(&a->n_worker, memory_order_relaxed), at = (uint32_t)(now >> HALF) & NUMBER_MASK,
             awaited = (uint32_t)now & NUMBER_MASK;
    const words *p = &phases[phase < FB_PHASE_COUNT ? phase : 0], *w = &waits[wait < FB_WAIT_COUNT ? wait : 0];
    char in_step[40] = "", numbers[2][16] = { "", "" }, workers[64] = "";
    if (step)
        snprintf(in_step, sizeof in_step, "step %llu, ", (unsigned long long)step);
    if (p->numbered)
        snprintf(numbers[0], sizeof numbers[0], " %u", at);
    if (w->numbered && wait == FB_WAIT_SYNC) {
        static const char *const streams[] = { "compute", "h2d", "d2h" };
        snprintf(numbers[1], sizeof numbers[1], " %s", awaited < 3 ? streams[awaited] : "?");
    } else if (w->numbered)
        snprintf(numbers[1], sizeof numbers[1], " %u", awaited);
    if (n_worker)
        snprintf(workers, sizeof workers, " (%u of %u workers busy)", atomic_load_explicit(&a->n_busy, memory_order_relaxed),
                 n_worker);
    snprintf(text, size, "%s%s%s%s%s%s%s", in_step, p->text, numbers[0], w->text ? ", waiting for " : "", w->text ? w->text : "",
             numbers[1], workers);
}
