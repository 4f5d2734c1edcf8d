/* parse.h - the text of a scalar as a bool, a whole number, a real number or a size.
 *
 * Each returns false when the text is not entirely of that kind or does not fit the type, and then leaves *out alone.
 * Numbers are decimal, with an optional fraction and exponent; single underscores may stand between digits.  None of
 * this depends on the locale. */
#ifndef FB_CONFIG_PARSE_H
#define FB_CONFIG_PARSE_H

#include <stdbool.h>
#include <stdint.h>

bool fb_parse_bool(const char *text, bool *out);    /* true false yes no on off, in any case */
bool fb_parse_int(const char *text, int64_t *out);  /* 1000, 1_000, 1e3; 1e-3 is not whole */
bool fb_parse_real(const char *text, double *out);  /* finite; what would round to zero or a denormal is refused */
bool fb_parse_size(const char *text, uint64_t *out); /* bytes, or a number with B, KiB MiB GiB TiB, KB MB GB TB */

#endif
