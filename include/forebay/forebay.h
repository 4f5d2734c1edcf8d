/* forebay.h - train language models larger than the device's memory.
 *
 * The only public header; the command `forebay` uses nothing else.  A run is: read a config, open a
 * job on it, do one thing with the job, close it.  Library code never prints and never exits: what it
 * has to say goes to the caller's log sink, what went wrong into the caller's fb_error.
 *
 * Threads: every call on one job comes from one thread, except fb_job_stop.  Two jobs are independent. */
#ifndef FOREBAY_FOREBAY_H
#define FOREBAY_FOREBAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
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
    X(NONFINITE, 5, "not finite")        X(STOPPED, 75, "stopped by a signal, checkpoint saved")

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

#ifdef __cplusplus
}
#endif
#endif
