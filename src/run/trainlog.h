/* trainlog.h - output_dir/trainer_log.jsonl: one JSON object a line, written at once.
 *
 * A resume cuts off the lines of steps that are run again, so that the file reads as one run's. */
#ifndef FB_RUN_TRAINLOG_H
#define FB_RUN_TRAINLOG_H

#include <jansson.h>

#include "base/error.h"

typedef struct fb_trainlog {
    char *path; /* NULL: closed */
    int   fd;
} fb_trainlog;

/* Keeps the lines whose current_steps is at most steps_kept; 0: starts afresh.  FB_IO. */
fb_status fb_trainlog_open(fb_trainlog *l, const char *output_dir, uint64_t steps_kept, fb_error *err);
/* Takes over line.  FB_IO. */
fb_status fb_trainlog_write(fb_trainlog *l, json_t *line, fb_error *err);
/* What was written survives a power cut.  FB_IO. */
fb_status fb_trainlog_sync(fb_trainlog *l, fb_error *err);
void      fb_trainlog_close(fb_trainlog *l); /* a zeroed struct is fine */

#endif
