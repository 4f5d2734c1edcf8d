/* checkpoint.h - output_dir/checkpoint-N: everything that a run needs to continue as if it had never stopped.
 *
 *   config.json, model*.safetensors, tokenizer files   a Hugging Face folder, in save_dtype
 *   optimizer.safetensors                              "m.NAME", "v.NAME", and "w.NAME", the exact master, all F32
 *   trainer_state.json                                 Hugging Face's fields, and ours under "forebay"
 * The folder is written under a temporary name and renamed into place whole.  Threads: one. */
#ifndef FB_RUN_CHECKPOINT_H
#define FB_RUN_CHECKPOINT_H

#include "config/options.h"
#include "io/file.h"
#include "train/engine.h"

/* Where a run stands. */
typedef struct fb_progress {
    uint64_t data_step;    /* steps served by the loader: the cursor */
    uint64_t update_step;  /* updates made: Adam's count, and the schedule's */
    uint64_t total_steps;
    uint64_t rows_per_epoch, steps_per_epoch;
    uint32_t nonfinite_in_a_row;
    double   elapsed;      /* seconds, over all starts */
    bool     finished;
    fb_rope_state rope;
    char     fingerprint[17]; /* of the data and of what decides the order and the arithmetic; hexadecimal */
} fb_progress;

/* The state must be settled. */
fb_status fb_checkpoint_save(const fb_state *s, const fb_progress *p, const fb_options *o, fb_dtype save_dtype, fb_error *err);
/* checkpoint-N folders beyond save_total_limit, oldest first. */
fb_status fb_checkpoint_prune(const fb_options *o, fb_error *err);
/* The newest checkpoint in output_dir; dir is empty when there is none. */
fb_status fb_checkpoint_find(char dir[FB_PATH_SIZE], const char *output_dir, fb_error *err);
/* How many there are, and the bytes they take on the disk. */
uint32_t fb_checkpoint_count(const char *output_dir);
uint64_t fb_checkpoint_bytes(const char *output_dir);
/* All checkpoint-N folders of output_dir, for a run that starts afresh. */
fb_status fb_checkpoint_remove_all(const char *output_dir, fb_error *err);
fb_status fb_checkpoint_read_progress(fb_progress *p, const char *dir, fb_error *err);
/* Masters and moments.  FB_INPUT: a tensor is missing or has another shape. */
fb_status fb_checkpoint_load(fb_state *s, const char *dir, fb_error *err);
/* trainer_state.json alone, into the final folder. */
fb_status fb_checkpoint_write_progress(const fb_progress *p, const char *dir, fb_error *err);

#endif
