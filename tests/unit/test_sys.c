/* Faults of the files' system calls: what is asked for strikes, once, and nothing else does; and what reads and writes survives
 * calls that move less than they were asked to. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "io/file.h"
#include "io/sys.h"
#include "temp_dir.h"

static void ask(const char *spec)
{
    fb_error err;
    if (fb_sys_faults(spec, &err) != FB_OK)
        fail_msg("%s", err.msg);
}

static int no_faults(void **state)
{
    ask(NULL);
    return temp_dir_remove(state);
}

static void specs_are_read_strictly(void **unused)
{
    (void)unused;
    static const char *const bad[] = { "fail", "fail=", "fail=write", "fail=write:", "fail=write:0", "fail=write:1:",
        "fail=write:1:EWHAT", "fail=wrote:1", "fail=write:1x", "short=open:1", "short=write", "slow=write:10000001",
        "die=write:0", "full=0", "full=",
        "full=1x", "count=", "fail=write:1,,fail=read:1", " fail=write:1", "fail=write:-1", "nonsense" };
    for (size_t i = 0; i < FB_COUNT(bad); i++) {
        fb_error err = { 0 };
        if (fb_sys_faults(bad[i], &err) != FB_CONFIG)
            fail_msg("'%s' was taken", bad[i]);
        assert_non_null(strstr(err.msg, "FOREBAY_FAULT_IO: "));
    }
    ask("fail=open:3:ENOSPC,short=write:0,short=read:7,slow=sync:0,die=map:9,full=12");
    ask("");
}

static void the_nth_call_fails_and_no_other(void **unused)
{
    (void)unused;
    ask("fail=mkdir:2:EROFS,fail=remove:1");
    assert_int_equal(fb_sys_mkdir(temp_path("a"), 0777), 0);
    assert_int_equal(fb_sys_mkdir(temp_path("b"), 0777), -1);
    assert_int_equal(errno, EROFS);
    assert_int_equal(fb_sys_mkdir(temp_path("b"), 0777), 0);
    assert_int_equal(fb_sys_rmdir(temp_path("a")), -1);
    assert_int_equal(errno, EIO);
    assert_int_equal(fb_sys_rmdir(temp_path("a")), 0);
}

static void a_full_disk_stays_full(void **unused)
{
    (void)unused;
    ask("full=2");
    int fd = fb_sys_open(temp_path("a"), O_WRONLY | O_CREAT, 0666);
    assert_int_equal(fb_sys_write(fd, "abc", 3), 3);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(fb_sys_pwrite(fd, "abc", 3, 0), -1);
        assert_int_equal(errno, ENOSPC);
    }
    close(fd);
}

static void short_calls_are_gone_on_with(void **unused)
{
    (void)unused;
    char text[1000], *back;
    uint64_t size;
    fb_error err;
    for (size_t i = 0; i < sizeof text; i++)
        text[i] = (char)('a' + i * 7 % 26);
    ask("short=write:0,short=read:0");
    assert_int_equal(fb_file_write_atomic(temp_path("a"), text, sizeof text, &err), FB_OK);
    assert_int_equal(fb_file_copy_atomic(temp_path("a"), temp_path("b"), NULL, &err), FB_OK);
    assert_int_equal(fb_file_read(&back, &size, temp_path("b"), sizeof text, &err), FB_OK);
    assert_int_equal(size, sizeof text);
    assert_memory_equal(back, text, sizeof text);
    free(back);
}

static void a_failed_write_leaves_what_was_there(void **unused)
{
    (void)unused;
    static const char *const faults[] = { "fail=open:1", "fail=write:1:ENOSPC", "short=write:1,fail=write:2", "fail=sync:1",
                                          "fail=rename:1" };
    char *back;
    uint64_t size;
    fb_error err;
    assert_int_equal(fb_file_write_atomic(temp_path("a"), "before", 6, &err), FB_OK);
    for (size_t i = 0; i < FB_COUNT(faults); i++) {
        ask(faults[i]);
        assert_int_equal(fb_file_write_atomic(temp_path("a"), "after", 5, &err), FB_IO);
        ask(NULL);
        assert_int_equal(fb_file_read(&back, &size, temp_path("a"), 100, &err), FB_OK);
        assert_string_equal(back, "before");
        free(back);
        assert_int_equal(access(temp_path("a.tmp"), F_OK), -1);
    }
}

/* Half of the write that it dies in is there. */
static void a_power_cut_is_one(void **unused)
{
    (void)unused;
    int status, fd = open(temp_path("a"), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    pid_t child = fork();
    if (!child) {
        ask("die=write:2");
        fb_sys_write(fd, "abcd", 4);
        fb_sys_write(fd, "efgh", 4);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    close(fd);
    char *back;
    uint64_t size;
    assert_int_equal(fb_file_read(&back, &size, temp_path("a"), 100, NULL), FB_OK);
    assert_string_equal(back, "abcdef");
    free(back);
}

#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, temp_dir_make, no_faults)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(specs_are_read_strictly),
        IN_FOLDER(the_nth_call_fails_and_no_other),
        IN_FOLDER(a_full_disk_stays_full),
        IN_FOLDER(short_calls_are_gone_on_with),
        IN_FOLDER(a_failed_write_leaves_what_was_there),
        IN_FOLDER(a_power_cut_is_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
