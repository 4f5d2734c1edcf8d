/* dataset.h - the token shards of a job, made by forebay.data when missing or stale. */
#ifndef FB_RUN_DATASET_H
#define FB_RUN_DATASET_H

#include <signal.h>

#include "config/options.h"
#include "forebay/forebay.h"
#include "io/tokens.h"
#include "model/config.h"

typedef struct fb_dataset {
    fb_tokens train, eval;
    bool      has_eval;
    uint64_t  n_dropped, n_truncated; /* rows with nothing to learn; rows cut at cutoff_len */
} fb_dataset;

/* Checks every id against the vocabulary.  *stop non-zero ends it early.  FB_INPUT, FB_CONFIG: as forebay.data says; FB_STOPPED. */
fb_status fb_dataset_open(fb_dataset *out, const fb_options *o, const fb_model_config *c, const volatile sig_atomic_t *stop,
                          const fb_sink *sink, fb_error *err);
void      fb_dataset_close(fb_dataset *d); /* a zeroed struct is fine */
/* Shows n rows, what is learned between brackets. */
fb_status fb_dataset_preview(const fb_options *o, const fb_model_config *c, uint32_t n, const fb_sink *sink, fb_error *err);

/* Tokens that a row holds at most: packed rows are filled to cutoff_len, others are as long as the longest document. */
uint32_t fb_dataset_row_len(const fb_dataset *d, const fb_options *o);
/* Whether rows are packed: as asked, else by the stage's custom (pt packs, sft does not). */
bool fb_dataset_packing(const fb_options *o);

#endif
