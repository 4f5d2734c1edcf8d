/* forebay.h - train language models larger than the device's memory.
 *
 * The only public header; the command `forebay` uses nothing else.  A run is: read a config, open a
 * job on it, do one thing with the job, close it.  Library code never prints and never exits: what it
 * has to say goes to the caller's log sink, what went wrong into the caller's fb_error.
 *
 * Threads: every call on one job comes from one thread, except fb_job_stop and fb_job_report.  Two jobs are independent.  A
 * job calls its sink from any thread, but never from two at once. */
#ifndef FOREBAY_FOREBAY_H
#define FOREBAY_FOREBAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#pragma GCC visibility push(default) /* the library hides all else */
#endif

#if defined(__GNUC__)
#define FB_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define FB_PRINTF(fmt, args)
#endif

/* name, process exit code, text.  CONFIG is the user's command line or YAML; INPUT a model, tokenizer or
 * dataset file, missing or malformed; IO a failed write or a failing disk. */
#define FB_STATUS_MAP(X)                                                       \
    X(OK, 0, "success")                  X(FAILED, 1, "failure")               \
    X(IO, 1, "i/o failure")              X(NOMEM, 1, "out of host memory")     \
    X(DEVICE, 1, "device failure")       X(CONFIG, 2, "bad configuration")     \
    X(INPUT, 3, "bad model or data file") X(NOFIT, 4, "does not fit")          \
    X(NONFINITE, 5, "not finite")        X(STOPPED, 75, "stopped by a signal; what was learned is saved")

#define FB_STATUS_ENUM(name, code, text) FB_##name,
typedef enum { FB_STATUS_MAP(FB_STATUS_ENUM) FB_STATUS_COUNT } fb_status;
#undef FB_STATUS_ENUM

typedef struct fb_error {
    fb_status status;
    char      msg[512]; /* one sentence: what, where, expected, how to mend */
} fb_error;

const char *fb_status_str(fb_status status);
int         fb_status_exit_code(fb_status status);
const char *fb_version(void);

/* ---- what a job says while it runs ---- */

typedef enum {
    FB_SAY_RESULT, /* what was asked for: one line */
    FB_SAY_TEXT,   /* the same, a piece without a line end (generated text) */
    FB_SAY_PROGRESS,
    FB_SAY_WARNING
} fb_say_kind;

typedef struct fb_sink {
    void (*say)(void *ctx, fb_say_kind kind, const char *text);
    void *ctx;
} fb_sink;

/* ---- jobs ---- */

/* A config file (NULL: none) and key=value overrides, read and checked.  FB_CONFIG.  The sink's ctx must outlive the
 * job. */
typedef struct fb_job fb_job;
fb_status fb_job_open(fb_job **out, const char *config_path, const char *const *overrides, int n_override,
                      const fb_sink *sink, fb_error *err);
void      fb_job_close(fb_job *j); /* NULL is fine */
/* Any thread, or a signal handler: the run ends after the step in hand, saves a checkpoint, returns FB_STOPPED.  Before the
 * first step it ends as soon as it can: there is nothing to save. */
void      fb_job_stop(fb_job *j);
/* Any thread, or a signal handler: a run that trains says what it is doing, as FB_SAY_PROGRESS, and goes on. */
void      fb_job_report(fb_job *j);

/* Trains, and leaves the model in output_dir. */
fb_status fb_train(fb_job *j, fb_error *err);
/* The loss on eval_dataset, else on the val_size split, else on dataset. */
fb_status fb_eval(fb_job *j, double *loss, uint64_t *n_token, fb_error *err);
/* Prepares the token shards; n_preview > 0: shows so many rows instead, learned tokens marked. */
fb_status fb_data(fb_job *j, uint32_t n_preview, fb_error *err);
/* What a run would take: the byte ledger, the step foreseen as a time line, what bounds it, what else would fit, what to buy.  A plan
 * that does not fit is reported, then FB_NOFIT. */
typedef struct fb_plan_view {
    const char *machine;   /* a profile's file, or a shipped one's name; no device is opened.  NULL: this machine */
    const char *preset;    /* a well-known shape instead of model_name_or_path */
    const char *hbm, *ram; /* sizes, "1.5TiB": memory of the machine; NULL: what it has */
    const char *link;      /* GB/s in either direction; NULL: what it has */
    bool        json;      /* one JSON object as the result */
    const char *html;      /* file for a page that shows all of it; NULL: none */
} fb_plan_view;

fb_status fb_plan_report(fb_job *j, const fb_plan_view *v, fb_error *err);

/* ---- without a job ---- */

/* The manifest of a checkpoint's folder. */
fb_status fb_inspect(const char *model_dir, bool json, const fb_sink *sink, fb_error *err);
/* Continues a prompt.  overrides, key=value: max_new_tokens (256), temperature (0: greedy), top_k (0: all), top_p (1),
 * seed, system, raw (true: the prompt as it is, else as a user's turn in the checkpoint's chat template), and the keys of
 * the config that say how it runs (backend, compute_dtype, hbm_budget, slots ...).  Blocks are streamed when they do
 * not all fit. */
fb_status fb_generate(const char *model_dir, const char *prompt, const char *const *overrides, int n_override,
                      const fb_sink *sink, fb_error *err);
/* Times real steps (forward, backward, clipping, AdamW) on random rows of cutoff_len tokens, and says where the time goes. */
typedef struct fb_bench_request {
    const char *preset;    /* a well-known shape, with random weights; or */
    const char *model_dir; /* a checkpoint's folder */
    uint32_t    n_step;    /* 0: 5; of more than two, the first two are not counted */
    bool        json;      /* one JSON object as the result */
    const char *const *overrides; /* key=value: the keys of the config */
    int         n_override;
} fb_bench_request;

fb_status fb_bench(const fb_bench_request *r, const fb_sink *sink, fb_error *err);
/* Measures this machine: device, link, host memory, update.  Shows it, and writes it as a profile to plan with. */
typedef struct fb_probe_request {
    const char *out;       /* file for the profile; NULL: none */
    const char *disk_dir;  /* folder in which to measure the disk; NULL: not measured */
    const char *const *overrides; /* key=value: backend, device, compute_dtype, compute_threads, full_determinism */
    int         n_override;
    const fb_sink *sink;
} fb_probe_request;

fb_status fb_probe(const fb_probe_request *r, fb_error *err);
/* A checkpoint-N folder to a plain Hugging Face folder. */
fb_status fb_export(const char *checkpoint_dir, const char *out_dir, const char *save_dtype, const fb_sink *sink, fb_error *err);
/* What this machine and installation can do; FB_FAILED when something that training needs is missing. */
fb_status fb_doctor(const fb_sink *sink, fb_error *err);
/* Every config key: type, default, meaning. */
void      fb_config_help(const fb_sink *sink);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif
#endif
