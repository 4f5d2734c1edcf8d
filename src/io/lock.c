#include "io/lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "io/sys.h"

static const char lock_file[] = ".forebay.lock";
enum { HOLDER_SIZE = 200 };

/* Who holds it, as it wrote there; what a stranger may have put into the file is cut and made printable. */
static void read_holder(int fd, char holder[HOLDER_SIZE])
{
    ssize_t n = fb_sys_pread(fd, holder, HOLDER_SIZE - 1, 0);
    holder[n > 0 ? n : 0] = 0;
    holder[strcspn(holder, "\n")] = 0;
    for (char *c = holder; *c; c++)
        if ((unsigned char)*c < 0x20 || (unsigned char)*c > 0x7e)
            *c = '?';
}

static fb_status write_holder(const fb_lock *l, const char *what, fb_error *err)
{
    char host[65] = "", since[32] = "", text[HOLDER_SIZE];
    time_t now = time(NULL);
    struct tm t;
    gethostname(host, sizeof host - 1);
    if (gmtime_r(&now, &t))
        strftime(since, sizeof since, "%Y-%m-%dT%H:%M:%SZ", &t);
    int n = snprintf(text, sizeof text, "%s, process %ld on %s, since %s\n", what, (long)getpid(), host, since);
    if (ftruncate(l->fd, 0) != 0)
        return fb_fail_file(err, FB_IO, l->path, "cannot be written: %s", strerror(errno));
    return fb_file_write_all(l->fd, l->path, text, (uint64_t)n, err);
}

/* The holder before may have removed the file between our opening it and our getting the lock. */
static bool is_still_there(const fb_lock *l)
{
    struct stat held, there;
    return fstat(l->fd, &held) == 0 && stat(l->path, &there) == 0 && held.st_ino == there.st_ino && held.st_dev == there.st_dev;
}

static void let_go(fb_lock *l)
{
    close(l->fd);
    l->fd = 0;
}

static fb_status held_by_another(const fb_lock *l, const char *folder, fb_error *err)
{
    char holder[HOLDER_SIZE];
    read_holder(l->fd, holder);
    return fb_fail_file(err, FB_CONFIG, folder, "another forebay writes here (%s); wait for it, stop it, or name another folder",
                        *holder ? holder : "it has not said who it is");
}

fb_status fb_lock_take(fb_lock *l, const char *folder, const char *what, fb_error *err)
{
    fb_status st = FB_OK;
    *l = (fb_lock){ 0 };
    FB_TRY(fb_dir_make(folder, err));
    FB_TRY(fb_path_join(l->path, sizeof l->path, folder, lock_file, err));
    do {
        if (l->fd)
            let_go(l);
        l->fd = fb_sys_open(l->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
        if (l->fd < 0) {
            l->fd = 0;
            FB_TRY(fb_fail_file(err, FB_IO, l->path, "cannot be made: %s; output_dir must be a folder that can be written",
                                strerror(errno)));
        }
        if (flock(l->fd, LOCK_EX | LOCK_NB) == 0)
            continue;
        if (errno == EWOULDBLOCK)
            FB_TRY(held_by_another(l, folder, err));
        l->refused = errno;
        fb_sys_unlink(l->path);
        let_go(l);
        return FB_OK;
    } while (!is_still_there(l));
    FB_TRY(write_holder(l, what, err));
done:
    if (st == FB_CONFIG && l->fd) /* another's: its file stays */
        let_go(l);
    else if (st != FB_OK)
        fb_lock_give(l);
    return st;
}

void fb_lock_give(fb_lock *l)
{
    if (!l->fd)
        return;
    fb_sys_unlink(l->path); /* while it is held: whoever takes it next makes a new one */
    let_go(l);
}
