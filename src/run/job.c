#include "run/job.h"

#include <stdlib.h>

#include "run/sink.h"

fb_status fb_job_open(fb_job **out, const char *config_path, const char *const *overrides, int n_override,
                      const fb_sink *sink, fb_error *err)
{
    fb_job *j = calloc(1, sizeof *j);
    if (!j)
        return fb_fail(err, FB_NOMEM, "no memory for a job");
    j->sink = sink ? *sink : (fb_sink){ 0 };
    fb_status st = fb_options_read(&j->options, config_path, overrides, n_override, fb_say_warning, &j->sink, err);
    if (st != FB_OK) {
        free(j);
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
    free(j);
}

void fb_job_stop(fb_job *j)
{
    j->stop = 1;
}

static void pass_on_line(void *ctx, const char *text)
{
    fb_say(ctx, FB_SAY_RESULT, "%s", text);
}

void fb_config_help(const fb_sink *sink)
{
    fb_options_help(pass_on_line, (void *)sink);
}
