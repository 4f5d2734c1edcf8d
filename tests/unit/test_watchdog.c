/* The record of what is done, and the thread that reads it out. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "../../src/run/watchdog.c"
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static fb_activity activity;

/* ---- the record ---- */

static void expect_text(const char *want)
{
    char text[256];
    fb_activity_say(&activity, text, sizeof text);
    assert_string_equal(text, want);
}

static void the_record_is_a_sentence(void **unused)
{
    (void)unused;
    activity = (fb_activity){ 0 };
    expect_text("starting");
    fb_activity_enter(&activity, FB_PHASE_LOAD, 0);
    expect_text("loading the weights");
    fb_activity_step(&activity, 7);
    fb_activity_enter(&activity, FB_PHASE_BACKWARD, 3);
    expect_text("step 7, backward of layer 3");
    fb_activity_workers(&activity, 16);
    fb_activity_wait(&activity, FB_WAIT_UPDATE, 4);
    fb_activity_work_begins(&activity);
    fb_activity_work_begins(&activity);
    expect_text("step 7, backward of layer 3, waiting for the update of block 4 (2 of 16 workers busy)");
    fb_activity_wait(&activity, FB_WAIT_SYNC, 1);
    fb_activity_work_ends(&activity);
    expect_text("step 7, backward of layer 3, waiting for the device, stream h2d (1 of 16 workers busy)");
    fb_activity_wait(&activity, FB_WAIT_STAGING, 0);
    expect_text("step 7, backward of layer 3, waiting for a staging buffer for embedding rows (1 of 16 workers busy)");
    fb_activity_wait(&activity, FB_WAIT_NOTHING, 0);
    expect_text("step 7, backward of layer 3 (1 of 16 workers busy)");
    fb_activity_enter(&activity, FB_PHASE_STEP_END, 0);
    expect_text("step 7, end of the step (1 of 16 workers busy)");
    fb_activity_step(NULL, 1);
    fb_activity_enter(NULL, FB_PHASE_LOAD, 0);
    fb_activity_wait(NULL, FB_WAIT_SLAB, 0);
    fb_activity_work_begins(NULL);
    fb_activity_work_ends(NULL);
    fb_activity_workers(NULL, 1);
}

static void every_write_moves_the_count(void **unused)
{
    (void)unused;
    activity = (fb_activity){ 0 };
    uint64_t before = fb_activity_count(&activity);
    fb_activity_enter(&activity, FB_PHASE_LOAD, 0);
    assert_int_equal(fb_activity_count(&activity), before + 1);
    fb_activity_enter(&activity, FB_PHASE_LOAD, 0); /* the same again is movement too */
    fb_activity_wait(&activity, FB_WAIT_SLAB, 1);
    assert_int_equal(fb_activity_count(&activity), before + 3);
    fb_activity_work_begins(&activity);
    fb_activity_work_ends(&activity);
    assert_int_equal(fb_activity_count(&activity), before + 4);
}

/* ---- the thread ---- */

typedef struct said {
    atomic_int n_warning, n_report; /* counted up when the text is there */
    char warning[4][256], report[8][512];
} said;

static void hear(void *ctx, fb_say_kind kind, const char *text)
{
    said *s = ctx;
    if (kind == FB_SAY_WARNING && s->n_warning < 4) {
        snprintf(s->warning[s->n_warning], sizeof s->warning[0], "%s", text);
        s->n_warning++;
    }
    if (kind == FB_SAY_PROGRESS && s->n_report < 8) {
        snprintf(s->report[s->n_report], sizeof s->report[0], "%s", text);
        s->n_report++;
    }
}

static fb_job *new_job(said *s)
{
    fb_job *j;
    memset(s, 0, sizeof *s);
    activity = (fb_activity){ 0 };
    assert_int_equal(fb_job_open(&j, NULL, NULL, 0, &(fb_sink){ hear, s }, NULL), FB_OK);
    return j;
}

/* look() by hand, with the clock moved instead of time spent. */
static void it_speaks_when_nothing_moves_and_ever_more_rarely(void **unused)
{
    (void)unused;
    said s;
    fb_job *j = new_job(&s);
    fb_watchdog w = { .job = j, .activity = &activity, .quiet_s = 120 };
    watch seen = { .since = fb_clock(), .speak_after = 120 };
    fb_activity_step(&activity, 1);
    fb_activity_enter(&activity, FB_PHASE_FORWARD, 2);
    fb_activity_wait(&activity, FB_WAIT_UPDATE, 3);
    look(&w, &seen);
    const double when[] = { 119, 121, 125, 239, 241, 479, 481 };
    const int told[] = { 0, 1, 1, 1, 2, 2, 3 };
    for (size_t i = 0; i < FB_COUNT(when); i++) {
        seen.since = fb_clock() - when[i];
        look(&w, &seen);
        assert_int_equal(s.n_warning, told[i]);
    }
    assert_string_equal(s.warning[0], "nothing has moved for 121 s: step 1, forward of layer 2, waiting for the update of block 3");
    fb_activity_work_begins(&activity);
    fb_activity_work_ends(&activity); /* a worker's piece is movement */
    look(&w, &seen);
    assert_true(fb_clock() - seen.since < 60);
    seen.since -= 121;
    look(&w, &seen);
    assert_int_equal(s.n_warning, 4);
    fb_job_close(j);
}

/* A machine that always takes five minutes a step is not stuck after two. */
static void a_slow_machine_is_given_time(void **unused)
{
    (void)unused;
    said s;
    fb_job *j = new_job(&s);
    fb_watchdog w = { .job = j, .activity = &activity, .quiet_s = 120 };
    watch seen = { .since = fb_clock(), .speak_after = 120 };
    fb_activity_step(&activity, 1);
    fb_activity_enter(&activity, FB_PHASE_STEP_END, 0);
    look(&w, &seen);
    seen.step_since -= 300;
    fb_activity_step(&activity, 2);
    fb_activity_enter(&activity, FB_PHASE_STEP_END, 0);
    look(&w, &seen);
    seen.since = fb_clock() - 590;
    look(&w, &seen);
    assert_int_equal(s.n_warning, 0);
    seen.since = fb_clock() - 610;
    look(&w, &seen);
    assert_int_equal(s.n_warning, 1);
    w.quiet_s = 0;
    seen.since = fb_clock() - 1e6;
    look(&w, &seen);
    assert_int_equal(s.n_warning, 1); /* off */
    fb_job_close(j);
}

static void describe_a_number(const void *ctx, char *text, size_t size)
{
    snprintf(text, size, "the number is %d", *(const int *)ctx);
}

static void wait_for(atomic_int *n, int want)
{
    for (int i = 0; i < 2000 && *n < want; i++)
        usleep(5000);
}

static void it_answers_when_asked(void **unused)
{
    (void)unused;
    said s;
    fb_job *j = new_job(&s);
    fb_watchdog *w;
    static const int number = 42, other = 7;
    assert_int_equal(fb_watchdog_start(&w, j, &activity, 0, NULL), FB_OK);
    fb_activity_step(&activity, 9);
    fb_activity_enter(&activity, FB_PHASE_HEAD, 0);
    fb_watchdog_add(w, describe_a_number, &number);
    fb_watchdog_add(w, describe_a_number, &other);
    fb_watchdog_forget(w, &other);
    fb_job_report(j);
    wait_for(&s.n_report, 3);
    fb_watchdog_stop(w);
    assert_int_equal(s.n_report, 3);
    assert_non_null(strstr(s.report[0], "report: step 9, head and loss; last movement "));
    assert_non_null(strstr(s.report[1], "report: host memory "));
    assert_string_equal(s.report[2], "report: the number is 42");
    assert_int_equal(s.n_warning, 0);
    fb_watchdog_stop(NULL);
    fb_job_close(j);
}

static void it_barks_by_itself(void **unused)
{
    (void)unused;
    said s;
    fb_job *j = new_job(&s);
    fb_watchdog *w;
    fb_activity_step(&activity, 2);
    fb_activity_enter(&activity, FB_PHASE_EMBED, 0);
    fb_activity_wait(&activity, FB_WAIT_STAGING, 0);
    assert_int_equal(fb_watchdog_start(&w, j, &activity, 0.01, NULL), FB_OK);
    wait_for(&s.n_warning, 1);
    fb_watchdog_stop(w);
    assert_true(s.n_warning >= 1);
    assert_non_null(strstr(s.warning[0], "step 2, embedding, waiting for a staging buffer for embedding rows"));
    fb_job_close(j);
}

/* Both threads speak as fast as they can; the sink, which is no safer than a user's, loses nothing. */
static void count_up(void *ctx, fb_say_kind kind, const char *text)
{
    (void)kind;
    (void)text;
    ++*(int *)ctx;
}

static void *speak(void *arg)
{
    fb_job *j = arg;
    for (int i = 0; i < 20000; i++)
        fb_say(&j->sink, FB_SAY_PROGRESS, "x");
    return NULL;
}

static void the_sink_has_one_caller_at_a_time(void **unused)
{
    (void)unused;
    int n = 0;
    fb_job *j;
    pthread_t other;
    assert_int_equal(fb_job_open(&j, NULL, NULL, 0, &(fb_sink){ count_up, &n }, NULL), FB_OK);
    assert_int_equal(pthread_create(&other, NULL, speak, j), 0);
    speak(j);
    pthread_join(other, NULL);
    assert_int_equal(n, 40000);
    fb_job_close(j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_record_is_a_sentence),
        cmocka_unit_test(every_write_moves_the_count),
        cmocka_unit_test(it_speaks_when_nothing_moves_and_ever_more_rarely),
        cmocka_unit_test(a_slow_machine_is_given_time),
        cmocka_unit_test(it_answers_when_asked),
        cmocka_unit_test(it_barks_by_itself),
        cmocka_unit_test(the_sink_has_one_caller_at_a_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
