#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>

#define STATUS_TEXT(name, code, text) [FB_##name] = text,
#define STATUS_CODE(name, code, text) [FB_##name] = code,
static const char *const status_text[] = { FB_STATUS_MAP(STATUS_TEXT) };
static const int status_code[] = { FB_STATUS_MAP(STATUS_CODE) };

const char *fb_status_str(fb_status status)
{
    return (unsigned)status < FB_STATUS_COUNT ? status_text[status] : "unknown status";
}

int fb_status_exit_code(fb_status status)
{
    return (unsigned)status < FB_STATUS_COUNT ? status_code[status] : 1;
}

const char *fb_version(void)
{
    return FB_VERSION;
}

/* How many bytes the character at s has if a terminal may see it, else 0: what is not UTF-8, control characters (C1 too, which
 * some terminals obey), and the marks that break a line or turn the order of its letters. */
static size_t printable(const unsigned char *s)
{
    size_t n = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0x80)
        return s[0] >= 0x20 && s[0] != 0x7f;
    if (s[0] < 0xc2 || s[0] > 0xf4)
        return 0;
    uint32_t code = s[0] & (0x7fu >> n);
    for (size_t i = 1; i < n; i++) {
        if ((s[i] & 0xc0) != 0x80)
            return 0;
        code = code << 6 | (s[i] & 0x3f);
    }
    static const uint32_t first[] = { 0, 0, 0, 0x800, 0x10000 };
    bool refused = code < first[n] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) || code < 0xa0 ||
                   (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
    return refused ? 0 : n;
}

/* A sentence may repeat a stranger's text: what is not fit for a terminal or a log becomes '?'. */
static void make_printable(char *sentence)
{
    for (char *c = sentence; *c;) {
        size_t n = printable((const unsigned char *)c);
        if (!n)
            *c = '?';
        c += n ? n : 1;
    }
}

fb_status fb_fail(fb_error *err, fb_status status, const char *fmt, ...)
{
    if (err) {
        va_list ap;
        va_start(ap, fmt);
        err->status = status;
        vsnprintf(err->msg, sizeof err->msg, fmt, ap);
        va_end(ap);
        make_printable(err->msg);
    }
    return status;
}
