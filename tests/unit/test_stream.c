/* The CPU device: order within a stream and between streams, a full ring, the arena's cap, work at the call. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "../../src/device/cpu/stream.c"
#include "temp_dir.h"
#include "test_kit.h"

static const fb_device_ops *ops;
static fb_device *device;

static int open_device(void **state)
{
    (void)state;
    if (fb_device_open(&device, &(fb_device_options){ .backend = "cpu", .n_thread = 1, .memory_max = 1 << 20 }, NULL) != FB_OK)
        return -1;
    ops = device->ops;
    return 0;
}

static int close_device(void **state)
{
    (void)state;
    ops->close(device);
    return 0;
}

static void nap(unsigned us)
{
    nanosleep(&(struct timespec){ 0, (long)us * 1000 }, NULL);
}

/* ---- what the streams do in these tests ---- */

typedef struct gate { /* a stream stands here until the test opens it */
    pthread_mutex_t lock;
    pthread_cond_t  opened;
    bool            open;
} gate;

#define GATE { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false }

static void open_gate(gate *g)
{
    pthread_mutex_lock(&g->lock);
    g->open = true;
    pthread_cond_broadcast(&g->opened);
    pthread_mutex_unlock(&g->lock);
}

static void stand(void *arg, bool failed)
{
    gate *g = arg;
    assert(!failed);
    pthread_mutex_lock(&g->lock);
    while (!g->open)
        pthread_cond_wait(&g->opened, &g->lock);
    pthread_mutex_unlock(&g->lock);
}

static void dawdle(void *arg, bool failed)
{
    (void)arg, (void)failed;
    nap(3000);
}

static int journal[8], n_journal; /* written by whichever stream is ordered to; not atomic on purpose */

static void note(void *number, bool failed)
{
    assert(!failed);
    journal[n_journal++] = *(const int *)number;
}

static int one = 1, two = 2, three = 3;

static void sync_all(void)
{
    for (int s = 0; s < FB_STREAM_COUNT; s++)
        assert_int_equal(ops->sync(device, (fb_stream)s, NULL), FB_OK);
}

static uint64_t commands_left(fb_stream which)
{
    stream *s = &((struct fb_cpu *)device)->streams[which];
    pthread_mutex_lock(&s->lock);
    uint64_t n = s->tail - s->head;
    pthread_mutex_unlock(&s->lock);
    return n;
}

static fb_event *new_event(void)
{
    fb_event *e;
    assert_int_equal(ops->event_new(device, &e, NULL), FB_OK);
    return e;
}

/* ---- tests ---- */

static void events_order_streams(void **unused)
{
    (void)unused;
    fb_event *a = new_event(), *b = new_event();
    for (int round = 0; round < 5; round++) { /* events are used again */
        n_journal = 0;
        ops->wait(device, FB_STREAM_H2D, a, NULL); /* a's latest record is of an earlier round, or there is none: passes */
        ops->call(device, FB_STREAM_COMPUTE, dawdle, NULL, NULL);
        ops->call(device, FB_STREAM_COMPUTE, note, &one, NULL);
        ops->record(device, FB_STREAM_COMPUTE, a, NULL);
        ops->wait(device, FB_STREAM_H2D, a, NULL);
        ops->call(device, FB_STREAM_H2D, dawdle, NULL, NULL);
        ops->call(device, FB_STREAM_H2D, note, &two, NULL);
        ops->record(device, FB_STREAM_H2D, b, NULL);
        ops->wait(device, FB_STREAM_D2H, b, NULL);
        ops->call(device, FB_STREAM_D2H, note, &three, NULL);
        ops->sync(device, FB_STREAM_D2H, NULL);
        assert_int_equal(n_journal, 3);
        assert_memory_equal(journal, ((int[]){ 1, 2, 3 }), 3 * sizeof(int));
    }
    sync_all();
    ops->event_free(device, a);
    ops->event_free(device, b);
}

static void streams_run_apart_without_events(void **unused)
{
    (void)unused;
    gate g = GATE;
    n_journal = 0;
    ops->call(device, FB_STREAM_COMPUTE, stand, &g, NULL);
    ops->call(device, FB_STREAM_H2D, note, &one, NULL);
    ops->sync(device, FB_STREAM_H2D, NULL); /* would hang if h2d stood behind compute */
    ops->sync(device, FB_STREAM_D2H, NULL);
    assert_int_equal(n_journal, 1);
    open_gate(&g);
    sync_all();
}

/* A wait means the latest record at the call: a later one, however far away, does not hold it up. */
static void a_wait_is_for_the_record_before_it(void **unused)
{
    (void)unused;
    gate g = GATE;
    fb_event *e = new_event();
    ops->record(device, FB_STREAM_COMPUTE, e, NULL);
    ops->wait(device, FB_STREAM_H2D, e, NULL);
    ops->call(device, FB_STREAM_COMPUTE, stand, &g, NULL);
    ops->record(device, FB_STREAM_COMPUTE, e, NULL);
    ops->sync(device, FB_STREAM_H2D, NULL);
    n_journal = 0;
    ops->wait(device, FB_STREAM_D2H, e, NULL);
    ops->call(device, FB_STREAM_D2H, note, &one, NULL);
    ops->call(device, FB_STREAM_D2H, note, &two, NULL);
    nap(2000);
    assert_int_equal(commands_left(FB_STREAM_D2H), 3); /* this wait is for the second record: it stands */
    open_gate(&g);
    ops->event_wait_host(device, e, NULL);
    sync_all();
    assert_int_equal(n_journal, 2);
    ops->event_free(device, e);
}

static void an_event_never_recorded_holds_nobody(void **unused)
{
    (void)unused;
    fb_event *e = new_event();
    assert_int_equal(ops->event_wait_host(device, e, NULL), FB_OK);
    ops->wait(device, FB_STREAM_COMPUTE, e, NULL);
    ops->sync(device, FB_STREAM_COMPUTE, NULL);
    ops->event_free(device, e);
}

static void *wait_on_host(void *e)
{
    ops->event_wait_host(device, e, NULL);
    return (void *)(intptr_t)n_journal; /* ordered by the event alone */
}

static void any_thread_may_wait_for_an_event(void **unused)
{
    (void)unused;
    pthread_t threads[3];
    void *seen;
    gate g = GATE;
    fb_event *e = new_event();
    n_journal = 0;
    ops->call(device, FB_STREAM_D2H, stand, &g, NULL);
    ops->call(device, FB_STREAM_D2H, note, &one, NULL);
    ops->record(device, FB_STREAM_D2H, e, NULL);
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, wait_on_host, e), 0);
    nap(1000);
    open_gate(&g);
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], &seen);
        assert_int_equal((intptr_t)seen, 1);
    }
    ops->event_free(device, e);
}

/* ---- a full ring ---- */

enum { MANY = 3 * RING_SIZE + 7 };

static uint32_t enqueued, ran, out_of_order;
static uint32_t numbers[MANY];

static void count(void *number, bool failed)
{
    (void)failed;
    out_of_order += *(const uint32_t *)number != ran;
    ran++;
}

static void *open_later(void *g)
{
    nap(20000);
    uint32_t n = __atomic_load_n(&enqueued, __ATOMIC_RELAXED);
    open_gate(g);
    return (void *)(uintptr_t)n;
}

static void a_full_ring_holds_the_caller(void **unused)
{
    (void)unused;
    gate g = GATE;
    pthread_t opener;
    void *before;
    enqueued = ran = out_of_order = 0;
    ops->call(device, FB_STREAM_COMPUTE, stand, &g, NULL);
    assert_int_equal(pthread_create(&opener, NULL, open_later, &g), 0);
    for (uint32_t i = 0; i < MANY; i++) {
        numbers[i] = i;
        assert_int_equal(ops->call(device, FB_STREAM_COMPUTE, count, &numbers[i], NULL), FB_OK);
        __atomic_add_fetch(&enqueued, 1, __ATOMIC_RELAXED);
    }
    pthread_join(opener, &before);
    assert_true((uintptr_t)before < RING_SIZE); /* the one that stands takes an entry too */
    ops->sync(device, FB_STREAM_COMPUTE, NULL);
    assert_int_equal(ran, MANY);
    assert_int_equal(out_of_order, 0);
}

static void copies_and_zeroes(void **unused)
{
    (void)unused;
    enum { N = 5000 };
    unsigned char *mem, from[N], to[N];
    void *arena;
    uint64_t seed = 3;
    for (int i = 0; i < N; i++)
        from[i] = (unsigned char)random_bits(&seed);
    memset(to, 0, N);
    assert_int_equal(ops->alloc(device, N, &arena, NULL), FB_OK);
    mem = arena;
    assert_int_equal(ops->pin(device, from, N, NULL), FB_OK);
    ops->upload(device, FB_STREAM_COMPUTE, mem, from, N, NULL);
    ops->fill_zero(device, FB_STREAM_COMPUTE, mem + 100, 50, NULL);
    ops->download(device, FB_STREAM_COMPUTE, to, mem, N, NULL);
    ops->sync(device, FB_STREAM_COMPUTE, NULL);
    memset(from + 100, 0, 50);
    assert_memory_equal(to, from, N);
    ops->unpin(device, from);
    ops->free(device, arena);
    ops->free(device, NULL);
}

static void the_arena_is_capped_at_the_byte(void **unused)
{
    (void)unused;
    fb_error err;
    void *a, *b, *c = &one;
    uint64_t used, peak;
    assert_int_equal(ops->alloc(device, (1 << 20) - 1000, &a, &err), FB_OK);
    assert_int_equal((uintptr_t)a % 256, 0);
    expect_failure(ops->alloc(device, 1001, &c, &err), FB_NOFIT, &err, "hbm_budget");
    assert_ptr_equal(c, &one);
    assert_int_equal(ops->alloc(device, 1000, &b, &err), FB_OK);
    expect_failure(ops->alloc(device, 1, &c, &err), FB_NOFIT, &err, "arena of 1.0 MiB with 1.0 MiB in use");
    expect_failure(ops->alloc(device, UINT64_MAX, &c, &err), FB_NOFIT, &err, "hbm_budget");
    ops->memory(device, &used, &peak);
    assert_int_equal(used, 1 << 20);
    ops->free(device, a);
    ops->memory(device, &used, &peak);
    assert_int_equal(used, 1000);
    assert_int_equal(peak, 1 << 20);
    assert_int_equal(ops->alloc(device, (1 << 20) - 1000, &a, &err), FB_OK); /* b stays: close frees what was not */
}

static void without_a_cap_the_system_decides(void **unused)
{
    (void)unused;
    fb_device *d;
    fb_error err;
    void *mem;
    uint64_t used, peak;
    assert_int_equal(fb_device_open(&d, &(fb_device_options){ .n_thread = 1 }, &err), FB_OK);
    static const uint64_t sizes[] = { UINT64_MAX, UINT64_MAX - 4094, UINT64_MAX / 2, UINT64_C(1) << 60 };
    for (size_t i = 0; i < FB_COUNT(sizes); i++)
        expect_failure(d->ops->alloc(d, sizes[i], &mem, &err), FB_NOMEM, &err, "the system has no");
    d->ops->memory(d, &used, &peak);
    assert_int_equal(used + peak, 0);
    assert_int_equal(d->ops->alloc(d, 0, &mem, &err), FB_OK);
    d->ops->free(d, mem);
    d->ops->close(d);
}

static pthread_t who;

static void remember_thread(void *arg, bool failed)
{
    (void)arg, (void)failed;
    who = pthread_self();
}

static void inline_run_works_at_the_call(void **unused)
{
    (void)unused;
    fb_device *d;
    fb_event *e;
    unsigned char to[4] = { 0 }, from[4] = { 1, 2, 3, 4 };
    assert_int_equal(fb_device_open(&d, &(fb_device_options){ .backend = "cpu", .n_thread = 1, .inline_run = true }, NULL), FB_OK);
    for (int s = 0; s < FB_STREAM_COUNT; s++) {
        memset(&who, 0, sizeof who);
        d->ops->call(d, (fb_stream)s, remember_thread, NULL, NULL);
        assert_true(pthread_equal(who, pthread_self()));
        memset(to, 0, sizeof to);
        d->ops->upload(d, (fb_stream)s, to, from, 4, NULL);
        assert_memory_equal(to, from, 4);
    }
    assert_int_equal(d->ops->event_new(d, &e, NULL), FB_OK);
    d->ops->wait(d, FB_STREAM_H2D, e, NULL);
    d->ops->record(d, FB_STREAM_H2D, e, NULL);
    d->ops->wait(d, FB_STREAM_COMPUTE, e, NULL);
    assert_int_equal(d->ops->event_wait_host(d, e, NULL), FB_OK);
    assert_int_equal(d->ops->sync(d, FB_STREAM_COMPUTE, NULL), FB_OK);
    d->ops->event_free(d, e);
    d->ops->close(d);
}

static void close_finishes_what_is_enqueued(void **unused)
{
    (void)unused;
    fb_device *d;
    assert_int_equal(fb_device_open(&d, &(fb_device_options){ .backend = "auto", .n_thread = 2 }, NULL), FB_OK);
    n_journal = 0;
    d->ops->call(d, FB_STREAM_D2H, dawdle, NULL, NULL);
    d->ops->call(d, FB_STREAM_D2H, note, &one, NULL);
    d->ops->close(d);
    assert_int_equal(n_journal, 1);
}

static void back_ends_by_name(void **unused)
{
    (void)unused;
    fb_device *d = NULL;
    fb_error err;
    expect_failure(fb_device_open(&d, &(fb_device_options){ .backend = "tpu" }, &err), FB_CONFIG, &err, "backend 'tpu' is unknown");
    assert_null(d);
}

int main(void)
{
#define WITH_DEVICE(test) cmocka_unit_test_setup_teardown(test, open_device, close_device)
    const struct CMUnitTest tests[] = {
        WITH_DEVICE(events_order_streams),
        WITH_DEVICE(streams_run_apart_without_events),
        WITH_DEVICE(a_wait_is_for_the_record_before_it),
        WITH_DEVICE(an_event_never_recorded_holds_nobody),
        WITH_DEVICE(any_thread_may_wait_for_an_event),
        WITH_DEVICE(a_full_ring_holds_the_caller),
        WITH_DEVICE(copies_and_zeroes),
        WITH_DEVICE(the_arena_is_capped_at_the_byte),
        cmocka_unit_test(without_a_cap_the_system_decides),
        cmocka_unit_test(inline_run_works_at_the_call),
        cmocka_unit_test(close_finishes_what_is_enqueued),
        cmocka_unit_test(back_ends_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
