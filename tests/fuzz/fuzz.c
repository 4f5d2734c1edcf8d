#include "fuzz.h"

#include "io/file.h"

#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

void fuzz_stop(const char *file, int line, const char *condition, const char *fmt, ...)
{
    va_list ap;
    fprintf(stderr, "%s:%d: not so: %s: ", file, line, condition);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    abort();
}

const char *fuzz_file(const uint8_t *data, size_t size)
{
    static char path[64];
    static int  fd = -1;
    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        FUZZ_REQUIRE(fd >= 0, "no file in memory");
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    FUZZ_REQUIRE(ftruncate(fd, 0) == 0 && pwrite(fd, data, size, 0) == (ssize_t)size, "no room for %zu bytes", size);
    return path;
}

static char folder[256];

static void remove_folder(void)
{
    fb_dir_remove(folder, NULL);
}

const char *fuzz_folder(void)
{
    if (!*folder) {
        const char *parent = getenv("FUZZ_TMP");
        snprintf(folder, sizeof folder, "%s/forebay-fuzz-XXXXXX", parent ? parent : "/dev/shm");
        FUZZ_REQUIRE(mkdtemp(folder), "%s cannot be made", folder);
        atexit(remove_folder);
    }
    return folder;
}

void fuzz_put(const char *name, const void *data, size_t size)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", fuzz_folder(), name);
    if (!data) {
        unlink(path);
        return;
    }
    FILE *f = fopen(path, "wb");
    FUZZ_REQUIRE(f, "%s cannot be written", path);
    FUZZ_REQUIRE(fwrite(data, 1, size, f) == size && fclose(f) == 0, "%s cannot be written", path);
}

void fuzz_refused(fb_status st, fb_status want, const fb_error *err, const char *part)
{
    FUZZ_REQUIRE(st == want && err->status == want, "status %d (%d), expected %d: %s", st, err->status, want, err->msg);
    FUZZ_REQUIRE(strstr(err->msg, part), "'%s' is not in: %s", part, err->msg);
    for (const char *c = err->msg; *c; c++)
        FUZZ_REQUIRE((unsigned char)*c >= 0x20 && *c != 0x7f, "byte 0x%02x in: %s", (unsigned char)*c, err->msg);
    json_t *text = json_string(err->msg); /* NULL for what is not UTF-8 */
    FUZZ_REQUIRE(text, "not UTF-8: %s", err->msg);
    json_decref(text);
}

void fuzz_touch(const void *data, size_t size)
{
    const volatile unsigned char *bytes = data;
    for (size_t i = 0; i < size; i++)
        (void)bytes[i];
}

void fuzz_read(const fb_tensor *t)
{
    enum { PIECE = 1 << 12 };
    unsigned char piece[PIECE * sizeof(float)];
    fb_error      err;
    for (uint64_t i = 0, k, n = t->size / fb_dtype_size(t->dtype); i < n; i += k) {
        k = n - i < PIECE ? n - i : PIECE;
        FUZZ_REQUIRE(fb_tensor_read(t, i, k, piece, &err) == FB_OK, "%s", err.msg);
        fuzz_touch(piece, k * fb_dtype_size(t->dtype));
    }
}

size_t fuzz_cut(const uint8_t *data, size_t size)
{
    const uint8_t *mark = size ? memchr(data, 0xff, size) : NULL;
    return mark ? (size_t)(mark - data) : size;
}
