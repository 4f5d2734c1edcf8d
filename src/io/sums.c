#include "io/sums.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/thread.h"
#include "io/file.h"
#include "io/sys.h"

enum { VERSION = 2, MANIFEST_SIZE_MAX = 64 << 20, READ_SIZE = 64 << 10 /* it stays in the cache until it is summed */ };
static const char manifest_file[] = "manifest.json", format_name[] = "forebay checkpoint";

void fb_sums_digits(char digits[FB_SUM_DIGITS + 1], XXH128_hash_t sum)
{
    snprintf(digits, FB_SUM_DIGITS + 1, "%016llx%016llx", (unsigned long long)sum.high64, (unsigned long long)sum.low64);
}

/* ---- the list ---- */

fb_status fb_sums_add(fb_sums *s, const char *name, uint64_t size, const char *digits, fb_error *err)
{
    if (strlen(name) >= FB_FILE_NAME_SIZE)
        return fb_fail(err, FB_FAILED, "'%.96s...': a file's name is longer than %d bytes", name, FB_FILE_NAME_SIZE - 1);
    if (s->n == s->capacity) {
        uint32_t capacity = s->capacity ? 2 * s->capacity : 16;
        fb_sum *grown = realloc(s->files, capacity * sizeof *grown);
        if (!grown)
            return fb_fail(err, FB_NOMEM, "manifest.json: no memory for %u files", capacity);
        s->files = grown;
        s->capacity = capacity;
    }
    fb_sum *f = &s->files[s->n++];
    f->size = size;
    strcpy(f->name, name);
    memcpy(f->digits, digits, FB_SUM_DIGITS);
    f->digits[FB_SUM_DIGITS] = 0;
    return FB_OK;
}

void fb_sums_free(fb_sums *s)
{
    free(s->files);
    *s = (fb_sums){ 0 };
}

/* Size and sum of a regular file.  failure: the status of one that cannot be read. */
static fb_status sum_file(uint64_t *size, char digits[FB_SUM_DIGITS + 1], const char *path, fb_status failure, fb_error *err)
{
    fb_status st = FB_OK;
    struct stat info;
    XXH3_state_t *sum = NULL;
    unsigned char *buffer = NULL;
    ssize_t n;
    *size = 0;
    int fd = fb_sys_open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW, 0);
    if (fd < 0)
        return errno == ENOENT ? fb_fail_file(err, failure, path, "is missing")
                               : fb_fail_file(err, failure, path, "cannot be opened: %s", strerror(errno));
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode))
        FB_TRY(fb_fail_file(err, failure, path, "is not a regular file"));
    posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    sum = XXH3_createState();
    buffer = malloc(READ_SIZE);
    if (!sum || !buffer)
        FB_TRY(fb_fail_file(err, FB_NOMEM, path, "no memory to read it"));
    XXH3_128bits_reset(sum);
    while ((n = fb_sys_read(fd, buffer, READ_SIZE)) != 0) {
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            FB_TRY(fb_fail_file(err, failure, path, "cannot be read at byte %llu: %s", (unsigned long long)*size, strerror(errno)));
        XXH3_128bits_update(sum, buffer, (size_t)n);
        *size += (uint64_t)n;
    }
    fb_sums_digits(digits, XXH3_128bits_digest(sum));
done:
    close(fd);
    free(buffer);
    XXH3_freeState(sum);
    return st;
}

static bool is_listed(const fb_sums *s, const char *name)
{
    for (uint32_t i = 0; i < s->n; i++)
        if (!strcmp(s->files[i].name, name))
            return true;
    return false;
}

fb_status fb_sums_add_rest(fb_sums *s, const char *dir, fb_error *err)
{
    fb_status st = FB_OK;
    char path[FB_PATH_SIZE], digits[FB_SUM_DIGITS + 1];
    uint64_t size;
    DIR *d = opendir(dir);
    if (!d)
        return fb_fail_file(err, FB_IO, dir, "cannot be listed: %s", strerror(errno));
    for (struct dirent *e; (e = readdir(d));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..") || is_listed(s, e->d_name))
            continue;
        FB_TRY(fb_path_join(path, sizeof path, dir, e->d_name, err));
        FB_TRY(sum_file(&size, digits, path, FB_IO, err));
        FB_TRY(fb_sums_add(s, e->d_name, size, digits, err));
    }
done:
    closedir(d);
    return st;
}

/* ---- manifest.json ---- */

/* The last member, which holds the sum of what comes before it. */
static void last_member(char out[96], const char *text, size_t size)
{
    char digits[FB_SUM_DIGITS + 1];
    fb_sums_digits(digits, XXH3_128bits(text, size));
    snprintf(out, 96, ",\n  \"sum\": \"%s\"\n}\n", digits);
}

fb_status fb_sums_write(const fb_sums *s, const char *dir, fb_error *err)
{
    fb_status st = FB_OK;
    char path[FB_PATH_SIZE], last[96], *text = NULL, *whole = NULL;
    json_t *files = json_array(), *root = json_pack("{s:s, s:i, s:O}", "format", format_name, "version", VERSION, "files", files);
    bool ok = root != NULL;
    for (uint32_t i = 0; i < s->n && ok; i++)
        ok = json_array_append_new(files, json_pack("{s:s, s:I, s:s}", "name", s->files[i].name, "size",
                                                    (json_int_t)s->files[i].size, "xxh3_128", s->files[i].digits)) == 0;
    text = ok ? json_dumps(root, JSON_INDENT(2)) : NULL;
    if (!text)
        FB_TRY(fb_fail(err, FB_NOMEM, "%s: no memory for manifest.json", dir));
    size_t size = strlen(text) - strlen("\n}");
    last_member(last, text, size);
    whole = malloc(size + sizeof last);
    if (!whole)
        FB_TRY(fb_fail(err, FB_NOMEM, "%s: no memory for manifest.json", dir));
    memcpy(whole, text, size);
    strcpy(whole + size, last);
    FB_TRY(fb_path_join(path, sizeof path, dir, manifest_file, err));
    FB_TRY(fb_file_write_atomic(path, whole, strlen(whole), err));
done:
    free(text);
    free(whole);
    json_decref(files);
    json_decref(root);
    return st;
}

static fb_status read_manifest(json_t **out, const char *dir, fb_error *err)
{
    fb_status st = FB_OK;
    char path[FB_PATH_SIZE], last[96], *text = NULL;
    uint64_t size;
    const char *format;
    int version;
    json_t *root = NULL;
    FB_TRY(fb_path_join(path, sizeof path, dir, manifest_file, err));
    FB_TRY(fb_file_read(&text, &size, path, MANIFEST_SIZE_MAX, err));
    last_member(last, "", 0);
    size_t length = strlen(last);
    uint64_t before = size > length ? size - length : 0;
    last_member(last, text, before);
    if (memcmp(text + before, last, size - before < length ? size - before : length))
        FB_TRY(fb_fail_file(err, FB_INPUT, path, "does not agree with its own sum"));
    root = json_loadb(text, size, JSON_REJECT_DUPLICATES, NULL);
    if (json_unpack(root, "{s:s, s:i}", "format", &format, "version", &version) != 0 || strcmp(format, format_name))
        FB_TRY(fb_fail_file(err, FB_INPUT, path, "is not the manifest of a checkpoint"));
    if (version != VERSION)
        FB_TRY(fb_fail_file(err, FB_INPUT, path, "has version %d of the format, this forebay reads version %d", version, VERSION));
    *out = root;
    root = NULL;
done:
    free(text);
    json_decref(root);
    return st;
}

/* ---- verifying ---- */

typedef struct verification {
    const char     *dir;
    fb_sum         *want;
    pthread_mutex_t mutex; /* guards what follows */
    size_t          first; /* of the files that are not as they should be, in the manifest's order: it is the one that is told */
    fb_error        err;
} verification;

static fb_status verify_file(const char *dir, const fb_sum *want, fb_error *err)
{
    fb_status st = FB_OK;
    char path[FB_PATH_SIZE], digits[FB_SUM_DIGITS + 1];
    uint64_t size;
    FB_TRY(fb_path_join(path, sizeof path, dir, want->name, err));
    FB_TRY(sum_file(&size, digits, path, FB_INPUT, err));
    if (size != want->size)
        FB_TRY(fb_fail_file(err, FB_INPUT, path, "is %llu bytes long, manifest.json says %llu", (unsigned long long)size,
                            (unsigned long long)want->size));
    if (strcmp(digits, want->digits))
        FB_TRY(fb_fail_file(err, FB_INPUT, path, "is damaged: its sum is not the one in manifest.json"));
done:
    return st;
}

static void verify_task(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    verification *v = ctx;
    fb_error err;
    pthread_mutex_lock(&v->mutex);
    bool matters = task < v->first;
    pthread_mutex_unlock(&v->mutex);
    if (!matters || verify_file(v->dir, &v->want[task], &err) == FB_OK)
        return;
    pthread_mutex_lock(&v->mutex);
    if (task < v->first) {
        v->first = task;
        v->err = err;
    }
    pthread_mutex_unlock(&v->mutex);
}

static fb_status list_files(fb_sums *out, const json_t *files, const char *dir, fb_error *err)
{
    fb_status st = FB_OK;
    for (size_t i = 0; i < json_array_size(files); i++) {
        const char *name, *digits;
        json_int_t size;
        if (json_unpack(json_array_get(files, i), "{s:s, s:I, s:s}", "name", &name, "size", &size, "xxh3_128", &digits) != 0
            || strchr(name, '/') || strlen(name) >= FB_FILE_NAME_SIZE || strlen(digits) != FB_SUM_DIGITS)
            FB_TRY(fb_fail_file(err, FB_INPUT, dir, "an entry of manifest.json is not as forebay writes it"));
        FB_TRY(fb_sums_add(out, name, (uint64_t)size, digits, err));
    }
done:
    return st;
}

/* A sum is one of a whole file, so it is files that the threads share. */
fb_status fb_sums_verify(const char *dir, fb_error *err)
{
    fb_status st = FB_OK;
    json_t *root = NULL;
    fb_sums want = { 0 };
    fb_team *team = NULL;
    FB_TRY(read_manifest(&root, dir, err));
    FB_TRY(list_files(&want, json_object_get(root, "files"), dir, err));
    uint32_t n_thread = fb_core_count() < want.n ? fb_core_count() : want.n;
    FB_TRY(fb_team_new(&team, n_thread ? n_thread : 1, "sums", err));
    verification v = { .dir = dir, .want = want.files, .mutex = PTHREAD_MUTEX_INITIALIZER, .first = want.n };
    fb_team_run(team, want.n, verify_task, &v);
    if (v.first < want.n) {
        st = v.err.status;
        if (err)
            *err = v.err;
    }
done:
    fb_team_free(team);
    fb_sums_free(&want);
    json_decref(root);
    return st;
}
