/* sys.h - the system calls that touch a file, in one place, so that a test can make any of them fail.
 *
 * FOREBAY_FAULT_IO, read once when a job is opened: comma-separated words.  OP is open, read, write, sync, rename, mkdir, remove
 * or map; N counts the calls of OP from 1.
 *   fail=OP:N[:ERRNO]  the Nth call fails: EIO (the default), ENOSPC, EINTR, EACCES, EROFS, EMFILE, ENOMEM, EINVAL
 *   full=N             a full disk: from the Nth write on each fails with ENOSPC
 *   short=OP:N         the Nth read or write moves half of its bytes; N = 0: each does
 *   slow=OP:MICROS     each call of OP takes so much longer
 *   die=OP:N           SIGKILL at the Nth call, a write half done: a power cut
 *   count=PATH         at exit appends "io OP calls" for every OP to PATH
 * Without it a call costs one test of a flag.  Threads: any. */
#ifndef FB_IO_SYS_H
#define FB_IO_SYS_H

#include <sys/types.h>

#include "base/error.h"

/* NULL or "": no faults.  FB_CONFIG. */
fb_status fb_sys_faults(const char *spec, fb_error *err);

/* As their namesakes. */
int     fb_sys_open(const char *path, int flags, mode_t mode);
ssize_t fb_sys_read(int fd, void *to, size_t size);
ssize_t fb_sys_pread(int fd, void *to, size_t size, off_t at);
ssize_t fb_sys_write(int fd, const void *from, size_t size);
ssize_t fb_sys_pwrite(int fd, const void *from, size_t size, off_t at);
int     fb_sys_fsync(int fd);
int     fb_sys_rename(const char *from, const char *to);
int     fb_sys_renameat2(const char *from, const char *to, unsigned flags);
int     fb_sys_mkdir(const char *path, mode_t mode);
int     fb_sys_unlink(const char *path);
int     fb_sys_unlinkat(int dir, const char *name, int flags);
int     fb_sys_rmdir(const char *path);
/* PROT_READ, MAP_PRIVATE, from the start. */
void   *fb_sys_map(int fd, size_t size);

#endif
