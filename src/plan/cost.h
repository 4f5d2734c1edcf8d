/* cost.h - seconds that each thing of a step takes on a machine, from its rates alone.
 *
 * The operations are those of train/layer.c and the engine's visits, one by one: products by their shapes, attention by the
 * length of documents, all else by the bytes it moves.  Pure: no device, no clock. */
#ifndef FB_PLAN_COST_H
#define FB_PLAN_COST_H

#include "plan/machine.h"
#include "plan/plan.h"

/* What steps are like, beside what a plan request says of them. */
typedef struct fb_load {
    uint32_t rows_per_step;
    uint32_t doc_len;        /* tokens of a typical document; 0: as long as a row */
    uint32_t update_threads; /* 0: as many as the machine has cores */
    bool     no_overlap;     /* each visit waits for the one before it */
} fb_load;

enum { FB_RECOMPUTE_COUNT = FB_RECOMPUTE_FULL + 1 };

/* Of one micro-batch. */
typedef struct fb_micro_costs {
    double   forward[2], backward[2][FB_RECOMPUTE_COUNT]; /* a layer: without, with a sliding window */
    double   head;           /* final norm, head, loss: there and back */
    double   gather;         /* embedding rows, by the host */
    double   look_up;        /* the same by the device, from a resident table */
    double   embed_grad;
    uint64_t rows_size;      /* bytes of its embedding rows, and of any block's input */
} fb_micro_costs;

typedef struct fb_costs {
    const fb_machine *machine;
    fb_micro_costs whole, last; /* a step's last micro-batch may hold fewer rows */
    uint32_t n_micro;
    bool     no_overlap;
    double   update_rate;    /* elements a second that the host updates when it has its memory to itself */
    double   element;        /* bytes that an update on the host moves for each */
    double   copy_rate[2], copy_rate_both[2]; /* bytes a second: h2d, d2h; large copies, and while both run */
} fb_costs;

/* r->n_micro micro-batches of r->micro_rows rows hold load->rows_per_step. */
fb_costs fb_costs_of(const fb_plan_request *r, const fb_machine *m, const fb_load *load);

static inline const fb_micro_costs *fb_costs_micro(const fb_costs *c, uint32_t i)
{
    return i + 1 == c->n_micro ? &c->last : &c->whole;
}

/* Copies, one way and alone; a block's fp32 accumulator zeroed; rounded, with its norm; its update, all on the device. */
double fb_cost_h2d(const fb_machine *m, uint64_t size);
double fb_cost_d2h(const fb_machine *m, uint64_t size);
double fb_cost_zero(const fb_machine *m, uint64_t n);
double fb_cost_grad_out(const fb_machine *m, fb_dtype act, uint64_t n);
double fb_cost_update(const fb_machine *m, fb_dtype act, uint64_t n);

#endif
