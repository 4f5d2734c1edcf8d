#include "run/sink.h"

#include <stdarg.h>
#include <stdio.h>

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
