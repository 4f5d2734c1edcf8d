/* saver.h - checkpoints in the background: a snapshot by promise.
 *
 * fb_saver_begin says that every piece of the state is to be saved as it is now, and returns.  One thread writes the pieces in the
 * order in which the next updates come.  Before an update changes a piece that is not written yet, the worker that is about
 * to change it copies it into the save buffer; if that is full, it waits for the disk.  Blocks that live on the device go
 * through the same buffer, within fb_saver_begin.
 *
 *   UNSAVED ──writer──▶ WRITING ───────────────┐
 *      └──worker, device──▶ COPYING ──▶ COPIED ─┴──▶ SAVED
 *
 * Threads: all calls by the engine's, but for fb_saver_before_update.  Beside the writer's own work nothing allocates after
 * new. */
#ifndef FB_RUN_SAVER_H
#define FB_RUN_SAVER_H

#include "run/checkpoint.h"

typedef struct fb_saver fb_saver;

typedef struct fb_saver_options {
    const fb_state *state;
    const char *output_dir, *model_dir; /* copied; where checkpoints go; where the tokenizer's files are */
    fb_dtype    save_dtype;
    uint32_t    n_kept;          /* save_total_limit; 0: all */
    bool        last_block_first; /* the order of updates: under the backward; false: block 0 first */
    uint64_t    buffer_size;     /* bytes; at least one piece is taken */
} fb_saver_options;

/* What became of a save. */
typedef struct fb_saver_report {
    uint64_t step, bytes;
    double   seconds; /* from begin to the renamed folder */
    double   waited;  /* of these, updates stood still for it, copies left out */
} fb_saver_report;

/* Bytes of a buffer that holds the whole state, and of the smallest there is. */
uint64_t  fb_saver_buffer_most(const fb_manifest *m);
uint64_t  fb_saver_buffer_least(void);

fb_status fb_saver_new(fb_saver **out, const fb_saver_options *o, fb_error *err);
void      fb_saver_free(fb_saver *s); /* after the engine; waits for the save in hand; NULL is fine */

/* The engine is settled, and no save is in hand (fb_saver_wait).  checkpoint-STEP; trainer_state: the text of
 * trainer_state.json, which the saver takes over. */
fb_status fb_saver_begin(fb_saver *s, uint64_t step, char *trainer_state, fb_error *err);
/* Hook of the update workers: returns when the elements may be changed.  ctx: the saver.  Any thread. */
void      fb_saver_before_update(void *ctx, uint32_t block, uint64_t first, uint64_t n);

bool      fb_saver_is_busy(fb_saver *s);
void      fb_saver_wait(fb_saver *s); /* until no save is in hand */
/* Whether a save has ended that was not asked about yet, and how: after a failure its folder is gone, and earlier ones are as they
 * were.  Does not wait. */
bool      fb_saver_ended(fb_saver *s, fb_saver_report *out, fb_status *st, fb_error *err);

#endif
