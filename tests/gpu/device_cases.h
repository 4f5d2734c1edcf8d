/* device_cases.h - the cuda device itself: order between streams, copies, calls, the budget, and what a failure leaves.
 * It opens devices of its own. */
#ifndef FB_TESTS_GPU_DEVICE_CASES_H
#define FB_TESTS_GPU_DEVICE_CASES_H

#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "compare.h"

#define RUIN_WORD "--ruin-a-device"

static fb_device *d_new(uint64_t memory_max)
{
    fb_device *d;
    must(fb_device_open(&d, &(fb_device_options){ .backend = "cuda", .memory_max = memory_max }, &t.err));
    return d;
}

static unsigned char *host_new(fb_device *d, uint64_t size)
{
    void *mem = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mem == MAP_FAILED) {
        fprintf(stderr, "gave up: no host memory\n");
        exit(1);
    }
    must(d->ops->pin(d, mem, size, &t.err));
    return mem;
}

static void host_free(fb_device *d, unsigned char *mem, uint64_t size)
{
    d->ops->unpin(d, mem);
    munmap(mem, size);
}

/* A ring of hops: h2d puts value i on the device, compute moves it, d2h fetches it, h2d waits for the fetch.  Each hop is
 * ordered only by events, the copies are long, and the buffers are the same each time: a lost wait shows. */
static void order_case(void)
{
    enum { SIZE = 8 << 20, ROUNDS = 40 };
    fb_device *d = d_new(0);
    const fb_device_ops *o = d->ops;
    unsigned char *host = host_new(d, 2 * (uint64_t)ROUNDS * SIZE), *back = host + (uint64_t)ROUNDS * SIZE;
    void *a, *b, *index;
    fb_event *up, *moved, *down;
    must(o->alloc(d, SIZE, &a, &t.err));
    must(o->alloc(d, SIZE, &b, &t.err));
    must(o->alloc(d, 4, &index, &t.err));
    must(o->event_new(d, &up, &t.err));
    must(o->event_new(d, &moved, &t.err));
    must(o->event_new(d, &down, &t.err));
    must(o->fill_zero(d, FB_STREAM_COMPUTE, index, 4, &t.err));
    for (int i = 0; i < ROUNDS; i++)
        memset(host + (uint64_t)i * SIZE, i + 1, SIZE);
    for (int i = 0; i < ROUNDS; i++) {
        must(o->wait(d, FB_STREAM_H2D, moved, &t.err)); /* at first never recorded: must not block */
        must(o->upload(d, FB_STREAM_H2D, a, host + (uint64_t)i * SIZE, SIZE, &t.err));
        must(o->record(d, FB_STREAM_H2D, up, &t.err));
        must(o->wait(d, FB_STREAM_COMPUTE, up, &t.err));
        must(o->wait(d, FB_STREAM_COMPUTE, down, &t.err));
        must(d->kernels->gather_rows(d, &(fb_gather_rows){ .act = FB_F32, .n = 1, .c = SIZE / 4, .x = a, .index = index, .y = b },
                                     &t.err));
        must(o->record(d, FB_STREAM_COMPUTE, moved, &t.err));
        must(o->wait(d, FB_STREAM_D2H, moved, &t.err));
        must(o->download(d, FB_STREAM_D2H, back + (uint64_t)i * SIZE, b, SIZE, &t.err));
        must(o->record(d, FB_STREAM_D2H, down, &t.err));
    }
    must(o->event_wait_host(d, down, &t.err));
    verdict("device: events order three streams", memcmp(host, back, (uint64_t)ROUNDS * SIZE) == 0, "");
    must(o->fill_zero(d, FB_STREAM_D2H, b, SIZE - 1, &t.err));
    must(o->download(d, FB_STREAM_D2H, back, b, SIZE, &t.err));
    must(o->sync(d, FB_STREAM_D2H, &t.err));
    bool zero = back[SIZE - 1] == ROUNDS;
    for (int i = 0; i < SIZE - 1; i++)
        zero = zero && back[i] == 0;
    verdict("device: fill_zero to the byte", zero, "");
    o->event_free(d, up), o->event_free(d, moved), o->event_free(d, down);
    o->free(d, a), o->free(d, b), o->free(d, index);
    host_free(d, host, 2 * (uint64_t)ROUNDS * SIZE);
    o->close(d);
}

typedef struct call_record {
    const unsigned char *watched; /* downloaded before the call */
    uint32_t *n, want;            /* *n counts the calls */
    bool      ok;
} call_record;

static void note_call(void *arg, bool failed)
{
    call_record *r = arg;
    r->ok = !failed && *r->n == r->want && r->watched[0] == (unsigned char)r->want;
    ++*r->n;
}

/* More calls than the device keeps records of; each comes after the copy before it, in order. */
static void call_case(void)
{
    enum { CALLS = 3000, SIZE = 65536 };
    static call_record records[CALLS];
    fb_device *d = d_new(0);
    const fb_device_ops *o = d->ops;
    unsigned char *host = host_new(d, 2 * SIZE);
    void *mem;
    uint32_t n = 0;
    must(o->alloc(d, (uint64_t)256 * SIZE, &mem, &t.err));
    for (int i = 0; i < 256; i++) {
        memset(host, i, SIZE);
        must(o->upload(d, FB_STREAM_H2D, (unsigned char *)mem + i * SIZE, host, SIZE, &t.err));
        must(o->sync(d, FB_STREAM_H2D, &t.err));
    }
    for (uint32_t i = 0; i < CALLS; i++) {
        records[i] = (call_record){ .watched = host + SIZE, .n = &n, .want = i };
        must(o->download(d, FB_STREAM_D2H, host + SIZE, (unsigned char *)mem + i % 256 * SIZE, SIZE, &t.err));
        must(o->call(d, FB_STREAM_D2H, note_call, &records[i], &t.err));
    }
    must(o->sync(d, FB_STREAM_D2H, &t.err));
    bool ok = n == CALLS;
    for (uint32_t i = 0; i < CALLS; i++)
        ok = ok && records[i].ok;
    verdict("device: calls in order, after the copies before them", ok, "");
    host_free(d, host, 2 * SIZE);
    o->free(d, mem);
    o->close(d);
}

typedef struct waiter {
    fb_device *d;
    fb_event  *event;
    const unsigned char *host;
    bool       ok;
} waiter;

static void *wait_on_another_thread(void *arg)
{
    waiter *w = arg;
    fb_error err;
    w->ok = w->d->ops->event_wait_host(w->d, w->event, &err) == FB_OK && w->host[0] == 7;
    return NULL;
}

static void host_wait_case(void)
{
    enum { SIZE = 64 << 20 };
    fb_device *d = d_new(0);
    const fb_device_ops *o = d->ops;
    unsigned char *host = host_new(d, 2 * (uint64_t)SIZE);
    void *mem;
    fb_event *e, *never;
    pthread_t thread;
    must(o->alloc(d, SIZE, &mem, &t.err));
    must(o->event_new(d, &e, &t.err));
    must(o->event_new(d, &never, &t.err));
    memset(host, 7, SIZE);
    must(o->event_wait_host(d, never, &t.err));
    must(o->upload(d, FB_STREAM_D2H, mem, host, SIZE, &t.err));
    must(o->download(d, FB_STREAM_D2H, host + SIZE, mem, SIZE, &t.err));
    must(o->record(d, FB_STREAM_D2H, e, &t.err));
    waiter w = { d, e, host + 2 * (uint64_t)SIZE - 1, false };
    bool started = pthread_create(&thread, NULL, wait_on_another_thread, &w) == 0 && pthread_join(thread, NULL) == 0;
    verdict("device: another thread waits for an event", started && w.ok, "");
    o->event_free(d, e), o->event_free(d, never);
    o->free(d, mem);
    host_free(d, host, 2 * (uint64_t)SIZE);
    o->close(d);
}

static void budget_case(void)
{
    fb_device *d = d_new(64 << 20);
    const fb_device_ops *o = d->ops;
    void *a = NULL, *b = NULL, *c = NULL;
    uint64_t used, peak;
    fb_device_info info;
    bool ok = o->alloc(d, 40 << 20, &a, &t.err) == FB_OK && (uintptr_t)a % 256 == 0;
    ok = ok && o->alloc(d, (24 << 20) + 1, &b, &t.err) == FB_NOFIT && strstr(t.err.msg, "hbm_budget");
    ok = ok && o->alloc(d, UINT64_MAX, &b, &t.err) == FB_NOFIT;
    ok = ok && o->alloc(d, 24 << 20, &c, &t.err) == FB_OK;
    o->memory(d, &used, &peak);
    ok = ok && used == 64 << 20 && peak == used;
    o->free(d, a), o->free(d, NULL);
    o->memory(d, &used, &peak);
    ok = ok && used == 24 << 20 && peak == 64 << 20;
    ok = ok && o->alloc(d, 40 << 20, &a, &t.err) == FB_OK;
    verdict("device: the budget is kept", ok, "");
    o->info(d, &info);
    char figures[160];
    snprintf(figures, sizeof figures, "%s: total %.0f MiB, free %.0f, overhead %.0f, peak %.0f TFLOPS", info.name,
             (double)info.memory_total / 0x1p20, (double)info.memory_free / 0x1p20, (double)info.memory_overhead / 0x1p20,
             info.peak_flops / 1e12);
    verdict("device: info", info.name[0] && info.dtype == FB_BF16 && info.memory_free <= info.memory_total
            && info.memory_overhead < info.memory_free && info.memory_overhead > 64 << 20, figures);
    o->close(d); /* with memory in use */
    d = d_new(0);
    ok = d->ops->alloc(d, (uint64_t)1 << 46, &a, &t.err) == FB_NOFIT && d->ops->sync(d, FB_STREAM_COMPUTE, &t.err) == FB_OK;
    verdict("device: more than the GPU has is refused, and harmless", ok, ok ? "" : t.err.msg);
    d->ops->close(d);
}

/* ---- a failure: in a process of its own, since it ruins the context ---- */

static void note_failure(void *arg, bool failed)
{
    *(int *)arg = failed ? 1 : 2;
}

/* Exit 0: as promised. */
static int ruin_a_device(void)
{
    fb_device *d = d_new(0);
    const fb_device_ops *o = d->ops;
    void *mem;
    fb_event *e;
    fb_error first = { 0 }, later = { 0 };
    int seen[4] = { 0 };
    must(o->alloc(d, 4096, &mem, &t.err));
    must(o->event_new(d, &e, &t.err));
    must(o->fill_zero(d, FB_STREAM_COMPUTE, mem, 4096, &t.err));
    must(o->sync(d, FB_STREAM_COMPUTE, &t.err));
    /* Rows from nowhere: the kernel faults when it runs. */
    must(d->kernels->gather_rows(d, &(fb_gather_rows){ .act = FB_F32, .n = 1, .c = 64, .x = (void *)64, .index = mem, .y = mem },
                                 &t.err));
    o->call(d, FB_STREAM_COMPUTE, note_failure, &seen[0], NULL);
    o->record(d, FB_STREAM_COMPUTE, e, NULL);
    o->wait(d, FB_STREAM_D2H, e, NULL);
    o->call(d, FB_STREAM_D2H, note_failure, &seen[1], NULL);
    for (int i = 0; i < 100 && !seen[0]; i++)
        nanosleep(&(struct timespec){ .tv_nsec = 20000000 }, NULL);
    int unasked = seen[0];
    bool told = o->sync(d, FB_STREAM_COMPUTE, &first) == FB_DEVICE && o->sync(d, FB_STREAM_D2H, &later) == FB_DEVICE;
    o->call(d, FB_STREAM_COMPUTE, note_failure, &seen[2], NULL);
    bool again = o->sync(d, FB_STREAM_COMPUTE, &later) == FB_DEVICE && !strcmp(first.msg, later.msg);
    bool waited = o->event_wait_host(d, e, &later) == FB_DEVICE;
    printf("     it says: %s; calls %d %d %d (1: told of the failure; the first before any sync: %d), again %d, host wait %d\n",
           first.msg, seen[0], seen[1], seen[2], unasked, again, waited);
    fflush(stdout);
    o->event_free(d, e);
    o->close(d);
    return !(told && again && waited && seen[0] == 1 && seen[1] == 1 && seen[2] == 1);
}

static void failure_case(const char *program)
{
    pid_t pid = fork();
    int status = 1;
    if (pid == 0) {
        execl("/proc/self/exe", program, RUIN_WORD, (char *)NULL);
        _exit(1);
    }
    bool ok = pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    verdict("device: a failure is told, stays, and leaves no call out", ok, "");
}

static void unknown_case(void)
{
    fb_device *d;
    bool ok = fb_device_open(&d, &(fb_device_options){ .backend = "cuda", .index = 63 }, &t.err) == FB_CONFIG;
    verdict("device: a GPU that is not there is refused", ok, t.err.msg);
    ok = fb_device_open(&d, &(fb_device_options){ .backend = "auto" }, &t.err) == FB_OK && !strcmp(d->ops->name, "cuda");
    verdict("device: auto takes the GPU", ok, "");
    if (ok)
        d->ops->close(d);
}

static void device_cases(const char *program)
{
    if (t.only && !strstr("device", t.only))
        return;
    order_case();
    call_case();
    host_wait_case();
    budget_case();
    unknown_case();
    failure_case(program);
}

#endif
