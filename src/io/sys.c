#include "io/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define OP_MAP(X) X(open) X(read) X(write) X(sync) X(rename) X(mkdir) X(remove) X(map)
#define OP_ENUM(name) OP_##name,
typedef enum { OP_MAP(OP_ENUM) OP_COUNT } op;
#define OP_NAME(name) #name,
static const char *const op_names[] = { OP_MAP(OP_NAME) };

enum { NEVER = 0, WORD_SIZE = 512 };

typedef struct faults {
    uint64_t fail_at[OP_COUNT], short_at[OP_COUNT], die_at[OP_COUNT], slow_us[OP_COUNT], full_from;
    bool     always_short[OP_COUNT];
    int      why[OP_COUNT]; /* errno of fail_at */
    char     count_path[WORD_SIZE];
} faults;

static faults   told;
static bool     armed; /* set before the first thread is made */
static uint64_t n_call[OP_COUNT];

/* ---- what is asked for ---- */

static const struct { const char *name; int value; } reasons[] = {
    { "EIO", EIO }, { "ENOSPC", ENOSPC }, { "EINTR", EINTR }, { "EACCES", EACCES }, { "EROFS", EROFS }, { "EMFILE", EMFILE },
    { "ENOMEM", ENOMEM }, { "EINVAL", EINVAL },
};

/* "OP:N" and what stands behind it; false: it is not that. */
static bool read_point(const char *text, op *which, uint64_t *n, const char **rest)
{
    for (*which = 0; *which < OP_COUNT; (*which)++) {
        size_t length = strlen(op_names[*which]);
        char *end;
        if (strncmp(text, op_names[*which], length) || text[length] != ':')
            continue;
        text += length + 1;
        errno = 0;
        *n = strtoull(text, &end, 10);
        *rest = end;
        return *text >= '0' && *text <= '9' && !errno;
    }
    return false;
}

static bool read_reason(const char *text, int *out)
{
    *out = EIO;
    if (!*text)
        return true;
    for (size_t i = 0; *text == ':' && i < FB_COUNT(reasons); i++)
        if (!strcmp(text + 1, reasons[i].name)) {
            *out = reasons[i].value;
            return true;
        }
    return false;
}

static bool read_word(faults *f, const char *word)
{
    op which;
    uint64_t n;
    const char *rest;
    int why;
    if (!strncmp(word, "count=", 6) && word[6]) {
        strcpy(f->count_path, word + 6);
        return true;
    }
    if (!strncmp(word, "full=", 5)) {
        char *end;
        f->full_from = strtoull(word + 5, &end, 10);
        return word[5] >= '0' && word[5] <= '9' && !*end && f->full_from;
    }
    const char *equals = strchr(word, '=');
    if (!equals || !read_point(equals + 1, &which, &n, &rest))
        return false;
    if (!strncmp(word, "fail=", 5) && n && read_reason(rest, &why)) {
        f->fail_at[which] = n;
        f->why[which] = why;
        return true;
    }
    if (*rest)
        return false;
    if (!strncmp(word, "short=", 6) && (which == OP_read || which == OP_write)) {
        f->short_at[which] = n;
        f->always_short[which] = n == 0;
    } else if (!strncmp(word, "slow=", 5) && n <= 10000000)
        f->slow_us[which] = n;
    else if (!strncmp(word, "die=", 4) && n)
        f->die_at[which] = n;
    else
        return false;
    return true;
}

static void write_counts(void)
{
    FILE *to = fopen(told.count_path, "ae");
    for (op o = 0; to && o < OP_COUNT; o++)
        fprintf(to, "io %s %llu\n", op_names[o], (unsigned long long)n_call[o]);
    if (to)
        fclose(to);
}

fb_status fb_sys_faults(const char *spec, fb_error *err)
{
    faults f = { .full_from = NEVER };
    char word[WORD_SIZE];
    for (const char *at = spec; at && *at;) {
        size_t n = strcspn(at, ",");
        snprintf(word, sizeof word, "%.*s", (int)(n < WORD_SIZE ? n : WORD_SIZE), at);
        if (n >= WORD_SIZE || !read_word(&f, word))
            return fb_fail(err, FB_CONFIG, "FOREBAY_FAULT_IO: '%s' is not fail=OP:N[:ERRNO], full=N, short=OP:N, slow=OP:MICROS, "
                           "die=OP:N or count=PATH; it is for tests, unset it", word);
        at += n + (at[n] == ',');
    }
    if (*f.count_path && !*told.count_path)
        atexit(write_counts);
    told = f;
    memset(n_call, 0, sizeof n_call);
    armed = spec && *spec;
    return FB_OK;
}

/* ---- what comes of it ---- */

static void dawdle(uint64_t us)
{
    struct timespec left = { (time_t)(us / 1000000), (long)(us % 1000000) * 1000 };
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
}

static void die(void)
{
    kill(getpid(), SIGKILL);
    pause();
}

/* Counts a call.  false: it fails, errno says why.  size: what a read or write may move (NULL: no such call); *dies: a write
 * is to be the last thing that happens. */
static bool strike(op o, size_t *size, bool *dies)
{
    if (!armed)
        return true;
    uint64_t n = __atomic_add_fetch(&n_call[o], 1, __ATOMIC_RELAXED);
    if (told.slow_us[o])
        dawdle(told.slow_us[o]);
    bool last = n == told.die_at[o];
    if (last && !dies)
        die();
    if (n == told.fail_at[o]) {
        errno = told.why[o];
        return false;
    }
    if (o == OP_write && told.full_from && n >= told.full_from) {
        errno = ENOSPC;
        return false;
    }
    if (size && *size > 1 && (last || told.always_short[o] || n == told.short_at[o]))
        *size /= 2;
    if (dies)
        *dies = last;
    return true;
}

int fb_sys_open(const char *path, int flags, mode_t mode)
{
    return strike(OP_open, NULL, NULL) ? open(path, flags, mode) : -1;
}

ssize_t fb_sys_read(int fd, void *to, size_t size)
{
    return strike(OP_read, &size, NULL) ? read(fd, to, size) : -1;
}

ssize_t fb_sys_pread(int fd, void *to, size_t size, off_t at)
{
    return strike(OP_read, &size, NULL) ? pread(fd, to, size, at) : -1;
}

ssize_t fb_sys_write(int fd, const void *from, size_t size)
{
    bool dies = false;
    ssize_t n = strike(OP_write, &size, &dies) ? write(fd, from, size) : -1;
    if (dies)
        die();
    return n;
}

ssize_t fb_sys_pwrite(int fd, const void *from, size_t size, off_t at)
{
    bool dies = false;
    ssize_t n = strike(OP_write, &size, &dies) ? pwrite(fd, from, size, at) : -1;
    if (dies)
        die();
    return n;
}

int fb_sys_fsync(int fd)
{
    return strike(OP_sync, NULL, NULL) ? fsync(fd) : -1;
}

int fb_sys_rename(const char *from, const char *to)
{
    return strike(OP_rename, NULL, NULL) ? rename(from, to) : -1;
}

int fb_sys_renameat2(const char *from, const char *to, unsigned flags)
{
    return strike(OP_rename, NULL, NULL) ? renameat2(AT_FDCWD, from, AT_FDCWD, to, flags) : -1;
}

int fb_sys_mkdir(const char *path, mode_t mode)
{
    return strike(OP_mkdir, NULL, NULL) ? mkdir(path, mode) : -1;
}

int fb_sys_unlink(const char *path)
{
    return strike(OP_remove, NULL, NULL) ? unlink(path) : -1;
}

int fb_sys_unlinkat(int dir, const char *name, int flags)
{
    return strike(OP_remove, NULL, NULL) ? unlinkat(dir, name, flags) : -1;
}

int fb_sys_rmdir(const char *path)
{
    return strike(OP_remove, NULL, NULL) ? rmdir(path) : -1;
}

void *fb_sys_map(int fd, size_t size)
{
    return strike(OP_map, NULL, NULL) ? mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0) : MAP_FAILED;
}
