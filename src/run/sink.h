/* sink.h - printf for the caller's log sink. */
#ifndef FB_RUN_SINK_H
#define FB_RUN_SINK_H

#include "forebay/forebay.h"

void fb_say(const fb_sink *s, fb_say_kind kind, const char *fmt, ...) FB_PRINTF(3, 4);

#endif
