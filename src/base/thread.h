/* thread.h - a fixed team of threads that share numbered tasks.
 *
 * fb_team_run hands out task 0..n-1; which thread takes which task is not fixed, so a task must write only
 * what no other task writes, and anything summed over tasks is summed afterwards in task order.  Then no
 * result depends on the number of threads.  The caller works too: a team of 1 starts no thread.
 * Nothing allocates after fb_team_new.  Threads: one caller at a time. */
#ifndef FB_BASE_THREAD_H
#define FB_BASE_THREAD_H

#include "base/error.h"

typedef struct fb_team fb_team;
/* worker is 0..size-1 and stable during the call: an index into per-thread scratch. */
typedef void (*fb_task)(void *ctx, uint64_t task, uint32_t worker);

fb_status fb_team_new(fb_team **out, uint32_t size, const char *name, fb_error *err);
void      fb_team_free(fb_team *t); /* NULL is fine */
uint32_t  fb_team_size(const fb_team *t);
void      fb_team_run(fb_team *t, uint64_t n_task, fb_task fn, void *ctx);

/* Cores this process may run on (affinity and cgroup quota, rounded up), at least 1. */
uint32_t fb_core_count(void);

#endif
