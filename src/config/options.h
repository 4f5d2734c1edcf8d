/* options.h - what the user asked for: one flat YAML plus key=value arguments, checked.
 *
 * Every key is one row of the table in options.c: name, type, default, range or choices, one line of help.  Unknown
 * keys are refused with the nearest known name; a value of the wrong type or out of range is refused with file, line,
 * key and what was expected.  Scalars are read as text and typed by the key, so `save_strategy: no` and
 * `learning_rate: 3e-3` need no quotes.
 * Names are LlamaFactory's and Hugging Face's where those have one. */
#ifndef FB_CONFIG_OPTIONS_H
#define FB_CONFIG_OPTIONS_H

#include "base/dtype.h"
#include "base/error.h"
#include "optim/lr.h"

typedef enum { FB_STAGE_SFT, FB_STAGE_PT } fb_stage;
typedef enum { FB_RECOMPUTE_NONE, FB_RECOMPUTE_SELECTIVE, FB_RECOMPUTE_FULL } fb_recompute;
typedef enum { FB_RECOMPUTE_AUTO = -1 } fb_recompute_auto;
typedef enum { FB_PLACE_AUTO = -1, FB_PLACE_DEVICE, FB_PLACE_HOST } fb_place;
typedef enum { FB_SAVE_NO, FB_SAVE_STEPS, FB_SAVE_EPOCH } fb_save_strategy; /* eval_strategy too */
typedef enum { FB_DTYPE_AUTO = -1 } fb_dtype_auto;

enum { FB_AUTO = 0 }; /* numeric keys that also take `auto`; slots: UINT32_MAX is `all` */
#define FB_SLOTS_ALL UINT32_MAX
#define FB_SIZE_MOST UINT64_MAX

typedef struct fb_options {
    /* model and data */
    char *model_name_or_path; /* required */
    char *dataset;            /* path, or names in dataset_dir/dataset_info.json, comma-separated; required to train */
    char *dataset_dir;        /* default "data" */
    char *eval_dataset;       /* NULL: none */
    double val_size;          /* 0: none; < 1 a fraction of the rows, >= 1 a number of rows */
    int    stage;             /* fb_stage */
    uint32_t cutoff_len;      /* tokens a row, default 2048 */
    bool   packing;           /* default false for sft, true for pt (packing_given tells) */
    bool   packing_given;
    bool   disable_shuffling;
    bool   train_on_prompt, mask_history;
    char  *system;            /* default system message; NULL: the template's own */
    uint64_t max_samples;     /* 0: all */
    /* batch */
    uint32_t per_device_train_batch_size; /* rows, default 1 */
    uint32_t per_device_eval_batch_size;  /* default: the train one */
    uint32_t gradient_accumulation_steps; /* default 1 */
    uint32_t micro_batch;                 /* rows; FB_AUTO: the plan chooses */
    /* optimizer and schedule */
    double learning_rate;     /* default 5e-5 */
    int    lr_scheduler_type; /* fb_lr_type, default linear */
    double min_lr, min_lr_rate; /* cosine_with_min_lr; at most one given; < 0: not given */
    uint64_t num_stable_steps, num_decay_steps; /* warmup_stable_decay; 0: derived */
    double min_lr_ratio;      /* warmup_stable_decay, default 0 */
    int    warmup_type, decay_type; /* warmup_stable_decay: fb_lr_shape, default linear and cosine */
    double num_cycles;        /* the cosines, default 0.5 */
    double warmup_ratio;
    uint64_t warmup_steps;    /* wins over warmup_ratio when > 0 */
    double num_train_epochs;  /* default 3 */
    int64_t max_steps;        /* -1: by epochs */
    double weight_decay, adam_beta1, adam_beta2, adam_epsilon; /* 0, 0.9, 0.999, 1e-8 */
    double max_grad_norm;     /* default 1; 0: off, updates under the backward */
    uint64_t seed;            /* default 42 */
    /* output */
    char  *output_dir;        /* required to train */
    bool   overwrite_output_dir;
    uint32_t logging_steps;   /* default 10 */
    int    save_strategy;     /* fb_save_strategy, default steps */
    uint32_t save_steps;      /* default 500 */
    uint32_t save_total_limit; /* 0: no limit */
    uint64_t save_buffer;     /* bytes; FB_SIZE_MOST (auto): what ram_budget leaves, at most the state */
    int    save_dtype;        /* fb_dtype or FB_DTYPE_AUTO: the checkpoint's */
    int    eval_strategy;     /* default no; eval_steps given sets steps */
    uint32_t eval_steps;
    char  *resume_from_checkpoint; /* NULL or "false": no; "true": newest in output_dir; else a path */
    uint32_t nonfinite_limit; /* steps in a row before the run stops, default 3 */
    /* ours: how it runs, never what is learned */
    char  *backend;           /* auto, cpu, cuda, fault:<spec> */
    uint32_t device;
    int    compute_dtype;     /* fb_dtype or FB_DTYPE_AUTO */
    uint64_t hbm_budget;      /* bytes of device memory; 0: what the device has.  "384MiB", "16GiB", bytes */
    uint64_t ram_budget;      /* bytes of host memory; 0: what the machine has */
    char  *placement;         /* auto, stream, resident, layers:N */
    uint32_t slots;           /* FB_AUTO; FB_SLOTS_ALL */
    uint32_t passes;          /* FB_AUTO */
    int    activations;       /* fb_place */
    int    accumulators;      /* fb_place */
    bool   overlap;           /* default true; false: every call waits for the one before it */
    int    recompute;         /* fb_recompute or FB_RECOMPUTE_AUTO */
    uint32_t compute_threads, update_threads; /* 0: all cores */
    char  *update_kernel;     /* auto, scalar, avx2, avx512 */
    bool   full_determinism;
    uint32_t watchdog;        /* seconds without movement before the run says so; 0: never */
    char  *trace;             /* file to write when everything ran into; NULL: none */
} fb_options;

/* path may be NULL (only overrides).  overrides: n strings "key=value", the last of a key wins.  FB_CONFIG.
 * warn is called with one sentence for each key that is accepted for compatibility and changes nothing here. */
fb_status fb_options_read(fb_options *out, const char *path, const char *const *overrides, int n,
                          void (*warn)(void *ctx, const char *sentence), void *ctx, fb_error *err);
/* Keys that a command needs: "train" wants model_name_or_path, dataset and output_dir, ... FB_CONFIG. */
fb_status fb_options_require(const fb_options *o, const char *const *keys, int n, fb_error *err);
/* All keys with their values, as one JSON object (for checkpoints and logs); the caller's to free. */
char     *fb_options_json(const fb_options *o);
/* The table as text for `forebay help config`. */
void      fb_options_help(void (*line)(void *ctx, const char *text), void *ctx);
void      fb_options_free(fb_options *o); /* a zeroed struct is fine */

#endif
