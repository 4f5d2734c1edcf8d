/* checkpoint.h - output_dir/checkpoint-N: everything that a run needs to continue as if it had never stopped.
 *
 *   config.json, tokenizer files  with the weights below, a Hugging Face folder
 *   weights, masters, moments     see checkpoint_write.h
 *   trainer_state.json            Hugging Face's fields, and ours under "forebay": counters, and what the run is
 *   manifest.json                 names, sizes and sums of all these; written last (io/sums.h)
 * The folder is written as checkpoint-N.tmp and renamed into place whole (run/saver.h).  Threads: one. */
#ifndef FB_RUN_CHECKPOINT_H
#define FB_RUN_CHECKPOINT_H

#include <jansson.h>

#include "forebay/forebay.h"
#include "io/file.h"
#include "train/engine.h"

/* Where a run stands. */
typedef struct fb_progress {
    uint64_t data_step;    /* steps served by the loader: the cursor */
    uint64_t update_step;  /* updates made: Adam's count, and the schedule's */
    uint64_t total_steps;
    uint64_t rows_per_epoch, steps_per_epoch;
    uint32_t nonfinite_in_a_row;
    double   loss_sum;     /* since the last line of the log, over n_learned tokens */
    uint64_t n_learned;
    double   elapsed;      /* seconds, over all starts */
    bool     finished;
    fb_rope_state rope;
} fb_progress;

/* ---- trainer_state.json ---- */

/* identity: see run/identity.h.  The text is the caller's; NULL: no memory. */
char     *fb_checkpoint_progress_text(const fb_progress *p, const json_t *identity);
fb_status fb_checkpoint_write_progress(const fb_progress *p, const json_t *identity, const char *dir, fb_error *err);
/* *identity is the caller's; NULL: not wanted. */
fb_status fb_checkpoint_read_progress(fb_progress *p, json_t **identity, const char *dir, fb_error *err);

/* ---- folders ---- */

fb_status fb_checkpoint_folder(char dir[FB_PATH_SIZE], const char *output_dir, uint64_t step, const char *suffix, fb_error *err);
/* Renames checkpoint-STEP.tmp, durable and whole, into place. */
fb_status fb_checkpoint_publish(const char *output_dir, uint64_t step, fb_error *err);
/* Of the checkpoints up to this step the newest n_kept stay; 0: all.  Later ones, from before a run went back, are left alone. */
fb_status fb_checkpoint_prune(const char *output_dir, uint64_t step, uint32_t n_kept, fb_error *err);
bool      fb_checkpoint_any(const char *output_dir);
/* Reads a checkpoint and compares every sum.  FB_INPUT: it is damaged, and where. */
fb_status fb_checkpoint_verify(const char *dir, const fb_sink *sink, fb_error *err);
/* The newest that is whole; those that are not are warned about and passed over.  dir is empty when there is none at all.
 * FB_INPUT: there are some, but none is whole. */
fb_status fb_checkpoint_find(char dir[FB_PATH_SIZE], const char *output_dir, const fb_sink *sink, fb_error *err);
/* Removes what was being written or removed when a run died. */
fb_status fb_checkpoint_sweep(const char *output_dir, const fb_sink *sink, fb_error *err);
/* How many there are, and the bytes they take on the disk. */
uint32_t fb_checkpoint_count(const char *output_dir);
uint64_t fb_checkpoint_bytes(const char *output_dir);
/* All checkpoint-N folders of output_dir, for a run that starts afresh. */
fb_status fb_checkpoint_remove_all(const char *output_dir, fb_error *err);

/* Masters and moments.  The caller is the thread that calls the device.  FB_INPUT: a tensor is missing or has another shape.
 * FB_IO: a file became shorter, or cannot be read. */
fb_status fb_checkpoint_load(fb_state *s, const char *dir, fb_team *team, fb_error *err);

#endif
