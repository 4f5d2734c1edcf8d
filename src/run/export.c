#include "run/export.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "io/file.h"
#include "io/shard_write.h"

enum { PIECE = 1 << 16 };

static const char *const companions[] = {
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
};

uint64_t fb_export_companions_size(const char *source_dir)
{
    char path[FB_PATH_SIZE];
    struct stat info;
    uint64_t size = 0;
    for (size_t i = 0; i < FB_COUNT(companions); i++)
        if (fb_path_join(path, sizeof path, source_dir, companions[i], NULL) == FB_OK && stat(path, &info) == 0)
            size += (uint64_t)info.st_size;
    return size;
}

fb_status fb_export_check(const char *source_dir, fb_error *err)
{
    fb_status st = FB_OK;
    char path[FB_PATH_SIZE];
    for (size_t i = 0; i < FB_COUNT(companions) && st == FB_OK; i++) {
        bool inside;
        char *real = fb_file_resolve(source_dir, companions[i], &inside);
        if (real && !inside && (st = fb_path_join(path, sizeof path, source_dir, companions[i], err)) == FB_OK)
            st = fb_fail_file(err, FB_INPUT, path, "is a link that leads out of its folder, to %.160s, and would be copied; put "
                              "the file in its place", real);
        free(real);
    }
    return st;
}

fb_status fb_export_companions(const char *source_dir, const char *out_dir, fb_error *err)
{
    fb_status st = FB_OK;
    char from[FB_PATH_SIZE], to[FB_PATH_SIZE];
    FB_TRY(fb_export_check(source_dir, err));
    for (size_t i = 0; i < FB_COUNT(companions); i++) {
        FB_TRY(fb_path_join(from, sizeof from, source_dir, companions[i], err));
        FB_TRY(fb_path_join(to, sizeof to, out_dir, companions[i], err));
        FB_TRY(fb_file_copy_atomic(from, to, NULL, err));
    }
done:
    return st;
}

fb_status fb_export_config(const fb_model_config *c, const char *out_dir, fb_dtype dtype, fb_error *err)
{
    fb_status st = FB_OK;
    char path[FB_PATH_SIZE], *text = NULL;
    json_t *root = json_loads(c->json, 0, NULL);
    if (!root)
        FB_TRY(fb_fail(err, FB_NOMEM, "export: no memory for config.json"));
    /* transformers 4 writes torch_dtype, 5 writes dtype; a file that has neither gets the newer. */
    const char *key = json_object_get(root, "torch_dtype") && !json_object_get(root, "dtype") ? "torch_dtype" : "dtype";
    json_object_set_new(root, key, json_string(fb_dtype_hf_str(dtype)));
    if (json_object_get(root, "dtype") && json_object_get(root, "torch_dtype"))
        json_object_set_new(root, "torch_dtype", json_string(fb_dtype_hf_str(dtype)));
    text = json_dumps(root, JSON_INDENT(2) | JSON_REAL_PRECISION(17));
    if (!text)
        FB_TRY(fb_fail(err, FB_NOMEM, "export: no memory for config.json"));
    FB_TRY(fb_path_join(path, sizeof path, out_dir, "config.json", err));
    FB_TRY(fb_file_write_atomic(path, text, strlen(text), err));
done:
    free(text);
    json_decref(root);
    return st;
}

fb_status fb_export_weights(const fb_manifest *m, fb_weight_reader read, const void *ctx, const char *out_dir, fb_dtype dtype,
                            fb_error *err)
{
    fb_status st = FB_OK;
    fb_shard_writer *w = NULL;
    float *f = malloc(PIECE * sizeof *f), *converted = malloc(PIECE * sizeof *converted);
    if (!f || !converted)
        FB_TRY(fb_fail(err, FB_NOMEM, "export: no memory for a buffer"));
    FB_TRY(fb_shard_writer_new(&w, out_dir, "model", FB_EXPORT_SHARD_SIZE, err));
    for (uint32_t i = 0; i < m->n_param; i++) {
        const fb_param *p = &m->params[i];
        FB_TRY(fb_shard_writer_declare(w, p->name, dtype, p->rank, (uint64_t[]){ p->rows, p->cols }, err));
    }
    for (uint32_t i = 0; i < m->n_param; i++) {
        const fb_param *p = &m->params[i];
        for (uint64_t at = 0, n = p->rows * p->cols, k; at < n; at += k) {
            k = n - at < PIECE ? n - at : PIECE;
            FB_TRY(read(ctx, p, at, k, f, err));
            fb_from_f32(converted, dtype, f, k);
            FB_TRY(fb_shard_writer_append(w, converted, k * fb_dtype_size(dtype), err));
        }
    }
    st = fb_shard_writer_finish(w, err);
    w = NULL;
done:
    fb_shard_writer_abandon(w);
    free(f);
    free(converted);
    return st;
}

static fb_status read_master(const void *state, const fb_param *p, uint64_t first, uint64_t n, float *out, fb_error *err)
{
    return fb_state_get(state, FB_HOST_WEIGHTS, p->block, p->offset + first, n, out, err);
}

fb_status fb_export_model(const fb_state *s, const char *source_dir, const char *out_dir, fb_dtype dtype, fb_error *err)
{
    fb_status st = FB_OK;
    FB_TRY(fb_dir_make(out_dir, err));
    FB_TRY(fb_export_weights(s->manifest, read_master, s, out_dir, dtype, err));
    FB_TRY(fb_export_companions(source_dir, out_dir, err));
    FB_TRY(fb_export_config(&s->manifest->cfg, out_dir, dtype, err));
done:
    return st;
}
