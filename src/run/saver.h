/* saver.h - checkpoints in the background: a snapshot by promise.
 *
 * fb_saver_begin says that every piece of the state is to be saved as it is now, and returns.  One thread writes the pieces in the
 * order in which the next updates come.  Before an update changes a piece that is not written yet, the worker that is about
 * to change it copies it into the save buffer; if that is full, it waits for the disk.  Pieces of blocks that live on the device
 * come into the same buffer by downloads under the next step, ahead of their update, in the writer's order.
 *
 *   UNSAVED ──writer (host)──▶ WRITING ─────────────────┐
 *      ├──worker (host)───────▶ COPYING ──▶ COPIED ─────┴──▶ SAVED
 *      └──batch (device)──────▶ COPYING ──▶ COPIED ──┘
 *
 * A batch is what the engine's thread sends at a time: downloads on FB_STREAM_D2H and one call behind them, which says that they
 * have landed.  Sending waits in one place: for a slot, before the update of a block that is not all sent.
 *
 * Why nobody waits for ever.  Batches go in the writer's order, and as long as a device piece is unsent a worker leaves one slot.
 * So when the writer stands at an unsent piece, every device piece before it is saved, and workers hold at most all slots but one:
 * who is to send can.  The engine's thread sends before it waits for anything that the writer holds up.  With clipping it sends all
 * before it waits for an update of the step.  With clipping off it sends a block before its update is enqueued, hence before the
 * gradients of all that are updated later: a worker that wants a slot for one of these, and the d2h stream if it stands behind that
 * worker, have the batch behind them.  After the last step fb_saver_wait sends.  A worker without a slot waits for the writer
 * alone, which takes its piece straight from the state when its turn comes: one slot is enough.  A device that fails calls back too.
 *
 * Threads: all calls by the engine's, but for the hook before_update.  Beside the writer's own work nothing allocates after
 * new. */
#ifndef FB_RUN_SAVER_H
#define FB_RUN_SAVER_H

#include "run/checkpoint.h"
#include "train/engine.h"

typedef struct fb_saver fb_saver;

typedef struct fb_saver_options {
    const fb_state *state;
    const char *output_dir, *model_dir; /* copied; where checkpoints go; where the tokenizer's files are */
    fb_dtype    save_dtype;
    uint32_t    n_kept;          /* save_total_limit; 0: all */
    bool        last_block_first; /* the order of updates: under the backward; false: block 0 first */
    uint64_t    buffer_size;     /* bytes; at least one piece is taken */
    fb_team    *team;            /* touches the buffer, if blocks live on the device; NULL: the pages come at first use */
    fb_trace   *trace;           /* of the engine's steps; NULL: none */
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
void      fb_saver_free(fb_saver *s); /* after the engine, before the device; ends the save in hand; NULL is fine */

/* For fb_engine_set_hooks: what the saver must see. */
fb_engine_hooks fb_saver_hooks(fb_saver *s);

/* The engine is settled, and no save is in hand (fb_saver_wait).  checkpoint-STEP; trainer_state: the text of
 * trainer_state.json, which the saver takes over. */
void      fb_saver_begin(fb_saver *s, uint64_t step, char *trainer_state);

bool      fb_saver_is_busy(fb_saver *s);
/* Until no save is in hand; what lives on the device is sent meanwhile.  Before the engine is freed, since its workers may stand at
 * what only this sends.  NULL is fine. */
void      fb_saver_wait(fb_saver *s);
/* Whether a save has ended that was not asked about yet, and how: after a failure its folder is gone, and earlier ones are as they
 * were.  Does not wait. */
bool      fb_saver_ended(fb_saver *s, fb_saver_report *out, fb_status *st, fb_error *err);

#endif
