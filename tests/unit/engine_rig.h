/* engine_rig.h - a session on the tiny model of this test's temp_dir, a few rows, and what training on them leaves:
 * masters, moments, losses and norms.  Include after cmocka.h. */
#ifndef FB_TEST_ENGINE_RIG_H
#define FB_TEST_ENGINE_RIG_H

#include "io/tokens.h"
#include "run/session.h"
#include "temp_dir.h"
#include "tiny_model.h"

enum { RIG_ROW = 24, RIG_ROWS = 12, RIG_MICRO_ROWS = 2, RIG_MICROS = RIG_ROWS / RIG_MICRO_ROWS, RIG_STEPS = 3 };

typedef struct engine_rig {
    fb_options options;
    fb_session session;
    fb_session_request request;
} engine_rig;

/* Options as they are when nothing is said, but for a rate that moves weights; overrides "key=value", NULL at the end. */
static inline void rig_options(engine_rig *r, const char *const *overrides)
{
    fb_error err;
    int n = 0;
    while (overrides && overrides[n])
        n++;
    memset(r, 0, sizeof *r);
    if (fb_options_read(&r->options, NULL, overrides, n, NULL, NULL, &err) != FB_OK)
        fail_msg("%s", err.msg);
    r->options.compute_threads = 2;
    if (!r->options.update_threads)
        r->options.update_threads = 2;
    r->options.weight_decay = 0.1;
    r->request = (fb_session_request){ .options = &r->options, .train = true, .row_len = RIG_ROW,
                                       .micro_rows = RIG_MICRO_ROWS, .n_micro = RIG_MICROS };
}

static inline fb_status rig_start(engine_rig *r, fb_error *err)
{
    fb_status st = fb_session_open(&r->session, temp_dir, err);
    if (st == FB_OK)
        st = fb_session_plan(&r->session, &r->request, err);
    return st == FB_OK ? fb_session_start(&r->session, &r->request, err) : st;
}

static inline void rig_stop(engine_rig *r)
{
    fb_session_close(&r->session);
    fb_options_free(&r->options);
}

/* Row `row` of step `step`: its length, tokens and mask follow from the two numbers. */
static inline void rig_add_row(fb_micro *m, uint32_t step, uint32_t row, uint32_t vocab)
{
    uint64_t seed = 1000 * step + row;
    uint32_t ids[RIG_ROW], n = 3 + random_under(&seed, RIG_ROW - 2);
    int32_t labels[RIG_ROW];
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = i && random_under(&seed, 4) == 0 ? ids[i - 1] : random_under(&seed, vocab);
        labels[i] = i == n - 1 || random_under(&seed, 3) ? (int32_t)ids[i] : FB_LABEL_NONE;
    }
    fb_micro_add_document(m, ids, labels, n);
}

static inline uint32_t rig_fill(engine_rig *r, uint32_t step, uint32_t n_micro)
{
    for (uint32_t i = 0; i < n_micro; i++) {
        fb_micro *m = fb_engine_micro(r->session.engine, i);
        fb_micro_begin(m);
        for (uint32_t k = 0; k < RIG_MICRO_ROWS; k++)
            rig_add_row(m, step, i * RIG_MICRO_ROWS + k, r->session.manifest.cfg.vocab);
        fb_micro_finish(m);
    }
    return n_micro;
}

static inline fb_adamw rig_adamw(const engine_rig *r, uint32_t step)
{
    return (fb_adamw){ .lr = 0.01, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = r->options.weight_decay,
                       .step = step + 1 };
}

static inline fb_status rig_step(engine_rig *r, uint32_t step, uint32_t n_micro, fb_step_result *out, fb_error *err)
{
    fb_adamw a = rig_adamw(r, step);
    return fb_engine_step(r->session.engine, rig_fill(r, step, n_micro), &a, r->options.max_grad_norm, out, err);
}

/* Masters, first and second moments of every element, and the numbers that were shown. */
typedef struct rig_outcome {
    uint64_t n;
    float   *all; /* [3 n] */
    double   loss[RIG_STEPS], norm[RIG_STEPS];
} rig_outcome;

static inline void rig_take(rig_outcome *o, engine_rig *r)
{
    static const fb_plan_host_region parts[] = { FB_HOST_WEIGHTS, FB_HOST_M, FB_HOST_V };
    const fb_manifest *m = &r->session.manifest;
    fb_error err;
    fb_engine_settle(r->session.engine);
    o->n = m->extent;
    o->all = malloc(3 * o->n * sizeof *o->all);
    float *at = o->all;
    for (size_t p = 0; p < FB_COUNT(parts); p++)
        for (uint32_t b = 0; b < m->n_block; at += m->blocks[b++].extent)
            if (fb_state_get(&r->session.state, parts[p], b, 0, m->blocks[b].extent, at, &err) != FB_OK)
                fail_msg("%s", err.msg);
}

static inline bool rig_same(const rig_outcome *a, const rig_outcome *b)
{
    return a->n == b->n && !memcmp(a->all, b->all, 3 * a->n * sizeof *a->all)
        && !memcmp(a->loss, b->loss, sizeof a->loss) && !memcmp(a->norm, b->norm, sizeof a->norm);
}

#endif
