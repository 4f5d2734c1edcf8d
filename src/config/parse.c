#include "config/parse.h"

#include "base/error.h"

#include <ctype.h>
#include <errno.h>
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { NUMBER_SIZE = 64 }; /* nobody writes longer numbers */

bool fb_parse_bool(const char *text, bool *out)
{
    static const char *const word[2][3] = { { "false", "no", "off" }, { "true", "yes", "on" } };
    for (int value = 0; value < 2; value++)
        for (int i = 0; i < 3; i++)
            if (!strcasecmp(text, word[value][i])) {
                *out = value;
                return true;
            }
    return false;
}

/* Copies digits without their underscores; the end of the run, or NULL when an underscore is out of place. */
static const char *take_digits(const char *s, char **to)
{
    const char *start = s;
    for (; isdigit((unsigned char)*s) || *s == '_'; s++) {
        if (*s != '_')
            *(*to)++ = *s;
        else if (s == start || s[-1] == '_' || !isdigit((unsigned char)s[1]))
            return NULL;
    }
    return s;
}

/* The number at the start of text, in C's spelling, into buf; *whole tells that it is digits only.  Returns what follows
 * it, NULL when there is no number.  Checking the grammar here keeps out what strtod would take: hex, inf, nan, blanks. */
static const char *take_number(char buf[NUMBER_SIZE], const char *text, bool *whole)
{
    const char *s = text;
    char       *to = buf;
    if (strnlen(text, NUMBER_SIZE) == NUMBER_SIZE)
        return NULL;
    if (*s == '-' || *s == '+')
        *to++ = *s++;
    char *digits = to;
    if (!(s = take_digits(s, &to)))
        return NULL;
    *whole = true;
    if (*s == '.') {
        *whole = false;
        *to++ = *s++;
        digits++; /* the point is no digit */
        if (!(s = take_digits(s, &to)))
            return NULL;
    }
    if (to <= digits)
        return NULL;
    if (*s == 'e' || *s == 'E') {
        *whole = false;
        *to++ = *s++;
        if (*s == '-' || *s == '+')
            *to++ = *s++;
        digits = to;
        if (!(s = take_digits(s, &to)) || to == digits)
            return NULL;
    }
    *to = 0;
    return s;
}

static bool to_double(char *number, double *out)
{
    char *point = strchr(number, '.');
    if (point)
        *point = *localeconv()->decimal_point; /* strtod reads the locale's */
    errno = 0;
    double value = strtod(number, NULL);
    if (errno == ERANGE || !isfinite(value))
        return false;
    *out = value;
    return true;
}

bool fb_parse_real(const char *text, double *out)
{
    char        number[NUMBER_SIZE];
    bool        whole;
    const char *rest = take_number(number, text, &whole);
    return rest && !*rest && to_double(number, out);
}

bool fb_parse_int(const char *text, int64_t *out)
{
    char        number[NUMBER_SIZE];
    bool        whole;
    const char *rest = take_number(number, text, &whole);
    if (!rest || *rest)
        return false;
    if (whole) {
        errno = 0;
        long long value = strtoll(number, NULL, 10);
        if (errno)
            return false;
        *out = value;
        return true;
    }
    double value;
    if (!to_double(number, &value) || value != trunc(value) || fabs(value) > 0x1p53) /* beyond it a double has gaps */
        return false;
    *out = (int64_t)value;
    return true;
}

bool fb_parse_size(const char *text, uint64_t *out)
{
    static const struct {
        const char *name;
        double      bytes;
    } unit[] = { { "", 1 }, { "B", 1 }, { "KiB", 0x1p10 }, { "MiB", 0x1p20 }, { "GiB", 0x1p30 }, { "TiB", 0x1p40 },
                 { "KB", 1e3 }, { "MB", 1e6 }, { "GB", 1e9 }, { "TB", 1e12 } };
    char        number[NUMBER_SIZE];
    bool        whole;
    const char *rest = take_number(number, text, &whole);
    if (!rest || *text == '-')
        return false;
    rest += *rest == ' ' && rest[1];
    for (size_t i = 0; i < FB_COUNT(unit); i++) {
        if (strcasecmp(rest, unit[i].name) != 0)
            continue;
        double value;
        if (!to_double(number, &value))
            return false;
        double bytes = value * unit[i].bytes;
        if (bytes > 0x1p53 || (unit[i].bytes == 1 && bytes != trunc(bytes)))
            return false;
        *out = (uint64_t)bytes; /* a fraction of a byte from 0.1GB is dropped */
        return true;
    }
    return false;
}
