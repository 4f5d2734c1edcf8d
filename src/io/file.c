#include "io/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/sys.h"

enum { PATH_SHOWN = 200, COPY_SIZE = 1 << 20 };

fb_status fb_fail_filev(fb_error *err, fb_status status, const char *path, const char *fmt, va_list ap)
{
    if (!err)
        return status;
    char sentence[sizeof err->msg];
    vsnprintf(sentence, sizeof sentence, fmt, ap);
    size_t length = strlen(path);
    bool   cut = length > PATH_SHOWN;
    return fb_fail(err, status, "%s%s: %s", cut ? "..." : "", cut ? path + length - PATH_SHOWN : path, sentence);
}

fb_status fb_fail_file(fb_error *err, fb_status status, const char *path, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fb_fail_filev(err, status, path, fmt, ap);
    va_end(ap);
    return status;
}

fb_status fb_path_join(char *buf, size_t size, const char *dir, const char *name, fb_error *err)
{
    int length = snprintf(buf, size, "%s/%s", dir, name);
    if (length < 0 || (size_t)length >= size)
        return fb_fail_file(err, FB_CONFIG, dir, "with '%.80s' the path is longer than %zu bytes; use a shorter one", name,
                            size - 1);
    return FB_OK;
}

bool fb_file_exists(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0 && S_ISREG(info.st_mode);
}

static bool is_under(const char *path, const char *dir)
{
    size_t length = strlen(dir);
    return strncmp(path, dir, length) == 0 && path[length] == '/';
}

char *fb_file_resolve(const char *dir, const char *name, bool *inside)
{
    char  path[FB_PATH_SIZE];
    char *real_dir = realpath(dir, NULL), *real_blobs = NULL, *real = NULL;
    *inside = false;
    if (real_dir && fb_path_join(path, sizeof path, dir, name, NULL) == FB_OK)
        real = realpath(path, NULL);
    if (real && fb_path_join(path, sizeof path, real_dir, "../../blobs", NULL) == FB_OK)
        real_blobs = realpath(path, NULL);
    if (real)
        *inside = is_under(real, real_dir) || (real_blobs && is_under(real, real_blobs));
    free(real_dir);
    free(real_blobs);
    return real;
}

/* O_NONBLOCK: opening a fifo that nobody writes must fail the test for a regular file, not hang. */
static fb_status open_regular(int *fd, uint64_t *size, const char *path, fb_error *err)
{
    struct stat info;
    *fd = fb_sys_open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
    if (*fd < 0)
        return errno == ENOENT ? fb_fail_file(err, FB_INPUT, path, "there is no such file")
                               : fb_fail_file(err, FB_INPUT, path, "cannot be opened: %s", strerror(errno));
    if (fstat(*fd, &info) != 0)
        fb_fail_file(err, FB_INPUT, path, "cannot be examined: %s", strerror(errno));
    else if (!S_ISREG(info.st_mode))
        fb_fail_file(err, FB_INPUT, path, "is %s, a regular file is needed",
                     S_ISDIR(info.st_mode) ? "a folder" : "a device or pipe");
    else {
        *size = (uint64_t)info.st_size;
        return FB_OK;
    }
    close(*fd);
    *fd = -1;
    return FB_INPUT;
}

fb_status fb_file_read(char **out, uint64_t *size, const char *path, uint64_t size_max, fb_error *err)
{
    fb_status st = FB_OK;
    char     *text = NULL;
    int       fd;
    uint64_t  total, got = 0;
    if ((st = open_regular(&fd, &total, path, err)) != FB_OK)
        return st;
    if (total > size_max) {
        st = fb_fail_file(err, FB_INPUT, path, "is %llu bytes long, at most %llu are read", (unsigned long long)total,
                          (unsigned long long)size_max);
        goto done;
    }
    text = malloc(total + 1);
    if (!text) {
        st = fb_fail_file(err, FB_NOMEM, path, "no memory for its %llu bytes", (unsigned long long)total);
        goto done;
    }
    while (got < total) {
        ssize_t n = fb_sys_read(fd, text + got, total - got);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            st = fb_fail_file(err, FB_INPUT, path, "reading stopped at byte %llu of %llu: %s", (unsigned long long)got,
                              (unsigned long long)total, n < 0 ? strerror(errno) : "the file became shorter");
            goto done;
        }
        got += (uint64_t)n;
    }
    text[total] = '\0';
    *out = text;
    *size = total;
    text = NULL;
done:
    free(text);
    close(fd);
    return st;
}

fb_status fb_file_write_all(int fd, const char *path, const void *data, uint64_t size, fb_error *err)
{
    const char *at = data;
    while (size) {
        ssize_t n = fb_sys_write(fd, at, size);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fb_fail_file(err, FB_IO, path, "cannot be written: %s", strerror(errno));
        at += n;
        size -= (uint64_t)n;
    }
    return FB_OK;
}

/* The folder that holds path: everything before the last slash. */
static fb_status sync_parent(const char *path, fb_error *err)
{
    char        dir[FB_PATH_SIZE];
    const char *slash = strrchr(path, '/');
    size_t      length = slash ? (size_t)(slash - path) : 0;
    if (!slash)
        return fb_dir_sync(".", err);
    if (length >= sizeof dir)
        return fb_fail_file(err, FB_CONFIG, path, "the path is longer than %d bytes; use a shorter one", FB_PATH_SIZE - 1);
    memcpy(dir, path, length);
    dir[length] = '\0';
    return fb_dir_sync(length ? dir : "/", err);
}

/* The temporary name is fixed, so that what a killed run left behind is overwritten by the next and never piles up.
 * O_EXCL after unlink: a link planted under that name is not followed. */
static fb_status open_temporary(int *fd, char *name, size_t size, const char *path, fb_error *err)
{
    int length = snprintf(name, size, "%s.tmp", path);
    if (length < 0 || (size_t)length >= size)
        return fb_fail_file(err, FB_CONFIG, path, "the path is longer than %zu bytes; use a shorter one", size - 5);
    fb_sys_unlink(name);
    *fd = fb_sys_open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    return *fd >= 0 ? FB_OK : fb_fail_file(err, FB_IO, name, "cannot be created: %s", strerror(errno));
}

/* Closes fd whatever happens; on failure of this or of st the temporary file is gone. */
static fb_status settle(fb_status st, int fd, const char *temporary, const char *path, fb_error *err)
{
    if (st == FB_OK && fb_sys_fsync(fd) != 0)
        st = fb_fail_file(err, FB_IO, path, "cannot be made durable: %s", strerror(errno));
    if (close(fd) != 0 && st == FB_OK)
        st = fb_fail_file(err, FB_IO, path, "cannot be closed: %s", strerror(errno));
    if (st == FB_OK && fb_sys_rename(temporary, path) != 0)
        st = fb_fail_file(err, FB_IO, path, "cannot be renamed into place: %s", strerror(errno));
    if (st != FB_OK) {
        fb_sys_unlink(temporary);
        return st;
    }
    return sync_parent(path, err);
}

fb_status fb_file_write_atomic(const char *path, const void *data, uint64_t size, fb_error *err)
{
    char      temporary[FB_PATH_SIZE];
    int       fd = -1;
    fb_status st = open_temporary(&fd, temporary, sizeof temporary, path, err);
    if (st != FB_OK)
        return st;
    return settle(fb_file_write_all(fd, path, data, size, err), fd, temporary, path, err);
}

static fb_status copy_all(int to_fd, int from_fd, const char *to, const char *from, fb_error *err)
{
    fb_status st = FB_OK;
    char     *piece = malloc(COPY_SIZE);
    if (!piece)
        return fb_fail_file(err, FB_NOMEM, from, "no memory to copy it");
    while (st == FB_OK) {
        ssize_t n = fb_sys_read(from_fd, piece, COPY_SIZE);
        if (n == 0)
            break;
        if (n > 0)
            st = fb_file_write_all(to_fd, to, piece, (uint64_t)n, err);
        else if (errno != EINTR)
            st = fb_fail_file(err, FB_INPUT, from, "cannot be read: %s", strerror(errno));
    }
    free(piece);
    return st;
}

fb_status fb_file_copy_atomic(const char *from, const char *to, bool *copied, fb_error *err)
{
    char        temporary[FB_PATH_SIZE];
    struct stat info;
    int         from_fd, to_fd = -1;
    uint64_t    size;
    bool        present = stat(from, &info) == 0 || errno != ENOENT;
    if (copied)
        *copied = false;
    if (!present)
        return FB_OK;
    fb_status st = open_regular(&from_fd, &size, from, err);
    if (st != FB_OK)
        return st;
    st = open_temporary(&to_fd, temporary, sizeof temporary, to, err);
    if (st == FB_OK)
        st = settle(copy_all(to_fd, from_fd, to, from, err), to_fd, temporary, to, err);
    close(from_fd);
    if (copied)
        *copied = st == FB_OK;
    return st;
}

static fb_status make_one(const char *path, fb_error *err)
{
    struct stat info;
    if (fb_sys_mkdir(path, 0777) == 0)
        return FB_OK;
    int why = errno;
    if (stat(path, &info) == 0) {
        if (S_ISDIR(info.st_mode))
            return FB_OK;
        return fb_fail_file(err, FB_IO, path, "exists and is not a folder; name another, or move it away");
    }
    return fb_fail_file(err, FB_IO, path, "cannot be made a folder: %s", strerror(why));
}

fb_status fb_dir_make(const char *path, fb_error *err)
{
    char   part[FB_PATH_SIZE];
    size_t length = strlen(path);
    if (length == 0)
        return fb_fail(err, FB_IO, "an empty path cannot be made a folder");
    if (length >= sizeof part)
        return fb_fail_file(err, FB_IO, path, "the path is longer than %d bytes; use a shorter one", FB_PATH_SIZE - 1);
    memcpy(part, path, length + 1);
    for (size_t i = 1; i < length; i++) {
        if (part[i] != '/' || part[i - 1] == '/')
            continue;
        part[i] = '\0';
        fb_status st = make_one(part, err);
        if (st != FB_OK)
            return st;
        part[i] = '/';
    }
    return make_one(part, err);
}

/* Empties the folder that fd is; closes fd.  Names are resolved against the open folder, so a folder that is swapped
 * for a link meanwhile is not followed. */
static int empty_folder(int fd)
{
    DIR *dir = fdopendir(fd);
    if (!dir) {
        close(fd);
        return -1;
    }
    int            failed = 0;
    struct dirent *entry;
    while (!failed && (errno = 0, entry = readdir(dir)) != NULL) {
        const char *name = entry->d_name;
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || fb_sys_unlinkat(fd, name, 0) == 0)
            continue;
        int inner = openat(fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        failed = inner < 0 || empty_folder(inner) != 0 || fb_sys_unlinkat(fd, name, AT_REMOVEDIR) != 0;
    }
    int why = errno;
    closedir(dir);
    errno = why;
    return failed || why ? -1 : 0;
}

fb_status fb_dir_remove(const char *path, fb_error *err)
{
    int fd = fb_sys_open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
    if (fd < 0) {
        if (errno == ENOENT)
            return FB_OK;
        if (errno == ENOTDIR || errno == ELOOP) { /* a link goes, a file is not ours to remove */
            struct stat info;
            if (lstat(path, &info) == 0 && S_ISLNK(info.st_mode) && fb_sys_unlink(path) == 0)
                return FB_OK;
            return fb_fail_file(err, FB_IO, path, "is not a folder, so it was not removed");
        }
    }
    if (fd < 0 || empty_folder(fd) != 0 || fb_sys_rmdir(path) != 0)
        return fb_fail_file(err, FB_IO, path, "cannot be removed: %s", strerror(errno));
    return FB_OK;
}

fb_status fb_dir_sync(const char *path, fb_error *err)
{
    int fd = fb_sys_open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (fd < 0)
        return fb_fail_file(err, FB_IO, path, "cannot be opened as a folder: %s", strerror(errno));
    /* EINVAL: this file system has no such operation, hence no weaker state to leave behind. */
    int failed = fb_sys_fsync(fd) != 0 && errno != EINVAL, why = errno;
    close(fd);
    return failed ? fb_fail_file(err, FB_IO, path, "cannot be made durable: %s", strerror(why)) : FB_OK;
}
