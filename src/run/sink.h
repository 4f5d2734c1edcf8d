/* sink.h - the caller's log sink: printf, JSON, warnings. */
#ifndef FB_RUN_SINK_H
#define FB_RUN_SINK_H

#include <jansson.h>

#include "base/error.h"

void fb_say(const fb_sink *s, fb_say_kind kind, const char *fmt, ...) FB_PRINTF(3, 4);
/* A whole object, of any length.  Takes over root; NULL: it could not be made.  FB_NOMEM. */
fb_status fb_say_json(const fb_sink *s, json_t *root, fb_error *err);
/* As fb_options_read wants it: ctx is the sink. */
void fb_say_warning(void *ctx, const char *sentence);
/* JSON has no infinity: a number that is not finite is written as null. */
json_t *fb_json_real(double x);

#endif
