/* Checkpoints: what is saved comes back to the bit, into a state that knew nothing; what is broken is refused. */
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine_rig.h"
#include "io/shard.h"
#include "io/sums.h"
#include "io/sys.h"
#include "run/masters.h"
#include "run/saver.h"

static const tiny_model model = { "qwen3", 16, 20, 2, 2, 1, 8, 40, true, NULL, 0 };

static const fb_progress somewhere = { .data_step = 12, .update_step = 11, .total_steps = 40, .rows_per_epoch = 77,
                                       .steps_per_epoch = 9,
    .nonfinite_in_a_row = 2, .loss_sum = 0.1, .n_learned = 5, .elapsed = 1234.0625, .finished = false, .rope = { 63 } };

static char out_dir[600];

static void open_rig(engine_rig *r, const char *dtype)
{
    fb_error err;
    rig_options(r, (const char *const[]){ dtype, "max_grad_norm=1", NULL });
    snprintf(out_dir, sizeof out_dir, "%s/out", temp_dir);
    free(r->options.output_dir);
    free(r->options.model_name_or_path);
    r->options.output_dir = strdup(out_dir);
    r->options.model_name_or_path = strdup(temp_dir);
    if (rig_start(r, &err) != FB_OK)
        fail_msg("%s", err.msg);
}

/* One save, waited for. */
static void save_as(engine_rig *r, uint64_t step, fb_dtype save_dtype)
{
    fb_error err;
    fb_saver *s;
    fb_saver_report report;
    fb_status st;
    fb_progress p = somewhere;
    json_t *identity = json_object();
    p.data_step = step;
    fb_engine_settle(r->session.engine);
    assert_int_equal(fb_saver_new(&s, &(fb_saver_options){ .state = &r->session.state, .output_dir = out_dir, .model_dir = temp_dir,
        .save_dtype = save_dtype, .n_kept = r->options.save_total_limit }, &err), FB_OK);
    fb_saver_begin(s, step, fb_checkpoint_progress_text(&p, identity));
    fb_saver_wait(s);
    assert_true(fb_saver_ended(s, &report, &st, &err));
    if (st != FB_OK)
        fail_msg("%s", err.msg);
    fb_saver_free(s);
    json_decref(identity);
}

static void save(engine_rig *r, uint64_t step)
{
    save_as(r, step, FB_BF16);
}

static char *checkpoint(uint32_t step)
{
    static char dir[700];
    snprintf(dir, sizeof dir, "%s/checkpoint-%u", out_dir, step);
    return dir;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The names in a folder, sorted, joined by spaces. */
static const char *names_in(const char *dir)
{
    static char text[1024];
    char *names[64];
    size_t n = 0, at = 0;
    DIR *d = opendir(dir);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));)
        if (e->d_name[0] != '.')
            names[n++] = strdup(e->d_name);
    closedir(d);
    qsort(names, n, sizeof *names, compare_names);
    text[0] = 0;
    for (size_t i = 0; i < n; i++) {
        at += (size_t)snprintf(text + at, sizeof text - at, "%s%s", i ? " " : "", names[i]);
        free(names[i]);
    }
    return text;
}

/* ---- tests ---- */

/* A run that is saved after its first step, and gone on with by another process, ends with the same bits. */
static void a_resumed_run_is_the_run(void **unused)
{
    (void)unused;
    static const char *const dtypes[] = { "compute_dtype=float32", "compute_dtype=bfloat16" };
    tiny_write(&model, 3);
    for (size_t k = 0; k < FB_COUNT(dtypes); k++) {
        engine_rig r;
        fb_error err;
        fb_step_result s;
        rig_outcome want = { 0 }, got = { 0 }, before = { 0 }, after = { 0 };
        open_rig(&r, dtypes[k]);
        assert_int_equal(rig_step(&r, 0, 3, &s, &err), FB_OK);
        save(&r, 1);
        rig_take(&before, &r);
        assert_int_equal(rig_step(&r, 1, 3, &s, &err), FB_OK);
        rig_take(&want, &r);
        rig_stop(&r);

        open_rig(&r, dtypes[k]);
        assert_int_equal(fb_checkpoint_load(&r.session.state, checkpoint(1), r.session.team, &err), FB_OK);
        rig_take(&after, &r);
        assert_true(rig_same(&before, &after));
        assert_int_equal(rig_step(&r, 1, 3, &s, &err), FB_OK);
        rig_take(&got, &r);
        assert_true(rig_same(&want, &got));
        rig_stop(&r);
        free(want.all);
        free(got.all);
        free(before.all);
        free(after.all);
    }
}

/* Whatever the dtypes of the arithmetic and of the saved weights, masters and moments come back to the bit. */
static void masters_are_exact_in_every_dtype(void **unused)
{
    (void)unused;
    static const char *const dtypes[] = { "compute_dtype=float32", "compute_dtype=bfloat16" };
    static const fb_dtype saved[] = { FB_F32, FB_BF16, FB_F16 };
    tiny_write(&model, 5);
    for (size_t k = 0; k < FB_COUNT(dtypes); k++) {
        engine_rig r;
        fb_error err;
        fb_step_result s;
        rig_outcome want = { 0 };
        open_rig(&r, dtypes[k]);
        assert_int_equal(rig_step(&r, 0, 3, &s, &err), FB_OK);
        for (uint64_t i = 0; i < FB_COUNT(saved); i++)
            save_as(&r, i + 1, saved[i]);
        rig_take(&want, &r);
        rig_stop(&r);
        for (uint32_t i = 0; i < FB_COUNT(saved); i++) {
            rig_outcome got = { 0 };
            open_rig(&r, dtypes[(k + i) % 2]); /* a resume may compute in another dtype */
            if (fb_checkpoint_load(&r.session.state, checkpoint(i + 1), r.session.team, &err) != FB_OK)
                fail_msg("%s", err.msg);
            rig_take(&got, &r);
            assert_true(rig_same(&want, &got));
            free(got.all);
            rig_stop(&r);
        }
        free(want.all);
    }
}

/* The folder is a Hugging Face checkpoint: weights in save_dtype, rounded to nearest from the exact masters, ties away from
 * zero, so that 16 bits beside them complete them. */
static void the_folder_has_all_its_files(void **unused)
{
    (void)unused;
    tiny_write(&model, 4);
    temp_write_text("tokenizer.json", "{}");
    engine_rig r;
    fb_error err;
    open_rig(&r, "compute_dtype=float32");
    save(&r, 12);
    assert_string_equal(names_in(out_dir), "checkpoint-12"); /* nothing temporary is left */
    assert_string_equal(names_in(checkpoint(12)), "adam_m.safetensors adam_v.safetensors config.json manifest.json "
                        "model.safetensors remainders.safetensors tokenizer.json trainer_state.json");
    fb_shard *shard;
    char path[800];
    snprintf(path, sizeof path, "%s/model.safetensors", checkpoint(12));
    assert_int_equal(fb_shard_open(&shard, path, &err), FB_OK);
    const fb_manifest *m = &r.session.manifest;
    assert_int_equal(fb_shard_count(shard), m->n_param);
    for (uint32_t i = 0; i < m->n_param; i++) {
        const fb_param *p = &m->params[i];
        const fb_tensor *t = fb_shard_find(shard, p->name);
        assert_non_null(t);
        assert_int_equal(t->dtype, FB_BF16);
        for (uint64_t k = 0; k < p->rows * p->cols; k++) {
            float f;
            uint16_t got;
            fb_state_read(&r.session.state, p->block, p->offset + k, 1, &f);
            assert_int_equal(fb_tensor_read(t, k, 1, &got, &err), FB_OK);
            assert_int_equal(got, (uint16_t)((fb_f32_bits(f) + 0x8000u) >> 16));
        }
    }
    fb_shard_close(shard);
    save(&r, 12); /* again at the same step: in place of the old one */
    assert_string_equal(names_in(out_dir), "checkpoint-12");
    rig_stop(&r);
}

static void progress_comes_back(void **unused)
{
    (void)unused;
    fb_progress p = somewhere, q;
    json_t *identity = json_pack("{s:{s:f}}", "schedule", "rate", 0.1), *found = NULL;
    for (int finished = 0; finished < 2; finished++) {
        p.finished = finished;
        p.elapsed = finished ? 3 : 0.1; /* a whole number of seconds is a number too */
        memset(&q, 0xff, sizeof q);
        assert_int_equal(fb_checkpoint_write_progress(&p, identity, temp_dir, NULL), FB_OK);
        assert_int_equal(fb_checkpoint_read_progress(&q, &found, temp_dir, NULL), FB_OK);
        assert_int_equal(q.data_step, 12);
        assert_int_equal(q.update_step, 11);
        assert_int_equal(q.total_steps, 40);
        assert_int_equal(q.rows_per_epoch, 77);
        assert_int_equal(q.steps_per_epoch, 9);
        assert_int_equal(q.nonfinite_in_a_row, 2);
        assert_int_equal(q.rope.len_cached, 63);
        assert_int_equal(q.finished, finished);
        assert_true(q.elapsed == p.elapsed);
        assert_true(q.loss_sum == 0.1);
        assert_int_equal(q.n_learned, 5);
        assert_true(json_equal(found, identity));
        json_decref(found);
    }
    json_decref(identity);
}

static void broken_progress_is_refused(void **unused)
{
    (void)unused;
    static const struct { const char *from, *to, *part; } cases[] = {
        { "\"max_steps\": 40", "\"max_steps\": -1", "out of range" },
        { "\"data_step\": 12", "\"data_step\": -12", "out of range" },
        { "\"update_step\": 11", "\"update_step\": -1", "out of range" },
        { "\"rows_per_epoch\": 77", "\"rows_per_epoch\": -3", "out of range" },
        { "\"steps_per_epoch\": 9", "\"steps_per_epoch\": 0", "out of range" }, /* something is divided by it */
        { "\"steps_per_epoch\": 9", "\"steps_per_epoch\": -9", "out of range" },
        { "\"rope_len\": 63", "\"rope_len\": 4294967296", "out of range" },
        { "\"nonfinite_in_a_row\": 2", "\"nonfinite_in_a_row\": -2", "out of range" },
        { "\"n_learned\": 5", "\"n_learned\": -5", "out of range" },
        { "\"run\"", "\"walk\"", "is not a state that forebay wrote" },
        { "\"data_step\": 12", "\"data_step\": \"12\"", "is not a state that forebay wrote" },
        { "\"forebay\"", "\"other\"", "is not a state that forebay wrote" },
        { "\"finished\": false", "\"finished\": 0", "is not a state that forebay wrote" },
        { "{", "[", "is not JSON" },
        { "\"update_step\": 11", "\"data_step\": 11", "is not JSON" }, /* the same key twice */
    };
    char *good, *text;
    uint64_t size;
    fb_progress p;
    fb_error err;
    json_t *identity = json_object();
    assert_int_equal(fb_checkpoint_write_progress(&somewhere, identity, temp_dir, NULL), FB_OK);
    json_decref(identity);
    assert_int_equal(fb_file_read(&good, &size, temp_path("trainer_state.json"), 1 << 20, NULL), FB_OK);
    text = malloc(size + 100);
    for (size_t i = 0; i < FB_COUNT(cases); i++) {
        const char *at = strstr(good, cases[i].from);
        assert_non_null(at);
        snprintf(text, size + 100, "%.*s%s%s", (int)(at - good), good, cases[i].to, at + strlen(cases[i].from));
        temp_write_text("trainer_state.json", text);
        expect_failure(fb_checkpoint_read_progress(&p, NULL, temp_dir, &err), FB_INPUT, &err, cases[i].part);
    }
    free(good);
    free(text);
    assert_int_equal(fb_checkpoint_read_progress(&p, NULL, temp_path("none"), &err), FB_INPUT);
}

static void make(const char *name)
{
    char path[100];
    snprintf(path, sizeof path, "out/%s", name);
    assert_int_equal(fb_dir_make(temp_path(path), NULL), FB_OK);
}

/* A folder that is as whole as its one file and its manifest. */
static void make_whole(const char *name)
{
    char path[100];
    fb_sums sums = { 0 };
    make(name);
    snprintf(path, sizeof path, "out/%s/config.json", name);
    temp_write_text(path, name);
    snprintf(path, sizeof path, "out/%s", name);
    assert_int_equal(fb_sums_add_rest(&sums, temp_path(path), NULL), FB_OK);
    assert_int_equal(fb_sums_write(&sums, temp_path(path), NULL), FB_OK);
    fb_sums_free(&sums);
}

static char warnings[4096];

static void take_warning(void *ctx, fb_say_kind kind, const char *text)
{
    (void)ctx;
    if (kind == FB_SAY_WARNING)
        strncat(warnings, text, sizeof warnings - strlen(warnings) - 1);
}

static const fb_sink sink = { take_warning, NULL };

static void the_newest_is_found_and_the_oldest_go(void **unused)
{
    (void)unused;
    char dir[FB_PATH_SIZE];
    fb_error err;
    warnings[0] = 0;
    snprintf(out_dir, sizeof out_dir, "%s/out", temp_dir);
    assert_int_equal(fb_checkpoint_find(dir, out_dir, &sink, NULL), FB_OK); /* no folder yet */
    assert_string_equal(dir, "");
    assert_false(fb_checkpoint_any(out_dir));
    make_whole("checkpoint-9"), make_whole("checkpoint-10"), make_whole("checkpoint-100"), make_whole("checkpoint-99");
    make("checkpoint-500.tmp"), make("checkpoint-"), make("checkpoint-x"), make("checkpoint--7"), make("checkpoint-5x"),
        make("data");
    make("checkpoint-99999999999999999999"), make("checkpoint-0500");
    assert_true(fb_checkpoint_any(out_dir));
    assert_int_equal(fb_checkpoint_find(dir, out_dir, &sink, NULL), FB_OK);
    assert_string_equal(dir, checkpoint(100));
    assert_string_equal(warnings, "");
    assert_int_equal(fb_checkpoint_prune(out_dir, 100, 0, NULL), FB_OK); /* no limit */
    assert_int_equal(access(checkpoint(9), F_OK), 0);
    assert_int_equal(fb_checkpoint_prune(out_dir, 99, 2, NULL), FB_OK); /* what is later than the step is not counted */
    assert_int_equal(access(checkpoint(9), F_OK), -1);
    assert_int_equal(fb_checkpoint_prune(out_dir, 100, 2, NULL), FB_OK);
    assert_int_equal(fb_checkpoint_sweep(out_dir, &sink, NULL), FB_OK);
    assert_non_null(strstr(warnings, "checkpoint-500.tmp: is half a checkpoint"));
    assert_string_equal(names_in(out_dir), "checkpoint- checkpoint--7 checkpoint-0500 checkpoint-100 checkpoint-5x checkpoint-99 "
                                           "checkpoint-99999999999999999999 checkpoint-x data");
    warnings[0] = 0;
    temp_write_text("out/checkpoint-100/config.json", "checkpoint-101");
    assert_int_equal(fb_checkpoint_find(dir, out_dir, &sink, NULL), FB_OK);
    assert_string_equal(dir, checkpoint(99));
    assert_non_null(strstr(warnings, "checkpoint-100 is passed over: "));
    assert_non_null(strstr(warnings, "checkpoint-100/config.json: is damaged"));
    assert_int_equal(unlink(temp_path("out/checkpoint-99/manifest.json")), 0);
    expect_failure(fb_checkpoint_find(dir, out_dir, &sink, &err), FB_INPUT, &err, "none of its 2 checkpoints is whole");
}

/* Every bit of a folder counts, those of the manifest too; so does a file's end, and its absence. */
static void every_flipped_bit_is_found(void **unused)
{
    (void)unused;
    static const char *const files[] = { "a.json", "b.bin", "manifest.json" };
    fb_sums sums = { 0 };
    fb_error err;
    temp_write_text("a.json", "{\"one\": 1}\n");
    temp_write("b.bin", "\0\1\2\377", 4);
    assert_int_equal(fb_sums_add_rest(&sums, temp_dir, NULL), FB_OK);
    assert_int_equal(sums.n, 2);
    assert_int_equal(fb_sums_write(&sums, temp_dir, NULL), FB_OK);
    fb_sums_free(&sums);
    temp_write_text("stranger.txt", "is none of ours");
    assert_int_equal(fb_sums_verify(temp_dir, &err), FB_OK);
    for (size_t k = 0; k < FB_COUNT(files); k++) {
        char *text;
        uint64_t size;
        assert_int_equal(fb_file_read(&text, &size, temp_path(files[k]), 1 << 20, NULL), FB_OK);
        for (uint64_t bit = 0; bit < 8 * size; bit++) {
            text[bit / 8] ^= (char)(1 << bit % 8);
            temp_write(files[k], text, size);
            expect_failure(fb_sums_verify(temp_dir, &err), FB_INPUT, &err, files[k]);
            text[bit / 8] ^= (char)(1 << bit % 8);
        }
        temp_write(files[k], text, size - 1);
        expect_failure(fb_sums_verify(temp_dir, &err), FB_INPUT, &err, files[k]);
        unlink(temp_path(files[k]));
        expect_failure(fb_sums_verify(temp_dir, &err), FB_INPUT, &err, files[k]);
        temp_write(files[k], text, size);
        assert_int_equal(fb_sums_verify(temp_dir, &err), FB_OK);
        free(text);
    }
}

/* Files are looked at by several threads; which one is told does not depend on them. */
static void of_several_damaged_files_the_first_is_told(void **unused)
{
    (void)unused;
    enum { N = 7, LARGE = 1 << 20 };
    fb_sums sums = { 0 };
    fb_error err;
    char name[FB_FILE_NAME_SIZE + 4], *text = calloc(1, LARGE);
    for (int i = 0; i < N; i++) {
        snprintf(name, sizeof name, "f%d", i);
        temp_write(name, text, i % 2 ? 100 : LARGE);
    }
    assert_int_equal(fb_sums_add_rest(&sums, temp_dir, NULL), FB_OK);
    assert_int_equal(sums.n, N);
    assert_int_equal(fb_sums_write(&sums, temp_dir, NULL), FB_OK);
    for (int i = N; i-- > 0;) {
        text[0] = 1;
        temp_write(sums.files[i].name, text, sums.files[i].size);
        snprintf(name, sizeof name, "/%s: ", sums.files[i].name);
        for (int again = 0; again < 20; again++)
            expect_failure(fb_sums_verify(temp_dir, &err), FB_INPUT, &err, name);
    }
    assert_int_equal(fb_sums_verify(temp_dir, NULL), FB_INPUT);
    fb_sums_free(&sums);
    free(text);
}

static void the_limit_holds_while_saving(void **unused)
{
    (void)unused;
    tiny_write(&model, 6);
    engine_rig r;
    open_rig(&r, "compute_dtype=bfloat16");
    r.options.save_total_limit = 2;
    for (uint64_t step = 8; step < 12; step++)
        save(&r, step);
    assert_string_equal(names_in(out_dir), "checkpoint-10 checkpoint-11");
    rig_stop(&r);
}

/* A folder that a killed run left half written is no checkpoint, and does not stand in the way. */
static void leftovers_do_not_matter(void **unused)
{
    (void)unused;
    tiny_write(&model, 7);
    engine_rig r;
    char dir[FB_PATH_SIZE];
    open_rig(&r, "compute_dtype=float32");
    make("checkpoint-4.tmp/model.safetensors");
    assert_int_equal(fb_checkpoint_find(dir, out_dir, &sink, NULL), FB_OK);
    assert_string_equal(dir, "");
    save(&r, 4);
    assert_string_equal(names_in(out_dir), "checkpoint-4");
    assert_int_equal(fb_sums_verify(checkpoint(4), NULL), FB_OK);
    rig_stop(&r);
}

static void rewrite_moments(const char *dir, const fb_manifest *m, const char *skip, bool transposed, float bad)
{
    fb_shard_writer *w;
    fb_error err;
    assert_int_equal(fb_shard_writer_new(&w, dir, "adam_m", UINT64_MAX / 2, &err), FB_OK);
    for (int write = 0; write < 2; write++)
        for (uint32_t i = 0; i < m->n_param; i++) {
            const fb_param *p = &m->params[i];
            if (!strcmp(p->name, skip))
                continue;
            if (write) {
                uint64_t n = p->rows * p->cols;
                float *f = calloc(n, sizeof *f);
                f[n / 2] = i == 3 ? bad : 0;
                assert_int_equal(fb_shard_writer_append(w, f, n * sizeof *f, &err), FB_OK);
                free(f);
            } else
                assert_int_equal(fb_shard_writer_declare(w, p->name, FB_F32, p->rank, transposed && p->rank == 2
                    ? (uint64_t[]){ p->cols, p->rows } : (uint64_t[]){ p->rows, p->cols }, &err), FB_OK);
        }
    assert_int_equal(fb_shard_writer_finish(w, &err), FB_OK);
}

static void another_models_checkpoint_is_refused(void **unused)
{
    (void)unused;
    tiny_write(&model, 8);
    engine_rig r;
    fb_error err;
    open_rig(&r, "compute_dtype=float32");
    save(&r, 1);
    const fb_manifest *m = &r.session.manifest;
    fb_state *s = &r.session.state;
    rewrite_moments(checkpoint(1), m, "", false, 1);
    assert_int_equal(fb_checkpoint_load(s, checkpoint(1), r.session.team, &err), FB_OK);
    rewrite_moments(checkpoint(1), m, "model.norm.weight", false, 1);
    expect_failure(fb_checkpoint_load(s, checkpoint(1), r.session.team, &err), FB_INPUT, &err, "'model.norm.weight' is missing");
    rewrite_moments(checkpoint(1), m, "", true, 1);
    expect_failure(fb_checkpoint_load(s, checkpoint(1), r.session.team, &err), FB_INPUT, &err, "of another shape");
    rewrite_moments(checkpoint(1), m, "", false, NAN);
    expect_failure(fb_checkpoint_load(s, checkpoint(1), r.session.team, &err), FB_INPUT, &err, "is not finite");
    assert_int_equal(fb_checkpoint_load(s, checkpoint(2), r.session.team, &err), FB_INPUT);
    rig_stop(&r);

    tiny_model wider = model;
    wider.ffn_dim = 24;
    tiny_write(&wider, 8);
    open_rig(&r, "compute_dtype=float32");
    expect_failure(fb_checkpoint_load(&r.session.state, checkpoint(1), r.session.team, &err), FB_INPUT, &err, "mlp");
    rig_stop(&r);
}

/* Weights and what completes them, cut between open and read. */
static void masters_cut_behind_our_back_are_a_sentence(void **unused)
{
    (void)unused;
    static const char *const files[] = { "model.safetensors", "remainders.safetensors" };
    tiny_write(&model, 9);
    engine_rig r;
    fb_error err;
    open_rig(&r, "compute_dtype=float32");
    for (uint64_t k = 0; k < FB_COUNT(files); k++) {
        const fb_param *last = &r.session.manifest.params[r.session.manifest.n_param - 1];
        float f[100];
        char path[800], part[200];
        fb_masters masters;
        save(&r, k + 1);
        assert_int_equal(fb_masters_open(&masters, &r.session.manifest, checkpoint(k + 1), &err), FB_OK);
        snprintf(path, sizeof path, "%s/%s", checkpoint(k + 1), files[k]);
        assert_int_equal(fb_masters_read(&masters, last, 0, 3, f, &err), FB_OK);
        assert_int_equal(truncate(path, 1000), 0);
        snprintf(part, sizeof part, "%s: became shorter while it was being read: '%s' has", files[k], last->name);
        expect_failure(fb_masters_read(&masters, last, 0, 3, f, &err), FB_IO, &err, part);
        fb_masters_close(&masters);
    }
    rig_stop(&r);
}

static void every_read_of_a_load_may_fail(void **unused)
{
    (void)unused;
    tiny_write(&model, 10);
    engine_rig r;
    fb_error err;
    open_rig(&r, "compute_dtype=float32");
    save(&r, 1);
    fb_status st = FB_IO;
    int n = 0, n_data = 0;
    while (st != FB_OK) {
        char spec[64];
        snprintf(spec, sizeof spec, "fail=read:%d:EIO", ++n);
        assert_int_equal(fb_sys_faults(spec, NULL), FB_OK);
        st = fb_checkpoint_load(&r.session.state, checkpoint(1), r.session.team, &err);
        assert_int_equal(fb_sys_faults(NULL, NULL), FB_OK);
        if (st != FB_OK)
            expect_failure(st, st == FB_IO ? FB_IO : FB_INPUT, &err, "Input/output error"); /* of a header: FB_INPUT */
        n_data += st == FB_IO;
    }
    assert_int_equal(n_data, 4 * r.session.manifest.n_param); /* weights, remainders, both moments; each tensor is one piece here */
    rig_stop(&r);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, temp_dir_make, temp_dir_remove)
    const struct CMUnitTest tests[] = {
        TEST(a_resumed_run_is_the_run),
        TEST(masters_are_exact_in_every_dtype),
        TEST(every_flipped_bit_is_found),
        TEST(of_several_damaged_files_the_first_is_told),
        TEST(the_folder_has_all_its_files),
        TEST(progress_comes_back),
        TEST(broken_progress_is_refused),
        TEST(the_newest_is_found_and_the_oldest_go),
        TEST(the_limit_holds_while_saving),
        TEST(leftovers_do_not_matter),
        TEST(another_models_checkpoint_is_refused),
        TEST(masters_cut_behind_our_back_are_a_sentence),
        TEST(every_read_of_a_load_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
