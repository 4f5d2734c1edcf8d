/* The device that misbehaves as told; and that whatever fails, and when, comes out as a sentence and leaves nothing
 * hanging.  Run it under a sanitizer to see that nothing leaks either. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "../../src/device/fault/fault.c"
#include "engine_rig.h"

#if defined(__SANITIZE_THREAD__) /* a minute and a half for all: two that differ in everything */
enum { LAYOUT_STEP = 3 };
#else
enum { LAYOUT_STEP = 1 };
#endif

static const tiny_model model = { "qwen3", 16, 20, 2, 2, 1, 8, 40, true, NULL, 0 };

static fb_device *open_fault(const char *spec)
{
    fb_device *d = NULL;
    fb_error err;
    if (fb_fault_open(&d, &(fb_device_options){ .n_thread = 1 }, spec, &err) != FB_OK)
        fail_msg("%s", err.msg);
    return d;
}

static void specs_are_read_strictly(void **unused)
{
    (void)unused;
    fb_device *d = open_fault("delay=70,seed=9,fail=upload:3,fail=attention_bwd:2");
    fault *f = (fault *)d;
    assert_int_equal(f->delay_us, 70);
    assert_int_equal(f->random, 9);
    assert_int_equal(f->fail_at[OP_upload], 3);
    assert_int_equal(f->fail_at[OP_attention_bwd], 2);
    assert_int_equal(f->fail_at[OP_download], 0);
    d->ops->close(d);
    d = open_fault("slow=sync:4,fail=any:77,poison=255");
    f = (fault *)d;
    assert_int_equal(f->slow_at[OP_sync], 4);
    assert_int_equal(f->fail_any_at, 77);
    assert_int_equal(f->poison, 255);
    d->ops->close(d);
    d = open_fault("");
    d->ops->close(d);
    static const char *const bad[] = { "delay", "delay=", "delay=x", "delay=1000001", "seed=", "seed=3x", "seed=-1", "fail=upload",
        "fail=upload:", "fail=upload:0", "fail=upload:2x", "fail=uplod:1", "fail=:1", "sleep=3", "slow=any:1",
        "poison=256", "poison=", "poison=-1", "count=", "seed=1,,seed=2", " seed=1",
        "fail=a_name_that_is_far_longer_than_any_operation_of_a_device_could_ever_be:1" };
    for (size_t i = 0; i < FB_COUNT(bad); i++) {
        fb_error err = { 0 };
        if (fb_fault_open(&d, &(fb_device_options){ .n_thread = 1 }, bad[i], &err) != FB_CONFIG)
            fail_msg("'%s' was taken", bad[i]);
        assert_non_null(strstr(err.msg, "backend fault:"));
    }
}

static void the_nth_call_fails_and_no_other(void **unused)
{
    (void)unused;
    fb_device *d = open_fault("fail=event_new:3");
    fb_event *e[4];
    fb_error err;
    for (int i = 0; i < 4; i++) {
        fb_status st = d->ops->event_new(d, &e[i], &err);
        assert_int_equal(st, i == 2 ? FB_DEVICE : FB_OK);
        if (i == 2)
            assert_string_equal(err.msg, "fault device: injected failure of event_new, call 3");
    }
    for (int i = 0; i < 4; i++)
        if (i != 2)
            d->ops->event_free(d, e[i]);
    d->ops->close(d);
}

static void any_counts_the_calls_of_all(void **unused)
{
    (void)unused;
    fb_device *d = open_fault("fail=any:3");
    fb_event *e[2];
    fb_error err;
    assert_int_equal(d->ops->event_new(d, &e[0], &err), FB_OK);
    assert_int_equal(d->ops->record(d, FB_STREAM_H2D, e[0], &err), FB_OK);
    assert_int_equal(d->ops->event_new(d, &e[1], &err), FB_DEVICE);
    assert_string_equal(err.msg, "fault device: injected failure of event_new, call 2");
    assert_int_equal(d->ops->sync(d, FB_STREAM_H2D, &err), FB_OK);
    d->ops->event_free(d, e[0]);
    d->ops->close(d);
}

static void memory_is_poisoned_to_its_last_byte(void **unused)
{
    (void)unused;
    enum { SIZE = 3 * PIECE + 77 };
    fb_device *d = open_fault("poison=165");
    void *mem;
    unsigned char *back = malloc(SIZE);
    assert_int_equal(d->ops->alloc(d, SIZE, &mem, NULL), FB_OK);
    assert_int_equal(d->ops->download(d, FB_STREAM_D2H, back, mem, SIZE, NULL), FB_OK);
    assert_int_equal(d->ops->sync(d, FB_STREAM_D2H, NULL), FB_OK);
    for (size_t i = 0; i < SIZE; i++)
        assert_int_equal(back[i], 165);
    free(back);
    d->ops->free(d, mem);
    d->ops->close(d);
}

/* What a device with these numbers does is a function of the seed. */
static void the_seed_is_the_weather(void **unused)
{
    (void)unused;
    uint64_t last = 0;
    for (int round = 0; round < 3; round++) {
        fb_device *d = open_fault(round < 2 ? "delay=1,seed=5" : "delay=1,seed=6");
        unsigned char from = 7, to = 0;
        for (int i = 0; i < 50; i++)
            assert_int_equal(d->ops->upload(d, FB_STREAM_H2D, &to, &from, 1, NULL), FB_OK);
        assert_int_equal(d->ops->sync(d, FB_STREAM_H2D, NULL), FB_OK);
        assert_int_equal(to, 7);
        assert_true(round == 0 || (((fault *)d)->random == last) == (round == 1));
        last = ((fault *)d)->random;
        d->ops->close(d);
    }
}

/* ---- every operation, at calls spread over start and step ---- */

typedef struct layout {
    const char *clip, *dtype;
    bool        tight; /* several passes, block inputs on the host */
    const char *placement;
} layout;

static void rig_for(engine_rig *r, const layout *l, const char *backend)
{
    char text[96];
    snprintf(text, sizeof text, "backend=fault:%s", backend);
    rig_options(r, (const char *const[]){ l->clip, l->dtype, text, l->placement, NULL });
    r->options.compute_threads = 1;
    r->request.n_micro = 3;
}

static fb_status start_and_step(engine_rig *r, const layout *l, fb_error *err)
{
    fb_status st = FB_OK;
    fb_step_result s;
    FB_TRY(fb_session_open(&r->session, temp_dir, err));
    FB_TRY(fb_session_plan(&r->session, &r->request, err));
    while (l->tight && (r->session.plan.layout.n_pass < 2 || !r->session.plan.layout.kept_on_host)) {
        r->options.hbm_budget = r->session.plan.device_bytes - 1;
        FB_TRY(fb_session_plan(&r->session, &r->request, err));
    }
    FB_TRY(fb_session_start(&r->session, &r->request, err));
    for (uint32_t step = 0; step < 2; step++)
        FB_TRY(rig_step(r, step, 3, &s, err));
done:
    return st;
}

static void fail_everywhere(const layout *l)
{
    uint64_t count[OP_COUNT];
    engine_rig r;
    fb_error err;
    rig_for(&r, l, "seed=1");
    assert_int_equal(start_and_step(&r, l, &err), FB_OK);
    memcpy(count, ((fault *)r.session.device)->count, sizeof count);
    rig_stop(&r);
    for (int op = 0; op < OP_COUNT; op++) {
        uint64_t step = 1 + count[op] / (SANITIZED ? 2 : 7); /* the first, the last, and some between */
        for (uint64_t n = 1; n <= count[op]; n = n + step <= count[op] || n == count[op] ? n + step : count[op]) {
            char spec[64], sentence[96];
            snprintf(spec, sizeof spec, "fail=%s:%llu", op_names[op], (unsigned long long)n);
            snprintf(sentence, sizeof sentence, "fault device: injected failure of %s, call %llu", op_names[op],
                     (unsigned long long)n);
            memset(&err, 0, sizeof err);
            rig_for(&r, l, spec);
            alarm(30); /* a hang is a failure */
            fb_status st = start_and_step(&r, l, &err);
            rig_stop(&r);
            alarm(0);
            if (st != FB_DEVICE || strcmp(err.msg, sentence))
                fail_msg("%s: status %d, \"%s\"", spec, st, err.msg);
        }
    }
}

static void any_failure_is_a_sentence(void **unused)
{
    (void)unused;
    static const layout layouts[] = {
        { "max_grad_norm=1", "compute_dtype=float32", false, NULL }, { "max_grad_norm=0", "compute_dtype=float32", false, NULL },
        { "max_grad_norm=1", "compute_dtype=bfloat16", true, NULL }, { "max_grad_norm=0", "compute_dtype=bfloat16", true, NULL },
        { "max_grad_norm=1", "compute_dtype=bfloat16", false, "placement=layers:1" },
    };
    tiny_write(&model, 5);
    for (size_t i = 0; i < FB_COUNT(layouts); i += LAYOUT_STEP)
        fail_everywhere(&layouts[i]);
}

/* The same where every call runs at once, and where the streams also drift. */
static void failures_without_overlap_and_in_bad_weather(void **unused)
{
    (void)unused;
    static const char *const specs[] = { "fail=download:5", "fail=attention_bwd:2", "fail=record:40", "fail=wait:30", "fail=sync:1",
                                         "fail=upload:9", "fail=grad_out:2" };
    tiny_write(&model, 6);
    for (size_t i = 0; i < FB_COUNT(specs); i++)
        for (int way = 0; way < 2; way++) {
            char spec[64];
            engine_rig r;
            fb_error err;
            layout l = { i % 2 ? "max_grad_norm=1" : "max_grad_norm=0", "compute_dtype=float32", false, NULL };
            snprintf(spec, sizeof spec, "%s%s", specs[i], way ? "" : ",delay=200");
            rig_for(&r, &l, spec);
            r.options.overlap = !way;
            alarm(30);
            assert_int_equal(start_and_step(&r, &l, &err), FB_DEVICE);
            assert_non_null(strstr(err.msg, "injected failure"));
            rig_stop(&r);
            alarm(0);
        }
}

/* A copy is still on its way when the next one cannot be made: what it reads must be there until it is done. */
static void memory_outlives_the_copies_out_of_it(void **unused)
{
    (void)unused;
    const layout l = { "max_grad_norm=1", "compute_dtype=bfloat16", false, "placement=layers:1" };
    tiny_write(&model, 7);
    for (int n = 1; n <= 4; n++) {
        char spec[64];
        engine_rig r;
        fb_error err;
        snprintf(spec, sizeof spec, "slow=upload:%d,fail=upload:%d", n, n + 1);
        rig_for(&r, &l, spec);
        alarm(30);
        assert_int_equal(start_and_step(&r, &l, &err), FB_DEVICE);
        rig_stop(&r);
        alarm(0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(specs_are_read_strictly),
        cmocka_unit_test(the_nth_call_fails_and_no_other),
        cmocka_unit_test(any_counts_the_calls_of_all),
        cmocka_unit_test(memory_is_poisoned_to_its_last_byte),
        cmocka_unit_test(the_seed_is_the_weather),
        cmocka_unit_test_setup_teardown(any_failure_is_a_sentence, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(memory_outlives_the_copies_out_of_it, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(failures_without_overlap_and_in_bad_weather, temp_dir_make, temp_dir_remove),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
