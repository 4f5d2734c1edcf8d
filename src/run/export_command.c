/* export_command.c - `forebay export`: a checkpoint-N folder, its exact masters, as a plain Hugging Face folder. */
#include <stdio.h>
#include <string.h>

#include "io/lock.h"
#include "io/shard.h"
#include "run/export.h"
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

typedef struct source {
    const fb_shard     *optimizer;
    const fb_shard_set *set;
} source;

/* The exact master where the checkpoint has one of the right size, else the weight itself. */
static const fb_tensor *tensor_of(const source *s, const fb_param *p)
{
    char name[FB_NAME_SIZE + 2];
    snprintf(name, sizeof name, "w.%s", p->name);
    const fb_tensor *master = s->optimizer ? fb_shard_find(s->optimizer, name) : NULL;
    return master && master->size == p->rows * p->cols * fb_dtype_size(master->dtype) ? master : fb_shard_set_find(s->set, p->name);
}

static fb_status read_tensor(const void *ctx, const fb_param *p, uint64_t first, uint64_t n, float *out, fb_error *err)
{
    (void)err;
    const fb_tensor *t = tensor_of(ctx, p);
    fb_to_f32(out, (const unsigned char *)t->data + first * fb_dtype_size(t->dtype), t->dtype, n);
    return FB_OK;
}

fb_status fb_export(const char *checkpoint_dir, const char *out_dir, const char *save_dtype, const fb_sink *sink, fb_error *err)
{
    fb_status st = FB_OK;
    char path[FB_PATH_SIZE];
    fb_manifest m = { 0 };
    fb_shard_set *set = NULL;
    fb_shard *optimizer = NULL;
    fb_lock lock = { 0 };
    fb_dtype dtype;
    FB_TRY(fb_manifest_read(&m, checkpoint_dir, err));
    FB_TRY(fb_shard_set_open(&set, checkpoint_dir, err));
    FB_TRY(fb_manifest_check(&m, set, err));
    FB_TRY(fb_export_check(checkpoint_dir, err));
    FB_TRY(dtype_of(&dtype, save_dtype, m.cfg.dtype, err));
    FB_TRY(fb_path_join(path, sizeof path, checkpoint_dir, "optimizer.safetensors", err));
    if (fb_file_exists(path))
        FB_TRY(fb_shard_open(&optimizer, path, err));
    FB_TRY(fb_lock_take(&lock, out_dir, "export", err)); /* a run may be about to leave its model there */
    FB_TRY(fb_export_weights(&m, read_tensor, &(source){ optimizer, set }, out_dir, dtype, err));
    FB_TRY(fb_export_companions(checkpoint_dir, out_dir, err));
    FB_TRY(fb_export_config(&m.cfg, out_dir, dtype, err));
    fb_say(sink, FB_SAY_RESULT, "the model is in %s (%s)", out_dir, fb_dtype_hf_str(dtype));
done:
    fb_lock_give(&lock);
    fb_shard_close(optimizer);
    fb_shard_set_close(set);
    fb_manifest_free(&m);
    return st;
}
