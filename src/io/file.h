/* file.h - whole small files, and paths. */
#ifndef FB_IO_FILE_H
#define FB_IO_FILE_H

#include "base/error.h"

#include <stdarg.h>

/* Reads a whole file of at most size_max bytes; *out is NUL-terminated, the caller's to free.
 * FB_INPUT: missing, unreadable, not a regular file, or larger than size_max. */
fb_status fb_file_read(char **out, uint64_t *size, const char *path, uint64_t size_max, fb_error *err);
/* Writes under a temporary name in the same folder, fsyncs, renames into place, fsyncs the folder.  FB_IO. */
fb_status fb_file_write_atomic(const char *path, const void *data, uint64_t size, fb_error *err);
/* All of it, to an open file whose name is path.  FB_IO. */
fb_status fb_file_write_all(int fd, const char *path, const void *data, uint64_t size, fb_error *err);
/* Copies a file the same way; *copied (NULL: not wanted) is false when the source does not exist, which is OK. */
fb_status fb_file_copy_atomic(const char *from, const char *to, bool *copied, fb_error *err);
/* mkdir -p.  FB_IO. */
fb_status fb_dir_make(const char *path, fb_error *err);
/* rm -r of one folder; symbolic links are removed, never followed; nothing there is nothing to do.  FB_IO. */
fb_status fb_dir_remove(const char *path, fb_error *err);
/* fsync of a folder, so that a rename in it survives a power cut.  FB_IO. */
fb_status fb_dir_sync(const char *path, fb_error *err);
bool      fb_file_exists(const char *path);
/* Where DIR/NAME lies once links are followed, the caller's to free; NULL: nowhere.  *inside: in DIR, or where the hub's cache
 * keeps what DIR, a .../snapshots/REVISION of it, links to: .../blobs. */
char     *fb_file_resolve(const char *dir, const char *name, bool *inside);
/* The sentence about a file, "PATH: ...": a long path keeps its end. */
fb_status fb_fail_file(fb_error *err, fb_status status, const char *path, const char *fmt, ...) FB_PRINTF(4, 5);
fb_status fb_fail_filev(fb_error *err, fb_status status, const char *path, const char *fmt, va_list ap) FB_PRINTF(4, 0);
/* "%s/%s" into buf; FB_CONFIG when it does not fit. */
fb_status fb_path_join(char *buf, size_t size, const char *dir, const char *name, fb_error *err);

enum { FB_PATH_SIZE = 4096 };

#endif
