#include "run/dataset.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "io/file.h"
#include "io/python.h"
#include "run/sink.h"

bool fb_dataset_packing(const fb_options *o)
{
    return o->packing_given ? o->packing : o->stage == FB_STAGE_PT;
}

uint32_t fb_dataset_row_len(const fb_dataset *d, const fb_options *o)
{
    uint32_t len = fb_dataset_packing(o) ? o->cutoff_len : d->train.doc_len_max;
    return d->has_eval && d->eval.doc_len_max > len ? d->eval.doc_len_max : len;
}

static json_t *text_or_null(const char *s)
{
    return s ? json_string(s) : json_null();
}

static json_t *request_of(const fb_options *o, const fb_model_config *c, const char *op, const char *out_dir, uint32_t n_preview)
{
    return json_pack("{s:s, s:s, s:o, s:o, s:o, s:f, s:s, s:I, s:b, s:b, s:o, s:I, s:I, s:I, s:s, s:I}",
        "op", op, "model_dir", o->model_name_or_path, "dataset", text_or_null(o->dataset),
        "dataset_dir", text_or_null(o->dataset_dir), "eval_dataset", text_or_null(o->eval_dataset), "val_size", o->val_size,
        "stage", o->stage == FB_STAGE_PT ? "pt" : "sft", "cutoff_len", (json_int_t)o->cutoff_len,
        "train_on_prompt", o->train_on_prompt, "mask_history", o->mask_history, "system", text_or_null(o->system),
        "max_samples", (json_int_t)o->max_samples, "seed", (json_int_t)o->seed, "vocab", (json_int_t)c->vocab,
        "out_dir", out_dir, "preview", (json_int_t)n_preview);
}

static fb_status ask(json_t **reply, const fb_options *o, const fb_model_config *c, const char *op, const char *out_dir,
                     uint32_t n_preview, const volatile sig_atomic_t *stop, fb_error *err)
{
    fb_status st = FB_OK, ended;
    fb_python *p = NULL;
    const char *line;
    char *text = NULL;
    json_t *request = request_of(o, c, op, out_dir, n_preview);
    *reply = NULL;
    text = request ? json_dumps(request, JSON_COMPACT) : NULL;
    if (!text)
        FB_TRY(fb_fail(err, FB_NOMEM, "data: no memory for the request"));
    FB_TRY(fb_python_start(&p, "forebay.data", (const char *const[]){ NULL }, err));
    fb_python_set_stop(p, stop);
    st = fb_python_ask(p, text, &line, err);
    if (st == FB_OK && !(*reply = json_loads(line, 0, NULL)))
        st = fb_fail(err, FB_FAILED, "data: forebay.data answered with something that is not JSON");
    /* How the child ended explains a missing answer better than the missing answer does. */
    ended = fb_python_finish(p, st == FB_OK ? err : NULL);
    if (st == FB_OK)
        st = ended;
done:
    if (st != FB_OK) {
        json_decref(*reply);
        *reply = NULL;
    }
    free(text);
    json_decref(request);
    return st;
}

static uint64_t number(const json_t *o, const char *key)
{
    json_int_t v = json_integer_value(json_object_get(o, key));
    return v > 0 ? (uint64_t)v : 0;
}

/* The shard that the reply speaks of: another forebay with other options may have put its own in its place since. */
static fb_status open_shard(fb_tokens *t, const char *path, const json_t *reply, const char *rows, const char *tokens,
                            const fb_model_config *c, fb_error *err)
{
    fb_status st = fb_tokens_open(t, path, err);
    if (st == FB_OK && (t->n_doc != number(reply, rows) || t->n_token != number(reply, tokens))) {
        st = fb_fail(err, FB_FAILED, "%s: another forebay replaced it just now, with other options for the same output_dir; start "
                     "again, or give one of the two another output_dir", path);
        fb_tokens_close(t);
    }
    if (st == FB_OK && t->id_max >= c->vocab) {
        st = fb_fail(err, FB_INPUT, "%s: token id %u is past the model's vocabulary of %u", path, t->id_max, c->vocab);
        fb_tokens_close(t);
    }
    return st;
}

fb_status fb_dataset_open(fb_dataset *out, const fb_options *o, const fb_model_config *c, const volatile sig_atomic_t *stop,
                          const fb_sink *sink, fb_error *err)
{
    fb_status st = FB_OK;
    char dir[FB_PATH_SIZE];
    json_t *reply = NULL;
    fb_dataset d = { 0 };
    FB_TRY(fb_path_join(dir, sizeof dir, o->output_dir, "data", err));
    FB_TRY(ask(&reply, o, c, "build", dir, 1, stop, err));
    const char *train = json_string_value(json_object_get(reply, "train")),
        *eval = json_string_value(json_object_get(reply, "eval"));
    if (!train)
        FB_TRY(fb_fail(err, FB_FAILED, "data: forebay.data named no shard"));
    d.n_dropped = number(reply, "dropped");
    d.n_truncated = number(reply, "truncated");
    FB_TRY(open_shard(&d.train, train, reply, "rows", "tokens", c, err));
    if (eval)
        FB_TRY(open_shard(&d.eval, eval, reply, "eval_rows", "eval_tokens", c, err));
    d.has_eval = eval != NULL;
    fb_say(sink, FB_SAY_PROGRESS, "data: %llu documents, %llu tokens, %llu learned%s%s", (unsigned long long)d.train.n_doc,
           (unsigned long long)d.train.n_token, (unsigned long long)d.train.n_learned,
           json_is_true(json_object_get(reply, "built")) ? "" : " (shard up to date)", d.has_eval ? "; with a held-out part" : "");
    if (d.n_dropped)
        fb_say(sink, FB_SAY_WARNING, "data: %llu rows have nothing to learn and are left out", (unsigned long long)d.n_dropped);
    if (d.n_truncated)
        fb_say(sink, FB_SAY_WARNING, "data: %llu rows are cut at cutoff_len %u", (unsigned long long)d.n_truncated, o->cutoff_len);
    *out = d;
    d = (fb_dataset){ 0 };
done:
    fb_dataset_close(&d);
    json_decref(reply);
    return st;
}

void fb_dataset_close(fb_dataset *d)
{
    fb_tokens_close(&d->train);
    fb_tokens_close(&d->eval);
    *d = (fb_dataset){ 0 };
}

/* The row as text, with what is learned between the marks: stretches of like tokens are joined. */
static void show_row(const json_t *row, size_t index, const fb_sink *sink)
{
    const json_t *tokens = json_object_get(row, "tokens"), *token;
    size_t i, n = json_array_size(tokens), n_learned = 0;
    bool inside = false;
    json_array_foreach((json_t *)tokens, i, token)
        n_learned += json_is_true(json_object_get(token, "learned"));
    fb_say(sink, FB_SAY_RESULT, "--- row %zu: %zu tokens, %zu learned (between \u27e6 and \u27e7)", index, n, n_learned);
    json_array_foreach((json_t *)tokens, i, token) {
        bool learned = json_is_true(json_object_get(token, "learned"));
        const char *text = json_string_value(json_object_get(token, "text"));
        if (learned != inside)
            fb_say(sink, FB_SAY_TEXT, learned ? "\u27e6" : "\u27e7");
        inside = learned;
        if (text)
            fb_say(sink, FB_SAY_TEXT, "%s", text);
        else
            fb_say(sink, FB_SAY_TEXT, "%lld ", (long long)json_integer_value(json_object_get(token, "id")));
    }
    fb_say(sink, FB_SAY_RESULT, inside ? "\u27e7" : "");
}

fb_status fb_dataset_preview(const fb_options *o, const fb_model_config *c, uint32_t n, const fb_sink *sink, fb_error *err)
{
    json_t *reply, *row;
    size_t i;
    fb_status st = ask(&reply, o, c, "preview", "", n, NULL, err);
    if (st != FB_OK)
        return st;
    json_array_foreach(json_object_get(reply, "rows"), i, row)
        show_row(row, i, sink);
    json_decref(reply);
    return FB_OK;
}
