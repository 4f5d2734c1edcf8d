/* stream.c - the CPU device: an arena that plays device memory, threads that play streams.
 *
 * Each stream is a thread that takes commands from a ring, in order.  A command is a function and a copy of its
 * arguments.  Streams meet only at events, as on a GPU, so that a missing wait is a real race here too and
 * every scheduling rule is exercised where there is no GPU.  With inline_run there are no threads: each
 * command runs at the call, which is the strictest order there is. */
#include "device/cpu/stream.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/clock.h"

enum { RING_SIZE = 512, COMMAND_SIZE = 352, MEMORY_ALIGN = 256 };

typedef struct command {
    fb_cpu_command_fn run;
    _Alignas(16) unsigned char args[COMMAND_SIZE];
} command;

typedef struct stream {
    struct fb_cpu *cpu;
    pthread_t       thread;
    bool            started, stop;
    pthread_mutex_t lock;
    pthread_cond_t  filled, drained;
    uint64_t        head, tail; /* commands taken and finished / enqueued */
    command         ring[RING_SIZE];
} stream;

struct fb_event {
    uint64_t recorded; /* by the enqueueing thread */
    uint64_t reached;  /* under cpu->event_lock */
    double   time;     /* of that, likewise */
};

typedef struct block { /* an allocation, to know its size at free */
    void    *mem;
    uint64_t size;
    struct block *next;
} block;

struct fb_cpu {
    fb_device       device; /* first: a fb_device * is a struct fb_cpu * */
    fb_cpu_scratch  scratch;
    uint64_t        memory_max, used, peak;
    block          *blocks;
    bool            inline_run;
    stream          streams[FB_STREAM_COUNT];
    pthread_mutex_t event_lock;
    pthread_cond_t  event_reached;
};

static struct fb_cpu *cpu_of(fb_device *d)
{
    return (struct fb_cpu *)d;
}

fb_cpu_scratch *fb_cpu_scratch_get(fb_cpu *c)
{
    return &c->scratch;
}

/* ---- streams ---- */

static void *stream_main(void *arg)
{
    stream *s = arg;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (s->head == s->tail && !s->stop)
            pthread_cond_wait(&s->filled, &s->lock);
        if (s->head == s->tail)
            break;
        command *c = &s->ring[s->head % RING_SIZE];
        pthread_mutex_unlock(&s->lock);
        c->run(s->cpu, c->args);
        pthread_mutex_lock(&s->lock);
        s->head++; /* only now: the ring's entry is ours until the command is done, and sync means done */
        pthread_cond_signal(&s->drained);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

fb_status fb_cpu_enqueue(fb_device *d, fb_stream which, fb_cpu_command_fn run, const void *args, size_t size)
{
    struct fb_cpu *c = cpu_of(d);
    assert(size <= COMMAND_SIZE);
    if (c->inline_run) {
        _Alignas(16) unsigned char copy[COMMAND_SIZE];
        memcpy(copy, args, size);
        run(c, copy);
        return FB_OK;
    }
    stream *s = &c->streams[which];
    pthread_mutex_lock(&s->lock);
    while (s->tail - s->head == RING_SIZE)
        pthread_cond_wait(&s->drained, &s->lock);
    command *slot = &s->ring[s->tail % RING_SIZE];
    slot->run = run;
    memcpy(slot->args, args, size);
    s->tail++;
    pthread_cond_signal(&s->filled);
    pthread_mutex_unlock(&s->lock);
    return FB_OK;
}

static fb_status cpu_sync(fb_device *d, fb_stream which, fb_error *err)
{
    (void)err;
    struct fb_cpu *c = cpu_of(d);
    stream *s = &c->streams[which];
    if (c->inline_run)
        return FB_OK;
    pthread_mutex_lock(&s->lock);
    while (s->head != s->tail)
        pthread_cond_wait(&s->drained, &s->lock);
    pthread_mutex_unlock(&s->lock);
    return FB_OK;
}

/* ---- events ---- */

typedef struct event_args {
    fb_event *event;
    uint64_t  value;
} event_args;

static void run_record(struct fb_cpu *c, void *args)
{
    event_args *a = args;
    pthread_mutex_lock(&c->event_lock);
    assert(a->value > a->event->reached); /* a record that overtakes an earlier one would let a wait through too soon */
    a->event->reached = a->value;
    a->event->time = fb_clock();
    pthread_cond_broadcast(&c->event_reached);
    pthread_mutex_unlock(&c->event_lock);
}

static void run_wait(struct fb_cpu *c, void *args)
{
    event_args *a = args;
    pthread_mutex_lock(&c->event_lock);
    while (a->event->reached < a->value)
        pthread_cond_wait(&c->event_reached, &c->event_lock);
    pthread_mutex_unlock(&c->event_lock);
}

static fb_status cpu_event_new(fb_device *d, fb_event **out, fb_error *err)
{
    (void)d;
    fb_event *e = calloc(1, sizeof *e);
    if (!e)
        return fb_fail(err, FB_NOMEM, "cpu device: no memory for an event");
    *out = e;
    return FB_OK;
}

static void cpu_event_free(fb_device *d, fb_event *e)
{
    (void)d;
    free(e);
}

static fb_status cpu_record(fb_device *d, fb_stream s, fb_event *e, fb_error *err)
{
    (void)err;
    event_args a = { e, __atomic_add_fetch(&e->recorded, 1, __ATOMIC_RELAXED) };
    return fb_cpu_enqueue(d, s, run_record, &a, sizeof a);
}

static fb_status cpu_wait(fb_device *d, fb_stream s, fb_event *e, fb_error *err)
{
    (void)err;
    event_args a = { e, __atomic_load_n(&e->recorded, __ATOMIC_RELAXED) };
    return fb_cpu_enqueue(d, s, run_wait, &a, sizeof a);
}

static fb_status cpu_event_wait_host(fb_device *d, fb_event *e, fb_error *err)
{
    (void)err;
    event_args a = { e, __atomic_load_n(&e->recorded, __ATOMIC_RELAXED) };
    run_wait(cpu_of(d), &a);
    return FB_OK;
}

static fb_status cpu_event_time(fb_device *d, fb_event *e, double *seconds, fb_error *err)
{
    (void)err;
    struct fb_cpu *c = cpu_of(d);
    pthread_mutex_lock(&c->event_lock);
    assert(e->reached && e->reached == e->recorded);
    *seconds = e->time;
    pthread_mutex_unlock(&c->event_lock);
    return FB_OK;
}

/* ---- copies ---- */

typedef struct copy_args {
    void       *dst;
    const void *src;
    uint64_t    size;
} copy_args;

static void run_copy(struct fb_cpu *c, void *args)
{
    (void)c;
    copy_args *a = args;
    memcpy(a->dst, a->src, a->size);
}

static void run_zero(struct fb_cpu *c, void *args)
{
    (void)c;
    copy_args *a = args;
    memset(a->dst, 0, a->size);
}

static fb_status cpu_copy(fb_device *d, fb_stream s, void *dst, const void *src, uint64_t size, fb_error *err)
{
    (void)err;
    copy_args a = { dst, src, size };
    return fb_cpu_enqueue(d, s, run_copy, &a, sizeof a);
}

static fb_status cpu_fill_zero(fb_device *d, fb_stream s, void *dst, uint64_t size, fb_error *err)
{
    (void)err;
    copy_args a = { dst, NULL, size };
    return fb_cpu_enqueue(d, s, run_zero, &a, sizeof a);
}

typedef struct call_args {
    void (*fn)(void *arg, bool failed);
    void *arg;
} call_args;

static void run_call(struct fb_cpu *c, void *args)
{
    (void)c;
    call_args *a = args;
    a->fn(a->arg, false);
}

static fb_status cpu_call(fb_device *d, fb_stream s, void (*fn)(void *arg, bool failed), void *arg, fb_error *err)
{
    (void)err;
    call_args a = { fn, arg };
    return fb_cpu_enqueue(d, s, run_call, &a, sizeof a);
}

/* ---- memory ---- */

typedef struct touched {
    unsigned char *mem;
    uint64_t       size;
} touched;

enum { TOUCH_SIZE = 2 << 20 };

static void touch_task(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    const touched *t = ctx;
    uint64_t first = task * TOUCH_SIZE;
    memset(t->mem + first, 0, t->size - first < TOUCH_SIZE ? t->size - first : TOUCH_SIZE);
}

/* A device has its memory from the start; here the system gives pages at their first use, so they are used. */
static void touch(struct fb_cpu *c, void *mem, uint64_t size)
{
    fb_team_run(c->scratch.team, (size + TOUCH_SIZE - 1) / TOUCH_SIZE, touch_task, &(touched){ mem, size });
}

static fb_status cpu_alloc(fb_device *d, uint64_t size, void **out, fb_error *err)
{
    struct fb_cpu *c = cpu_of(d);
    if (c->memory_max && (size > c->memory_max || c->used > c->memory_max - size))
        return fb_fail(err, FB_NOFIT, "cpu device: %.1f MiB asked of an arena of %.1f MiB with %.1f MiB in use; raise hbm_budget",
                       (double)size / 0x1p20, (double)c->memory_max / 0x1p20, (double)c->used / 0x1p20);
    block *b = size <= SIZE_MAX - 4095 ? malloc(sizeof *b) : NULL;
    uint64_t mapped = (size + 4095) / 4096 * 4096;
    void *mem = !b ? MAP_FAILED : mmap(NULL, mapped ? mapped : 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mem == MAP_FAILED) {
        free(b);
        return fb_fail(err, FB_NOMEM, "cpu device: the system has no %.1f MiB for the arena", (double)size / 0x1p20);
    }
    madvise(mem, mapped, MADV_HUGEPAGE); /* advice only */
    touch(c, mem, mapped);
    *b = (block){ mem, size, c->blocks };
    c->blocks = b;
    c->used += size;
    if (c->used > c->peak)
        c->peak = c->used;
    *out = mem;
    return FB_OK;
}

static void cpu_free(fb_device *d, void *mem)
{
    struct fb_cpu *c = cpu_of(d);
    for (block **at = &c->blocks; mem && *at; at = &(*at)->next) {
        block *b = *at;
        if (b->mem != mem)
            continue;
        *at = b->next;
        c->used -= b->size;
        munmap(b->mem, b->size ? (b->size + 4095) / 4096 * 4096 : 4096);
        free(b);
        return;
    }
    assert(!mem && "not an allocation of this device");
}

/* Plain memory is all this device needs for its copies. */
static fb_status cpu_pin(fb_device *d, void *host, uint64_t size, fb_error *err)
{
    (void)d, (void)host, (void)size, (void)err;
    return FB_OK;
}

static void cpu_unpin(fb_device *d, void *host)
{
    (void)d, (void)host;
}

static void cpu_memory(fb_device *d, uint64_t *used, uint64_t *peak)
{
    *used = cpu_of(d)->used;
    *peak = cpu_of(d)->peak;
}

/* ---- open, close ---- */

static void cpu_close(fb_device *d)
{
    struct fb_cpu *c = cpu_of(d);
    if (!c)
        return;
    for (int i = 0; i < FB_STREAM_COUNT; i++) {
        stream *s = &c->streams[i];
        if (s->started) {
            pthread_mutex_lock(&s->lock);
            s->stop = true;
            pthread_cond_signal(&s->filled);
            pthread_mutex_unlock(&s->lock);
            pthread_join(s->thread, NULL);
        }
        pthread_mutex_destroy(&s->lock);
        pthread_cond_destroy(&s->filled);
        pthread_cond_destroy(&s->drained);
    }
    while (c->blocks)
        cpu_free(d, c->blocks->mem);
    fb_team_free(c->scratch.team);
    free(c->scratch.base);
    pthread_mutex_destroy(&c->event_lock);
    pthread_cond_destroy(&c->event_reached);
    free(c);
}

static void cpu_info(fb_device *d, fb_device_info *out)
{
    (void)d;
    *out = (fb_device_info){ .name = "cpu", .attention = "own", .unified = true, .dtype = FB_F32,
                             .logits_size = FB_CPU_LOGITS_SIZE };
}

static const fb_device_ops cpu_ops = {
    .name = "cpu", .info = cpu_info,
    .alloc = cpu_alloc, .free = cpu_free, .pin = cpu_pin, .unpin = cpu_unpin,
    .event_new = cpu_event_new, .event_free = cpu_event_free,
    .upload = cpu_copy, .download = cpu_copy, .fill_zero = cpu_fill_zero,
    .record = cpu_record, .wait = cpu_wait, .call = cpu_call, .sync = cpu_sync,
    .event_wait_host = cpu_event_wait_host, .event_time = cpu_event_time, .memory = cpu_memory, .close = cpu_close,
};

fb_status fb_cpu_open(fb_device **out, const fb_device_options *o, fb_error *err)
{
    fb_status st = FB_OK;
    struct fb_cpu *c = calloc(1, sizeof *c);
    if (!c)
        return fb_fail(err, FB_NOMEM, "cpu device: no memory for its streams");
    c->device.ops = &cpu_ops;
    c->device.kernels = &fb_cpu_kernels;
    c->memory_max = o->memory_max;
    c->inline_run = o->inline_run;
    pthread_mutex_init(&c->event_lock, NULL);
    pthread_cond_init(&c->event_reached, NULL);
    for (int i = 0; i < FB_STREAM_COUNT; i++) {
        stream *s = &c->streams[i];
        s->cpu = c;
        pthread_mutex_init(&s->lock, NULL);
        pthread_cond_init(&s->filled, NULL);
        pthread_cond_init(&s->drained, NULL);
    }
    fb_cpu_blas_init();
    uint32_t n_thread = o->n_thread ? o->n_thread : fb_core_count();
    FB_TRY(fb_team_new(&c->scratch.team, n_thread, "compute", err));
    c->scratch.base = aligned_alloc(MEMORY_ALIGN, (size_t)n_thread * FB_CPU_SCRATCH_SIZE);
    if (!c->scratch.base)
        FB_TRY(fb_fail(err, FB_NOMEM, "cpu device: no memory for the scratch of %u threads", n_thread));
    touch(c, c->scratch.base, (uint64_t)n_thread * FB_CPU_SCRATCH_SIZE);
    for (int i = 0; i < FB_STREAM_COUNT && !c->inline_run; i++) {
        stream *s = &c->streams[i];
        if (pthread_create(&s->thread, NULL, stream_main, s) != 0)
            FB_TRY(fb_fail(err, FB_FAILED, "cpu device: the system refuses another thread"));
        s->started = true;
    }
    *out = &c->device;
    c = NULL;
done:
    if (c)
        cpu_close(&c->device);
    return st;
}
