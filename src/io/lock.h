/* lock.h - one writer a folder.
 *
 * flock on a file in the folder that says who holds it.  The kernel lets go when the holder dies, however it dies, so there is
 * never a stale lock to clear away: a file left behind by a kill means nothing.  Over NFS it holds between hosts. */
#ifndef FB_IO_LOCK_H
#define FB_IO_LOCK_H

#include "io/file.h"

typedef struct fb_lock {
    int  fd;      /* 0: nothing is held */
    int  refused; /* errno of a file system that has no locks: nothing is held, and the caller should say so; else 0 */
    char path[FB_PATH_SIZE];
} fb_lock;

/* Makes the folder.  what: "train", for whoever finds it locked.  FB_CONFIG: somebody else holds it, and the sentence says
 * who.  FB_IO. */
fb_status fb_lock_take(fb_lock *l, const char *folder, const char *what, fb_error *err);
void      fb_lock_give(fb_lock *l); /* removes the file too; a zeroed struct is fine */

#endif
