/* evaluate.h - the mean loss over a token shard, forward only. */
#ifndef FB_RUN_EVALUATE_H
#define FB_RUN_EVALUATE_H

#include "run/loader.h"

/* Every row once, in the file's order.  Updates in hand are waited for block by block. */
fb_status fb_evaluate(fb_engine *e, fb_loader *rows, double *loss, uint64_t *n_learned, fb_error *err);

#endif
