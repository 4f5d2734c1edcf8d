/* The lock of a folder, between real processes. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "../../src/io/lock.c"
#include "temp_dir.h"

/* A process that holds the lock until it is killed. */
static pid_t holder(void)
{
    int ready[2];
    char byte;
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    if (child == 0) {
        fb_lock l;
        byte = fb_lock_take(&l, temp_dir, "train", NULL) == FB_OK && !l.refused ? 'y' : 'n';
        if (write(ready[1], &byte, 1) == 1)
            pause();
        _exit(0);
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_int_equal(byte, 'y');
    close(ready[0]);
    close(ready[1]);
    return child;
}

static void kill_holder(pid_t child)
{
    int status;
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, &status, 0), child);
}

static void the_second_is_told_who_the_first_is(void **unused)
{
    (void)unused;
    fb_lock l;
    fb_error err;
    char pid[64];
    pid_t child = holder();
    snprintf(pid, sizeof pid, "train, process %ld on ", (long)child);
    for (int i = 0; i < 2; i++) { /* a refused one leaves everything as it was */
        expect_failure(fb_lock_take(&l, temp_dir, "export", &err), FB_CONFIG, &err, pid);
        assert_int_equal(l.fd, 0);
        assert_true(fb_file_exists(temp_path(".forebay.lock")));
    }
    kill_holder(child);
    /* The file is still there, its holder is not. */
    assert_true(fb_file_exists(temp_path(".forebay.lock")));
    assert_int_equal(fb_lock_take(&l, temp_dir, "export", &err), FB_OK);
    fb_lock_give(&l);
    assert_false(fb_file_exists(temp_path(".forebay.lock")));
    fb_lock_give(&l);
}

/* Many processes take it in turns; each adds one to a number that the lock alone protects. */
static void no_two_hold_it_at_once(void **unused)
{
    (void)unused;
    enum { PROCESSES = 4, TURNS = 150 };
    temp_write_text("number", "0");
    for (int i = 0; i < PROCESSES; i++) {
        if (fork())
            continue;
        for (int turn = 0; turn < TURNS;) {
            fb_lock l;
            fb_status st = fb_lock_take(&l, temp_dir, "test", NULL);
            if (st == FB_CONFIG)
                continue;
            int n = -1;
            FILE *f = st == FB_OK ? fopen(temp_path("number"), "r+") : NULL;
            if (!f || fscanf(f, "%d", &n) != 1)
                _exit(1);
            rewind(f);
            fprintf(f, "%d", n + 1);
            fclose(f);
            fb_lock_give(&l);
            turn++;
        }
        _exit(0);
    }
    for (int i = 0; i < PROCESSES; i++) {
        int status;
        assert_true(wait(&status) > 0);
        assert_int_equal(status, 0);
    }
    char *text;
    uint64_t size;
    assert_int_equal(fb_file_read(&text, &size, temp_path("number"), 64, NULL), FB_OK);
    assert_int_equal(atoi(text), PROCESSES * TURNS);
    free(text);
}

static void what_cannot_be_locked_is_a_sentence(void **unused)
{
    (void)unused;
    fb_lock l;
    fb_error err;
    temp_write_text("file", "");
    expect_failure(fb_lock_take(&l, temp_path("file"), "train", &err), FB_IO, &err, "is not a folder");
    fb_dir_make(temp_path("d/.forebay.lock"), NULL);
    expect_failure(fb_lock_take(&l, temp_path("d"), "train", &err), FB_IO, &err, "cannot be made");
    temp_write_text("target", "kept");
    fb_dir_make(temp_path("e"), NULL);
    assert_int_equal(symlink(temp_path("target"), temp_path("e/.forebay.lock")), 0);
    expect_failure(fb_lock_take(&l, temp_path("e"), "train", &err), FB_IO, &err, "cannot be made"); /* a link is not followed */
    assert_int_equal(fb_lock_take(&l, temp_path("new/and/deep"), "train", &err), FB_OK);
    fb_lock_give(&l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_second_is_told_who_the_first_is, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(no_two_hold_it_at_once, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(what_cannot_be_locked_is_a_sentence, temp_dir_make, temp_dir_remove),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
