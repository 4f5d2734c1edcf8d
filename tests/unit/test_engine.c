/* Whole steps on a tiny model.  The oracle is an identity: how a run is laid out (slots, passes, overlap, threads, what
 * is recomputed, clipping that never bites, a device whose streams drift) changes no bit of weights, moments, losses and
 * norms.  What the bits must be is for tests/ref. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine_rig.h"

static const tiny_model models[] = {
    { "llama", 32, 40, 4, 4, 2, 8, 96, false, NULL, 0 },
    { "qwen3", 32, 40, 4, 4, 2, 16, 96, true, NULL, 0 },
    { "qwen2", 32, 40, 3, 4, 1, 8, 96, true, ", \"pad_token_id\": 7", 0 },
    { "llama", 32, 40, 3, 4, 4, 8, 96, false,
      ", \"attention_bias\": true, \"mlp_bias\": true, \"rope_scaling\": {\"rope_type\": \"dynamic\", \"factor\": 2.0}", 10 },
};

static uint32_t current; /* the model in hand, for messages */

/* The full step, one of fewer micro-batches, and a full one. */
static const uint32_t micros_of_step[RIG_STEPS] = { RIG_MICROS, RIG_MICROS - 1, RIG_MICROS };

typedef struct setting {
    const char *overrides[12];
    uint32_t    n_pass;         /* 0: no budget */
    bool        inputs_on_host;
    bool        eval_between;
} setting;

static void fail_with(const fb_error *err, const setting *x)
{
    fail_msg("%s (%s)", err->msg, x->overrides[0]);
}

/* n_pass passes (0: as the options say), with what is kept where it is wanted, and not a byte more than that takes. */
static void plan_passes(engine_rig *r, uint32_t n_pass, bool inputs_on_host)
{
    fb_error err;
    const fb_plan *p = &r->session.plan;
    if (n_pass) {
        r->options.passes = n_pass;
        r->options.activations = inputs_on_host ? FB_PLACE_HOST : FB_PLACE_DEVICE;
    }
    for (int i = 0; i < 1 + (n_pass > 0); i++) {
        if (fb_session_plan(&r->session, &r->request, &err) != FB_OK)
            fail_msg("%s", err.msg);
        assert_true(!n_pass || p->layout.n_pass == n_pass);
        r->options.hbm_budget = n_pass ? p->device_bytes : 0;
    }
}

static void evaluate(engine_rig *r, uint32_t step, double *loss)
{
    fb_step_result e;
    fb_error err;
    if (fb_engine_eval(r->session.engine, rig_fill(r, 50 + step, 3), &e, &err) != FB_OK)
        fail_msg("%s", err.msg);
    assert_true(isfinite(e.loss_sum) && e.n_learned > 0);
    *loss = e.loss_sum;
}

static rig_outcome train(const setting *x)
{
    engine_rig r;
    fb_error err;
    rig_outcome o = { 0 };
    double eval_loss;
    rig_options(&r, x->overrides);
    if (fb_session_open(&r.session, temp_dir, &err) != FB_OK)
        fail_with(&err, x);
    plan_passes(&r, x->n_pass, x->inputs_on_host);
    if (fb_session_start(&r.session, &r.request, &err) != FB_OK)
        fail_with(&err, x);
    for (uint32_t step = 0; step < RIG_STEPS; step++) {
        fb_step_result s;
        if (x->eval_between)
            evaluate(&r, step, &eval_loss);
        if (rig_step(&r, step, micros_of_step[step], &s, &err) != FB_OK)
            fail_with(&err, x);
        assert_true(s.updated && isfinite(s.loss_sum) && s.grad_norm > 0);
        o.loss[step] = s.loss_sum;
        o.norm[step] = s.grad_norm;
    }
    if (x->eval_between)
        evaluate(&r, RIG_STEPS, &eval_loss);
    uint64_t used, peak;
    r.session.device->ops->memory(r.session.device, &used, &peak);
    assert_int_equal(used, r.session.plan.device_bytes);
    assert_int_equal(peak, r.session.plan.device_bytes);
    rig_take(&o, &r);
    rig_stop(&r);
    return o;
}

static void expect_same(const rig_outcome *want, const setting *x)
{
    rig_outcome got = train(x);
    bool same = rig_same(want, &got);
    free(got.all);
    if (!same)
        fail_msg("not the same: %s, %s %s %s %s, %u passes, inputs on the %s", models[current].type, x->overrides[0],
                 x->overrides[1],
                 x->overrides[2] ? x->overrides[2] : "", x->overrides[3] ? x->overrides[3] : "", x->n_pass,
                 x->inputs_on_host ? "host" : "device");
}

static const char *const dtypes[] = { "compute_dtype=float32", "compute_dtype=bfloat16" };

/* Runs body with every model and dtype; `want` is the plainest run: all slots, nothing overlapped, all kept.  turn counts
 * the rounds: settings that need not meet in each round are dealt out over the rounds, which keeps the program short. */
static void with_each_model(void (*body)(const rig_outcome *want, const char *dtype, uint32_t turn))
{
    for (uint32_t i = 0; i < FB_COUNT(models) / (1 + SANITIZED); i++) {
        tiny_write(&models[i], 17 + i);
        current = i;
        for (uint32_t k = 0; k < FB_COUNT(dtypes); k++) {
            rig_outcome want = train(&(setting){ .overrides = { dtypes[k], "slots=all", "overlap=false", "recompute=none",
                                                                "max_grad_norm=1e9" } });
            body(&want, dtypes[k], 2 * i + k + i / 2);
            free(want.all);
        }
    }
}

static const char *const clips[] = { "max_grad_norm=1e9", "max_grad_norm=0" };

static void slots(const rig_outcome *want, const char *dtype, uint32_t turn)
{
    static const char *const all[] = { "slots=1", "slots=2", "slots=3", "slots=all" };
    for (uint32_t i = 0; i < FB_COUNT(all); i++)
        expect_same(want, &(setting){ .overrides = { dtype, all[i], clips[(i + turn) % 2],
                                                     (i + turn) % 3 ? "overlap=true" : "overlap=false" } });
}

static void slots_change_no_bit(void **unused)
{
    (void)unused;
    with_each_model(slots);
}

static void passes(const rig_outcome *want, const char *dtype, uint32_t turn)
{
    static const uint32_t counts[] = { 1, 2, 3, 6 };
    for (uint32_t i = 0; i < 2 * FB_COUNT(counts); i += 1 + 2 * SANITIZED)
        expect_same(want, &(setting){ .overrides = { dtype, clips[(i + turn) % 2], (i + turn) / 2 % 2 ? "slots=all" : "slots=2",
            (i + turn) % 5 ? "overlap=true" : "overlap=false" }, .n_pass = counts[i / 2], .inputs_on_host = i % 2 });
}

static void passes_change_no_bit(void **unused)
{
    (void)unused;
    with_each_model(passes);
}

/* Wherever blocks live, whatever the layers keep and wherever it waits. */
static void placements(const rig_outcome *want, const char *dtype, uint32_t turn)
{
    static const char *const homes[] = { "placement=layers:1", "placement=layers:2", "placement=resident" };
    static const char *const kept[] = { "recompute=none", "recompute=selective", "recompute=full" };
    for (uint32_t i = 0; i < 12; i += 1 + 2 * SANITIZED) {
        char passes[16];
        snprintf(passes, sizeof passes, "passes=%u", 1 + i % 4);
        expect_same(want, &(setting){ .overrides = { dtype, homes[i % 3], passes, kept[(i + turn) / 2 % 3], clips[(i + turn) % 2],
            (i + turn) % 4 == 1 ? "activations=host" : "activations=device",
            (i + turn) / 3 % 2 ? "accumulators=device" : "accumulators=host", (i + turn) % 5 ? "overlap=true" : "overlap=false" },
            .eval_between = i % 3 == 1 });
    }
    for (uint32_t i = 0; i < FB_COUNT(kept); i++)
        expect_same(want, &(setting){ .overrides = { dtype, "activations=host", kept[i], clips[(i + turn) % 2],
                                                     i == 1 ? "passes=2" : "passes=1" } });
}

static void placements_change_no_bit(void **unused)
{
    (void)unused;
    with_each_model(placements);
}

static void threads_and_policies(const rig_outcome *want, const char *dtype, uint32_t turn)
{
    static const char *const all[] = { "update_threads=1", "update_threads=2", "update_threads=5", "compute_threads=1",
                                       "recompute=none", "recompute=selective", "recompute=full", "update_kernel=scalar" };
    for (uint32_t i = turn & SANITIZED; i < FB_COUNT(all); i += 1 + SANITIZED)
        expect_same(want, &(setting){ .overrides = { dtype, all[i], clips[(i + turn) % 2] }, .n_pass = (i + turn) % 3 });
}

static void threads_and_policies_change_no_bit(void **unused)
{
    (void)unused;
    with_each_model(threads_and_policies);
}

static void evals(const rig_outcome *want, const char *dtype, uint32_t turn)
{
    for (uint32_t i = 0; i < 2; i++)
        expect_same(want, &(setting){ .overrides = { dtype, clips[i] }, .n_pass = 1 + (i + turn) % 3, .inputs_on_host = turn % 2,
                                      .eval_between = true });
}

static void an_eval_leaves_no_trace(void **unused)
{
    (void)unused;
    with_each_model(evals);
}

/* An order that holds by luck alone breaks when streams drift apart. */
static void delays(const rig_outcome *want, const char *dtype, uint32_t turn)
{
    for (uint32_t i = 0; i < 4; i++) {
        char backend[64];
        snprintf(backend, sizeof backend, "backend=fault:delay=300,seed=%u", 10 * turn + i);
        expect_same(want, &(setting){ .overrides = { dtype, clips[(i + turn) % 2], backend, i % 2 ? "slots=2" : "slots=3",
            (i + turn) % 3 ? "recompute=selective" : "recompute=full",
            i == 0 ? "placement=layers:1" : "placement=stream" }, .n_pass = i, .inputs_on_host = i && turn % 2,
            .eval_between = i == 3 });
    }
}

static void delays_change_nothing(void **unused)
{
    (void)unused;
    with_each_model(delays);
}

/* ---- clipping ---- */

/* The factor is PyTorch's, and what it does is what a gradient so much smaller would do: m = (1 - beta1) factor g. */
static void clipping_scales_every_gradient(void **unused)
{
    (void)unused;
    tiny_write(&models[1], 3);
    engine_rig free_run, clipped;
    fb_step_result a, b;
    fb_error err;
    rig_outcome x = { 0 }, y = { 0 };
    rig_options(&free_run, (const char *const[]){ "max_grad_norm=1e9", NULL });
    rig_options(&clipped, (const char *const[]){ "max_grad_norm=0.25", NULL });
    assert_int_equal(rig_start(&free_run, &err), FB_OK);
    assert_int_equal(rig_start(&clipped, &err), FB_OK);
    assert_int_equal(rig_step(&free_run, 0, RIG_MICROS, &a, &err), FB_OK);
    assert_int_equal(rig_step(&clipped, 0, RIG_MICROS, &b, &err), FB_OK);
    assert_true(a.grad_norm == b.grad_norm && a.grad_norm > 0.25);
    assert_true(a.clip_factor == 1);
    assert_true(fabs(b.clip_factor - 0.25 / (b.grad_norm + 1e-6)) < 1e-15);
    rig_take(&x, &free_run);
    rig_take(&y, &clipped);
    double sq = 0;
    const float *g = fb_state_at(&free_run.session.state, FB_HOST_GRADIENTS, 0, 0);
    for (uint64_t i = 0; i < x.n; i++) {
        double m = x.all[x.n + i], m_clipped = y.all[x.n + i];
        assert_true(fabs(m_clipped - m * b.clip_factor) <= 4 * 0x1p-24 * fabs(m));
        sq += (double)g[i] * g[i];
    }
    assert_true(fabs(sqrt(sq) - a.grad_norm) < 1e-12 * a.grad_norm); /* over all parameters, a tied table once */
    free(x.all);
    free(y.all);
    rig_stop(&free_run);
    rig_stop(&clipped);
}

/* ---- not finite ---- */

static float poison(engine_rig *r, uint32_t block, fb_role role, float value)
{
    float before;
    fb_state *s = &r->session.state;
    uint64_t at = (uint64_t)s->manifest->blocks[block].offset[role];
    fb_engine_settle(r->session.engine);
    fb_state_read(s, block, at, 1, &before);
    fb_state_write(s, block, at, 1, &value);
    fb_engine_forget(r->session.engine);
    return before;
}

/* A step that is passed over leaves weights and moments as they were; and once the cause is gone, the run goes on as if
 * the step had never been.  With clipping off too, because the loss is looked at before the first update. */
static void a_loss_that_is_not_finite_changes_nothing(void **unused)
{
    (void)unused;
    for (size_t i = SANITIZED; i < 2; i++) {
        tiny_write(&models[i], 23);
        for (size_t k = 0; k < FB_COUNT(dtypes); k++)
            for (int clip = 0; clip < 2; clip++)
                for (uint32_t n_pass = 1; n_pass <= 2; n_pass++) {
                    setting x = { .overrides = { dtypes[k], clips[clip] }, .n_pass = n_pass, .inputs_on_host = n_pass == 2 };
                    rig_outcome want = train(&x), got = { 0 }, before = { 0 }, after = { 0 };
                    engine_rig r;
                    fb_error err;
                    fb_step_result s;
                    rig_options(&r, x.overrides);
                    assert_int_equal(fb_session_open(&r.session, temp_dir, &err), FB_OK);
                    plan_passes(&r, n_pass, n_pass == 2);
                    assert_int_equal(fb_session_start(&r.session, &r.request, &err), FB_OK);
                    for (uint32_t step = 0; step < RIG_STEPS; step++) {
                        float healthy = poison(&r, 2, FB_ROLE_DOWN, 3e38f);
                        rig_take(&before, &r);
                        for (uint32_t again = 0; again < 2; again++) {
                            assert_int_equal(rig_step(&r, 70 + again, RIG_MICROS, &s, &err), FB_OK);
                            assert_false(s.updated);
                            assert_false(isfinite(s.loss_sum));
                        }
                        rig_take(&after, &r);
                        assert_true(rig_same(&before, &after));
                        free(before.all);
                        free(after.all);
                        poison(&r, 2, FB_ROLE_DOWN, healthy);
                        assert_int_equal(rig_step(&r, step, micros_of_step[step], &s, &err), FB_OK);
                        assert_true(s.updated);
                        got.loss[step] = s.loss_sum;
                        got.norm[step] = s.grad_norm;
                    }
                    rig_take(&got, &r);
                    assert_true(rig_same(&want, &got));
                    free(want.all);
                    free(got.all);
                    rig_stop(&r);
                }
    }
}

static void set_all(fb_state *s, uint32_t block, fb_role role, uint64_t n, float value)
{
    for (uint64_t i = 0; i < n; i++)
        fb_state_write(s, block, (uint64_t)s->manifest->blocks[block].offset[role] + i, 1, &value);
}

/* The MLP's gate is shut (silu of -200 is 0), so that huge weights behind it do not touch the loss; but the gradient
 * that comes back through them, large by a large final norm, overflows. */
static void open_trap(engine_rig *r)
{
    fb_state *s = &r->session.state;
    const fb_model_config *c = &s->manifest->cfg;
    set_all(s, 1, FB_ROLE_GATE_BIAS, c->ffn_dim, -200);
    set_all(s, 1, FB_ROLE_DOWN, (uint64_t)c->hidden * c->ffn_dim, 3e38f);
    set_all(s, s->manifest->n_block - 1, FB_ROLE_FINAL_NORM, c->hidden, 1e5f);
    fb_engine_forget(r->session.engine);
}

static void a_gradient_that_is_not_finite(void **unused)
{
    (void)unused;
    tiny_write(&models[3], 29);
    for (size_t k = 0; k < FB_COUNT(dtypes); k++)
        for (int clip = 0; clip < 2; clip++) {
            engine_rig r;
            fb_error err;
            fb_step_result s;
            rig_outcome before = { 0 }, after = { 0 };
            rig_options(&r, (const char *const[]){ dtypes[k], clip ? "max_grad_norm=1" : "max_grad_norm=0", NULL });
            assert_int_equal(rig_start(&r, &err), FB_OK);
            open_trap(&r);
            rig_take(&before, &r);
            fb_status st = rig_step(&r, 0, RIG_MICROS, &s, &err);
            assert_true(isfinite(s.loss_sum));
            assert_false(isfinite(s.grad_norm));
            assert_false(s.updated);
            if (clip) {
                assert_int_equal(st, FB_OK);
                rig_take(&after, &r);
                assert_true(rig_same(&before, &after));
                free(after.all);
            } else
                expect_failure(st, FB_NONFINITE, &err, "the gradient is not finite");
            free(before.all);
            rig_stop(&r);
        }
}

/* ---- budgets ---- */

static void the_need_is_enough_and_a_byte_less_is_not(void **unused)
{
    (void)unused;
    tiny_write(&models[0], 31);
    engine_rig r;
    fb_error err;
    fb_step_result s;
    rig_options(&r, NULL);
    assert_int_equal(fb_session_open(&r.session, temp_dir, &err), FB_OK);
    do
        r.options.hbm_budget = r.session.plan.device_bytes - 1;
    while (fb_session_plan(&r.session, &r.request, &err) == FB_OK);
    expect_failure(err.status, FB_NOFIT, &err, "hbm_budget");
    r.options.hbm_budget++;
    assert_int_equal(fb_session_plan(&r.session, &r.request, &err), FB_OK);
    assert_int_equal(r.session.plan.layout.n_pass, RIG_MICROS);
    assert_int_equal(fb_session_start(&r.session, &r.request, &err), FB_OK); /* the device holds no byte more than that */
    assert_int_equal(rig_step(&r, 0, RIG_MICROS, &s, &err), FB_OK);
    rig_stop(&r);
}

/* Forward only: evaluation in a session without moments gives the loss that training sees. */
static void a_session_without_training_has_the_same_loss(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < FB_COUNT(models); i++) {
        tiny_write(&models[i], 37);
        for (size_t k = 0; k < FB_COUNT(dtypes); k++) {
            fb_step_result with, without;
            fb_error err;
            engine_rig r;
            for (int trains = 0; trains < 2; trains++) {
                rig_options(&r, (const char *const[]){ dtypes[k], NULL });
                r.request.train = trains;
                assert_int_equal(rig_start(&r, &err), FB_OK);
                for (int again = 0; again < 2; again++)
                    assert_int_equal(fb_engine_eval(r.session.engine, rig_fill(&r, 0, 4), trains ? &with : &without, &err), FB_OK);
                if (trains) {
                    fb_step_result s;
                    assert_int_equal(rig_step(&r, 0, 4, &s, &err), FB_OK);
                    assert_true(s.loss_sum == with.loss_sum);
                    assert_int_equal(s.n_learned, with.n_learned);
                    assert_int_equal(s.n_token, with.n_token);
                }
                rig_stop(&r);
            }
            assert_true(with.loss_sum == without.loss_sum);
        }
    }
}

/* Rows with nothing to learn take part, and change neither loss nor gradient. */
static void rows_without_labels_change_nothing(void **unused)
{
    (void)unused;
    tiny_write(&models[0], 41);
    fb_step_result s[2];
    rig_outcome o[2] = { { 0 }, { 0 } };
    fb_error err;
    for (int k = 0; k < 2; k++) {
        engine_rig r;
        rig_options(&r, NULL);
        assert_int_equal(rig_start(&r, &err), FB_OK);
        rig_fill(&r, 0, 4);
        if (k) {
            fb_micro *m = fb_engine_micro(r.session.engine, 4);
            fb_micro_begin(m);
            fb_micro_add_document(m, (uint32_t[]){ 3, 9, 4, 4 }, NULL, 4);
            fb_micro_finish(m);
        }
        fb_adamw a = rig_adamw(&r, 0);
        assert_int_equal(fb_engine_step(r.session.engine, 4 + (uint32_t)k, &a, 1, &s[k], &err), FB_OK);
        rig_take(&o[k], &r);
        rig_stop(&r);
    }
    assert_true(s[0].loss_sum == s[1].loss_sum && s[0].grad_norm == s[1].grad_norm);
    assert_int_equal(s[0].n_token + 4, s[1].n_token);
    assert_true(rig_same(&o[0], &o[1]));
    free(o[0].all);
    free(o[1].all);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, temp_dir_make, temp_dir_remove)
    const struct CMUnitTest tests[] = {
        TEST(slots_change_no_bit),
        TEST(passes_change_no_bit),
        TEST(placements_change_no_bit),
        TEST(threads_and_policies_change_no_bit),
        TEST(an_eval_leaves_no_trace),
        TEST(delays_change_nothing),
        TEST(clipping_scales_every_gradient),
        TEST(a_loss_that_is_not_finite_changes_nothing),
        TEST(a_gradient_that_is_not_finite),
        TEST(the_need_is_enough_and_a_byte_less_is_not),
        TEST(a_session_without_training_has_the_same_loss),
        TEST(rows_without_labels_change_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
