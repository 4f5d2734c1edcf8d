#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "temp_dir.h"

static void reads_what_was_written(void **unused)
{
    (void)unused;
    fb_error err = { 0 };
    char    *text = NULL;
    uint64_t size;
    assert_int_equal(fb_file_write_atomic(temp_path("a"), "one\0two", 7, &err), FB_OK);
    assert_int_equal(fb_file_read(&text, &size, temp_path("a"), 7, &err), FB_OK);
    assert_int_equal(size, 7);
    assert_memory_equal(text, "one\0two", 8); /* NUL-terminated */
    free(text);
    assert_int_equal(fb_file_write_atomic(temp_path("a"), "", 0, &err), FB_OK); /* replaces */
    assert_int_equal(fb_file_read(&text, &size, temp_path("a"), 7, &err), FB_OK);
    assert_int_equal(size, 0);
    free(text);
    assert_false(fb_file_exists(temp_path("a.tmp")));
}

static void refuses_what_it_cannot_read(void **unused)
{
    (void)unused;
    fb_error err = { 0 };
    char    *text;
    uint64_t size;
    expect_failure(fb_file_read(&text, &size, temp_path("none"), 9, &err), FB_INPUT, &err, "none: there is no such file");
    temp_write_text("big", "0123456789");
    expect_failure(fb_file_read(&text, &size, temp_path("big"), 9, &err), FB_INPUT, &err, "is 10 bytes long, at most 9");
    expect_failure(fb_file_read(&text, &size, temp_dir, 9, &err), FB_INPUT, &err, "is a folder");
    assert_int_equal(mkfifo(temp_path("pipe"), 0600), 0);
    expect_failure(fb_file_read(&text, &size, temp_path("pipe"), 9, &err), FB_INPUT, &err, "is a device or pipe");
}

/* A failed write leaves the old file and no temporary one; a link planted under the temporary name is not followed. */
static void a_write_is_all_or_nothing(void **unused)
{
    (void)unused;
    fb_error err = { 0 };
    char    *text;
    uint64_t size;
    expect_failure(fb_file_write_atomic(temp_path("no/folder"), "x", 1, &err), FB_IO, &err, "cannot be created");
    assert_int_equal(mkdir(temp_path("taken"), 0700), 0);
    temp_write_text("taken/inside", "x");
    expect_failure(fb_file_write_atomic(temp_path("taken"), "x", 1, &err), FB_IO, &err, "cannot be renamed into place");
    assert_false(fb_file_exists(temp_path("taken.tmp")));

    temp_write_text("victim", "safe");
    assert_int_equal(symlink("victim", temp_path("new.tmp")), 0);
    assert_int_equal(fb_file_write_atomic(temp_path("new"), "x", 1, &err), FB_OK);
    assert_int_equal(fb_file_read(&text, &size, temp_path("victim"), 9, &err), FB_OK);
    assert_string_equal(text, "safe");
    free(text);
}

static void copies(void **unused)
{
    (void)unused;
    fb_error err = { 0 };
    bool     copied = true;
    char    *data = malloc(3 << 20), *back;
    uint64_t size;
    assert_non_null(data);
    for (int i = 0; i < 3 << 20; i++)
        data[i] = (char)(i * 7 + (i >> 8));
    assert_int_equal(fb_file_copy_atomic(temp_path("from"), temp_path("to"), &copied, &err), FB_OK);
    assert_false(copied);
    assert_false(fb_file_exists(temp_path("to")));
    temp_write("from", data, (3 << 20) - 5);
    assert_int_equal(fb_file_copy_atomic(temp_path("from"), temp_path("to"), &copied, &err), FB_OK);
    assert_true(copied);
    assert_int_equal(fb_file_read(&back, &size, temp_path("to"), 4 << 20, &err), FB_OK);
    assert_int_equal(size, (3 << 20) - 5);
    assert_memory_equal(back, data, size);
    free(back);
    free(data);
    expect_failure(fb_file_copy_atomic(temp_dir, temp_path("to2"), NULL, &err), FB_INPUT, &err, "is a folder");
    expect_failure(fb_file_copy_atomic(temp_path("from"), temp_path("x/y"), &copied, &err), FB_IO, &err, "cannot be created");
    assert_false(copied);
}

static void folders_come_and_go(void **unused)
{
    (void)unused;
    fb_error err = { 0 };
    assert_int_equal(fb_dir_make(temp_path("a/b//c/"), &err), FB_OK);
    assert_int_equal(fb_dir_make(temp_path("a/b/c"), &err), FB_OK);
    temp_write_text("a/b/c/file", "x");
    expect_failure(fb_dir_make(temp_path("a/b/c/file/d"), &err), FB_IO, &err, "exists and is not a folder");
    expect_failure(fb_dir_remove(temp_path("a/b/c/file"), &err), FB_IO, &err, "is not a folder, so it was not removed");

    assert_int_equal(fb_dir_make(temp_path("outside"), &err), FB_OK);
    temp_write_text("outside/kept", "x");
    assert_int_equal(symlink("../../outside", temp_path("a/b/link")), 0);
    assert_int_equal(symlink("outside", temp_path("link")), 0);
    assert_int_equal(fb_dir_remove(temp_path("a"), &err), FB_OK);
    assert_int_equal(access(temp_path("a"), F_OK), -1);
    assert_int_equal(fb_dir_remove(temp_path("link"), &err), FB_OK);
    assert_int_equal(access(temp_path("link"), F_OK), -1);
    assert_true(fb_file_exists(temp_path("outside/kept")));
    assert_int_equal(fb_dir_remove(temp_path("never"), &err), FB_OK);
}

static void sentences_are_short_and_printable(void **unused)
{
    (void)unused;
    fb_error err = { 0 };
    char     path[3000], joined[16];
    memset(path, 'p', sizeof path);
    strcpy(path + sizeof path - 6, "/last");
    assert_int_equal(fb_fail_file(&err, FB_INPUT, path, "the fact '%s'", "\x1b[31m\n"), FB_INPUT);
    assert_non_null(strstr(err.msg, "/last: the fact '?[31m?'"));
    expect_failure(fb_path_join(joined, sizeof joined, "0123456789", "abcde", &err), FB_CONFIG, &err, "longer than 15 bytes");
    assert_int_equal(fb_path_join(joined, sizeof joined, "0123456789", "abcd", &err), FB_OK);
    assert_string_equal(joined, "0123456789/abcd");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(reads_what_was_written, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(refuses_what_it_cannot_read, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(a_write_is_all_or_nothing, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(copies, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(folders_come_and_go, temp_dir_make, temp_dir_remove),
        cmocka_unit_test(sentences_are_short_and_printable),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
