/* Presets against the published sizes of the models, and the weights that stand in for their files. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "../../src/run/preset.c"
#include "run/session.h"
#include "temp_dir.h"
#include "tiny_model.h"

/* The total that each model's safetensors index or model card gives. */
static const struct {
    const char *name;
    uint64_t    n_weight;
    bool        qkv_bias;
    uint32_t    head_dim;
} published[] = {
    { "qwen2.5-0.5b", 494032768, true, 64 },      { "qwen2.5-1.5b", 1543714304, true, 128 },
    { "qwen2.5-7b", 7615616512, true, 128 },      { "qwen2.5-14b", 14770033664, true, 128 },
    { "qwen2.5-32b", 32763876352, true, 128 },    { "qwen2.5-72b", 72706203648, true, 128 },
    { "llama-3.1-8b", 8030261248, false, 128 },   { "llama-3.1-70b", 70553706496, false, 128 },
    { "smollm2-135m", 134515008, false, 64 },
};

static void presets_have_the_published_sizes(void **unused)
{
    (void)unused;
    assert_int_equal(FB_COUNT(presets), FB_COUNT(published));
    for (size_t i = 0; i < FB_COUNT(published); i++) {
        char json[FB_PRESET_SIZE];
        fb_session s;
        fb_error err;
        assert_int_equal(fb_preset_config(json, published[i].name, NULL), FB_OK);
        if (fb_session_open_shape(&s, json, published[i].name, &err) != FB_OK)
            fail_msg("%s", err.msg);
        const fb_model_config *c = &s.manifest.cfg;
        if (s.manifest.n_weight != published[i].n_weight)
            fail_msg("%s: %llu parameters", published[i].name, (unsigned long long)s.manifest.n_weight);
        assert_int_equal(c->qkv_bias, published[i].qkv_bias);
        assert_int_equal(c->head_dim, published[i].head_dim);
        assert_int_equal(c->sliding_window, 0);
        assert_int_equal(c->rope.type, strncmp(published[i].name, "llama", 5) ? FB_ROPE_DEFAULT : FB_ROPE_LLAMA3);
        assert_int_equal(c->dtype, FB_BF16);
        fb_session_close(&s);
    }
}

static void an_unknown_preset_lists_the_known(void **unused)
{
    (void)unused;
    char json[FB_PRESET_SIZE], names[256];
    fb_error err;
    assert_int_equal(fb_preset_config(json, "qwen2.5-7b:135", &err), FB_OK);
    assert_non_null(strstr(json, "\"num_hidden_layers\": 135,"));
    assert_non_null(strstr(json, "\"hidden_size\": 3584,"));
    expect_failure(fb_preset_config(json, "qwen2.5-7b:0", &err), FB_CONFIG, &err, "another number of layers");
    expect_failure(fb_preset_config(json, "qwen2.5-7b:", &err), FB_CONFIG, &err, "another number of layers");
    expect_failure(fb_preset_config(json, "qwen2.5-8b", &err), FB_CONFIG, &err,
                   "preset 'qwen2.5-8b' is not known; known are: qwen2.5-0.5b, ");
    fb_preset_names(names, sizeof names);
    assert_non_null(strstr(err.msg, names));
    for (size_t i = 0; i < FB_COUNT(published); i++)
        assert_non_null(strstr(names, published[i].name));
    fb_preset_names(names, 20); /* cut, not overrun */
    assert_string_equal(names, "qwen2.5-0.5b, qwen2");
}

static void a_bad_shape_is_refused(void **unused)
{
    (void)unused;
    fb_session s;
    fb_error err;
    expect_failure(fb_session_open_shape(&s, "{\"model_type\": \"gpt9\"}", "gpt9", &err), FB_INPUT, &err, "gpt9");
    fb_session_close(&s);
}

/* ---- random weights ---- */

static const tiny_model model = { .type = "qwen3", .hidden = 128, .ffn_dim = 640, .n_layer = 2, .n_head = 4, .n_kv_head = 2,
                                  .head_dim = 32, .vocab = 700 };

static void fill(fb_state *s, fb_manifest *m, fb_plan *p, fb_device *d, fb_dtype act, uint32_t n_thread, uint64_t seed)
{
    fb_error err;
    fb_team *team;
    tiny_manifest(m, &model);
    fb_plan_request r = { .manifest = m, .act = act, .train = true, .row_len = 8, .micro_rows = 1, .n_micro = 1,
                          .meta_size = fb_micro_size, .attention_scratch = d->kernels->attention_scratch };
    fb_layout l = { .n_pass = 1, .slots = 1 };
    if (fb_team_new(&team, n_thread, "test", &err) != FB_OK || fb_plan_build(p, &r, &l, &err) != FB_OK
        || fb_state_init(s, m, p, NULL, d, team, &err) != FB_OK || fb_state_randomize(s, seed, team, &err) != FB_OK)
        fail_msg("%s", err.msg);
    fb_team_free(team);
}

static fb_device *open_device(void)
{
    fb_device *d;
    assert_int_equal(fb_device_open(&d, &(fb_device_options){ .backend = "cpu", .n_thread = 1 }, NULL), FB_OK);
    return d;
}

/* Mean, deviation and neighbours' correlation of n independent numbers lie within five of their own deviations, which are
 * sd / sqrt(n), sd / sqrt(2 n) (less for a flat-tailed sum) and 1 / sqrt(n). */
static void matrices_are_noise_and_norms_one(void **unused)
{
    (void)unused;
    fb_device *d = open_device();
    for (int act = 0; act < 2; act++) {
        fb_manifest m;
        fb_plan p;
        fb_state s;
        fill(&s, &m, &p, d, act ? FB_BF16 : FB_F32, 2, 1);
        for (uint32_t i = 0; i < m.n_param; i++) {
            const fb_param *q = &m.params[i];
            uint64_t n = q->rows * q->cols;
            float *f = malloc(n * sizeof *f);
            double sum = 0, square = 0, neighbour = 0;
            fb_state_read(&s, q->block, q->offset, n, f);
            for (uint64_t k = 0; k < n; k++) {
                if (strstr(q->name, "norm"))
                    assert_true(f[k] == 1.0f);
                assert_true(fabsf(f[k]) <= 1.0f);
                sum += f[k];
                square += (double)f[k] * f[k];
                neighbour += k ? (double)f[k] * f[k - 1] : 0;
            }
            if (q->rank == 2) {
                assert_true(fabs(sum / (double)n) < 5 * 0.02 / sqrt((double)n));
                assert_true(fabs(sqrt(square / (double)n) - 0.02) < 5 * 0.02 / sqrt(2 * (double)n));
                assert_true(fabs(neighbour / square) < 5 / sqrt((double)n));
            }
            free(f);
        }
        fb_state_deinit(&s);
        fb_manifest_free(&m);
    }
    d->ops->close(d);
}

static void the_seed_decides_and_the_team_does_not(void **unused)
{
    (void)unused;
    fb_device *d = open_device();
    fb_state s[3];
    fb_manifest m[3];
    fb_plan p;
    fill(&s[0], &m[0], &p, d, FB_BF16, 1, 7);
    fill(&s[1], &m[1], &p, d, FB_BF16, 3, 7);
    fill(&s[2], &m[2], &p, d, FB_BF16, 1, 8);
    uint64_t size = p.host[FB_HOST_WEIGHTS].size;
    assert_memory_equal(s[0].component[FB_HOST_WEIGHTS].at, s[1].component[FB_HOST_WEIGHTS].at, size);
    assert_memory_equal(s[0].component[FB_HOST_REMAINDERS].at, s[1].component[FB_HOST_REMAINDERS].at, size);
    assert_true(memcmp(s[0].component[FB_HOST_WEIGHTS].at, s[2].component[FB_HOST_WEIGHTS].at, size) != 0);
    /* Two matrices of one shape differ, too. */
    assert_true(memcmp(fb_state_at(&s[0], FB_HOST_WEIGHTS, 1, 0), fb_state_at(&s[0], FB_HOST_WEIGHTS, 2, 0),
                       m[0].blocks[1].extent * 2) != 0);
    for (int i = 0; i < 3; i++) {
        fb_state_deinit(&s[i]);
        fb_manifest_free(&m[i]);
    }
    d->ops->close(d);
}

/* A step of a shape without files.  Its hidden rows have mean square 1 after the final norm, so that logits are near
 * normal with variance hidden * 0.02^2, and the loss of random targets is near ln(vocab) + variance / 2. */
static void a_shape_trains_from_nothing(void **unused)
{
    (void)unused;
    static const char *const overrides[] = { "backend=cpu", "compute_threads=1", "update_threads=1" };
    fb_options o;
    fb_session s;
    fb_error err;
    uint32_t ids[60];
    int32_t labels[60];
    uint64_t seed = 3;
    double variance = model.hidden * 0.02 * 0.02, want = log(model.vocab) + variance / 2;
    assert_int_equal(fb_options_read(&o, NULL, overrides, FB_COUNT(overrides), NULL, NULL, &err), FB_OK);
    fb_session_request r = { .options = &o, .train = true, .row_len = 60, .micro_rows = 1, .n_micro = 1, .trace_steps = 1 };
    if (fb_session_open_shape(&s, tiny_config(&model), "tiny", &err) != FB_OK || fb_session_plan(&s, &r, &err) != FB_OK
        || fb_session_start(&s, &r, &err) != FB_OK)
        fail_msg("%s", err.msg);
    for (int i = 0; i < 60; i++)
        labels[i] = (int32_t)(ids[i] = random_under(&seed, model.vocab));
    fb_micro *m = fb_engine_micro(s.engine, 0);
    fb_micro_begin(m);
    fb_micro_add_document(m, ids, labels, 60);
    fb_micro_finish(m);
    fb_step_result result;
    assert_int_equal(fb_engine_step(s.engine, 1, &(fb_adamw){ .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .step = 1 },
                                    1.0, &result, &err), FB_OK);
    assert_true(result.updated);
    assert_int_equal(result.n_learned, 59);
    /* Five deviations of a mean of 59; 0.02 for what the normal distribution only approximates. */
    assert_true(fabs(result.loss_sum / 59 - want) < 5 * sqrt(variance / 59) + 0.02);
    assert_true(fb_trace_account_of(s.trace)->work > 0);
    fb_session_close(&s);
    fb_options_free(&o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(presets_have_the_published_sizes),
        cmocka_unit_test(an_unknown_preset_lists_the_known),
        cmocka_unit_test(a_bad_shape_is_refused),
        cmocka_unit_test(matrices_are_noise_and_norms_one),
        cmocka_unit_test(the_seed_decides_and_the_team_does_not),
        cmocka_unit_test(a_shape_trains_from_nothing),
    };
    return cmocka_run_group_tests(tests, temp_dir_make, temp_dir_remove);
}
