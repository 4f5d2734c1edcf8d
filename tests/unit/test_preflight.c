/* Refusals before anything large is taken: numbers worked out by hand, and the real file system. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mount.h>

#include <cmocka.h>

#include "run/preflight.h"
#include "temp_dir.h"

static const uint64_t MIB = 1u << 20;
enum { WARNING_SIZE = 512 };

static void host_memory_is_refused_with_both_numbers(void **unused)
{
    (void)unused;
    fb_error err;
    fb_memory_room room = { 100 * MIB, "cgroup /x (memory.max)" };
    assert_int_equal(fb_preflight_host(80 * MIB, 0, &room, &err), FB_OK);
    assert_int_equal(fb_preflight_host(80 * MIB, 100 * MIB, &room, &err), FB_OK);
    expect_failure(fb_preflight_host(80 * MIB, 101 * MIB, &room, &err), FB_NOFIT, &err, "ram_budget is 101.0 MiB, cgroup /x "
                   "(memory.max) leaves 100.0 MiB");
    /* The ledger alone would fit, with what it does not see it would not: 16 MiB and 1/256. */
    assert_int_equal(fb_preflight_host(83 * MIB, 0, &room, &err), FB_OK);
    expect_failure(fb_preflight_host(84 * MIB, 0, &room, &err), FB_NOFIT, &err, "takes 84.0 MiB and about 16.3 MiB beside its "
                   "ledger, cgroup /x (memory.max) leaves 100.0 MiB");
}

static void device_memory_is_refused_with_both_numbers(void **unused)
{
    (void)unused;
    fb_error err;
    assert_int_equal(fb_preflight_device(80 * MIB, 0, 80 * MIB, &err), FB_OK);
    assert_int_equal(fb_preflight_device(80 * MIB, 200 * MIB, 0, &err), FB_OK); /* it does not say */
    expect_failure(fb_preflight_device(80 * MIB, 200 * MIB, 79 * MIB, &err), FB_NOFIT, &err, "takes 80.0 MiB (hbm_budget is 200.0 "
                   "MiB), 79.0 MiB are free");
}

static void data_need_room_for_the_tokenizer(void **unused)
{
    (void)unused;
    fb_error err;
    fb_memory_room room = { 40 * MIB, "this machine (MemAvailable)" };
    assert_int_equal(fb_preflight_data(temp_dir, &room, &err), FB_OK);
    temp_write_text("tokenizer.json", "");
    assert_int_equal(truncate(temp_path("tokenizer.json"), 1 * (off_t)MIB), 0);
    expect_failure(fb_preflight_data(temp_dir, &room, &err), FB_NOFIT, &err, "takes up to 48.0 MiB, this machine (MemAvailable) "
                   "leaves 40.0 MiB");
}

/* 1 Mi weights in one parameter: the optimizer's file is 12 MiB and three headers, the model in bfloat16 2 MiB and one. */
static fb_disk_need need(int strategy, uint32_t every, uint32_t limit, uint64_t total, uint64_t done, uint64_t per_epoch,
                         uint64_t present)
{
    fb_manifest m = { .n_weight = 1u << 20, .n_param = 1 };
    fb_options o = { .save_strategy = strategy, .save_steps = every, .save_total_limit = limit };
    return fb_preflight_disk_need(&m, &o, FB_BF16, 5000, total, done, per_epoch, present);
}

static void checkpoints_are_counted(void **unused)
{
    (void)unused;
    const struct {
        int      strategy;
        uint32_t every, limit;
        uint64_t total, done, per_epoch, present, n;
    } cases[] = {
        { FB_SAVE_STEPS, 10, 0, 100, 0, 30, 0, 10 },  { FB_SAVE_STEPS, 10, 0, 99, 0, 30, 0, 9 },
        { FB_SAVE_STEPS, 10, 3, 100, 0, 30, 0, 4 },   /* three kept, and one being written */
        { FB_SAVE_STEPS, 10, 20, 100, 0, 30, 0, 10 }, { FB_SAVE_EPOCH, 10, 0, 100, 0, 30, 0, 3 },
        { FB_SAVE_STEPS, 10, 0, 100, 55, 30, 5, 5 },  /* five lie there, five are to come */
        { FB_SAVE_STEPS, 10, 3, 100, 55, 30, 3, 1 },  { FB_SAVE_STEPS, 10, 3, 100, 55, 30, 9, 1 },
        { FB_SAVE_NO, 10, 0, 100, 0, 30, 0, 0 },      { FB_SAVE_STEPS, 500, 0, 100, 0, 30, 0, 0 },
    };
    for (size_t i = 0; i < FB_COUNT(cases); i++) {
        fb_disk_need n = need(cases[i].strategy, cases[i].every, cases[i].limit, cases[i].total, cases[i].done, cases[i].per_epoch,
                              cases[i].present);
        assert_int_equal(n.n_checkpoint, cases[i].n);
        assert_int_equal(n.saves, cases[i].n > 0);
        assert_int_equal(n.optimizer, 12 * MIB + 3 * 256);
        assert_in_range(n.model, 2 * MIB + 256 + 5000, 3 * MIB);
        assert_int_equal(n.checkpoint, n.optimizer + n.model);
    }
}

static void a_full_disk_is_refused_or_warned_about(void **unused)
{
    (void)unused;
    fb_error err;
    char warning[WARNING_SIZE];
    const uint64_t no_limit = UINT64_MAX;
    fb_disk_need n = { .checkpoint = 30 * MIB, .optimizer = 20 * MIB, .model = 10 * MIB, .n_checkpoint = 3, .saves = true };
    expect_failure(fb_preflight_disk(&n, "out", 39 * MIB, no_limit, warning, sizeof warning, &err), FB_IO, &err,
                   "out: one checkpoint and the final model take 40.0 MiB, its file system has 39.0 MiB free");
    assert_int_equal(fb_preflight_disk(&n, "out", 40 * MIB, no_limit, warning, sizeof warning, &err), FB_OK);
    assert_non_null(strstr(warning,
                           "3 checkpoints of 30.0 MiB and the final model take 100.0 MiB, its file system has 40.0 MiB free"));
    assert_int_equal(fb_preflight_disk(&n, "out", 100 * MIB, no_limit, warning, sizeof warning, &err), FB_OK);
    assert_string_equal(warning, "");
    expect_failure(fb_preflight_disk(&n, "out", 100 * MIB, 19 * MIB, warning, sizeof warning, &err), FB_IO, &err,
                   "writes a file of 20.0 MiB, the limit on files is 19.0 MiB");
    n = (fb_disk_need){ .checkpoint = 30 * MIB, .optimizer = 20 * MIB, .model = 10 * MIB };
    expect_failure(fb_preflight_disk(&n, "out", 9 * MIB, no_limit, warning, sizeof warning, &err), FB_IO, &err,
                   "the final model takes 10.0 MiB");
    assert_int_equal(fb_preflight_disk(&n, "out", 39 * MIB, no_limit, warning, sizeof warning, &err), FB_OK);
    assert_non_null(strstr(warning, "no room for the checkpoint of 30.0 MiB that a signal would save"));
    assert_int_equal(fb_preflight_disk(&n, "out", 40 * MIB, 19 * MIB, warning, sizeof warning, &err), FB_OK);
    assert_string_equal(warning, "");
}

static void the_folder_is_really_written(void **unused)
{
    (void)unused;
    fb_error err;
    uint64_t room, file_max;
    assert_int_equal(fb_preflight_folder(temp_path("a/b"), &err), FB_OK);
    assert_int_equal(rmdir(temp_path("a/b")), 0); /* nothing is left in it */
    temp_write_text("file", "");
    expect_failure(fb_preflight_folder(temp_path("file"), &err), FB_IO, &err, "is not a folder");
    assert_int_equal(fb_preflight_disk_room(temp_dir, &room, &file_max, &err), FB_OK);
    expect_failure(fb_preflight_disk_room(temp_path("none"), &room, &file_max, &err), FB_IO, &err, "does not say");
    if (mount("none", temp_path("a"), "tmpfs", 0, "size=1m") != 0)
        skip(); /* only root mounts */
    fb_status ok = fb_preflight_folder(temp_path("a"), &err),
        asked = fb_preflight_disk_room(temp_path("a"), &room, &file_max, &err);
    bool read_only = mount("none", temp_path("a"), "tmpfs", MS_REMOUNT | MS_RDONLY, "size=1m") == 0;
    fb_status refused = fb_preflight_folder(temp_path("a"), &err);
    umount(temp_path("a"));
    assert_int_equal(ok, FB_OK);
    assert_int_equal(asked, FB_OK);
    assert_int_equal(room, MIB);
    assert_true(read_only);
    expect_failure(refused, FB_IO, &err, "Read-only file system");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(host_memory_is_refused_with_both_numbers),
        cmocka_unit_test(device_memory_is_refused_with_both_numbers),
        cmocka_unit_test_setup_teardown(data_need_room_for_the_tokenizer, temp_dir_make, temp_dir_remove),
        cmocka_unit_test(checkpoints_are_counted),
        cmocka_unit_test(a_full_disk_is_refused_or_warned_about),
        cmocka_unit_test_setup_teardown(the_folder_is_really_written, temp_dir_make, temp_dir_remove),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
