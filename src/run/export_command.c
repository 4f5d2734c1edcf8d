/* export_command.c - `forebay export`: a checkpoint-N folder, its exact masters, as a plain Hugging Face folder. */
#include <string.h>

#include "io/file.h"
#include "io/lock.h"
#include "run/export.h"
#include "run/masters.h"
#include "run/sink.h"

static fb_status dtype_of(fb_dtype *out, const char *name, fb_dtype otherwise, fb_error *err)
{
    *out = otherwise;
    if (!name || !strcmp(name, "auto"))
        return FB_OK;
    for (fb_dtype t = FB_F32; t < FB_DTYPE_COUNT; t++)
        if (!strcmp(name, fb_dtype_hf_str(t))) {
            *out = t;
            return FB_OK;
        }
    return fb_fail(err, FB_CONFIG, "command line: save_dtype must be auto, float32, float16 or bfloat16, not '%s'", name);
}

static fb_status read_master(const void *masters, const fb_param *p, uint64_t first, uint64_t n, float *out, fb_error *err)
{
    return fb_masters_read(masters, p, first, n, out, err);
}

fb_status fb_export(const char *checkpoint_dir, const char *out_dir, const char *save_dtype, const fb_sink *sink, fb_error *err)
{
    fb_status st = FB_OK;
    fb_manifest m = { 0 };
    fb_masters masters = { 0 };
    fb_lock lock = { 0 };
    fb_dtype dtype;
    FB_TRY(fb_manifest_read(&m, checkpoint_dir, err));
    FB_TRY(fb_masters_open(&masters, &m, checkpoint_dir, err));
    FB_TRY(fb_export_check(checkpoint_dir, err));
    FB_TRY(dtype_of(&dtype, save_dtype, m.cfg.dtype, err));
    FB_TRY(fb_lock_take(&lock, out_dir, "export", err)); /* a run may be about to leave its model there */
    FB_TRY(fb_export_weights(&m, read_master, &masters, out_dir, dtype, err));
    FB_TRY(fb_export_companions(checkpoint_dir, out_dir, err));
    FB_TRY(fb_export_config(&m.cfg, out_dir, dtype, err));
    fb_say(sink, FB_SAY_RESULT, "the model is in %s (%s)", out_dir, fb_dtype_hf_str(dtype));
done:
    fb_lock_give(&lock);
    fb_masters_close(&masters);
    fb_manifest_free(&m);
    return st;
}
