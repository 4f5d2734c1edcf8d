/* Saves under training: whatever the disk, the buffer and the order of updates do, the folder holds the state as it was at begin,
 * byte for byte what a save that nobody disturbed leaves, and training ends with the bits it would have had anyway. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include <cmocka.h>

#include "engine_rig.h"
#include "io/sums.h"
#include "run/checkpoint_write.h"
#include "run/export.h"

/* ---- the disk and the device, as the saver sees them here ---- */

static struct {
    bool     slow;        /* a piece takes its time */
    uint32_t fails_at;    /* the piece that cannot be written, counted from 1; 0: none */
    uint32_t n_append;
    uint32_t device_first, device_end; /* blocks that are said to live on the device */
    bool     device_fails;
    pthread_mutex_t lock;
    pthread_cond_t  moved;
    bool     shut;        /* nothing is written while it is */
} world = { .lock = PTHREAD_MUTEX_INITIALIZER, .moved = PTHREAD_COND_INITIALIZER };

static fb_status open_files(fb_checkpoint_writer **out, const fb_manifest *m, const uint32_t *order, const char *dir,
                            fb_dtype save_dtype, fb_error *err)
{
    pthread_mutex_lock(&world.lock);
    while (world.shut)
        pthread_cond_wait(&world.moved, &world.lock);
    pthread_mutex_unlock(&world.lock);
    world.n_append = 0;
    return fb_checkpoint_writer_new(out, m, order, dir, save_dtype, err);
}

static fb_status append_piece(fb_checkpoint_writer *w, uint32_t block, uint64_t first, uint64_t n, const fb_piece *piece,
                              fb_error *err)
{
    if (world.slow)
        nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
    if (++world.n_append == world.fails_at)
        return fb_fail(err, FB_IO, "checkpoint: cannot be written: No space left on device");
    return fb_checkpoint_writer_append(w, block, first, n, piece, err);
}

static bool is_on_device(const fb_state *s, uint32_t block)
{
    (void)s;
    return block >= world.device_first && block < world.device_end;
}

static fb_status get_from_device(const fb_state *s, fb_plan_host_region part, uint32_t block, uint64_t first, uint64_t n,
                                 float *out, fb_error *err)
{
    assert_true(is_on_device(s, block));
    if (world.device_fails)
        return fb_fail(err, FB_DEVICE, "the device is gone");
    return fb_state_get(s, part, block, first, n, out, err);
}

#define fb_checkpoint_writer_new open_files
#define fb_checkpoint_writer_append append_piece
#define fb_state_on_device is_on_device
#define fb_state_get get_from_device
#include "../../src/run/saver.c"
#undef fb_checkpoint_writer_new
#undef fb_checkpoint_writer_append
#undef fb_state_on_device
#undef fb_state_get

static void set_shut(bool shut)
{
    pthread_mutex_lock(&world.lock);
    world.shut = shut;
    pthread_cond_broadcast(&world.moved);
    pthread_mutex_unlock(&world.lock);
}

/* ---- runs ---- */

/* Blocks of several pieces and of one; 10 pieces in all. */
static const tiny_model model = { "qwen3", 16, 3000, 3, 2, 1, 8, 20000, true, NULL, 0 };
enum { WHOLE = 1000 * PIECE_BYTES };

static char out_dir[600];

static char *checkpoint(uint32_t step)
{
    static char dir[700];
    snprintf(dir, sizeof dir, "%s/checkpoint-%u", out_dir, step);
    return dir;
}

static void open_run(engine_rig *r, const char *dtype, const char *clip)
{
    fb_error err;
    rig_options(r, (const char *const[]){ dtype, clip, NULL });
    if (rig_start(r, &err) != FB_OK)
        fail_msg("%s", err.msg);
    snprintf(out_dir, sizeof out_dir, "%s/out", temp_dir);
}

static fb_saver *open_saver(engine_rig *r, uint64_t buffer_size)
{
    fb_error err;
    fb_saver *s;
    assert_int_equal(fb_saver_new(&s, &(fb_saver_options){ .state = &r->session.state, .output_dir = out_dir, .model_dir = temp_dir,
        .save_dtype = FB_BF16, .last_block_first = r->options.max_grad_norm == 0, .buffer_size = buffer_size }, &err), FB_OK);
    fb_engine_before_update(r->session.engine, fb_saver_before_update, s);
    return s;
}

static fb_status begin(engine_rig *r, fb_saver *s, uint64_t step, fb_error *err)
{
    fb_engine_settle(r->session.engine);
    return fb_saver_begin(s, step, strdup("{\"a state\": 1}"), err);
}

static fb_status end(fb_saver *s, fb_error *err)
{
    fb_saver_report report;
    fb_status st = FB_FAILED;
    fb_saver_wait(s);
    assert_false(fb_saver_is_busy(s));
    assert_true(fb_saver_ended(s, &report, &st, err));
    assert_false(fb_saver_ended(s, &report, &st, err)); /* told once */
    return st;
}

static void step(engine_rig *r, uint32_t i)
{
    fb_error err;
    fb_step_result result;
    if (rig_step(r, i, 2, &result, &err) != FB_OK)
        fail_msg("%s", err.msg);
    assert_true(result.updated);
}

static void close_run(engine_rig *r, fb_saver *s)
{
    fb_engine_free(r->session.engine);
    r->session.engine = NULL;
    fb_saver_free(s);
    rig_stop(r);
}

static uint64_t size_of(const char *path)
{
    struct stat info;
    assert_int_equal(stat(path, &info), 0);
    return (uint64_t)info.st_size;
}

/* Both folders are whole and have the same files with the same bytes: a manifest has the size and sum of each. */
static void expect_same_folders(uint32_t a, uint32_t b)
{
    fb_error err;
    char *text[2];
    uint64_t size[2];
    for (int i = 0; i < 2; i++) {
        char path[800];
        if (fb_sums_verify(checkpoint(i ? b : a), &err) != FB_OK)
            fail_msg("%s", err.msg);
        snprintf(path, sizeof path, "%s/manifest.json", checkpoint(i ? b : a));
        assert_int_equal(fb_file_read(&text[i], &size[i], path, 1 << 20, NULL), FB_OK);
    }
    assert_int_equal(size[0], size[1]);
    assert_memory_equal(text[0], text[1], size[0]);
    free(text[0]);
    free(text[1]);
}

/* Steps 0, save, 1, 2; the save alone, waited for at once, as checkpoint-100. */
static void run_undisturbed(rig_outcome *want, const char *dtype, const char *clip)
{
    engine_rig r;
    fb_error err;
    open_run(&r, dtype, clip);
    fb_saver *s = open_saver(&r, WHOLE);
    step(&r, 0);
    assert_int_equal(begin(&r, s, 100, &err), FB_OK);
    assert_int_equal(end(s, &err), FB_OK);
    step(&r, 1);
    step(&r, 2);
    rig_take(want, &r);
    close_run(&r, s);
}

static const char *const dtypes[] = { "compute_dtype=float32", "compute_dtype=bfloat16" };
static const char *const clips[] = { "max_grad_norm=1", "max_grad_norm=0" };

static void reset(void)
{
    world.slow = world.shut = world.device_fails = false;
    world.fails_at = world.device_first = world.device_end = 0;
}

/* ---- tests ---- */

static void training_goes_on_while_a_slow_disk_writes(void **unused)
{
    (void)unused;
    static const uint64_t buffers[] = { 0, 3 * PIECE_BYTES, WHOLE };
    reset();
    tiny_write(&model, 3);
    for (size_t k = SANITIZED; k < FB_COUNT(dtypes) * FB_COUNT(clips) - SANITIZED; k++) {
        rig_outcome want = { 0 };
        run_undisturbed(&want, dtypes[k / 2], clips[k % 2]);
        for (uint32_t i = 0; i < FB_COUNT(buffers); i++) {
            engine_rig r;
            fb_error err;
            rig_outcome got = { 0 };
            open_run(&r, dtypes[k / 2], clips[k % 2]);
            fb_saver *s = open_saver(&r, buffers[i]);
            step(&r, 0);
            world.slow = true;
            assert_int_equal(begin(&r, s, i, &err), FB_OK);
            step(&r, 1);
            step(&r, 2);
            rig_take(&got, &r);
            assert_int_equal(end(s, &err), FB_OK);
            world.slow = false;
            assert_true(rig_same(&want, &got));
            expect_same_folders(100, i);
            free(got.all);
            close_run(&r, s);
        }
        free(want.all);
    }
}

/* With room for everything, steps end although the disk does not write at all. */
static void room_for_all_needs_no_disk(void **unused)
{
    (void)unused;
    reset();
    tiny_write(&model, 4);
    for (size_t k = SANITIZED; k < FB_COUNT(dtypes) * FB_COUNT(clips) - SANITIZED; k++) {
        engine_rig r;
        fb_error err;
        rig_outcome want = { 0 }, got = { 0 };
        run_undisturbed(&want, dtypes[k / 2], clips[k % 2]);
        open_run(&r, dtypes[k / 2], clips[k % 2]);
        fb_saver *s = open_saver(&r, WHOLE);
        step(&r, 0);
        set_shut(true);
        assert_int_equal(begin(&r, s, 1, &err), FB_OK);
        step(&r, 1);
        step(&r, 2);
        rig_take(&got, &r);
        assert_true(fb_saver_is_busy(s));
        fb_saver_report none;
        fb_status st;
        assert_false(fb_saver_ended(s, &none, &st, &err));
        set_shut(false);
        assert_int_equal(end(s, &err), FB_OK);
        assert_true(rig_same(&want, &got));
        assert_true(s->report.waited == 0);
        assert_int_equal(s->n_free, fb_saver_buffer_most(s->manifest) / PIECE_BYTES); /* all slots are back */
        expect_same_folders(100, 1);
        free(want.all);
        free(got.all);
        close_run(&r, s);
    }
}

/* Without room for it, an update waits for the disk: what is not saved is not changed. */
static void a_full_buffer_holds_updates_up(void **unused)
{
    (void)unused;
    reset();
    tiny_write(&model, 5);
    engine_rig r;
    fb_error err;
    rig_outcome want = { 0 }, got = { 0 };
    run_undisturbed(&want, dtypes[1], clips[0]);
    open_run(&r, dtypes[1], clips[0]);
    const fb_state *t = &r.session.state;
    uint32_t last = t->manifest->n_block - 1;
    uint64_t n = t->manifest->blocks[last].extent;
    float *before = malloc(n * sizeof *before), *after = malloc(n * sizeof *after);
    fb_saver *s = open_saver(&r, 2 * PIECE_BYTES);
    step(&r, 0);
    fb_engine_settle(r.session.engine);
    fb_state_read(t, last, 0, n, before);
    set_shut(true);
    assert_int_equal(begin(&r, s, 1, &err), FB_OK);
    step(&r, 1);
    double since = fb_clock();
    for (bool waits = false; !waits;) {
        assert_true(fb_clock() - since < 60); /* a guard against waiting for ever */
        pthread_mutex_lock(&s->lock);
        waits = s->n_waiting == r.options.update_threads && !s->n_free;
        pthread_mutex_unlock(&s->lock);
    }
    fb_state_read(t, last, 0, n, after);
    assert_memory_equal(before, after, n * sizeof *before);
    set_shut(false);
    step(&r, 2);
    rig_take(&got, &r);
    assert_int_equal(end(s, &err), FB_OK);
    assert_true(s->report.waited > 0);
    assert_true(rig_same(&want, &got));
    expect_same_folders(100, 1);
    free(before);
    free(after);
    free(want.all);
    free(got.all);
    close_run(&r, s);
}

/* A disk that fails on the way: training is not held up, the half-written folder goes, the one before stays, the next save
 * works. */
static void a_failed_save_leaves_the_one_before(void **unused)
{
    (void)unused;
    static const uint64_t buffers[] = { 0, 3 * PIECE_BYTES };
    reset();
    tiny_write(&model, 6);
    for (size_t k = 0; k < FB_COUNT(clips); k++) {
        rig_outcome want = { 0 };
        run_undisturbed(&want, dtypes[1], clips[k]);
        for (size_t i = 0; i < FB_COUNT(buffers); i++)
            for (uint32_t piece = 1; piece < 10; piece += 4) {
                engine_rig r;
                fb_error err;
                rig_outcome got = { 0 };
                open_run(&r, dtypes[1], clips[k]);
                fb_saver *s = open_saver(&r, buffers[i]);
                step(&r, 0);
                assert_int_equal(begin(&r, s, 1, &err), FB_OK);
                assert_int_equal(end(s, &err), FB_OK);
                world.slow = true;
                world.fails_at = piece;
                assert_int_equal(begin(&r, s, 2, &err), FB_OK);
                step(&r, 1);
                step(&r, 2);
                expect_failure(end(s, &err), FB_IO, &err, "No space left");
                reset();
                rig_take(&got, &r);
                assert_true(rig_same(&want, &got));
                assert_int_equal(access(checkpoint(2), F_OK), -1);
                assert_int_equal(access(temp_path("out/checkpoint-2.tmp"), F_OK), -1);
                expect_same_folders(100, 1);
                assert_int_equal(begin(&r, s, 3, &err), FB_OK);
                assert_int_equal(end(s, &err), FB_OK);
                assert_int_equal(fb_sums_verify(checkpoint(3), NULL), FB_OK);
                free(got.all);
                close_run(&r, s);
            }
        free(want.all);
    }
}

/* Blocks on the device are read within begin, through whatever buffer there is, and may change as soon as it returns. */
static void blocks_on_the_device_are_read_at_begin(void **unused)
{
    (void)unused;
    static const uint64_t buffers[] = { 0, 3 * PIECE_BYTES, WHOLE };
    static const uint32_t ranges[][2] = { { 0, 1 }, { 1, 3 }, { 0, 5 } };
    reset();
    tiny_write(&model, 7);
    for (size_t k = SANITIZED; k < FB_COUNT(dtypes) * FB_COUNT(clips) - SANITIZED; k++) {
        rig_outcome want = { 0 };
        run_undisturbed(&want, dtypes[k / 2], clips[k % 2]);
        for (uint32_t i = 0; i < FB_COUNT(buffers); i++) {
            engine_rig r;
            fb_error err;
            rig_outcome got = { 0 };
            open_run(&r, dtypes[k / 2], clips[k % 2]);
            fb_saver *s = open_saver(&r, buffers[i]);
            step(&r, 0);
            world.slow = true;
            world.device_first = ranges[i][0];
            world.device_end = ranges[i][1];
            assert_int_equal(begin(&r, s, i, &err), FB_OK);
            step(&r, 1);
            step(&r, 2);
            rig_take(&got, &r);
            assert_int_equal(end(s, &err), FB_OK);
            reset();
            assert_true(rig_same(&want, &got));
            expect_same_folders(100, i);
            free(got.all);
            close_run(&r, s);
        }
        free(want.all);
    }
}

static void a_device_that_fails_fails_the_save(void **unused)
{
    (void)unused;
    reset();
    tiny_write(&model, 8);
    engine_rig r;
    fb_error err;
    open_run(&r, dtypes[1], clips[0]);
    fb_saver *s = open_saver(&r, WHOLE);
    world.device_first = 2, world.device_end = 4;
    world.device_fails = true;
    expect_failure(begin(&r, s, 1, &err), FB_DEVICE, &err, "the device is gone");
    expect_failure(end(s, &err), FB_DEVICE, &err, "the device is gone");
    assert_int_equal(access(checkpoint(1), F_OK), -1);
    reset();
    assert_int_equal(begin(&r, s, 2, &err), FB_OK);
    assert_int_equal(end(s, &err), FB_OK);
    close_run(&r, s);
}

/* 12 bytes a parameter, and headers; a saver that is freed ends what it began. */
static void twelve_bytes_a_parameter(void **unused)
{
    (void)unused;
    static const char *const files[] = { "model", "remainders", "adam_m", "adam_v" };
    reset();
    tiny_write(&model, 9);
    engine_rig r;
    fb_error err;
    open_run(&r, dtypes[1], clips[0]);
    fb_saver *s = open_saver(&r, 0);
    uint64_t size = 0, n_weight = r.session.manifest.n_weight, n_param = r.session.manifest.n_param;
    assert_int_equal(begin(&r, s, 1, &err), FB_OK);
    close_run(&r, s);
    assert_int_equal(fb_sums_verify(checkpoint(1), &err), FB_OK);
    for (size_t i = 0; i < FB_COUNT(files); i++) {
        char path[800];
        snprintf(path, sizeof path, "%s/%s.safetensors", checkpoint(1), files[i]);
        size += size_of(path);
    }
    assert_in_range(size, 12 * n_weight, 12 * n_weight + FB_COUNT(files) * n_param * 200);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, temp_dir_make, temp_dir_remove)
    const struct CMUnitTest tests[] = {
        TEST(training_goes_on_while_a_slow_disk_writes),
        TEST(room_for_all_needs_no_disk),
        TEST(a_full_buffer_holds_updates_up),
        TEST(a_failed_save_leaves_the_one_before),
        TEST(blocks_on_the_device_are_read_at_begin),
        TEST(a_device_that_fails_fails_the_save),
        TEST(twelve_bytes_a_parameter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
