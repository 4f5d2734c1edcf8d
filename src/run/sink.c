#include "run/sink.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

void fb_say(const fb_sink *s, fb_say_kind kind, const char *fmt, ...)
{
    char text[4096]; /* a longer line is cut: it is for a person */
    va_list ap;
    if (!s || !s->say)
        return;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    s->say(s->ctx, kind, text);
}

fb_status fb_say_json(const fb_sink *s, json_t *root, fb_error *err)
{
    char *text = root ? json_dumps(root, JSON_INDENT(2)) : NULL;
    json_decref(root);
    if (!text)
        return fb_fail(err, FB_NOMEM, "no memory for the report");
    if (s && s->say)
        s->say(s->ctx, FB_SAY_RESULT, text);
    free(text);
    return FB_OK;
}

void fb_say_warning(void *ctx, const char *sentence)
{
    fb_say(ctx, FB_SAY_WARNING, "%s", sentence);
}

json_t *fb_json_real(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}
