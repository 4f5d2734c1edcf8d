#include "run/job.h"

#include <errno.h>
#include <stdlib.h>

#include "io/sys.h"
#include "run/sink.h"

static void pass_on(void *ctx, fb_say_kind kind, const char *text)
{
    fb_job *j = ctx;
    pthread_mutex_lock(&j->say_lock);
    j->outlet.say(j->outlet.ctx, kind, text);
    pthread_mutex_unlock(&j->say_lock);
}

static void job_free(fb_job *j)
{
    pthread_mutex_destroy(&j->say_lock);
    sem_destroy(&j->wake);
    free(j);
}

fb_status fb_job_open(fb_job **out, const char *config_path, const char *const *overrides, int n_override,
                      const fb_sink *sink, fb_error *err)
{
    fb_status st = fb_sys_faults(getenv("FOREBAY_FAULT_IO"), err);
    if (st != FB_OK)
        return st;
    fb_job *j = calloc(1, sizeof *j);
    if (!j)
        return fb_fail(err, FB_NOMEM, "no memory for a job");
    j->outlet = sink ? *sink : (fb_sink){ 0 };
    j->sink = (fb_sink){ j->outlet.say ? pass_on : NULL, j };
    pthread_mutex_init(&j->say_lock, NULL);
    sem_init(&j->wake, 0, 0);
    st = fb_options_read(&j->options, config_path, overrides, n_override, fb_say_warning, &j->sink, err);
    if (st != FB_OK) {
        job_free(j);
        return st;
    }
    *out = j;
    return FB_OK;
}

void fb_job_close(fb_job *j)
{
    if (!j)
        return;
    fb_options_free(&j->options);
    job_free(j);
}

void fb_job_stop(fb_job *j)
{
    j->stop = 1;
}

void fb_job_report(fb_job *j)
{
    int errno_before = errno;
    j->report = 1;
    sem_post(&j->wake);
    errno = errno_before;
}

static void pass_on_line(void *ctx, const char *text)
{
    fb_say(ctx, FB_SAY_RESULT, "%s", text);
}

void fb_config_help(const fb_sink *sink)
{
    fb_options_help(pass_on_line, (void *)sink);
}
