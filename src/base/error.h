/* error.h - a status to branch on, a message to read.
 *
 * The sentence goes into an fb_error that the caller owns; it is not thread-local, because our errors are
 * born on copy and update threads and told by the main one.  A broken promise between our own functions is
 * an assert, not a status; asserts stay on in release builds. */
#ifndef FB_BASE_ERROR_H
#define FB_BASE_ERROR_H

#include "forebay/forebay.h"

/* Sets *err (NULL: the caller does not care) and returns status, so that a failure is one line.  The sentence is one printable
 * line of UTF-8 whatever it repeats: names in hostile files may carry control characters to a terminal. */
fb_status fb_fail(fb_error *err, fb_status status, const char *fmt, ...) FB_PRINTF(3, 4);

/* Needs a local `fb_status st` and a label `done`. */
#define FB_TRY(call) do { if ((st = (call)) != FB_OK) goto done; } while (0)

#define FB_COUNT(array) (sizeof(array) / sizeof((array)[0]))

#endif
