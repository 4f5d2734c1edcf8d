#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>

#include "run/trainlog.h"
#include "temp_dir.h"

static void expect_text(const char *want)
{
    char *text;
    uint64_t size;
    fb_error err;
    if (fb_file_read(&text, &size, temp_path("trainer_log.jsonl"), 1 << 20, &err) != FB_OK)
        fail_msg("%s", err.msg);
    assert_string_equal(text, want);
    free(text);
}

static fb_trainlog open_log(uint64_t steps_kept)
{
    fb_trainlog l;
    fb_error err;
    if (fb_trainlog_open(&l, temp_dir, steps_kept, &err) != FB_OK)
        fail_msg("%s", err.msg);
    return l;
}

static void a_line_is_there_when_write_returns(void **unused)
{
    (void)unused;
    fb_trainlog l = open_log(0);
    expect_text("");
    assert_int_equal(fb_trainlog_write(&l, json_pack("{s:i, s:f}", "current_steps", 1, "loss", 0.1), NULL), FB_OK);
    expect_text("{\"current_steps\":1,\"loss\":0.10000000000000001}\n"); /* 17 digits: every double comes back */
    assert_int_equal(fb_trainlog_write(&l, json_pack("{s:i, s:n}", "current_steps", 2, "loss"), NULL), FB_OK);
    expect_text("{\"current_steps\":1,\"loss\":0.10000000000000001}\n{\"current_steps\":2,\"loss\":null}\n");
    fb_trainlog_close(&l);
    fb_trainlog_close(&l);
}

static void a_resume_cuts_later_lines_off(void **unused)
{
    (void)unused;
    static const char text[] = "{\"current_steps\": 1, \"loss\": 3}\n"
                               "{\"current_steps\": 2, \"eval_loss\": 3}\n"
                               "{\"current_steps\": 3}\n"
                               "not json\n"
                               "{\"loss\": 1}\n"
                               "{\"current_steps\": -1}\n"
                               "{\"current_steps\": \"2\"}\n"
                               "[1]\n"
                               "{\"current_steps\": 2}\n"
                               "{\"current_steps\": 1"; /* the line that was being written when the run died */
    temp_write_text("trainer_log.jsonl", text);
    fb_trainlog l = open_log(2);
    expect_text("{\"current_steps\": 1, \"loss\": 3}\n{\"current_steps\": 2, \"eval_loss\": 3}\n{\"current_steps\": 2}\n");
    assert_int_equal(fb_trainlog_write(&l, json_pack("{s:i}", "current_steps", 3), NULL), FB_OK);
    expect_text("{\"current_steps\": 1, \"loss\": 3}\n{\"current_steps\": 2, \"eval_loss\": 3}\n{\"current_steps\": "
                "2}\n{\"current_steps\":3}\n");
    fb_trainlog_close(&l);
    l = open_log(0); /* afresh */
    expect_text("");
    fb_trainlog_close(&l);
    l = open_log(7); /* nothing there to keep */
    fb_trainlog_close(&l);
    expect_text("");
}

static void failures_are_sentences(void **unused)
{
    (void)unused;
    fb_error err;
    fb_trainlog l;
    assert_int_equal(fb_trainlog_open(&l, temp_path("nowhere"), 0, &err), FB_IO);
    assert_null(l.path);
    assert_null(l.path);
    l = (fb_trainlog){ .fd = open("/dev/full", O_WRONLY | O_APPEND), .path = strdup("/dev/full") };
    expect_failure(fb_trainlog_write(&l, json_pack("{s:i}", "current_steps", 1), &err), FB_IO, &err, "No space left on device");
    expect_failure(fb_trainlog_write(&l, NULL, &err), FB_NOMEM, &err, "no memory for a line");
    fb_trainlog_close(&l);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, temp_dir_make, temp_dir_remove)
    const struct CMUnitTest tests[] = {
        TEST(a_line_is_there_when_write_returns),
        TEST(a_resume_cuts_later_lines_off),
        TEST(failures_are_sentences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
