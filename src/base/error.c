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

fb_status fb_fail(fb_error *err, fb_status status, const char *fmt, ...)
{
    if (err) {
        va_list ap;
        va_start(ap, fmt);
        err->status = status;
        vsnprintf(err->msg, sizeof err->msg, fmt, ap);
        va_end(ap);
    }
    return status;
}
