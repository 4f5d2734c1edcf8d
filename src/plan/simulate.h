/* simulate.h - a step, foreseen: when everything runs, and what the device waits for.
 *
 * A discrete-event simulation of what the engine (train/engine*.c) does: the host enqueues visit after visit and waits where the
 * engine waits; three streams run what they were given in order, behind their events; the update workers take blocks in the order
 * of submission.  Copies share the link, copies and updates the host's memory, and on a unified machine all share the cores.
 * One step is enough: every step begins as the one before it left off, with the streams at rest and (exact clipping) all updates
 * still to be done.  Pure and deterministic. */
#ifndef FB_PLAN_SIMULATE_H
#define FB_PLAN_SIMULATE_H

#include "plan/cost.h"
#include "plan/timeline.h"

/* t: spans and n_span_max set.  p: training, as laid out for the request that the costs are of. */
void fb_simulate(fb_timeline *t, const fb_plan *p, const fb_manifest *m, const fb_costs *c);

/* No step of the layout can take less: the work of each resource, summed. */
double fb_simulate_bound(const fb_plan *p, const fb_manifest *m, const fb_costs *c);

#endif
