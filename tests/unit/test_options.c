/* The configuration: every type, every refusal with its place, and what other trainers' files carry.
 * Oracles: the written contract (header and LlamaFactory's and transformers' defaults), and identities: all values
 * written as JSON and read back as YAML are the same values; the fields that no key sets do not exist. */
#include "config/key.h"
#include "config/options.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/error.h"
#include "config/compat.h"
#include "config/parse.h"

static char folder[] = P_tmpdir "/test_options.XXXXXX";
static const char name[] = "t.yaml";

static void write_bytes(const char *bytes, size_t n)
{
    FILE *f = fopen(name, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static char warnings[4096];
static void collect(void *ctx, const char *sentence)
{
    (void)ctx;
    strncat(warnings, sentence, sizeof warnings - strlen(warnings) - 2);
    strcat(warnings, "\n");
}

/* yaml: NULL for no file; arguments end with NULL. */
static fb_status read_all(fb_options *o, fb_error *err, const char *yaml, const char *const *argument)
{
    int n = 0;
    while (argument && argument[n])
        n++;
    if (yaml)
        write_bytes(yaml, strlen(yaml));
    *warnings = 0;
    *err = (fb_error){ 0 };
    *o = (fb_options){ 0 };
    return fb_options_read(o, yaml ? name : NULL, argument, n, collect, NULL, err);
}

static fb_options accepted(const char *yaml, const char *const *argument)
{
    fb_options o;
    fb_error   err;
    if (read_all(&o, &err, yaml, argument) != FB_OK)
        fail_msg("refused: %s\n%s", err.msg, yaml ? yaml : "");
    return o;
}
#define ARGS(...) ((const char *const[]){ __VA_ARGS__, NULL })

static void check_refused(const char *yaml, const char *const *argument, const char *start, int line)
{
    fb_options o;
    fb_error   err;
    fb_status  st = read_all(&o, &err, yaml, argument);
    if (st != FB_CONFIG || err.status != FB_CONFIG || strncmp(err.msg, start, strlen(start)) != 0)
        fail_msg("line %d: expected '%s...', got status %d '%s'", line, start, st, err.msg);
    assert_null(o.dataset_dir); /* nothing is handed out */
}
#define REFUSED(yaml, start)      check_refused(yaml, NULL, start, __LINE__)
#define ARG_REFUSED(arg, start)   check_refused(NULL, ARGS(arg), start, __LINE__)

/* Each read leaves strings behind that this drops. */
#define WITH(o, yaml, ...)                                          \
    for (fb_options o = accepted(yaml, __VA_ARGS__), *once_ = &o; once_; fb_options_free(&o), once_ = NULL)

static void defaults_are_those_of_the_header(void **state)
{
    (void)state;
    WITH (o, NULL, NULL) {
        assert_null(o.model_name_or_path);
        assert_null(o.dataset);
        assert_string_equal(o.dataset_dir, "data");
        assert_null(o.eval_dataset);
        assert_true(o.val_size == 0);
        assert_int_equal(o.stage, FB_STAGE_SFT);
        assert_int_equal(o.cutoff_len, 2048);
        assert_false(o.packing || o.packing_given || o.disable_shuffling || o.train_on_prompt || o.mask_history);
        assert_null(o.system);
        assert_int_equal(o.max_samples, 0);
        assert_int_equal(o.per_device_train_batch_size, 1);
        assert_int_equal(o.per_device_eval_batch_size, 1);
        assert_int_equal(o.gradient_accumulation_steps, 1);
        assert_int_equal(o.micro_batch, FB_AUTO);
        assert_true(o.learning_rate == 5e-5);
        assert_int_equal(o.lr_scheduler_type, FB_LR_LINEAR);
        assert_true(o.min_lr < 0 && o.min_lr_rate < 0);
        assert_true(o.num_stable_steps == 0 && o.num_decay_steps == 0 && o.min_lr_ratio == 0 && o.num_cycles == 0.5);
        assert_int_equal(o.warmup_type, FB_LR_SHAPE_LINEAR);
        assert_int_equal(o.decay_type, FB_LR_SHAPE_COSINE);
        assert_true(o.warmup_ratio == 0 && o.warmup_steps == 0 && o.num_train_epochs == 3 && o.max_steps == -1);
        assert_true(o.weight_decay == 0 && o.adam_beta1 == 0.9 && o.adam_beta2 == 0.999 && o.adam_epsilon == 1e-8);
        assert_true(o.max_grad_norm == 1);
        assert_int_equal(o.seed, 42);
        assert_null(o.output_dir);
        assert_false(o.overwrite_output_dir);
        assert_int_equal(o.logging_steps, 10);
        assert_int_equal(o.save_strategy, FB_SAVE_STEPS);
        assert_int_equal(o.save_steps, 500);
        assert_int_equal(o.save_total_limit, 0);
        assert_int_equal(o.save_dtype, FB_DTYPE_AUTO);
        assert_int_equal(o.eval_strategy, FB_SAVE_NO);
        assert_null(o.resume_from_checkpoint);
        assert_int_equal(o.nonfinite_limit, 3);
        assert_string_equal(o.backend, "auto");
        assert_int_equal(o.device, 0);
        assert_int_equal(o.compute_dtype, FB_DTYPE_AUTO);
        assert_true(o.hbm_budget == 0 && o.ram_budget == 0);
        assert_int_equal(o.slots, FB_AUTO);
        assert_true(o.overlap);
        assert_int_equal(o.recompute, FB_RECOMPUTE_AUTO);
        assert_true(o.compute_threads == 0 && o.update_threads == 0);
        assert_string_equal(o.update_kernel, "auto");
        assert_false(o.full_determinism);
    }
    WITH (o, "", NULL)
        assert_int_equal(o.cutoff_len, 2048);
    WITH (o, "# only a comment\n", NULL)
        assert_int_equal(o.cutoff_len, 2048);
}

static void a_llamafactory_file_reads_as_it_stands(void **state)
{
    (void)state;
    static const char yaml[] =
        "### model\nmodel_name_or_path: Qwen/Qwen2.5-7B\ntrust_remote_code: true\n\n"
        "### method\nstage: sft\ndo_train: true\nfinetuning_type: full\ndeepspeed: examples/deepspeed/ds_z3_config.json\n\n"
        "### dataset\ndataset: identity,alpaca_en_demo\ntemplate: qwen\ncutoff_len: 2_048\nmax_samples: 1e3\n"
        "overwrite_cache: true\npreprocessing_num_workers: 16\ndataloader_num_workers: 4\n\n"
        "### output\noutput_dir: saves/full\nlogging_steps: 10\nsave_steps: 500\nplot_loss: true\n"
        "overwrite_output_dir: true\nsave_only_model: false\nreport_to: none  # none, wandb\n\n"
        "### train\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 2\nlearning_rate: 1.0e-5\n"
        "num_train_epochs: 3.0\nlr_scheduler_type: cosine\nwarmup_ratio: 0.1\nbf16: true\nddp_timeout: 180000000\n"
        "resume_from_checkpoint: null\n\n"
        "### eval\nval_size: 0.1\nper_device_eval_batch_size: 4\nevaluation_strategy: steps\neval_steps: 50\n";
    WITH (o, yaml, NULL) {
        assert_string_equal(o.model_name_or_path, "Qwen/Qwen2.5-7B");
        assert_string_equal(o.dataset, "identity,alpaca_en_demo");
        assert_int_equal(o.cutoff_len, 2048);
        assert_int_equal(o.max_samples, 1000);
        assert_true(o.overwrite_output_dir);
        assert_true(o.learning_rate == 1e-5 && o.num_train_epochs == 3 && o.warmup_ratio == 0.1 && o.val_size == 0.1);
        assert_int_equal(o.lr_scheduler_type, FB_LR_COSINE);
        assert_int_equal(o.per_device_eval_batch_size, 4);
        assert_int_equal(o.eval_strategy, FB_SAVE_STEPS);
        assert_int_equal(o.eval_steps, 50);
        assert_null(o.resume_from_checkpoint);
    }
    static const char *const warned[] = { ":3: trust_remote_code is accepted but changes nothing here: code from a checkpoint is "
                                          "never run",
                                          ":7: do_train", ":8: finetuning_type", ":9: deepspeed", ":13: template",
                                          ":16: overwrite_cache",
                                          ":17: preprocessing_num_workers", ":18: dataloader_num_workers", ":24: plot_loss",
                                          ":26: save_only_model", ":27: report_to", ":36: bf16", ":37: ddp_timeout" };
    for (size_t i = 0; i < FB_COUNT(warned); i++)
        if (!strstr(warnings, warned[i]))
            fail_msg("no warning '%s' in:\n%s", warned[i], warnings);
    size_t n_line = 0;
    for (const char *c = warnings; *c; c++)
        n_line += *c == '\n';
    assert_int_equal(n_line, FB_COUNT(warned)); /* and none for a key that does something */
}

static void scalars_need_no_quotes(void **state)
{
    (void)state;
    WITH (o, "save_strategy: no\nlearning_rate: 3e-3\noutput_dir: 123\ndataset: on\nsystem: \"\"\n", NULL) {
        assert_int_equal(o.save_strategy, FB_SAVE_NO);
        assert_true(o.learning_rate == 3e-3);
        assert_string_equal(o.output_dir, "123");
        assert_string_equal(o.dataset, "on");
        assert_string_equal(o.system, "");
    }
    WITH (o, "{save_strategy: 'no', \"learning_rate\": '3e-3', system: \"a\\tb: \\u00e9\"}", NULL) {
        assert_int_equal(o.save_strategy, FB_SAVE_NO);
        assert_true(o.learning_rate == 3e-3);
        assert_string_equal(o.system, "a\tb: \xc3\xa9");
    }
    WITH (o, "\xef\xbb\xbfsystem: |\n  two\n  lines\nseed: 7\n", NULL) {
        assert_string_equal(o.system, "two\nlines\n");
        assert_int_equal(o.seed, 7);
    }
}

static void null_means_the_default(void **state)
{
    (void)state;
    WITH (o, "learning_rate:\nsave_strategy: ~\nslots: null\ndataset_dir: NULL\nmin_lr: null\ndataset: []\nbf16:\n"
             "lr_scheduler_kwargs: {}\noutput_dir: ''\n", NULL) {
        assert_true(o.learning_rate == 5e-5);
        assert_int_equal(o.save_strategy, FB_SAVE_STEPS);
        assert_int_equal(o.slots, FB_AUTO);
        assert_string_equal(o.dataset_dir, "data");
        assert_null(o.dataset);
        assert_null(o.output_dir);
    }
    assert_string_equal(warnings, "");
    /* and takes back what the file says */
    WITH (o, "val_size: 0.5\nsystem: hello\n", ARGS("val_size=null", "eval_dataset=e.jsonl", "system=~")) {
        assert_true(o.val_size == 0);
        assert_string_equal(o.eval_dataset, "e.jsonl");
        assert_null(o.system);
    }
}

static void bools(void **state)
{
    (void)state;
    static const char *const yes[] = { "true", "True", "TRUE", "yes", "Yes", "on", "ON" };
    static const char *const no[] = { "false", "False", "no", "NO", "off", "oFF" };
    static const char *const bad[] = { "1", "0", "y", "n", "truee", "tru", "0.0", "" };
    bool on;
    for (size_t i = 0; i < FB_COUNT(yes); i++)
        assert_true(fb_parse_bool(yes[i], &on) && on);
    for (size_t i = 0; i < FB_COUNT(no); i++)
        assert_true(fb_parse_bool(no[i], &on) && !on);
    for (size_t i = 0; i < FB_COUNT(bad); i++)
        assert_false(fb_parse_bool(bad[i], &on));
    REFUSED("a: 1", "t.yaml:1: unknown key 'a'");
    REFUSED("seed: 1\npacking: maybe\n", "t.yaml:2: packing must be true or false, not 'maybe' (");
    ARG_REFUSED("packing=", "command line: packing must be true or false, not '' (");
}

static void integers(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int64_t     value;
    } good[] = { { "0", 0 }, { "7", 7 }, { "+7", 7 }, { "-7", -7 }, { "007", 7 }, { "1e3", 1000 }, { "1E3", 1000 },
                 { "1.5e3", 1500 },
                 { "2.0", 2 }, { "5.", 5 }, { "1_000", 1000 }, { "1_000_000", 1000000 }, { "-0", 0 }, { "1200e-2", 12 },
                 { "9223372036854775807", INT64_MAX }, { "-9223372036854775808", INT64_MIN },
                 { "9007199254740993", 9007199254740993 } };
    static const char *const bad[] = { "", " ", "1 ", " 1", "1.5", "1e-3", "9223372036854775808", "1e19", "1e16", "0x10", "1__0",
                                       "_1",
                                       "1_", "1_.0", "1._0", "1e", "1e+", "e3", ".", "-", "+-1", "--1", "one", "nan", "inf",
                                       "1e1.5", "1,000",
                                       "11111111111111111111111111111111111111111111111111111111111111111111111" };
    int64_t value;
    for (size_t i = 0; i < FB_COUNT(good); i++)
        if (!fb_parse_int(good[i].text, &value) || value != good[i].value)
            fail_msg("'%s'", good[i].text);
    for (size_t i = 0; i < FB_COUNT(bad); i++)
        if (fb_parse_int(bad[i], &value))
            fail_msg("'%s' is taken as %lld", bad[i], (long long)value);
    WITH (o, "seed: 9223372036854775807\nsave_steps: 4294967294\nmax_steps: 1e3", NULL) {
        assert_true(o.seed == INT64_MAX);
        assert_int_equal(o.save_steps, UINT32_MAX - 1);
        assert_int_equal(o.max_steps, 1000);
    }
    REFUSED("logging_steps: 0", "t.yaml:1: logging_steps must be a whole number of at least 1, not '0'");
    REFUSED("seed: -1", "t.yaml:1: seed must be a whole number of at least 0, not '-1'");
    REFUSED("save_steps: 4294967295", "t.yaml:1: save_steps must be a whole number");
    REFUSED("cutoff_len: 2048.5", "t.yaml:1: cutoff_len must be a whole number");
    REFUSED("\n\nwarmup_steps: 0.03", "t.yaml:3: warmup_steps must be a whole number of at least 0, not '0.03' "
                                      "(warm-up in updates, wins over warmup_ratio, which takes a fraction)");
    REFUSED("max_steps: -2", "t.yaml:1: max_steps must be a whole number of at least -1");
    REFUSED("device: 1024", "t.yaml:1: device must be a whole number of at least 0 and at most 1023");
}

static void reals(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        double      value;
    } good[] = { { "3e-3", 0x1.89374bc6a7efap-9 }, { ".5", 0.5 }, { "1E-4", 0x1.a36e2eb1c432dp-14 }, { "-.25", -0.25 }, { "4", 4 },
                 { "1_0.2_5", 10.25 }, { "+1.5", 1.5 }, { "2.2250738585072014e-308", 0x1p-1022 } };
    static const char *const bad[] = { "inf", "-inf", ".inf", "nan", ".nan", "NaN", "Infinity", "1e999", "-1e999", "1e-999",
                                       "1e-320", "0x1p3", "1.2.3", "1e5x", "1,5", "", "e", ".e1", "1 2" };
    double value;
    for (size_t i = 0; i < FB_COUNT(good); i++)
        if (!fb_parse_real(good[i].text, &value) || value != good[i].value)
            fail_msg("'%s'", good[i].text);
    for (size_t i = 0; i < FB_COUNT(bad); i++)
        if (fb_parse_real(bad[i], &value))
            fail_msg("'%s' is taken as %g", bad[i], value);
    REFUSED("learning_rate: .inf", "t.yaml:1: learning_rate must be a number of at least 0 and at most 1000, not '.inf'");
    REFUSED("learning_rate: -1e-5", "t.yaml:1: learning_rate must be");
    REFUSED("warmup_ratio: 1.01", "t.yaml:1: warmup_ratio must be a number of at least 0 and at most 1, not '1.01'");
    REFUSED("adam_beta1: 1", "t.yaml:1: adam_beta1 must be a number of at least 0 and below 1, not '1'");
    REFUSED("adam_beta2: -0.1", "t.yaml:1: adam_beta2 must be");
    REFUSED("adam_epsilon: 0", "t.yaml:1: adam_epsilon must be");
    REFUSED("max_grad_norm: -1", "t.yaml:1: max_grad_norm must be");
    REFUSED("weight_decay: high", "t.yaml:1: weight_decay must be");
    WITH (o, "max_grad_norm: 0\nadam_beta1: 0\nwarmup_ratio: 1\nlearning_rate: 0", NULL)
        assert_true(o.max_grad_norm == 0 && o.adam_beta1 == 0 && o.warmup_ratio == 1 && o.learning_rate == 0);
}

static void sizes(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint64_t    value;
    } good[] = { { "0", 0 }, { "1000000", 1000000 }, { "12B", 12 }, { "1KiB", 1024 }, { "384MiB", 384ull << 20 },
                 { "16GiB", 16ull << 30 },
                 { "1.5TiB", 3ull << 39 }, { "1KB", 1000 }, { "2MB", 2000000 }, { "16GB", 16000000000 }, { "3TB", 3000000000000 },
                 { "16gib", 16ull << 30 }, { "16 GiB", 16ull << 30 }, { "1e9", 1000000000 }, { "0.5KiB", 512 },
                 { "1_024 KiB", 1 << 20 } };
    static const char *const bad[] = { "", "GiB", "16G", "16Gi", "-1GiB", "-1", "1.5", "1.5B", "16  GiB", "16 ", "16GiBs",
                                       "9e15TiB", "1e999", "inf", "16 PB" };
    uint64_t value;
    for (size_t i = 0; i < FB_COUNT(good); i++)
        if (!fb_parse_size(good[i].text, &value) || value != good[i].value)
            fail_msg("'%s'", good[i].text);
    for (size_t i = 0; i < FB_COUNT(bad); i++)
        if (fb_parse_size(bad[i], &value))
            fail_msg("'%s' is taken as %llu", bad[i], (unsigned long long)value);
    WITH (o, "hbm_budget: 384MiB\nram_budget: auto", NULL)
        assert_true(o.hbm_budget == 384ull << 20 && o.ram_budget == 0);
    REFUSED("hbm_budget: 16G",
            "t.yaml:1: hbm_budget must be a number of bytes such as 1000000, 384MiB or 16GB, or auto, not '16G'");
}

static void choices_and_special_words(void **state)
{
    (void)state;
    WITH (o, "stage: pt\nsave_dtype: bfloat16\ncompute_dtype: float32\nrecompute: none\nslots: all\nmicro_batch: auto\n"
             "compute_threads: auto\nbackend: fault:delay=3\nupdate_kernel: scalar\nsave_strategy: epoch", NULL) {
        assert_int_equal(o.stage, FB_STAGE_PT);
        assert_int_equal(o.save_dtype, FB_BF16);
        assert_int_equal(o.compute_dtype, FB_F32);
        assert_int_equal(o.recompute, FB_RECOMPUTE_NONE);
        assert_int_equal(o.slots, FB_SLOTS_ALL);
        assert_int_equal(o.micro_batch, FB_AUTO);
        assert_int_equal(o.save_strategy, FB_SAVE_EPOCH);
        assert_string_equal(o.backend, "fault:delay=3");
        assert_string_equal(o.update_kernel, "scalar");
    }
    REFUSED("stage: dpo", "t.yaml:1: stage must be one of sft, pt, not 'dpo'");
    REFUSED("compute_dtype: float16", "t.yaml:1: compute_dtype must be one of auto, float32, bfloat16, not 'float16'");
    REFUSED("recompute: some", "t.yaml:1: recompute must be one of auto, none, selective, full, not 'some'");
    REFUSED("lr_scheduler_type: polynomial", "t.yaml:1: lr_scheduler_type must be one of linear, cosine, cosine_with_min_lr, "
            "constant, constant_with_warmup, warmup_stable_decay, not 'polynomial'");
    REFUSED("backend: rocm", "t.yaml:1: backend must be one of auto, cpu, cuda, fault:*, not 'rocm'");
    REFUSED("backend: 'fault:'", "t.yaml:1: backend must be");
    REFUSED("update_kernel: sse", "t.yaml:1: update_kernel must be");
    REFUSED("slots: 0", "t.yaml:1: slots must be a whole number of at least 1, or auto, or all, not '0'");
    REFUSED("slots: some", "t.yaml:1: slots must be");
    REFUSED("micro_batch: all", "t.yaml:1: micro_batch must be a whole number of at least 1, or auto, not 'all'");
    for (fb_lr_type t = 0; t < FB_LR_COUNT; t++) { /* the names here are those of optim/lr.c */
        char argument[64];
        snprintf(argument, sizeof argument, "lr_scheduler_type=%s", fb_lr_type_str(t));
        WITH (o, NULL, ARGS(argument, t == FB_LR_COSINE_WITH_MIN_LR ? "min_lr=0" : "seed=1"))
            assert_int_equal(o.lr_scheduler_type, t);
    }
}

static void resume_takes_a_switch_or_a_folder(void **state)
{
    (void)state;
    WITH (o, "resume_from_checkpoint: Yes", NULL)
        assert_string_equal(o.resume_from_checkpoint, "true");
    WITH (o, "resume_from_checkpoint: off", NULL)
        assert_string_equal(o.resume_from_checkpoint, "false");
    WITH (o, "resume_from_checkpoint: out/checkpoint-10", NULL)
        assert_string_equal(o.resume_from_checkpoint, "out/checkpoint-10");
}

static void lists_where_they_make_sense(void **state)
{
    (void)state;
    WITH (o, "dataset: [a, b.jsonl]\neval_dataset:\n  - c\n  - 'd e'\nreport_to: [none]", NULL) {
        assert_string_equal(o.dataset, "a,b.jsonl");
        assert_string_equal(o.eval_dataset, "c,d e");
    }
    WITH (o, "report_to: []", ARGS("dataset=[a, b]", "report_to=[none]"))
        assert_string_equal(o.dataset, "a,b");
    REFUSED("seed: [1]", "t.yaml:1: seed takes one value, not a list");
    REFUSED("dataset:\n- a\n- [b]\n", "t.yaml:3: a list may hold plain values only");
    REFUSED("dataset:\n- a\n- b: c\n", "t.yaml:3: a list may hold plain values only");
    REFUSED("dataset: ['a,b']", "t.yaml:1: a list item may not be text with a comma in it");
    REFUSED("dataset:\n  - a\n  -\n", "t.yaml:3: a list item may not be empty");
    REFUSED("report_to: [tensorboard, wandb]", "t.yaml:1: report_to may only be none, not 'tensorboard,wandb'");
}

static void unknown_keys_get_the_nearest_name(void **state)
{
    (void)state;
    static const char *const near[][2] = {
        { "learning_rat", "learning_rate" }, { "leraning_rate", "learning_rate" }, { "Learning_Rate", "learning_rate" },
        { "learning-rate", "learning_rate" }, { "max_step", "max_steps" }, { "datset", "dataset" }, { "slot", "slots" },
        { "adam_beta", "adam_beta1" },
        { "--seed", "seed" }, { "gradient_acumulation_step", "gradient_accumulation_steps" },
        { "finetune_type", "finetuning_type" },
        { "model_name_or_pth", "model_name_or_path" } };
    for (size_t i = 0; i < FB_COUNT(near); i++) {
        char yaml[128], want[128], argument[64];
        snprintf(yaml, sizeof yaml, "seed: 1\n\n\n\n\n\n%s: 1\n", near[i][0]);
        snprintf(want, sizeof want, "t.yaml:7: unknown key '%s'; did you mean '%s'?", near[i][0], near[i][1]);
        REFUSED(yaml, want);
        snprintf(argument, sizeof argument, "%s=1", near[i][0]);
        snprintf(want, sizeof want, "command line: unknown key '%s'; did you mean '%s'?", near[i][0], near[i][1]);
        ARG_REFUSED(argument, want);
    }
    REFUSED("zzzzzzzzzz: 1", "t.yaml:1: unknown key 'zzzzzzzzzz'; `forebay help config` lists all keys");
    REFUSED("q: 1", "t.yaml:1: unknown key 'q'; `forebay help config`");
    REFUSED("'': 1", "t.yaml:1: unknown key ''; `forebay");
    REFUSED("torch_dtype: bfloat16", "t.yaml:1: unknown key 'torch_dtype'");
    REFUSED("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa: 1",
            "t.yaml:1: unknown key 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...'; `");
    REFUSED("\"a\\nb\": 1", "t.yaml:1: unknown key 'a?b'");
}

static void the_command_line_gets_the_same_checks(void **state)
{
    (void)state;
    WITH (o, "learning_rate: 1e-3\nseed: 1\n",
          ARGS("learning_rate=2e-3", "seed=2", "seed=3", "dataset=a=b", "system=x: [y]", "backend=cpu")) {
        assert_true(o.learning_rate == 2e-3);
        assert_int_equal(o.seed, 3); /* the last one wins */
        assert_string_equal(o.dataset, "a=b");
        assert_string_equal(o.system, "x: [y]");
    }
    WITH (o, NULL, ARGS("system="))
        assert_string_equal(o.system, "");
    ARG_REFUSED("seed", "command line: expected key=value, found 'seed'");
    ARG_REFUSED("=1", "command line: expected key=value, found '=1'");
    ARG_REFUSED("seed=x", "command line: seed must be a whole number of at least 0, not 'x'");
    ARG_REFUSED("seed=[1]", "command line: seed must be");
    ARG_REFUSED("fp16=true", "command line: fp16 may only be false");
    ARG_REFUSED("dataset=[a", "command line: not valid YAML");
    ARG_REFUSED("dataset=\xff", "command line: the value of 'dataset' is not UTF-8 text");
    check_refused("val_size: 0.1", ARGS("eval_dataset=x"), "t.yaml:1: val_size holds", __LINE__);
    check_refused("eval_dataset: x", ARGS("val_size=3"), "command line: val_size holds", __LINE__);
    WITH (o, NULL, ARGS("bf16=true", "evaluation_strategy=epoch", "val_size=10"))
        assert_int_equal(o.eval_strategy, FB_SAVE_EPOCH);
    assert_string_equal(warnings, "command line: bf16 is accepted but changes nothing here: compute_dtype decides, and master "
                        "weights are always float32\n");
}

static void yaml_that_is_not_flat_is_refused_with_its_line(void **state)
{
    (void)state;
    REFUSED("- a\n- b\n", "t.yaml:1: expected lines of the form `key: value`, found a list");
    REFUSED("hello", "t.yaml:1: expected lines of the form `key: value`, found a lone value");
    REFUSED("seed: 1\nsystem:\n  a: b\n", "t.yaml:3: 'system' holds a mapping; it takes one value (the configuration is flat)");
    REFUSED("seed: 1\n? [a]\n: b\n", "t.yaml:2: a key must be a name");
    REFUSED("seed: 1\n? {a: b}\n: b\n", "t.yaml:2: a key must be a name");
    REFUSED("seed: &x 1\n", "t.yaml:1: YAML anchors");
    REFUSED("seed: 1\ndataset: &x [a]\n", "t.yaml:2: YAML anchors");
    REFUSED("&x seed: 1\n", "t.yaml:1: YAML anchors");
    REFUSED("seed: 1\nsave_steps: *x\n", "t.yaml:2: YAML aliases");
    REFUSED("seed: 1\n*x : 2\n", "t.yaml:2: YAML aliases");
    REFUSED("seed: !!int 1\n", "t.yaml:1: YAML tags");
    REFUSED("seed: 1\nsystem: !!binary aGVsbG8=\n", "t.yaml:2: YAML tags");
    REFUSED("--- !x\nseed: 1\n", "t.yaml:1: YAML tags");
    REFUSED("seed: 1\n---\nseed: 2\n", "t.yaml:2: a second YAML document begins here");
    REFUSED("seed: 1\n...\n---\nseed: 2\n", "t.yaml:3: a second YAML document");
    REFUSED("seed: 1\n\tsave_steps: 2\n", "t.yaml:2: a tab is used as indentation");
    REFUSED("dataset:\n  - a\n \t- b\n", "t.yaml:3: a tab is used as indentation");
    REFUSED("seed: 1\nseed: 2: 3\n", "t.yaml:2: not valid YAML: mapping values are not allowed");
    REFUSED("seed: 1\nsystem: \"open\n", "t.yaml:3: not valid YAML: found unexpected end of stream");
    REFUSED("seed: 1\nsave_steps: 2\n\nseed: 3\n", "t.yaml:4: seed is given twice, first in line 1");
    REFUSED("seed: 1\nseed: 1\n", "t.yaml:2: seed is given twice");
    REFUSED("seed:\nseed: 1\n", "t.yaml:2: seed is given twice");
    REFUSED("eval_strategy: no\nevaluation_strategy: no\n", "t.yaml:2: eval_strategy is given twice, first in line 1");
    REFUSED("bf16: true\nbf16: true\n", "t.yaml:2: bf16 is given twice, first in line 1");
    REFUSED("system: \"a\\0b\"", "t.yaml:1: a NUL character is not allowed in a value");
    REFUSED("\"se\\0ed\": 1", "t.yaml:1: a NUL character is not allowed in a key");
    REFUSED("<<: {seed: 1}", "t.yaml:1: '<<' holds a mapping");
    REFUSED("seed: 1\nsystem: a\x01z\n", "t.yaml:2: not UTF-8 text: control characters are not allowed");
    REFUSED("seed: 1\n\nsystem: \xff\xfe\n", "t.yaml:3: not UTF-8 text: invalid leading UTF-8 octet");
    REFUSED("seed: 1\nsystem: \xc3", "t.yaml:2: not UTF-8 text: incomplete UTF-8 octet sequence");

    fb_options o;
    fb_error   err;
    write_bytes("seed: 1\n\0seed: 2\n", 17);
    assert_int_equal(fb_options_read(&o, name, NULL, 0, NULL, NULL, &err), FB_CONFIG);
    assert_non_null(strstr(err.msg, "t.yaml:2: not UTF-8 text"));
    write_bytes("\xff\xfes\0e\0", 6); /* UTF-16 */
    assert_int_equal(fb_options_read(&o, name, NULL, 0, NULL, NULL, &err), FB_CONFIG);
    assert_non_null(strstr(err.msg, "t.yaml:1: not UTF-8 text"));

    char *big = malloc((1 << 20) + 1);
    assert_non_null(big);
    memset(big, '#', (1 << 20) + 1);
    write_bytes(big, 1 << 20);
    assert_int_equal(fb_options_read(&o, name, NULL, 0, NULL, NULL, &err), FB_OK);
    fb_options_free(&o);
    write_bytes(big, (1 << 20) + 1);
    assert_int_equal(fb_options_read(&o, name, NULL, 0, NULL, NULL, &err), FB_CONFIG);
    assert_non_null(strstr(err.msg, "t.yaml"));
    memset(big, '[', 1 << 20); /* deep nesting must cost nothing */
    memcpy(big, "dataset: ", 9);
    write_bytes(big, 1 << 20);
    assert_int_equal(fb_options_read(&o, name, NULL, 0, NULL, NULL, &err), FB_CONFIG);
    free(big);

    assert_int_equal(fb_options_read(&o, "no/such/file.yaml", NULL, 0, NULL, NULL, &err), FB_CONFIG);
    assert_int_equal(err.status, FB_CONFIG);
    assert_non_null(strstr(err.msg, "no/such/file.yaml"));
    assert_int_equal(fb_options_read(&o, ".", NULL, 0, NULL, NULL, NULL), FB_CONFIG);
}

static void what_is_not_done_is_refused_with_the_reason(void **state)
{
    (void)state;
    REFUSED("do_train: false", "t.yaml:1: do_train may only be true, not 'false': the command decides");
    REFUSED("finetuning_type: lora",
            "t.yaml:1: finetuning_type may only be full, not 'lora': every weight is trained; lora and freeze");
    REFUSED("fp16: true", "t.yaml:1: fp16 may only be false, not 'true': float16");
    REFUSED("optim: paged_adamw_8bit", "t.yaml:1: optim may only be adamw_torch or adamw_torch_fused, not 'paged_adamw_8bit'");
    REFUSED("report_to: wandb",
            "t.yaml:1: report_to may only be none, not 'wandb': trainer_log.jsonl in output_dir is always written");
    REFUSED("load_best_model_at_end: true", "t.yaml:1: load_best_model_at_end may only be false");
    REFUSED("logging_strategy: epoch", "t.yaml:1: logging_strategy may only be steps");
    REFUSED("save_safetensors: no", "t.yaml:1: save_safetensors may only be true, not 'no'");
    REFUSED("neat_packing: true", "t.yaml:1: neat_packing may only be false");
    WITH (o, "optim: adamw_torch\nfp16: No\npure_bf16: true\ntf32: true\nflash_attn: fa2\ngradient_checkpointing: true\nfsdp: "
          "full_shard\ndo_eval: true\nload_best_model_at_end: off\nsave_safetensors: on\nlogging_strategy: steps", NULL)
        assert_int_equal(o.recompute, FB_RECOMPUTE_AUTO);
    for (size_t i = 0; i < fb_compat_count; i++) /* a key is in one table only, once */
        assert_null(fb_key_find(fb_compat_key[i].name));
}

static void lr_scheduler_kwargs_are_read_as_transformers_takes_them(void **state)
{
    (void)state;
    WITH (o, "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs:\n  min_lr: 1e-6\n  num_cycles: 1\n", NULL)
        assert_true(o.min_lr == 1e-6 && o.min_lr_rate < 0 && o.num_cycles == 1);
    WITH (o, NULL, ARGS("lr_scheduler_type=cosine_with_min_lr", "lr_scheduler_kwargs={\"min_lr_rate\": 0.1}"))
        assert_true(o.min_lr_rate == 0.1 && o.min_lr < 0);
    WITH (o, NULL, ARGS("lr_scheduler_type=cosine_with_min_lr", "lr_scheduler_kwargs.min_lr_rate=0.2"))
        assert_true(o.min_lr_rate == 0.2);
    WITH (o, "lr_scheduler_type: cosine_with_min_lr\nmin_lr: 0\n", NULL)
        assert_true(o.min_lr == 0);
    WITH (o, "lr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: {num_stable_steps: 10, num_decay_steps: 5, "
          "min_lr_ratio: 0.1,\n  warmup_type: cosine, decay_type: 1-sqrt, num_cycles: 0.25}\n", NULL) {
        assert_true(o.num_stable_steps == 10 && o.num_decay_steps == 5 && o.min_lr_ratio == 0.1 && o.num_cycles == 0.25);
        assert_int_equal(o.warmup_type, FB_LR_SHAPE_COSINE);
        assert_int_equal(o.decay_type, FB_LR_SHAPE_1_SQRT);
    }
    REFUSED("lr_scheduler_type: cosine_with_min_lr", "t.yaml:1: lr_scheduler_type cosine_with_min_lr needs min_lr or min_lr_rate");
    REFUSED("lr_scheduler_type: cosine_with_min_lr\nmin_lr: 1e-6\nmin_lr_rate: 0.1",
            "t.yaml:3: min_lr_rate and min_lr say the same twice");
    REFUSED("lr_scheduler_type: cosine\nmin_lr: 1e-6\n",
            "t.yaml:2: lr_scheduler_type cosine takes no min_lr; drop it, or use cosine_with_min_lr");
    REFUSED("lr_scheduler_kwargs:\n  num_cycles: 1\n", "t.yaml:2: lr_scheduler_type linear takes no num_cycles");
    REFUSED("lr_scheduler_kwargs:\n  min_rl: 1\n", "t.yaml:2: unknown key 'min_rl' in lr_scheduler_kwargs; did you mean 'min_lr'?");
    REFUSED("lr_scheduler_kwargs:\n  learning_rate: 1\n", "t.yaml:2: unknown key 'learning_rate' in lr_scheduler_kwargs; `");
    REFUSED("lr_scheduler_kwargs:\n  min_lr: {a: 1}\n", "t.yaml:2: 'lr_scheduler_kwargs.min_lr' holds a mapping");
    REFUSED("lr_scheduler_kwargs: cosine", "t.yaml:1: lr_scheduler_kwargs must be a mapping such as {min_lr: 1e-6}");
    REFUSED("min_lr: 1\nlr_scheduler_kwargs:\n  min_lr: 1\n", "t.yaml:3: min_lr is given twice, first in line 1");
    REFUSED("lr_scheduler_kwargs:\n  decay_type: steep\n",
            "t.yaml:2: decay_type must be one of linear, cosine, 1-sqrt, not 'steep'");
    ARG_REFUSED("lr_scheduler_kwargs={min_lr: x}", "command line: min_lr must be a number");
}

static void keys_that_only_make_sense_together(void **state)
{
    (void)state;
    WITH (o, "stage: pt", NULL)
        assert_true(o.packing && !o.packing_given);
    WITH (o, "stage: pt\npacking: false", NULL)
        assert_true(!o.packing && o.packing_given);
    WITH (o, "packing: true", NULL)
        assert_true(o.packing && o.packing_given);
    WITH (o, "per_device_train_batch_size: 6", NULL)
        assert_int_equal(o.per_device_eval_batch_size, 6);
    WITH (o, "eval_steps: 20\nval_size: 5", NULL) {
        assert_int_equal(o.eval_strategy, FB_SAVE_STEPS);
        assert_int_equal(o.eval_steps, 20);
    }
    WITH (o, "eval_steps: 20\neval_strategy: no", NULL)
        assert_int_equal(o.eval_strategy, FB_SAVE_NO);
    WITH (o, "eval_strategy: steps\nlogging_steps: 7\neval_dataset: e", NULL)
        assert_int_equal(o.eval_steps, 7); /* as transformers does */
    WITH (o, "num_train_epochs: 0\nmax_steps: 5", NULL)
        assert_int_equal(o.max_steps, 5);
    REFUSED("eval_steps: 20", "t.yaml:1: eval_steps asks for evaluation of nothing; give eval_dataset or val_size");
    REFUSED("seed: 1\neval_strategy: epoch", "t.yaml:2: eval_strategy asks for evaluation of nothing");
    REFUSED("max_steps: 0", "t.yaml:1: max_steps must be -1 (by epochs) or above 0");
    REFUSED("num_train_epochs: 0", "t.yaml:1: num_train_epochs must be above 0");
    REFUSED("val_size: 1.5", "t.yaml:1: val_size must be a fraction below 1 or a whole number of rows, not 1.5");
    REFUSED("val_size: 0.1\neval_dataset: x\n", "t.yaml:1: val_size holds rows of dataset out");
    REFUSED("mask_history: true\ntrain_on_prompt: true", "t.yaml:1: mask_history and train_on_prompt contradict");
    REFUSED("per_device_train_batch_size: 65536\ngradient_accumulation_steps: 65536",
            "t.yaml:2: per_device_train_batch_size x gradient_accumulation_steps is 4294967296 rows");
}

static void required_keys_are_named(void **state)
{
    (void)state;
    fb_error err;
    WITH (o, "dataset: d", NULL) {
        assert_int_equal(fb_options_require(&o, ARGS("dataset"), 1, &err), FB_OK);
        assert_int_equal(fb_options_require(&o, ARGS("dataset", "output_dir"), 2, &err), FB_CONFIG);
        assert_string_equal(err.msg, "output_dir is missing: the folder of checkpoints, log and final model; "
                                     "give it in the configuration file or as output_dir=VALUE");
    }
}

/* JSON is YAML: what is written, read back, is the same. */
static void json_reads_back_as_the_same_options(void **state)
{
    (void)state;
    static const char *const yaml[] = {
        "",
        "stage: pt\nslots: all\nmicro_batch: 3\nhbm_budget: 384MiB\nlearning_rate: 0.1\nsystem: \"q\\\"uo\\\\te\\n\\u00e9\\u0001 "
        "\\U0001f600\"\n"
        "val_size: 3\neval_steps: 9\nresume_from_checkpoint: yes\nbackend: fault:x\ndataset: [a, b]\nseed: 9223372036854775807",
        "lr_scheduler_type: warmup_stable_decay\nnum_decay_steps: 4\ndecay_type: 1-sqrt\nsystem: ''\nsave_dtype: float16",
        "lr_scheduler_type: cosine_with_min_lr\nmin_lr_rate: 0.1\nmax_steps: 12\neval_dataset: e\neval_strategy: epoch",
    };
    for (size_t i = 0; i < FB_COUNT(yaml); i++) {
        char *first = NULL, *second = NULL;
        WITH (o, yaml[i], NULL)
            first = fb_options_json(&o);
        assert_non_null(first);
        WITH (o, first, NULL)
            second = fb_options_json(&o);
        assert_string_equal(first, second);
        for (size_t k = 0; k < FB_KEY_COUNT; k++) {
            char quoted[64];
            snprintf(quoted, sizeof quoted, "\n  \"%s\": ", fb_key_table[k].name);
            assert_non_null(strstr(first, quoted));
        }
        free(first);
        free(second);
    }
    WITH (o, yaml[1], NULL) {
        char *text = fb_options_json(&o);
        assert_non_null(strstr(text, "\"slots\": \"all\""));
        assert_non_null(strstr(text, "\"hbm_budget\": 402653184"));
        assert_non_null(strstr(text, "\"ram_budget\": \"auto\""));
        assert_non_null(strstr(text, "\"stage\": \"pt\""));
        assert_non_null(strstr(text, "\"min_lr\": null"));
        free(text);
    }
}

static size_t n_help;
static void count_line(void *ctx, const char *text)
{
    (void)ctx;
    assert_null(strchr(text, '\n'));
    assert_true(strlen(text) < 200);
    n_help++;
    if (!strncmp(text, "learning_rate ", 14))
        assert_string_equal(text, "learning_rate                number   5e-5       peak learning rate");
    if (!strncmp(text, "stage ", 6))
        assert_string_equal(text, "stage                        choice   sft        sft learns the answers, pt learns all text "
                            "(sft, pt)");
}

static void help_has_a_line_a_key(void **state)
{
    (void)state;
    fb_options_help(count_line, NULL);
    assert_int_equal(n_help, 1 + FB_KEY_COUNT + 2 + fb_compat_count);
    for (size_t i = 0; i < FB_KEY_COUNT; i++) /* and each row is complete and found under its own name */
        assert_true(fb_key_find(fb_key_table[i].name) == &fb_key_table[i] && *fb_key_table[i].help);
}

static void a_long_path_keeps_its_end(void **state)
{
    (void)state;
    char       path[900];
    fb_options o;
    fb_error   err;
    write_bytes("seed: x\n", 8);
    memset(path, '/', sizeof path);
    path[0] = '.';
    strcpy(path + sizeof path - 1 - strlen(name), name);
    assert_int_equal(fb_options_read(&o, path, NULL, 0, NULL, NULL, &err), FB_CONFIG);
    assert_true(!strncmp(err.msg, ".../", 4) && strstr(err.msg, "/t.yaml:1: seed must be"));
    fb_options_free(&(fb_options){ 0 });
}

static int in_temporary_folder(void **state)
{
    (void)state;
    return mkdtemp(folder) ? chdir(folder) : -1;
}

static int remove_temporary_folder(void **state)
{
    (void)state;
    unlink(name);
    return chdir("/") || rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_are_those_of_the_header),
        cmocka_unit_test(a_llamafactory_file_reads_as_it_stands),
        cmocka_unit_test(scalars_need_no_quotes),
        cmocka_unit_test(null_means_the_default),
        cmocka_unit_test(bools),
        cmocka_unit_test(integers),
        cmocka_unit_test(reals),
        cmocka_unit_test(sizes),
        cmocka_unit_test(choices_and_special_words),
        cmocka_unit_test(resume_takes_a_switch_or_a_folder),
        cmocka_unit_test(lists_where_they_make_sense),
        cmocka_unit_test(unknown_keys_get_the_nearest_name),
        cmocka_unit_test(the_command_line_gets_the_same_checks),
        cmocka_unit_test(yaml_that_is_not_flat_is_refused_with_its_line),
        cmocka_unit_test(what_is_not_done_is_refused_with_the_reason),
        cmocka_unit_test(lr_scheduler_kwargs_are_read_as_transformers_takes_them),
        cmocka_unit_test(keys_that_only_make_sense_together),
        cmocka_unit_test(required_keys_are_named),
        cmocka_unit_test(json_reads_back_as_the_same_options),
        cmocka_unit_test(help_has_a_line_a_key),
        cmocka_unit_test(a_long_path_keeps_its_end),
    };
    return cmocka_run_group_tests(tests, in_temporary_folder, remove_temporary_folder);
}
