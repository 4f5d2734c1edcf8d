/* host_rate.h - what the host's cores stream through memory: STREAM's triad, the optimizer's update.
 *
 * STREAM's triad is a[i] = b[i] + s * c[i] (McCalpin 1995), counted as STREAM counts it: two arrays read and one written, 12
 * bytes an element.  A plain store also reads the line that it overwrites, which STREAM does not count, hence a triad with
 * non-temporal stores beside the plain one.  The update reads what it writes, so that what is counted is what moves. */
#ifndef FB_RUN_HOST_RATE_H
#define FB_RUN_HOST_RATE_H

#include "base/thread.h"
#include "optim/adamw.h"

/* Elements a task takes: small enough that threads end together, large enough that a task costs nothing. */
enum { FB_HOST_SPAN = 1 << 16, FB_HOST_BYTES = 22 /* of all arrays, an element */ };
enum { FB_TRIAD_BYTES = 12, FB_UPDATE_F32_BYTES = 28, FB_UPDATE_SPLIT_BYTES = 26 };

typedef struct fb_host_arrays {
    uint64_t  n; /* a multiple of FB_HOST_SPAN */
    float    *p, *g, *m, *v;
    uint16_t *hi, *g16;
    int16_t  *lo;
    fb_adamw  hyper;
} fb_host_arrays;

/* Maps and first touches them, by the threads of the team.  n is rounded up to a multiple of FB_HOST_SPAN.  FB_NOMEM. */
fb_status fb_host_arrays_new(fb_host_arrays *x, uint64_t n, fb_team *team, fb_error *err);
void      fb_host_arrays_free(fb_host_arrays *x); /* a zeroed struct is fine */

/* Tasks over the arrays; ctx: fb_host_arrays.  NULL: not on this processor. */
fb_task fb_host_triad_plain(void);
fb_task fb_host_triad_streaming(void);
fb_task fb_host_update_f32(void);
fb_task fb_host_update_split(void);

/* Seconds that the team takes for one pass over all elements. */
double fb_host_pass(fb_team *team, fb_host_arrays *x, fb_task task);

#endif
