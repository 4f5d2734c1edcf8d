/* The trace against a device whose clock the test sets: what each moment counts as, what is kept, what is written. */
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/clock.h"

static double host_now;
#define fb_clock() host_now
#include "../../src/sched/trace.c"
#undef fb_clock

#include "temp_dir.h"
#include "test_kit.h"

/* ---- a device that does nothing, at a time of our choosing ---- */

enum { LATE = 7 }; /* its clock began so many seconds after the host's */

struct fb_event {
    double time;
};

static double stream_now[FB_STREAM_COUNT]; /* on the host's clock */
static int    n_event, event_new_fails_at, n_copy, n_wait, record_fails;

static fb_status stub_event_new(fb_device *d, fb_event **out, fb_error *err)
{
    (void)d;
    if (event_new_fails_at && n_event + 1 == event_new_fails_at)
        return fb_fail(err, FB_NOMEM, "no more events");
    *out = calloc(1, sizeof **out);
    n_event++;
    return FB_OK;
}

static void stub_event_free(fb_device *d, fb_event *e)
{
    (void)d;
    n_event--;
    free(e);
}

static fb_status stub_record(fb_device *d, fb_stream s, fb_event *e, fb_error *err)
{
    (void)d;
    e->time = stream_now[s] - LATE;
    return record_fails ? fb_fail(err, FB_DEVICE, "record failed") : FB_OK;
}

static fb_status stub_event_time(fb_device *d, fb_event *e, double *seconds, fb_error *err)
{
    (void)d, (void)err;
    *seconds = e->time;
    return FB_OK;
}

static fb_status stub_copy(fb_device *d, fb_stream s, void *dst, const void *src, uint64_t size, fb_error *err)
{
    (void)d, (void)dst, (void)src, (void)err;
    n_copy++;
    stream_now[s] += (double)size; /* a byte a second */
    return FB_OK;
}

static fb_status stub_wait(fb_device *d, fb_stream s, fb_event *e, fb_error *err)
{
    (void)d, (void)e, (void)err;
    n_wait++;
    stream_now[s] += 3;
    return FB_OK;
}

static fb_status stub_sync(fb_device *d, fb_stream s, fb_error *err)
{
    (void)d, (void)s, (void)err;
    return FB_OK;
}

static const fb_device_ops stub_ops = {
    .name = "stub", .event_new = stub_event_new, .event_free = stub_event_free, .upload = stub_copy, .download = stub_copy,
    .record = stub_record, .wait = stub_wait, .sync = stub_sync, .event_time = stub_event_time,
};
static fb_device device = { .ops = &stub_ops };

static void set_all(double now)
{
    host_now = now;
    for (int s = 0; s < FB_STREAM_COUNT; s++)
        stream_now[s] = now;
}

/* Opened at 100 on the host's clock, so that the trace's 0 is there. */
static fb_trace *open_trace(uint32_t n_span, uint32_t n_step)
{
    fb_trace *t;
    fb_error err;
    n_copy = n_wait = record_fails = event_new_fails_at = 0;
    set_all(100);
    if (fb_trace_new(&t, &(fb_trace_options){ .device = &device, .n_span = n_span, .n_block = 6, .n_slot = 2, .n_worker = 2,
                                              .n_step = n_step }, &err) != FB_OK)
        fail_msg("%s", err.msg);
    return t;
}

static void close_trace(fb_trace *t)
{
    fb_trace_free(t);
    assert_int_equal(n_event, 0);
}

/* [from, to) seconds after the trace's opening. */
static void on_stream(fb_trace *t, fb_stream s, fb_trace_label l, double from, double to)
{
    stream_now[s] = 100 + from;
    assert_int_equal(fb_trace_begin(t, s, l, 0, NULL), FB_OK);
    stream_now[s] = 100 + to;
    assert_int_equal(fb_trace_end(t, s, NULL), FB_OK);
}

static void on_host(fb_trace *t, fb_trace_label l, double from, double to)
{
    host_now = 100 + to;
    fb_trace_host(t, l, from);
}

static const fb_trace_account *end_step(fb_trace *t, double at)
{
    set_all(100 + at);
    assert_int_equal(fb_trace_cut(t, NULL), FB_OK);
    assert_int_equal(fb_trace_step(t, NULL), FB_OK);
    return fb_trace_account_of(t);
}

static void near(double got, double want)
{
    if (!(got >= want - 1e-9 && got <= want + 1e-9))
        fail_msg("%.12g, expected %.12g", got, want);
}

/* ---- the account ---- */

static void a_step_by_hand(void **unused)
{
    (void)unused;
    fb_trace *t = open_trace(16, 1);
    host_now = 100.5;
    fb_trace_start(t);
    on_stream(t, FB_STREAM_COMPUTE, FB_LABEL(FORWARD, 1, 0), 1, 2);
    on_stream(t, FB_STREAM_COMPUTE, FB_LABEL(WAIT_WEIGHTS, 2, FB_NO_PART), 2, 2.5);
    on_host(t, FB_LABEL(HOST_UPDATE, 3, FB_NO_PART), 2.25, 2.875); /* its first half under the wait, which counts first */
    on_stream(t, FB_STREAM_COMPUTE, FB_LABEL(FORWARD, 2, 0), 3, 4);
    on_stream(t, FB_STREAM_H2D, FB_LABEL(SEND_WEIGHTS, 2, 1), 1.5, 2.5);
    on_stream(t, FB_STREAM_D2H, FB_LABEL(FETCH_GRADIENT, 2, 1), 4, 4.75);
    on_host(t, FB_LABEL(HOST_END, 5, FB_NO_PART), 3.5, 4.75);
    const fb_trace_account *a = end_step(t, 5);
    near(a->begin, 0.5);
    near(a->end, 5);
    near(a->work, 2);
    near(a->idle[FB_CAUSE_WEIGHTS], 0.5);
    near(a->idle[FB_CAUSE_UPDATE], 0.375);
    near(a->idle[FB_CAUSE_GRADIENTS], 0.75);
    near(a->idle[FB_CAUSE_HOST], 0.5 + 0.125 + 0.25);
    near(a->idle[FB_CAUSE_INPUTS] + a->idle[FB_CAUSE_DATA], 0);
    near(a->h2d, 1);
    near(a->d2h, 0.75);
    a = end_step(t, 8); /* a step in which nothing happened, from where the last one ended */
    near(a->begin, 5);
    near(a->idle[FB_CAUSE_HOST], 3);
    close_trace(t);
}

/* Time in ticks of a second; each tick's meaning by the definition, one at a time. */
static void every_tick_has_its_cause(void **unused)
{
    (void)unused;
    enum { TICKS = 200, SPANS = 64 };
    static const fb_trace_kind stream_kinds[] = { FB_TRACE_FORWARD, FB_TRACE_BACKWARD, FB_TRACE_WAIT_WEIGHTS,
                                                  FB_TRACE_WAIT_GRADIENT, FB_TRACE_WAIT_INPUT, FB_TRACE_WAIT_DATA, FB_TRACE_LOSS };
    static const fb_trace_kind host_kinds[] = { FB_TRACE_HOST_UPDATE, FB_TRACE_HOST_SLAB, FB_TRACE_HOST_GATHER, FB_TRACE_HOST_END };
    uint64_t seed = 5;
    for (int round = 0; round < 200; round++) {
        fb_trace *t = open_trace(SPANS, 2);
        uint32_t past = 0;
        for (int s = 0; s < 2; s++) {
            int means[TICKS];
            double want[FB_CAUSE_UPDATING + 1] = { 0 };
            for (int i = 0; i < TICKS; i++)
                means[i] = FB_CAUSE_HOST;
            for (uint32_t at = random_under(&seed, 12), n = 0; at < TICKS && n < SPANS; n++) { /* first the host's */
                uint32_t end = at + 1 + random_under(&seed, 20);
                fb_trace_label l = { host_kinds[random_under(&seed, 4)], n % 6, FB_NO_PART };
                on_host(t, l, past + at, past + (end < TICKS ? end : TICKS));
                for (uint32_t i = at; i < end && i < TICKS; i++)
                    means[i] = kinds[l.kind].means;
                at = end + 1 + random_under(&seed, 12);
            }
            for (uint32_t at = random_under(&seed, 3) * 7, n = 0; at < TICKS && n < SPANS; n++) {
                uint32_t end = at + random_under(&seed, 15); /* perhaps nothing */
                fb_trace_label l = { stream_kinds[random_under(&seed, 7)], n % 6, FB_NO_PART };
                on_stream(t, FB_STREAM_COMPUTE, l, past + at, past + (end < TICKS ? end : TICKS));
                for (uint32_t i = at; i < end && i < TICKS; i++)
                    means[i] = kinds[l.kind].means;
                at = end + random_under(&seed, 3) * random_under(&seed, 9);
            }
            for (int i = 0; i < TICKS; i++)
                want[means[i]] += 1;
            past += TICKS;
            const fb_trace_account *a = end_step(t, past);
            near(a->work, want[FB_CAUSE_WORK]);
            for (int c = 0; c < FB_CAUSE_COUNT; c++)
                near(a->idle[c], want[c]);
            assert_int_equal(a->n_lost, 0);
        }
        close_trace(t);
    }
}

static void copies_and_waits_happen_within_their_span(void **unused)
{
    (void)unused;
    char memory[8];
    fb_trace *t = open_trace(4, 1);
    set_all(101);
    assert_int_equal(fb_traced_upload(&device, t, FB_LABEL(SEND_WEIGHTS, 1, 0), memory, memory, 4, NULL), FB_OK);
    assert_int_equal(fb_traced_download(&device, t, FB_LABEL(FETCH_GRADIENT, 1, 0), memory, memory, 2, NULL), FB_OK);
    assert_int_equal(fb_traced_wait(&device, t, FB_LABEL(WAIT_INPUT, 1, 0), NULL, NULL), FB_OK);
    const fb_trace_account *a = end_step(t, 10);
    near(a->h2d, 4);
    near(a->d2h, 2);
    near(a->idle[FB_CAUSE_INPUTS], 3);
    assert_int_equal(a->h2d_size, 4);
    assert_int_equal(a->d2h_size, 2);
    record_fails = 1;
    assert_int_equal(fb_traced_wait(&device, t, FB_LABEL(WAIT_INPUT, 1, 0), NULL, NULL), FB_DEVICE);
    close_trace(t);

    n_copy = n_wait = 0; /* untraced, the device is still asked */
    assert_int_equal(fb_traced_upload(&device, NULL, FB_LABEL(SEND_WEIGHTS, 1, 0), memory, memory, 4, NULL), FB_OK);
    assert_int_equal(fb_traced_download(&device, NULL, FB_LABEL(FETCH_INPUT, 1, 0), memory, memory, 4, NULL), FB_OK);
    assert_int_equal(fb_traced_wait(&device, NULL, FB_LABEL(WAIT_INPUT, 1, 0), NULL, NULL), FB_OK);
    assert_int_equal(fb_trace_begin(NULL, FB_STREAM_COMPUTE, FB_LABEL(LOSS, 5, 0), 0, NULL), FB_OK);
    assert_int_equal(fb_trace_end(NULL, FB_STREAM_COMPUTE, NULL), FB_OK);
    assert_int_equal(fb_trace_cut(NULL, NULL), FB_OK);
    assert_int_equal(fb_trace_step(NULL, NULL), FB_OK);
    fb_trace_host(NULL, FB_LABEL(HOST_END, 5, FB_NO_PART), 0);
    fb_trace_update(NULL, 0, 1, 10, 0);
    near(fb_trace_now(NULL), 0);
    assert_int_equal(n_copy, 2);
    assert_int_equal(n_wait, 1);
}

/* Updates are enqueued before the account of the step they follow is made, and run while it is. */
static void what_follows_the_cut_is_the_next_steps(void **unused)
{
    (void)unused;
    fb_trace *t = open_trace(8, 2);
    host_now = 100;
    fb_trace_start(t);
    on_stream(t, FB_STREAM_COMPUTE, FB_LABEL(FORWARD, 1, 0), 0, 1);
    on_stream(t, FB_STREAM_COMPUTE, FB_LABEL(BACKWARD, 1, 0), 1, 3);
    on_host(t, FB_LABEL(HOST_END, 5, FB_NO_PART), 2, 4);
    set_all(104);
    assert_int_equal(fb_trace_cut(t, NULL), FB_OK);
    on_stream(t, FB_STREAM_COMPUTE, FB_LABEL(UPDATE_AT_HOME, 1, FB_NO_PART), 4.5, 6);
    on_stream(t, FB_STREAM_D2H, FB_LABEL(FETCH_STATE, 1, FB_NO_PART), 4.5, 5);
    on_stream(t, FB_STREAM_COMPUTE, FB_LABEL(UPDATE_AT_HOME, 2, FB_NO_PART), 6, 7);
    on_host(t, FB_LABEL(HOST_SAVER, 1, FB_NO_PART), 4, 4.25);
    assert_int_equal(fb_trace_step(t, NULL), FB_OK);
    const fb_trace_account *a = fb_trace_account_of(t);
    near(a->begin, 0);
    near(a->end, 4);
    near(a->work, 3);
    near(a->idle[FB_CAUSE_GRADIENTS], 1);
    near(a->d2h, 0);
    on_stream(t, FB_STREAM_COMPUTE, FB_LABEL(FORWARD, 1, 0), 7, 8);
    a = end_step(t, 8);
    near(a->begin, 4);
    near(a->work, 3.5);
    near(a->d2h, 0.5);
    near(a->idle[FB_CAUSE_UPDATE], 0.25);
    near(a->idle[FB_CAUSE_HOST], 0.25);
    close_trace(t);
}

/* The host learns of the look's event late, now more, now less: the least late tells most. */
static void the_clocks_agree_as_well_as_was_ever_seen(void **unused)
{
    (void)unused;
    fb_trace *t = open_trace(4, 1);
    near(t->offset, LATE - 100.0);
    stream_now[FB_STREAM_COMPUTE] = 110;
    host_now = 110.25;
    assert_int_equal(fb_trace_cut(t, NULL), FB_OK);
    near(t->offset, LATE - 100.0);
    t->offset = 0; /* as if the first looks had been late */
    stream_now[FB_STREAM_COMPUTE] = 120;
    host_now = 120.125;
    assert_int_equal(fb_trace_cut(t, NULL), FB_OK);
    near(t->offset, LATE - 100 + 0.125);
    close_trace(t);
}

static void what_does_not_fit_is_counted(void **unused)
{
    (void)unused;
    fb_trace *t = open_trace(3, 1);
    for (int i = 0; i < 5; i++)
        on_stream(t, FB_STREAM_COMPUTE, FB_LABEL(FORWARD, 1, 0), i, i + 1);
    const fb_trace_account *a = end_step(t, 5);
    near(a->work, 3);
    assert_int_equal(a->n_lost, 2);
    on_stream(t, FB_STREAM_COMPUTE, FB_LABEL(FORWARD, 1, 0), 5, 6); /* there is room again */
    near(end_step(t, 6)->work, 1);
    for (int i = 0; i < LANE_MAX + 3; i++) {
        host_now = 106 + i + 0.5;
        fb_trace_update(t, 1, 1, 10, 6 + i);
    }
    a = end_step(t, 10000);
    assert_int_equal(a->n_lost, 2 + 3);
    assert_int_equal(a->n_updated, 10 * LANE_MAX);
    near(a->update, 0.5 * LANE_MAX);
    close_trace(t);
}

static void a_worker_s_chunks_of_a_block_are_one_span(void **unused)
{
    (void)unused;
    fb_trace *t = open_trace(3, 1);
    const double gap = JOIN_SECONDS / 2;
    for (int i = 0; i < 4; i++) { /* without a pause, in two blocks */
        host_now = 100 + (i + 1) * 0.5;
        fb_trace_update(t, 0, 1 + (uint32_t)i / 2, 10, i * 0.5 + (i ? gap : 0));
    }
    host_now = 103;
    fb_trace_update(t, 0, 2, 10, 2.5); /* after a pause */
    assert_int_equal(t->workers[0].n, 3);
    near(t->workers[0].entries[0].end, 1);
    assert_int_equal(t->workers[0].entries[0].size, 20);
    assert_int_equal(t->workers[1].n, 0);
    fb_trace_host(t, FB_LABEL(HOST_SLAB, 1, 0), 3 - HOST_SECONDS_MIN / 2); /* no wait */
    assert_int_equal(t->host.n, 0);
    assert_int_equal(end_step(t, 4)->n_updated, 50);
    assert_int_equal(t->workers[0].n, 0);
    close_trace(t);
}

static void fails_cleanly_wherever_it_fails(void **unused)
{
    (void)unused;
    fb_trace_options o = { .device = &device, .n_span = 5, .n_block = 6, .n_slot = 2, .n_worker = 2, .n_step = 1 };
    for (int at = 1; at <= 11; at++) {
        fb_trace *t = NULL;
        fb_error err;
        event_new_fails_at = at;
        expect_failure(fb_trace_new(&t, &o, &err), FB_NOMEM, &err, "no more events");
        assert_null(t);
        assert_int_equal(n_event, 0);
    }
    fb_trace_free(NULL);
}

/* ---- the file ---- */

static json_t *written(const fb_trace *t)
{
    fb_error err;
    json_error_t why;
    if (fb_trace_write(t, temp_path("trace.json"), &err) != FB_OK)
        fail_msg("%s", err.msg);
    json_t *root = json_load_file(temp_path("trace.json"), JSON_REJECT_DUPLICATES, &why);
    if (!root)
        fail_msg("line %d: %s", why.line, why.text);
    return root;
}

/* The events of a track, by its name; checks their order. */
static uint32_t track(const json_t *root, const char *name, const json_t *out[16])
{
    const json_t *events = json_object_get(root, "traceEvents"), *e;
    size_t i;
    int pid = -1, tid = -1;
    uint32_t n = 0;
    json_array_foreach((json_t *)events, i, e)
        if (!strcmp(json_string_value(json_object_get(e, "name")), "thread_name")
            && !strcmp(json_string_value(json_object_get(json_object_get(e, "args"), "name")), name)) {
            assert_int_equal(pid, -1); /* the name is of one track */
            pid = (int)json_integer_value(json_object_get(e, "pid"));
            tid = (int)json_integer_value(json_object_get(e, "tid"));
        }
    assert_true(pid >= 0);
    double at = 0;
    json_array_foreach((json_t *)events, i, e) {
        if (strcmp(json_string_value(json_object_get(e, "ph")), "X") != 0 || json_integer_value(json_object_get(e, "pid")) != pid
            || json_integer_value(json_object_get(e, "tid")) != tid)
            continue;
        double ts = json_number_value(json_object_get(e, "ts")), dur = json_number_value(json_object_get(e, "dur"));
        assert_true(ts >= at && dur >= 0);
        at = ts + dur;
        assert_true(n < 16);
        out[n++] = e;
    }
    return n;
}

static void expect_event(const json_t *e, const char *name, double from, double to)
{
    assert_string_equal(json_string_value(json_object_get(e, "name")), name);
    near(json_number_value(json_object_get(e, "ts")), 1e6 * from);
    near(json_number_value(json_object_get(e, "dur")), 1e6 * (to - from));
}

static void the_file_has_a_track_for_each(void **unused)
{
    (void)unused;
    const json_t *e[16];
    char memory[4];
    fb_trace *t = open_trace(16, 1);
    /* Slot 0: layer 0, then layer 2; slot 1: layer 1, never used; in the order of enqueueing. */
    set_all(101);
    fb_traced_upload(&device, t, FB_LABEL(SEND_WEIGHTS, 1, 0), memory, memory, 2, NULL);
    on_stream(t, FB_STREAM_COMPUTE, FB_LABEL(FORWARD, 1, 0), 3, 4);
    on_stream(t, FB_STREAM_COMPUTE, FB_LABEL(FORWARD, 1, 1), 4, 6);
    fb_traced_upload(&device, t, FB_LABEL(SEND_WEIGHTS, 2, 1), memory, memory, 2, NULL); /* 3 to 5 */
    stream_now[FB_STREAM_H2D] = 106;
    fb_traced_upload(&device, t, FB_LABEL(SEND_WEIGHTS, 3, 0), memory, memory, 1, NULL);
    on_stream(t, FB_STREAM_COMPUTE, FB_LABEL(WAIT_WEIGHTS, 3, FB_NO_PART), 6, 7);
    on_stream(t, FB_STREAM_COMPUTE, FB_LABEL(BACKWARD, 3, 0), 7, 8);
    on_stream(t, FB_STREAM_COMPUTE, FB_LABEL(LOSS, 5, 0), 8, 9);
    on_host(t, FB_LABEL(HOST_GATHER, 0, 1), 1, 2);
    host_now = 105;
    fb_trace_update(t, 1, 5, 30, 4);
    end_step(t, 10);
    json_t *root = written(t);
    assert_int_equal(track(root, "compute", e), 5);
    expect_event(e[0], "forward, layer 0", 3, 4);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(e[1], "args"), "micro_batch")), 1);
    expect_event(e[2], "wait for weights, layer 2", 6, 7);
    expect_event(e[4], "head and loss, head", 8, 9);
    assert_int_equal(track(root, "h2d", e), 3);
    expect_event(e[0], "weights, layer 0", 1, 3);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(e[0], "args"), "bytes")), 2);
    assert_int_equal(track(root, "d2h", e), 0);
    assert_int_equal(track(root, "waits", e), 1);
    expect_event(e[0], "gather rows, embedding", 1, 2);
    assert_int_equal(track(root, "update worker 0", e), 0);
    assert_int_equal(track(root, "update worker 1", e), 1);
    expect_event(e[0], "update, head", 4, 5);
    assert_int_equal(track(root, "slot 0", e), 2);
    expect_event(e[0], "layer 0", 1, 6);
    expect_event(e[1], "layer 2", 6, 8);
    assert_int_equal(track(root, "slot 1", e), 1);
    expect_event(e[0], "layer 1", 3, 5);
    assert_int_equal(track(root, "head slot", e), 0);
    json_decref(root);
    close_trace(t);
}

static void the_newest_steps_are_kept(void **unused)
{
    (void)unused;
    fb_trace *t = open_trace(4, 2);
    uint64_t n = 0;
    for (int s = 0; s < 60; s++, n += 4) {
        for (int i = 0; i < 4; i++)
            on_stream(t, FB_STREAM_COMPUTE, FB_LABEL(FORWARD, 1, 0), 4 * s + i, 4 * s + i + 1);
        end_step(t, 4 * s + 4);
    }
    json_t *root = written(t), *other = json_object_get(root, "otherData"), *e, *newest = NULL;
    size_t i, seen = 0;
    assert_int_equal(json_integer_value(json_object_get(other, "spans")), t->capacity);
    assert_int_equal(json_integer_value(json_object_get(other, "spans_not_kept")), n - t->capacity);
    json_array_foreach(json_object_get(root, "traceEvents"), i, e)
        if (!strcmp(json_string_value(json_object_get(e, "ph")), "X"))
            seen++, newest = e;
    assert_int_equal(seen, t->capacity);
    expect_event(newest, "forward, layer 0", 239, 240);
    json_decref(root);
    fb_error err;
    expect_failure(fb_trace_write(t, temp_path("none/trace.json"), &err), FB_IO, &err,
                   "none/trace.json: the trace cannot be written");
    expect_failure(fb_trace_write(t, "/dev/full", &err), FB_IO, &err, "could not be written whole");
    close_trace(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_by_hand),
        cmocka_unit_test(every_tick_has_its_cause),
        cmocka_unit_test(copies_and_waits_happen_within_their_span),
        cmocka_unit_test(what_follows_the_cut_is_the_next_steps),
        cmocka_unit_test(the_clocks_agree_as_well_as_was_ever_seen),
        cmocka_unit_test(what_does_not_fit_is_counted),
        cmocka_unit_test(a_worker_s_chunks_of_a_block_are_one_span),
        cmocka_unit_test(fails_cleanly_wherever_it_fails),
        cmocka_unit_test(the_file_has_a_track_for_each),
        cmocka_unit_test(the_newest_steps_are_kept),
    };
    return cmocka_run_group_tests(tests, temp_dir_make, temp_dir_remove);
}
