/* golden_dump MODEL_DIR ROWS.jsonl OUT_DIR/NAME.safetensors [--packed] [key=value ...]
 *
 * Runs the engine on the rows of a file, in order: two a micro-batch, or, packed, all in one micro-batch laid end to
 * end.  Writes the logits of every position [tokens, vocab] and the gradient of the rows' mean loss, "grad.NAME", as the
 * optimizer receives it.  For tests that compare them with someone else's. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io/shard_write.h"
#include "io/tokens.h"
#include "run/session.h"

enum { ROWS_MAX = 64, LEN_MAX = 4096 };

typedef struct row {
    uint32_t ids[LEN_MAX];
    int32_t  labels[LEN_MAX];
    uint32_t n;
} row;

static row      rows[ROWS_MAX];
static uint32_t n_row, longest, n_token;

static void must(fb_status st, const fb_error *err)
{
    if (st == FB_OK)
        return;
    fprintf(stderr, "golden_dump: %s\n", err->msg);
    exit(fb_status_exit_code(st));
}

static void read_rows(const char *path)
{
    char line[1 << 17];
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f) && n_row < ROWS_MAX) {
        json_t *o = json_loads(line, 0, NULL), *ids = json_object_get(o, "input_ids"), *labels = json_object_get(o, "labels");
        row *r = &rows[n_row++];
        for (size_t i = 0; i < json_array_size(ids) && i < LEN_MAX; i++) {
            r->ids[i] = (uint32_t)json_integer_value(json_array_get(ids, i));
            r->labels[i] = labels ? (int32_t)json_integer_value(json_array_get(labels, i)) : (int32_t)r->ids[i];
            r->n++;
        }
        longest = r->n > longest ? r->n : longest;
        n_token += r->n;
        json_decref(o);
    }
    if (f)
        fclose(f);
}

/* Rows first, first + 1, ... as micro-batch i. */
static void fill(fb_engine *e, uint32_t i, uint32_t first, uint32_t n, bool every_position)
{
    fb_micro *m = fb_engine_micro(e, i);
    fb_micro_begin(m);
    for (uint32_t r = first; r < first + n && r < n_row; r++)
        fb_micro_add_document(m, rows[r].ids, rows[r].labels, rows[r].n);
    for (uint32_t t = 0; every_position && t < m->t; t++) {
        m->host.learn_index[t] = t;
        m->host.target[t] = 0;
    }
    if (every_position)
        m->n_learned = m->t;
    fb_micro_finish(m);
}

int main(int argc, char **argv)
{
    if (argc < 4)
        return 2;
    fb_error err;
    fb_options options = { 0 };
    bool packed = argc > 4 && !strcmp(argv[4], "--packed");
    must(fb_options_read(&options, NULL, (const char *const *)argv + 4 + packed, argc - 4 - packed, NULL, NULL, &err), &err);
    options.max_grad_norm = 1;
    options.placement = strcpy(realloc(options.placement, 8), "stream"); /* gradients are read where they wait on the host */
    read_rows(argv[2]);
    uint32_t per_micro = packed ? n_row : 2, n_micro = (n_row + per_micro - 1) / per_micro;
    fb_session_request r = { .options = &options, .row_len = longest, .micro_rows = per_micro, .n_micro = 1 };

    fb_session s = { 0 };
    must(fb_session_open(&s, argv[1], &err), &err);
    must(fb_session_plan(&s, &r, &err), &err);
    must(fb_session_start(&s, &r, &err), &err);
    uint32_t vocab = s.manifest.cfg.vocab;
    float *logits = malloc((uint64_t)n_token * vocab * sizeof *logits), *at = logits;
    for (uint32_t i = 0; i < n_micro; i++) {
        fill(s.engine, 0, i * per_micro, per_micro, true);
        must(fb_engine_logits(s.engine, 0, at, &err), &err);
        at += (uint64_t)fb_engine_micro(s.engine, 0)->t * vocab;
    }
    fb_session_close(&s);

    r.train = true;
    r.n_micro = n_micro;
    must(fb_session_open(&s, argv[1], &err), &err);
    must(fb_session_plan(&s, &r, &err), &err);
    must(fb_session_start(&s, &r, &err), &err);
    for (uint32_t i = 0; i < n_micro; i++)
        fill(s.engine, i, i * per_micro, per_micro, false);
    fb_step_result result;
    fb_adamw still = { .lr = 0, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .step = 1 };
    must(fb_engine_step(s.engine, n_micro, &still, 1e9, &result, &err), &err);
    fb_engine_settle(s.engine);
    printf("loss %.9g grad_norm %.9g\n", result.loss_sum / (double)result.n_learned, result.grad_norm);

    char *dir = strdup(argv[3]), *name = strrchr(dir, '/');
    if (!name)
        return 2;
    *name++ = 0;
    *strrchr(name, '.') = 0;
    fb_shard_writer *w;
    must(fb_shard_writer_new(&w, dir, name, UINT64_MAX / 2, &err), &err);
    must(fb_shard_writer_declare(w, "logits", FB_F32, 2, (uint64_t[]){ n_token, vocab }, &err), &err);
    for (uint32_t i = 0; i < s.manifest.n_param; i++) {
        char full[FB_NAME_SIZE + 8];
        const fb_param *p = &s.manifest.params[i];
        snprintf(full, sizeof full, "grad.%s", p->name);
        must(fb_shard_writer_declare(w, full, FB_F32, p->rank, (uint64_t[]){ p->rows, p->cols }, &err), &err);
    }
    must(fb_shard_writer_append(w, logits, (uint64_t)n_token * vocab * sizeof *logits, &err), &err);
    for (uint32_t i = 0; i < s.manifest.n_param; i++) {
        const fb_param *p = &s.manifest.params[i];
        uint64_t n = p->rows * p->cols;
        float *g = malloc(n * sizeof *g);
        fb_to_f32(g, fb_state_at(&s.state, FB_HOST_GRADIENTS, p->block, p->offset), s.act, n);
        must(fb_shard_writer_append(w, g, n * sizeof *g, &err), &err);
        free(g);
    }
    must(fb_shard_writer_finish(w, &err), &err);
    fb_session_close(&s);
    fb_options_free(&options);
    free(logits);
    free(dir);
    return 0;
}
