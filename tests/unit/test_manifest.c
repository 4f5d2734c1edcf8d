/* Layouts are worked out by hand from the rule in model/manifest.h; names and shapes are transformers'. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "io/shard_write.h"
#include "model/manifest.h"
#include "temp_dir.h"

/* hidden 12, 2 heads of 6, 1 key-value head, ffn 10, vocab 7: nothing is a multiple of 64. */
#define CONFIG(type, more)                                                                                             \
    "{\"model_type\":\"" type "\",\"hidden_size\":12,\"intermediate_size\":10,\"num_hidden_layers\":2,"                   \
    "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"head_dim\":6,\"vocab_size\":7,\"eos_token_id\":null,"          \
    "\"max_position_embeddings\":64" more "}"

static fb_manifest build(const char *json)
{
    fb_error        err = { 0 };
    fb_model_config c = { 0 };
    fb_manifest     m = { 0 };
    if (fb_model_config_parse(&c, json, "config.json", &err) != FB_OK || fb_manifest_build(&m, &c, &err) != FB_OK)
        fail_msg("%s", err.msg);
    assert_null(c.json); /* taken over */
    return m;
}

static void a_plain_model_is_laid_out(void **unused)
{
    (void)unused;
    static const struct {
        const char *name;
        uint64_t    offset, rows, cols;
        uint32_t    rank;
        bool        decay;
    } layer[] = {
        { "model.layers.1.input_layernorm.weight", 0, 12, 1, 1, false },
        { "model.layers.1.self_attn.q_proj.weight", 64, 12, 12, 2, true },
        { "model.layers.1.self_attn.k_proj.weight", 208, 6, 12, 2, true },  /* joined: no padding */
        { "model.layers.1.self_attn.v_proj.weight", 280, 6, 12, 2, true },
        { "model.layers.1.self_attn.o_proj.weight", 384, 12, 12, 2, true }, /* 352 rounded up */
        { "model.layers.1.post_attention_layernorm.weight", 576, 12, 1, 1, false },
        { "model.layers.1.mlp.gate_proj.weight", 640, 10, 12, 2, true },
        { "model.layers.1.mlp.up_proj.weight", 760, 10, 12, 2, true },
        { "model.layers.1.mlp.down_proj.weight", 896, 12, 10, 2, true },
    };
    fb_manifest m = build(CONFIG("llama", ""));
    assert_int_equal(m.n_block, 4);
    assert_int_equal(m.n_param, 1 + 2 * 9 + 2);
    assert_int_equal(m.n_weight, 7 * 12 + 2 * (2 * 12 + 2 * 144 + 2 * 72 + 3 * 120) + 12 + 7 * 12);
    const fb_block_desc *b = &m.blocks[2];
    assert_int_equal(b->kind, FB_BLOCK_LAYER);
    assert_int_equal(b->layer, 1);
    assert_int_equal(b->n_param, FB_COUNT(layer));
    assert_int_equal(b->extent, 1024); /* 1016 rounded up */
    for (size_t i = 0; i < FB_COUNT(layer); i++) {
        const fb_param *p = &m.params[b->param_first + i];
        assert_string_equal(p->name, layer[i].name);
        assert_int_equal(p->offset, layer[i].offset);
        assert_int_equal(p->rows, layer[i].rows);
        assert_int_equal(p->cols, layer[i].cols);
        assert_int_equal(p->rank, layer[i].rank);
        assert_int_equal(p->decay, layer[i].decay);
        assert_int_equal(p->block, 2);
        assert_int_equal(b->offset[p->role], layer[i].offset);
    }
    assert_int_equal(b->offset[FB_ROLE_Q_BIAS], -1);
    assert_int_equal(b->offset[FB_ROLE_HEAD], -1);
    assert_int_equal(m.blocks[0].kind, FB_BLOCK_EMBED);
    assert_int_equal(m.blocks[0].extent, 128);
    assert_int_equal(m.blocks[3].kind, FB_BLOCK_FINAL);
    assert_int_equal(m.blocks[3].offset[FB_ROLE_HEAD], 64);
    assert_int_equal(m.blocks[3].extent, 192);
    assert_int_equal(m.extent, 128 + 2 * 1024 + 192);
    assert_int_equal(m.extent_max_layer, 1024);
    fb_manifest_free(&m);
    fb_manifest_free(&m);
}

static bool has(const fb_manifest *m, const char *name)
{
    for (uint32_t i = 0; i < m->n_param; i++)
        if (strcmp(m->params[i].name, name) == 0)
            return true;
    return false;
}

static void families_differ_as_they_should(void **unused)
{
    (void)unused;
    fb_manifest m = build(CONFIG("llama", ",\"attention_bias\":true,\"mlp_bias\":true,\"tie_word_embeddings\":true"));
    assert_int_equal(m.n_param, 1 + 2 * 16 + 1);
    assert_true(has(&m, "model.layers.0.self_attn.o_proj.bias"));
    assert_true(has(&m, "model.layers.0.mlp.down_proj.bias"));
    assert_false(has(&m, "lm_head.weight"));
    assert_int_equal(m.blocks[3].offset[FB_ROLE_HEAD], -1);
    const int64_t *at = m.blocks[1].offset;
    assert_int_equal(at[FB_ROLE_K_BIAS], at[FB_ROLE_Q_BIAS] + 12);
    assert_int_equal(at[FB_ROLE_V_BIAS], at[FB_ROLE_K_BIAS] + 6);
    assert_int_equal(at[FB_ROLE_UP_BIAS], at[FB_ROLE_GATE_BIAS] + 10);
    fb_manifest_free(&m);

    m = build(CONFIG("mistral", ""));
    assert_int_equal(m.n_param, 1 + 2 * 9 + 2);
    fb_manifest_free(&m);

    m = build(CONFIG("qwen2", ""));
    assert_int_equal(m.n_param, 1 + 2 * 12 + 2);
    assert_true(has(&m, "model.layers.1.self_attn.v_proj.bias"));
    assert_false(has(&m, "model.layers.1.self_attn.o_proj.bias"));
    fb_manifest_free(&m);

    m = build(CONFIG("qwen3", ",\"attention_bias\":true"));
    assert_int_equal(m.n_param, 1 + 2 * 15 + 2);
    assert_true(has(&m, "model.layers.1.self_attn.q_norm.weight"));
    assert_true(has(&m, "model.layers.1.self_attn.o_proj.bias"));
    fb_manifest_free(&m);
}

static void refuses_an_absurd_size(void **unused)
{
    (void)unused;
    fb_error        err = { 0 };
    fb_model_config c = { 0 };
    fb_manifest     m = { 0 };
    assert_int_equal(fb_model_config_parse(&c, "{\"model_type\":\"llama\",\"hidden_size\":2147483646,"
                                               "\"intermediate_size\":2147483647,\"num_hidden_layers\":512,"
                                               "\"num_attention_heads\":2,\"vocab_size\":9,\"head_dim\":2,"
                                               "\"max_position_embeddings\":64}", "c", &err), FB_OK);
    expect_failure(fb_manifest_build(&m, &c, &err), FB_INPUT, &err, "more than 2^56 parameters");
    assert_null(m.params);
    assert_null(c.json);
}

/* What the saved checkpoint does differently from the manifest. */
typedef struct fault {
    const char *json, *skip, *reshape, *extra, *part; /* part NULL: the check passes */
    uint64_t    extra_rank, extra_shape[2];
    int         extra_byte; /* every byte of the extra tensor */
} fault;

static fb_status save_and_check(const fault *f, fb_error *err)
{
    fb_shard_writer *w = NULL;
    fb_shard_set    *s = NULL;
    fb_status        st = FB_OK;
    char             bytes[4096];
    fb_manifest      m = build(f->json);
    FB_TRY(fb_shard_writer_new(&w, temp_dir, "model", 1 << 20, err));
    for (uint32_t i = 0; i < m.n_param; i++) {
        const fb_param *p = &m.params[i];
        uint64_t        shape[2] = { p->rows, p->cols };
        if (f->skip && strcmp(f->skip, p->name) == 0)
            continue;
        if (f->reshape && strcmp(f->reshape, p->name) == 0)
            shape[1]++;
        FB_TRY(fb_shard_writer_declare(w, p->name, FB_BF16, p->rank, shape, err));
    }
    if (f->extra)
        FB_TRY(fb_shard_writer_declare(w, f->extra, FB_BF16, (uint32_t)f->extra_rank, f->extra_shape, err));
    for (uint32_t i = 0; i < m.n_param; i++) {
        const fb_param *p = &m.params[i];
        uint64_t        cols = p->cols + (f->reshape && strcmp(f->reshape, p->name) == 0);
        if (f->skip && strcmp(f->skip, p->name) == 0)
            continue;
        memset(bytes, 0x11, sizeof bytes);
        FB_TRY(fb_shard_writer_append(w, bytes, p->rows * cols * 2, err));
    }
    if (f->extra) {
        memset(bytes, f->extra_byte, sizeof bytes);
        FB_TRY(fb_shard_writer_append(w, bytes, f->extra_shape[0] * (f->extra_rank == 2 ? f->extra_shape[1] : 1) * 2, err));
    }
    st = fb_shard_writer_finish(w, err);
    w = NULL;
    FB_TRY(st);
    FB_TRY(fb_shard_set_open(&s, temp_dir, err));
    st = fb_manifest_check(&m, s, err);
done:
    fb_shard_writer_abandon(w);
    fb_shard_set_close(s);
    fb_manifest_free(&m);
    return st;
}

static void a_checkpoint_is_checked(void **unused)
{
    (void)unused;
#define TIED CONFIG("llama", ",\"tie_word_embeddings\":true")
    static const fault faults[] = {
        { .json = CONFIG("qwen3", "") },
        { .json = TIED },
        { .json = CONFIG("llama", ""), .skip = "lm_head.weight", .part = "'lm_head.weight' is missing, the config says [7,12]" },
        { .json = CONFIG("llama", ""), .skip = "model.layers.1.mlp.up_proj.weight",
          .part = "'model.layers.1.mlp.up_proj.weight' is missing, the config says [10,12]" },
        { .json = CONFIG("llama", ""), .reshape = "model.layers.1.mlp.up_proj.weight",
          .part = "'model.layers.1.mlp.up_proj.weight' is [10,13], the config says [10,12]" },
        { .json = CONFIG("mistral", ""), .extra = "model.layers.0.self_attn.q_proj.bias", .extra_rank = 1, .extra_shape = { 12 },
          .part = "'model.layers.0.self_attn.q_proj.bias' is not a tensor of a MistralForCausalLM with this config" },
        { .json = CONFIG("llama", ""), .extra = "model.layers.2.mlp.up_proj.weight", .extra_rank = 2, .extra_shape = { 10, 12 },
          .part = "'model.layers.2.mlp.up_proj.weight' is not a tensor" },
        { .json = CONFIG("llama", ""), .extra = "model.layers.0.self_attn.rotary_emb.inv_freq", .extra_rank = 1,
          .extra_shape = { 3 } },
        { .json = TIED, .extra = "lm_head.weight", .extra_rank = 2, .extra_shape = { 7, 12 }, .extra_byte = 0x11 },
        { .json = TIED, .extra = "lm_head.weight", .extra_rank = 2, .extra_shape = { 7, 12 }, .extra_byte = 0x12,
          .part = "'lm_head.weight' differs from 'model.embed_tokens.weight', but the config ties them" },
        { .json = TIED, .extra = "lm_head.weight", .extra_rank = 2, .extra_shape = { 7, 11 },
          .part = "'lm_head.weight' is [7,11], the config says [7,12]" },
    };
    for (size_t i = 0; i < FB_COUNT(faults); i++) {
        fb_error  err = { 0 };
        fb_status st = save_and_check(&faults[i], &err);
        if (faults[i].part)
            expect_failure(st, FB_INPUT, &err, faults[i].part);
        else if (st != FB_OK)
            fail_msg("%s", err.msg);
    }
}

static void a_folder_gives_its_manifest(void **unused)
{
    (void)unused;
    fb_error    err = { 0 };
    fb_manifest m = { 0 };
    expect_failure(fb_manifest_read(&m, temp_dir, &err), FB_INPUT, &err, "config.json: there is no such file");
    temp_write_text("config.json", CONFIG("qwen2", ""));
    assert_int_equal(fb_manifest_read(&m, temp_dir, &err), FB_OK);
    assert_string_equal(m.cfg.arch->hf_name, "Qwen2ForCausalLM");
    fb_manifest_free(&m);
}

/* A table that forgets a name or a size fails here, not in a run. */
static void every_role_has_a_name(void **unused)
{
    (void)unused;
    char names[128];
    for (int r = 0; r < FB_ROLE_COUNT; r++)
        assert_non_null(fb_role_str((fb_role)r));
    fb_arch_names(names, sizeof names);
    assert_string_equal(names, "llama, mistral, qwen2, qwen3");
    fb_arch_names(names, 8);
    assert_string_equal(names, "llama, ");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plain_model_is_laid_out),
        cmocka_unit_test(families_differ_as_they_should),
        cmocka_unit_test(refuses_an_absurd_size),
        cmocka_unit_test_setup_teardown(a_checkpoint_is_checked, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(a_folder_gives_its_manifest, temp_dir_make, temp_dir_remove),
        cmocka_unit_test(every_role_has_a_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
