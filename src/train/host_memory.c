#include "train/host_memory.h"

#include <sys/mman.h>

static const uint64_t PAGE = 4096, HUGE_PAGE = 2u << 20;

static void touch_pages(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const fb_host_memory *m = ctx;
    uint64_t end = (task + 1) * HUGE_PAGE < m->size ? (task + 1) * HUGE_PAGE : m->size;
    for (uint64_t at = task * HUGE_PAGE; at < end; at += PAGE)
        *(volatile unsigned char *)(m->at + at) = 0;
}

fb_status fb_host_memory_map(fb_host_memory *out, uint64_t size, const char *what, fb_team *team, fb_device *device, fb_error *err)
{
    fb_status st = FB_OK;
    size = (size + PAGE - 1) / PAGE * PAGE;
    void *mem = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mem == MAP_FAILED)
        return fb_fail(err, FB_NOMEM, "host memory: the system has no %.1f MiB for %s", (double)size / 0x1p20, what);
    *out = (fb_host_memory){ .at = mem, .size = size };
    madvise(mem, size, MADV_HUGEPAGE); /* advice only */
    if (team)
        fb_team_run(team, (size + HUGE_PAGE - 1) / HUGE_PAGE, touch_pages, out);
    if (!device)
        return FB_OK;
    FB_TRY(device->ops->pin(device, mem, size, err));
    out->pinned_for = device;
done:
    if (st != FB_OK)
        fb_host_memory_unmap(out);
    return st;
}

void fb_host_memory_unmap(fb_host_memory *m)
{
    if (m->pinned_for)
        m->pinned_for->ops->unpin(m->pinned_for, m->at);
    if (m->at)
        munmap(m->at, m->size);
    *m = (fb_host_memory){ 0 };
}
