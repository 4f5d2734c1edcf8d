/* loader.h - rows from a token shard: packed, shuffled, served a whole step at a time.
 *
 * A row is one document, or, with packing, several that together fit cutoff_len tokens.  Packing is done once, so that
 * an epoch has the same number of rows whatever its order; the order of an epoch is a permutation that depends on the
 * seed and the epoch alone.  Steps never cross an epoch's end: its last step may have fewer rows, as in transformers.
 * A cursor is therefore one number, the count of steps served.
 * Threads: one. */
#ifndef FB_RUN_LOADER_H
#define FB_RUN_LOADER_H

#include "io/tokens.h"
#include "train/engine.h"

typedef struct fb_loader fb_loader;

typedef struct fb_loader_options {
    uint32_t row_len;        /* tokens a row may hold */
    bool     packing, shuffle;
    uint64_t seed;
    uint32_t rows_per_step, rows_per_micro;
} fb_loader_options;

/* tokens must outlive the loader.  FB_INPUT: no row, or a document longer than row_len. */
fb_status fb_loader_new(fb_loader **out, const fb_tokens *tokens, const fb_loader_options *o, fb_error *err);
void      fb_loader_free(fb_loader *l); /* NULL is fine */

uint64_t fb_loader_rows(const fb_loader *l);            /* in an epoch */
uint64_t fb_loader_steps_per_epoch(const fb_loader *l);
/* Fills the engine's micro-batches with the rows of step `step` (0, 1, ... over all epochs); returns how many
 * micro-batches.  rows (NULL: not wanted): how many rows. */
uint32_t fb_loader_fill(fb_loader *l, fb_engine *e, uint64_t step, uint32_t *rows);
/* The dataset's rows that step `step` would serve, for messages: "12, 7, 31". */
void     fb_loader_describe(fb_loader *l, uint64_t step, char *buf, size_t size);

#endif
