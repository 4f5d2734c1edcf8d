/* sums.h - manifest.json: every file of a folder with its size and XXH3-128 sum, so that a damaged folder is known as one.
 *
 *   { "format": "forebay checkpoint", "version": 2,
 *     "files": [{ "name": ..., "size": ..., "xxh3_128": 32 hexadecimal digits }, ...],
 *     "sum": XXH3-128 of all bytes of this file before the comma that precedes this member }
 * It is written last: a folder without one was never whole.  Threads: one calls. */
#ifndef FB_IO_SUMS_H
#define FB_IO_SUMS_H

#include <xxhash.h>

#include "base/error.h"

enum { FB_SUM_DIGITS = 32, FB_FILE_NAME_SIZE = 256 };

typedef struct fb_sum {
    char     name[FB_FILE_NAME_SIZE];
    uint64_t size;
    char     digits[FB_SUM_DIGITS + 1];
} fb_sum;

typedef struct fb_sums { /* a zeroed struct is an empty list */
    fb_sum  *files;
    uint32_t n, capacity;
} fb_sums;

void fb_sums_digits(char digits[FB_SUM_DIGITS + 1], XXH128_hash_t sum);
/* digits: as in fb_sum; of what was written, not of what is read back.  FB_NOMEM. */
fb_status fb_sums_add(fb_sums *s, const char *name, uint64_t size, const char *digits, fb_error *err);
/* Reads and adds every file of the folder that is not in the list yet. */
fb_status fb_sums_add_rest(fb_sums *s, const char *dir, fb_error *err);
/* DIR/manifest.json, durable. */
fb_status fb_sums_write(const fb_sums *s, const char *dir, fb_error *err);
void      fb_sums_free(fb_sums *s);

/* Reads the folder whole, with as many threads as there are cores and files.  FB_INPUT: the first file that is missing, of
 * another size or of another sum, or a manifest that is not as fb_sums_write left it.  Files that the manifest does not name
 * do not matter. */
fb_status fb_sums_verify(const char *dir, fb_error *err);

#endif
