/* search.h - the layout whose step is shortest within both budgets.
 *
 * What the user fixed stays; the rest is tried: micro-batch, passes, blocks at home, what is kept and where, slots.  Candidates
 * that a bound excludes are not simulated; the best is then compared with its neighbours until none is better.  Among equals the
 * one that takes less memory wins.  Deterministic. */
#ifndef FB_PLAN_SEARCH_H
#define FB_PLAN_SEARCH_H

#include "plan/simulate.h"

enum { FB_WISH_AUTO = -1 };

typedef enum { FB_HOME_AUTO, FB_HOME_NOTHING, FB_HOME_EVERYTHING, FB_HOME_LAYERS } fb_home;

/* What the user fixed. */
typedef struct fb_wishes {
    fb_load      load;
    uint32_t     micro_rows;    /* FB_AUTO: the search's choice */
    int          recompute;     /* fb_recompute, for all layers; FB_WISH_AUTO */
    uint32_t     slots;         /* FB_AUTO; FB_SLOTS_ALL */
    uint32_t     n_pass;        /* FB_AUTO */
    fb_home      placement;     /* LAYERS: the first home_layers, and an untied embedding */
    uint32_t     home_layers;
    int          kept_on_host;  /* FB_WISH_AUTO, 0, 1 */
    int          acc_on_device; /* the same; of several passes */
    fb_layout       known;        /* one that is near the best, from which the search is shorter */
    uint32_t        known_rows;   /* its micro_rows; 0: none is known */
} fb_wishes;

typedef struct fb_search_effort {
    uint32_t n_laid_out, n_simulated;
} fb_search_effort;

/* In: r->micro_rows (what is preferred, all else being equal) and budgets.  Out: the plan; r->micro_rows and r->n_micro as chosen,
 * which a run must take over; t (may be NULL) the step foreseen, with spans if it has room for them; effort may be NULL.
 * FB_NOFIT: the thriftiest layout's shortfall and the key to change; *out is that layout, and r as for it.
 * FB_CONFIG: as fb_plan_check. */
fb_status fb_plan_search(fb_plan *out, fb_timeline *t, fb_plan_request *r, const fb_machine *m, const fb_wishes *w,
                         fb_search_effort *effort, fb_error *err);

/* Whether any layout fits: what fb_plan_search would find out, in a fraction of its time. */
bool fb_plan_can_fit(const fb_plan_request *r, const fb_machine *m, const fb_wishes *w);

#endif
