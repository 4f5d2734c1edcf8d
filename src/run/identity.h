/* identity.h - what a run and its resume must agree on, so that the two are one run: model, data, schedule.
 *
 * Everything else may change between them: back end, slots, budgets, threads, recompute, how often is saved; with the back end the
 * compute dtype too, which changes the bits and is warned about. */
#ifndef FB_RUN_IDENTITY_H
#define FB_RUN_IDENTITY_H

#include <jansson.h>

#include "config/options.h"
#include "io/tokens.h"
#include "model/config.h"

/* {"model": {...}, "data": {...}, "schedule": {...}}, each of them facts by name, and "compute_dtype"; the caller's.  NULL: no
 * memory. */
json_t *fb_identity_new(const fb_options *o, const fb_model_config *c, const fb_tokens *tokens, fb_dtype act, uint32_t micro_rows,
                        uint64_t total_steps);
/* FB_CONFIG: the first fact that differs, with both values.  dir: of the checkpoint that `then` is from, for the sentence. */
fb_status fb_identity_check(const json_t *then, const json_t *now, const char *dir, fb_error *err);

/* Rows in a micro-batch; 0: not said. */
uint32_t fb_identity_micro_rows(const json_t *identity);
void     fb_identity_set_micro_rows(json_t *identity, uint32_t micro_rows);

/* NULL: the compute dtype is the same; else what it was. */
const char *fb_identity_other_dtype(const json_t *then, const json_t *now);

#endif
