/* preflight.h - whether the surroundings have room for a run, asked before anything large is taken.
 *
 * Each refusal is one sentence with both numbers and what to change. */
#ifndef FB_RUN_PREFLIGHT_H
#define FB_RUN_PREFLIGHT_H

#include "base/memory.h"
#include "config/options.h"
#include "run/session.h"

/* A file can be made, made durable, renamed and removed in the folder, which is made.  FB_IO. */
fb_status fb_preflight_folder(const char *output_dir, fb_error *err);

/* ---- memory ---- */

/* What preparing the data takes at most, as far as the tokenizer's size tells: with less the kernel may end it.  FB_NOFIT. */
fb_status fb_preflight_data(const char *model_dir, const fb_memory_room *room, fb_error *err);

/* Host memory: ram_budget (0: auto) against what can be had, then what the plan takes against it, with what no ledger sees.
 * FB_NOFIT. */
fb_status fb_preflight_host(uint64_t needed, uint64_t ram_budget, const fb_memory_room *room, fb_error *err);
/* Device memory: what the plan takes, the back end's own included, against what is free (0: the device does not say).
 * FB_NOFIT. */
fb_status fb_preflight_device(uint64_t needed, uint64_t hbm_budget, uint64_t memory_free, fb_error *err);
/* Both, of a session that has a plan. */
fb_status fb_preflight_memory(const fb_session *s, const fb_options *o, fb_error *err);

/* ---- disk ---- */

typedef struct fb_disk_need {
    uint64_t checkpoint;   /* bytes of one */
    uint64_t optimizer;    /* of its largest file */
    uint64_t model;        /* of the final model */
    uint64_t n_checkpoint; /* that are to lie there at once, beside those that lie there already */
    bool     saves;        /* checkpoints are due, not only when a signal comes */
} fb_disk_need;

/* companions: bytes of the small files that go along.  total_steps - done_steps are still to go; n_present
 * checkpoints lie there. */
fb_disk_need fb_preflight_disk_need(const fb_manifest *m, const fb_options *o, fb_dtype save_dtype, uint64_t companions,
                                    uint64_t total_steps, uint64_t done_steps, uint64_t steps_per_epoch, uint64_t n_present);
/* Free bytes, and the longest file that this process may write.  FB_IO: not even one checkpoint and the model fit.  warning is
 * empty unless not all of it fits. */
fb_status fb_preflight_disk(const fb_disk_need *n, const char *output_dir, uint64_t available, uint64_t file_max, char *warning,
                            size_t warning_size, fb_error *err);
/* What the file system of a folder has for us.  FB_IO. */
fb_status fb_preflight_disk_room(const char *dir, uint64_t *available, uint64_t *file_max, fb_error *err);

#endif
