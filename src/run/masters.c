#include "run/masters.h"

#include "io/file.h"
#include "optim/adamw.h"
#include "run/checkpoint_write.h"

enum { READ = 1 << 14 }; /* elements at a time of each half */

fb_status fb_check_tensor(const fb_shard *s, const fb_param *p, fb_dtype dtype, fb_error *err)
{
    const fb_tensor *t = fb_shard_find(s, p->name);
    if (t && t->dtype == dtype && t->rank == p->rank && t->shape[0] == p->rows && (p->rank == 1 || t->shape[1] == p->cols))
        return FB_OK;
    return fb_fail(err, FB_INPUT, "%s: '%s' is %s; the checkpoint is of another model", fb_shard_path(s), p->name,
                   t ? "of another shape or dtype" : "missing");
}

static fb_status open_exact(fb_masters *s, const fb_manifest *m, const char *dir, const char *file, fb_dtype dtype, fb_error *err)
{
    fb_status st = FB_OK;
    char path[FB_PATH_SIZE];
    FB_TRY(fb_path_join(path, sizeof path, dir, file, err));
    if (!fb_file_exists(path))
        return FB_OK;
    FB_TRY(fb_shard_open(&s->exact, path, err));
    for (uint32_t i = 0; i < m->n_param; i++) {
        const fb_param *p = &m->params[i];
        FB_TRY(fb_check_tensor(s->exact, p, dtype, err));
        if (dtype == FB_I16 && fb_shard_set_find(s->weights, p->name)->dtype != FB_BF16)
            FB_TRY(fb_fail(err, FB_INPUT, "%s: completes bfloat16 weights, but '%s' is not in bfloat16", path, p->name));
    }
done:
    return st;
}

fb_status fb_masters_open(fb_masters *out, const fb_manifest *m, const char *dir, fb_error *err)
{
    fb_status st = FB_OK;
    fb_masters s = { 0 };
    FB_TRY(fb_shard_set_open(&s.weights, dir, err));
    FB_TRY(fb_manifest_check(m, s.weights, err));
    FB_TRY(open_exact(&s, m, dir, fb_masters_file, FB_F32, err));
    if (!s.exact)
        FB_TRY(open_exact(&s, m, dir, fb_remainders_file, FB_I16, err));
    *out = s;
    s = (fb_masters){ 0 };
done:
    fb_masters_close(&s);
    return st;
}

fb_status fb_masters_read(const fb_masters *s, const fb_param *p, uint64_t first, uint64_t n, float *out, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_tensor *t = fb_shard_set_find(s->weights, p->name), *x = s->exact ? fb_shard_find(s->exact, p->name) : NULL;
    uint16_t hi[READ];
    int16_t lo[READ];
    if (!x || x->dtype != FB_I16)
        return fb_tensor_read_f32(x ? x : t, first, n, out, err);
    for (uint64_t i = 0, k; i < n; i += k) {
        k = n - i < READ ? n - i : READ;
        FB_TRY(fb_tensor_read(t, first + i, k, hi, err));
        FB_TRY(fb_tensor_read(x, first + i, k, lo, err));
        fb_join_f32(out + i, hi, lo, k);
    }
done:
    return st;
}

void fb_masters_close(fb_masters *s)
{
    fb_shard_close(s->exact);
    fb_shard_set_close(s->weights);
    *s = (fb_masters){ 0 };
}
