/* temp_dir.h - a fresh folder for a test, and files in it.  Include after cmocka.h. */
#ifndef FB_TEST_TEMP_DIR_H
#define FB_TEST_TEMP_DIR_H

#include "io/file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char temp_dir[64];

static inline int temp_dir_make(void **state)
{
    (void)state;
    strcpy(temp_dir, "/tmp/fb_test_XXXXXX");
    return mkdtemp(temp_dir) ? 0 : -1;
}

static inline int temp_dir_remove(void **state)
{
    (void)state;
    return fb_dir_remove(temp_dir, NULL) == FB_OK ? 0 : -1;
}

/* The path of a name in the folder; four results live at a time. */
static const char *temp_path(const char *name)
{
    static char paths[4][512];
    static int  next;
    char       *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", temp_dir, name);
    return path;
}

static inline void temp_write(const char *name, const void *data, size_t size)
{
    FILE *f = fopen(temp_path(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, size, f), size);
    assert_int_equal(fclose(f), 0);
}

static inline void temp_write_text(const char *name, const char *text)
{
    temp_write(name, text, strlen(text));
}

/* The call failed with this status, and its sentence has this part. */
static inline void expect_failure(fb_status got, fb_status want, const fb_error *err, const char *part)
{
    if (got != want || err->status != want || !strstr(err->msg, part))
        fail_msg("status %d, expected %d; \"%s\", expected \"...%s...\"", got, want, err->msg, part);
}

#endif
