#include "io/json.h"

#include <stdio.h>
#include <stdlib.h>

#include "io/file.h"

void fb_json_refuse(fb_json_reader *r, const char *fmt, ...)
{
    va_list ap;
    if (r->st != FB_OK)
        return;
    va_start(ap, fmt);
    r->st = fb_fail_filev(r->err, FB_INPUT, r->where, fmt, ap);
    va_end(ap);
}

const char *fb_json_show(char buf[FB_JSON_SHOWN_SIZE], const json_t *value)
{
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(9));
    snprintf(buf, FB_JSON_SHOWN_SIZE, "%s", text ? text : "unprintable");
    free(text);
    return buf;
}
