/* watchdog.h - a thread that says what a run stands at: when nothing has moved for long, and when it is asked.
 *
 * It never touches the run.  What it says goes to the job's sink, which takes one caller at a time (run/job.h). */
#ifndef FB_RUN_WATCHDOG_H
#define FB_RUN_WATCHDOG_H

#include "base/activity.h"
#include "run/job.h"

typedef struct fb_watchdog fb_watchdog;

/* Called on the watchdog's thread: one line about something, without locks that may be held for ever. */
typedef void (*fb_describe)(const void *ctx, char *text, size_t size);

enum { FB_WATCHDOG_DESCRIBERS = 4 };

/* quiet_s: seconds without movement before it speaks, then twice as long each time; never less than twice the longest step so
 * far; 0: only when asked (fb_job_report).  FB_NOMEM, FB_FAILED. */
fb_status fb_watchdog_start(fb_watchdog **out, fb_job *j, const fb_activity *activity, double quiet_s, fb_error *err);
void      fb_watchdog_stop(fb_watchdog *w); /* NULL is fine */
/* From now on reports have this line too; ctx lives until the watchdog is stopped or forgets it. */
void      fb_watchdog_add(fb_watchdog *w, fb_describe describe, const void *ctx);
void      fb_watchdog_forget(fb_watchdog *w, const void *ctx);

#endif
